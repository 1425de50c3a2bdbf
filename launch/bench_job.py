"""What the benchmarks that need ranks have in common: starting them as `generate` does, and getting figures back."""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilerank.loader.config import load_config

from . import quantize, start
from .bench_peaks import bench_cores
from .errors import LaunchError
from .placement import Placement, RankPlacement, auto_ranks
from .quantize import quantization_of, resolve_dtype, resolve_kv_dtype
from .rank import Job, W, run_rank
from .rendezvous import identify
from .topology import Topology, read_topology

if TYPE_CHECKING:
    import torch

    from tilerank.loader.config import ModelConfig
    from tilerank.parallel.join import Team
    from tilerank.runtime.engine import Engine

DTYPES = ("auto", "bfloat16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ranks, and the file through which rank 0 tells the command what it found."""
    start.add_arguments(parser)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)


def is_rank(args: argparse.Namespace) -> bool:
    """Whether this process is a rank of a benchmark, not the command. LaunchError under another launcher.

    Ranks that something else started cannot be compared: the peaks are measured on the cores before they start.
    """
    identity = identify(os.environ)
    if identity.launcher == "tilerank":
        return True
    if identity.launcher != "none" or args.nnodes > 1:
        one_of = f"rank {identity.rank} of {identity.size} here"
        found = f"--nnodes {args.nnodes}" if identity.launcher == "none" else one_of
        raise LaunchError(f"bench starts its ranks itself, on this machine; found {found}")
    start.check_arguments(args)
    return False


def run_as_rank(args: argparse.Namespace, job: Job[W]) -> int:
    return run_rank(identify(os.environ), args, job)


def placement_of(args: argparse.Namespace, ranks: int | None = None) -> tuple[Placement, list[int]]:
    """Where `ranks` ranks (by default --tp) will run, and the cores that they use together."""
    identity, machine = identify(os.environ), read_topology()
    topology = start.own_topology(args, identity, machine)
    placement = start.own_placement(args, identity, machine, ranks or args.tp or auto_ranks(topology))
    return placement, cores_of(placement, topology)


def cores_of(placement: Placement, topology: Topology) -> list[int]:
    """The cores that the ranks of this machine use together: where they are not bound, one thread of each."""
    return sorted({core for rank in placement.ranks for core in rank.cores[: rank.threads]}) or bench_cores(topology)


def run_ranks(args: argparse.Namespace, argv: Sequence[str], ranks: int | None = None) -> Any:
    """Starts `ranks` ranks (by default --tp) with the command line `argv`, and returns what rank 0 wrote.

    If they fail the supervisor has said why: SystemExit with their status.
    """
    with tempfile.TemporaryDirectory(prefix="tilerank-bench-") as scratch:
        result = Path(scratch) / "result.json"
        own = argparse.Namespace(**vars(args) | {"argv": [*argv, "--result", str(result)]})
        own.tp = ranks or args.tp
        status = start.start_ranks(own, identify(os.environ), lambda _: None)  # layers refuse what cannot be cut
        if status != 0:
            raise SystemExit(status)
        return json.loads(result.read_text())


@dataclass(frozen=True)
class RankMemory:
    """A rank's process, all of this host, and the bytes of its weights."""

    pid: int
    weight_bytes: int


class EngineJob:
    """Builds the engine as `generate` does, with a cache for `total_tokens` tokens; `measure` runs on rank 0."""

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
        from .plan import plan_model

        config = model_config(self._args.model)
        plan = plan_model(
            replace(config, max_position_embeddings=min(self._total_tokens, config.max_position_embeddings)),
            size,
            model=str(self._args.model),
            topology=read_topology(),
            placement=placement,
            strategy=self._args.strategy,
            dtype=self._args.dtype,
            quantization=quantization_of(self._args),
            kv_cache_dtype=self._args.kv_cache_dtype,
            cached_tokens=self._total_tokens,
            here=here,
        )
        self._weight_bytes = [rank.weights for rank in plan.ranks]
        return plan.refusal()

    def build(self, team: "Team", own: RankPlacement) -> "Engine":
        import torch

        from tilerank.runtime.engine import Engine

        # Before loading, which takes ranks that share a disk unlike long.
        self._pids = team.group.all_gather(torch.tensor([os.getpid()])).flatten().tolist()
        return Engine(
            self._args.model,
            team,
            dtype=engine_dtype(self._args),
            quantization=quantization_of(self._args),
            kv_dtype=kv_dtype(self._args),
            strategy=self._args.strategy,
            max_total_tokens=self._total_tokens,
        )

    def lead(self, engine: "Engine", size: int, placement: Placement) -> None:
        ranks = [RankMemory(pid, nbytes) for pid, nbytes in zip(self._pids, self._weight_bytes, strict=True)]
        self._args.result.write_text(json.dumps(self._measure(engine, placement, ranks)))


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a Hugging Face model directory")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: the checkpoint's")
    quantize.add_arguments(parser)
    parser.add_argument(
        "--strategy", choices=("auto", "pad", "split"), default="auto", help="how heads that do not divide are cut"
    )


def model_config(model_dir: Path) -> "ModelConfig":
    """LaunchError where there is no directory, ConfigError where its config.json does not say what it should."""
    if not model_dir.is_dir():
        raise LaunchError(f"{model_dir} is not a directory; expected a local Hugging Face directory with a config.json")
    return load_config(model_dir)


def engine_dtype(args: argparse.Namespace) -> "torch.dtype":
    return resolve_dtype(model_config(args.model), args.dtype, quantization_of(args))


def kv_dtype(args: argparse.Namespace) -> "torch.dtype":
    return resolve_kv_dtype(args.kv_cache_dtype, engine_dtype(args))


def whole_numbers(low: int) -> Callable[[str], list[int]]:
    """An argparse type: whole numbers from `low` up, separated by commas."""
    one = start.whole_number(low)
    return lambda text: list(dict.fromkeys(one(part) for part in text.split(",")))
