"""The kinds of draft there are, one line each. A host application adds its own with `register`."""

from __future__ import annotations

from dataclasses import fields

from ..files.errors import OutriderError
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


def register(name: str, kind: type[Draft]) -> None:
    """Make a kind of draft known: draft=name from now on, and `--draft name`, in every bundle on
    the CPU. Raises OutriderError("option") where the name means something else, or the kind needs
    what there never is."""
    if name == "none" or KINDS.get(name, kind) is not kind:
        raise OutriderError(
            "option", f"there is a draft {name!r} already", "Choose another name for yours."
        )
    if not hasattr(kind, "propose"):
        raise OutriderError(
            "option", f"the draft {name!r} is no class of drafts",
            "Give a class derived from Draft or GuessedDraft.",
        )  # fmt: skip
    sources = [field.name for field in fields(Sources)]
    if unknown := [need for need in kind.needs if need not in sources]:
        raise OutriderError(
            "option",
            f"draft {name!r} needs {unknown[0]!r}, which is no source of drafts",
            f"Its `needs` must be a tuple of names from {', '.join(sources)}.",
        )
    KINDS[name] = kind
