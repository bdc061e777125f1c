"""Responses in OpenAI's format, as one JSON object or as server-sent events."""

import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from operator import itemgetter
from typing import Any
from uuid import uuid4

from outrider import Event, Result

from .requests import REFUSED, Body, Chat, refusal

# The index of the choice; an event of its stream, or only the last one if the response is not
# streamed; and the event's tokens with their log-probabilities, if requested, from `with_logprobs`.
Part = tuple[int, Event, list[dict[str, Any]]]


class Answer:
    """The response to one request."""

    def __init__(self, body: Body):
        self.body, self.chat = body, isinstance(body, Chat)
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self.head = {"id": uuid4().hex, "object": kind, "created": int(time.time())}
        self.begun: set[int] = set()  # indices of the choices that have a part
        self.results: dict[int, Result] = {}  # by index of the choice

    def whole(self, parts: Iterable[Part]) -> dict[str, Any]:
        return self.chunk(*sorted(parts, key=itemgetter(0))) | {"usage": self.usage()}

    async def events(self, first: Part, others: AsyncIterator[Part]) -> AsyncIterator[str]:
        """An error after the first part is an event of its own, without [DONE] after it."""
        yield _event(self.chunk(first))
        try:
            async for part in others:
                yield _event(self.chunk(part))
        except REFUSED as error:
            yield _event(refusal(error)[0])
            return
        if (self.body.stream_options or {}).get("include_usage"):
            yield _event(self.chunk() | {"usage": self.usage()})
        yield "data: [DONE]\n\n"

    def chunk(self, *parts: Part) -> dict[str, Any]:
        choices = [self.choice(*part) for part in parts]
        return {**self.head, "model": self.body.model, "choices": choices}

    def choice(self, index: int, event: Event, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        result, text, finish_reason = event.result, event.text, None
        if result is not None:
            self.results[index] = result
            text = text if self.body.stream else result.text
            finish_reason = "length" if result.finish_reason in ("length", "context") else "stop"
        choice = {"index": index, "finish_reason": finish_reason, "logprobs": None}
        if self.chat:
            # Only a choice's first part has the role: clients concatenate the strings of a stream.
            role = {} if index in self.begun else {"role": "assistant"}
            choice["delta" if self.body.stream else "message"] = role | {"content": text}
            self.begun.add(index)
        else:
            choice["text"] = text
        if tokens:
            choice["logprobs"] = {"content": tokens} if self.chat else _completion_logprobs(tokens)
        return choice

    def usage(self) -> dict[str, int]:
        prompted = range(0, len(self.results), self.body.n)  # one of each prompt's n choices
        prompt = sum(self.results[index].stats.prompt_tokens for index in prompted)
        output = sum(len(result.tokens) for result in self.results.values())
        total = prompt + output
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": total}


def with_logprobs(tokens: Iterable[Any], tokenizer: Any) -> list[dict[str, Any]]:
    """The tokens that have a log-probability, with their alternatives, in the chat format."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token], skip_special_tokens=False)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": None}  # JSON: no infinity

    return [
        one(token.id, token.logprob) | {"top_logprobs": [one(*o) for o in token.alternatives]}
        for token in tokens
        if token.logprob is not None
    ]


def _completion_logprobs(tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [_by_text((token, *token["top_logprobs"])) for token in tokens],
    }


def _by_text(tokens: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The log-probabilities by text: that of the first token, if several have the same text, as
    those of single bytes have."""
    found: dict[str, float] = {}
    for token in tokens:
        found.setdefault(token["token"], token["logprob"])
    return found


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
