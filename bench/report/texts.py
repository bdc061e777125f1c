"""Texts with what became of each token: accepted, corrected, bonus; and the drafts that fell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.text.engine import TextEngine
from runtime.text.options import Options

from ..core.record import recording

CONTEXT = 8  # tokens before a rejected draft, for its text


@dataclass(frozen=True)
class Piece:
    """kind: of `runtime.sequence.Origin`, or "rejected", or "unread" for drafts behind one."""

    kind: str
    text: str
    title: str


@dataclass(frozen=True)
class ColoredText:
    """said: its counts in a line."""

    prompt: str
    pieces: Sequence[Piece]
    said: str


def colored(
    engine: TextEngine, prompt: str, gamma: int, temperature: float, tokens: int, seed: int
) -> ColoredText:
    """A text as it comes, until the model ends it."""
    options: dict[str, Any] = {
        "gamma": gamma, "temperature": temperature, "max_new_tokens": tokens, "seed": seed,
    }  # fmt: skip
    ids = engine.encode(prompt, Options())
    with recording(engine) as recorder:
        events = list(engine.stream(prompt, **options))
    (text,) = recorder.take()
    pieces = [Piece(origin, piece, "by the prefill") for piece, origin in events[0].pieces]
    ids += events[0].token_ids
    for number, (event, x) in enumerate(zip(events[1:], text.rounds, strict=True), start=1):
        title = f"round {number}: {x.accepted} of {x.gamma} accepted"
        made = [Piece(origin, piece, title) for piece, origin in event.pieces]
        if event.tokens and event.tokens[-1].origin == "corrected":
            before = [*ids[-CONTEXT:], *x.drafts[: x.accepted]]
            fallen = (x.drafts[x.accepted : x.accepted + 1], x.drafts[x.accepted + 1 :])
            # In front of the correction, which may have no text yet.
            place = len(made) - bool(made and made[-1].kind == "corrected")
            for kind, drafts in zip(("rejected", "unread"), fallen, strict=True):
                if said := _continuation(engine, before, drafts):
                    made.insert(place, Piece(kind, said, title))
                    place += 1
                before += drafts
        pieces += made
        ids += event.token_ids
    stats = text.stats
    said = "The model ended this text at once"
    if stats.rounds:
        said = (
            f"{stats.output_tokens} tokens, {stats.rounds} rounds, "
            f"τ {stats.mean_acceptance_length:.2f}, "
            f"{stats.accepted} of {stats.drafted} drafts accepted"
        )
    return ColoredText(prompt, pieces, said)


def _continuation(engine: TextEngine, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text of ids behind others: alone some tokenizers drop the space in front."""
    decode = engine.tokenizer.decode
    text = decode([*before, *ids])[len(decode(before)) :]
    return text.replace("\n", "⏎")  # a line that is not there should not break
