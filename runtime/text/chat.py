"""Chat templates: the checkpoint's own Jinja source, rendered as Transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..files.errors import OutriderError, first_line

# Names under which messages carry a model's reasoning; templates read the first (gpt-oss: second).
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """source: the Jinja template. special_tokens: texts by role, as the template names them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self._source, self._special_tokens = source, dict(special_tokens)

    @cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self._source)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether it reads a list of parts alone, as those of models that see do: text by itself
        would be left out without a word."""
        probe = "plain text"

        def says(content: object) -> bool:
            try:
                return probe in self._rendered([{"role": "user", "content": content}])
            except Exception:  # noqa: BLE001 - the template's own code, which may raise anything
                return False

        return not says(probe) and says([{"type": "text", "text": probe}])

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        return self._template.render(
            messages=messages,
            tools=None,  # defined: templates test `tools is not none`
            documents=None,
            add_generation_prompt=True,
            **self._special_tokens,
        )

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation, as Transformers' `apply_chat_template` renders it; it
        ends with the header of the assistant's turn.

        messages: dicts with `role`, `content` and whatever else the template reads. Raises
        OutriderError "prompt" when there is no message, or the template fails.
        """
        if not messages:
            raise OutriderError("prompt", "the conversation is empty", "Pass at least one message.")
        try:
            plain = [_plain_message(message) for message in messages]
            if self._takes_parts:
                plain = [_in_parts(message) for message in plain]
            return self._rendered(plain)
        except Exception as error:
            raise OutriderError(
                "prompt",
                f"the chat template refused the messages: {first_line(error)}",
                "Change the messages, or pass plain text.",
            ) from error


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as Transformers hands it to templates: absent for None, and nothing but JSON types.

    A template is untrusted, and objects have methods that the sandbox does not know.
    """
    present = {key: value for key, value in message.items() if value is not None}
    plain: dict[str, Any] = json.loads(
        json.dumps(present, default=lambda value: f"<{type(value).__name__}>")
    )
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


class _Dict:
    """`dict` for templates: without the unbound methods, which could change any object."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` for templates: without private names, which lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` stays free as a keyword
        jinja2.utils.Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it renders its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own `tojson` escapes HTML."""
    if refused := options.keys() - {"indent", "separators", "sort_keys"}:
        raise jinja2.TemplateError(f"tojson has no option {min(refused)!r}")
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment for which checkpoints' templates are written: that of Transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment
