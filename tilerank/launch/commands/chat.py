"""`tilerank chat`: a conversation in the terminal, with a server that this command starts, or with one that runs."""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import mimetypes
import os
import sys
import urllib.parse
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..logs import say
from ..options import kv_dir, model
from ..options.arguments import number, whole_number
from ..ranks import start
from ..serving import media_options
from ..serving.own_server import own_server

HELP = """\
/system TEXT   the system prompt; the conversation begins anew
/image FILE    a picture for the next message; also /video and /audio
/reset         begin the conversation anew
/help          this list
/exit          end (also: Ctrl-D)
Ctrl-C stops an answer."""
MEDIA = ("/image", "/video", "/audio")
"""The commands that add a medium of the kind of their name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_own_arguments(parser)
    media_options.add_arguments(parser)
    model.add_arguments(parser)
    kv_dir.add_arguments(parser)
    start.add_arguments(parser)


def _add_own_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that `tilerank serve` does not have."""
    chat = parser.add_argument_group("chat")
    chat.add_argument(
        "--url", metavar="URL", help="a server that runs, such as http://127.0.0.1:8000 (default: start one)"
    )
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    chat.add_argument("--max-new-tokens", type=whole_number(1), metavar="N", help="longest answer")
    chat.add_argument("--temperature", type=number(0.0, 2.0), metavar="T", help="0: most likely token")
    chat.add_argument(
        "--use-audio-in-video",
        action="store_true",
        default=None,
        help="the model hears the sound of videos as well (Qwen3-Omni)",
    )


def run(args: argparse.Namespace) -> int:
    options = {
        "max_completion_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "use_audio_in_video": args.use_audio_in_video,
    }
    with _server(args) as address:
        chat = Chat(address, {name: value for name, value in options.items() if value is not None}, args.system)
        chat.model()  # a server that does not answer ends the command
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  input() edits lines and has a history, once this is imported
            say(f"tilerank: {address} answers; /help lists the commands")
        return _converse(chat)


def _converse(chat: Chat) -> int:
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            continue
        command, _, rest = line.partition(" ")
        try:
            if command in ("/exit", "/quit"):
                return 0
            if line:
                _obey(chat, command, rest.strip()) if line.startswith("/") else chat.ask(line)
        except LaunchError as e:
            say(f"tilerank: {e}")


def _obey(chat: Chat, command: str, rest: str) -> None:
    if command == "/reset":
        chat.reset()
    elif command == "/system":
        chat.reset(rest)
    elif command in MEDIA:
        chat.add_medium(command.removeprefix("/"), Path(rest))
    else:
        print(HELP)


class Chat:
    """A conversation. Every question sends all of it, and the server finds what it has seen in its prefix cache."""

    def __init__(self, address: str, options: dict[str, Any], system: str | None) -> None:
        self._url = urllib.parse.urlsplit(address)
        self._path = self._url.path.rstrip("/").removesuffix("/v1")
        self._options = options
        self.reset(system or "")

    def reset(self, system: str | None = None) -> None:
        """Forget the conversation; the system prompt becomes `system`, or stays as it is without one."""
        if system is not None:
            self._system = system
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": self._system}] if self._system else []
        self._media: list[dict[str, Any]] = []

    def add_medium(self, kind: str, path: Path) -> None:
        """Send a picture, video or sound with the next question. LaunchError if the file cannot be read."""
        try:
            data = base64.b64encode(path.read_bytes()).decode()
        except OSError as e:
            raise LaunchError(f"{path} cannot be read: {e.strerror}") from e
        url = f"data:{mimetypes.guess_type(path)[0] or f'{kind}/unknown'};base64,{data}"
        self._media.append({"type": f"{kind}_url", f"{kind}_url": {"url": url}})

    def ask(self, text: str) -> None:
        """Print the answer as it comes. Ctrl-C stops it; what came of it stays in the conversation."""
        content = [*self._media, {"type": "text", "text": text}] if self._media else text
        messages = [*self._messages, {"role": "user", "content": content}]
        answer = ""
        try:
            with contextlib.closing(self._stream(messages)) as deltas:
                for delta in deltas:
                    answer += delta
                    print(delta, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        print()
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        self._media = []

    def _stream(self, messages: list[dict[str, Any]]) -> Generator[str]:
        """Yield the text of the answer, and of the reasoning before it. LaunchError with the server's own sentence."""
        body = json.dumps({"model": self.model(), "messages": messages, "stream": True, **self._options})
        with self._request("POST", "/v1/chat/completions", body) as response:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise LaunchError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["delta"].get("reasoning_content") or choice["delta"].get("content") or ""

    def model(self) -> str:
        """Return the name of the model. LaunchError if the server does not answer."""
        with self._request("GET", "/v1/models") as response:
            return str(json.load(response)["data"][0]["id"])

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        https = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("TILERANK_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        with contextlib.closing(kind(self._url.netloc)) as connection:
            try:
                connection.request(method, self._path + path, body, headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise LaunchError(_sentence(response.read()))
                yield response
            except (OSError, http.client.HTTPException) as e:
                raise LaunchError(f"the server at {self._url.geturl()} does not answer: {e}") from e


def _sentence(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


def _server(args: argparse.Namespace) -> contextlib.AbstractContextManager[str]:
    """Return the address of the server: --url, or one that runs until the conversation ends."""
    if args.url is not None:
        return contextlib.nullcontext(str(args.url))
    model.model_directory(args)  # one model is given
    return own_server(_for_serve(args.argv[1:]), shown="error")


def _for_serve(argv: Sequence[str]) -> list[str]:
    """Return the arguments of `tilerank chat` without those that `tilerank serve` does not have."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_own_arguments(own)
    return own.parse_known_args(argv)[1]
