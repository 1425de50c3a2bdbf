"""Fetches and decodes the media of requests."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from ...media.decoder import DecodedMedium, FileDecoder, decode_source
from ...media.messages import MediaSource
from ...media.processor import Processor, check_kinds, samplers
from ...protocol.errors import MediaError
from ..http.errors import ApiError
from ..http.fetch import Fetcher
from ..http.media_budget import Share

DECODE_S = 60.0
"""For all media of a request together."""
AT_A_TIME = {"image": 2, "video": 1}
"""Requests with pictures alone, and requests with videos or sound, whose media are decoded at the same time."""
_NAMES = {"image": "pictures", "video": "videos", "audio": "clips of sound"}


class MediaReader:
    """Reads the media of requests for a model with a media processor.

    new_decoder: called for pictures and for videos, so that pictures do not wait for videos. limits: the largest number
    of media of each kind in a request.
    """

    def __init__(
        self,
        processor: Processor,
        new_decoder: Callable[[], FileDecoder],
        fetcher: Fetcher,
        limits: Mapping[str, int],
    ) -> None:
        self.processor = processor
        self._fetcher = fetcher
        self._limits = limits
        self._lanes = {kind: _Lane(count, new_decoder()) for kind, count in AT_A_TIME.items()}

    async def read(self, sources: Sequence[MediaSource], share: Share) -> list[DecodedMedium]:
        """Return the media, decoded. Raises ApiError or MediaError."""
        if not sources:
            return []
        check_kinds(self.processor, sources)
        for kind, count in Counter(source.kind for source in sources).items():
            if count > self._limits[kind]:
                raise ApiError(
                    400,
                    f"messages: expected at most {self._limits[kind]} {_NAMES[kind]} (--limit-mm-per-prompt), "
                    f"found {count}",
                    param="messages",
                )
        fetched = await self._fetcher.fetch([url for source in sources for url in source.urls], share)
        lane = self._lanes["image" if all(source.kind == "image" for source in sources) else "video"]
        async with lane.turns:
            await share.wait_for_room()
            try:
                async with asyncio.timeout(DECODE_S):
                    return await self._decode(lane, sources, fetched, share)
            except TimeoutError as e:
                raise MediaError(f"decoding the media takes more than {DECODE_S:g} s") from e

    async def _decode(
        self, lane: "_Lane", sources: Sequence[MediaSource], fetched: list[bytes], share: Share
    ) -> list[DecodedMedium]:
        left = iter(fetched)
        files = [list(islice(left, len(source.urls))) for source in sources]
        run = asyncio.get_running_loop().run_in_executor
        chosen = await run(
            lane.threads, samplers, self.processor, sources, lambda i: lane.decoder.describe(files[i][0])
        )
        media = []
        for source, own, sample in zip(sources, files, chosen, strict=True):
            frames = await run(lane.threads, decode_source, lane.decoder, source, own, sample)
            share.add_decoded(len(frames.data) + len(frames.sound))
            media.append(frames)
        share.drop_encoded()
        return media


class _Lane:
    """Decodes the media of `count` requests at the same time."""

    def __init__(self, count: int, decoder: FileDecoder) -> None:
        self.turns = asyncio.Semaphore(count)
        self.threads = ThreadPoolExecutor(count)  # waits for the processes that decode
        self.decoder = decoder
