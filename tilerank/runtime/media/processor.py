"""The interface of a family's processor, which makes prompts of text and decoded media, and chooses frames."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tilerank.loader.tokenizer import Tokenizer

from ..protocol.errors import MediaError
from ..protocol.prompt import Prompt
from .decoder import DecodedMedium, Sampler
from .messages import MediaSource


class Processor(ABC):
    """The processor of a model directory.

    A prompt is made in three steps: `write` completes its text, whose tokens the caller finds, and `expand` puts the
    media between them. The caller has checked the kinds of the media (check_kinds).

    kinds: of media that the model takes.
    placeholders: what the chat template writes for a medium. Users may not write it (see messages.split_media).
    convention: a sentence for the log on how prompts are written, where the model directory decides that.
    shares_frames: whether the frames taken of a video depend on the other videos of its prompt.
    """

    kinds: tuple[str, ...] = ("image", "video")
    placeholders: tuple[str, ...]
    convention: str = ""
    shares_frames: bool = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, text: str, media: Sequence[DecodedMedium]) -> Prompt:
        """Return the prompt of a text from the chat template and its media, in the order of the text: all three steps.
        Raises MediaError."""
        return self.expand(self._tokenizer.encode(self.write(text, media), add_special_tokens=False), media)

    @abstractmethod
    def write(self, text: str, media: Sequence[DecodedMedium]) -> str:
        """Return the text with all that its tokens need of the media, such as the times of frames.

        Raises MediaError if placeholders and media do not match.
        """

    @abstractmethod
    def expand(self, token_ids: list[int], media: Sequence[DecodedMedium]) -> Prompt:
        """Return the prompt of the tokens of a text from `write`, which add no special ones, and of its media.

        Raises MediaError for a medium that the model cannot take, and if placeholders and media do not match.
        """

    @abstractmethod
    def text_prompt(self, token_ids: list[int]) -> Prompt:
        """Return the prompt of tokens without media. Raises MediaError if a placeholder is among them."""

    def sample(self, total: int, fps: float | None) -> list[int]:
        """Return the numbers of the frames of a video that the model takes, ascending. fps: None if unknown. Every
        processor that takes videos has it."""
        raise NotImplementedError(f"{type(self).__name__}.sample")

    def sample_together(self, videos: Sequence[tuple[int, float | None]]) -> list[Sampler]:
        """Return `sample` for each of the videos of a prompt, of which total frames and frames per second are given."""
        return [self.sample] * len(videos)

    @abstractmethod
    def most_tokens(self, kind: str) -> int:
        """Return an upper bound of the tokens that the encoder computes for one medium of a kind."""


def check_kinds(processor: Processor, sources: Sequence[MediaSource]) -> None:
    """Raise MediaError for a medium of a kind that the model does not take."""
    for source in sources:
        if source.kind not in processor.kinds:
            raise MediaError(f"the model takes {' and '.join(processor.kinds)}, found {source.kind}")
        if source.heard and "audio" not in processor.kinds:
            raise MediaError(f"use_audio_in_video: the model takes {' and '.join(processor.kinds)}, not sound")


def samplers(
    processor: Processor, sources: Sequence[MediaSource], describe: Callable[[int], tuple[int, float | None]]
) -> list[Sampler]:
    """Return what chooses the frames of each medium of a prompt.

    describe: returns total frames and frames per second of the video that is source number i, as FileDecoder.describe;
    called where frames depend on other videos.
    """
    videos = [i for i, source in enumerate(sources) if source.kind == "video" and not source.listed]
    if len(videos) < 2 or not processor.shares_frames:
        return [processor.sample] * len(sources)
    together = processor.sample_together([describe(i) for i in videos])
    chosen = dict(zip(videos, together, strict=True))
    return [chosen.get(i, processor.sample) for i in range(len(sources))]
