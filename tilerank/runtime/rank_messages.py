"""The messages from rank 0 to the other ranks: one small typed message a step.

Workers remember the pages of running sequences, so a sequence in a decode step is its number, its length and one token
id.
"""

import msgspec


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The next tokens of one sequence, at positions `start`, `start` + 1, ...

    new_pages: appended to the page table of the sequence. logits: of how many of the last tokens logits are computed.
    """

    sequence: int
    start: int
    token_ids: list[int]
    new_pages: list[int]
    logits: int


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One forward pass over `chunks`. finished: numbers of sequences that workers forget before it."""

    chunks: list[Chunk]
    finished: list[int]


class Count(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Gather the counters of all ranks."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The end of `Worker.follow`; nothing comes after it."""


Message = Step | Count | Stop
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message:
    return _decoder.decode(data)
