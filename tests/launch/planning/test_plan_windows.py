"""What plans say of layers with a window: Gemma-3-27b's, by arithmetic from its published shape."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_sysfs import sockets
from planning import config_of, plan_on

from tilerank.launch.planning.plan_text import as_json, render
from tilerank.launch.planning.plan_types import MemoryUse, Plan
from tilerank.launch.text import size
from tilerank.runtime.protocol.sizes import num_window_tokens

# 10 of 62 layers attend to all tokens, 52 to 1,024: 16 KV heads of 128 in bf16.
FULL, SLIDING, WINDOW, CONTEXT = 10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2, 1024, 131072


def plan(tmp_path: Path, tokens: int) -> Plan:
    found = plan_on(sockets(2, 8), tmp_path, config_of(tmp_path), 1, cached_tokens=tokens)
    (rank,), nodes = found.ranks, found.nodes
    return replace(
        found,
        window=WINDOW,
        context_length=CONTEXT,
        ranks=(replace(rank, cache_per_token=FULL, window_per_token=SLIDING),),
        nodes=(replace(nodes[0], cache_per_token=FULL, window_per_token=SLIDING), *nodes[1:]),
    )


@pytest.mark.parametrize("use", [(FULL, SLIDING), (0, SLIDING), (FULL, 0)])
def test_the_most_tokens_are_the_last_ones_whose_windows_fit_too(use: tuple[int, int]) -> None:
    """Also of models whose layers all slide, and of those that have none that do."""
    held = MemoryUse(cache_per_token=use[0], window_per_token=use[1])
    for tokens in (1, 1000, 20000, 100000, 1_000_000):
        room = use[0] * tokens + use[1] * num_window_tokens(tokens, WINDOW)
        most = held.tokens(room, WINDOW)
        assert most >= tokens and held.cache_bytes(most, WINDOW) <= room < held.cache_bytes(most + 8, WINDOW)
    assert held.tokens(0, WINDOW) == held.tokens(-1, WINDOW) == 0


def test_the_text_says_how_many_tokens_and_requests_there_is_room_for(tmp_path: Path) -> None:
    """16,384 of 131,072 tokens hold (16,384 - 2,048) / (1,024 + 64) = 13 windows, but the other layers one context."""
    found = plan(tmp_path, CONTEXT)
    text = render(found)
    assert f"KV cache of 131,072 tokens, {size(FULL * CONTEXT + SLIDING * 16384)}, as asked" in text
    assert (
        f"Layers with a window of 1,024 tokens have room for 16,384 tokens, {size(SLIDING * 16384)} of this; "
        "1 request of 131,072 tokens can run at a time."
    ) in text
    data = as_json(found)
    assert (data["window_tokens"], data["window_per_token"], data["cache_per_token"]) == (16384, SLIDING, FULL)
    assert "Layers with a window" not in render(replace(found, window=0))
