"""Chats, to which every API translates its requests, and their answers: text, reasoning and tool calls."""
