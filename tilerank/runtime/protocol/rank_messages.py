"""The messages from rank 0 to the other ranks: one small typed message a step, those that encode media, and those that
move pages into files and between the ranks of two groups.

Workers remember the pages of running sequences, so a sequence in a decode step is its number, its length and one token
id.
"""

import msgspec

from .prompt import Medium, PlaceholderRange, Segment
from .speech_messages import SpeechStep


class StoreSource(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Store the keys and values of a source (prompt.py), or of some of its pages, in `pages` of every layer of
    cross-attention.

    parts: tokens of encodings, in order. positions: as Prompt.source_positions.
    """

    pages: list[int]
    parts: list[Segment]
    positions: list[list[int]] = []


class ChunkSource(msgspec.Struct, frozen=True, array_like=True):
    """The ranges of its source that the rows of a chunk attend to.

    pages: of the source, in the first chunk of the sequence. rows: (row, first, count, shown), from row 0 on, as in
    prompt.py: VisibleRange. The rows of later chunks see what the last row saw, unless a message says otherwise.
    """

    sequence: int
    pages: list[int]
    rows: list[tuple[int, int, int, bool]]


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The next tokens of one sequence, whose keys and values are stored from index `start` on.

    new_pages: appended to the page table of the sequence. logits: of how many of the last tokens logits are computed.
    positions: three axes of as many numbers as there are tokens; if empty, the token at index i has position i +
    `shift` on every axis. placeholder_ranges: ascending; encodings take the place of these rows.

    drafts: so many of the last tokens are drafts of tokens that may follow the first. Every token of such a chunk is
    computed as in a decode step (step/draft_rows.py).
    """

    sequence: int
    start: int
    token_ids: list[int]
    new_pages: list[int]
    logits: int
    positions: list[list[int]] = []
    shift: int = 0
    placeholder_ranges: list[PlaceholderRange] = []
    drafts: int = 0


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One forward pass over `chunks`. Before it, workers drop sequences and encodings, and copy states.

    finished, forgotten: the numbers of the sequences and of the encodings to drop.
    state_copies: (from, to), slots of states, copied in this order.
    state_slots: of the sequence of each chunk, for models with states.
    sources: of chunks whose rows see something of a source, unless the ranks know it.
    kept: sequences of whose media the talker reads hidden states.
    hidden_layers: after which hidden states of the rows with logits are asked for (step/hidden_rows.py).
    window_pages: (sequence, index, pages), new pages of layers with a window. They continue the page table that a
    sequence has for these layers, from this index on; entries that are left out are never read.
    """

    chunks: list[Chunk]
    finished: list[int]
    forgotten: list[int] = []
    state_copies: list[tuple[int, int]] = []
    state_slots: list[int] = []
    sources: list[ChunkSource] = []
    kept: list[int] = []
    window_pages: list[tuple[int, int, list[int]]] = []
    hidden_layers: list[int] = []


class Draft(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run the drafter (rank/drafter.py) after the last step.

    chunks: sequences of that step. For a draft head (step/model.py: DraftHead), the tokens are those after the tokens
    of the first rows of the sequence there, with the positions and indices of these rows. For a draft model, they are
    those that it has not read. Chunks with logits draft the tokens after their last: as many as `counts` says.
    """

    chunks: list[Chunk]
    counts: list[int]


class Encode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start to encode `medium` as encoding `number`, in place of an encode that is not complete.

    The frames of the medium may be incomplete: `Frames` messages follow. operations: of a piece, as in Encoder.encode.
    forgotten: as in Step.
    """

    number: int
    medium: Medium
    operations: float
    forgotten: list[int] = []


class Frames(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """More of the frames of the medium whose encode was started."""

    frames: bytes


class EncodePiece(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute the next piece of the encode that was started, all frames of which have been sent."""


class StopEncode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Drop the encode that was started."""


class KeepPages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write the pages of a sequence to files, each rank its part of them, as far as there are none yet.

    pages: (number, digest), from the first page of the sequence on. The digest identifies the tokens of a page and all
    tokens before them.
    """

    pages: list[tuple[int, bytes]]


class LoadPages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read pages from files, and gather how many of the first ones every rank has read. pages: as in KeepPages."""

    pages: list[tuple[int, bytes]]


MovedPage = tuple[int, int, bytes]
"""A page, or a slot for states, that goes from one group of ranks to the other: its number, the slot of the memory
between them, and the digest of all tokens up to its end."""


class GivePages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Prefill ranks: copy pages to the memory of both groups (rank/transfer_memory.py).

    pages: of each area. state_copies: as in Step, before that.
    """

    pages: list[list[MovedPage]]
    state_copies: list[tuple[int, int]] = []


class TakePages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Decode ranks: copy pages from this memory, and gather whether every rank has found all of them there.

    pages, state_copies: as in GivePages.
    """

    pages: list[list[MovedPage]]
    state_copies: list[tuple[int, int]] = []


class Count(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Gather the counters of all ranks."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The end of `Worker.follow`; nothing comes after it."""


Message = (
    Step
    | Draft
    | SpeechStep
    | Encode
    | Frames
    | EncodePiece
    | StopEncode
    | StoreSource
    | KeepPages
    | LoadPages
    | GivePages
    | TakePages
    | Count
    | Stop
)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message:
    return _decoder.decode(data)
