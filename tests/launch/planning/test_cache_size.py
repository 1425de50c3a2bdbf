"""The size of the KV cache, against arithmetic by hand on invented machines, and as ranks report it on this one."""

import argparse
import math
import re
from pathlib import Path
from typing import Any

import pytest
from command import DEMO, run
from fake_sysfs import GIB, Machine, sockets
from media_files import DEMO_VL
from planning import config_of, plan_on
from ranks import run_ranks

from tilerank.launch.options.model import add_arguments, model_options
from tilerank.launch.planning.cache_size import agreed
from tilerank.launch.planning.plan_text import render
from tilerank.launch.planning.plan_types import RANK_OVERHEAD
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.quantization_config import Quantization
from tilerank.runtime.rank.registry import read_supported_card

# Half of an invented node's memory is free; two ranks on two nodes hold half of 6.24 GiB of weights each.


def sized(machine: Machine, tmp_path: Path, tp: int = 2, **options: Any) -> Any:
    return plan_on(machine, tmp_path, config_of(tmp_path), tp, cached_tokens=None, **options)


def pages(nbytes: float, each: float) -> int:
    return int(nbytes / each / 32) * 32


def test_the_share_of_a_node_less_its_weights(tmp_path: Path) -> None:
    plan = sized(sockets(2, 8), tmp_path, mem_fraction=0.25)
    each = 48 * 2 * 2 * 128 * 2  # layers, K and V, KV heads of a rank, head size, bytes
    assert plan.ranks[0].cache_per_token == each
    assert plan.cached_tokens == pages(0.25 * 64 * GIB - plan.ranks[0].weights, each)
    assert plan.cache_reason == (
        "node 0: --mem-fraction-static 0.25 of 64.0 GiB is 16.0 GiB, less 3.12 GiB of bfloat16 weights, "
        "at 48.0 KiB a token"
    )
    assert plan.refusal() is None
    assert f"KV cache of {plan.cached_tokens:,} tokens, 25.8 GiB: node 0: " in render(plan)


def test_never_more_than_is_free(tmp_path: Path) -> None:
    plan = sized(sockets(2, 8), tmp_path, mem_fraction=0.9)
    assert plan.cached_tokens == pages(32 * GIB - plan.ranks[0].weights - RANK_OVERHEAD, plan.ranks[0].cache_per_token)
    assert plan.cache_reason.startswith("node 0: 32.0 GiB free, less 3.12 GiB of bfloat16 weights and 300 MiB for")
    assert plan.need <= plan.available


def test_the_fullest_node_decides(tmp_path: Path) -> None:
    machine = sockets(2, 8)
    machine.memory = {1: 20 * GIB}
    plan = sized(machine, tmp_path, mem_fraction=0.4)
    assert plan.cached_tokens == pages(0.4 * 20 * GIB - plan.ranks[1].weights, plan.ranks[1].cache_per_token)
    assert plan.cache_reason.startswith("node 1: --mem-fraction-static 0.4 of 20.0 GiB is 8.00 GiB, ")


def limited(limit: int, used: int) -> dict[str, str]:
    files = {"memory.max": limit, "memory.current": used, "memory.stat": "inactive_file 0"}
    return {f"sys/fs/cgroup/{name}": str(value) for name, value in files.items()}


def test_the_share_is_of_the_control_group_s_limit(tmp_path: Path) -> None:
    machine = sockets(2, 8)
    machine.cgroup = limited(16 * GIB, GIB)
    plan = sized(machine, tmp_path, mem_fraction=0.5)
    assert plan.cached_tokens == pages(0.5 * 16 * GIB - plan.memory.weights, 2 * plan.ranks[0].cache_per_token)
    assert plan.cache_reason.startswith(
        "the control group: --mem-fraction-static 0.5 of 16.0 GiB is 8.00 GiB, less 6.2"
    )
    machine.cgroup = limited(16 * GIB, 7 * GIB)
    plan = sized(machine, tmp_path, mem_fraction=0.9)
    room = 9 * GIB - plan.memory.weights - 2 * RANK_OVERHEAD
    assert plan.cached_tokens == pages(room, 2 * plan.ranks[0].cache_per_token)
    assert plan.cache_reason.startswith("the control group: 9.00 GiB free, less ")


def test_no_more_than_can_ever_be_used(tmp_path: Path) -> None:
    """256 requests run at a time."""
    config = config_of(tmp_path, max_position_embeddings=100)
    plan = plan_on(sockets(2, 8), tmp_path, config, 2, cached_tokens=None)
    assert plan.cached_tokens == 256 * 100
    assert plan.cache_reason == "256 requests of 100 tokens, no more run at a time"


def test_the_format_of_the_weights_counts(tmp_path: Path) -> None:
    """On nodes of 8 GiB, half of them free, half-size weights leave room where whole ones do not."""
    machine = sockets(2, 8)
    machine.memory = {0: 8 * GIB, 1: 8 * GIB}
    whole = sized(machine, tmp_path, mem_fraction=0.3)
    assert whole.cached_tokens == 0
    assert whole.refusal() == (
        "models/it: no room for a KV cache: node 0: --mem-fraction-static 0.3 of 8.00 GiB is 2.40 GiB, less 3.12 GiB "
        "of bfloat16 weights, at 48.0 KiB a token; a size given by --max-total-tokens is held against the host's "
        "memory as a whole"
    )
    for codes in ("int8", "int4", "fp8"):
        plan = sized(machine, tmp_path, mem_fraction=0.3, quantization=Quantization(codes))
        assert plan.cached_tokens == pages(0.3 * 8 * GIB - plan.ranks[0].weights, plan.ranks[0].cache_per_token) > 0
        assert f"GiB of {codes} weights, at " in plan.cache_reason and plan.refusal() is None
    assert plan_on(machine, tmp_path, config_of(tmp_path), 2, cached_tokens=1000).refusal() is None


def test_too_little_for_the_weights_alone(tmp_path: Path) -> None:
    machine = sockets(2, 8)
    machine.memory = {0: 6 * GIB, 1: 6 * GIB}
    refusal = sized(machine, tmp_path).refusal()
    assert refusal is not None and "not enough memory for 2 ranks: 6.24 GiB of bfloat16 weights, 600 MiB" in refusal


def test_heads_are_cut_for_one_context_not_for_all_of_the_cache(tmp_path: Path) -> None:
    """A cache larger than what a step reads must not change how heads are cut."""
    plan = sized(Machine([(0, 8)] * 6), tmp_path, 6)
    assert plan.expected_tokens == 32768 < plan.cached_tokens
    expected = plan_on(Machine([(0, 8)] * 6), tmp_path, config_of(tmp_path), 6, cached_tokens=32768)
    assert plan.attention == expected.attention and plan.memory.weights == expected.memory.weights


@pytest.mark.parametrize("text", ["0", "-1", "1.01", "nan", "inf", "much"])
def test_no_share(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--mem-fraction-static={text}"])
    assert f"'{text}' is not a share of the memory" in capsys.readouterr().err


def agree(team: Any, tokens: list[int | None]) -> int:
    return agreed(team.group, tokens[team.group.rank])


def test_hosts_agree_on_the_least() -> None:
    """Ranks 0 and 2 are the first ones of their hosts."""
    assert run_ranks(3, "tests.launch.planning.test_cache_size:agree", kwargs={"tokens": [640, None, 320]}) == [320] * 3


def test_ranks_say_how_large_it_is() -> None:
    words = ["generate", DEMO, "--tp", 2, "--prompt", "a", "--max-new-tokens", 2]
    result = run(*words)
    assert result.status == 0
    found = re.search(
        r"^INFO: KV cache of ([0-9,]+) tokens, .*: (node 0|the control group|256 requests)", result.err, re.M
    )
    assert found is not None, result.err
    assert 0 < int(found[1].replace(",", "")) <= 256 * 4096
    asked = run(*words, "--max-total-tokens", 640)
    assert "INFO: KV cache of 640 tokens, 1.88 MiB, as asked; there is room for " in asked.err


def test_encoded_media_take_a_part_of_the_share(tmp_path: Path) -> None:
    """On each rank of a model that takes pictures, and on none of another."""
    model, node, media = DEMO_VL, 8 * GIB, 2 * GIB
    machine = sockets(2, 8)
    machine.memory = {0: node, 1: node}
    sizes = {name: math.prod(tensor.shape) for name, tensor in Checkpoint(model).tensors.items() if ".visual." in name}
    plan = plan_on(
        machine, tmp_path, read_supported_card(model), 2, cached_tokens=None, mem_fraction=0.3, mm_cache_bytes=media
    )
    rank = plan.ranks[0]
    assert plan.memory.media == 2 * media
    assert 2 * sum(sizes.values()) <= sum(rank.encoder for rank in plan.ranks) < 2.5 * sum(sizes.values())
    assert plan.cached_tokens == pages(0.3 * node - rank.weights - media, rank.cache_per_token)
    assert (
        plan.need
        == plan.memory.weights + 2 * media + 2 * RANK_OVERHEAD + plan.cached_tokens * plan.memory.cache_per_token
    )
    assert plan.cache_reason is not None and "of bfloat16 weights, 2.00 GiB for media, at " in plan.cache_reason
    assert "encoded, they take up to 2.00 GiB on each rank." in render(plan)
    refusal = plan_on(
        machine, tmp_path, read_supported_card(model), 2, cached_tokens=1 << 30, mm_cache_bytes=media
    ).refusal()
    assert refusal is not None and "4.00 GiB for media, " in refusal
    text = sized(sockets(2, 8), tmp_path, mm_cache_bytes=media)
    assert text.memory.media == 0 and "Pictures" not in render(text)


def test_no_size_of_the_media_cache(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert model_options(parser.parse_args(["--mm-cache-gib", "0.5"])).mm_cache_bytes == 1 << 29
    for text in ("-1", "nan", "inf", "much"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--mm-cache-gib={text}"])
        assert f"'{text}' is not a number of GiB" in capsys.readouterr().err
