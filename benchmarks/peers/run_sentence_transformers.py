"""sentence-transformers as a peer of benchmarks/compare_embeddings.py: `python run_sentence_transformers.py WORKLOAD
RESULT`.

Runs without tilerank in a Python environment that has sentence-transformers. WORKLOAD: "model", "dtype", "cores", and
"runs", each a list of batches of texts. RESULT: "version", and "seconds" of each batch of each run. A batch is one call
of `encode`. A directory without modules.json takes the last token of a text.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(workload: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, workload["cores"])  # before torch starts threads: they inherit it
    import sentence_transformers
    import torch
    from sentence_transformers import SentenceTransformer, models

    torch.set_num_threads(len(workload["cores"]))
    dtype, directory = getattr(torch, workload["dtype"]), workload["model"]
    if (Path(directory) / "modules.json").is_file():
        model = SentenceTransformer(directory, device="cpu", model_kwargs={"dtype": dtype})
    else:
        transformer = models.Transformer(directory, model_args={"dtype": dtype})
        pooling = models.Pooling(transformer.get_word_embedding_dimension(), pooling_mode="lasttoken")
        model = SentenceTransformer(modules=[transformer, pooling, models.Normalize()], device="cpu")

    def embed(texts: list[str]) -> float:
        began = time.monotonic()
        model.encode(texts, batch_size=len(texts), show_progress_bar=False)
        return time.monotonic() - began

    seconds = [[embed(batch) for batch in run] for run in workload["runs"]]
    return {"version": sentence_transformers.__version__, "seconds": seconds}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(workload_file.read_text()))))
