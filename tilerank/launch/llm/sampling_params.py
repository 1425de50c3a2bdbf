"""How `LLM` samples, under the names that vLLM gives these values."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilerank.runtime.server.chat.request import MAX_TOKENS


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Values of one request; docs/python.md describes each. The model's generation_config.json has those of
    temperature, top_k, top_p, min_p and repetition_penalty that are None.

    max_tokens: None for as many as the context has room for. logprobs, prompt_logprobs: how many alternatives are
    reported for each token; None for no log-probabilities. structured_outputs: what the text must follow, such as
    {"json": SCHEMA}, {"regex": TEXT}, {"choice": TEXTS} or {"grammar": TEXT}.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    truncate_prompt_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request for a completion (runtime/server/apis/completions/body.py)."""
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return given | {
            "max_tokens": MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            "return_token_ids": True,
        }

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of a request for the answer to a chat, which spells some differently."""
        alternatives = {} if self.logprobs is None else {"logprobs": True, "top_logprobs": self.logprobs}
        return {name: value for name, value in self.fields().items() if name != "logprobs"} | alternatives
