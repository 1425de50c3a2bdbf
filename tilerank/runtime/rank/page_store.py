"""Pages of the KV cache that a rank writes to files and reads back.

A thread writes, beside the steps, which never wait for it. Pages that it has not written yet stay where they are in the
cache. If a step is about to overwrite one of them, it is not written.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.kernels.latent_pages import LatentPages
from tilerank.loader.card import ModelCard
from tilerank.loader.checkpoint import Checkpoint
from tilerank.parallel.group import Group
from tilerank.parallel.sharding import Sharding

from ..protocol.errors import EngineError
from ..protocol.rank_messages import KeepPages, LoadPages
from ..step.cache import Cache, CacheSpec, bytes_per_token
from .cache_identity import cache_identity
from .page_files import CODE_BYTES, PageFiles
from .rank_config import RankConfig
from .whole_pages import check_whole_pages

log = logging.getLogger(__name__)

_READERS = 4
"""Threads that read and check files."""
_CLOSE_S = 5.0
"""Longest time for the pages that are not written yet when the server ends."""


class PageStore:
    """The pages of `caches`, a cache for each layer, and the files of such pages.

    page_bytes: of a page in all layers. written, read, refused: numbers of pages so far; those are refused that cannot
    be written, or whose files are damaged.
    """

    def __init__(self, files: PageFiles, caches: Sequence[Cache], group: Group) -> None:
        self.files = files
        self.written = self.read = self.refused = 0
        self._group = group
        paged = [cache for cache in caches if isinstance(cache, KVPages | LatentPages)]
        distinct = {id(cache): cache for cache in paged}.values()  # layers may share one
        self._parts: list[Tensor] = [t.flatten(1).view(torch.uint8) for cache in distinct for t in cache.tensors]
        self.page_bytes = sum(part.shape[1] for part in self._parts)
        self._waiting: dict[int, tuple[bytes, int]] = {}  # by number: the digest of a page, and its last use
        self._changed = threading.Condition()
        self._closing = False
        self._readers = ThreadPoolExecutor(_READERS, "kv-dir reader")
        self._writer = threading.Thread(target=self._write_all, name="kv-dir writer", daemon=True)
        self._writer.start()

    def __contains__(self, digest: bytes) -> bool:
        """Return whether there is a file of the page with this digest."""
        return digest in self.files

    def follow(self, message: KeepPages | LoadPages) -> None:
        """Ranks above 0: do what a message of rank 0 says."""
        match message:
            case KeepPages(pages):
                self.keep(pages)
            case LoadPages(pages):
                self.load(pages)

    def keep(self, pages: Sequence[tuple[int, bytes]]) -> None:
        """Write the pages of a sequence, (number, digest) from its first token on, unless there are files of them. Its
        last pages will be the first of them to make room for others."""
        now = time.time_ns()
        with self._changed:
            for index, (number, digest) in enumerate(pages):
                self._waiting[number] = digest, now - index
            self._changed.notify_all()

    def forget(self, numbers: Iterable[int]) -> None:
        """Do not write what is in pages that are about to be overwritten."""
        if self._waiting:
            with self._changed:
                for number in numbers:
                    self._waiting.pop(number, None)
                self._changed.notify_all()

    def load(self, pages: Sequence[tuple[int, bytes]]) -> int:
        """Read pages, (number, digest) in the order of their tokens. Returns how many of the first ones every rank has
        read. A collective: all ranks call this with the same pages."""
        self.forget(number for number, _ in pages)
        found = [*self._readers.map(self._load, pages), False]
        counts = self._group.all_gather(torch.tensor([found.index(False)]))
        self.read += int(counts.min())
        return int(counts.min())

    def flush(self, timeout_s: float) -> None:
        """Wait until no page waits, or for so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self) -> None:
        """Write what waits, as far as there is time, and let another server use the files."""
        self.flush(_CLOSE_S)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join()
        self._readers.shutdown()
        self.files.close()

    def _load(self, page: tuple[int, bytes]) -> bool:
        number, digest = page
        content = self.files.read(digest, self.page_bytes)
        if content is None:
            self._refuse("a file is missing or damaged, so that the tokens of its page are computed again")
            return False
        values, start = torch.frombuffer(content, dtype=torch.uint8), 0
        for part in self._parts:
            part[number].copy_(values[start : start + part.shape[1]])
            start += part.shape[1]
        return True

    def _write_all(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # the threads of the kernels go first
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                number, kept = next(iter(self._waiting.items()))
            try:
                self._write(number, kept)
            except OSError as error:
                self._refuse(f"a page cannot be written: {error.strerror}")
            with self._changed:
                if self._waiting.get(number) is kept:
                    del self._waiting[number]
                    self._changed.notify_all()

    def _write(self, number: int, kept: tuple[bytes, int]) -> None:
        digest, used_at = kept
        if self.files.touch(digest, used_at):
            return
        content = torch.cat([part[number] for part in self._parts])
        with self._changed:
            if self._waiting.get(number) is not kept:
                return  # a step may have overwritten the page while it was copied
        if self.files.write(digest, content.numpy().data, used_at):
            self.written += 1
        else:
            self._refuse("a page is not written, because those before it in its sequence fill --kv-dir-size")

    def _refuse(self, reason: str) -> None:
        """Count a page. The log has the first reason only, because there may be thousands of pages."""
        with self._changed:
            self.refused += 1
            if self.refused == 1:
                log.warning("--kv-dir: %s: %s", self.files.folder, reason)


def open_page_files(
    model_dir: Path, card: ModelCard, config: RankConfig, sharding: Sharding, specs: Sequence[CacheSpec]
) -> PageFiles | None:
    """Return the files in which a rank keeps pages; None if the configuration has no directory for them.

    Raises EngineError for a size without room for a page, and as check_whole_pages and PageFiles do.
    """
    if config.kv_dir is None:
        return None
    check_whole_pages("--kv-dir", model_dir, card, specs)
    page_bytes, capacity = CODE_BYTES + bytes_per_token(specs) * PAGE_TOKENS, config.kv_dir_bytes // sharding.size
    if capacity < page_bytes:
        raise EngineError(
            f"--kv-dir-size: expected room for a page of {PAGE_TOKENS} tokens, {page_bytes} bytes on each of "
            f"{sharding.size} ranks, found {config.kv_dir_bytes} bytes"
        )
    identity = cache_identity(Checkpoint(model_dir), card, config, sharding, specs)
    return PageFiles(config.kv_dir, sharding.rank, capacity, identity)
