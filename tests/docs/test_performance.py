"""The tables of docs/performance.md are those of the recorded figures."""

from benchmarks.tables import BLOCK, PAGE, ROOT, page_with_tables


def test_the_page_has_the_recorded_figures() -> None:
    page = PAGE.read_text()
    assert page_with_tables(page) == page, "run python -m benchmarks.tables"
    recorded = {f"results/{file.name}" for file in (ROOT / "benchmarks" / "results").iterdir()}
    assert {block[1] for block in BLOCK.findall(page)} == recorded
