"""The media of chat messages: every form that clients send, and what is refused."""

import base64
from typing import Any

import pytest

from tilerank.runtime.media.messages import MediaSource, read_data_url, split_media
from tilerank.runtime.protocol.errors import MediaError

TEXT = {"type": "text", "text": "Hello"}
SOUND = MediaSource("audio", ("data:;base64,YWJj",), False)


def split(*parts: Any) -> tuple[Any, list[MediaSource]]:
    (message,), sources = split_media([{"role": "user", "content": list(parts), "name": "Ann"}])
    assert (message["role"], message["name"]) == ("user", "Ann")
    return message["content"], sources


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image_url", "image_url": {"url": "a", "detail": "low"}}, MediaSource("image", ("a",), False)),
        ({"type": "image_url", "image_url": "a"}, MediaSource("image", ("a",), False)),
        ({"type": "input_image", "image_url": "a"}, MediaSource("image", ("a",), False)),
        ({"type": "image", "image": "a"}, MediaSource("image", ("a",), False)),
        ({"type": "image", "url": "a", "path": None}, MediaSource("image", ("a",), False)),
        ({"type": "image", "path": "a"}, MediaSource("image", ("a",), False)),
        ({"type": "image", "base64": "YWJj"}, MediaSource("image", ("data:;base64,YWJj",), False)),
        ({"type": "video_url", "video_url": {"url": "a"}}, MediaSource("video", ("a",), False)),
        ({"type": "video", "video": "a"}, MediaSource("video", ("a",), False)),
        ({"type": "video", "video": ["a", {"url": "b"}]}, MediaSource("video", ("a", "b"), True)),
        ({"type": "video", "video": ["a"]}, MediaSource("video", ("a",), True)),
        ({"type": "input_audio", "input_audio": {"data": "YWJj", "format": "wav"}}, SOUND),
        ({"type": "audio_url", "audio_url": {"url": "a"}}, MediaSource("audio", ("a",), False)),
        ({"type": "audio", "base64": "YWJj"}, SOUND),
    ],
)
def test_forms_of_parts(part: dict[str, Any], source: MediaSource) -> None:
    assert split(part, TEXT) == ([{"type": source.kind}, TEXT], [source])


def test_media_are_in_the_order_of_the_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "1"}}
    video = {"type": "video_url", "video_url": {"url": "2"}}
    last = {"type": "image", "image": "3"}
    messages, sources = split_media(
        [
            {"role": "user", "content": [image, TEXT, video]},
            {"role": "assistant", "content": "yes"},
            {"role": "assistant", "tool_calls": []},
            {"role": "user", "content": [TEXT, last]},
        ]
    )
    assert [source.urls for source in sources] == [("1",), ("2",), ("3",)]
    assert messages == [
        {"role": "user", "content": [{"type": "image"}, TEXT, {"type": "video"}]},
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "tool_calls": []},
        {"role": "user", "content": [TEXT, {"type": "image"}]},
    ]


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ("hello", "expected a part of type text, image_url, "),
        ({"type": "input_file", "file": {}}, "found 'input_file'"),
        ({"type": "input_audio", "input_audio": {}}, "expected an object of data, sound in base64, and format, found"),
        ({"type": "input_audio", "input_audio": "YWJj"}, "expected an object of data, sound in base64, and format"),
        ({"type": "text"}, "a part of type text"),
        ({"type": ["image"]}, "expected a part of type text"),
        ({"type": "image"}, "expected one of the fields image, url, path, base64, found none"),
        (
            {"type": "image", "url": "a", "path": "b"},
            "expected one of the fields image, url, path, base64, found url, path",
        ),
        ({"type": "image_url", "image_url": {"url": 3}}, "expected a URL, found"),
        ({"type": "image_url", "image_url": ""}, "expected a URL, found ''"),
        ({"type": "image", "image": ["a"]}, r"expected a URL, found \['a'\]"),
        ({"type": "video", "video": []}, "expected at least one frame, found an empty list"),
    ],
)
def test_other_parts_are_refused(part: Any, sentence: str) -> None:
    with pytest.raises(MediaError, match=sentence):
        split(part)


def test_too_many_media() -> None:
    part = {"type": "image", "image": "a"}
    with pytest.raises(MediaError, match="have 20001 pictures, videos and frames; at most 4096 are allowed"):
        split(*[part] * 20001)
    with pytest.raises(MediaError, match="have 4097 pictures"):
        split({"type": "video", "video": ["a"] * 4097})


@pytest.mark.parametrize(
    "content", ["a <pad> b", [{"type": "text", "text": "a <p"}, {"type": "text", "text": "ad> b"}]]
)
def test_text_may_not_contain_placeholders(content: Any) -> None:
    with pytest.raises(MediaError, match="the text contains <pad>, which stands for a medium"):
        split_media([{"role": "user", "content": content}], ("<pad>",))


# ---- data: URLs


@pytest.mark.parametrize("data", [b"", b"a", b"ab", b"abc", bytes(range(256))])
def test_data_urls(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    assert read_data_url(f"data:image/png;base64,{text}") == data
    assert read_data_url(f"DATA:;BASE64,{text.rstrip('=')}") == data
    assert read_data_url("data:;base64," + "\n".join(text)) == data


@pytest.mark.parametrize(
    "url", ["data:image/png", "data:,hello", "data:image/png;base64", "data:;base64,@@@@", "data:;base64,a"]
)
def test_broken_data_urls(url: str) -> None:
    with pytest.raises(MediaError, match=r"expected a URL data:TYPE;base64,DATA|not valid base64"):
        read_data_url(url)
