"""The pair of the side-by-side benchmark: the bundled target grown to a real model's shape, and a
draft that agrees with it as often as is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import inflate, inflate_draft

DRAFT_HIDDEN = 288  # a larger vocabulary takes three channels more
BUNDLED = Path(__file__).parents[1] / "models" / "target"


@dataclass(frozen=True)
class Pair:
    target: Path
    draft: Path
    facts: dict[str, Any]


def make(shape: str, alpha: float, work: Path) -> Pair:
    """The pair, made unless it is there.

    The draft is the bundled target with noise, as it was before it was grown, but with as many
    tokens: so its cost is that of a small model with a large vocabulary.
    """
    sizes = asdict(inflate.SHAPES[shape])
    target, draft = work / shape, work / f"draft-{alpha:g}"
    blurred = work / f"blurred-{alpha:g}"
    stamp = work / f"{shape}-{alpha:g}.json"
    if not stamp.is_file():
        facts: dict[str, Any] = {"shape": shape, "alpha_wanted": alpha}
        if not target.is_dir():
            grown = inflate.grow(str(BUNDLED), target, sizes)
            facts["difference"] = grown.difference
        if not draft.is_dir():
            if not blurred.is_dir():
                made = inflate_draft.blur(str(BUNDLED), str(BUNDLED), blurred, alpha)
                facts |= {f"draft_{key}": value for key, value in asdict(made).items()}
            more = {"vocab_size": sizes["vocab_size"], "hidden_size": DRAFT_HIDDEN}
            inflate.grow(str(blurred), draft, more)
        stamp.write_text(json.dumps(facts))
    return Pair(target, draft, json.loads(stamp.read_text()))


def encoder(checkpoint: Path) -> tuple[Callable[[str], list[int]], list[int]]:
    """From text to ids without special tokens, and the ids that begin every text."""
    import transformers

    library: Any = transformers
    tokenizer = library.AutoTokenizer.from_pretrained(checkpoint)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return encode, tokenizer("")["input_ids"]
