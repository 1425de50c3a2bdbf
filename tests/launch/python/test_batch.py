"""`tilerank batch` on the demo model, with transformers as the judge of its texts."""

import json
from pathlib import Path
from typing import Any

from command import DEMO, run
from serving import PROMPTS, greedy


def request(id: str, prompt: object, **fields: object) -> dict[str, Any]:
    body = {"model": "demo-lm", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    return {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body}


def test_results_errors_by_line_and_a_second_run(tmp_path: Path) -> None:
    """The second run finds a file that an interrupted run left: one result, and the half of another."""
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = [request(f"id {i}", prompt) for i, prompt in enumerate(PROMPTS)]
    bad = [
        request("top_p", "x", top_p=2),
        request("stream", "x", stream=True),
        {**request("get", "x"), "method": "GET"},
    ]
    lines = [*map(json.dumps, [*good, *bad, good[0]]), "", "{"]
    given.write_text("\n".join(lines))
    kept = {"id": "batch_req_0", "custom_id": "id 0", "response": {"status_code": 200}, "error": None}
    out.write_text(json.dumps(kept) + "\n" + '{"id": "batch_req_1", "cust')
    result = run("batch", given, out, DEMO, "--tp", 2, "--dtype", "float32")
    assert result.status == 0 and "11 requests: 5 without an answer, 1 from an earlier run" in result.err, result.err
    assert "11/11" in result.err and "tokens/s" in result.err
    first, *found = map(json.loads, out.read_text().splitlines())
    assert first == kept
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in found if answered(one)}
    assert texts == {f"id {i}": greedy(PROMPTS[i], 8) for i in range(1, len(PROMPTS))}
    failed = {one["custom_id"]: one for one in found if not answered(one) and one["custom_id"] is not None}
    assert failed.keys() == {"top_p", "stream"}
    assert failed["top_p"]["response"]["status_code"] == 400
    assert failed["top_p"]["response"]["body"]["error"]["param"] == "top_p"
    assert failed["stream"]["error"]["code"] == "unsupported_answer"
    errors = {one["error"]["line"]: one["error"]["code"] for one in found if one["custom_id"] is None}
    assert errors == {9: "invalid_line", 10: "duplicate_custom_id", 12: "invalid_line"}
    before = out.read_bytes()
    again = run("batch", given, out, DEMO, "--tp", 2)
    assert again.status == 0 and "has the results of all 11 requests" in again.err
    assert out.read_bytes() == before
    out.write_text("something else\n")
    (error,) = run("batch", given, out, DEMO).errors
    assert error == f"tilerank: error: {out} line 1: expected the result of a batch, found something else"


def answered(result: dict[str, Any]) -> bool:
    return result["response"] is not None and result["response"]["status_code"] == 200
