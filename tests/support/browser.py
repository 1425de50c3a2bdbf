"""A headless Chromium, controlled over its DevTools protocol through a pair of pipes."""

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
TIMEOUT_S = 300.0


def find() -> str | None:
    """Return the command of an installed browser; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A page in a new browser. Use as a context manager."""

    def __init__(self, *, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        command = find()
        assert command is not None, f"none of {', '.join(NAMES)} is installed"
        self._profile = tempfile.TemporaryDirectory(prefix="tilerank-browser-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def take_pipes() -> None:
            # The browser reads commands from descriptor 3 and writes to 4.
            source, target = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(source, 3)
            os.dup2(target, 4)

        self._process = subprocess.Popen(
            [
                command,
                "--headless",
                "--no-sandbox",  # root cannot use the sandbox
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--hide-scrollbars",
                "--remote-debugging-pipe",
                f"--user-data-dir={self._profile.name}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            process_group=0,
            preexec_fn=take_pipes,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.console: list[str] = []  # messages of scripts, policies and the network
        target = next(t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.look(width=width, height=height, dark=dark)

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        # The whole process group: helper processes write to the profile, even while it is removed.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.await_true("document.readyState === 'complete'", f"{url} does not load")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def await_true(self, script: str, otherwise: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not self.run(f"Boolean({script})"):  # an element itself becomes an empty object
            assert time.monotonic() < deadline, f"{otherwise}:\n{self.text('body')}\n{self.console}"
            time.sleep(0.05)

    def write(self, selector: str, text: str) -> None:
        """Focus an element and insert text as keyboard input."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "Tab": 9}
        for kind in ("keyDown", "keyUp"):
            more = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **more)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def screenshot(self, path: Path) -> None:
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser is gone"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Log.entryAdded":
            self.console.append(params["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.console.append(str(params["args"]))
