"""Chat templates: the checkpoint's Jinja source, or a file's, rendered as in Transformers."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..files.errors import OutriderError, first_line
from ..files.texts import read_text

# Keys under which messages carry a model's reasoning; templates read the first (gpt-oss: second).
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Roles whose messages are text; others' may have tool calls, or their results.
_TEXT_ROLES = ("user", "system", "developer")
# Prefixes of content types that templates render as a placeholder, or drop.
_MEDIA = ("image", "video", "audio", "file", "input_image", "input_audio", "input_file")


def read_template(path: Path) -> str:
    """The Jinja source in a file that the user names. Raises OutriderError "option" if it cannot be
    read, or does not compile."""
    source = read_text(path, str(path))
    try:
        _environment().from_string(source)
    except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError) as error:  # nested too deeply
        at = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        cause = f"the chat template {path} does not compile{at}: {first_line(error)}"
        raise OutriderError("option", cause, "Correct its Jinja source.") from None
    return source


class ChatTemplate:
    """A chat template. source: its Jinja source. special_tokens: their strings, by the names that
    the template uses."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self._source, self._special_tokens = source, dict(special_tokens)

    @cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self._source)

    def _adapt_content(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with their content in the form that the template reads, for each role.

        Text becomes a list of one part if the template reads only such lists, as those of vision
        models do: it would silently drop plain text. Parts become one text, a line each as in other
        servers, if the template reads only text: it would fail, or print the list as Python does.
        """
        originals, messages = messages, [_join_parts(m) for m in messages]
        roles = dict.fromkeys(m.get("role") for m in messages if isinstance(m.get("content"), str))
        marks = {role: chr(0xE000 + i) for i, role in enumerate(roles)}  # private-use characters

        def unrendered_roles(parts: Collection[object]) -> set[object]:
            """Roles whose mark is not rendered when it replaces their content. parts: roles whose
            content is given as a part."""
            try:
                rendered = self._render_messages(
                    [_with_content(m, marks.get(m.get("role")), parts) for m in messages]
                )
            except Exception:  # noqa: BLE001 - the template's own code, which may raise anything
                return {*marks}
            return {role for role, mark in marks.items() if mark not in rendered}

        pairs = list(zip(messages, originals, strict=True))
        not_as_text = unrendered_roles(())
        # Of these, those that are rendered as a part.
        in_parts = not_as_text - unrendered_roles(not_as_text) if not_as_text else not_as_text
        joined_roles = {m.get("role") for m, old in pairs if m is not old}
        as_text: set[object] = set()
        if joined_roles:
            as_text = unrendered_roles(in_parts | joined_roles) - not_as_text
        return [
            _with_content(m, None, in_parts) if m is old or m.get("role") in as_text else old
            for m, old in pairs
        ]

    def _render_messages(self, messages: list[dict[str, Any]]) -> str:
        return self._template.render(
            messages=messages,
            tools=None,  # must be defined: templates test `tools is not none`
            documents=None,
            add_generation_prompt=True,
            **self._special_tokens,
        )

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation, as Transformers' `apply_chat_template` renders it; it
        ends with the header of the assistant's turn.

        messages: dicts with `role`, `content` and whatever else the template reads. Raises
        OutriderError "prompt" if there is no message, or the template fails.
        """
        if not messages:
            raise OutriderError("prompt", "the conversation is empty", "Pass at least one message.")
        try:
            plain = [_plain_message(n, message) for n, message in enumerate(messages)]
            return self._render_messages(self._adapt_content(plain))
        except OutriderError:
            raise
        except Exception as error:
            raise OutriderError(
                "prompt",
                f"the chat template refused the messages: {first_line(error)}",
                "Change the messages, or pass plain text.",
            ) from error


def _plain_message(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as Transformers passes it to templates: without keys that are None, and with JSON
    types only.

    Templates are untrusted, and other objects may have methods that the sandbox does not know.
    """
    present = {key: value for key, value in message.items() if value is not None}
    content = present.get("content")
    if present.get("role") in _TEXT_ROLES and not isinstance(content, str | list | tuple):
        what = "no content" if content is None else f"the content {repr(content)[:40]}"
        raise OutriderError(
            "prompt",
            f"message {number} has {what}",
            "Its content must be a text, or a list of parts.",
        )  # fmt: skip
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and str(part.get("type", "text")).startswith(_MEDIA):
            raise OutriderError(
                "prompt",
                f"a message has a part of type {part['type']!r}, and only text is supported",
                "Leave it out.",
            )  # fmt: skip
    plain: dict[str, Any] = json.loads(
        json.dumps(present, default=lambda value: f"<{type(value).__name__}>")
    )
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _join_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message; if its content is a list of text parts only, with one text in their place."""
    parts = message.get("content")
    if not parts or not isinstance(parts, list):
        return message
    if not all(isinstance(p, dict) and p.get("type", "text") == "text" for p in parts):
        return message
    texts = [part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "\n".join(texts)}


def _with_content(
    message: dict[str, Any], replacement: str | None, parts: Collection[object]
) -> dict[str, Any]:
    """The message; if its content is text, with `replacement` in its place unless that is None, and
    as a list of one part for the roles in `parts`."""
    text = message.get("content")
    if not isinstance(text, str):
        return message
    text = text if replacement is None else replacement
    in_parts = message.get("role") in parts
    return {**message, "content": [{"type": "text", "text": text}] if in_parts else text}


class _Dict:
    """`dict` for templates, without its unbound methods, which could modify any dict."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` for templates, without private names, which lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` stays free as a keyword
        jinja2.utils.Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here it just renders its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """`tojson` for templates; Jinja's own escapes HTML."""
    if refused := options.keys() - {"indent", "separators", "sort_keys"}:
        raise jinja2.TemplateError(f"tojson has no option {min(refused)!r}")
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment of Transformers, for which checkpoints' templates are written."""
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
