"""A server that is told to stop while requests run says for how many it waits, and until when."""

import http.client
import json
import signal
from pathlib import Path

from command import endless_copy
from serving import serving


def test_a_stopping_server_says_for_what_it_waits_and_how_long(tmp_path: Path) -> None:
    model = endless_copy(tmp_path / "model")
    with serving("--tp", 1, "--drain-timeout", 0.5, "--model-path", model) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        body = {"prompt": [5], "max_tokens": 60000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().read(100)
        server.running.process.send_signal(signal.SIGINT)
        line = server.running.await_line("draining")
        assert line == "tilerank: draining: 1 request, at most 1 s; press Ctrl-C again to stop now\n"
        connection.close()
        server.running.finish()
