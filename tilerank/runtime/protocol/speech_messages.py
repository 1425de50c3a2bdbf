"""The messages of rank 0 about speech: one `SpeechStep` at a time, for all sequences that speak.

A speaking sequence has the number of its text sequence, until it is moved. Its talker reads rows: those of the user's
turns and of the beginning of the answer, then one for every frame. A frame is 80 ms of sound and has 16 codes: the
talker gives the first, the code predictor the others.
"""

import msgspec


class TalkerChunk(msgspec.Struct, frozen=True, array_like=True):
    """The next rows of a talker prompt, whose keys and values are stored from index `start` on.

    tokens: token ids of the text model, whose projected embeddings are the rows; rows whose token stands for media take
    the hidden states that the text model's step kept at `indices` of the text sequence. indices: of the tokens in the
    text sequence; -1 for those that are not media, whose row depends on the token alone. codes: an id of the talker's
    codec embedding to be added to each row, -1 for none. positions: three axes of as many numbers as there are tokens.
    new_pages: appended to the talker's page table. last: whether this is the end of the prompt, of which logits are
    computed.
    """

    sequence: int
    start: int
    tokens: list[int]
    indices: list[int]
    codes: list[int]
    positions: list[list[int]]
    new_pages: list[int]
    last: bool


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A frame of a sequence: the predictor gives its other codes, and the talker reads the frame and gives logits.

    code: the first code, chosen from the last logits. draws: a number in [0, 1) for each other code, which samples it;
    none for the likeliest codes. token: of the text model, whose projected embedding is added to that of the frame.
    start, position: index and position of the frame's row in the talker's sequence. new_pages: as in TalkerChunk.
    """

    sequence: int
    code: int
    draws: list[float]
    token: int
    start: int
    position: int
    new_pages: list[int]


class SoundPart(msgspec.Struct, frozen=True, array_like=True):
    """Compute the samples of frames `first` to `end` of a sequence, all of which have been computed."""

    sequence: int
    first: int
    end: int


class SpeechStep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute chunks of talker prompts, then frames, then sound. Before that, workers drop the speech of the sequences
    `finished`.

    moved: (sequence, new number): these have lost their pages, and begin again under a new number.
    The logits of a step are those of its last chunks and then those of its frames, in this order.
    """

    chunks: list[TalkerChunk]
    frames: list[Frame]
    sounds: list[SoundPart]
    finished: list[int]
    moved: list[tuple[int, int]] = []
