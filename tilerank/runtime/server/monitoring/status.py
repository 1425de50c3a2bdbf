"""The data of the status page."""

import time
from itertools import zip_longest
from typing import Any

from ...protocol.speech_settings import SAMPLE_RATE
from ..link.client import EngineClient
from .metrics import Metrics
from .recent_requests import RecentRequests


def status_json(
    client: EngineClient, recent: RecentRequests, metrics: Metrics, about: dict[str, Any]
) -> dict[str, Any]:
    """Return the data of the page as a JSON object that begins with `about`. It contains no prompts and no paths."""
    state, totals, rank_stats = client.state, client.totals, client.rank_stats
    data = about | {
        "ready": state is not None,
        "restarts": client.restarts,
        "latest": recent.as_json(),
        "ended_in_last_minute": recent.ends(),
        "first_token_s": metrics.first_token.percentiles(),
        "inter_token_s": metrics.inter_token.percentiles(),
        "errors": metrics.errors,
    }
    if state is None:
        return data
    return data | {
        "clock_s": time.monotonic(),
        "context_length": state.context_length,
        "cache_tokens": state.cache_tokens,
        "cache_used": state.cache_used,
        "window_pages": state.window_pages,
        "window_pages_used": state.window_pages_used,
        "source_pages": state.source_pages,
        "source_pages_used": state.source_pages_used,
        "speaking": state.speaking,
        "talker_pages": state.talker_pages,
        "talker_pages_used": state.talker_pages_used,
        "running": state.running,
        "waiting": state.waiting,
        "prompt_tokens": totals.prompt_tokens,
        "generated_tokens": totals.generated_tokens,
        "cache_queried_tokens": totals.queried_tokens,
        "cache_hit_tokens": totals.hit_tokens,
        "speech_frames": totals.speech_frames,
        "speech_seconds": totals.speech_samples / SAMPLE_RATE,
        "bytes_per_s": rank_stats.bytes_per_s,
        "ranks": [
            {
                "rank": rank.rank,
                "host": rank.host,
                "nodes": rank.nodes,
                "cores": rank.cores,
                "isa": rank.isa,
                "weight_bytes": rank.weight_bytes,
                "cache_bytes": rank.cache_bytes,
                "local_memory": rank.local_memory,
                "wait_share": share,
            }
            # Before the first report there are no shares.
            for rank, share in zip_longest(rank_stats.ranks, rank_stats.wait_shares)
        ],
    }
