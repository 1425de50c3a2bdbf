"""The endpoints of the server: one file a topic."""
