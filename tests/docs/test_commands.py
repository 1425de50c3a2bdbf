"""README.md and docs: commands use subcommands and options that exist, and links lead to existing headings."""

import re
from functools import cache
from pathlib import Path

import pytest
from command import run

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]
BENCHES = "peaks|kernels|comm|model|media|speech|speaking|serve|quality|make-model"


@cache
def options(command: str) -> set[str]:
    result = run(*command.split(), "--help")
    assert result.status == 0, result.err
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", result.out))


@pytest.mark.parametrize("page", PAGES)
def test_options_in_commands_exist(page: str) -> None:
    text = (ROOT / page).read_text().replace("\\\n", " ")
    pattern = rf"(?:(?<=[`$ /])|^)tilerank (generate|serve|chat|batch|plan|doctor|bench (?:{BENCHES}))\b([^`\n|]*)"
    for command, arguments in re.findall(pattern, text, re.M):
        used = set(re.findall(r"(?<=\s)--[a-z][a-z-]*", re.sub(r'"[^"]*"', "", arguments)))
        assert used <= options(command), f"{page}: tilerank {command}: no {sorted(used - options(command))}"


def anchors(text: str) -> set[str]:
    """Return the names of the headings of a page in links: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text()):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target.read_text()), f"{page}: {link}"
