"""Refuses prompts that cannot run, before they wait for anything."""

from .encodings import Wanted
from .errors import RequestError
from .model import Encoder
from .prompt import Medium, Prompt


def check_prompt(prompt: Prompt, vocab: int, context_length: int, axes: int) -> None:
    """Check token ids and positions. axes: of the model's positions. Raises RequestError."""
    if not prompt.token_ids:
        raise RequestError("the prompt is empty; expected at least one token")
    bad = next((token for token in prompt.token_ids if not 0 <= token < vocab), None)
    if bad is not None:
        raise RequestError(f"expected token ids from 0 to {vocab - 1}, found {bad}")
    if not prompt.positions:
        return
    lengths = [len(axis) for axis in prompt.positions]
    expected = [len(prompt.token_ids)] * axes
    if axes == 1 or lengths != expected:
        wanted = f"{axes} lists of {expected[0]} numbers" if axes > 1 else "none, because tokens have one position each"
        raise RequestError(f"positions: expected {wanted}, found lists of {lengths}")
    bad = next((value for axis in prompt.positions for value in axis if not 0 <= value < context_length), None)
    if bad is not None:
        raise RequestError(f"positions: expected numbers from 0 to {context_length - 1}, found {bad}")


def check_media(prompt: Prompt, encoder: Encoder | None, itemsize: int) -> list[Wanted]:
    """Check that places and media belong together. Returns what the encodings take, in values of `itemsize` bytes.

    Raises RequestError.
    """
    if not prompt.media and not prompt.places:
        return []
    if encoder is None:
        raise RequestError("the prompt has pictures or videos, but the model takes text alone")
    counts = _counts(prompt)
    wanted = []
    for number, (medium, digest, count) in enumerate(zip(prompt.media, prompt.digests, counts, strict=True)):
        _check_frames(number, medium)
        levels, tokens, hidden = encoder.shape(medium.grid)
        if count != tokens:
            raise RequestError(
                f"medium {number}: a grid of {medium.grid} has {tokens} tokens, found places for {count}"
            )
        wanted.append(Wanted(digest, medium, levels * tokens * hidden * itemsize))
    return wanted


def _check_frames(number: int, medium: Medium) -> None:
    if min(*medium.size, *medium.grid) < 1:
        raise RequestError(
            f"medium {number}: expected a size and a grid of positive numbers, found {medium.size} and {medium.grid}"
        )
    frames, height, width = medium.size
    if len(medium.frames) != frames * height * width * 3:
        raise RequestError(
            f"medium {number}: {frames} frames of {width} x {height} have {frames * height * width * 3} bytes, "
            f"found {len(medium.frames)}"
        )


def _counts(prompt: Prompt) -> list[int]:
    """Return for how many tokens of each medium there are places."""
    counts = [0] * len(prompt.media)
    end = 0
    for number, place in enumerate(prompt.places):
        if not 0 <= place.medium < len(counts):
            raise RequestError(f"place {number}: expected one of {len(counts)} media, found medium {place.medium}")
        if place.count < 1 or not end <= place.start <= len(prompt.token_ids) - place.count:
            raise RequestError(
                f"place {number}: expected tokens after place {number - 1} and within the prompt's "
                f"{len(prompt.token_ids)}, found {place.count} from {place.start} on"
            )
        if place.first != counts[place.medium]:
            raise RequestError(
                f"place {number}: expected to go on with token {counts[place.medium]} of medium {place.medium}, "
                f"found {place.first}"
            )
        end = place.start + place.count
        counts[place.medium] += place.count
    return counts
