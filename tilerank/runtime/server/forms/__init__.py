"""Request bodies of other APIs than OpenAI's chats, and their translation into chats (api.py)."""
