"""The command line itself: names that do not exist, --version, --config and completion."""

import json
import subprocess
from pathlib import Path

import pytest
from command import DEMO, run

from tilerank.launch.cli import parse_command
from tilerank.launch.errors import LaunchError
from tilerank.launch.options.arguments import with_config
from tilerank.launch.options.draft_model import check_draft_model
from tilerank.launch.options.model import checked_card, model_options
from tilerank.loader.card import read_card
from tilerank.loader.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("serv", "x"), "there is no command 'serv'; did you mean serve? (tilerank --help)"),
        (("bench", "modle"), "there is no bench 'modle'; did you mean model? (tilerank bench --help)"),
        (
            ("generate", DEMO, "--max-tokens", "3"),
            "there is no option --max-tokens; did you mean --max-new-tokens? (tilerank generate --help)",
        ),
        (
            ("serve", DEMO, "--gpu-memory-utilization=0.9"),
            "there is no option --gpu-memory-utilization; did you mean --mem-fraction-static? (tilerank serve --help)",
        ),
        (
            ("pull", "Qwen/Qwen3-0.6B"),
            "there is no command 'pull'; the first command that names a model downloads it, ",
        ),
        (("run", DEMO), "there is no command 'run'; `tilerank chat MODEL` talks with a model (tilerank --help)"),
        (("plan", DEMO, "--quantisation", "int8"), "there is no option --quantisation; did you mean --quantization? "),
        (("plan", DEMO, "--colour"), "there is no option --colour (tilerank plan --help)"),
        (("plan", DEMO, "other"), "unexpected argument 'other' (tilerank plan --help)"),
    ],
)
def test_the_nearest_name(arguments: tuple[object, ...], sentence: str) -> None:
    result = run(*arguments)
    assert result.status == 2
    assert result.errors[0].startswith(f"tilerank: error: {sentence}")


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_a_command_without_a_model_says_how_it_is_called(command: str) -> None:
    (error,) = run(command).errors
    assert error.startswith(f"tilerank: error: no model given: tilerank {command} MODEL")


def test_a_context_longer_than_the_model_allows_is_refused_before_anything_starts() -> None:
    result = run("serve", DEMO, "--port", 0, "--context-length", 5000)
    assert result.status == 1
    error = "tilerank: error: --context-length 5000 is more than the 4096 tokens of the model's context"
    assert result.err.splitlines() == [error]


def test_a_model_after_an_option_with_several_values() -> None:
    """The directory that is missing is the model. With --model-path, all values belong to the option."""
    for option in ("--allowed-hosts", "--cors-origins", "--served-model-name"):
        (error,) = run("serve", option, "a.example", "no-such-directory", "--port", 0).errors
        assert error.startswith("tilerank: error: no-such-directory is not a directory")
        (error,) = run("serve", "--model-path", "none-there", option, "a.example", "b.example").errors
        assert error.startswith("tilerank: error: none-there is not a directory")


def test_version() -> None:
    assert run("--version").out.startswith("tilerank 0.")


def test_completion_is_a_script_that_bash_accepts() -> None:
    script = run("--print-completion", "bash").out
    assert "--max-new-tokens" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "complete -c tilerank" in run("--print-completion", "fish").out


def test_options_of_a_file_come_before_those_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: org/name\ntp: 2\nignore_eos: true\njson: false\nimage: [a.png, b.png]\n")
    assert with_config(["generate", "--config", str(file), "--tp", "3"]) == [
        *("generate", "org/name", "--tp=2", "--ignore-eos", "--image=a.png", "--image=b.png", "--tp", "3")
    ]


def test_a_file_with_the_model_and_its_options(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(f"model: {DEMO}\ntp: 3\njson: true\n")
    found = json.loads(run("plan", f"--config={file}").out)
    assert found["model"] == str(DEMO)
    assert len(found["ranks"]) == 3


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file"),
        ("a: [", "is not YAML"),
        ("- a", "expected a mapping of options, found list"),
        ("tp: {a: 1}", "tp: expected text, a number"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, content: str | None, sentence: str) -> None:
    file = tmp_path / "file.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(LaunchError, match=sentence):
        with_config(["serve", "--config", str(file)])
    with pytest.raises(LaunchError, match="expected a file"):
        with_config(["serve", "--config"])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("prot: 80", "there is no option prot; did you mean --port?"),
        ("prot: false", "there is no option prot; did you mean --port?"),
        ("port: x", "port: 'x' is not a whole number from 0 to 65535"),
        ("port: true", "port: expected one argument"),
        ("strict_fields: 3", "strict_fields: ignored explicit argument '3'"),
        ("log_format: xml", "log_format: invalid choice: 'xml' (choose from 'text', 'json')"),
        ("model: [a, b]", "model: expected text, found ['a', 'b']"),
        ("config: other.yaml", "config: expected no further file, found 'other.yaml'"),
    ],
)
def test_mistakes_in_a_file_name_the_file_and_the_key(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(f"tp: 1\n{content}\n")
    with pytest.raises(LaunchError) as caught:
        parse_command(["serve", "--config", str(file)])
    assert str(caught.value) == f"--config: {file}: {sentence}"


@pytest.mark.parametrize(
    ("arguments", "speculative"),
    [
        ((), "auto"),
        (("--speculative", "off"), "off"),
        (("--speculative", "ngram"), "ngram"),
        (("--draft-model", str(DEMO)), "draft"),
    ],
)
def test_which_drafts_are_asked_for(arguments: tuple[str, ...], speculative: str) -> None:
    _, args = parse_command(["generate", str(DEMO), "--prompt", "x", *arguments])
    options = model_options(args)
    assert options.speculative == speculative and options.draft_model == (DEMO if speculative == "draft" else None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--speculative", "draft"), "--speculative draft needs --draft-model MODEL, found none"),
        (
            ("--draft-model", str(DEMO), "--speculative", "mtp"),
            f"--draft-model {DEMO} needs --speculative draft, found mtp",
        ),
    ],
)
def test_a_draft_model_without_its_drafts(arguments: tuple[str, ...], sentence: str) -> None:
    _, args = parse_command(["generate", str(DEMO), "--prompt", "x", *arguments])
    with pytest.raises(LaunchError) as caught:
        model_options(args)
    assert str(caught.value) == sentence


def test_drafts_of_a_model_that_embeds_texts() -> None:
    """They are refused if they are asked for, and left out if not."""
    embedding = ["serve", str(DEMO), "--task", "embed"]
    sentence = "--speculative ngram: expected a model that generates text, found one that embeds texts"
    with pytest.raises(LaunchError, match=sentence):
        checked_card(parse_command([*embedding, "--speculative", "ngram"])[1], DEMO)
    drafts = []
    for words in (embedding, ["serve", str(DEMO)]):
        _, args = parse_command(words)
        options, card = model_options(args), checked_card(args, DEMO)
        config = options.rank_config(read_card(DEMO), 64)
        drafts.append((options.drafts(card), config.speculative))
    assert drafts == [("off", "off"), ("ngram", "ngram")]


def test_a_draft_model_has_the_vocabulary_of_the_model(tmp_path: Path) -> None:
    """Two tokens have changed places."""
    written = json.loads((DEMO / "tokenizer.json").read_text())
    ids = written["model"]["vocab"]
    one, other = list(ids)[300:302]
    ids[one], ids[other] = ids[other], ids[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    check_draft_model(None, Tokenizer(DEMO))
    check_draft_model(DEMO, Tokenizer(DEMO))
    with pytest.raises(LaunchError) as caught:
        check_draft_model(tmp_path, Tokenizer(DEMO))
    found = f"token {ids[other]} is {one!a}, found {other!a}"
    assert str(caught.value) == f"--draft-model {tmp_path}: expected the vocabulary of {DEMO}, in which {found}"
