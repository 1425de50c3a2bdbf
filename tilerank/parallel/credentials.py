"""The process and user at the other end of a unix socket, as the kernel reports them."""

import socket
import struct

_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return (process, user) of the other end. The process is 0 if it is outside of this PID namespace."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid
