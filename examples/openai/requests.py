"""OpenAI's requests as options of the engine, and its errors as HTTP responses."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from outrider import Options, OutriderError
from pydantic import BaseModel, Field, model_validator
from starlette.exceptions import HTTPException

STATUS = {"option": 400, "prompt": 400, "model": 404, "busy": 429, "replica": 503}  # others: 500
REFUSED = (OutriderError, RequestValidationError, HTTPException)
Prompt = str | list[int]

# Fields that clients and frameworks send although they change nothing: labels for the provider's
# records, and fields whose values listed here ask for nothing.
_LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
_NO_EFFECT: dict[str, Sequence[Any]] = {
    "store": [False], "echo": [False], "best_of": [1], "suffix": [""], "tools": [[]],
    "tool_choice": ["none", "auto"], "parallel_tool_calls": [True, False],
    "response_format": [{"type": "text"}], "modalities": [["text"]],
    "service_tier": ["auto", "default"],
}  # fmt: skip
# Options by their own names; the two left out are set by OpenAI's fields.
_ENGINE_OPTIONS = {field.name for field in fields(Options)} - {"max_new_tokens", "chat"}
Requests = list[tuple[Any, Options]]


class Body(BaseModel, extra="allow"):
    """A request. Fields that are not listed here are options of the engine, by their own names."""

    model: str
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    max_tokens: int | None = None

    @model_validator(mode="before")
    @classmethod
    def without_null(cls, given: Any) -> Any:
        """In OpenAI's reference null means the same as leaving the field out."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    def several(self, prompts: Sequence[Any], **named: Any) -> Requests:
        """`n` requests for each prompt. Raises OutriderError "option"."""
        if self.stream_options and not self.stream:
            raise OutriderError("option", "stream_options is for streams", "Leave it out")
        extra = self.model_extra or {}
        for name in extra.keys() - _LABELS - _ENGINE_OPTIONS:
            if name not in _NO_EFFECT:
                remedy = f"Use a field of OpenAI's, or one of {', '.join(sorted(_ENGINE_OPTIONS))}"
                raise OutriderError("option", f"unknown field {name!r}", remedy)
            if extra[name] not in _NO_EFFECT[name]:
                raise OutriderError("option", f"{name} is not supported here", "Leave it out")
        given = {
            name: value
            for name, value in (named | extra).items()
            if value is not None and name not in _LABELS and name not in _NO_EFFECT
        }
        options = Options(temperature=1.0).updated(given).seeded()
        first = options.seed or 0
        seeds = [replace(options, seed=(first + nth) % 2**64) for nth in range(self.n)]
        return [(prompt, seeded) for prompt in prompts for seeded in seeds]


class Completion(Body):
    prompt: Prompt | list[Prompt]
    logprobs: int | None = None

    def requests(self) -> Requests:
        one = isinstance(self.prompt, str) or all(isinstance(item, int) for item in self.prompt)
        return self.several(
            [self.prompt] if one else self.prompt,
            max_new_tokens=16 if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            chat=False,
        )


class Chat(Body):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def requests(self) -> Requests:
        if self.top_logprobs and not self.logprobs:
            raise OutriderError("option", "top_logprobs without logprobs", "Set logprobs to true")
        given = [n for n in (self.max_completion_tokens, self.max_tokens) if n is not None]
        return self.several(
            [self.messages],
            max_new_tokens=min(given, default=10**6),  # by default until the context is full
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            special_tokens="text",  # messages cannot contain control tokens
        )


def refusal(error: Exception) -> tuple[dict[str, Any], int]:
    """The body and the HTTP status of the response to an error in `REFUSED`."""
    if isinstance(error, OutriderError):
        kind, message = error.kind, str(error)
        status = STATUS.get(kind, 500)
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = first["loc"][1:] or first["loc"]  # without "body", unless that is all
        kind, message, status = "option", ".".join(map(str, where)) + ": " + first["msg"], 400
    else:  # HTTPException: no such route
        kind, message, status = "route", error.detail, error.status_code
    message = message.encode(errors="backslashreplace").decode()  # lone surrogates
    blame = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": blame, "param": None, "code": kind}}, status
