"""A GET request to a server that a client of ours has named: it may only reach public addresses.

The address that is checked is the one that is connected to, so that a name which resolves differently a moment later
gains nothing. Proxies of the environment are not used, and redirects are left to the caller.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from urllib.parse import SplitResult, quote

import h11

HEAD_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_PORTS = {"http": 80, "https": 443}
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
_REDIRECTS = (301, 302, 303, 307, 308)


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
    port = url.port or _PORTS[url.scheme]
    addresses = await _resolve(url.hostname, port)
    if not all(map(is_allowed, addresses)):
        raise GetError("leads to an address that is not public")
    reader, writer = await _connect(url, addresses, port)
    with closing(writer):
        try:
            return await _exchange(url, reader, writer, on_bytes)
        except (h11.RemoteProtocolError, OSError) as e:
            raise GetError("could not be read: the server does not speak HTTP or has closed the connection") from e


async def _resolve(host: str, port: int) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise GetError("has a host that cannot be found") from e
    return [str(address[0]) for *_, address in found]


async def _connect(
    url: SplitResult, addresses: Sequence[str], port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context, name = (_tls(), url.hostname) if url.scheme == "https" else (None, None)
    failure: OSError | None = None
    for address in addresses:
        try:
            return await asyncio.open_connection(address, port, ssl=context, server_hostname=name)
        except ssl.SSLCertVerificationError as e:
            raise GetError(f"has a server whose certificate is not valid: {e.verify_message}") from e
        except OSError as e:
            failure = e
    raise GetError("cannot be reached") from failure


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _exchange(
    url: SplitResult, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_bytes: Callable[[int], None]
) -> GetResult:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
    headers = [
        ("Host", url.netloc.encode("idna").decode()),
        ("User-Agent", "tilerank"),
        ("Accept", "image/*, video/*, audio/*"),
        ("Accept-Encoding", "identity"),
        ("Connection", "close"),
    ]
    target = quote(url.path or "/", safe="/%:@!$&'()*+,;=~") + (
        f"?{quote(url.query, safe=_QUERY)}" if url.query else ""
    )
    writer.write(connection.send(h11.Request(method="GET", target=target, headers=headers)) or b"")
    writer.write(connection.send(h11.EndOfMessage()) or b"")
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            fields = {name: value.decode("latin-1") for name, value in event.headers}
            if event.status_code in _REDIRECTS and b"location" in fields:
                return GetResult(location=fields[b"location"])
            if event.status_code != 200:
                raise GetError(f"was answered with status {event.status_code}")
        elif isinstance(event, h11.Data):
            body += event.data
            on_bytes(len(event.data))
        elif isinstance(event, h11.EndOfMessage):
            return GetResult(body=bytes(body))


_QUERY = "/?%:@!$&'()*+,;=~[]"
