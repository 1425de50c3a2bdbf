"""Chat templates are rendered in separate processes with limits."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import DEMO

from tilerank.launch.serving import chat_renderer
from tilerank.launch.serving.chat_renderer import ChatRenderer
from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

TEMPLATE = """{%- if messages[0].content == "endless" -%}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor -%}
{%- elif messages[0].content == "refused" -%}
{{- raise_exception("no ä") -}}
{%- endif -%}
{{- bos_token }}{{ messages | tojson }}{{ tools }}{{ add_generation_prompt }}"""


def renderer_of(directory: Path, template: str | None) -> ChatRenderer:
    shutil.copy(DEMO / "tokenizer.json", directory)
    shutil.copy(DEMO / "tokenizer_config.json", directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return ChatRenderer(Tokenizer(directory))


def end(renderer: ChatRenderer) -> None:
    for process in renderer.pool.processes:
        process.end()


async def render(renderer: ChatRenderer, text: str) -> str:
    variables: dict[str, Any] = {"tools": None, "add_generation_prompt": True}
    return await renderer.render([{"role": "user", "content": text}], variables)


def test_renders_as_this_process_does(tmp_path: Path) -> None:
    """Also while a template never ends, which is stopped."""
    renderer = renderer_of(tmp_path, TEMPLATE)

    async def run() -> None:
        endless = asyncio.create_task(render(renderer, "endless"))
        expected = Tokenizer(tmp_path).apply_chat_template(
            [{"role": "user", "content": "Köln 🙂"}], tools=None, add_generation_prompt=True
        )
        assert await render(renderer, "Köln 🙂") == expected
        assert not endless.done()
        with pytest.raises(TokenizerError) as caught:
            await endless
        assert str(caught.value.__cause__) == "it takes more than 2 s or 4 GiB"
        with pytest.raises(TokenizerError) as caught:
            await render(renderer, "refused")
        assert str(caught.value.__cause__) == "no ä"
        assert await renderer.takes_calls() is True
        assert await renderer.after_answer() == Tokenizer(tmp_path).chat_template.after_answer != ""

    asyncio.run(asyncio.wait_for(run(), 100))
    end(renderer)


def test_an_abandoned_conversation_is_not_the_answer_to_another(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, TEMPLATE)

    async def run() -> None:
        for _ in range(3 * chat_renderer.PROCESSES):
            abandoned = asyncio.create_task(render(renderer, "abandoned"))
            await asyncio.sleep(0.01)
            abandoned.cancel()
        assert "wanted" in await render(renderer, "wanted")

    asyncio.run(asyncio.wait_for(run(), 100))
    end(renderer)


def test_no_template(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, None)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match="expected a chat template named default") as caught:
        asyncio.run(render(renderer, "x"))
    assert caught.value.__cause__ is None
    end(renderer)
