"""Bad pictures and messages to a served mllama: each is refused with a sentence, and the next request is answered."""

import base64
import json
import re
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from media_files import encoded, picture, video
from serving import Server, serving
from tiny import make_checkpoint

TEMPLATE = (
    "{%- set ns = namespace(pictures=false) %}"
    "{%- for m in messages %}{%- if m['content'] is not string %}{%- for c in m['content'] %}"
    "{%- if c['type'] == 'image' %}{%- set ns.pictures = true %}{%- endif %}{%- endfor %}{%- endif %}{%- endfor %}"
    "{%- if ns.pictures and messages[0]['role'] == 'system' %}"
    "{{- raise_exception('Prompting with images is incompatible with system messages.') }}{%- endif %}"
    "{%- for m in messages %}{%- if m['content'] is string %}{{- m['content'] }}{%- else %}"
    "{%- for c in m['content'] %}{%- if c['type'] == 'image' %}{{- '<|image|>' }}{%- else %}{{- c['text'] }}"
    "{%- endif %}{%- endfor %}{%- endif %}{%- endfor %}"
)
"""Refuses what the template of Llama-3.2-Vision refuses."""
SMALL = encoded(picture(60, 50))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model_dir = make_checkpoint("mllama", tmp_path_factory.mktemp("mllama"))
    for name in ("tokenizer_config.json", "chat_template.json"):
        settings = json.loads((model_dir / name).read_text()) | {"chat_template": TEMPLATE}
        (model_dir / name).write_text(json.dumps(settings))
    (model_dir / "chat_template.jinja").write_text(TEMPLATE)
    with serving("--model-path", model_dir, "--limit-mm-per-prompt", '{"image": 2}') as running:
        yield running


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def data_url(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode()}"


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def huge() -> bytes:
    """A PNG whose header claims 60,000 x 60,000 pixels."""
    header = b"IHDR" + (60000).to_bytes(4, "big") * 2 + SMALL[24:29]
    return SMALL[:12] + header + zlib.crc32(header).to_bytes(4, "big") + SMALL[33:]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        pytest.param([user(image(b"no picture at all"))], "expected a picture .*found 17 bytes", id="no picture"),
        pytest.param([user(image(SMALL[:-50]))], "is damaged: image file is truncated", id="truncated"),
        pytest.param([user(image(b""))], "expected a picture", id="empty"),
        pytest.param([user(image(huge()))], "pixels", id="huge"),
        pytest.param([user(*[image(SMALL)] * 3)], "at most 2 pictures .*found 3", id="too many"),
        pytest.param([user({"type": "image_url"})], "expected the field image_url, found none", id="no URL"),
        pytest.param(
            [user({"type": "video_url", "video_url": {"url": data_url(video(4))}})],
            "the model takes pictures alone, found a video",
            id="video",
        ),
        pytest.param([user(text("see <|image|>"), image(SMALL))], r"contains <\|image\|>", id="written"),
        pytest.param(
            [{"role": "system", "content": "Be brief."}, user(image(SMALL), text("What is it?"))],
            "Prompting with images is incompatible with system messages",
            id="system message",
        ),
    ],
)
def test_bad_input_is_refused_with_a_sentence(server: Server, messages: list[Any], says: str) -> None:
    body = {"model": server.client().models.list().data[0].id, "max_tokens": 1}
    answer = server.post("/v1/chat/completions", body | {"messages": messages})
    sentence = answer.json()["error"]["message"]
    assert answer.status_code == 400 and re.search(says, sentence), (answer.status_code, sentence)
    assert "\n" not in sentence and "Traceback" not in sentence
    good = server.post("/v1/chat/completions", body | {"messages": [user(image(SMALL), text("What is it?"))]})
    assert good.status_code == 200, good.text
