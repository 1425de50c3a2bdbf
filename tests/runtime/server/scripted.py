"""A server without a socket, whose engine gives scripted answers. The chat templates have the form of real ones."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import tokenizers
from media_files import DEMO_VL
from starlette.types import ASGIApp

from tilerank.launch.serving.media_decoder import MediaDecoder
from tilerank.loader.generation_config import SamplingDefaults
from tilerank.loader.pooling import Pooling
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.registry import family_of, load_processor
from tilerank.runtime.protocol.engine_state import EngineState
from tilerank.runtime.protocol.events import PooledEvent, SoundEvent, TokenEvent
from tilerank.runtime.protocol.framing import encode
from tilerank.runtime.protocol.params import Logprobs
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.server.apis.service import ServerSettings
from tilerank.runtime.server.app import make_app
from tilerank.runtime.server.chat.formats import answer_format
from tilerank.runtime.server.chat.media import MediaReader
from tilerank.runtime.server.chat.tools.named import DeepSeekFormat
from tilerank.runtime.server.http.fetch import Fetcher
from tilerank.runtime.server.link.client import EngineClient
from tilerank.runtime.server.link.messages import Cancel, Events, Submit, engine_inbox

QWEN = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content is string and (preserve_thinking is defined and preserve_thinking or loop.last) %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
OFF = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
QWEN_3 = QWEN + OFF + "{% endif %}"
QWEN_3_5 = QWEN + OFF + "{% else %}{{ reasoning_effort | default('') }}<think>\n{% endif %}"
BOS = "<｜begin▁of▁sentence｜>"
ENOUGH = 1 << 20


def make_model(directory: Path) -> Path:
    """Write a model directory with the marks of Qwen and DeepSeek, whose tokenizer begins each text with BOS."""
    directory.mkdir()
    inner = tokenizers.Tokenizer.from_file(str(DEMO_VL / "tokenizer.json"))
    inner.add_tokens([tokenizers.AddedToken(mark, special=False, normalized=False) for mark in DeepSeekFormat.MARKS])
    inner.add_special_tokens([BOS])
    processor = tokenizers.processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, inner.token_to_id(BOS))])
    inner.post_processor = processor
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS}))
    return directory


class Server:
    """The application. submits: what the engine got, which answers with the tokens of `answer` and `finish_reason`.

    answer: a text, or a function of the prompt. sounds: those of an answer that speaks, one after each token. limit:
    the engine sends this many tokens of an answer and waits. cut: it then closes its connection. cancelled: numbers.
    logprobs: gives those of a token. values: returns the vector or the score of a prompt.
    """

    def __init__(self, app: ASGIApp, http: httpx.AsyncClient, tokenizer: Tokenizer, context_length: int) -> None:
        self.app = app
        self.http = http
        taken: Any = http  # openai declares a client of httpx2, and takes one of httpx as well
        self.client = openai.AsyncOpenAI(base_url="http://server/v1", api_key="any", max_retries=0, http_client=taken)
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.answer: str | Callable[[str], str] = ""
        self.sounds: list[bytes] = []
        self.finish_reason = "stop"
        self.logprobs: Callable[[int], Logprobs | None] = lambda id: None
        self.limit = ENOUGH
        self.more = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.cut = False
        self.submits: list[Submit] = []
        self.values: Callable[[list[int]], bytes] = lambda ids: b""
        self.cancelled: list[int] = []
        self.drafted: tuple[bool, int] = (False, 0)  # whether tokens were drafted, and wrong drafts after each

    def resume(self) -> None:
        """Send the rest of the answer. May be called in any thread."""
        self._loop.call_soon_threadsafe(self.more.set)

    async def ask(self, answer: str, *messages: Any, **fields: Any) -> Any:
        """Ask for a chat completion that is `answer`."""
        self.answer = answer
        user = {"role": "user", "content": "Who?"}
        return await self.client.chat.completions.create(model="it", messages=[*(messages or [user])], **fields)

    async def chat(self, *messages: Any, **fields: Any) -> httpx.Response:
        """Post a chat as it is."""
        return await self.http.post("/v1/chat/completions", json={"messages": messages} | fields)

    @property
    def prompts(self) -> list[Prompt]:
        return [submit.prompt for submit in self.submits]

    @property
    def prompt(self) -> str:
        """The text of the last prompt, special tokens included."""
        inner = tokenizers.Tokenizer.from_file(str(self.tokenizer.model_dir / "tokenizer.json"))
        return str(inner.decode(self.submits[-1].prompt.token_ids, skip_special_tokens=False))

    def count(self, text: str) -> int:
        """Return the number of tokens of a part of an answer."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    async def answer_requests(self, incoming: asyncio.StreamReader, outgoing: asyncio.StreamWriter) -> None:
        outgoing.write(encode(EngineState(self.context_length, 1 << 20, 0.0, 0, 0, 0, 0, 0)))
        inbox = engine_inbox()
        while data := await incoming.read(1 << 20):
            for message in inbox.feed(data):
                if isinstance(message, Submit):
                    self.submits.append(message)
                    if message.params.pooling is not None:
                        pooled = PooledEvent(message.number, self.values(message.prompt.token_ids))
                        outgoing.write(encode(Events([pooled])))
                        continue
                    for number in range(message.number, message.number + len(message.seeds)):
                        await self._generate(number, message.params.speech is not None, outgoing)
                if isinstance(message, Cancel):
                    self.cancelled.append(message.number)

    async def _generate(self, number: int, speaks: bool, outgoing: asyncio.StreamWriter) -> None:
        sounds = [SoundEvent(number, samples, False) for samples in self.sounds if speaks]
        answer = self.answer if isinstance(self.answer, str) else self.answer(self.prompt)
        ids = self.tokenizer.encode(answer, add_special_tokens=False)
        for i, id in enumerate(ids):
            if i == self.limit:
                await self.more.wait()
                if self.cut:
                    outgoing.close()
                    return
            last = self.finish_reason == "length" and i == len(ids) - 1
            reason = "length" if last else None
            token = TokenEvent(number, id, 0.0, reason, self.logprobs(id), None, *self.drafted)
            outgoing.write(encode(Events([token])))
            if sounds:
                outgoing.write(encode(Events([sounds.pop(0)])))
        if self.finish_reason == "stop":
            outgoing.write(encode(Events([TokenEvent(number, 0, 0.0, "stop")])))
        for sound in [*sounds, SoundEvent(number, b"", True)] if speaks else ():
            outgoing.write(encode(Events([sound])))


@asynccontextmanager
async def serving(
    model: Path,
    template: str | None,
    *,
    models: tuple[str, ...] = ("it",),
    api_keys: tuple[str, ...] = (),
    media: MediaReader | None = None,
    voices: tuple[str, ...] = (),
    sampling: SamplingDefaults | None = None,
    variables: Mapping[str, Any] | None = None,
    pooling: Pooling | None = None,
    strict: bool = False,
    context_length: int = 4096,
    seed: int | None = None,
) -> AsyncIterator[Server]:
    """Serve a model directory. template: written into it; None for its own. variables: of it, unless requests say
    otherwise."""

    async def check_grammar(grammar: str) -> None: ...

    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(model)
    format = answer_format(tokenizer, "hermes")
    defaults = sampling or SamplingDefaults()
    settings = ServerSettings(
        models,
        "0",
        api_keys,
        defaults,
        format,
        check_grammar,
        media,
        voices=voices,
        template_variables=variables or {},
        pooling=pooling,
        pairs=family_of("qwen3").pairs,
        strict_fields=strict,
        seed=seed,
    )
    engines, (ours, theirs) = EngineClient(), socket.socketpair()
    attached = asyncio.create_task(engines.attach(0, ours))
    app = make_app(engines, tokenizer, settings)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as http:
        server = Server(app, http, tokenizer, context_length)
        incoming, outgoing = await asyncio.open_unix_connection(sock=theirs)
        engine = asyncio.create_task(server.answer_requests(incoming, outgoing))
        await engines.ready.wait()
        yield server
        engine.cancel()
        outgoing.close()
        await attached


def run(model: Path, template: str | None, test: Callable[[Server], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """Run a test with a server."""

    async def running() -> Any:
        async with serving(model, template, **options) as server:
            return await test(server)

    return asyncio.run(running())


@contextmanager
def reader(
    model: Path, *, decoder: MediaDecoder | None = None, fetcher: Fetcher | None = None, **limits: int
) -> Iterator[MediaReader]:
    """What reads the media of requests to a model. limits: as in MediaReader."""
    processor = load_processor(model, Tokenizer(model))
    assert processor is not None
    made = decoder or MediaDecoder()
    most = dict.fromkeys(("image", "video", "audio"), 999) | limits
    try:
        yield MediaReader(processor, lambda: made, fetcher or Fetcher([], None), most)
    finally:
        made.close()
