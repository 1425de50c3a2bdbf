"""The rungs on which kernels run: rank 0 chooses them by measured rates, and all ranks use the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ..host.kept_rates import known_rates

if TYPE_CHECKING:
    from tilerank.kernels.rung_rates import Rates
    from tilerank.parallel.join import Team

    from ..host.placement import RankPlacement

log = logging.getLogger(__name__)


def agree_on_rungs(team: Team, own: RankPlacement, *, spin: bool) -> None:
    """Use the rungs that rank 0 chooses among those that every rank can run. Every rank calls this once it has joined.

    Bits depend on the rung, and some results are computed by every rank for itself. Raises KernelError for a rung that
    this machine cannot run.
    """
    from tilerank.kernels import core

    if team.isa != core.isa():
        log.warning("rank %d runs on %s instead of %s: another rank has no newer rung", own.rank, team.isa, core.isa())
        core.force_isa(team.isa)
    if team.group.rank == 0:
        use_fastest_rungs(own.pool_cores, own.threads, spin=spin)
        team.channel.send(msgspec.json.encode(core.rungs()))
    else:
        core.use_rungs(msgspec.json.decode(team.channel.receive(), type=dict[str, str]))


def use_fastest_rungs(cores: Sequence[int] | None, threads: int, *, spin: bool) -> None:
    """Use the rungs with the highest rates, which are measured on the first of `cores` unless they are kept in a file.

    The arguments are those of core.start_pool, which is called again after measuring. TILERANK_ISA overrides rates.
    """
    from tilerank.kernels import core, rung_rates

    def measure(rungs: Sequence[str]) -> Rates:
        core.start_pool(None if cores is None else cores[:1], 1, spin=spin)
        try:
            return rung_rates.measure(rungs)
        finally:
            core.start_pool(cores, threads, spin=spin)

    rungs = rung_rates.candidates()
    if rungs:
        rates = known_rates(rungs, measure)
        core.use_rungs(rung_rates.choose(rates))
        log.info("rungs by measured rates: %s", "; ".join(rung_rates.texts(rates)))
