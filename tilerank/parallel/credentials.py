"""The process and user at the other end of a unix socket, as the kernel reports them."""

import os
import socket
import struct

_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return (process, user) of the other end. The process is 0 if it is outside of this PID namespace."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def check_user(connection: socket.socket) -> None:
    """Refuse a peer of another user. An abstract socket has no permissions, so the kernel names the user."""
    if connection.family == socket.AF_UNIX:
        _, uid = peer_credentials(connection)
        if uid != os.geteuid():
            raise PermissionError(f"the process at the other end belongs to user {uid}, not {os.geteuid()}")
