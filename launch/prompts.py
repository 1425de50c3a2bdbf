"""The prompts of the command line or of a file, checked and turned into token ids. No torch in here."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tilerank.loader.config import ModelConfig
from tilerank.loader.tokenizer import Tokenizer

from .errors import LaunchError


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a prompt file: exactly one of the two."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None


@dataclass(frozen=True)
class Prompt:
    """One prompt; `name` is what an error calls it."""

    name: str
    text: str | None
    token_ids: tuple[int, ...] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("prompts")
    source.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    source.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help='JSON lines with "prompt" or "prompt_token_ids"'
    )
    source.add_argument(
        "--chat", action="store_true", help="each prompt is a message: put it through the chat template"
    )


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The prompts in the order given. LaunchError names the file and line of one that cannot be used."""
    prompts = [Prompt(f"prompt {i + 1}", text) for i, text in enumerate(args.prompt)]
    if args.prompt_file is not None:
        prompts += _read_file(args.prompt_file)
    if not prompts:
        raise LaunchError(
            "nothing to generate from: give --prompt TEXT or --prompt-file FILE"
            if args.prompt_file is None
            else f"{args.prompt_file} has no prompts; expected JSON lines"
        )
    for prompt in prompts:
        if args.chat and prompt.token_ids is not None:
            raise LaunchError(f"{prompt.name}: --chat takes text, but prompt_token_ids were given")
    return prompts


def _read_file(path: Path) -> Iterator[Prompt]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise LaunchError(f"{path}: cannot be read: {e.strerror}") from e
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        name = f"{path} line {number}"
        try:
            line = msgspec.json.decode(raw, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise LaunchError(f"{name}: {e}") from e
        if (line.prompt is None) == (line.prompt_token_ids is None):
            raise LaunchError(f'{name}: expected either "prompt" or "prompt_token_ids"')
        yield Prompt(name, line.prompt, None if line.prompt_token_ids is None else tuple(line.prompt_token_ids))


def encode(
    prompts: list[Prompt], args: argparse.Namespace, tokenizer: Tokenizer, config: ModelConfig
) -> list[list[int]]:
    """The token ids of every prompt. LaunchError for one that is empty, too long, or names tokens that do not exist."""
    context = context_length(args, config)
    encoded = []
    for prompt in prompts:
        ids = _token_ids(prompt, args.chat, tokenizer)
        if not ids:
            raise LaunchError(f"{prompt.name} is empty: there is no token to continue")
        if wrong := [id for id in ids if not 0 <= id < config.vocab_size]:
            raise LaunchError(f"{prompt.name}: token id {wrong[0]} is not in the vocabulary of {config.vocab_size}")
        if len(ids) >= context:
            raise LaunchError(
                f"{prompt.name} has {len(ids)} tokens, which leaves no room for an answer in the context of {context}"
            )
        encoded.append(ids)
    return encoded


def context_length(args: argparse.Namespace, config: ModelConfig) -> int:
    """Tokens of a prompt and its answer together. LaunchError for more than the model's positions."""
    longest = config.max_position_embeddings
    if args.context_length is not None and args.context_length > longest:
        raise LaunchError(
            f"--context-length {args.context_length} is more than the model's max_position_embeddings {longest}"
        )
    return args.context_length or longest


def _token_ids(prompt: Prompt, chat: bool, tokenizer: Tokenizer) -> list[int]:
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    assert prompt.text is not None
    if not chat:
        return tokenizer.encode(prompt.text)
    message = {"role": "user", "content": prompt.text}
    # The template writes the special tokens itself.
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
