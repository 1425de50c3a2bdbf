"""The fields that local servers add, with scripted answers of a stand-in for the engine."""

import re
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.runtime.server.scripted import QWEN_3, QWEN_3_5, Server, make_model, run
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.events import TokenEvent
from tilerank.runtime.protocol.params import Logprobs
from tilerank.runtime.server.apis.completions.body import Completion
from tilerank.runtime.server.apis.completions.choices import ChatFormatter, TextFormatter
from tilerank.runtime.server.chat.deltas import Delta
from tilerank.runtime.server.chat.fields import IGNORED, UNSUPPORTED
from tilerank.runtime.server.chat.request import ChatCompletion

USER: Any = {"role": "user", "content": "Who?"}
CALL: Any = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "Ur"}'}}
TURNS: Any = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "noon"},
]
TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in ("now", "then")]
SIMPLE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<tool_call>"
ALTERNATES = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('?') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<tool_call>"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("fields") / "model")


def test_fields_reach_the_engine(model: Path) -> None:
    async def ask(server: Server) -> None:
        fields = {
            "min_tokens": 2,
            "bad_words": ["evil"],
            "allowed_token_ids": [5, 7],
            "cache_salt": "mine",
            "truncate_prompt_tokens": 3,
            "rid": "my-id",
        }
        answer = await server.ask("Moses.", extra_body=fields, max_tokens=9)
        submit, encode = server.submits[-1], server.tokenizer.encode
        words = tuple(tuple(encode(word, add_special_tokens=False)) for word in ("evil", " evil"))
        params = submit.params
        assert (params.min_new_tokens, params.allowed_token_ids, params.bad_words) == (2, (5, 7), words)
        assert len(submit.prompt.token_ids) == 3 and submit.prompt.salt == "mine"
        assert answer.id == "chatcmpl-my-id"
        await server.ask("Moses.", max_tokens=9)
        whole, plain = server.submits[-1].prompt.token_ids, server.submits[-1].prompt.keys
        assert submit.prompt.token_ids == whole[-3:] and plain == whole
        assert submit.prompt.keys[0] != whole[-3] and submit.prompt.keys[1:] == whole[-2:]

    run(model, QWEN_3, ask)


def test_stop_strings_and_tokens_in_answers(model: Path) -> None:
    async def ask(server: Server) -> None:
        async def text(answer: str, **fields: Any) -> Any:
            whole = await server.ask(answer, stop=["es"], extra_body=fields)
            return whole.choices[0].message.content

        assert await text("Moses and Ramses") == "Mos"
        assert await text("Moses and Ramses", include_stop_str_in_output=True) == "Moses"
        assert (
            await text("Moses and Ramses", min_tokens=len(server.tokenizer.encode("Moses", False))) == "Moses and Rams"
        )
        assert await text("<|im_end|>Mos") == "Mos"
        assert await text("<|im_end|>Mos", skip_special_tokens=False) == "<|im_end|>Mos"

        answer = await server.ask("Moses.", extra_body={"return_token_ids": True})
        ids = server.tokenizer.encode("Moses.", False)
        assert answer.prompt_token_ids == server.submits[-1].prompt.token_ids
        assert answer.choices[0].token_ids == [*ids, 0]  # 0 ends the scripted answer
        chunks = [c async for c in await server.ask("Moses.", stream=True, extra_body={"return_token_ids": True})]
        assert [id for chunk in chunks for id in chunk.choices[0].token_ids] == [*ids, 0]
        shown = [getattr(chunk, "prompt_token_ids", None) for chunk in chunks]
        assert shown == [answer.prompt_token_ids, *[None] * (len(chunks) - 1)]

    run(model, QWEN_3, ask)


def test_an_echo_comes_first(model: Path) -> None:
    async def ask(server: Server) -> None:
        server.answer = " Moses and Ramses"
        fields: Any = {"model": "it", "prompt": ["Who?", "es"], "echo": True, "stop": ["es"]}
        whole = await server.client.completions.create(**fields)
        assert [choice.text for choice in whole.choices] == ["Who? Mos", "es Mos"]
        texts = [""] * 2
        async for chunk in await server.client.completions.create(**fields, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in whole.choices]

    run(model, QWEN_3, ask)


def test_log_probabilities_may_name_tokens_by_their_ids(model: Path) -> None:
    token = TokenEvent(0, 7, 0.0, logprobs=Logprobs(-1.0, ((9, -0.5),), 2))
    plain, chat = TextFormatter(Tokenizer(model), 1, True), ChatFormatter(Tokenizer(model), 1, True)
    logprobs = plain.chunk(Delta(0, ("x",), (token,), None))["logprobs"]
    assert (logprobs["tokens"], logprobs["top_logprobs"]) == (["token_id:7"], [{"token_id:9": -0.5}])
    assert chat.chunk(Delta(0, ("x",), (token,), None))["logprobs"]["content"][0]["token"] == "token_id:7"


@pytest.mark.parametrize("template", [SIMPLE, ALTERNATES])
def test_tool_calls_round_trip_through_simple_templates(model: Path, template: str) -> None:
    """Calls and results become texts in the model's own format."""

    async def ask(server: Server) -> None:
        await server.ask("a", *TURNS, tools=TOOLS)
        assert '<tool_call>\n{"name": "now", "arguments": {"zone": "Ur"}}\n</tool_call><|im_end|>' in server.prompt
        assert "user\n<tool_response>\nnoon\n</tool_response>" in server.prompt
        await server.ask("a", {"role": "developer", "content": "Be brief."}, USER)
        assert "<|im_start|>system\nBe brief." in server.prompt

    run(model, template, ask)


def test_some_tools_are_allowed(model: Path) -> None:
    async def ask(server: Server) -> None:
        def choice(mode: str, *names: str) -> Any:
            tools = [{"type": "function", "function": {"name": name}} for name in names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

        await server.ask("a", tools=TOOLS, tool_choice=choice("auto", "now"))
        assert '"now"' in server.prompt and '"then"' not in server.prompt
        assert server.submits[-1].params.grammar is None
        await server.ask("a", tools=TOOLS, tool_choice=choice("required", "now"))
        grammar = server.submits[-1].params.grammar
        assert grammar is not None and "now" in grammar and "then" not in grammar
        with pytest.raises(openai.BadRequestError, match="no tool has this function name"):
            await server.ask("a", tools=TOOLS, tool_choice=choice("auto", "never"))

    run(model, QWEN_3, ask)


def test_a_message_is_continued(model: Path) -> None:
    async def ask(server: Server) -> None:
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        await server.ask("a", USER, {"role": "assistant", "content": "It was "}, extra_body=fields)
        assert server.prompt.endswith("<|im_start|>assistant\nIt was ")
        answer = await server.ask(
            "not so</think>b", USER, {"role": "assistant", "content": "<think>\nIs it"}, extra_body=fields
        )
        assert answer.choices[0].message.reasoning_content == "not so" and answer.choices[0].message.content == "b"
        with pytest.raises(openai.BadRequestError, match="a final message of the assistant"):
            await server.ask("a", USER, extra_body=fields)

    run(model, SIMPLE.removesuffix("<tool_call>"), ask)


def test_reasoning_can_be_left_out_and_bounded(model: Path) -> None:
    async def ask(server: Server) -> None:
        message = (await server.ask("Why</think>b", extra_body={"include_reasoning": False})).choices[0].message
        assert message.content == "b" and not hasattr(message, "reasoning_content")
        with pytest.raises(openai.BadRequestError, match="has no variable thinking_budget"):
            await server.ask("a", extra_body={"thinking_token_budget": 5})

    async def budget(server: Server) -> None:
        await server.ask("a", extra_body={"thinking_token_budget": 5, "documents": [{"title": "Ur"}]})
        assert server.prompt.endswith("5 Ur")

    run(model, QWEN_3_5, ask)
    run(model, "{{ messages[0].content }}{{ thinking_budget }} {{ documents[0].title }}", budget)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logits_processors": ["a"]}, "'logits_processors' is not supported: code of requests is not run"),
        ({"priority": 3}, "'priority' is not supported: requests run in order of arrival"),
        ({"echo": True}, "'echo' is not supported: /v1/completions has it"),
        ({"dry_multiplier": 0.8}, "'dry_multiplier' is not supported: use the penalties"),
        ({"prompt": "Who?"}, "'prompt' is not supported: /v1/completions has it"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: expected -1 or at least 1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: expected at most 4"),
    ],
)
def test_what_the_server_does_not_do_is_refused_by_name(model: Path, fields: dict[str, Any], says: str) -> None:
    async def ask(server: Server) -> None:
        with pytest.raises(openai.BadRequestError, match=says):
            await server.ask("a", extra_body=fields)
        neutral = {"logits_processors": [], "priority": 0, "modalities": ["text"], "length_penalty": 1.0, "user": "me"}
        neutral |= {"verbosity": "low", "typical_p": 1}
        assert (await server.ask("Moses.", extra_body=neutral)).choices[0].message.content == "Moses."

    run(model, QWEN_3, ask)


def test_the_documentation_names_every_field() -> None:
    text = (Path(__file__).parents[3] / "docs" / "requests.md").read_text()
    taken, rest = text.split("## Ignored")
    ignored, refused = rest.split("## Refused")
    fields = ChatCompletion.model_fields.keys() | Completion.model_fields.keys()
    for part, names in ((taken, fields - {"best_of"}), (ignored, IGNORED), (refused, UNSUPPORTED.keys() | {"best_of"})):
        assert set(re.findall(r"`([a-z_]+)`", part)) >= names
