"""Which media a model takes, and which frames of the videos of a prompt."""

from collections.abc import Callable, Sequence

from .decoder import Sampler
from .errors import MediaError
from .messages import Source
from .processor import Processor


def check_kinds(processor: Processor, sources: Sequence[Source]) -> None:
    """Raise MediaError for a medium of a kind that the model does not take."""
    for source in sources:
        if source.kind not in processor.kinds:
            raise MediaError(f"the model takes {' and '.join(processor.kinds)}, found {source.kind}")
        if source.heard and "audio" not in processor.kinds:
            raise MediaError(f"use_audio_in_video: the model takes {' and '.join(processor.kinds)}, not sound")


def samplers(
    processor: Processor, sources: Sequence[Source], describe: Callable[[int], tuple[int, float | None]]
) -> list[Sampler]:
    """Return what chooses the frames of each medium of a prompt.

    describe: returns total frames and frames per second of the video that is source number i, as Decoder.describe;
    called where frames depend on other videos.
    """
    videos = [i for i, source in enumerate(sources) if source.kind == "video" and not source.listed]
    if len(videos) < 2 or not processor.shares_frames:
        return [processor.sample] * len(sources)
    together = processor.sample_together([describe(i) for i in videos])
    chosen = dict(zip(videos, together, strict=True))
    return [chosen.get(i, processor.sample) for i in range(len(sources))]
