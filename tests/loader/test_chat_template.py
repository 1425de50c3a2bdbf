"""Chat templates equal transformers, and cannot leave their sandbox."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutate import json_mutations
from tokenizer_styles import DEMO, STYLES, reference

from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '  What is <b>"1 & 1"</b>?\n'},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "東京 🦙"},
]


@pytest.mark.parametrize("style", ["demo", *STYLES])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_template_equals_transformers(directories: dict[str, Path], style: str, prompt: bool) -> None:
    ours, theirs = Tokenizer(directories[style]), reference(directories[style])
    text = ours.apply_chat_template(CHAT, add_generation_prompt=prompt)
    assert text == theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, tokenize=False)
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=True)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("style", ["qwen", "omni", "llama", "mllama"])
def test_chat_template_with_parts_equals_transformers(directories: dict[str, Path], style: str) -> None:
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
    ours, theirs = Tokenizer(directories[style]), reference(directories[style])
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat, tokenize=False)


# Each uses one feature that published templates rely on.
TEMPLATES = {
    "whitespace": "{% for m in messages %}\n    {% if true %}\n  {{ m.role }}:\n    {% endif %}\n{% endfor %}\n",
    "loop control": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m }}{% break %}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ {'b': 1, 'a': 'é&'} | tojson(sort_keys=true) }}",
    "tojson separators": "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "namespace": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys(['x', 'y'], 0) }}",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ no_such_token }}|",
    "defaults": "{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}{{ enable_thinking is defined }}",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.reasoning }}{% endfor %}",
    "strings": "{{ messages[0].content.split(' ')[0].strip().upper() }}{{ messages[0]['content'][::-1] }}{{ 'a' ~ 1 }}",
    "macro": "{% macro show(m) -%} [{{ m.role }}] {%- endmacro %}{{ show(messages[0]) }}",
    "date": "{{ strftime_now('%Y') | length }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {"<k>": "é"}}}]])
def test_template_language_equals_transformers(
    directories: dict[str, Path], tmp_path: Path, name: str, tools: list[dict[str, Any]] | None
) -> None:
    copy = Path(shutil.copytree(directories["llama"], tmp_path / "model"))
    (copy / "chat_template.jinja").write_text(TEMPLATES[name])
    chat = [*CHAT, {"role": "assistant", "content": "", "reasoning": "since"}]
    ours = Tokenizer(copy).apply_chat_template(chat, tools=tools)
    assert ours == reference(copy).apply_chat_template(chat, tools=tools, tokenize=False)


def test_variables_reach_the_template(tmp_path: Path) -> None:
    assert rendered(tmp_path, "{{ enable_thinking }}", enable_thinking=False) == "False"


def test_the_variables_that_a_template_reads(tmp_path: Path) -> None:
    """Not its own names; a name that is set on one path only is one of them."""
    template = (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% set own = 1 %}"
        "{% macro show(it) %}{{ it }}{{ effort | default('low') }}{% endmacro %}"
        "{% for m in messages %}{{ show(m.reasoning) }}{{ own }}{% endfor %}{{ thinking }}"
    )
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "{{ tools }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    templates = Tokenizer(tmp_path).chat_template
    assert templates.variables(None) == {"messages", "thinking", "effort"}
    assert templates.variables([]) == {"tools"}
    assert templates.source == f"{template}\n{{{{ tools }}}}"


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
)
MARKS = [f"<|{name}|>" for name in ("im_start", "im_end", "start", "message", "end", "return")]
MARKS += ["<|im_end|>x", "<s>", "</s>"]


@pytest.mark.parametrize(
    ("template", "eos", "ends"),
    [
        (CHATML, "<s>", ["<s>", "<|im_end|>"]),
        (CHATML, "<|im_end|>", ["<|im_end|>"]),
        (CHATML, None, ["<|im_end|>"]),
        (HARMONY, "<s>", ["<s>", "<|return|>"]),  # gpt-oss: <|end|> follows the reasoning, before the answer
        ("{% for m in messages %}[INST] {{ m.content }} </s>{% endfor %}", None, ["</s>"]),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "<s>", ["<s>"]),
        ("{% for m in messages %}{{ m.content | upper }}</s>{% endfor %}", "<s>", ["<s>"]),
        ("{{ raise_exception('no') }}", "<s>", ["<s>"]),
        (None, "<s>", ["<s>"]),
        (None, "not in the vocabulary", ["not in the vocabulary"]),
        (None, None, []),
    ],
)
def test_a_text_ends_at_the_end_token_and_at_the_end_of_a_turn(
    tmp_path: Path, template: str | None, eos: str | None, ends: list[str]
) -> None:
    inner = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    inner.add_special_tokens(MARKS)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({} if eos is None else {"eos_token": eos}))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(tmp_path)
    found = tokenizer.end_token_ids(tokenizer.chat_template.after_answer)
    assert [tokenizer.special_token(id) for id in found] == ends


CALLS = "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ PRINT }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("call.function.arguments | tojson", '{"x": 1, "é": "\'"}'),  # Qwen2.5, Llama
        ("'<' + call.function.arguments", '<{"x": 1, "é": "\'"}'),  # DeepSeek
        ("call.function.arguments", '{"x": 1, "é": "\'"}'),
        (
            "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson",
            '{"x": 1, "é": "\'"}',
        ),  # Qwen3
        ("call.function.arguments.x + 1", "2"),
        ("(call.function.arguments | items | list)[1][1]", "'"),  # Qwen3.5
        ("call.function.name", "f"),
    ],
)
def test_arguments_of_earlier_calls_are_json_wherever_a_template_prints_them(
    tmp_path: Path, printed: str, expected: str
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1, "é": "'"}}}
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CALLS.replace("PRINT", printed))
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert Tokenizer(tmp_path).apply_chat_template(chat) == expected


def rendered(model_dir: Path, template: str, **variables: Any) -> str:
    shutil.copy(DEMO / "tokenizer.json", model_dir)
    (model_dir / "chat_template.jinja").write_text(template)
    return Tokenizer(model_dir).apply_chat_template(CHAT, **variables)


def test_where_the_template_is_found(tmp_path: Path) -> None:
    """chat_template.jinja precedes chat_template.json, which precedes tokenizer_config.json; lists are by name."""
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    named = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "config tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer(tmp_path).apply_chat_template(CHAT) == "config"
    assert Tokenizer(tmp_path).apply_chat_template(CHAT, tools=[]) == "config tools"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "string"}))
    assert Tokenizer(tmp_path).apply_chat_template(CHAT) == "string"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer(tmp_path).apply_chat_template(CHAT) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert Tokenizer(tmp_path).apply_chat_template(CHAT) == "jinja"


def test_templates_as_transformers_5_writes_them(directories: dict[str, Path], tmp_path: Path) -> None:
    """The default template in a file, the others in a folder, also as links in a snapshot of the Hub's cache."""
    tokenizer = reference(directories["qwen"])
    tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools | tojson }}"}
    snapshot = tmp_path / "snapshots" / "0123abcd"
    tokenizer.save_pretrained(snapshot)
    theirs = reference(snapshot)

    def check() -> None:
        for tools in (None, [], [{"type": "function", "function": {"name": "f"}}]):
            wanted = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
            assert Tokenizer(snapshot).apply_chat_template(CHAT, tools=tools) == wanted

    check()
    path = snapshot / "additional_chat_templates" / "tool_use.jinja"
    (tmp_path / "blobs").mkdir()
    path.rename(tmp_path / "blobs" / "hash")
    path.symlink_to(Path("../../../blobs/hash"))
    check()


LINKED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@pytest.mark.parametrize("name", LINKED)
def test_a_link_to_a_missing_file_is_not_taken_for_none(tmp_path: Path, name: str) -> None:
    """Such a link means an incomplete download, or a copy of a cache's links. Without the template, prompts differ."""
    copy = Path(shutil.copytree(DEMO, tmp_path / "model"))
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to("../blobs/missing")
    with pytest.raises(TokenizerError) as caught:
        _ = Tokenizer(copy).chat_template
    assert str(caught.value) == f"{copy / name}: a symbolic link to a missing file"


def test_a_folder_of_templates_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tool_use.jinja").write_text("secret")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TokenizerError, match=r"tool_use\.jinja: expected a file inside the model directory, found a"):
        rendered(tmp_path / "model", "plain")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set ns = namespace(__init__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ strftime_now.__globals__.os }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ (messages | tojson).__class__.__base__ }}",
        "{% for i in range(1000000) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(tmp_path: Path, template: str) -> None:
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: chat template default refused the messages: "):
        rendered(tmp_path, template)


@pytest.mark.parametrize(
    "statement", ["include 'x.jinja'", "import 'x.jinja' as x", "extends 'x.jinja'", "from 'x.jinja' import y"]
)
def test_templates_never_read_other_files(tmp_path: Path, statement: str) -> None:
    (tmp_path / "x.jinja").write_text("secret")
    with pytest.raises(TokenizerError, match="no loader for this environment"):
        rendered(tmp_path, "{% " + statement + " %}")


def test_an_object_with_methods_never_reaches_a_template(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="expected JSON values, found PosixPath"):
        rendered(tmp_path, "{{ tool.unlink() }}", tool=tmp_path)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for %}", "chat template default does not compile: "),
        ("{% break %}", "chat template default does not compile: 'break' outside loop"),
        ("{% for i in x %}" * 25 + "{% endfor %}" * 25, "does not compile: too many statically nested blocks"),
        ("{% if x %}" * 120 + "{% endif %}" * 120, "does not compile: too many levels of indentation"),
        ("{{ 1e400 | int }}", "default refused the messages: name 'inf' is not defined"),
        ("{{ 'a' * 10 ** 17 }}", "default refused the messages: "),
        ("{{ raise_exception('roles must alternate') }}", "default refused the messages: roles must alternate"),
        ("{{ nothing.content }}", "default refused the messages: 'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "default refused the messages: unsupported operand"),
        ("{{ 1 // 0 }}", "default refused the messages: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "default refused the messages: "),
    ],
)
def test_template_that_fails(tmp_path: Path, template: str, sentence: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        rendered(tmp_path, template)
    assert str(caught.value).startswith(f"{tmp_path / 'chat_template.jinja'}: chat template ")
    assert sentence in str(caught.value)


def test_no_chat_template(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    with pytest.raises(TokenizerError, match="expected a chat template named default, found none"):
        Tokenizer(tmp_path).apply_chat_template(CHAT)


@pytest.mark.parametrize(
    "template", [1, ["a"], [{"name": "default"}], [{"name": 1, "template": "a"}], {"default": "a"}]
)
def test_malformed_chat_template_entry(tmp_path: Path, template: object) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(
        TokenizerError, match=r"tokenizer_config\.json: chat_template: expected a string or named templates"
    ):
        Tokenizer(tmp_path).apply_chat_template(CHAT)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_tokenizer_config_never_raises_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    values = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATES["loop control"]}
    values |= data.draw(st.sampled_from(({}, {"added_tokens_decoder": {"7": {"content": "<x>", "special": True}}})))
    (tmp_path / "tokenizer_config.json").write_bytes(data.draw(json_mutations(json.dumps(values))))
    (tmp_path / "added_tokens.json").write_bytes(data.draw(json_mutations('{"<x>": 5000}')))
    (tmp_path / "special_tokens_map.json").write_bytes(data.draw(json_mutations('{"eos_token": {"content": "<y>"}}')))
    try:
        Tokenizer(tmp_path).apply_chat_template(CHAT)
    except TokenizerError as refused:
        assert str(tmp_path) in str(refused)
