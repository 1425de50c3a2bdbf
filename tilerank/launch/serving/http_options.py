"""The options of the HTTP server: where it listens, whom it answers, and how it logs."""

from __future__ import annotations

import argparse
import os
import ssl
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LaunchError
from ..options.arguments import ModelAfterNames, path_prefix, seconds, whole_number
from . import tracing
from .listening import TcpAddress, UnixAddress

if TYPE_CHECKING:
    import socket

    from tilerank.runtime.server.http.access import Access

    from .listening import Address

API_KEY = "TILERANK_API_KEY"
DRAIN_S = 600.0
"""Longest wait for answers that are under way once the server is to stop; a second signal ends it at once."""
TERMINAL_DRAIN_S = 30.0
"""DRAIN_S for a server in a terminal, where a person waits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    http = parser.add_argument_group("HTTP")
    _add_address(http)
    _add_access(http)
    http.add_argument(
        "--served-model-name",
        nargs="+",
        action=ModelAfterNames,
        metavar="NAME",
        help="what clients may call it; answers have the first name (default: the directory's name)",
    )
    http.add_argument(
        "--max-queued-requests",
        type=whole_number(1),
        default=1024,
        metavar="N",
        help="choices of requests that may wait; while as many do, further requests get 503 (default: 1024)",
    )
    http.add_argument(
        "--strict-fields",
        action="store_true",
        help="refuse unknown fields and tools of requests (default: ignore them, and name them in a header)",
    )
    http.add_argument(
        "--drain-timeout",
        type=seconds,
        metavar="S",
        help="longest wait for answers that are under way when the server is told to stop "
        f"(default: {TERMINAL_DRAIN_S:g} on a terminal, {DRAIN_S:g} elsewhere); told again, it ends at once",
    )
    http.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="of the log, which has a line for each request: text, or a JSON object on each line (default: text)",
    )


def _add_address(http: argparse._ActionsContainer) -> None:
    http.add_argument(
        "--host", default="127.0.0.1", metavar="ADDR", help="address to listen on (default: this machine only)"
    )
    http.add_argument(
        "--port", type=whole_number(0, 65535), default=8000, metavar="N", help="0: any free one (default: 8000)"
    )
    http.add_argument(
        "--uds", type=Path, metavar="PATH", help="listen on a unix socket at this path, in place of --host and --port"
    )
    http.add_argument(
        "--root-path",
        type=path_prefix,
        default="",
        metavar="PATH",
        help="answer below this path as well, such as /llm behind a proxy that passes paths on as they are",
    )
    http.add_argument(
        "--ssl-certfile", type=Path, metavar="FILE", help="speak HTTPS with this certificate and its chain, in PEM"
    )
    http.add_argument(
        "--ssl-keyfile",
        type=Path,
        metavar="FILE",
        help="its private key, without a password (default: in the same file)",
    )


def _add_access(http: argparse._ActionsContainer) -> None:
    http.add_argument(
        "--api-key", metavar="KEY", help=f"that clients must show (better in {API_KEY}: others see options)"
    )
    http.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="with a key on each line, any of which clients may show; # begins a comment line",
    )
    http.add_argument("--metrics-no-key", action="store_true", help="/metrics needs no key, as Prometheus has none")
    http.add_argument(
        "--allowed-hosts",
        nargs="+",
        action=ModelAfterNames,
        metavar="NAME",
        help="names that the Host header of requests may have, beside those of loopback (default: on a loopback --host "
        "none, else any)",
    )
    http.add_argument(
        "--cors-origins",
        nargs="+",
        action=ModelAfterNames,
        metavar="ORIGIN",
        help="web pages of other sites that may use the server, such as https://chat.example.org, or * (default: none)",
    )


def check(args: argparse.Namespace) -> None:
    """Raise LaunchError for files of keys and certificates that cannot be used, and for spans that cannot be sent."""
    api_keys(args)
    tls(args)
    tracing.check()


def address(args: argparse.Namespace) -> Address:
    """Return where the server listens."""
    if args.uds is not None:
        return UnixAddress(args.uds)
    return TcpAddress(args.host, args.port, "http" if args.ssl_certfile is None else "https")


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys of which requests must have one; none if all requests are answered. Raises LaunchError."""
    given = args.api_key or os.environ.get(API_KEY)
    of_file = () if args.api_key_file is None else _read_keys(args.api_key_file)
    return (*([given] if given else []), *of_file)


def _read_keys(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as e:
        raise LaunchError(f"--api-key-file: {file} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise LaunchError(f"--api-key-file: {file}: expected UTF-8, found a byte {e.object[e.start]:#04x}") from e
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:  # a server whose file of keys is empty must not be open to all
        raise LaunchError(f"--api-key-file: {file}: expected a key on each line, found none")
    return keys


def tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    """Return the settings of TLS; None without a certificate. Raises LaunchError."""
    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None:
            raise LaunchError(f"--ssl-keyfile {args.ssl_keyfile} needs --ssl-certfile")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    files = f"--ssl-certfile {args.ssl_certfile}"
    if args.ssl_keyfile is not None:
        files += f", --ssl-keyfile {args.ssl_keyfile}"
    try:
        # The library would ask a terminal for the password of a key.
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password=lambda: "")
    except ssl.SSLError as e:
        reason = f": {e.reason.lower().replace('_', ' ')}" if e.reason else ""
        raise LaunchError(f"{files}: expected a certificate and its key in PEM, without a password{reason}") from e
    except OSError as e:
        raise LaunchError(f"{files} cannot be read: {e.strerror}") from e
    return context


def access(args: argparse.Namespace, listener: socket.socket) -> Access:
    """Return whom the server answers. On loopback a name other than its own is that of an attacker's page."""
    import socket

    from tilerank.runtime.server.http.access import Access

    # No web page can connect to a unix socket.
    is_loopback = listener.family != socket.AF_UNIX and ip_address(listener.getsockname()[0]).is_loopback
    hosts = args.allowed_hosts or (() if is_loopback else None)
    names = None if hosts is None else tuple(name.lower() for name in hosts)
    return Access(names, tuple(args.cors_origins or ()))
