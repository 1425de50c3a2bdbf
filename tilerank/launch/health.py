"""`python -m tilerank.launch.health PID`: succeeds if the HTTP process of the server with this process id answers.

The health check of the container image, where PID is 1. The command line of the server says where it listens.
"""

import argparse
import contextlib
import socket
import ssl
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

from .options.arguments import with_config

TIMEOUT_S = 5.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Listening(NamedTuple):
    """Where a server listens. address: of TCP, or the path of a unix socket. tls: it speaks HTTPS."""

    address: tuple[str, int] | str
    tls: bool


def listening(command: list[str]) -> Listening:
    """Return where a server listens that was started with a command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds")
    parser.add_argument("--ssl-certfile")
    args, _ = parser.parse_known_args(with_config(command[command.index("serve") :]))
    tcp = (_ANY_ADDRESS.get(args.host, args.host), args.port)
    return Listening(args.uds or tcp, args.ssl_certfile is not None)


def check(server: Listening) -> None:
    """Raise OSError unless the server answers.

    /version is answered without the ranks: those that load or restart are no reason to end the container.
    """
    if isinstance(server.address, str):
        stream = socket.socket(socket.AF_UNIX)
        stream.settimeout(TIMEOUT_S)
        stream.connect(server.address)
    else:
        stream = socket.create_connection(server.address, TIMEOUT_S)
    if server.tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate is for other names
        stream = context.wrap_socket(stream)
    connection = HTTPConnection("localhost")  # --allowed-hosts always has this name
    connection.sock = stream
    with contextlib.closing(connection):
        connection.request("GET", "/version")
        status = connection.getresponse().status
    if status != 200:
        raise OSError(f"/version: expected status 200, found {status}")


def main() -> None:
    command = Path(f"/proc/{sys.argv[1]}/cmdline").read_bytes().decode().split("\0")[:-1]
    check(listening(command))


if __name__ == "__main__":
    main()
