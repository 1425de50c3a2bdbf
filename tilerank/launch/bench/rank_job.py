"""Shared by benchmarks that need ranks: starting them as `generate` does, and passing the result of rank 0 back."""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilerank.loader.card import read_card

from ..errors import LaunchError
from ..host.placement import Placement, RankPlacement, auto_ranks
from ..host.topology import Topology, read_topology
from ..options import model
from ..options.arguments import whole_number
from ..options.model import quantization_of, resolve_dtype, resolve_kv_dtype
from ..ranks import start
from ..ranks.rank import Job, W, run_rank
from ..ranks.rendezvous import identify
from .peaks import bench_cores

if TYPE_CHECKING:
    import torch

    from tilerank.parallel.join import Team
    from tilerank.runtime.lead.engine import Engine
    from tilerank.runtime.rank.worker import Worker


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ranks, and --result, the file in which rank 0 returns its result to the command."""
    start.add_arguments(parser)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)


def is_rank(args: argparse.Namespace) -> bool:
    """Return whether this process is a rank of a benchmark, as opposed to the command that the user started.

    Raises as `check_command` does.
    """
    if identify(os.environ).launcher == "tilerank":
        return True
    check_command(args)
    return False


def check_command(args: argparse.Namespace) -> None:
    """Raise LaunchError under another launcher, or for options of ranks that contradict each other.

    The command must measure the peaks of the cores before ranks start on them.
    """
    identity = identify(os.environ)
    if identity.launcher != "none" or args.nnodes > 1:
        rank = f"rank {identity.rank} of {identity.size} of another launcher"
        found = f"--nnodes {args.nnodes}" if identity.launcher == "none" else rank
        raise LaunchError(f"bench starts its own ranks, on this machine only; found {found}")
    start.check_arguments(args)


def run_as_rank(args: argparse.Namespace, job: Job[W]) -> int:
    """Run this rank of a benchmark and return its exit status."""
    return run_rank(identify(os.environ), args, job)


def placement_of(args: argparse.Namespace, ranks: int | None = None) -> tuple[Placement, list[int]]:
    """Return the placement of `ranks` ranks (default: --tp), and the cores that they use together."""
    identity, machine = identify(os.environ), read_topology()
    topology = start.own_topology(args, identity, machine)
    placement = start.own_placement(args, identity, machine, ranks or args.tp or auto_ranks(topology))
    return placement, cores_of(placement, topology)


def cores_of(placement: Placement, topology: Topology) -> list[int]:
    """Return the CPUs that the ranks of this machine use together; if they are not bound, one CPU of each core."""
    return sorted({core for rank in placement.ranks for core in rank.cores[: rank.threads]}) or bench_cores(topology)


def run_ranks(args: argparse.Namespace, argv: Sequence[str], ranks: int | None = None) -> Any:
    """Run `ranks` ranks (default: --tp) with the command line `argv`, and return the JSON result of rank 0.

    If they fail, the supervisor prints the reason, and this raises SystemExit with their status.
    """
    with tempfile.TemporaryDirectory(prefix="tilerank-bench-") as scratch:
        result = Path(scratch) / "result.json"
        rank_args = argparse.Namespace(**vars(args) | {"argv": [*argv, "--result", str(result)]})
        rank_args.tp = ranks or args.tp
        status = start.start_ranks(rank_args, identify(os.environ))
        if status != 0:
            raise SystemExit(status)
        return json.loads(result.read_text())


@dataclass(frozen=True)
class RankMemory:
    """The process of a rank, on this host, and the bytes of its weights."""

    pid: int
    weight_bytes: int


class EngineJob:
    """Builds the engine as `generate` does, with a cache for `total_tokens` tokens, and runs `measure` on rank 0.

    measure: takes the engine, the placement and the ranks' memory; its result must be JSON.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        total_tokens: int,
        measure: Callable[["Engine", Placement, list[RankMemory]], Any],
    ) -> None:
        self._args = args
        self._total_tokens = total_tokens
        self._measure = measure
        self._weight_bytes: list[int] = []
        self._pids: list[int] = []

    def prepare(self) -> None:
        return

    def memory_refusal(self, size: int, here: range, placement: Placement) -> str | None:
        from tilerank.runtime.rank.registry import read_supported_card

        from ..planning.plan import plan_model

        card = read_supported_card(self._args.model, model.given_family_options(self._args))
        plan = plan_model(
            replace(card, context_length=min(self._total_tokens, card.context_length)),
            size,
            model=str(self._args.model),
            topology=read_topology(),
            placement=placement,
            strategy=self._args.strategy,
            kv_split=self._args.kv_split,
            dtype=self._args.dtype,
            quantization=quantization_of(self._args),
            kv_cache_dtype=self._args.kv_cache_dtype,
            cached_tokens=self._total_tokens,
            here=here,
        )
        self._weight_bytes = [int(rank.weights) for rank in plan.ranks]
        return plan.refusal()

    def build(self, team: "Team", own: RankPlacement) -> "Worker":
        import torch

        from tilerank.runtime.rank.rank_config import RankConfig
        from tilerank.runtime.rank.worker import Worker

        # Gathered before loading: ranks that share a disk finish loading far apart, which would exceed the deadline.
        self._pids = team.group.all_gather(torch.tensor([os.getpid()])).flatten().tolist()
        return Worker(
            self._args.model,
            team,
            RankConfig(
                dtype=engine_dtype(self._args),
                quantization=quantization_of(self._args),
                kv_dtype=kv_dtype(self._args),
                strategy=self._args.strategy,
                kv_split=self._args.kv_split,
                max_total_tokens=self._total_tokens,
                family_options=model.given_family_options(self._args),
            ),
        )

    def lead(self, worker: "Worker", size: int, placement: Placement) -> None:
        from tilerank.runtime.lead.engine import Engine

        ranks = [RankMemory(pid, nbytes) for pid, nbytes in zip(self._pids, self._weight_bytes, strict=True)]
        self._args.result.write_text(json.dumps(self._measure(Engine(worker), placement, ranks)))


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    model.add_format_arguments(parser, "auto: the checkpoint's dtype")
    model.add_cut_arguments(
        parser, "how heads that do not divide are cut", "whether ranks share contexts of latents out"
    )


def engine_dtype(args: argparse.Namespace) -> "torch.dtype":
    """Return the dtype of activations that the options and the checkpoint ask for."""
    return resolve_dtype(read_card(args.model), args.dtype, quantization_of(args))


def kv_dtype(args: argparse.Namespace) -> "torch.dtype":
    """Return the dtype of the KV cache. Raises LaunchError as resolve_kv_dtype does."""
    return resolve_kv_dtype(args.kv_cache_dtype, engine_dtype(args))


def whole_numbers(low: int) -> Callable[[str], list[int]]:
    """Return an argparse type for distinct whole numbers >= `low`, separated by commas."""
    parse = whole_number(low)
    return lambda text: list(dict.fromkeys(parse(part) for part in text.split(",")))
