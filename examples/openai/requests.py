"""OpenAI's requests as options of the engine, and its errors as HTTP responses."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from outrider import Options, OutriderError
from pydantic import BaseModel, Field, field_validator, model_validator
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
    "modalities": [["text"]], "service_tier": ["auto", "default"],
}  # fmt: skip
_OPTIONS = {field.name for field in fields(Options)}
# Options that have no field of their own: OpenAI's set two of them, and JSON has no functions.
_NO_FIELD = {"max_new_tokens", "chat", "processors"}
_EXTRA = _OPTIONS | _LABELS | _NO_EFFECT.keys()  # that are not fields of the classes below
_JSON = "Send one JSON object, with the header Content-Type: application/json"
_ROUTES = "Use /v1/chat/completions, /v1/completions, /v1/models or /health"
# What Pydantic's messages do not say in one sentence.
_FORMS = {
    "prompt": "a text, a list of token ids, or a list of texts or of such lists",
    "stream_options": '{"include_usage": true}',
    "response_format": '{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", '
    '"json_schema": {"name": "...", "schema": {...}}}',
}
_REMEDIES = {400: _JSON, 405: "Use POST, or GET for /v1/models and /health"}
Requests = list[tuple[Any, Options]]


class Body(BaseModel, extra="allow", strict=True):
    """A request. Fields that are not listed here are options of the engine, by their own names."""

    model: str
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    max_tokens: int | None = None
    response_format: str | None = None  # as the JSON schema that texts must follow

    @model_validator(mode="before")
    @classmethod
    def without_null(cls, given: Any) -> Any:
        """In OpenAI's reference null means the same as leaving the field out."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    @field_validator("response_format", mode="before")
    @classmethod
    def as_schema(cls, given: Any) -> str | None:
        """As JSON; None for any text."""
        match given:
            case {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return '{"type": "object"}'
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                return json.dumps(schema)
        raise ValueError("another format")  # `_invalid` says which there are

    def names(self) -> dict[str, str]:
        """The fields that set options of another name, by option."""
        return {"max_new_tokens": "max_tokens"}

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Let errors of the engine in the block name the fields of the request."""
        try:
            yield
        except OutriderError as error:
            texts = [error.cause, error.remedy]
            for option, field in self.names().items():
                texts = [re.sub(rf"\b{option}\b", field, text) for text in texts]
            raise OutriderError(error.kind, *texts) from None

    def several(self, prompts: Sequence[Any], **named: Any) -> Requests:
        """`n` requests for each prompt. Raises OutriderError "option"."""
        if self.stream_options and not self.stream:
            raise OutriderError("option", "stream_options is for streams", "Leave it out")
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name not in _EXTRA:
                known = sorted(_OPTIONS - _NO_FIELD | type(self).model_fields.keys())
                near = get_close_matches(name, known, 1) or [f"one of {', '.join(known)}"]
                raise OutriderError("option", f"there is no field {name!r}", f"Use {near[0]}")
            if name in _NO_FIELD or (name in _NO_EFFECT and value not in _NO_EFFECT[name]):
                raise OutriderError("option", f"{name} is not supported here", "Leave it out")
        given = {
            name: value
            for name, value in (named | extra).items()
            if value is not None and name not in _LABELS and name not in _NO_EFFECT
        }
        with self.own_names():
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

    def limit(self) -> tuple[int, str]:
        """The most tokens of the output, by default until the context is full, and the field."""
        names = ("max_completion_tokens", "max_tokens")
        given = [(n, name) for name in names if (n := getattr(self, name)) is not None]
        return min(given, default=(10**6, names[0]))

    def names(self) -> dict[str, str]:
        return {"max_new_tokens": self.limit()[1], "logprobs": "top_logprobs"}

    def requests(self) -> Requests:
        if self.top_logprobs and not self.logprobs:
            raise OutriderError("option", "top_logprobs without logprobs", "Set logprobs to true")
        for number, message in enumerate(self.messages):
            if not isinstance(message.get("role"), str):
                remedy = 'Send {"role": "user", "content": "..."}'
                raise OutriderError("prompt", f"message {number} has no role", remedy)
        return self.several(
            [self.messages],
            max_new_tokens=self.limit()[0],
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            special_tokens="text",  # messages cannot contain control tokens
        )


def refusal(error: Exception) -> tuple[dict[str, Any], int]:
    """The body and the HTTP status of the response to an error in `REFUSED`."""
    status = None
    if isinstance(error, RequestValidationError):
        error = _invalid(error.errors())
    elif isinstance(error, HTTPException):  # no such route, or JSON that is nested too deeply
        status = error.status_code
        error = OutriderError("route", error.detail, _REMEDIES.get(status, _ROUTES))
    status = status or STATUS.get(error.kind, 500)
    message = str(error).encode(errors="backslashreplace").decode()  # lone surrogates
    blame = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": blame, "param": None, "code": error.kind}}, status


def _invalid(errors: Sequence[Any]) -> OutriderError:
    """What is wrong with the first field of these errors of Pydantic, or with the whole body."""
    first, where = errors[0], errors[0]["loc"][1:]
    if first["type"] == "json_invalid":
        cause = f"the body is not JSON: {first['ctx']['error']} (character {where[0]})"
        return OutriderError("option", cause, _JSON)
    if not where:
        return OutriderError("option", "the body is not a JSON object", _JSON)
    if first["type"] == "missing":
        return OutriderError("option", f"{where[0]} is missing", "Add it")
    name, legal = where[0], _FORMS.get(where[0])
    if legal is None:
        name, legal = ".".join(map(str, where)), first["msg"].removeprefix("Input should be ")
    cause = f"{name}={repr(first['input'])[:80]} is not valid"
    return OutriderError("option", cause, f"{name} must be {legal}")
