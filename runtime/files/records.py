"""Dataclasses as JSON files with a schema number and a checksum, read strictly.

Files are not trusted: every value is checked against its field's annotation and the rules in it, as
in `Annotated[int, between(1, 8)]`.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from .errors import OutriderError

SCHEMA = 2  # 1: bundles without our own attention operator
T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A condition on a value, in words and as a test."""

    description: str
    is_satisfied: Callable[[Any], bool]


def between(least: float, most: float) -> Rule:
    """A rule for a range, bounds included; NaN never satisfies it."""
    return Rule(f"from {least} to {most}", lambda value: least <= value <= most)


# Types of fields. No model comes near the bounds, which ensure that no product overflows and that
# errors in a file are found when it is read.
Count = Annotated[int, between(1, (1 << 31) - 1)]
SmallCount = Annotated[int, between(1, 1 << 16)]
TokenId = Annotated[int, between(0, (1 << 31) - 1)]


def digest_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON: the content address of a part."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_json(path: Path, kind: str, facts: Any) -> None:
    """Write a dataclass, with its schema and a checksum over the whole."""
    content = dataclasses.asdict(facts)
    for field in dataclasses.fields(facts):
        if field.default is None and content[field.name] is None:
            del content[field.name]  # None is omitted; `build` restores it
    body = {"kind": kind, "schema": SCHEMA, "facts": content}
    text = json.dumps({**body, "checksum": digest_json(body)}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path, kind: str, cls: type[T], remedy: str) -> T:
    """Read a file written by `write_json`. Raises OutriderError "bundle" if it is truncated or
    edited, has another schema, or does not fit the fields of `cls`."""

    def refuse(cause: str) -> OutriderError:
        return OutriderError("bundle", f"{path}: {' '.join(cause.split())[:300]}", remedy)

    try:
        with convert_read_errors(path, remedy):
            content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("kind") != kind:
            raise refuse(f"not a {kind} file of Outrider")
        if content.get("schema") != SCHEMA:
            raise refuse(f"schema {content.get('schema')}; this version reads schema {SCHEMA}")
        checksum = content.pop("checksum", None)
        if checksum != digest_json(content):
            raise refuse("the checksum does not match: the file was edited or damaged")
    except (ValueError, RecursionError) as error:
        raise refuse(f"not JSON, truncated or edited ({error})") from None
    try:
        return typing.cast(T, build(cls, content["facts"], kind))
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise refuse(str(error)) from None


@contextmanager
def convert_read_errors(path: Path, remedy: str) -> Iterator[None]:
    """Turn errors of reading files in the block into OutriderError "bundle" that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            remedy = "Make it readable for this user, with chmod or chown."
        cause = f"{error.filename or path} cannot be read: {error.strerror or error}"
        raise OutriderError("bundle", cause, remedy) from None
    except UnicodeDecodeError:
        raise OutriderError("bundle", f"{path} is not UTF-8", remedy) from None


def build(annotation: Any, value: Any, where: str) -> Any:
    """Build a value of the annotated type from JSON. Raises TypeError or ValueError, which name the
    field that does not fit."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        built = build(arguments[0], value, where)
        for rule in arguments[1:]:
            if not rule.is_satisfied(built):
                raise ValueError(f"{where} is {_short_repr(value)}, not {rule.description}")
        return built
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return build(next(a for a in arguments if a is not type(None)), value, where)
    if origin is Literal:
        if value not in arguments:
            raise TypeError(f"{where} is {_short_repr(value)}, not one of {', '.join(arguments)}")
        return value
    if origin is list and isinstance(value, list):
        return [build(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {
            build(arguments[0], k, f"a name in {where}"): build(arguments[1], v, f"{where}.{k}")
            for k, v in value.items()
        }
    if dataclasses.is_dataclass(annotation) and isinstance(value, dict):
        return _build_dataclass(typing.cast(type, annotation), value, where)
    if annotation is float and type(value) in (int, float):
        return float(value)
    if origin is None and type(value) is annotation:
        return value
    raise TypeError(
        f"{where} is {_short_repr(value)}, not {_TYPE_NAMES.get(origin or annotation, 'an object')}"
    )


_TYPE_NAMES: dict[Any, str] = {
    int: "an integer", float: "a number", bool: "true or false", str: "a string",
    list: "a list",
}  # fmt: skip


def _build_dataclass(cls: type, value: dict[str, Any], where: str) -> Any:
    fields = typing.get_type_hints(cls, include_extras=True)
    optional = {f.name for f in dataclasses.fields(cls) if f.default is None}
    odd = sorted((fields.keys() ^ value.keys()) - (optional - value.keys()))
    if odd:
        raise TypeError(f"{where}: field {_short_repr(odd[0])} is missing or unknown")
    return cls(**{k: build(fields[k], v, f"{where}.{k}") for k, v in value.items()})


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
