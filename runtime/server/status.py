"""The status page: one file that asks nobody but this server, and the figures that it asks for."""

import base64
import hashlib
import re
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse, Response

from .client import EngineClient
from .latest import Latest

_PAGE = (Path(__file__).parent / "status.html").read_text(encoding="utf-8")


def page() -> Response:
    """Holds no figures, so it needs no key. It runs its own script and style and no others, and loads nothing."""
    return HTMLResponse(_PAGE, headers=_HEADERS)


def told(client: EngineClient, latest: Latest, about: dict[str, Any]) -> dict[str, Any]:
    """What the page shows, ready for JSON; `about` is put before it. No prompts, no paths."""
    state, totals, figures = client.state, client.totals, client.figures
    told = about | {"ready": state is not None, "restarts": max(client.restarts, 0), "latest": latest.told()}
    if state is None:
        return told
    return told | {
        "clock_s": time.monotonic(),
        "context_length": state.context_length,
        "cache_tokens": state.cache_tokens,
        "cache_used": state.cache_used,
        "running": state.running,
        "waiting": state.waiting,
        "prompt_tokens": totals.prompt_tokens,
        "generated_tokens": totals.generated_tokens,
        "bytes_per_s": figures.bytes_per_s,
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
            for rank, share in zip_longest(figures.ranks, figures.wait_shares)  # no shares before the first steps
        ],
    }


def _hashes(tag: str) -> str:
    """Of the contents of all elements `tag` of the page, as a policy lists them."""
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
