"""Engines without a model, and a text engine around them, for every test above the engines.

A `FakeEngine` keeps a cache as a real engine does: it stores the id written to each row and
computes logits from the rows it attends to. A stale row, a wrong position or a row of another slot
gives different logits, and a row that was never written raises an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models

from runtime.backends.engine import CachedRows, Engine, Ids, Logits
from runtime.decoder import Decoder
from runtime.files.graphs import Dtype, GraphFacts, Pair, TokenizerFacts
from runtime.files.manifest import MANIFEST_FILE, Manifest
from runtime.files.records import digest_json
from runtime.round import HostRounds
from runtime.sampling.reference import NumpySampler
from runtime.text.engine import TextEngine
from runtime.text.tokenizer import Tokenizer

Context = tuple[int, ...]
Model = Callable[[Context], Logits]  # the tokens attended to, newest last -> logits [V]

NEVER_WRITTEN = -1
SPECIAL = ["<unk>", "</s>"]
ALPHABET = "abcdefghijklmnopqrstuvwxyz .,\n"
VOCAB_SIZE = len(SPECIAL) + len(ALPHABET)  # 32
UNKNOWN, EOS = range(2)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a\n{% endif %}"
)


def random_model(
    seed: int, vocab_size: int = VOCAB_SIZE, *, scale: float = 2.0, never: Sequence[int] = ()
) -> Model:
    """Normally distributed logits that depend only on the context. never: improbable tokens."""
    rows: dict[Context, Logits] = {}

    def model(context: Context) -> Logits:
        if context not in rows:
            rng = np.random.default_rng([seed, len(context), *context])
            row = (scale * rng.standard_normal(vocab_size)).astype(np.float32)
            row[list(never)] = -60
            rows[context] = row
        return rows[context]

    return model


def near(model: Model, seed: int, amount: float) -> Model:
    """A draft for `model`: its logits plus normal noise of this size, different per context."""
    rows: dict[Context, Logits] = {}

    def draft(context: Context) -> Logits:
        if context not in rows:
            row = model(context)
            rng = np.random.default_rng([seed, len(context), *context])
            rows[context] = row + np.float32(amount) * rng.standard_normal(
                len(row), dtype=np.float32
            )
        return rows[context]

    return draft


def script(
    text: str, vocab_size: int = VOCAB_SIZE, *, start: int | None = None, period: bool = False
) -> Model:
    """A model that generates `text` for any prompt, then EOS (or `text` again if `period`).

    start: number of prompt tokens; None to begin after the last "\\n". It counts rows, so the
    engine must attend to all of them (order=None).
    """
    ids = encode(text)
    newline = encode("\n")[0]

    def model(context: Context) -> Logits:
        begin = start
        if begin is None:
            begin = 1 + max((i for i, token in enumerate(context) if token == newline), default=-1)
        generated = max(0, len(context) - begin)
        row = np.full(vocab_size, -9, np.float32)
        row[ids[generated % len(ids)] if period or generated < len(ids) else EOS] = 9
        return row

    return model


@dataclass(frozen=True)
class Call:
    """The arguments of one `forward`: first slot, B, N, the B positions, K."""

    first_slot: int
    batch: int
    width: int
    position: tuple[int, ...]
    outputs: int


class FakeEngine(Engine):
    """See `Engine`.

    model: from context to logits. order: number of newest rows it attends to; None for all.
    rounding: largest rounding difference of a logit in calls of width N > 1, different per N.
    alone: the same for N = 1, to emulate ONNX Runtime, whose wider calls all agree.
    """

    def __init__(
        self,
        model: Model,
        *,
        vocab_size: int = VOCAB_SIZE,
        slots: int = 1,
        capacity: int = 512,
        chunk: int = 16,
        order: int | None = 2,
        rounding: float = 0.0,
        buffers: int = 9,
        min_width: int = 1,
        alone: float = 0.0,
    ):
        self.model, self.order, self.rounding, self.alone = model, order, rounding, alone
        self.vocab_size, self.slots = vocab_size, slots
        self.capacity, self.chunk, self.min_width = capacity, chunk, min_width
        self.cache = np.full((slots, capacity), NEVER_WRITTEN, np.int64)
        self.calls: list[Call] = []
        self.buffers, self.cached_rows = buffers, CachedRows(slots, vocab_size)
        self._logits: Logits = np.empty((buffers, 0), np.float32)

    def forward(
        self, input_ids: Ids, position: Ids, logits_index: Ids, first_slot: int = 0, buffer: int = 0
    ) -> Logits:
        batch, width = input_ids.shape
        assert input_ids.dtype == np.int64, input_ids.dtype
        assert 1 <= width <= self.chunk, f"N={width} with chunk {self.chunk}"
        assert first_slot >= 0, first_slot
        assert first_slot + batch <= self.slots, f"slots {first_slot}..+{batch} of {self.slots}"
        assert position.shape == (batch,), position.shape
        assert (position >= 0).all(), position
        assert (position + width <= self.capacity).all(), (position, width, self.capacity)
        assert ((input_ids >= 0) & (input_ids < self.vocab_size)).all(), input_ids
        assert ((logits_index >= 0) & (logits_index < width)).all(), logits_index
        assert 0 <= buffer < self.buffers, buffer
        self.calls.append(
            Call(first_slot, batch, width, tuple(map(int, position)), len(logits_index))
        )
        shape = (batch, len(logits_index), self.vocab_size)
        size = batch * len(logits_index) * self.vocab_size
        if buffer == 0:
            self._logits.fill(np.nan)  # reveals a caller that keeps logits too long
            self._logits = np.empty((self.buffers, size), np.float32)
        logits = self._logits[buffer].reshape(shape)
        self.cached_rows.end_call(first_slot, input_ids, position)
        for b in range(batch):
            rows, start = self.cache[first_slot + b], int(position[b])
            rows[start : start + width] = input_ids[b]
            for k, index in enumerate(logits_index):
                logits[b, k] = self._row(rows, start + int(index) + 1, width)
        return logits

    def clear(self, slot: int) -> None:
        self.cache[slot] = NEVER_WRITTEN
        self.cached_rows.truncate(slot, 0)

    def _row(self, rows: Ids, end: int, width: int) -> Logits:
        start = 0 if self.order is None else max(0, end - self.order)
        context = tuple(rows[start:end].tolist())
        assert NEVER_WRITTEN not in context, f"rows [{start}, {end}) are {context}"
        row = self.model(context)
        if amount := self.rounding if width > 1 else self.alone:
            rng = np.random.default_rng([width, *context])
            row = row + rng.uniform(-amount, amount, len(row)).astype(np.float32)
        return row


class IdleFake(FakeEngine):
    """A fake engine whose idle slots may read unwritten rows. Their logits are NaN, which a sampler
    refuses if it looks at them."""

    def _row(self, rows: Ids, end: int, width: int) -> Logits:
        start = 0 if self.order is None else max(0, end - self.order)
        if NEVER_WRITTEN in rows[start:end]:
            return np.full(self.vocab_size, np.nan, np.float32)
        return super()._row(rows, end, width)


class CopyingFake(FakeEngine):
    """A fake engine that can copy rows between slots."""

    def copy_rows(self, source: int, destination: int, rows: int) -> None:
        assert source != destination and 0 < rows <= self.capacity
        self.cache[destination] = 1  # stale rows of another sequence
        self.cache[destination, :rows] = self.cache[source, :rows]
        self.cached_rows.copy_rows(source, destination, rows)


def character_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer with one token per character of `ALPHABET`, and "</s>" as EOS."""
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL, *ALPHABET])}
    model = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    model.add_special_tokens(SPECIAL)
    model.decoder = decoders.Fuse()
    return model


def encode(text: str) -> list[int]:
    return character_tokenizer().encode(text).ids


def graph_facts(
    role: str, vocab_size: int, max_len: int, capacity: int, dtype: Dtype = "float32"
) -> GraphFacts:
    """Facts of a graph with one layer, whose caches no test reads."""
    return GraphFacts(
        key=role, source=role, architecture="Fake", parameters=1, dtype=dtype,
        vocab_size=vocab_size, max_len=max_len, capacity=capacity, key_shapes=[[1, 1]],
        value_shapes=[[1, 1]], max_difference=0.0, tolerance=0.0, comparison="none", versions={},
        files={},
    )  # fmt: skip


def make_manifest(
    *,
    draft: bool = True,
    slots: int = 1,
    vocab_size: int = VOCAB_SIZE,
    max_len: int = 448,
    max_gamma: int = 8,
    chat: bool = False,
) -> Manifest:
    capacity = max_len + max_gamma + 1
    sizes = vocab_size, max_len, capacity
    tokenizer = TokenizerFacts("tokenizer", VOCAB_SIZE, [EOS], {"eos_token": "</s>"}, chat, {})
    pair = Pair(
        target=graph_facts("target", *sizes),
        draft=graph_facts("draft", *sizes) if draft else None,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_len=max_len,
        max_gamma=max_gamma,
        capacity=capacity,
    )
    return Manifest("fake", "onnxruntime", {}, slots, pair, {})


def edited(
    edit: Callable[[dict[str, Any]], object], *, checksum: bool = True
) -> Callable[[Path], None]:
    """Return a function that edits a bundle's manifest. checksum: also update the checksum, so that
    only the edit is wrong."""

    def change(bundle: Path) -> None:
        content = json.loads((bundle / MANIFEST_FILE).read_text())
        edit(content)
        if checksum:
            content.pop("checksum")
            content["checksum"] = digest_json(content)
        (bundle / MANIFEST_FILE).write_text(json.dumps(content))

    return change


def make_text_engine(
    folder: Path,
    target: Model,
    draft: Model | None = None,
    *,
    slots: int = 1,
    order: int | None = 2,
    rounding: float = 0.0,
    chat: bool = False,
) -> TextEngine:
    """A `TextEngine` over two fake engines. folder: where the tokenizer file is written.

    order, rounding: of the target; the draft has the same order and no rounding.
    """
    manifest = make_manifest(draft=draft is not None, slots=slots, chat=chat)
    pair = manifest.pair

    def engine(model: Model, rounding: float) -> CopyingFake:
        return CopyingFake(
            model, vocab_size=pair.vocab_size, slots=slots, capacity=pair.capacity, order=order,
            rounding=rounding,
        )  # fmt: skip

    character_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(
        folder / "tokenizer.json",
        chat_template=CHAT_TEMPLATE if chat else None,
        special_tokens=pair.tokenizer.special_tokens,
    )
    decoder = Decoder(
        HostRounds(
            engine(target, rounding),
            engine(draft, 0.0) if draft is not None else None,
            NumpySampler(pair.vocab_size),
        ),
        vocab_size=pair.vocab_size,
        max_len=pair.max_len,
        max_gamma=pair.max_gamma,
    )
    memory = {"target": 3 << 20, "draft": 1 << 20, "cache": 2 << 20}
    if draft is None:
        del memory["draft"]
    return TextEngine(manifest, tokenizer, decoder, memory)
