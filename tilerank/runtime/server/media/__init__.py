"""Pictures and videos of requests: which may be read, how much of them, and from where."""
