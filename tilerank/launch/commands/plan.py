"""`tilerank plan`: how a model would be cut, what each node would hold, and where the ranks would run."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace

from tilerank.loader.card import ModelCard
from tilerank.runtime.protocol.sizes import HTTP_PROCESS_BYTES

from ..errors import LaunchError
from ..goodput.limits import limits_of
from ..goodput.mix import mix_of
from ..host.kept_rates import rung_texts
from ..host.placement import Placement, auto_ranks, divide_placement
from ..host.topology import Topology, read_topology
from ..options import model
from ..options.arguments import whole_number, whole_numbers
from ..options.hub import add_model_argument
from ..options.replicas import add_arguments as add_replica_arguments
from ..planning.other_machine import MAX_NODES, described_machine, idle_machine, without_cores
from ..planning.plan import model_bytes, plan_model
from ..planning.plan_text import as_json, render, render_groups, render_replicas, replicas_as_json
from ..planning.plan_types import Plan, ReplicaPlans
from ..planning.prediction.machine import Machine, machine_names, read_machine, shares_of
from ..planning.prediction.predict import Prediction, predict_cases, predict_goodput, predicted_step
from ..planning.prediction.text import as_json as as_json_prediction
from ..planning.prediction.text import render as render_prediction
from ..planning.remedies import plan_with_remedy
from ..planning.replicas import Division, divide
from ..ranks import prefill_ranks
from ..ranks.rendezvous import identify
from ..ranks.start import own_placement, own_topology

GROUPS = ("prefill ranks", "decode ranks")
NEW_TOKENS = 32
"""Decode steps over whose contexts a predicted step is the mean, as `bench model` measures by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--tp",
        "--tensor-parallel-size",
        type=_tp,
        metavar="auto|N",
        help="number of ranks that a layer is cut over (auto: one per NUMA node)",
    )
    add_replica_arguments(parser)
    prefill_ranks.add_arguments(parser)
    parser.add_argument("--cores", default="auto", help='cores of each rank, "0-39|43-82"; auto or none')
    parser.set_defaults(bind="auto")
    parser.add_argument(
        "--nodes",
        type=whole_number(1, MAX_NODES),
        metavar="N",
        help="plan for another machine, with so many NUMA nodes and --node-memory on each (default: this machine)",
    )
    parser.add_argument("--node-memory", type=model.gib, metavar="GIB", help="memory of each of --nodes")
    prediction = parser.add_argument_group("prediction of speed")
    prediction.add_argument(
        "--machine",
        metavar="NAME|FILE.yaml",
        help="plan for the machine of a file, which `doctor --machine` writes, and predict the speed on it; names: "
        f"{', '.join(machine_names())}",
    )
    prediction.add_argument(
        "--prompt-tokens", type=whole_numbers(1), default=[1024], metavar="N,N", help="prompt lengths (default: 1024)"
    )
    prediction.add_argument(
        "--batch", type=whole_numbers(1), default=[1, 16], metavar="N,N", help="batch sizes (default: 1,16)"
    )
    prediction.add_argument(
        "--slo",
        type=limits_of,
        metavar="ttft=2s,tpot=100ms",
        help="predict the goodput that `bench serve --slo` finds",
    )
    prediction.add_argument(
        "--mix",
        metavar="NAME|FILE",
        default="mlperf-llama-3.1-8b",
        help="--slo: lengths of the requests (default: mlperf-llama-3.1-8b)",
    )
    model.add_plan_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _tp(text: str) -> int | None:
    return None if text == "auto" else whole_number(1)(text)


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns 1 if the memory does not suffice, else 0."""
    from tilerank.runtime.rank.registry import read_supported_card

    described = None if args.machine is None else read_machine(args.machine)
    other = _other_machine(args, described)
    machine, identity = other or read_topology(), identify(os.environ)
    topology = own_topology(args, identity, machine)
    topology = replace(topology, limits=topology.limits.beside(HTTP_PROCESS_BYTES))
    options = model.model_options(args)
    card = read_supported_card(args.model, options.family)
    card = replace(card, context_length=model.context_length(args, card))
    hosts = 1 if described is None else described.hosts
    division = Division(args.tp or auto_ranks(topology) * hosts, 1)
    if division.tp % hosts:
        raise LaunchError(f"--tp {division.tp}: expected a multiple of the {hosts} hosts of {args.machine}")
    if args.dp != 1:
        division = divide(topology, args.tp, args.dp, lambda: model_bytes(card, options))
    groups = [_Group(division.tp, options)] * division.dp
    if args.prefill_nodes is not None:
        groups = _prefill_and_decode(args, card, division.tp, options) * division.dp
    whole = own_placement(args, identity, machine, sum(group.tp // hosts for group in groups))

    def planned(group: _Group, placement: Placement) -> Plan:
        def planner(card: ModelCard, options: model.ModelOptions) -> Plan:
            name, tp, here = str(args.model), group.tp, range(group.tp // hosts)
            return plan_model(card, tp, options, model=name, topology=topology, placement=placement, here=here)

        plan = plan_with_remedy(card, group.options, planner)
        return plan if other is None else without_cores(plan)

    parts = divide_placement(whole, [group.tp // hosts for group in groups])
    plans = tuple(planned(group, part) for group, part in zip(groups, parts, strict=True))
    rungs = rung_texts() if other is None else []
    if len(plans) == 1:
        report, page, refusal = as_json(plans[0]), render(plans[0]), plans[0].refusal()
    else:
        replicas = ReplicaPlans(plans, division.reason, GROUPS if args.prefill_nodes else ())
        page = render_groups(replicas) if replicas.roles else render_replicas(replicas)
        report, refusal = replicas_as_json(replicas), replicas.refusal()
    if described is not None:
        speed = _prediction(args, described, card, options, division.tp, whole)
        report, page = report | {"prediction": as_json_prediction(speed)}, f"{page}\n\n{render_prediction(speed)}"
    if args.json:
        print(json.dumps(report | {"rungs": rungs}))
    else:
        print("\n".join([page, *([""] if rungs else []), *(f"Kernels: {text}." for text in rungs)]))
    return 0 if refusal is None else 1


@dataclass(frozen=True)
class _Group:
    """`tp` ranks that hold the whole model together."""

    tp: int
    options: model.ModelOptions


def _prefill_and_decode(
    args: argparse.Namespace, card: ModelCard, tp: int, options: model.ModelOptions
) -> list[_Group]:
    """Return the two groups of a replica with --prefill-nodes, of `tp` ranks together. Raises LaunchError, and
    EngineError for a model that has none."""
    from tilerank.runtime.rank.whole_pages import check_generates

    if args.machine is not None:
        raise LaunchError("--machine predicts the speed of one group of ranks: expected no --prefill-nodes with it")
    prefill, decode = prefill_ranks.group_sizes(args, tp)
    check_generates("--prefill-nodes", args.model, card)
    return [_Group(prefill, replace(options, gives_pages=True)), _Group(decode, options)]


def _other_machine(args: argparse.Namespace, described: Machine | None) -> Topology | None:
    """Return the machine that --machine, or --nodes, describes; None if this one is meant. Raises LaunchError."""
    memory = None if args.node_memory is None else int(args.node_memory * (1 << 30))
    other = described_machine(args.nodes, memory)
    if described is not None:
        if other is not None:
            raise LaunchError("--machine describes a whole machine: expected no --nodes with it")
        if args.dp != 1:
            raise LaunchError("--machine predicts the speed of one replica: expected no --dp with it")
        other = idle_machine(described.nodes, int(described.memory_gib * (1 << 30)), described.cores)
    if other is not None and args.cores != "auto":
        option = "--nodes" if described is None else "--machine"
        raise LaunchError(f"--cores {args.cores} names cores of this machine, but {option} plans for another one")
    return other


def _prediction(
    args: argparse.Namespace,
    machine: Machine,
    card: ModelCard,
    options: model.ModelOptions,
    tp: int,
    placement: Placement,
) -> Prediction:
    seconds = predicted_step(card, tp, options, machine, placement.ranks)
    cases = predict_cases(seconds, args.prompt_tokens, args.batch, NEW_TOKENS)
    source = shares_of(machine).source
    if args.slo is None:
        return Prediction(machine, source, cases)
    mix = mix_of(args.mix)
    return Prediction(machine, source, cases, mix, args.slo, predict_goodput(seconds, mix, args.slo))
