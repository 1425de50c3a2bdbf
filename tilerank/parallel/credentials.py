"""Who is at the other end of a socket: its user on the same host, and proofs that it has the ranks' secret.

A proof is an HMAC over a nonce of each side, so none can be used twice. Labels keep the proof of one side from serving
as that of the other.
"""

import hashlib
import hmac
import os
import secrets
import socket
import struct

from .errors import GroupError

NONCE = 32
PROOF = 32
HELLO = struct.Struct(f"<II{NONCE}s{PROOF}s")
"""What a rank sends when it connects: its number, the kind of the connection, its nonce, its proof."""
ACCEPTED, OTHER_SECRET, TAKEN = range(3)
REPLY = struct.Struct(f"<I{PROOF}s")
"""The answer to a hello: ACCEPTED and a proof, or why not."""

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


def authenticate(connection: socket.socket, rank: int, kind: int, secret: bytes, peer: int) -> None:
    """Prove on a new connection to rank `peer` that this is `rank`, and check that `peer` has the secret, too.

    `kind`: what the connection is for. GroupError if either proof fails, OSError if the connection does.
    """
    check_user(connection)
    theirs, mine = receive_exactly(connection, NONCE), secrets.token_bytes(NONCE)
    connection.sendall(HELLO.pack(rank, kind, mine, _proof(secret, b"client", rank, kind, theirs, mine)))
    code, proof = REPLY.unpack(receive_exactly(connection, REPLY.size))
    if code == TAKEN:
        raise GroupError(f"rank {peer} has refused rank {rank}: two processes say that they are rank {rank}")
    if code != ACCEPTED or not hmac.compare_digest(proof, _proof(secret, b"server", rank, kind, theirs, mine)):
        raise GroupError(f"rank {peer} has another TILERANK_SECRET than rank {rank}; all ranks need the same")


def accepts(hello: bytes, nonce: bytes, secret: bytes) -> tuple[int, int, bytes] | None:
    """Return (rank, kind, reply) for a hello that answers `nonce`, or None without the right proof."""
    rank, kind, theirs, proof = HELLO.unpack(hello)
    if not hmac.compare_digest(proof, _proof(secret, b"client", rank, kind, nonce, theirs)):
        return None
    return rank, kind, REPLY.pack(ACCEPTED, _proof(secret, b"server", rank, kind, nonce, theirs))


def refusal(code: int) -> bytes:
    return REPLY.pack(code, bytes(PROOF))


def _proof(secret: bytes, label: bytes, rank: int, kind: int, nonce: bytes, answer: bytes) -> bytes:
    said = b"".join([b"tilerank ", label, struct.pack("<II", rank, kind), nonce, answer])
    return hmac.digest(secret, said, hashlib.sha256)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes. ConnectionResetError if the other end closes before."""
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("it closed the connection")
        data += part
    return bytes(data)
