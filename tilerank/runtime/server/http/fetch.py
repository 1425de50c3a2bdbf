"""Reads the media that messages refer to by URL, within what the operator has allowed.

data: URLs are always read, http(s) URLs from allowed hosts only, and file: URLs below one directory only.
"""

import asyncio
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from ...media.messages import read_data_url
from .errors import ApiError
from .get import GetError, get, is_public
from .media_budget import MAX_ENCODED, Share

FETCH_S = 30.0
"""For all media of a request together."""
MAX_REDIRECTS = 3
MAX_CONNECTIONS = 32
"""Open connections to other hosts, for all requests together."""
_LONG_DATA = 64 << 10
"""Characters. Longer data: URLs are decoded in a thread."""


class FetchError(ApiError):
    """A URL that cannot or must not be read."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message, param="messages")


class Fetcher:
    """Reads URLs.

    domains: hosts of http(s) URLs. directory: where file: URLs may lie; None for nowhere. is_allowed: says whether an
    IP address may be connected to.
    """

    def __init__(
        self, domains: Iterable[str], directory: Path | None, is_allowed: Callable[[str], bool] = is_public
    ) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)
        self._directory = None if directory is None else directory.resolve()
        self._is_allowed = is_allowed
        self._connections = asyncio.Semaphore(MAX_CONNECTIONS)

    async def fetch(self, urls: Sequence[str], share: Share) -> list[bytes]:
        """Return the bytes at each URL. Raises FetchError, or ApiError if they are more than `share` allows."""
        reading = [asyncio.create_task(self._read(url, share)) for url in urls]
        try:
            async with asyncio.timeout(FETCH_S):
                return await asyncio.gather(*reading)
        except TimeoutError as e:
            late = (url for url, task in zip(urls, reading, strict=True) if not task.done() or task.cancelled())
            raise FetchError(f"{_show(next(late, urls[0]))} was not read within {FETCH_S:g} s.") from e
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def _read(self, url: str, share: Share) -> bytes:
        if url[:5].lower() == "data:":
            share.add_encoded(len(url) // 4 * 3)
            return read_data_url(url) if len(url) < _LONG_DATA else await asyncio.to_thread(read_data_url, url)
        parts = _split(url)
        if parts.scheme == "file":
            data = await asyncio.to_thread(self._read_file, url, parts)
            share.add_encoded(len(data))
            return data
        async with self._connections:
            return await self._get(url, share)

    async def _get(self, url: str, share: Share) -> bytes:
        where = url
        for _ in range(MAX_REDIRECTS + 1):
            parts = _split(where)
            self._check(where, parts)
            try:
                answer = await get(parts, share.add_encoded, self._is_allowed)
            except GetError as e:
                raise FetchError(f"{_show(where)} {e}.") from e
            if answer.location is None:
                return answer.body
            where = _join(where, answer.location)
        raise FetchError(f"{_show(url)} redirects more than {MAX_REDIRECTS} times.")

    def _check(self, url: str, parts: SplitResult) -> None:
        if parts.scheme not in ("http", "https"):
            raise FetchError(f"{_show(url)}: expected a data:, http:, https: or file: URL.")
        if parts.hostname is None or parts.username is not None or parts.password is not None:
            raise FetchError(f"{_show(url)}: expected a host without user name and password.")
        if parts.hostname not in self._domains:
            raise FetchError(
                f"{_show(url)} may not be read: its host is not one of --allowed-media-domains of this server."
            )

    def _read_file(self, url: str, parts: SplitResult) -> bytes:
        if self._directory is None:
            raise FetchError(f"{_show(url)} may not be read: this server has no --allowed-local-media-path.")
        if parts.netloc not in ("", "localhost"):
            raise FetchError(f"{_show(url)}: expected a file: URL without a host.")
        try:
            path = Path(unquote(parts.path)).resolve()
            if not path.is_relative_to(self._directory):
                raise FetchError(
                    f"{_show(url)} may not be read: it is not below --allowed-local-media-path of this server."
                )
            with open(path, "rb", opener=_open) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise FetchError(f"{_show(url)} is not a file.")
                if status.st_size > MAX_ENCODED:
                    raise FetchError(f"{_show(url)} has more than {MAX_ENCODED >> 20} MiB.")
                return file.read(MAX_ENCODED)
        except (OSError, ValueError, RuntimeError) as e:  # RuntimeError: symbolic links in a circle
            raise FetchError(f"{_show(url)} cannot be read.") from e


def _open(path: str, flags: int) -> int:
    """Open a file that is not a link; do not wait for the other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _split(url: str) -> SplitResult:
    """Return the parts of a URL whose host and port are valid. Raises FetchError."""
    try:
        parts = urlsplit(url)
        parts.netloc.encode("idna")
        if not url.isprintable() or " " in url or parts.port == 0:
            raise ValueError
    except ValueError as e:
        raise FetchError(f"{_show(url)} is not a valid URL.") from e
    return parts


def _join(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError as e:
        raise FetchError(f"{_show(url)} redirects to {_show(location)}, which is not a valid URL.") from e


def _show(url: str) -> str:
    """Return the beginning of a URL, for a message."""
    return f"{url[:77]!r}..." if len(url) > 80 else repr(url)
