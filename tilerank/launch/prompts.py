"""The prompts of the command line or of a file, checked and turned into token ids. No torch in here."""

import argparse
import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tilerank.loader.card import ModelCard
from tilerank.loader.tokenizer import Tokenizer

from .errors import LaunchError
from .host.cpulist import count


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
        content = path.read_bytes()
    except OSError as e:
        raise LaunchError(f"{path}: cannot be read: {e.strerror}") from e
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise LaunchError(f"{path}: expected UTF-8, found the byte order mark of UTF-16")
    # Editors of some systems put a mark before UTF-8, too, where it means nothing.
    for number, raw in enumerate(content.removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        if not raw.strip():
            continue
        name = f"{path} line {number}"
        try:
            line = msgspec.json.decode(raw, type=_Line)
        except UnicodeDecodeError as e:
            raise LaunchError(
                f"{name}: expected UTF-8, found the byte 0x{e.object[e.start]:02x} where it cannot be"
            ) from e
        except msgspec.DecodeError as e:
            half = _half_character(raw)
            raise LaunchError(f"{name}: {f'{half} is half of a character, the other is missing' if half else e}") from e
        if (line.prompt is None) == (line.prompt_token_ids is None):
            raise LaunchError(f'{name}: expected either "prompt" or "prompt_token_ids"')
        yield Prompt(name, line.prompt, None if line.prompt_token_ids is None else tuple(line.prompt_token_ids))


def _half_character(raw: bytes) -> str | None:
    """The lone surrogate in a JSON text: JSON can spell it, no text can hold it."""
    try:
        json.dumps(json.loads(raw), ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        return f"\\u{ord(e.object[e.start]):04x}"
    except (ValueError, RecursionError):
        return None  # something else is wrong with it
    return None


def encode(prompts: list[Prompt], args: argparse.Namespace, tokenizer: Tokenizer, card: ModelCard) -> list[list[int]]:
    """The token ids of every prompt. LaunchError for one that is empty, too long, or names tokens that do not exist."""
    context = context_length(args, card)
    encoded = []
    for prompt in prompts:
        ids = _token_ids(prompt, args.chat, tokenizer)
        if not ids:
            raise LaunchError(f"{prompt.name} is empty: there is no token to continue")
        if wrong := [id for id in ids if not 0 <= id < card.vocab_size]:
            raise LaunchError(f"{prompt.name}: token id {wrong[0]} is not in the vocabulary of {card.vocab_size}")
        if len(ids) >= context:
            raise LaunchError(
                f"{prompt.name} has {len(ids)} tokens, which leaves no room for an answer in the context of {context}"
            )
        if args.max_total_tokens is not None:
            new = min(args.max_new_tokens, context - len(ids))
            # The last token is never fed back.
            if (needed := len(ids) + new - 1) > args.max_total_tokens:
                raise LaunchError(
                    f"{prompt.name}: {count(len(ids), 'token')} and {new} new need a cache of {needed}, found "
                    f"--max-total-tokens {args.max_total_tokens}; raise it or lower --max-new-tokens"
                )
        encoded.append(ids)
    return encoded


def context_length(args: argparse.Namespace, card: ModelCard) -> int:
    """Tokens of a prompt and its answer together. LaunchError for more than the model's positions."""
    longest = card.context_length
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
