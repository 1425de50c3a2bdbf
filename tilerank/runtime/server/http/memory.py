"""Bounds the memory of this process that requests take before they run: their bodies, and what is made of them."""

import asyncio
from collections import deque

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError
from .json_values import JsonValues

WAIT_S = 10.0
"""A request that waits longer for memory that others hold is refused."""
SMALL = 1 << 20
"""Bytes of what is made of a small body: 1,000 strings or 256 KiB of text, and a few ms of the event loop."""
MAX_READ = 96 << 20
"""Bytes of all bodies that are being read or wait to be parsed."""
MAX_SMALL = 96 << 20
"""Bytes of what is made of small bodies, until their requests have a prompt."""
MAX_LARGE = 288 << 20
"""Bytes of what is made of large bodies and of conversations that are continued, until there is a prompt."""
MAX_MEDIA_READ = 512 << 20
"""MAX_READ for a model that takes media, which bodies hold in base64."""
MAX_MEDIA_LARGE = 1 << 30
"""MAX_LARGE for a model that takes media."""
MAX_ANSWERS = 192 << 20
"""Bytes of all answers that are sent whole, until they are complete."""
PROMPTS = 2
"""Large requests, of a model that reads text, that become prompts at the same time."""
_STRUCTURE = 1 << 10
"""Bytes as which a string, a key, an object or a list counts: four times those that it takes, because the garbage
collector visits all that are held, and a million of them keep it busy for a third of a second."""
_NUMBER = 48
"""Bytes of a number and of its place in a list, twice."""
_SCOPE = "tilerank.memory"


def parsed_bytes(data: bytes | bytearray, values: JsonValues) -> int:
    """Return the bytes of what is made of a JSON text with these values."""
    # A character takes up to 4 bytes in a string, and up to 3 for each of UTF-8 in JSON for the chat template.
    is_plain = data.isascii() and b"\\u" not in data
    return (4 if is_plain else 7) * len(data) + _STRUCTURE * values.structures + _NUMBER * values.numbers


class MemoryBudget:
    """At most `max_bytes` that requests hold together. One that takes more alone waits until no other holds any."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, nbytes: int) -> None:
        """Take bytes now. Raises ApiError with status 503 if they are not free."""
        if not self._has_room(nbytes):
            raise _overloaded()
        self._held += nbytes

    async def wait(self, nbytes: int) -> None:
        """Take bytes, in order of arrival. Raises ApiError with status 503 if they are not free within WAIT_S."""
        if not self._waiting and self._has_room(nbytes):
            self._held += nbytes
            return
        waiting = (nbytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        has_taken = False
        try:
            async with asyncio.timeout(WAIT_S):
                await waiting[1]
            has_taken = True
        except TimeoutError as e:
            raise _overloaded() from e
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._advance()
            elif not has_taken:  # cancelled after its turn had come
                self.give(nbytes)

    def give(self, nbytes: int) -> None:
        """Give bytes back."""
        self._held -= nbytes
        self._advance()

    def _advance(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            nbytes, granted = self._waiting[0]
            if granted.done():  # cancelled, and about to leave
                return
            self._waiting.popleft()
            self._held += nbytes
            granted.set_result(None)

    def _has_room(self, nbytes: int) -> bool:
        return not self._held or self._held + nbytes <= self._max_bytes


class ServerMemory:
    """The memory of all requests.

    turn: large bodies are parsed, checked and translated one at a time. prompting: bounds how many large requests
    become prompts at the same time.
    """

    def __init__(self, media: bool) -> None:
        self.read = MemoryBudget(MAX_MEDIA_READ if media else MAX_READ)
        self.small = MemoryBudget(MAX_SMALL)
        self.large = MemoryBudget(MAX_MEDIA_LARGE if media else MAX_LARGE)
        self.answers = MemoryBudget(MAX_ANSWERS)
        self.turn = asyncio.Lock()
        self.prompting = asyncio.Semaphore(PROMPTS)


class RequestMemory:
    """The memory that one request holds. is_large: is it more than SMALL?"""

    def __init__(self, server: ServerMemory) -> None:
        self._server = server
        self.is_large = False
        self._read = self._answer = 0
        self._made: list[tuple[MemoryBudget, int]] = []

    def add_read(self, nbytes: int) -> None:
        """Count bytes of the body that have arrived. Raises ApiError."""
        self._server.read.take(nbytes)
        self._read += nbytes

    def drop_read(self) -> None:
        """Count the body no longer."""
        self._server.read.give(self._read)
        self._read = 0

    async def hold(self, nbytes: int) -> None:
        """Wait until so many bytes, made of JSON texts, may be held as well. Raises ApiError."""
        self.is_large |= nbytes > SMALL
        budget = self._server.large if self.is_large else self._server.small
        await budget.wait(nbytes)
        self._made.append((budget, nbytes))

    def add_answer(self, nbytes: int) -> None:
        """Count bytes of an answer that is sent whole. Raises ApiError."""
        self._server.answers.take(nbytes)
        self._answer += nbytes

    def close(self) -> None:
        """Count nothing any longer: the request is answered."""
        self.release()
        self._server.answers.give(self._answer)
        self._answer = 0

    def release(self, keep: int = 0) -> None:
        """Count only `keep` bytes from now on, if there are as many: the request has its prompt."""
        self.drop_read()
        made, self._made = self._made, []
        for budget, nbytes in made:
            kept = min(keep, nbytes)
            keep -= kept
            if kept:
                self._made.append((budget, kept))
            budget.give(nbytes - kept)


class MemoryMiddleware:
    """An ASGI application that wraps another and counts the memory of its requests until they are answered."""

    def __init__(self, app: ASGIApp, memory: ServerMemory) -> None:
        self._app = app
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = RequestMemory(self._memory)
        try:
            await self._app({**scope, _SCOPE: held}, receive, send)
        finally:
            held.close()


def request_memory(request: Request) -> RequestMemory:
    """Return the memory of a request that MemoryMiddleware has passed on."""
    memory: RequestMemory = request.scope[_SCOPE]
    return memory


def _overloaded() -> ApiError:
    return ApiError(503, "The server holds too many large requests or answers.", code="overloaded")
