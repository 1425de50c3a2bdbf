"""The table of ranks that a server prints: each rank describes itself once it is loaded, and rank 0 prints the
table."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ..host.binding import local_memory
from ..host.cpulist import format_cpulist
from ..host.placement import RankPlacement
from ..text import percent, size, table

if TYPE_CHECKING:
    from tilerank.parallel.group import Group
    from tilerank.runtime.rank.worker import Worker
    from tilerank.runtime.server.link.messages import RankInfo


def gather(group: Group, own: RankPlacement, worker: Worker) -> list[RankInfo]:
    """Return the descriptions of all ranks. Every rank calls this once it is loaded."""
    import torch

    from tilerank.kernels import core
    from tilerank.runtime.server.link.messages import RankInfo

    info = RankInfo(
        rank=group.rank,
        host=socket.gethostname(),
        nodes=format_cpulist(own.mem_nodes) if own.mem_nodes else "any",
        cores=format_cpulist(own.cores) if own.cores else "any",
        isa=core.isa_text(),
        weight_bytes=worker.weight_bytes,
        cache_bytes=worker.cache_bytes,
        local_memory=local_memory(own.mem_nodes),
    )
    data = msgspec.msgpack.encode(info)
    lengths = group.all_gather(torch.tensor([len(data)])).flatten().tolist()
    padded = torch.frombuffer(bytearray(data.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    rows = group.all_gather(padded)
    decode = msgspec.msgpack.Decoder(RankInfo).decode
    return [decode(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]


def render(ranks: Sequence[RankInfo], tokens: int, states: int) -> str:
    """Format the table. tokens: the capacity of the KV cache. states: slots for states of sequences, 0 for models
    without."""
    hosts = len({rank.host for rank in ranks}) > 1
    slots, host = ["states"] if states else [], ["host"] if hosts else []
    rows = [["", "ISA", "weights", "KV cache", "tokens", *slots, "local", *host, "node", "cores"]]
    for rank in ranks:
        rows.append(
            [
                f"rank {rank.rank}",
                rank.isa,
                size(rank.weight_bytes),
                size(rank.cache_bytes),
                f"{tokens:,}",
                *([f"{states:,}"] if states else []),
                "?" if rank.local_memory is None else percent(rank.local_memory),
                *([rank.host] if hosts else []),
                rank.nodes,
                rank.cores,
            ]
        )
    return "\n".join(table(rows, left=4 if hosts else 3))
