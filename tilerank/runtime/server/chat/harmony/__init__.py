"""Answers of models that write harmony, messages in channels. loader/harmony/ has special tokens and prompts."""
