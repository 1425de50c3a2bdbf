"""A stand-in of the Hugging Face hub on the loopback interface."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves directories as models. `requests` lists what was asked: method and path."""

    def __init__(self, models: dict[str, Path]) -> None:
        self.requests: list[tuple[str, str]] = []
        self.sizes: dict[str, int] = {}  # that are claimed instead of true ones
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                hub.requests.append((self.command, path))
                if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
                    self._describe(found[1], found[2], found[3] or "main")
                elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                    self._send_file(models[found[1]] / found[3])
                else:
                    self._answer(404)

            do_HEAD = do_GET

            def _describe(self, model: str, what: str, revision: str) -> None:
                if model not in models:
                    self._answer(404, headers={"X-Error-Code": "RepoNotFound"})
                elif revision not in ("main", COMMIT):
                    self._answer(404, headers={"X-Error-Code": "RevisionNotFound"})
                else:
                    files = [path for path in sorted(models[model].iterdir()) if path.is_file()]
                    tree = [
                        {"type": "file", "path": p.name, "size": hub.sizes.get(p.name, p.stat().st_size), "oid": tag(p)}
                        for p in files
                    ]
                    info = {"id": model, "sha": COMMIT, "siblings": [{"rfilename": path.name} for path in files]}
                    self._answer(200, json.dumps(tree if what == "tree" else info).encode())

            def _send_file(self, path: Path) -> None:
                size = hub.sizes.get(path.name, path.stat().st_size)
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{tag(path)}"', "X-Linked-Size": str(size)}
                self._answer(200, path.read_bytes(), headers)

            def _answer(self, status: int, body: bytes = b"{}", headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def tag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
