"""`tilerank plan`: how a model would be cut, what each node would hold, and where the ranks would run."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace

from tilerank.loader.card import ModelCard
from tilerank.runtime.protocol.sizes import HTTP_PROCESS_BYTES

from ..errors import LaunchError
from ..host.kept_rates import rung_texts
from ..host.placement import Placement, auto_ranks
from ..host.topology import Topology, read_topology
from ..options import model
from ..options.arguments import whole_number, whole_numbers
from ..options.hub import add_model_argument
from ..options.replicas import add_arguments as add_replica_arguments
from ..planning.groups import PREFILL_AND_DECODE, RankGroup, plan_groups, prefill_and_decode
from ..planning.other_machine import MAX_NODES, described_machine, idle_machine, without_cores
from ..planning.plan import model_bytes
from ..planning.plan_text import as_json, render, render_groups, render_replicas, replicas_as_json
from ..planning.plan_types import ReplicaPlans
from ..planning.prediction import arguments as prediction_arguments
from ..planning.prediction.arguments import check_disaggregate, mix_and_limits, refuse_without
from ..planning.prediction.machine import Machine, machine_names, read_machine, shares_of
from ..planning.prediction.predict import (
    node_parts,
    predict_cases,
    predict_goodput,
    predicted_server,
)
from ..planning.prediction.rank_splits import compare_splits
from ..planning.prediction.text import Prediction
from ..planning.prediction.text import as_json as as_json_prediction
from ..planning.prediction.text import render as render_prediction
from ..planning.replicas import Division, divide
from ..ranks import prefill_ranks
from ..ranks.rendezvous import identify
from ..ranks.start import own_placement, own_topology

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
    prediction_arguments.add_arguments(
        prediction,
        "plan for the machine of a file, which `doctor --machine` writes, and predict the speed on it; names: "
        f"{', '.join(machine_names())}",
    )
    prediction.add_argument(
        "--prompt-tokens", type=whole_numbers(1), default=[1024], metavar="N,N", help="prompt lengths (default: 1024)"
    )
    prediction.add_argument(
        "--batch", type=whole_numbers(1), default=[1, 16], metavar="N,N", help="batch sizes (default: 1,16)"
    )
    model.add_plan_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _tp(text: str) -> int | None:
    return None if text == "auto" else whole_number(1)(text)


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns 1 if the memory does not suffice, else 0."""
    from tilerank.runtime.rank.registry import read_supported_card

    check_disaggregate(args)
    if args.machine is None:
        refuse_without(args, "--machine", "slo", "mix")
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
    prefill = _prefill_ranks(args, card, division.tp)
    whole = own_placement(args, identity, machine, division.tp // hosts * division.dp)
    speed = None
    if described is not None:
        speed = _prediction(args, described, card, options, topology, whole, prefill)
        prefill = speed.prefill
    groups = [RankGroup(division.tp, options, hosts)] * division.dp
    if prefill:
        groups = prefill_and_decode(division.tp, prefill, options) * division.dp
    plans = plan_groups(card, groups, model=str(args.model), topology=topology, placement=whole, remedy=True)
    if other is not None:
        plans = tuple(map(without_cores, plans))
    rungs = rung_texts() if other is None else []
    if len(plans) == 1:
        report, page, refusal = as_json(plans[0]), render(plans[0]), plans[0].refusal()
    else:
        replicas = ReplicaPlans(plans, division.reason, PREFILL_AND_DECODE if prefill else ())
        page = render_groups(replicas) if replicas.roles else render_replicas(replicas)
        report, refusal = replicas_as_json(replicas), replicas.refusal()
    if speed is not None:
        report, page = report | {"prediction": as_json_prediction(speed)}, f"{page}\n\n{render_prediction(speed)}"
    if args.json:
        print(json.dumps(report | {"rungs": rungs}))
    else:
        print("\n".join([page, *([""] if rungs else []), *(f"Kernels: {text}." for text in rungs)]))
    return 0 if refusal is None else 1


def _prefill_ranks(args: argparse.Namespace, card: ModelCard, tp: int) -> int:
    """Return the number of --prefill-nodes, 0 without it. Raises LaunchError, and EngineError for a model that has no
    prefill ranks."""
    from tilerank.runtime.rank.whole_pages import check_generates

    if args.prefill_nodes is None:
        return 0
    prefill = prefill_ranks.group_sizes(args, tp)[0]
    check_generates("--prefill-nodes", args.model, card)
    return prefill


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
    topology: Topology,
    placement: Placement,
    prefill: int,
) -> Prediction:
    """Return the speed with so many prefill ranks, or with those that --disaggregate chooses."""
    choice = goodput = None
    if args.disaggregate is not None:
        mix, limits = mix_and_limits(args)
        choice = compare_splits(card, options, machine, topology, placement, args.model, mix, limits)
        prefill, goodput = choice.chosen.prefill, choice.chosen.goodput
    server = predicted_server(card, options, machine, node_parts(machine, placement.ranks), prefill)
    cases = predict_cases(server, args.prompt_tokens, args.batch, NEW_TOKENS)
    if choice is None and args.slo is not None:
        goodput = predict_goodput(server, *mix_and_limits(args))
    return Prediction(machine, shares_of(machine).source, cases, prefill, goodput, choice)
