"""Serves the web pages. They contain no data, so they need no API key, and they load nothing from other servers.

What a model writes is untrusted: scripts, styles and pictures come from this server alone, and the chat can turn text
into elements only through DOMPurify (Trusted Types).
"""

from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles

_FOLDER = Path(__file__).parent
_OWN_FILES = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src 'self' data:",
    "media-src data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
_CHECKED_MARKUP = ("require-trusted-types-for 'script'", "trusted-types dompurify")
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
_PAGES = {path.stem: path.read_text(encoding="utf-8") for path in _FOLDER.glob("*.html")}


def page(name: str) -> Response:
    """Return the page "chat", "status" or "reference"."""
    # Swagger UI, which shows the reference, writes markup without a Trusted Types policy.
    policy = _OWN_FILES if name == "reference" else _OWN_FILES + _CHECKED_MARKUP
    return HTMLResponse(_PAGES[name], headers=_HEADERS | {"Content-Security-Policy": "; ".join(policy)})


class PageFiles(StaticFiles):
    """Scripts and styles of the pages, vendored libraries among them."""

    def __init__(self) -> None:
        super().__init__(directory=_FOLDER / "static")

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response
