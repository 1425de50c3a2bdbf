"""Fetches and decodes the pictures and videos of requests."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..media.decoder import Decoder, Frames
from ..media.messages import Source
from ..media.processor import Processor
from .errors import ApiError
from .fetch import Fetcher
from .media_budget import Share

AT_A_TIME = 2
"""Media of each kind that are decoded at the same time."""
_NAMES = {"image": "pictures", "video": "videos"}


class MediaReader:
    """Reads the media of requests for a model with a media processor.

    new_decoder: called once for each kind of media, so that pictures do not wait for videos. limits: the largest number
    of media of each kind in a request.
    """

    def __init__(
        self,
        processor: Processor,
        new_decoder: Callable[[], Decoder],
        fetcher: Fetcher,
        limits: Mapping[str, int],
    ) -> None:
        self.processor = processor
        self._fetcher = fetcher
        self._limits = limits
        # The threads wait for the processes that decode.
        self._decoders = {kind: (ThreadPoolExecutor(AT_A_TIME, kind), new_decoder()) for kind in _NAMES}

    async def read(self, sources: Sequence[Source], share: Share) -> list[Frames]:
        """Return the media, decoded. Raises ApiError or MediaError."""
        for kind, count in Counter(source.kind for source in sources).items():
            if count > self._limits[kind]:
                raise ApiError(
                    400,
                    f"messages: expected at most {self._limits[kind]} {_NAMES[kind]} (--limit-mm-per-prompt), "
                    f"found {count}",
                    param="messages",
                )
        fetched = await self._fetcher.fetch([url for source in sources for url in source.urls], share)
        fetched.reverse()
        media = []
        for source in sources:
            files = [fetched.pop() for _ in source.urls]
            thread, decoder = self._decoders[source.kind]
            frames = await asyncio.get_running_loop().run_in_executor(
                thread, decoder.decode, source.kind, files, source.listed, self.processor.sample
            )
            share.replace_encoded(sum(map(len, files)), len(frames.data))
            media.append(frames)
        return media
