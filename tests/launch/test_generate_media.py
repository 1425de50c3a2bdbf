"""`tilerank generate` with pictures and videos on the demo model that sees, with transformers as the judge."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from chat_parts import data_url, image, text, user
from command import DEMO, Result, run
from media_files import DEMO_VL, encoded, picture, video

ROOT = Path(__file__).parents[2]
TESTS = DEMO_VL / "testset"
QUESTION = "What is in the picture?"
PICTURE = ROOT / "assets" / "red-triangle.png"
ANSWER = "a red triangle at the bottom left"


def generate(*arguments: object) -> list[dict[str, Any]]:
    result = run("generate", DEMO_VL, "--dtype", "float32", "--json", *arguments)
    assert result.status == 0, result.err
    return sorted(map(json.loads, result.out.splitlines()), key=lambda line: int(line["index"]))


def refusal(*arguments: object, model: Path = DEMO_VL) -> str:
    result = run("generate", model, *arguments)
    assert result.status == 1 and result.out == "" and len(result.errors) == 1 and "Traceback" not in result.err
    return result.errors[0].removeprefix("tilerank: error: ")


def ask(*urls: str) -> dict[str, Any]:
    return {"messages": [user(*map(image, urls), text(QUESTION))]}


def prompt_file(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# ---- answers


@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (2, "float32"), (2, "bfloat16"), (3, "float32")])
def test_answers_on_the_test_pictures_are_those_of_transformers(tp: int, dtype: str, tmp_path: Path) -> None:
    """All in one batch. answers.json has what transformers 5.23 answers in fp32, which is not always right."""
    items = json.loads((TESTS / "answers.json").read_text())["items"]
    if dtype == "bfloat16":
        # "circle" and "square" are 0.066 apart in fp32, and rounding to bf16 moves them by half of that.
        items = [item for item in items if item["file"] != "t009_112x55.png"]
    (tmp_path / "pictures").symlink_to(TESTS)
    lines = [ask(f"pictures/{item['file']}") for item in items]
    found = generate("--tp", tp, "--dtype", dtype, "--prompt-file", prompt_file(tmp_path, *lines))
    assert [line["text"] for line in found] == [item["answer"] for item in items]


def test_answers_in_conversations_are_those_of_transformers(tmp_path: Path) -> None:
    """Pictures that the model was not trained on, so that every answer is different nonsense."""
    items = json.loads((TESTS / "answers.json").read_text())["items"]
    (tmp_path / "pictures").symlink_to(TESTS)
    first, second, third, fifth = (ask(f"pictures/{items[i]['file']}")["messages"][0] for i in (0, 1, 2, 4))
    two = {"role": "user", "content": [*first["content"][:1], *second["content"]]}
    behind = {"role": "user", "content": third["content"][::-1]}
    turns = [first, {"role": "assistant", "content": ANSWER}, fifth]
    wordless = {"role": "user", "content": first["content"][:1]}
    lines = [{"messages": messages} for messages in ([two], [behind], turns, [wordless])]
    found = generate("--tp", 3, "--prompt-file", prompt_file(tmp_path, *lines))
    # What transformers 5.23 answers in fp32.
    assert [(len(line["prompt_token_ids"]), line["text"]) for line in found] == [
        (117, "a wht the bottom left"),
        (53, "a green triangleft the bottom left"),
        (199, "a bottom le cross at"),
        (71, "a red triangle at the bottom right"),
    ]


def test_a_picture_of_the_command_line() -> None:
    (found,) = generate("--image", PICTURE, "--prompt", QUESTION)
    assert found["text"] == ANSWER
    # 97 x 137 pixels, which are 6 x 9 tokens of 16 x 16.
    assert found["prompt_token_ids"].count(494) == 54


def test_several_media_stand_before_each_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(video(9))
    (tmp_path / "b.png").write_bytes(encoded(picture(64, 48)))
    media = ["--image", PICTURE, "--video", tmp_path / "a.mp4", "--image", tmp_path / "b.png"]
    found = generate(*media, "--prompt", QUESTION, "--prompt", "Why?", "--max-new-tokens", 2)
    pads = [[id for id in line["prompt_token_ids"] if id in (494, 495)] for line in found]
    # 9 frames at 10 a second: 4 are sampled, in two groups of 3 x 4 tokens.
    assert pads == [[494] * 54 + [495] * 24 + [494] * 12] * 2
    assert found[0]["prompt_token_ids"] != found[1]["prompt_token_ids"]


def test_messages_of_a_prompt_file(tmp_path: Path) -> None:
    data = PICTURE.read_bytes()
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "picture.png").write_bytes(data)
    frames = {"type": "video", "video": [data_url(encoded(picture(48, 64, seed=i))) for i in range(3)]}
    again = [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Sure?"}]
    lines = [
        ask(data_url(data)),
        ask("inside/picture.png"),
        {"messages": [user(frames, text("And now?"))]},
        {"messages": ask(data_url(data))["messages"] + again},
        {"prompt": "no picture"},
    ]
    found = generate("--prompt-file", prompt_file(tmp_path, *lines), "--max-new-tokens", 40)
    assert found[0]["text"] == found[1]["text"] == ANSWER
    assert found[0]["prompt_token_ids"] == found[1]["prompt_token_ids"]
    # Three frames are two groups of 4 x 3 tokens.
    assert [line["prompt_token_ids"].count(495) for line in found] == [0, 0, 24, 0, 0]
    assert [line["prompt_token_ids"].count(494) for line in found] == [54, 54, 0, 54, 0]


def test_messages_for_a_model_of_text(tmp_path: Path) -> None:
    parts = [text("Once upon"), text("a time")]
    lines = [{"messages": [{"role": "user", "content": content}]} for content in ("Once upon\na time", parts)]
    result = run("generate", DEMO, "--json", "--prompt-file", prompt_file(tmp_path, *lines), "--max-new-tokens", 1)
    one, two = (json.loads(line)["prompt_token_ids"] for line in result.out.splitlines())
    assert one == two


def test_the_demo_of_the_makefile() -> None:
    recipe = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo-vision"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (arguments,) = re.findall(r"bin/tilerank generate assets/demo-vl (.*)", recipe)
    assert arguments == f'--tp 3 --image assets/red-triangle.png --prompt "{QUESTION}"'
    result: Result = run("generate", DEMO_VL, "--tp", 3, "--image", PICTURE, "--prompt", QUESTION)
    assert result.out == ANSWER + "\n", result.err


# ---- refusals


def test_a_model_of_text_takes_no_picture() -> None:
    found = refusal("--image", PICTURE, "--prompt", QUESTION, model=DEMO)
    expected = "messages.0.content.0: {} reads text only; expected a part of type 'text', found 'image'"
    assert found == f"prompt 1: {expected.format(DEMO)}"


def test_media_without_a_prompt() -> None:
    assert refusal("--video", PICTURE) == "--video needs --prompt TEXT"


def test_media_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.png"
    assert (
        refusal("--image", missing, "--prompt", "?")
        == f"prompt 1: {missing}: cannot be read: No such file or directory"
    )
    assert refusal("--image", ROOT / "Makefile", "--prompt", "?").startswith(
        f"prompt 1: {ROOT / 'Makefile'}: expected a picture (PNG, JPEG, "
    )
    assert refusal("--video", PICTURE, "--prompt", "?").startswith(
        f"prompt 1: {PICTURE}: the video cannot be decoded: "
    )


def test_a_picture_that_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "long.png"
    path.write_bytes(encoded(picture(201, 1)))
    found = refusal("--image", path, "--prompt", "?")
    assert found == "prompt 1: image 1: expected sides of a ratio up to 200, found 201 x 1 pixels"


def test_nothing_is_fetched(tmp_path: Path) -> None:
    path = prompt_file(tmp_path, ask("https://example.com/a.png"))
    expected = "expected a file or a data: URL, found https://example.com/a.png: nothing is fetched"
    assert refusal("--prompt-file", path) == f"{path} line 1: {expected}"


@pytest.mark.parametrize("arguments", [[], ["--chat"], ["--image", PICTURE]])
def test_a_typed_placeholder_becomes_no_picture(arguments: list[object]) -> None:
    assert "<|image_pad|>" in refusal(*arguments, "--prompt", "What is <|image_pad|>?")


def test_a_prompt_with_media_has_to_fit() -> None:
    found = refusal("--image", PICTURE, "--prompt", "?", "--context-length", 32)
    assert re.fullmatch(r"prompt 1 has \d+ tokens, which leaves no room for an answer in the context of 32", found)
