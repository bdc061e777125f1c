"""What OpenAI's clients say and expect, in the engine's terms; examples/ray_serve.py serves it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal
from uuid import uuid4

import outrider
from pydantic import BaseModel, Field

OPTIONS = {field.name for field in fields(outrider.Options)} - {"chat", "max_new_tokens"}
STATUS = {"option": 400, "prompt": 400, "model": 404, "busy": 429, "replica": 503}  # others: 500
Spelled = tuple[str, float]  # a token and its log-probability


@dataclass(frozen=True)
class Part:
    """What a round, or all of them, added to a choice. tokens: each with its alternatives behind
    it; None where they are not wanted. The last part of a choice has the rest."""

    index: int
    text: str
    tokens: list[list[Spelled]] | None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(
        cls, index: int, nth: int, text: str, tokens: Any, result: outrider.Result | None
    ) -> Part:
        """nth: among the choices of its prompt, which counts once."""
        known = [
            [(spelled, max(logprob, -9999.0)) for spelled, logprob in token]  # JSON has no infinity
            for token in tokens
            if token[0][1] is not None
        ]
        if result is None:
            return cls(index, text, known or None)
        finish = "length" if result.finish_reason in ("length", "context") else "stop"
        prompt = 0 if nth else result.stats.prompt_tokens
        return cls(index, text, known or None, finish, prompt, len(result.tokens))


class Body(BaseModel, extra="allow"):
    """What has no name, another type or another default among the engine's options."""

    kinds: ClassVar[tuple[str, str]]  # of a whole answer and of a part
    model: str
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None

    def options(self, **named: Any) -> dict[str, Any]:
        """For the engine. Raises OutriderError "option" for what it does not have."""
        extra = self.model_extra or {}
        refused = sorted(extra.keys() - OPTIONS)
        if refused or (self.stream_options and not self.stream):
            name = refused[0] if refused else "stream_options without stream"
            raise outrider.OutriderError("option", f"{name} is not supported", "Leave it out")
        named |= {"temperature": 1.0, "logit_bias": self.logit_bias}
        given = {name: value for name, value in extra.items() if value is not None}
        return {name: value for name, value in (named | given).items() if value is not None}

    def head(self) -> dict[str, Any]:
        kind = self.kinds[self.stream]
        return {"id": uuid4().hex, "object": kind, "created": int(time.time()), "model": self.model}


class Completion(Body):
    kinds = ("text_completion", "text_completion")
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None

    def request(self) -> tuple[Sequence[Any], dict[str, Any]]:
        one = isinstance(self.prompt, str) or all(isinstance(item, int) for item in self.prompt)
        most = 16 if self.max_tokens is None else self.max_tokens
        options = self.options(max_new_tokens=most, logprobs=self.logprobs, chat=False)
        return [self.prompt] if one else self.prompt, options

    def choice(self, part: Part) -> dict[str, Any]:
        logprobs = part.tokens and {
            "tokens": [text for (text, _), *_ in part.tokens],
            "token_logprobs": [logprob for (_, logprob), *_ in part.tokens],
            "top_logprobs": [dict(token) for token in part.tokens],
        }
        said = {"index": part.index, "text": part.text}
        return said | {"logprobs": logprobs, "finish_reason": part.finish_reason}


class Chat(Body):
    kinds = ("chat.completion", "chat.completion.chunk")
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def request(self) -> tuple[Sequence[Any], dict[str, Any]]:
        given = [n for n in (self.max_completion_tokens, self.max_tokens) if n is not None]
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return [self.messages], self.options(
            max_new_tokens=min(given, default=10**6),  # or until the context is full
            logprobs=logprobs,
            special_tokens="text",  # those in a message
        )

    def choice(self, part: Part) -> dict[str, Any]:
        def named(token: Spelled) -> dict[str, Any]:
            return {"token": token[0], "logprob": token[1], "bytes": None}

        logprobs = part.tokens and {
            "content": [
                named(token) | {"top_logprobs": [named(other) for other in others]}
                for token, *others in part.tokens
            ]
        }
        said = {"role": "assistant", "content": part.text}
        said = {"index": part.index, "delta" if self.stream else "message": said}
        return said | {"logprobs": logprobs, "finish_reason": part.finish_reason}


def whole(body: Any, parts: Sequence[Part]) -> dict[str, Any]:
    return body.head() | {"choices": [body.choice(part) for part in parts], "usage": _usage(parts)}


async def events(body: Any, first: Part, others: AsyncIterator[Part]) -> AsyncIterator[str]:
    """Server-sent events. What goes wrong by now is one of them, and no [DONE] comes after it."""
    head, said = body.head(), [first]
    yield _event(head | {"choices": [body.choice(first)]})
    try:
        async for part in others:
            said.append(part)
            yield _event(head | {"choices": [body.choice(part)]})
    except outrider.OutriderError as error:
        yield _event(refusal(error)[0])
        return
    if body.stream_options and body.stream_options.get("include_usage"):
        yield _event(head | {"choices": [], "usage": _usage(said)})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _usage(parts: Sequence[Part]) -> dict[str, int]:
    prompt = sum(part.prompt_tokens for part in parts)
    completion = sum(part.completion_tokens for part in parts)
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def refusal(error: Any) -> tuple[dict[str, Any], int]:
    """The body and the HTTP status of an OutriderError, or of a body that is not valid."""
    if isinstance(error, outrider.OutriderError):
        kind, message = error.kind, str(error)
    else:
        first = error.errors()[0]
        kind, message = "option", ".".join(map(str, first["loc"][1:])) + ": " + first["msg"]
    status = STATUS.get(kind, 500)
    blame = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": blame, "param": None, "code": kind}}, status
