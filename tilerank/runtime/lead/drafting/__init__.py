"""Drafts of next tokens: their sources, and how many of them a step checks."""
