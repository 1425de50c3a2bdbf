"""Which web pages and names may reach the server: a browser on the same machine acts for any page that it shows.

A page of another site can send requests without a preflight (a form, text/plain), and with DNS rebinding it can read
the answers. Pages show themselves by the headers Host, Origin and Content-Type.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, error_response
from .form import FORM

FORM_PATHS = ("/v1/audio/transcriptions",)
"""Whose requests are forms. Browsers send forms for any page, so that only Origin protects these."""
ANY = "*"
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_-]+(?:\.[a-z0-9_-]+)*)\.?)(?::[0-9]{0,5})?")
"""The header Host in lower case: an IPv6 address in brackets, or a name or an IPv4 address, and perhaps a port."""


@dataclass(frozen=True)
class Access:
    """hosts: the names that Host may have beside those of loopback; None for any. origins: of the web pages of other
    sites that may send requests; "*" for any."""

    hosts: tuple[str, ...] | None = None
    origins: tuple[str, ...] = ()


class AccessMiddleware:
    """An ASGI application that wraps another and refuses what `access` does not allow, and ambiguous bodies."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        try:
            _check_framing(headers)
            self._check_host(headers.get(b"host"))
            if scope["method"] not in _SAFE_METHODS:
                self._check_origin(headers)
                _check_type(headers, FORM if scope["path"] in FORM_PATHS else "application/json")
        except ApiError as error:
            response = error_response(error)
            response.headers["Connection"] = "close"  # the body has not been read
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, host: str | None) -> None:
        """Refuse a name under which this server is not known. HTTP/1.0 needs none; browsers always send one."""
        allowed = self._access.hosts
        if allowed is None or host is None or ANY in allowed:
            return
        name = _name(host)
        if name is None or (not _is_loopback(name) and name not in allowed):
            raise ApiError(403, f"Host: expected a name of this server, found {host!r}; --allowed-hosts permits more.")

    def _check_origin(self, headers: Mapping[bytes, str]) -> None:
        """Refuse requests of web pages of other sites. Programs other than browsers send no Origin."""
        origin, allowed = headers.get(b"origin"), self._access.origins
        if origin is None or ANY in allowed or origin in allowed:
            return
        if origin.partition("://")[2] != headers.get(b"host"):
            raise ApiError(403, f"Origin: a web page of {origin} may not send requests; --cors-origins permits it.")


def _check_framing(headers: Mapping[bytes, str]) -> None:
    """Refuse a body whose end two headers give: a proxy may take the other one (request smuggling)."""
    if b"content-length" in headers and b"transfer-encoding" in headers:
        raise ApiError(400, "Expected Content-Length or Transfer-Encoding, found both.")


def _check_type(headers: Mapping[bytes, str], expected: str) -> None:
    """Refuse a body of another type than expected: JSON, for browsers send other types for any page."""
    if headers.get(b"content-length", "0") == "0" and b"transfer-encoding" not in headers:
        return
    kind = headers.get(b"content-type", "")
    if kind.partition(";")[0].strip().lower() != expected:
        found = repr(kind) if kind else "none"
        raise ApiError(415, f"Content-Type: expected {expected}, found {found}.")


def _name(host: str) -> str | None:
    """Return a Host header without its port, in lower case. None if it is not of the form that RFC 9110 gives."""
    found = _HOST.fullmatch(host.lower())
    return None if found is None else found[1] or found[2]


def _is_loopback(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
