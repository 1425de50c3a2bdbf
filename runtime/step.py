"""What rank 0 tells the other ranks: one small typed message a step, and a last one.

Ranks remember the pages of the sequences that run, so a decode step of a sequence is its number, its length and one
token id.
"""

import msgspec


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The next tokens of one sequence: `token_ids` stand at positions `start`, `start` + 1, ...

    `new_blocks` are pages that it gets from now on, after those it has. Logits are wanted of the last `logits` tokens.
    """

    sequence: int
    start: int
    token_ids: list[int]
    new_blocks: list[int]
    logits: int


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One forward pass over `chunks`. The pages of the sequences in `finished` are no longer theirs."""

    chunks: list[Chunk]
    finished: list[int]


class Profile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last step once more, to see where its time goes."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No step will follow."""


_decoder: msgspec.msgpack.Decoder[Step | Profile | Stop] = msgspec.msgpack.Decoder(Step | Profile | Stop)


def encode(message: Step | Profile | Stop) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Step | Profile | Stop:
    return _decoder.decode(data)
