"""Runs a multiple-choice task of lm-eval against a server and against transformers, and compares both.

    python -m venv VENV && VENV/bin/pip install "lm-eval[api,hf]"
    tilerank serve assets/demo-lm --dtype float32 --tp 2 --port 8011
    VENV/bin/python tests/clients/lm_eval_choices.py http://127.0.0.1:8011 assets/demo-lm

The questions are beginnings of sentences of the demo model's kind; the task is written to a temporary folder, so that
nothing is downloaded. Ends with status 1 if a log-likelihood differs by more than 0.001, or a greedy flag differs.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

QUESTIONS = [
    ("In the beginning God", ["created the heaven and the earth.", "eat pizza on Fridays."], 0),
    ("And it came to", ["compile", "pass", "the internet"], 1),
    ("And the Lord spake unto", ["Moses, saying", "the licence of the software", "42"], 0),
    ("Permission is hereby granted, free of", ["the children of Israel", "charge"], 1),
    ("Once upon a time there", ["was", "wert thou", "copyright"], 0),
]
TASK = """
task: tilerank_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def main(url: str, model_dir: str) -> int:
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "questions.jsonl"
        rows = ({"question": question, "choices": choices, "answer": answer} for question, choices, answer in QUESTIONS)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (Path(folder) / "task.yaml").write_text(TASK.format(data=data))
        os.environ["HF_HOME"] = folder
        served = {"model": Path(model_dir).name, "base_url": f"{url}/v1/completions", "tokenizer": model_dir}
        theirs = evaluate("hf", {"pretrained": model_dir, "dtype": "float32", "device": "cpu"}, folder)
        for tokenized in (True, False):
            # lm-eval cannot batch prompts that are text.
            fields = {"tokenized_requests": tokenized, "num_concurrent": 4, "batch_size": 3 if tokenized else 1}
            ours = evaluate("local-completions", served | fields, folder)
            if not same(ours, theirs):
                return 1
    return 0


def evaluate(model: str, arguments: dict[str, Any], folder: str) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder)
    result = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["tilerank_choices"],
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
    )
    scores = {name: value for name, value in result["results"]["tilerank_choices"].items() if "acc" in name}
    answers = {sample["doc_id"]: sample["filtered_resps"] for sample in result["samples"]["tilerank_choices"]}
    return {"scores": scores, "answers": answers}


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    print("server:      ", ours["scores"])
    print("transformers:", theirs["scores"])
    pairs = [
        (one, other)
        for number, answers in theirs["answers"].items()
        for one, other in zip(ours["answers"][number], answers, strict=True)
    ]
    worst = max(abs(float(one[0]) - float(other[0])) for one, other in pairs)
    flags = all(str(one[1]) == str(other[1]) for one, other in pairs)
    print(f"{len(pairs)} choices: log-likelihoods differ by at most {worst:.2g}; greedy flags are the same: {flags}")
    return worst <= 1e-3 and flags and ours["scores"] == theirs["scores"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
