"""The status page, which loads nothing from other servers, and the data that it polls."""

import base64
import hashlib
import re
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse, Response

from ...protocol.speech_settings import SAMPLE_RATE
from ..link.client import EngineClient
from .metrics import Metrics
from .recent_requests import RecentRequests

_FILES = Path(__file__).parent / "page"


def _assemble() -> str:
    """Return the page with its style and scripts inside, so that it is one answer and its policy names their hashes."""
    page = (_FILES / "status.html").read_text(encoding="utf-8")
    for name in ("status.css", "load.js", "chat.js"):
        page = page.replace(f"/* {name} */\n", (_FILES / name).read_text(encoding="utf-8"))
    return page


_PAGE = _assemble()


def page() -> Response:
    """Return the page. It needs no API key, because it contains no data. Its policy allows only its own script."""
    return HTMLResponse(_PAGE, headers=_HEADERS)


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


def _hashes(tag: str) -> str:
    """Return the hashes of all elements `tag` of the page in the format of a Content-Security-Policy."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


_HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes('script')}",
            f"style-src {_hashes('style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
