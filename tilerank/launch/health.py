"""`python -m tilerank.launch.health PID`: succeeds if the HTTP process of the server with this process id answers.

The health check of the container image, where PID is 1. The command line of the server says where it listens.
"""

import argparse
import sys
from pathlib import Path
from urllib.request import urlopen

from .options.arguments import with_config

TIMEOUT_S = 5.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def version_url(command: list[str]) -> str:
    """Return the URL of /version of a server that was started with a command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args, _ = parser.parse_known_args(with_config(command[command.index("serve") :]))
    host = _ANY_ADDRESS.get(args.host, args.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{args.port}/version"


def main() -> None:
    command = Path(f"/proc/{sys.argv[1]}/cmdline").read_bytes().decode().split("\0")[:-1]
    # /version is answered without the ranks: those that load or restart are no reason to end the container.
    urlopen(version_url(command), timeout=TIMEOUT_S).close()


if __name__ == "__main__":
    main()
