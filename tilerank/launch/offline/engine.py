"""A model that this process uses without HTTP: its ranks are children, and an event loop in a thread sends requests.

The ranks end when this process ends, for whatever reason: the kernel kills the first of them with the thread that
started it, and it takes the others along.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from starlette.applications import Starlette

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.errors import EngineError, RequestError
from tilerank.runtime.server.app import make_app
from tilerank.runtime.server.chat.text_encoder import DirectTextEncoder
from tilerank.runtime.server.http.errors import ApiError
from tilerank.runtime.server.link.client import EngineClient
from tilerank.runtime.server.link.connection import EngineGoneError
from tilerank.runtime.server.link.handover import connections

from ..options import model
from ..processes.status import ErrorReport, status_inbox
from ..processes.supervisor import END_S, TERMINATE_S
from ..serving.grammar_trial import GrammarTrial
from ..serving.settings import server_settings
from .link import CONTROL, PARENT
from .window import run_all

MAX_QUEUED = 1 << 16
"""Choices that may wait in this process: requests are added a few at a time (window.py), each with its choices."""
WAIT_S = 0.1
"""Between two calls of what shows progress."""
T = TypeVar("T")


class OfflineEngine:
    """The ranks of the model that `args` name, which run until `close`.

    client, app: where requests run, and the APIs over it; for the coroutines that `run` gets. args: of a command that
    has the options of commands/engine.py.

    Raises LaunchError or ConfigError for what cannot be loaded, and EngineError if the ranks end while they load.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        model_dir = model.model_directory(args)
        tokenizer = Tokenizer(model.tokenizer_directory(args), args.chat_template)
        self._grammars = GrammarTrial(model_dir, tokenizer.model_dir)
        name = model_dir.resolve().name
        encoder = DirectTextEncoder(tokenizer)
        settings = server_settings(args, tokenizer, encoder, self._grammars.check, names=(name,), version="")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="tilerank", daemon=True)
        self._pid = os.getpid()
        self._connections: list[socket.socket] = []  # to the replicas
        self._process: subprocess.Popen[bytes] | None = None
        self._sentence = ""  # the error that the ranks have reported
        self._thread.start()
        try:
            self.client = EngineClient(MAX_QUEUED)
            self.app: Starlette = make_app(self.client, tokenizer, settings)
            self._call(self._start(args.argv))
        except BaseException:
            self.close()
            raise

    def run(
        self, items: Iterable[T], run: Callable[[T], Awaitable[None]], show: Callable[[], None] = lambda: None
    ) -> None:
        """Run a request for each item, as `run_all` does. Ctrl-C cancels them. show: is called in this thread until all
        are done.

        Raises RequestError for the first one that cannot run, and EngineError if the ranks have ended.
        """
        if self._loop.is_closed():
            raise EngineError("the model is closed; expected one that runs")
        try:
            self._call(run_all(self.client, items, run, len(self._connections)), show)
        except EngineGoneError as e:
            raise self._call(self._failure()) from e
        except ApiError as e:
            if e.code == "engine_gone":
                raise self._call(self._failure()) from e
            raise RequestError(str(e)) from e
        finally:
            show()

    def _call(self, coroutine: Coroutine[Any, Any, T], show: Callable[[], None] = lambda: None) -> T:
        """Run a coroutine in the thread of the engine and return its result."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not future.done():
                wait([future], WAIT_S)
                show()
            return future.result()
        finally:
            future.cancel()

    async def _failure(self) -> EngineError:
        """Return why the ranks have ended."""
        process = self._process
        assert process is not None
        code = await asyncio.to_thread(process.wait)
        for report in status_inbox().feed(await asyncio.to_thread(_read_all, self._status)):
            if isinstance(report, ErrorReport):
                self._sentence = report.sentence
        return EngineError(self._sentence or f"the ranks ended with status {code}; they have written why to stderr")

    def close(self) -> None:
        """End the ranks, and what runs in the thread. A process that was forked from this one leaves them alone."""
        if os.getpid() != self._pid or self._loop.is_closed():
            return
        if self._process is not None:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # the ranks have closed it already
                    connection.shutdown(socket.SHUT_RDWR)  # close() alone does nothing if another process has a copy
            self._end(self._process)
        for limited in self._grammars.pool.processes:
            limited.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the ranks have ended, which they do once their requests are cancelled."""
        if not self.client.all_ready.is_set():  # while they load, they do not look at the socket
            process.terminate()
        for signal_process in (process.terminate, process.kill):
            try:
                process.wait(END_S + TERMINATE_S)
            except subprocess.TimeoutExpired:
                signal_process()
        process.wait()
        os.close(self._status)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())

    async def _start(self, argv: list[str]) -> None:
        """Start the ranks with the command line `argv`, from this thread: they end with it. Returns when they are
        ready."""
        control, theirs = socket.socketpair()
        self._status, status = os.pipe()
        variables = {CONTROL: str(theirs.fileno()), PARENT: str(os.getpid()), "TILERANK_STATUS": str(status)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tilerank", *argv],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), status),
                start_new_session=True,  # Ctrl-C is for this process, which goes on without the request
            )
        finally:
            theirs.close()
            os.close(status)
        with control:
            self._connections = await asyncio.to_thread(lambda: list(connections(control)))
        self._attached = [
            asyncio.create_task(self.client.attach(replica, connection))
            for replica, connection in enumerate(self._connections)
        ]
        ready = asyncio.create_task(self.client.all_ready.wait())
        if self._attached:  # else the command has ended
            await asyncio.wait((ready, *self._attached), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            raise await self._failure()


def _read_all(fd: int) -> bytes:
    """Return what was written to a pipe whose writers have ended."""
    found = b""
    while data := os.read(fd, 1 << 16):
        found += data
    return found
