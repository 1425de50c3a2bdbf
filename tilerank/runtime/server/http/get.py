"""A GET request to a server that a client of ours has named: it may only reach public addresses.

The address that is checked is the one that is connected to, so that a name which resolves differently a moment later
gains nothing. Proxies of the environment are not used, and redirects are left to the caller.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from urllib.parse import SplitResult, quote

import httpcore2 as httpcore
from httpcore2 import AnyIOBackend, AsyncConnectionPool, AsyncNetworkStream

_PORTS = {"http": 80, "https": 443}
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
_REDIRECTS = (301, 302, 303, 307, 308)
_QUERY = "/?%:@!$&'()*+,;=~[]"


class GetError(Exception):
    """The request failed. The message completes the sentence "URL ... "."""


@dataclass(frozen=True)
class GetResult:
    """An answer with status 200 and its body, or one that redirects to the URL `location`."""

    body: bytes = b""
    location: str | None = None


def is_public(address: str) -> bool:
    """Is this IP address one of the public internet, and not of a tunnel to an address that cannot be seen?"""
    ip = ipaddress.ip_address(address)
    if ip.is_multicast or not ip.is_global:
        return False
    return ip.version == 4 or (ip in _PUBLIC_IPV6 and ip.sixtofour is None and ip.teredo is None)


async def get(url: SplitResult, on_bytes: Callable[[int], None], is_allowed: Callable[[str], bool]) -> GetResult:
    """Return the answer to a GET request for an http or https URL. Raises GetError.

    on_bytes: called with the number of bytes of each piece of the body, may raise. is_allowed: of an IP address; every
    address of the host must be.
    """
    assert url.hostname is not None
    addresses = await _resolve(url.hostname, url.port or _PORTS[url.scheme])
    if not all(map(is_allowed, addresses)):
        raise GetError("leads to an address that is not public")
    try:
        async with AsyncConnectionPool(_tls(), network_backend=_Backend(addresses)) as pool:
            return await _exchange(pool, url, on_bytes)
    except httpcore.ConnectError as e:
        if isinstance(e.__context__, ssl.SSLCertVerificationError):
            raise GetError(f"has a server whose certificate is not valid: {e.__context__.verify_message}") from e
        raise GetError("cannot be reached") from e
    except (httpcore.NetworkError, httpcore.ProtocolError) as e:
        raise GetError("could not be read: the server does not speak HTTP or has closed the connection") from e


async def _resolve(host: str, port: int) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise GetError("has a host that cannot be found") from e
    return [str(address[0]) for *_, address in found]


class _Backend(AnyIOBackend):
    """Connects to the first of `addresses` that answers, whatever the name of the host. TLS checks the name."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> AsyncNetworkStream:
        failure: httpcore.ConnectError | None = None
        for address in self._addresses:
            try:
                return await super().connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore.ConnectError as e:
                failure = e
        raise httpcore.ConnectError(f"{host} cannot be reached") from failure


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _exchange(pool: AsyncConnectionPool, url: SplitResult, on_bytes: Callable[[int], None]) -> GetResult:
    headers = [
        (b"Host", url.netloc.encode("idna")),
        (b"User-Agent", b"tilerank"),
        (b"Accept", b"image/*, video/*, audio/*"),
        (b"Accept-Encoding", b"identity"),
        (b"Connection", b"close"),
    ]
    query = f"?{quote(url.query, safe=_QUERY)}" if url.query else ""
    target = quote(url.path or "/", safe="/%:@!$&'()*+,;=~") + query
    assert url.hostname is not None
    address = httpcore.URL(scheme=url.scheme, host=url.hostname.encode("idna"), port=url.port, target=target)
    async with pool.stream("GET", address, headers=headers) as response:
        fields = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status in _REDIRECTS and b"location" in fields:
            return GetResult(location=fields[b"location"])
        if response.status != 200:
            raise GetError(f"was answered with status {response.status}")
        body = bytearray()
        async for piece in response.aiter_stream():
            body += piece
            on_bytes(len(piece))
        return GetResult(body=bytes(body))
