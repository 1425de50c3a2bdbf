"""`tilerank batch`: the requests of a file, in OpenAI's batch format, answered without a server."""

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..errors import LaunchError
from ..logs import say
from ..offline.batch_files import BatchRequest, Results, parse_line, read_lines
from ..offline.engine import OfflineEngine
from ..offline.post import post
from ..offline.progress import Progress, command_interval_s
from ..text import count
from . import engine

RETRY_S = 1.0
"""Before a request is sent again for which this process has no memory, because of others."""


class _Usage(msgspec.Struct):
    """The tokens of an answer, under the names of several APIs."""

    completion_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0


class _Answer(msgspec.Struct):
    """The part of an answer that counts its tokens."""

    usage: _Usage | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", type=Path, metavar="IN", help="JSON lines with custom_id, method, url and body, as OpenAI's batches"
    )
    parser.add_argument(
        "output", type=Path, metavar="OUT", help="gets a line for each request; those that it has are not run again"
    )
    engine.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if engine.is_rank(args):
        return engine.run(args)
    engine.check_model(args)
    if args.output.exists() and args.output.samefile(args.input):
        raise LaunchError(f"{args.output} is IN and OUT; expected two files")
    total = sum(1 for _ in read_lines(args.input))
    with Results(args.output) as results:
        earlier = len(results.ids) + len(results.lines)
        if earlier >= total:
            say(f"tilerank: {args.output} has the results of all {count(total, 'request')}")
            return 0
        offline = OfflineEngine(args)
        try:
            batch = Batch(offline, results, total, earlier)
            batch.run(args.input)
        finally:
            offline.close()
    say(f"tilerank: {count(total, 'request')}: {batch.failed} without an answer, {earlier} from an earlier run")
    return 0


class Batch:
    """The requests of a file, `total` of them, and their results, `earlier` of which are there. failed: how many others
    have no answer."""

    def __init__(self, offline: OfflineEngine, results: Results, total: int, earlier: int) -> None:
        self.failed = 0
        self._engine = offline
        self._results = results
        self._progress = Progress(total, "requests", done=earlier, interval_s=command_interval_s())

    def run(self, path: Path) -> None:
        """Run the requests. Raises EngineError if the ranks end; the results so far are written."""
        with self._progress:
            self._engine.run(self._requests(path), self._answer, self._progress.show)

    def _requests(self, path: Path) -> Iterator[BatchRequest]:
        """Yield the requests that have no result, and write why others cannot run."""
        seen: set[str] = set()
        for number, line in read_lines(path):
            if number in self._results.lines:
                continue
            try:
                request = parse_line(line)
            except ValueError as e:
                self._fail(number, "invalid_line", f"{path} line {number}: {e}")
                continue
            if request.custom_id in seen:
                message = f"{path} line {number}: an earlier line has the custom_id {request.custom_id!r}"
                self._fail(number, "duplicate_custom_id", message)
                continue
            seen.add(request.custom_id)
            if request.custom_id not in self._results.ids:
                yield request

    def _fail(self, number: int, error: str, message: str) -> None:
        self._results.add_error(error, message, line=number)
        self.failed += 1
        self._progress.add(0)

    async def _answer(self, request: BatchRequest) -> None:
        status, body = await post(self._engine.app, request.url, bytes(request.body))
        while status == 503:
            self._engine.client.check_room()  # raises EngineGoneError: the request has its answer in a later run
            await asyncio.sleep(RETRY_S)
            status, body = await post(self._engine.app, request.url, bytes(request.body))
        tokens = 0
        try:
            usage = msgspec.json.decode(body, type=_Answer).usage or _Usage()
            tokens = usage.completion_tokens or usage.output_tokens or usage.total_tokens
        except (msgspec.DecodeError, UnicodeDecodeError):
            message = f"{request.url}: expected an answer in JSON; a batch takes no stream and no sound"
            self._results.add_error("unsupported_answer", message, custom_id=request.custom_id)
            self.failed += 1
        else:
            self._results.add_response(request.custom_id, status, body)
            self.failed += status != 200
        self._progress.add(tokens)
