"""The tokenizer equals transformers; streamed text never contains part of a character."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizer_styles import DEMO, STYLES, reference
from tokenizers import decoders, models, pre_tokenizers

from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

TEXTS = [
    "",
    "Hello, world! 12345 tokens\n\n\tand\u00a0spaces   ",
    "naïve façade — 東京 🦙👩‍👩‍👧 e\u0301 \u200b\ufffd",
    "<|im_end|> <|eot_id|><think>plain</think><|User|>",
]


# ---- text and ids


@pytest.mark.parametrize("style", ["demo", *STYLES])
def test_encode_and_decode_equal_transformers(directories: dict[str, Path], style: str) -> None:
    ours, theirs = Tokenizer(directories[style]), reference(directories[style])
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.num_tokens == len(theirs)


def test_begin_of_text_comes_from_the_post_processor(directories: dict[str, Path]) -> None:
    llama, qwen = Tokenizer(directories["llama"]), Tokenizer(directories["qwen"])
    bos = llama.encode("<|begin_of_text|>", add_special_tokens=False)
    assert llama.encode("a") == bos + llama.encode("a", add_special_tokens=False)
    assert qwen.encode("a") == qwen.encode("a", add_special_tokens=False)


def test_truncation_and_padding_of_the_file_are_not_applied(directories: dict[str, Path], tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(directories["qwen"] / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    text = "one two three four five six seven"
    assert Tokenizer(tmp_path).encode(text) == Tokenizer(directories["qwen"]).encode(text)


# ---- special tokens outside tokenizer.json

WORDS = ("<s>", "</s>", "<a>", "<b>", "<c>")  # in the vocabulary; the first two are also added tokens of tokenizer.json
NEW = ("<x>", "<y>", "<z>")


def write_tokenizer(out: Path, **files: Any) -> Path:
    """Write a tokenizer of bytes and WORDS. files: name without .json -> content."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *WORDS])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([tokenizers.AddedToken("<s>", special=True), tokenizers.AddedToken("</s>", special=False)])
    inner.save(str(out / "tokenizer.json"))
    for name, content in files.items():
        (out / f"{name}.json").write_text(json.dumps(content))
    return out


def check_special_tokens(model_dir: Path) -> None:
    ours, theirs = Tokenizer(model_dir), reference(model_dir)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.num_tokens == len(theirs)
    for text in ("".join(f"{word} {word}{word}q" for word in (*WORDS, *NEW)), " <x>  <a> ", "<S></s><s>"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == "".join(pieces(ours, ids)) == theirs.decode(ids, skip_special_tokens=True)
    ids = list(range(256, ours.num_tokens))
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": {"eos_token": "</s>", "bos_token": "<a>"}},
        {"tokenizer_config": {"pad_token": "<x>", "eos_token": "<y>", "unk_token": None}},
        {"tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": {"257": {"content": "</s>"}}}},
        {
            "tokenizer_config": {
                "eos_token": "<b>",
                "added_tokens_decoder": {
                    "261": {"content": "<x>", "lstrip": True, "rstrip": True, "special": True},
                    "258": {"content": "<a>", "special": False, "normalized": False},
                    "259": {"content": "<b>", "special": False},
                },
            },
            "special_tokens_map": {"eos_token": "<c>", "pad_token": "<z>"},  # not read
            "added_tokens": {"<y>": 262},  # not read
        },
        {"tokenizer_config": {"eos_token": "<a>"}, "special_tokens_map": {"eos_token": "<b>", "pad_token": "<z>"}},
        {"special_tokens_map": {"eos_token": {"content": "<b>", "lstrip": True, "normalized": False}}},
        {"special_tokens_map": {"bos_token": "<x>"}, "added_tokens": {"<x>": 261, "<y>": 262}},
        {
            "added_tokens": {"</s>": 257, "<c>": 260},
            "special_tokens_map": {"additional_special_tokens": ["<c>", "<b>"]},
        },
        {"tokenizer_config": {"additional_special_tokens": ["<b>", "<x>"]}, "added_tokens": {"<b>": 259}},
        {
            "tokenizer_config": {
                "extra_special_tokens": {"image_token": "<x>", "audio_token": "<a>"},
                "eos_token": "<y>",
            }
        },
        {"tokenizer_config": {"image_token": "<x>", "some_token": 5, "extra_special_tokens": ["<c>"]}},
        {"special_tokens_map": {"image_token": "<x>", "extra_special_tokens": ["<z>"]}},
        {"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "<x>", "lstrip": True}}},
    ],
)
def test_special_tokens_outside_the_tokenizer_equal_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    config = CLASS | files.get("tokenizer_config", {})
    check_special_tokens(write_tokenizer(tmp_path, **files | {"tokenizer_config": config}))


CONTENT = st.sampled_from((*WORDS, *NEW))
FLAGGED = st.fixed_dictionaries(
    {"content": CONTENT},
    optional={name: st.booleans() for name in ("special", "lstrip", "rstrip", "single_word", "normalized")},
)
# "<z>" is in MAPPED alone, because transformers has no clear rule for a token that gets two kinds of flags.
CHOSEN = st.sampled_from((*WORDS, "<x>", "<y>"))
NAMED = st.dictionaries(st.sampled_from(("bos_token", "eos_token", "pad_token", "image_token")), CHOSEN, max_size=3)
MAPPED = st.dictionaries(st.just("eos_token"), FLAGGED.map(lambda token: token | {"content": "<z>"}))
EXTRA = st.dictionaries(
    st.sampled_from(("extra_special_tokens", "additional_special_tokens")), st.lists(CHOSEN, max_size=2, unique=True)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    named=NAMED,
    decoder=st.none() | st.lists(FLAGGED, max_size=4, unique_by=lambda token: token["content"]),
    extra=EXTRA,
    token_map=st.tuples(NAMED | MAPPED, EXTRA),
    added=st.lists(CONTENT, max_size=3, unique=True),
)
def test_any_special_tokens_equal_transformers(
    tmp_path: Path,
    named: dict[str, str],
    decoder: list[dict[str, Any]] | None,
    extra: dict[str, Any],
    token_map: tuple[dict[str, Any], dict[str, Any]],
    added: list[str],
) -> None:
    config: dict[str, Any] = CLASS | named | extra
    ids = {word: 256 + i for i, word in enumerate((*WORDS, *NEW))}
    if decoder is not None:
        config["added_tokens_decoder"] = {str(ids[token["content"]]): token for token in decoder}
    files = {"special_tokens_map": token_map[0] | token_map[1], "added_tokens": {word: ids[word] for word in added}}
    check_special_tokens(write_tokenizer(tmp_path, tokenizer_config=config, **files))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer_config", {"eos_token": 5}, "eos_token: expected a token, found 5"),
        ("tokenizer_config", {"added_tokens_decoder": []}, "added_tokens_decoder: expected an object of tokens by id"),
        ("tokenizer_config", {"added_tokens_decoder": {"a": "x"}}, "expected token ids as keys, found 'a'"),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"7": {"special": True}}},
            "added_tokens_decoder.7: expected a t",
        ),
        ("tokenizer_config", {"extra_special_tokens": "<x>"}, "extra_special_tokens: expected a list of tokens"),
        ("special_tokens_map", {"eos_token": {"content": "x", "special": "yes"}}, "eos_token: expected a token, found"),
        ("special_tokens_map", {"pad_token": ["<x>"]}, "pad_token: expected a token, found"),
        ("added_tokens", {"<x>": "261"}, "'<x>': expected a token id, found '261'"),
        ("added_tokens", {"\ud800": 261}, "'\\ud800': expected a token, found"),
        ("tokenizer_config", {"bos_token": "\ud800"}, "bos_token: expected a token, found '\\ud800'"),
    ],
)
def test_malformed_special_tokens(tmp_path: Path, name: str, content: Any, sentence: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(write_tokenizer(tmp_path, **{name: content}))
    assert str(caught.value).startswith(f"{tmp_path / f'{name}.json'}: ") and sentence in str(caught.value)


# ---- streams


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(id) for id in ids), stream.flush()]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 4100), max_size=40))
@example(ids=[])
def test_streamed_random_ids_equal_decode(ids: list[int]) -> None:
    tokenizer = Tokenizer(DEMO)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40))
@example(text="👩‍👩‍👧東京é\ufffd")
def test_streamed_text_is_whole_characters(text: str) -> None:
    """Pieces of a text without U+FFFD never contain it."""
    tokenizer = Tokenizer(DEMO)
    ids = tokenizer.encode(text)
    streamed = pieces(tokenizer, ids)
    assert "".join(streamed) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in streamed)
    assert streamed[-1] == ""


def test_a_character_split_over_tokens_is_held_until_it_is_whole() -> None:
    tokenizer = Tokenizer(DEMO)
    ids = tokenizer.encode("🦙")
    assert len(ids) > 1
    assert pieces(tokenizer, ids) == [""] * (len(ids) - 1) + ["🦙", ""]
    assert pieces(tokenizer, ids[:-1]) == [""] * (len(ids) - 1) + ["\ufffd"]
    assert pieces(tokenizer, [*ids[:-1], *tokenizer.encode("a")])[-2:] == ["\ufffda", ""]


def test_special_and_unknown_tokens_are_skipped_inside_a_character() -> None:
    tokenizer = Tokenizer(DEMO)
    first, *rest = tokenizer.encode("🦙")
    assert pieces(tokenizer, [first, 4095, 99_999, *rest])[-2:] == ["🦙", ""]


def test_a_stream_starts_anew_after_flush() -> None:
    tokenizer, stream = Tokenizer(DEMO), Tokenizer(DEMO).stream()
    ids = tokenizer.encode("é🦙")
    for cut in range(len(ids)):
        assert "".join([*(stream.push(id) for id in ids[:cut]), stream.flush()]) == tokenizer.decode(ids[:cut])


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The decoder of Llama 2: it drops a leading space and decodes a run of byte tokens as a whole."""
    words = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b", "▁▁", "é", "<0xZZ>x"]
    inner = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    inner.add_special_tokens(["<s>"])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    out = tmp_path_factory.mktemp("sentencepiece")
    inner.save(str(out / "tokenizer.json"))
    return Tokenizer(out)


@settings(max_examples=500, deadline=None)
@given(ids=st.lists(st.integers(0, 270) | st.integers(255, 263) | st.sampled_from([0xC3 + 1, 0xA9 + 1]), max_size=20))
@example(ids=[258, 258, 259])
@example(ids=[0, 0xC4, 0, 0xAA, 0, 258])
def test_sentencepiece_stream_equals_decode(sentencepiece: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(sentencepiece, ids)) == sentencepiece.decode(ids)


def test_sentencepiece_stream_holds_only_bytes(sentencepiece: Tokenizer) -> None:
    assert pieces(sentencepiece, [258, 259, 258, 0xC4, 0xAA, 260]) == ["a", "a", " a", "", "", "éb", ""]


def joined_bytes(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    whole = b""
    for id in ids:
        whole += tokenizer.token_bytes(id, first=not whole)
    return whole


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: "<|" not in text))  # special tokens have no bytes
@example("e\u0301 \ufa2a \U0001d15e")  # characters that the normaliser composes and replaces
def test_tokens_are_spelled_in_the_bytes_of_their_text(text: str) -> None:
    ours = Tokenizer(DEMO)
    normalised = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")).normalizer.normalize_str(text)
    assert joined_bytes(ours, ours.encode(text)) == normalised.encode()


def test_sentencepiece_tokens_are_spelled_with_their_spaces(sentencepiece: Tokenizer) -> None:
    ids = [0, 258, 259, 258, 0xC4, 0xAA, 257, 261, 262, 99_999]
    assert joined_bytes(sentencepiece, ids) == "aa aé   é".encode()
    assert joined_bytes(sentencepiece, ids) == sentencepiece.decode(ids).encode()
    assert [sentencepiece.token_bytes(id) for id in (0, 0xC4, 257, 258)] == [b"", b"\xc3", b" ", b" a"]


def test_the_bytes_of_a_token_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that are no tokens are not remembered, so that memory stays within the vocabulary."""
    tokenizer = Tokenizer(DEMO)
    ids = [*tokenizer.encode("In the beginning"), 99_999]
    found = [tokenizer.token_bytes(id) for id in ids]
    asked: list[int] = []
    monkeypatch.setattr(tokenizer, "token", asked.append)
    assert [tokenizer.token_bytes(id) for id in ids] == found and found[-1] == b""
    assert asked == [99_999]


# ---- bad directories


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(tmp_path)
    files = "tokenizer.json, tekken.json, vocab.json, tiktoken.model, tokenizer.model"
    assert str(caught.value) == f"{tmp_path}: expected a tokenizer: one of {files}; found none"


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff\xfe", b"[" * 50_000, b'{"version": "1.0", "model": {"type": "X"}}']
)
def test_malformed_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer.json'}: not a valid tokenizer: ")


def test_tokenizer_that_the_library_did_not_expect(tmp_path: Path, directories: dict[str, Path]) -> None:
    values = json.loads((directories["llama"] / "tokenizer.json").read_text())
    values["post_processor"]["processors"][1]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: "):
        Tokenizer(tmp_path).encode("a")


def test_decoder_that_cannot_be_streamed(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece()
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"decoder: expected ByteLevel, or .*, found WordPiece"):
        Tokenizer(tmp_path)


SPACES = decoders.Replace("▁", " ")


@pytest.mark.parametrize(
    "parts",
    [
        [SPACES, decoders.Fuse(), decoders.Strip(" ", 2, 0)],
        [SPACES, decoders.Fuse(), decoders.Strip(" ", 1, 0), decoders.Strip(" ", 1, 0)],
        [SPACES, decoders.Fuse(), decoders.Strip(" ", 0, 1)],
        [decoders.Fuse(), decoders.Replace("▁▁", "\n")],
    ],
)
def test_decoder_that_looks_further_than_one_token(tmp_path: Path, parts: list[Any]) -> None:
    """A text that begins with two spaces, or has two tokens of one space each, would be streamed differently."""
    inner = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1}, []))
    inner.decoder = decoders.Sequence(parts)
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"decoder: expected ByteLevel, or .*, found .*Fuse"):
        Tokenizer(tmp_path)


def test_malformed_special_token(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x", "bos_token": {"content": 1}}')
    with pytest.raises(
        TokenizerError, match=r"tokenizer_config\.json: bos_token: expected a token, found {'content': 1}"
    ):
        Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "a"}])


def test_text_that_is_not_unicode() -> None:
    with pytest.raises(TokenizerError, match="text to encode: expected valid Unicode, found"):
        Tokenizer(DEMO).encode("a\ud800")


@pytest.mark.parametrize("ids", [[-1], [1 << 32]])
def test_ids_out_of_range(ids: list[int]) -> None:
    with pytest.raises(TokenizerError, match="token ids: expected integers from 0"):
        Tokenizer(DEMO).decode(ids)
