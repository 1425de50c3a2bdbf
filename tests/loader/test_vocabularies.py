"""Vocabulary files other than tokenizer.json give the ids of the libraries that they were made for."""

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
from tokenizer_styles import MARKS, check_ids, lines, reference, texts, trained_ranks

from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

COUNTS = [pytest.param(400, id="400"), pytest.param(3000, id="3000", marks=pytest.mark.long)]
# Kimi's pattern as its own Python file has it, in the words of tiktoken's regular expressions.
KIMI = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
TEKKEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def decoder_entry(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": content, **plain, "special": True, **flags}


# ---- vocab.json and merges.txt


@pytest.fixture
def qwen(directories: dict[str, Path], tmp_path: Path) -> Path:
    """The files of Qwen's tokenizer, as Qwen3-Omni is released: without tokenizer.json."""
    whole = json.loads((directories["qwen"] / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(whole["model"]["vocab"], ensure_ascii=False))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in whole["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    first = len(whole["model"]["vocab"])
    tokens = {first: "<|endoftext|>", first + 1: "<|im_start|>", first + 2: "<|im_end|>", first + 3: "<tool_call>"}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            str(id): decoder_entry(token, special=token.startswith("<|")) for id, token in tokens.items()
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def qwen3_5(model_dir: Path) -> Any:
    """The tokenizer of transformers, which finds no vocab.json for this class."""
    from transformers import Qwen3_5Tokenizer

    vocabulary = json.loads((model_dir / "vocab.json").read_text())
    merges: Any = [tuple(line.split(" ")) for line in (model_dir / "merges.txt").read_text().splitlines()[1:]]
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    added = {int(id): tokenizers.AddedToken(**token) for id, token in config["added_tokens_decoder"].items()}
    return Qwen3_5Tokenizer(vocabulary, merges, eos_token="<|im_end|>", added_tokens_decoder=added)


def change(model_dir: Path, **fields: Any) -> None:
    path = model_dir / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", "Qwen3_5Tokenizer"])
def test_byte_pairs_of_vocab_json_are_those_of_transformers(qwen: Path, kind: str, count: int) -> None:
    change(qwen, tokenizer_class=kind)
    ours, theirs = Tokenizer(qwen), qwen3_5(qwen) if kind == "Qwen3_5Tokenizer" else reference(qwen)
    check_ids(ours, lambda text: theirs.encode(text, add_special_tokens=False), texts(count))
    assert ours.num_tokens == len(theirs)
    assert [ours.special_token(id) for id in ours.end_token_ids()] == ["<|im_end|>"]
    assert ours.decode(ours.encode("a<tool_call><|im_end|>")) == "a<tool_call>"


def test_the_model_type_names_the_split(qwen: Path) -> None:
    """Released files of Qwen3.5 name a class with another one, and some directories none. A token of a letter with its
    mark, in the place of the last two of the vocabulary, makes the difference: Qwen2 splits before the mark."""
    vocabulary = sorted(json.loads((qwen / "vocab.json").read_text()).items(), key=lambda item: item[1])[:-2]
    vocabulary += [("Ìģ", len(vocabulary)), ("xÌģ", len(vocabulary) + 1)]
    (qwen / "vocab.json").write_text(json.dumps(dict(vocabulary)))
    merges = (qwen / "merges.txt").read_text().splitlines()[:-2]
    (qwen / "merges.txt").write_text("\n".join([*merges, "Ì ģ", "x Ìģ"]))
    text = "x\u0301"
    change(qwen, tokenizer_class="Qwen2Tokenizer")
    other = Tokenizer(qwen).encode(text)
    (qwen / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    assert Tokenizer(qwen).encode(text) == qwen3_5(qwen).encode(text) != other
    change(qwen, tokenizer_class=None)
    (qwen / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe"}))
    assert Tokenizer(qwen).encode(text) == other


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("end", [False, True])
def test_begin_and_end_as_the_configuration_asks(qwen: Path, begin: bool, end: bool) -> None:
    change(qwen, add_bos_token=begin, add_eos_token=end, bos_token="<|endoftext|>")
    assert Tokenizer(qwen).encode("ab cd") == reference(qwen).encode("ab cd")


def test_added_tokens_of_an_older_file(qwen: Path) -> None:
    """added_tokens.json and special_tokens_map.json count where added_tokens_decoder is missing. An id that no file
    describes stays free."""
    config = json.loads((qwen / "tokenizer_config.json").read_text())
    ids = {entry["content"]: int(id) for id, entry in config.pop("added_tokens_decoder").items()}
    (qwen / "tokenizer_config.json").write_text(json.dumps(config))
    ids["<late>"] = max(ids.values()) + 3
    (qwen / "added_tokens.json").write_text(json.dumps(ids))
    (qwen / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    ours = Tokenizer(qwen)
    assert ours.encode("".join(ids)) == list(ids.values())
    assert [ours.special_token(id) for id in ours.end_token_ids()] == ["<|endoftext|>"]
    assert ours.num_tokens == ids["<late>"] + 1


# ---- ranks: tiktoken.model and tekken.json


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return trained_ranks(3000)


@pytest.fixture(scope="module")
def kimi(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of Kimi-K2: ids between those of special tokens that no file describes."""
    folder = tmp_path_factory.mktemp("kimi")
    rows = [base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join([*rows, b""]))
    first = len(ranks)
    tokens = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 6: "[EOT]", 11: "<|tool_calls_section_begin|>"}
    tokens |= {20: "[UNK]", 21: "[PAD]"}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {
            str(first + i): decoder_entry(token, special="tool" not in token) for i, token in tokens.items()
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('this must not run')")
    return folder


@pytest.mark.parametrize("count", COUNTS)
def test_tiktoken_model_gives_the_ids_of_tiktoken(kimi: Path, ranks: dict[bytes, int], count: int) -> None:
    described = json.loads((kimi / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    names = {int(id): entry["content"] for id, entry in described.items()}
    ids = range(len(ranks), len(ranks) + 22)
    special = {names.get(id, f"<|reserved_token_{id}|>"): id for id in ids}
    theirs = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=special)
    ours = Tokenizer(kimi)
    given = texts(count, marks=(*MARKS, *special))
    check_ids(ours, lambda text: theirs.encode(text, allowed_special="all"), given)
    for text in given:
        found = ours.encode(text)
        bare = [id for id in found if id < len(ranks) or names.get(id) == "<|tool_calls_section_begin|>"]
        assert ours.decode(found) == theirs.decode(bare)
    assert ours.num_tokens == len(ranks) + 22
    assert [ours.special_token(id) for id in ours.end_token_ids("<|im_end|>")] == ["[EOS]", "<|im_end|>"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"YQ==", "line 1: expected a token in base64 and its rank, found b'YQ=='"),
        (b"*** 0", "line 1: expected a token in base64 and its rank"),
        (b"YQ== x", "line 1: expected a token in base64 and its rank"),
        (b"YQ== 1", "expected the ranks 0 to 0, each once"),
    ],
)
def test_bad_lines_of_tiktoken(kimi: Path, tmp_path: Path, line: bytes, sentence: str) -> None:
    shutil.copy(kimi / "tokenizer_config.json", tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(line + b"\n")
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(tmp_path)
    assert f"{tmp_path / 'tiktoken.model'}: {sentence}" in str(caught.value)


def test_a_split_that_is_not_known_is_refused(kimi: Path, tmp_path: Path) -> None:
    shutil.copy(kimi / "tiktoken.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OtherTokenizer"}))
    with pytest.raises(TokenizerError, match=r"tokenizer_class: expected one of .*TikTok.*found 'OtherTokenizer"):
        Tokenizer(tmp_path)


def write_tekken(folder: Path, ranks: dict[bytes, int], special: list[str] | None, reserved: int) -> Path:
    """Write the file, with some more tokens than the model has."""
    folder.mkdir(exist_ok=True)
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for token, rank in ranks.items()
    ]
    more = [{"rank": len(ranks) + i, "token_bytes": base64.b64encode(b"more%d" % i).decode()} for i in range(9)]
    config = {
        "pattern": TEKKEN,
        "num_vocab_tokens": len(entries) + len(more),
        "default_vocab_size": len(entries) + reserved,
        "default_num_special_tokens": reserved,
        "version": "v3" if special is None else "v11",
    }
    content: dict[str, Any] = {"config": config, "vocab": [*entries, *more]}
    if special is not None:
        rows = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)]
        content["special_tokens"] = rows[::-1]
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("special", [None, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<pad>"]])
def test_tekken_gives_the_ids_of_tiktoken(
    ranks: dict[bytes, int], tmp_path: Path, special: list[str] | None, count: int
) -> None:
    """mistral-common, which would change numpy here, encodes with tiktoken, and puts the special tokens first."""
    theirs = tiktoken.Encoding("tekken", pat_str=TEKKEN, mergeable_ranks=ranks, special_tokens={})
    ours = Tokenizer(write_tekken(tmp_path, ranks, special, 100))

    def expected(text: str) -> list[int]:
        return [100 + id for id in theirs.encode(text)]

    check_ids(ours, expected, texts(count, marks=("<0x0A>", "[NONE]")))
    assert ours.encode("ab") == [1, *expected("ab")]
    assert ours.num_tokens == 100 + len(ranks)
    marks = {"<unk>": 0, "<s>": 1, "</s>": 2, "[INST]": 3, "[TOOL_CALLS]": 5 if special else 9, "<SPECIAL_99>": 99}
    assert ours.encode("".join(marks), add_special_tokens=False) == list(marks.values())
    assert ours.end_token_ids() == (2,)


@pytest.mark.parametrize("same_tokens", [True, False])
def test_tekken_corrects_the_split_of_tokenizer_json(
    ranks: dict[bytes, int], tmp_path: Path, same_tokens: bool
) -> None:
    """As in Mistral Small 3.1, whose tokenizer.json keeps up to three digits together. Fine-tuned models may add tokens
    behind those of tekken.json, or bring another vocabulary, which is left alone."""
    folder = write_tekken(tmp_path, ranks, None, 100)
    of_tekken = Tokenizer(folder)
    described = json.loads(of_tekken.to_json())
    described["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{N}{1,3}|[^\p{N}]+"
    described["added_tokens"].append({**described["added_tokens"][0], "id": 100 + len(ranks), "content": "<new>"})
    if not same_tokens:
        vocabulary = described["model"]["vocab"]
        a, b = "\u0120the", "\u0120a"
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    ours, theirs = Tokenizer(folder), tokenizers.Tokenizer.from_str(json.dumps(described))
    given, corrected = texts(200, marks=()), 0
    for text in given:
        wanted = of_tekken.encode(text) if same_tokens else theirs.encode(text).ids
        assert ours.encode(text) == wanted
        corrected += theirs.encode(text).ids != wanted
    assert bool(corrected) == same_tokens
    assert ours.encode("<new>", add_special_tokens=False) == [100 + len(ranks)]


# ---- tokenizer.model of SentencePiece


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Train a model in a directory of its own."""
    made: dict[str, Path] = {}

    def train(**options: Any) -> Path:
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("pieces")
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter([*lines(), *texts(500, marks=(), seed=1)]),
                model_prefix=str(made[key] / "tokenizer"),
                vocab_size=1500,
                minloglevel=2,
                **options,
            )
        return made[key]

    yield train


LLAMA = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "split_digits": True}
LLAMA |= {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "character_coverage": 0.995}
GEMMA = LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": ["<start_of_turn>", "\n\n", "<unused0>"]}
UNIGRAM = {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"}
NFKC = UNIGRAM | {"normalization_rule_name": "nmt_nfkc"}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("options", [LLAMA, GEMMA, UNIGRAM, NFKC], ids=["llama", "gemma", "unigram", "nfkc"])
def test_pieces_are_those_of_sentencepiece(
    pieces: Callable[..., Path], options: dict[str, Any], tmp_path: Path, count: int
) -> None:
    shutil.copy(pieces(**options) / "tokenizer.model", tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = Tokenizer(tmp_path)
    marks = ("[INST]", "<|im_end|>", "<start_of_turn>")  # others are special tokens here and text there
    given = [text for text in texts(count, marks) if "\x00" not in text and "▁" not in text]
    if options == NFKC:  # of characters that mix scripts within one, tokenizers leaves some as they are
        known = set("".join([*lines(), *texts(40, marks)]))
        given = [text for text in given if set(text) <= known]

    def expected(text: str) -> list[int]:
        ids: list[int] = theirs.encode(text)
        found = ours.encode(text)
        # sentencepiece adds scores in float32, so that it and tokenizers take either of two ways that are equally good.
        ways = [sum(map(theirs.get_score, way)) for way in (ids, found)]
        tie = "unigram" in options.values() and ways[0] == pytest.approx(ways[1], rel=1e-6)
        return found if tie and theirs.decode(found) == theirs.decode(ids) else ids

    check_ids(ours, expected, given)
    assert ours.num_tokens == theirs.vocab_size()
    assert ours.end_token_ids() == (theirs.eos_id(),)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("LlamaTokenizer", {}),
        ("LlamaTokenizer", {"legacy": True, "add_bos_token": True}),
        ("LlamaTokenizerFast", {"legacy": False, "add_prefix_space": False}),
        ("GemmaTokenizer", {"add_bos_token": True}),
    ],
)
def test_pieces_are_those_of_transformers(
    pieces: Callable[..., Path], kind: str, fields: dict[str, Any], tmp_path: Path, count: int
) -> None:
    shutil.copy(pieces(**(GEMMA if "Gemma" in kind else LLAMA)) / "tokenizer.model", tmp_path)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
    added = {"1500": decoder_entry("<|im_end|>"), "1501": decoder_entry("[INST]", special=False)}
    config = {"tokenizer_class": kind, "added_tokens_decoder": added, **names, **fields}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer(tmp_path), reference(tmp_path)
    check_ids(ours, lambda text: theirs.encode(text, add_special_tokens=False), texts(count))
    assert ours.encode("<s>ab <|im_end|> c") == theirs.encode("<s>ab <|im_end|> c")


def test_a_piece_takes_the_name_that_other_files_give_it(pieces: Callable[..., Path], tmp_path: Path) -> None:
    """Fine-tuned models use free pieces of their base for marks of their own."""
    shutil.copy(pieces(**GEMMA) / "tokenizer.model", tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    free = theirs.piece_to_id("<unused0>")
    config = {"added_tokens_decoder": {str(free): decoder_entry("<mine>")}, "eos_token": "<mine>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).encode("<mine>") == [free] == list(Tokenizer(tmp_path).end_token_ids())


@pytest.mark.parametrize("content", [b"", b"no model at all", b"\x0a\x05\x0a\x03ab"])
def test_a_damaged_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=str(tmp_path / "tokenizer.model")):
        Tokenizer(tmp_path)


# ---- which file is read


def test_the_first_file_of_the_table_is_read(qwen: Path, kimi: Path, directories: dict[str, Path]) -> None:
    expected = reference(qwen).encode("one two three")
    shutil.copy(kimi / "tiktoken.model", qwen)
    assert Tokenizer(qwen).encode("one two three") == expected
    shutil.copy(directories["llama"] / "tokenizer.json", qwen)
    assert Tokenizer(qwen).encode("one") == Tokenizer(directories["llama"]).encode("one")


def test_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"expected a tokenizer: one of tokenizer\.json, .*; found none"):
        Tokenizer(tmp_path)
