"""What a process passes to the ranks that it starts for itself, in their environment."""

LINK = "TILERANK_LINK"
"""The descriptor of the socket over which rank 0 gets requests; in the environment of every rank."""
PARENT = "TILERANK_PARENT"
"""The pid of the process at the other end, with which the ranks end."""
