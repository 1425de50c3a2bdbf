"""The prompts of the command line or of a file, checked and turned into token ids. No torch in here."""

import argparse
import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tilerank.loader.card import ModelCard
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.decoder import DecodedMedium, decode_source
from tilerank.runtime.media.messages import MediaSource, read_data_url
from tilerank.runtime.media.processor import check_kinds, samplers
from tilerank.runtime.media.registry import family_of, load_processor
from tilerank.runtime.protocol.errors import MediaError, UnavailableError
from tilerank.runtime.protocol.prompt import Prompt

from ..errors import LaunchError
from ..offline.batch_files import read_lines
from ..options.model import context_length, model_directory
from ..serving.media_decoder import MediaDecoder
from ..text import count

if TYPE_CHECKING:
    from tilerank.runtime.server.chat.prompts import PromptBuilder

log = logging.getLogger(__name__)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a prompt file: exactly one of the three."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class GivenPrompt:
    """One prompt, in one of three forms. name: for errors. folder: where the paths in `messages` begin."""

    name: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    folder: Path = Path()


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt of the engine. name: for errors."""

    name: str
    prompt: Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("prompts")
    source.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    for kind in ("image", "video", "audio"):
        source.add_argument(
            f"--{kind}",
            action="append",
            dest="media",
            default=[],
            type=_medium(kind),
            metavar="FILE",
            help="put before the text of each --prompt, through the chat template; may be given several times",
        )
    source.add_argument(
        "--use-audio-in-video", action="store_true", help="the model hears the sound of videos as well (Qwen3-Omni)"
    )
    source.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help='JSON lines with "prompt", "prompt_token_ids" or "messages", whose media are data: URLs or files',
    )
    source.add_argument(
        "--chat", action="store_true", help="each prompt is a message: put it through the chat template"
    )


def _medium(kind: str) -> Callable[[str], tuple[str, str]]:
    """An argparse type: the path of a medium, with its kind."""
    return lambda path: (kind, path)


def read_prompts(args: argparse.Namespace) -> list[GivenPrompt | LaunchError]:
    """Return the prompts in the order given. In place of one that cannot be used there is the error that names its file
    and line. Raises LaunchError if there is no prompt."""
    if args.media and not args.prompt:
        raise LaunchError(f"--{args.media[0][0]} needs --prompt TEXT")
    parts = [{"type": kind, kind: path} for kind, path in args.media]
    prompts: list[GivenPrompt | LaunchError] = []
    for i, text in enumerate(args.prompt):
        name = f"prompt {i + 1}"
        message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        prompts.append(GivenPrompt(name, messages=(message,)) if parts else GivenPrompt(name, text))
    if args.prompt_file is not None:
        prompts += _read_file(args.prompt_file, args.chat)
    if not prompts:
        raise LaunchError(
            "nothing to generate from: give --prompt TEXT or --prompt-file FILE"
            if args.prompt_file is None
            else f"{args.prompt_file} has no prompts; expected JSON lines"
        )
    return prompts


def _read_file(path: Path, chat: bool) -> Iterator[GivenPrompt | LaunchError]:
    """Yield the prompt of each line, or its error. chat: texts are put through the chat template."""
    for number, raw in read_lines(path):
        try:
            yield _read_line(f"{path} line {number}", raw, path.parent, chat)
        except LaunchError as e:
            yield e


def _read_line(name: str, raw: bytes, folder: Path, chat: bool) -> GivenPrompt:
    try:
        line = msgspec.json.decode(raw, type=_Line)
    except UnicodeDecodeError as e:
        raise LaunchError(f"{name}: expected UTF-8, found the byte 0x{e.object[e.start]:02x} where it cannot be") from e
    except msgspec.DecodeError as e:
        half = _half_character(raw)
        raise LaunchError(f"{name}: {f'{half} is half of a character, the other is missing' if half else e}") from e
    if sum(field is not None for field in (line.prompt, line.prompt_token_ids, line.messages)) != 1:
        raise LaunchError(f'{name}: expected either "prompt", "prompt_token_ids" or "messages"')
    if chat and line.prompt_token_ids is not None:
        raise LaunchError(f"{name}: --chat takes text, but prompt_token_ids were given")
    return GivenPrompt(
        name,
        line.prompt,
        None if line.prompt_token_ids is None else tuple(line.prompt_token_ids),
        None if line.messages is None else tuple(line.messages),
        folder,
    )


def _half_character(raw: bytes) -> str | None:
    """The lone surrogate in a JSON text: JSON can spell it, no text can hold it."""
    try:
        json.dumps(json.loads(raw), ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        return f"\\u{ord(e.object[e.start]):04x}"
    except (ValueError, RecursionError):
        return None  # something else is wrong with it
    return None


def encode(
    given: Sequence[GivenPrompt | LaunchError], args: argparse.Namespace, tokenizer: Tokenizer, card: ModelCard
) -> list[EncodedPrompt | LaunchError]:
    """Return the prompts of the engine. In place of one that is empty, too long, names tokens that do not exist, or has
    media that cannot be used, there is its error, as in `given`."""
    with closing(_PromptEncoder(args, tokenizer, card)) as encoder:

        def encoded(prompt: GivenPrompt | LaunchError) -> EncodedPrompt | LaunchError:
            if isinstance(prompt, LaunchError):
                return prompt
            try:
                made = EncodedPrompt(prompt.name, encoder.encode(prompt))
                _check(made, args, card)
            except LaunchError as e:
                return e
            return made

        return [encoded(prompt) for prompt in given]


def _check(encoded: EncodedPrompt, args: argparse.Namespace, card: ModelCard) -> None:
    """Raise LaunchError for a prompt that is empty, too long, or names tokens that do not exist."""
    name, context, ids = encoded.name, context_length(args, card), encoded.prompt.token_ids
    if not ids:
        raise LaunchError(f"{name} is empty: there is no token to continue")
    # The token of a picture may lie behind the vocabulary (mllama).
    if wrong := [] if encoded.prompt.media else [id for id in ids if not 0 <= id < card.vocab_size]:
        raise LaunchError(f"{name}: token id {wrong[0]} is not in the vocabulary of {card.vocab_size}")
    if len(ids) >= context:
        raise LaunchError(
            f"{name} has {len(ids)} tokens, which leaves no room for an answer in the context of {context}"
        )
    if args.max_total_tokens is not None:
        new = min(args.max_new_tokens, context - len(ids))
        # The last token is never fed back.
        if (needed := len(ids) + new - 1) > args.max_total_tokens:
            raise LaunchError(
                f"{name}: {count(len(ids), 'token')} and {new} new need a cache of {needed}, found "
                f"--max-total-tokens {args.max_total_tokens}; raise it or lower --max-new-tokens"
            )


class _PromptEncoder:
    """Turns prompts into those of the engine."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer, card: ModelCard) -> None:
        self._model_dir = model_directory(args)
        self._tokenizer = tokenizer
        self._card = card
        self._processor = load_processor(self._model_dir, tokenizer)  # None for a model that takes text only
        self._chat = args.chat
        self._heard = args.use_audio_in_video  # the model hears the sound of videos
        self._decoder = MediaDecoder()
        if self._processor is not None and self._processor.convention:
            log.info(self._processor.convention)

    def encode(self, prompt: GivenPrompt) -> Prompt:
        """Raises LaunchError."""
        try:
            if prompt.messages is not None:
                return asyncio.run(self._conversation(prompt.messages, prompt.folder))
            if prompt.text is not None and self._chat:
                return asyncio.run(self._conversation([{"role": "user", "content": prompt.text}], prompt.folder))
            ids = self._tokenizer.encode(prompt.text) if prompt.text is not None else list(prompt.token_ids or ())
            return self._processor.text_prompt(ids) if self._processor else Prompt(ids)
        except (MediaError, UnavailableError) as e:
            raise LaunchError(f"{prompt.name}: {e}") from e

    def close(self) -> None:
        self._decoder.close()

    @cached_property
    def _conversations(self) -> "PromptBuilder":
        from tilerank.runtime.server.chat.formats import answer_format
        from tilerank.runtime.server.chat.prompts import PromptBuilder
        from tilerank.runtime.server.chat.text_encoder import DirectTextEncoder

        format = answer_format(self._tokenizer, family_of(self._card.model_type).tool_calls).tool_format
        model, encoder = str(self._model_dir), DirectTextEncoder(self._tokenizer)
        return PromptBuilder(
            self._tokenizer, model, format, self._processor, encoder, lambda: self._card.context_length, {}
        )

    async def _conversation(self, messages: Sequence[dict[str, Any]], folder: Path) -> Prompt:
        import pydantic

        from tilerank.runtime.server.chat.request import ChatCompletion
        from tilerank.runtime.server.http.body import validation_error
        from tilerank.runtime.server.http.errors import ApiError

        body = {"messages": list(messages), "use_audio_in_video": self._heard}
        try:
            chat = ChatCompletion.model_validate(body)
            read = partial(self._read, folder)
            return (await self._conversations.from_messages(chat.messages, chat.template, read)).prompt
        except pydantic.ValidationError as e:
            raise MediaError(str(validation_error(body, e))) from e
        except ApiError as e:
            raise MediaError(str(e)) from e

    async def _read(self, folder: Path, sources: Sequence[MediaSource]) -> list[DecodedMedium]:
        processor = self._processor
        assert processor is not None
        check_kinds(processor, sources)
        files = [[_read_url(url, folder) for url in source.urls] for source in sources]

        def describe(i: int) -> tuple[int, float | None]:
            with _named(sources[i]):
                return self._decoder.describe(files[i][0])

        media = []
        for source, own, sample in zip(sources, files, samplers(processor, sources, describe), strict=True):
            with _named(source):
                media.append(decode_source(self._decoder, source, own, sample))
        return media


@contextmanager
def _named(source: MediaSource) -> Iterator[None]:
    """Let errors name where a medium comes from."""
    try:
        yield
    except MediaError as e:
        url = source.urls[0]
        where = url if not url.lower().startswith("data:") else f"a data: URL of {source.kind}"
        raise MediaError(f"{where}: {e}") from e


def _read_url(url: str, folder: Path) -> bytes:
    if url.lower().startswith("data:"):
        return read_data_url(url)
    if "://" in url:
        raise MediaError(f"expected a file or a data: URL, found {url}: nothing is fetched")
    try:
        return (folder / url).read_bytes()
    except OSError as e:
        raise MediaError(f"{folder / url}: cannot be read: {e.strerror}") from e
