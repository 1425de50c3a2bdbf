"""Shared by benchmarks that need ranks: starting them as `generate` does, and passing the result of rank 0 back."""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilerank.loader.card import read_card

from ..errors import LaunchError
from ..host.placement import Placement, RankPlacement, auto_ranks
from ..host.topology import Topology, read_topology
from ..options import model
from ..options.model import model_options
from ..ranks import start
from ..ranks.rank import Job, W, run_rank
from ..ranks.rendezvous import identify
from .peaks import bench_cores

if TYPE_CHECKING:
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


def cache_tokens(args: argparse.Namespace, batches: Iterable[tuple[int, int]]) -> int:
    """Return the tokens of a cache in which the sequences of each batch of the model run at once.

    batches: sequences, and tokens of each.
    """
    from tilerank.kernels.kv_pages import PAGE_TOKENS
    from tilerank.runtime.protocol.sizes import tokens_for

    from ..planning.work import model_work

    card, options = read_card(args.model), model_options(args)
    work = model_work(card, options.torch_dtype(card), options.quantization, options.torch_kv_dtype(card))
    # Plus one page for each sequence, since a sequence takes whole pages.
    return max(
        tokens_for(sequences, length + PAGE_TOKENS, states=work.state > 0, window=work.window)
        for sequences, length in batches
    )


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
        self._options = replace(model_options(args), cached_tokens=total_tokens)
        self._total_tokens = total_tokens
        self._measure = measure
        self._weight_bytes: list[int] = []
        self._pids: list[int] = []

    def prepare(self) -> None:
        return

    def memory_refusal(self, size: int, here: range, placement: Placement) -> str | None:
        from tilerank.runtime.rank.registry import read_supported_card

        from ..planning.plan import plan_model

        card = read_supported_card(self._args.model, self._options.family)
        plan = plan_model(
            replace(card, context_length=min(self._total_tokens, card.context_length)),
            size,
            self._options,
            model=str(self._args.model),
            topology=read_topology(),
            placement=placement,
            here=here,
        )
        self._weight_bytes = [int(rank.weights) for rank in plan.ranks]
        return plan.refusal()

    def build(self, team: "Team", own: RankPlacement) -> "Worker":
        import torch

        from tilerank.runtime.rank.worker import Worker

        # Gathered before loading: ranks that share a disk finish loading far apart, which would exceed the deadline.
        self._pids = team.group.all_gather(torch.tensor([os.getpid()])).flatten().tolist()
        config = self._options.rank_config(read_card(self._args.model), self._total_tokens)
        return Worker(self._args.model, team, config)

    def lead(self, worker: "Worker", size: int, placement: Placement) -> None:
        from tilerank.runtime.lead.engine import Engine

        ranks = [RankMemory(pid, nbytes) for pid, nbytes in zip(self._pids, self._weight_bytes, strict=True)]
        self._args.result.write_text(json.dumps(self._measure(Engine(worker), placement, ranks)))


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    model.add_format_arguments(parser, "auto: the checkpoint's dtype")
    model.add_cut_arguments(
        parser, "how heads that do not divide are cut", "whether ranks share contexts of latents out"
    )
    model.set_default_sizes(parser)
