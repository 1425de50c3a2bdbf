"""What a process passes to the ranks that it starts for itself, in their environment, and their connections to it."""

import os
import socket

from tilerank.runtime.server.link.handover import send_connection

CONTROL = "TILERANK_OFFLINE_CONTROL"
"""The descriptor of the socket over which the process gets its connections to the replicas; in the environment of all
ranks."""
LINK = "TILERANK_LINK"
"""The descriptor of the connection over which a rank 0 gets requests; in its environment."""
PARENT = "TILERANK_PARENT"
"""The pid of the process, with which the ranks end."""


def connect_replicas(replicas: int) -> list[int]:
    """Send the process a connection to each replica, and no more later. Returns the descriptors of the replicas."""
    ends = []
    with socket.socket(fileno=int(os.environ[CONTROL])) as control:
        for replica in range(replicas):
            theirs, ours = socket.socketpair()
            with theirs:
                send_connection(control, theirs, replica)
            ends.append(ours.detach())
    return ends
