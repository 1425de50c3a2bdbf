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


class Count(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Every rank tells what its steps have taken so far."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No step will follow."""


Message = Step | Count | Stop
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message:
    return _decoder.decode(data)
