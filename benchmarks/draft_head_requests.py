"""Requests whose answers a draft head learns: questions, and texts, code and records that answers repeat.

Given prose and code are of Python's standard library on this machine, and of the text of `tilerank bench quality`.
"""

import ast
import sysconfig
import tokenize
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

from tilerank.launch.bench.scoring.text import DEFAULT_TEXT

QUESTIONS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "Tell a story in which {} changes somebody's life.",
    "List five facts about {}.",
    "What should everybody know about {}?",
    "Write a Python function that has to do with {}.",
    "Summarise the history of {} in a few sentences.",
    "Write a letter to a friend about {}.",
    "Describe {} as JSON with a few fields.",
    "Why does {} matter? Give three reasons.",
    "Write a dialogue between two people who disagree about {}.",
    "Describe a day in the life of somebody who works with {}.",
    "Write a news report about {}.",
    "What are common mistakes with {}, and how are they avoided?",
    "Write a poem about {}.",
)
TOPICS = (
    *("bread", "the moon", "sorting numbers", "rivers", "trains", "chess", "bees", "the weather", "music", "gardens"),
    *("a bakery", "volcanoes", "libraries", "prime numbers", "the sea", "bicycles", "cats", "maps", "electricity"),
    *("glass", "a village", "dates and times", "forests", "bridges", "photography", "snow", "football", "strings"),
    *("paper", "the heart", "airports", "temperatures", "a watch", "salt", "tea", "horses", "the alphabet", "money"),
    *("a hospital", "satellites", "gold", "a market", "dreams", "fishing", "the desert", "newspapers", "wool", "keys"),
    *("teachers", "elevators", "pottery", "sleep", "a harbour", "potatoes", "radio", "shadows", "islands", "laws"),
)
PROSE_REQUESTS = (
    "Repeat this text word by word.\n\n{}",
    "Here is a text.\n\n{}\n\nQuote its first sentence, then summarise the rest.",
    "Correct the mistakes in this text and return all of it.\n\n{}",
    "What does this text say? Answer with its own words.\n\n{}",
)
CODE_REQUESTS = (
    "Return this code with a comment in its first line.\n```python\n{}\n```",
    "Rename the first parameter in this code to `given`. Return the whole code.\n```python\n{}\n```",
    "Rename the function or class in this code to `Renamed`. Return all of it.\n```python\n{}\n```",
)
RECORDS_REQUEST = (
    'Write these notes as JSON of this form: {{"notes": [{{"thing": "", "count": 0, "room": 0, "day": ""}}]}}\n\n{}'
)
RECORD = "On the {} of May, {} books about {} were brought to room {}."
FEWEST_LETTERS, MOST_LETTERS = 200, 1600
"""Of a text or a piece of code."""
MOST_OF_A_MODULE = 4
"""The most texts, and the most pieces of code, that are taken from one module."""
DEFINITIONS = ast.FunctionDef | ast.ClassDef


def requests() -> list[str]:
    """Return the contents of user messages, always the same ones on the same Python."""
    return [
        *(request.format(about) for request, about in product(QUESTIONS, TOPICS)),
        *(request.format(text) for request, text in product(PROSE_REQUESTS, _prose())),
        *(request.format(code) for request, code in product(CODE_REQUESTS, _code())),
        *(RECORDS_REQUEST.format(records) for records in _records()),
    ]


def _prose() -> Iterator[str]:
    text = DEFAULT_TEXT.read_text()
    for start in range(0, len(text), MOST_LETTERS):
        yield text[start : start + MOST_LETTERS]
    for _, module in _modules():
        described = (node for node in (module, *module.body) if isinstance(node, ast.Module | DEFINITIONS))
        texts = (ast.get_docstring(node) or "" for node in described)
        yield from islice((words[:MOST_LETTERS] for words in texts if len(words) >= FEWEST_LETTERS), MOST_OF_A_MODULE)


def _code() -> Iterator[str]:
    """Yield the first functions and classes of a fitting length of each module."""
    for source, module in _modules():
        parts = (ast.get_source_segment(source, node) or "" for node in module.body if isinstance(node, DEFINITIONS))
        yield from islice((part for part in parts if FEWEST_LETTERS <= len(part) <= MOST_LETTERS), MOST_OF_A_MODULE)


def _modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the source and the syntax of the modules of the standard library that are no packages."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        with tokenize.open(file) as stream:
            source = stream.read()
        yield source, ast.parse(source)


def _records() -> Iterator[str]:
    for number in range(len(TOPICS)):
        topics = (TOPICS * 2)[number : number + 3]
        yield "\n".join(
            RECORD.format(1 + (number * 7 + place) % 31, 3 + number * place, topic, 100 + (number + place * 13) % 40)
            for place, topic in enumerate(topics)
        )
