"""Bad media and messages to a served mllama and MOSS-VL: each is refused with a sentence, and the next request is
answered. The tests of server/test_media.py do this for Qwen3-VL."""

import json
import re
import shutil
from collections.abc import Iterator

import pytest
from chat_parts import clip, huge_picture, image, text, user
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
CLIP = video(4)
SHOWN = image(SMALL)
QUESTION = text("What is it?")
BAD_IN_BOTH = {
    "no picture": ([user(image(b"no picture at all"))], "expected a picture .*found 17 bytes"),
    "truncated": ([user(image(SMALL[:-50]))], "is damaged: image file is truncated"),
    "empty": ([user(image(b""))], "expected a picture"),
    "huge": ([user(image(huge_picture()))], "pixels"),
    "too many": ([user(SHOWN, SHOWN, SHOWN)], "at most 2 pictures .*found 3"),
    "written": ([user(text("see <|image|>"), SHOWN)], r"contains <\|image\|>"),
    "no URL": ([user({"type": "image_url"})], "expected the field image_url, found none"),
}
BAD = {
    "mllama": {
        "video": ([user(clip(CLIP))], "the model takes image, found video"),
        "system message": (
            [{"role": "system", "content": "Be brief."}, user(SHOWN, QUESTION)],
            "Prompting with images is incompatible with system messages",
        ),
    },
    "moss_vl": {
        "truncated video": ([user(clip(CLIP[: len(CLIP) // 2]))], "video"),
        "picture as a video": ([user(clip(SMALL))], "video"),
        "two videos": ([user(clip(CLIP), clip(CLIP))], "at most 1 video"),
        "thin": ([user(image(encoded(picture(402, 2))))], "200"),
    },
}


@pytest.fixture(scope="module", params=["mllama", "moss_vl"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = make_checkpoint(request.param, tmp_path_factory.mktemp("made"))
    model_dir = shutil.copytree(checkpoint, tmp_path_factory.mktemp("served") / request.param)
    if request.param == "mllama":
        for name in ("tokenizer_config.json", "chat_template.json"):
            settings = json.loads((model_dir / name).read_text()) | {"chat_template": TEMPLATE}
            (model_dir / name).write_text(json.dumps(settings))
        (model_dir / "chat_template.jinja").write_text(TEMPLATE)
    with serving("--model-path", model_dir, "--limit-mm-per-prompt", '{"image": 2, "video": 1}') as running:
        yield running


def test_bad_input_is_refused_with_a_sentence(server: Server) -> None:
    name = server.client().models.list().data[0].id
    body = {"model": name, "max_tokens": 1}
    for case, (messages, says) in (BAD_IN_BOTH | BAD[name]).items():
        answer = server.post("/v1/chat/completions", body | {"messages": messages})
        assert answer.status_code == 400, (case, answer.text)
        sentence = answer.json()["error"]["message"]
        assert re.search(says, sentence) and "\n" not in sentence and "Traceback" not in sentence, (case, sentence)
        good = server.post("/v1/chat/completions", body | {"messages": [user(SHOWN, QUESTION)]})
        assert good.status_code == 200, (case, good.text)
