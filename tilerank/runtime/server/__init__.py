"""The OpenAI API over HTTP, in a process of its own beside the ranks."""
