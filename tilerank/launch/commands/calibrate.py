"""`tilerank calibrate`: the inputs of a model's projections on a text, in a file by which quantising weighs errors."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tilerank.loader.card import read_card

from ..bench.scoring.text import read_text
from ..errors import LaunchError
from ..host.placement import Placement, RankPlacement
from ..host.topology import read_topology
from ..logs import say
from ..options import model
from ..ranks import start
from ..ranks.rank import run_rank
from ..ranks.rendezvous import identify
from ..text import count

if TYPE_CHECKING:
    from tilerank.parallel.group import Group
    from tilerank.parallel.join import Team
    from tilerank.runtime.rank.worker import Worker

DEFAULT_TEXT = Path(__file__).parent / "calibration.txt"
"""Prose, dialogue, code, tables and other languages, about 1,200 tokens, all written for tilerank."""

WINDOW = 1024
"""Tokens that the text is cut into; each window is read by itself."""

_CACHED = WINDOW + 32  # tokens in the cache: a window and a page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", "-o", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--text", type=Path, default=DEFAULT_TEXT, metavar="FILE", help="in UTF-8 (default: a text of tilerank)"
    )
    model.add_arguments(parser)
    start.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    start.check_arguments(args)
    job = CalibrateJob(args)
    identity = identify(os.environ)
    if start.ours_to_start(args, identity):
        job.prepare()
        return start.start_ranks(args, identity)
    return run_rank(identity, args, job)


class CalibrateJob:
    """The job of the ranks of `calibrate`. The command itself also calls `prepare`, before it starts any rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model_dir = model.model_directory(args)
        self._options = replace(model.model_options(args), cached_tokens=_CACHED)

    def prepare(self) -> None:
        card = model.checked_card(self._args, self._model_dir)
        self._text = read_text(self._args.text, card, model.tokenizer_directory(self._args), WINDOW, None)

    def memory_refusal(self, size: int, here: range, placement: Placement) -> str | None:
        from tilerank.runtime.rank.registry import read_supported_card

        from ..planning.plan import plan_model

        card, name = read_supported_card(self._model_dir, self._options.family), str(self._model_dir)
        topology = read_topology()
        plan = plan_model(card, size, self._options, model=name, topology=topology, placement=placement, here=here)
        return plan.refusal()

    def build(self, team: Team, own: RankPlacement) -> ObservedWorker:
        from tilerank.runtime.rank.worker import Worker

        config = self._options.rank_config(read_card(self._model_dir), _CACHED)
        worker = Worker(self._model_dir, team, replace(config, eager=True), start.weight_files(self._args))
        return ObservedWorker(worker, team.group, self._args.output)

    def lead(self, observed: ObservedWorker, size: int, placement: Placement) -> None:
        from tilerank.runtime.lead.engine import Engine
        from tilerank.runtime.protocol.prompt import Prompt

        engine = Engine(observed.worker)
        for window in self._text.windows:
            engine.score(Prompt(list(window)))
        say(f"{self._model_dir.name}: {count(sum(map(len, self._text.windows)), 'token')} of {self._text.name}")


class ObservedWorker:
    """A worker that sums the squares of the inputs of its projections; rank 0 writes `output` in the end."""

    def __init__(self, worker: Worker, group: Group, output: Path) -> None:
        self.worker = worker
        self._group, self._output = group, output
        self._squares = worker.observe_inputs()

    def follow(self) -> None:
        self.worker.follow()
        for _ in self._squares.means(self._group):
            pass

    def stop(self) -> None:
        from tilerank.loader.calibration import write_calibration

        self.worker.stop()
        means = {name: mean for name, mean in self._squares.means(self._group) if mean.any()}
        try:
            write_calibration(self._output, means)
        except OSError as e:
            raise LaunchError(f"{self._output} cannot be written: {e.strerror}") from e
        say(f"wrote the inputs of {count(len(means), 'projection')} to {self._output}")
