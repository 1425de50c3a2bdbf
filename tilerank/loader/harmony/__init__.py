"""Harmony, the chat format of gpt-oss: its special tokens, and what turns a conversation into its messages."""
