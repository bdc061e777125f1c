"""The kinds of draft there are, one line each. A host application adds its own with `register`."""

from __future__ import annotations

from ..files.errors import OutriderError
from .chain import ChainDraft
from .draft import Draft
from .lookup import CopyDraft, NgramDraft
from .model import ModelDraft
from .random import RandomDraft
from .tables import BigramDraft, SkipDraft, UnigramDraft

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
    the CPU. Raises OutriderError("option") where the name means something else."""
    if name == "none" or KINDS.get(name, kind) is not kind:
        raise OutriderError(
            "option", f"there is a draft {name!r} already", "Choose another name for yours."
        )
    KINDS[name] = kind
