"""Runs guidellm's load against a server, in chats and completions, and checks its report.

    python -m venv VENV && VENV/bin/pip install guidellm
    tilerank serve assets/demo-lm --tp 2 --port 8011
    VENV/bin/python tests/clients/guidellm_load.py http://127.0.0.1:8011 assets/demo-lm

guidellm makes the prompts itself, with the model's tokenizer. Ends with status 1 if a request fails, or has not as many
tokens as were asked for.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STREAMS, REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 3, 9, 32, 16


def report_of(url: str, model_dir: str, path: str) -> dict[str, list[dict[str, Any]]]:
    """Run a load of several streams and return guidellm's requests by how they ended."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = {
            "backend": f"kind=openai_http,target={url},request_format={path}",
            "profile": f"kind=concurrent,streams={STREAMS}",
            "constraint": f"kind=max_requests,count={REQUESTS}",
            "tokenizer": f"kind=huggingface_auto,model={model_dir}",
            "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={NEW_TOKENS}",
            "output": f"kind=json,path={report}",
        }
        command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
        for name, value in options.items():
            command += [f"--{name}", value]
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdin=subprocess.DEVNULL)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return dict(benchmark["requests"])


def main(url: str, model_dir: str) -> int:
    failed = False
    for path in ("/v1/chat/completions", "/v1/completions"):
        found = report_of(url, model_dir, path)
        tokens = [request["output_tokens"] for request in found["successful"]]
        print(f"{path}: {len(tokens)} requests answered, {len(found['errored'])} failed; tokens: {sorted(set(tokens))}")
        failed |= tokens != [NEW_TOKENS] * REQUESTS or bool(found["errored"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
