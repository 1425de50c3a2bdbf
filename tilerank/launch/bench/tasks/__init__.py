"""Requests of `tilerank bench speculative`, whose answers repeat more or less of their prompts."""
