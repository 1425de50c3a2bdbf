"""The web pages: the chat, the status page and the reference of the API."""
