"""Refuses prompts that cannot run, before they wait for anything."""

from tilerank.loader.pooling import DOES, Pooling

from ..protocol.errors import RequestError
from ..protocol.params import SamplingParams
from ..protocol.prompt import Medium, Prompt
from ..step.model import Encoder


def check_task(params: SamplingParams, pooling: Pooling | None) -> None:
    """Raise RequestError for a request for text of a model that embeds or scores, and the other way around."""
    if (params.pooling is None) == (pooling is None):
        return
    if pooling is None:
        raise RequestError("the model generates text, no vectors or scores")
    raise RequestError(f"the model {DOES[pooling.task]}, and generates none")


def check_layers(params: SamplingParams, layers: int) -> None:
    """Raise RequestError for layers that a decoder of so many does not have."""
    for layer in params.hidden_layers:
        if not -layers - 1 <= layer <= layers:
            raise RequestError(f"layers: expected numbers from {-layers - 1} to {layers}, found {layer}")


def check_prompt(prompt: Prompt, vocab: int, context_length: int, axes: int, source_axes: int) -> None:
    """Check token ids and positions. axes, source_axes: of the positions of tokens and of source tokens; 0 if these
    have none. Raises RequestError."""
    if not prompt.token_ids:
        raise RequestError("the prompt is empty; expected at least one token")
    bad = next((token for token in prompt.token_ids if not 0 <= token < vocab), None)
    if bad is not None:
        raise RequestError(f"expected token ids from 0 to {vocab - 1}, found {bad}")
    if prompt.positions:
        if axes == 1:
            lengths = [len(axis) for axis in prompt.positions]
            raise RequestError(
                f"positions: expected none, because tokens have one position each, found lists of {lengths}"
            )
        _check_positions("positions", prompt.positions, len(prompt.token_ids), axes, context_length)
    if prompt.source or prompt.source_positions:
        tokens = sum(part.count for part in prompt.source)
        _check_positions("source positions", prompt.source_positions, tokens, source_axes, context_length)


def _check_positions(name: str, positions: list[list[int]], tokens: int, axes: int, context_length: int) -> None:
    lengths = [len(axis) for axis in positions]
    if lengths != [tokens] * axes:
        wanted = f"{axes} lists of {tokens} numbers" if axes else "none, because cross-attention does not rotate keys"
        raise RequestError(f"{name}: expected {wanted}, found lists of {lengths}")
    bad = next((value for axis in positions for value in axis if not 0 <= value < context_length), None)
    if bad is not None:
        raise RequestError(f"{name}: expected numbers from 0 to {context_length - 1}, found {bad}")


def check_media(prompt: Prompt, encoder: Encoder | None, itemsize: int, *, crossing: bool = False) -> list[int]:
    """Check that media belong together with placeholders or, for a model with cross-attention (`crossing`), with the
    source. Returns the bytes of the encodings, in values of `itemsize` bytes.

    Raises RequestError.
    """
    if not prompt.media and not prompt.placeholder_ranges and not prompt.source and not prompt.visible_ranges:
        return []
    if encoder is None:
        raise RequestError("the prompt has media, but the model takes text alone")
    if crossing:
        return _check_source(prompt, encoder, itemsize)
    if prompt.source or prompt.visible_ranges:
        raise RequestError("the prompt has a source for cross-attention, but the model has none")
    counts = _counts(prompt)
    nbytes = []
    for number, (medium, count) in enumerate(zip(prompt.media, counts, strict=True)):
        _check_frames(number, medium)
        levels, tokens, hidden = encoder.shape(medium.grid)
        if count != tokens:
            raise RequestError(
                f"medium {number}: a grid of {medium.grid} has {tokens} tokens, found placeholders for {count}"
            )
        nbytes.append(levels * tokens * hidden * itemsize)
    return nbytes


def _check_source(prompt: Prompt, encoder: Encoder, itemsize: int) -> list[int]:
    """Check that the source consists of the media, and that tokens see ranges of it."""
    if prompt.placeholder_ranges:
        raise RequestError("the prompt has placeholders of media, but the model sees media by cross-attention")
    nbytes, tokens_of = [], []
    for number, medium in enumerate(prompt.media):
        _check_frames(number, medium)
        levels, tokens, hidden = encoder.shape(medium.grid)
        tokens_of.append(tokens)
        nbytes.append(levels * tokens * hidden * itemsize)
    for number, part in enumerate(prompt.source):
        if not 0 <= part.medium < len(tokens_of):
            raise RequestError(f"segment {number}: expected one of {len(tokens_of)} media, found {part.medium}")
        if part.first < 0 or part.count < 1 or part.first + part.count > tokens_of[part.medium]:
            raise RequestError(
                f"segment {number}: expected tokens of the {tokens_of[part.medium]} of medium {part.medium}, found "
                f"{part.count} from {part.first} on"
            )
    if unused := set(range(len(tokens_of))) - {part.medium for part in prompt.source}:
        raise RequestError(f"medium {min(unused)}: expected it in the source of the prompt, found no segment of it")
    total, before = sum(part.count for part in prompt.source), -1
    for number, visible in enumerate(prompt.visible_ranges):
        if not before < visible.start < len(prompt.token_ids):
            message = f"visible range {number}: expected a token after {before} of the prompt, found {visible.start}"
            raise RequestError(message)
        if visible.first < 0 or visible.count < 0 or visible.first + visible.count > total:
            raise RequestError(
                f"visible range {number}: expected a range of the {total} tokens of the source, found "
                f"{visible.count} from {visible.first} on"
            )
        before = visible.start
    return nbytes


def _check_frames(number: int, medium: Medium) -> None:
    if min(*medium.size, *medium.grid) < 1:
        raise RequestError(
            f"medium {number}: expected a size and a grid of positive numbers, found {medium.size} and {medium.grid}"
        )
    frames, height, width = medium.size
    if len(medium.frames) != (expected := frames * height * width * medium.bytes_of_pixel):
        raise RequestError(
            f"medium {number}: {frames} frames of {width} x {height} have {expected} bytes, found {len(medium.frames)}"
        )


def _counts(prompt: Prompt) -> list[int]:
    """Return for how many tokens of each medium there are placeholders."""
    counts = [0] * len(prompt.media)
    end = 0
    for number, run in enumerate(prompt.placeholder_ranges):
        if not 0 <= run.medium < len(counts):
            message = f"placeholder range {number}: expected one of {len(counts)} media, found medium {run.medium}"
            raise RequestError(message)
        if run.count < 1 or not end <= run.start <= len(prompt.token_ids) - run.count:
            raise RequestError(
                f"placeholder range {number}: expected tokens after range {number - 1} and within the prompt's "
                f"{len(prompt.token_ids)}, found {run.count} from {run.start} on"
            )
        if run.first != counts[run.medium]:
            raise RequestError(
                f"placeholder range {number}: expected to go on with token {counts[run.medium]} of medium "
                f"{run.medium}, found {run.first}"
            )
        end = run.start + run.count
        counts[run.medium] += run.count
    return counts
