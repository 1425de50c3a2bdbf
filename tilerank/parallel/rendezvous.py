"""Where ranks meet before they are connected: each connects to rank 0, and they exchange values through it.

On one host rank 0 listens at a unix socket with an abstract name, where the kernel names the user of each process;
between hosts, at a TCP port, where every process proves that it has the ranks' secret (see credentials.py). It stops
listening once all are there, and the connections end once all are ready.
"""

import contextlib
import datetime
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from tilerank.kernels import core

from .credentials import TAKEN, authenticate, receive_exactly
from .errors import GroupError
from .handshakes import PendingHandshakes, refuse
from .hosts import PeerInfo, host_id, route_to

logger = logging.getLogger(__name__)

RENDEZVOUS, DATA, WATCH = range(3)  # what a connection is for
ANSWER_S = 2.0  # the answer of a rank 0 whose deadline has passed may take so long
RETRY_S = 0.05
LENGTH = struct.Struct("<I")
LONGEST = 1 << 20  # bytes of one message


@dataclass(frozen=True)
class Membership:
    """The rank of this process, and where the ranks meet.

    `host`, `port`: the address of rank 0; "@name" is a unix socket with that abstract name, for ranks on one host. Rank
    0 passes its listening socket as `listen_fd`. With `agent`, it is the address of the TCPStore of torchrun's agent,
    through which rank 0 sends its port. `secret`: shared by all ranks and by no other process; may be
    empty on one host only. `timeout_s` is the deadline of every wait in a collective, and of joining unless
    `join_timeout_s` is given. Ranks that have not come after `notice_s` are named in a warning; None: they are not.
    `attempt` counts restarts of the group if the agent's store outlives it.
    """

    rank: int
    size: int
    host: str
    port: int
    listen_fd: int | None = None
    timeout_s: float = 60.0
    attempt: int = 0
    join_timeout_s: float | None = None
    notice_s: float | None = None
    secret: str = ""
    agent: bool = False

    @property
    def joining_s(self) -> float:
        """Return the seconds that joining may take."""
        return self.timeout_s if self.join_timeout_s is None else self.join_timeout_s

    @property
    def local(self) -> bool:
        return self.host.startswith("@")

    @property
    def where(self) -> str:
        return f"socket {self.host}" if self.local else f"{self.host}:{self.port}"


class Rendezvous:
    """This rank's part in the rendezvous.

    `peers`: what each rank publishes, this one included, in rank order. `secret`: for further connections.

    GroupError names the ranks that are missing or that contradict.
    """

    def __init__(self, m: Membership) -> None:
        if not m.local and not m.secret:
            raise GroupError(
                f"rank {m.rank} has no secret, without which ranks on several hosts cannot trust each other"
            )
        if m.rank == 0 and m.listen_fd is None:
            raise GroupError("rank 0 has no socket at which the other ranks could meet it")
        self.membership = m
        self._deadline = time.monotonic() + m.joining_s
        self._secret_given = m.secret.encode()
        self._values: dict[str, bytes] = {}  # on rank 0
        self._changed = threading.Condition()
        self._connections: dict[int, socket.socket] = {}  # to all others on rank 0, to rank 0 elsewhere
        self._unreached = "no answer yet"  # why rank 0 has not been reached
        try:
            with self._notice():
                self.peers, self.secret = self._collect_peers() if m.rank == 0 else self._receive_peers()
        except BaseException:
            self.close()
            raise
        if m.rank == 0:
            for connection in self._connections.values():
                threading.Thread(target=self._serve, args=[connection], name="tilerank-rendezvous", daemon=True).start()

    @contextlib.contextmanager
    def _notice(self) -> Iterator[None]:
        """Warn of missing ranks in the meantime, after `notice_s`."""
        if self.membership.notice_s is None:
            yield
            return
        timer = threading.Timer(self.membership.notice_s, self._warn_of_missing)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _warn_of_missing(self) -> None:
        m = self.membership
        if m.rank == 0:
            missing = sorted(set(range(1, m.size)) - set(self._connections))
            logger.warning("%s of %d not here yet; waiting %g s", _named(missing), m.size, m.joining_s)
        elif 0 not in self._connections:
            text = "rank %d has not reached rank 0 at %s yet: %s; trying for %g s"
            logger.warning(text, m.rank, m.where, self._unreached, m.joining_s)

    def remaining(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def set(self, key: str, value: bytes) -> None:
        if self.membership.rank == 0:
            with self._changed:
                self._values[key] = value
                self._changed.notify_all()
        else:
            self._ask({"set": key, "value": value.hex()})

    def get(self, key: str) -> bytes:
        """Return the value of `key` once a rank has set it."""
        if self.membership.rank != 0:
            return bytes.fromhex(self._ask({"get": key}))
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, self.remaining()):
                raise GroupError(f"no rank has reached the point `{key}` in time")
            return self._values[key]

    def has(self, key: str) -> bool:
        """Return whether a rank has set `key`. For rank 0."""
        with self._changed:
            return key in self._values

    def close(self) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # the other end has closed it
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
            connection.close()
        self._connections.clear()

    def _collect_peers(self) -> tuple[list[PeerInfo], bytes]:
        """On rank 0: wait for all others, and send each what all publish."""
        m = self.membership
        with socket.socket(fileno=m.listen_fd) as listener:
            if m.agent:
                port = str(listener.getsockname()[1])
                self._with_agent(lambda store: store.set(f"tilerank/{m.attempt}/port", port))
            try:
                peers = self._accept_all(listener)
            except GroupError as error:
                self._send_to_all({"error": str(error)})
                raise
        # Between hosts a secret of its own would be readable on the way.
        own = b"" if m.secret else secrets.token_bytes(32)
        self._send_to_all({"peers": [asdict(info) for info in peers], "secret": own.hex()})
        return peers, own or self._secret_given

    def _accept_all(self, listener: socket.socket) -> list[PeerInfo]:
        m = self.membership
        peers = {0: self._own_info()}
        with PendingHandshakes(listener, self._secret_given) as handshakes:
            while missing := set(range(m.size)) - set(peers):
                if time.monotonic() >= self._deadline:
                    text = f"{_named(sorted(missing))} of {m.size} did not join within {m.joining_s:g} s"
                    wrong = "; a process with another TILERANK_SECRET was refused" if handshakes.refused_secret else ""
                    raise GroupError(text + wrong)
                for arrived in handshakes.completed(self.remaining()):
                    if arrived.kind != RENDEZVOUS or arrived.rank in peers:
                        why = f"two processes say that they are rank {arrived.rank} of {m.size}"
                        refuse(arrived.connection, why, TAKEN)
                    elif arrived.admit():
                        arrived.connection.settimeout(self.remaining())
                        self._connections[arrived.rank] = arrived.connection
                        peers[arrived.rank] = self._info_of(arrived.rank)
        return [peers[rank] for rank in range(m.size)]

    def _info_of(self, rank: int) -> PeerInfo:
        try:
            info = PeerInfo(**_receive(self._connections[rank]))
        except OSError as error:
            raise GroupError(f"rank {rank} ended before it had joined: {error.strerror or error}") from error
        if info.size != self.membership.size:
            raise GroupError(f"rank 0 expects {self.membership.size} ranks, but rank {rank} expects {info.size}")
        return info

    def _send_to_all(self, message: Mapping[str, Any]) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # it is gone; joining or the watch finds out which rank that was
                _send(connection, message)

    def _serve(self, connection: socket.socket) -> None:
        """On rank 0: answer the requests of one rank until it leaves."""
        connection.settimeout(None)
        with contextlib.suppress(OSError):
            while True:
                request = _receive(connection)
                if "set" in request:
                    _send(connection, {"value": ""})  # before: the last value lets rank 0 close the rendezvous
                    self.set(request["set"], bytes.fromhex(request["value"]))
                    continue
                try:
                    _send(connection, {"value": self.get(request["get"]).hex()})
                except GroupError as error:
                    _send(connection, {"error": str(error)})

    def _receive_peers(self) -> tuple[list[PeerInfo], bytes]:
        """On other ranks: find rank 0, and return what it sends once all are there."""
        connection = self._connections[0] = self._reach_rank_0()
        # Rank 0 may have started later: its deadline passes first, and its sentence names the ranks that are missing.
        self._deadline = time.monotonic() + self.membership.joining_s
        answer = self._exchange(asdict(self._own_info()))
        own = bytes.fromhex(answer["secret"])
        if own and connection.family != socket.AF_UNIX:
            raise GroupError("rank 0 has sent a secret over the network")
        return [PeerInfo(**info) for info in answer["peers"]], own or self._secret_given

    def _reach_rank_0(self) -> socket.socket:
        m = self.membership
        port = int(self._with_agent(lambda store: store.get(f"tilerank/{m.attempt}/port"))) if m.agent else m.port
        while time.monotonic() < self._deadline:
            connection = None
            try:
                connection = self._connect(port)
                connection.settimeout(self.remaining())
                authenticate(connection, m.rank, RENDEZVOUS, self._secret_given, 0)
                return connection
            except OSError as error:
                self._unreached = str(error.strerror or error)
                if connection is not None:
                    connection.close()
                if isinstance(error, PermissionError):
                    break
                time.sleep(RETRY_S)
            except GroupError:
                if connection is not None:
                    connection.close()
                raise
        why = self._unreached
        raise GroupError(f"rank {m.rank} did not reach rank 0 at {m.where} within {m.joining_s:g} s: {why}")

    def _connect(self, port: int) -> socket.socket:
        if not self.membership.local:
            return socket.create_connection((self.membership.host, port), self.remaining())
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect("\0" + self.membership.host[1:])
        except OSError:
            connection.close()
            raise
        return connection

    def _own_info(self) -> PeerInfo:
        m = self.membership
        lanes = 0 if core.isa() == "reference" else core.num_threads()
        address = "127.0.0.1" if m.local else route_to(m.host, m.port)
        return PeerInfo(m.rank, m.size, host_id(), address, lanes, core.isa())

    def _ask(self, request: Mapping[str, Any]) -> str:
        return str(self._exchange(request)["value"])

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        m, connection = self.membership, self._connections[0]
        try:
            connection.settimeout(self.remaining() + ANSWER_S)
            _send(connection, request)
            answer = _receive(connection)
        except TimeoutError as error:
            why = f"did not answer rank {m.rank} within {m.joining_s:g} s: stopped, stuck or far too slow"
            raise GroupError(f"rank 0 at {m.where} {why}") from error
        except OSError as error:
            raise GroupError(f"rank 0 at {m.where} ended before rank {m.rank} had joined") from error
        if "error" in answer:
            raise GroupError(answer["error"])
        return answer

    def _with_agent(self, call: Callable[[TCPStore], Any]) -> Any:
        """Return what `call` returns for the store of torchrun's agent. It is open, so nothing in it is trusted."""
        m, done = self.membership, Future[Any]()
        timeout = datetime.timedelta(seconds=m.joining_s)

        def run() -> None:
            try:
                done.set_result(
                    call(TCPStore(m.host, m.port, is_master=False, wait_for_workers=False, timeout=timeout))
                )
            except BaseException as error:  # noqa: BLE001
                done.set_exception(error)

        # torch's client has no deadline of its own for answers of a stopped server.
        threading.Thread(target=run, name="tilerank-agent", daemon=True).start()
        try:
            return done.result(self.remaining())
        except (RuntimeError, TimeoutError) as error:
            raise GroupError(
                f"rank {m.rank} did not get rank 0's port from torchrun's store at {m.where} within {m.joining_s:g} s"
            ) from error


class RendezvousStore(Store):
    """A store over the rendezvous, for gloo, which calls these three methods."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        self._rendezvous = rendezvous

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch passes bytes
        self._rendezvous.set(f"gloo/{key}", value)

    def get(self, key: str) -> bytes:
        return self._rendezvous.get(f"gloo/{key}")

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> dict[str, Any]:
    (length,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size))
    if length > LONGEST:
        raise ConnectionAbortedError(f"a message of {length} bytes was announced, {LONGEST} are allowed")
    return dict(json.loads(receive_exactly(connection, length)))
