"""The body of /v1/completions: plain prompts. That of /v1/chat/completions is a chat as it is (chat/request.py)."""

from typing import Annotated

from pydantic import Field, model_validator

from ...chat.fields import ListOf
from ...chat.request import MAX_TOKENS, Sampling, TokenId

MAX_PROMPTS = 64
_Ids = Annotated[ListOf[TokenId], Field(min_length=1, max_length=MAX_TOKENS)]


class Completion(Sampling):
    """POST /v1/completions. echo: the answer begins with the prompt. prompt_logprobs: as in SamplingParams."""

    prompt: (
        _Ids
        | Annotated[ListOf[_Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
        | str
        | Annotated[ListOf[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int = Field(16, ge=0, le=MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None
    echo: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_completion(self) -> "Completion":
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of: expected the value of n, {self.n}, found {self.best_of}")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be combined with stream: true")
        return self

    def drop_large_fields(self) -> None:
        super().drop_large_fields()
        if not self.echo:
            self.prompt = ""

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def scores(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    @property
    def shows_scores(self) -> bool:
        return self.prompt_logprobs is not None

    @property
    def echoes(self) -> bool:
        return self.echo

    def prompt_text(self, number: int) -> str | None:
        prompt = self.prompt if isinstance(self.prompt, str) else self.prompt[number]
        return prompt if isinstance(prompt, str) else None
