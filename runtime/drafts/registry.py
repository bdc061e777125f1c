"""The kinds of draft, one line each. A host application adds its own with `register_draft`."""

from __future__ import annotations

from dataclasses import fields

from ..files.errors import STRING, OutriderError, check_value
from .chain import ChainDraft
from .draft import Draft, Sources
from .lookup import CopyDraft, NgramDraft
from .model import ModelDraft
from .tables import BigramDraft, RandomDraft, SkipDraft, UnigramDraft

KINDS: dict[str, type[Draft]] = {
    "model": ModelDraft,
    "ngram": NgramDraft,
    "copy": CopyDraft,
    "chain": ChainDraft,
    "unigram": UnigramDraft,
    "bigram": BigramDraft,
    "skip": SkipDraft,
    "random": RandomDraft,
}


def register_draft(name: str, kind: type[Draft]) -> None:
    """Register a kind of draft, for draft=name and `--draft name`, in every bundle on the CPU.
    Raises OutriderError("option") if the name is none or taken, or if the kind is invalid or needs
    an unknown source."""
    check_value("name", name, STRING, bool, "a string that is not empty")
    if name == "none" or KINDS.get(name, kind) is not kind:
        raise OutriderError(
            "option", f"a draft named {name!r} already exists", "Choose another name for yours."
        )
    if not hasattr(kind, "propose"):
        raise OutriderError(
            "option", f"the draft {name!r} is not a draft class",
            "Pass a class derived from Draft or GuessedDraft.",
        )  # fmt: skip
    sources = [field.name for field in fields(Sources)]
    if unknown := [need for need in kind.needs if need not in sources]:
        raise OutriderError(
            "option",
            f"draft {name!r} needs {unknown[0]!r}, which is not a field of Sources",
            f"Its `needs` must be a tuple of names from {', '.join(sources)}.",
        )
    if kind.point_masses and not kind.at_once:
        raise OutriderError(
            "option",
            f"draft {name!r} has point_masses without at_once, so nothing names its tokens",
            "Set both, or derive it from GuessedDraft.",
        )
    KINDS[name] = kind
