"""HTTP without chats: which requests are let in, bodies and forms within bounds, errors, and URLs that are fetched."""
