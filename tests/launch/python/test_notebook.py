"""The notebook of the documentation in a kernel, with transformers as the judge of its texts."""

from pathlib import Path
from typing import Any

import nbclient
import nbformat
from serving import greedy

NOTEBOOK = Path(__file__).parents[3] / "docs" / "notebooks" / "llm.ipynb"


def test_the_notebook_runs() -> None:
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "the page in the repository has no outputs"
    load = next(cell for cell in notebook.cells if cell.id == "load")
    load.source = load.source.replace("tp=2", 'tp=2, dtype="float32"')  # as transformers computes
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": NOTEBOOK.parent}}).execute()
    said = {cell.id: "".join(map(text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"}
    for prompt in ("Once upon a time", "In the beginning God"):
        assert f"{prompt} | {greedy(prompt, 12)}\n" in said["generate"]
    likeliest = next(line for line in said["alternatives"].splitlines() if line.endswith("'"))  # after the bar
    assert likeliest.endswith(repr(greedy("The king of", 1)))
    assert said["chat"].splitlines()[-1] in ("'yes'", "'no'")


def text(output: Any) -> str:
    return str(output.text) if output.output_type == "stream" else str(output.get("data", {}).get("text/plain", ""))
