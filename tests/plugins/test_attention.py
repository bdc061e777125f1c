"""The attention operators of plugins/onnxruntime as single nodes: compared with NumPy in float64,
and bitwise with themselves."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from operators import (
    FLOAT,
    INT8,
    INT64,
    OTHER_SIZE,
    Feeds,
    in_place,
    refused,
    session_of,
    with_each_set,
)
from scipy.special import softmax

from export.host.observing import BIAS_PADDING
from plugins.tools.build import PLUGINS_FOLDER, find_compiler, include_options

Array = npt.NDArray[np.float32]
Cache = npt.NDArray[Any]  # float32 [slots, KEY_HEADS, rows, D], or int8 [.., D + 4]
HEADS, KEY_HEADS, ROWS = 6, 2, 300  # rows: three parts, no multiple of a block or a vector
ORT_ROOT = os.environ.get("ORT_ROOT")


@dataclass(frozen=True)
class Shape:
    """An attention. width: of a head. rotated: how many of its elements. window: 0 for none."""

    width: int
    rotated: int = 0
    interleaved: int = 0
    window: int = 0
    packed: bool = True
    biased: bool = False  # a bias by distance between query and key, different per head
    quantised: bool = False  # int8 caches
    value_width: int = 0  # 0: the same as a key's
    sunk: bool = False  # an attention sink: an extra score per head, which belongs to no key
    softcap: float = 0  # 0 for none


SHAPES = {
    "64": Shape(64, 64),
    "128": Shape(128, 128, packed=False),
    "80, some rotated": Shape(80, 32),
    "20, no whole vector": Shape(20, 20, interleaved=1),
    "32, window": Shape(32, window=70, packed=False),
    "256": Shape(256, 256),
    "512": Shape(512, 128),
    "64, bias": Shape(64, biased=True),
    "20, bias, window": Shape(20, 20, window=70, packed=False, biased=True),
    "64, int8": Shape(64, 64, quantised=True),
    "64, soft cap": Shape(64, 64, softcap=1.5),
    "20, sinks, window": Shape(20, 20, window=70, packed=False, sunk=True),
    "32, all of it": Shape(32, biased=True, quantised=True, sunk=True, softcap=0.7),
    "80 and 64": Shape(80, 16, value_width=64),
    "64 and 20, int8": Shape(64, packed=False, value_width=20, quantised=True),
    "20, int8, window": Shape(20, 20, window=70, packed=False, quantised=True),
}


def quantised(rows: Array) -> Cache:
    """Quantise [.., D] to int8 [.., D + 4]: the nearest levels, then the bytes of a row's scale."""
    scales = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore"):
        levels = np.rint(rows / scales).astype(np.int8)
    return np.concatenate([levels, scales.view(np.int8)], axis=-1)


def read(cache: Cache) -> Array:
    return cache[..., :-4] * np.ascontiguousarray(cache[..., -4:]).view(np.float32)


class Attention:
    """The node of a shape in its own session, and random inputs for it.

    tokens: length of the random queries, keys and values of each of three slots. attributes: of the
    node, overriding the shape's.
    """

    def __init__(
        self, shape: Shape, *, rows: int = ROWS, threads: int = 1, tokens: int = ROWS,
        **attributes: float,
    ):  # fmt: skip
        rng = np.random.default_rng(0)
        self.shape, self.rows, self.value_width = shape, rows, shape.value_width or shape.width
        self.text = rng.normal(size=(3, tokens, HEADS + 2 * KEY_HEADS, shape.width)).astype("f4")
        angles = rng.uniform(0, 7, (ROWS, shape.rotated // 2))
        self.cosine, self.sine = np.cos(angles).astype("f4"), np.sin(angles).astype("f4")
        self.bias = rng.normal(size=(HEADS, ROWS + BIAS_PADDING)).astype("f4")
        self.bias[:, ROWS:] = np.nan  # for keys after the query
        self.sinks = rng.normal(4, 2, HEADS).astype("f4")  # about the weight of all keys together
        self.softcap = np.array([shape.softcap], "f4")
        self.attributes = attributes
        self.session = self.open(threads)

    def open(self, threads: int = 1, reads: bool = False) -> ort.InferenceSession:
        """reads: only read caches that another node has written."""
        shape, cache = self.shape, INT8 if self.shape.quantised else FLOAT
        caches = {"keys": cache, "values": cache}
        texts = ["query"] if shape.packed or reads else ["query", "key", "value"]
        has = {
            "cosine": shape.rotated, "sine": shape.rotated, "bias": shape.biased,
            "sinks": shape.sunk, "softcap": shape.softcap,
        }  # fmt: skip
        tables = [name for name, is_there in has.items() if is_there]
        order = [*texts, *[""] * (3 - len(texts)), *caches, "position"]
        order += [name if name in tables else "" for name in has]
        attributes = {
            "heads": HEADS, "key_heads": KEY_HEADS, "scale": shape.width**-0.5,
            "window": shape.window, "interleaved": shape.interleaved,
        }  # fmt: skip
        return session_of(
            "QuantizedCacheAttention" if shape.quantised else "Attention",
            dict.fromkeys(texts, FLOAT) | caches | {"position": INT64},
            {"out": FLOAT} if reads else {"out": FLOAT, "keys_out": cache, "values_out": cache},
            {name: getattr(self, name) for name in tables},
            order=order,
            threads=threads,
            **attributes | self.attributes,
        )

    def caches(self, slots: int = 1) -> list[Cache]:
        """Key and value caches full of NaN, as a broken sequence leaves them."""
        sizes, widths = (slots, KEY_HEADS, self.rows), (self.shape.width, self.value_width)
        caches: list[Cache] = [np.full((*sizes, width), np.nan, np.float32) for width in widths]
        return [quantised(cache) for cache in caches] if self.shape.quantised else caches

    def feeds(self, caches: list[Cache], position: list[int], width: int) -> Feeds:
        text = np.stack([self.text[b, p : p + width] for b, p in enumerate(position)])
        *ends, values = np.split(text, [HEADS, HEADS + KEY_HEADS], axis=2)
        parts = [
            part.reshape(*text.shape[:2], -1) for part in (*ends, values[..., : self.value_width])
        ]
        if self.shape.packed:
            parts = [np.concatenate(parts, axis=2)]
        feeds = dict(zip(["query", "key", "value"], parts, strict=False))
        return feeds | {"keys": caches[0], "values": caches[1], "position": np.array(position)}

    def run(self, caches: list[Cache], position: list[int], width: int) -> Array:
        """The outputs [slots, width, HEADS * D] of one call, which updates `caches`."""
        out, *caches[:] = self.session.run(None, self.feeds(caches, position, width))
        return np.asarray(out)

    def compute(
        self, widths: list[int], ahead: list[int] | None = None, tokens: int = ROWS
    ) -> Array:
        """The outputs [tokens, HEADS * D] of slot 0, computed in calls of these widths.

        ahead: fixed positions of other slots, which take part in every call.
        """
        caches, found, start = self.caches(1 + len(ahead or [])), [], 0
        while start < tokens:
            width = min(widths[len(found) % len(widths)], tokens - start)
            found.append(self.run(caches, [start, *(ahead or [])], width)[0])
            start += width
        return np.concatenate(found)

    def expected(self) -> npt.NDArray[np.float64]:
        """The result of `compute` by the definition."""
        shape, text = self.shape, self.text[0].astype(np.float64)
        tokens = len(text)
        query, key, value = np.split(text, [HEADS, HEADS + KEY_HEADS], axis=1)
        query, key = self._rotated(query), self._rotated(key)
        value = value[..., : self.value_width]
        if shape.quantised:
            key, value = (read(quantised(x.astype(np.float32))) for x in (key, value))
        ages = np.subtract.outer(np.arange(tokens), np.arange(tokens))
        seen = (ages >= 0) & (ages < (shape.window or tokens))
        outs = []
        for head in range(HEADS):
            own = head * KEY_HEADS // HEADS
            scores = query[:, head] @ key[:, own].T * shape.width**-0.5
            if shape.softcap:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            if shape.biased:
                scores += self.bias[head, ROWS - 1 - np.maximum(ages, 0)]
            scores = np.where(seen, scores, -np.inf)
            sink = np.full((tokens, 1), self.sinks[head] if shape.sunk else -np.inf)
            weights = softmax(np.concatenate([scores, sink], axis=1), axis=1)[:, :-1]
            outs.append(weights @ value[:, own])
        return np.concatenate(outs, axis=1)

    def _rotated(self, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        half = self.shape.rotated // 2
        y, (cos, sin) = x.copy(), (table[: len(x), None] for table in (self.cosine, self.sine))
        first = slice(0, 2 * half, 2) if self.shape.interleaved else slice(0, half)
        second = slice(1, 2 * half, 2) if self.shape.interleaved else slice(half, 2 * half)
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., second] * cos + x[..., first] * sin
        return y


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_attention(instruction_set: str, shape: Shape) -> None:
    """In a prefill, single steps and verifications. Unwritten rows hold NaN."""
    attention = Attention(shape)
    want = attention.expected()
    np.testing.assert_allclose(attention.compute([70, 1, 5, 1, 9]), want, atol=4e-6, rtol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bits_depend_on_a_row_and_what_it_sees_alone(instruction_set: str, shape: Shape) -> None:
    attention = Attention(shape)
    want = attention.compute([16])
    for widths in ([3, 5], [7, 1, 9], [64], [ROWS]):
        assert (attention.compute(widths) == want).all(), f"widths {widths}"
    for widths in ([1], [2]):  # two parts are enough: [7, 1, 9] above has single tokens too
        assert (attention.compute(widths, tokens=150) == want[:150]).all(), f"widths {widths}"
    assert (attention.compute([5], ahead=[0, 31], tokens=200) == want[:200]).all(), "neighbours"
    assert (Attention(shape, rows=1024).compute([16]) == want).all(), "rows"
    shared = Attention(shape, threads=3)
    for widths, tokens in (([16], ROWS), ([5], ROWS), ([1], 150)):
        results = shared.compute(widths, tokens=tokens)
        assert (results == want[:tokens]).all(), f"threads, {widths}"


def test_another_order_of_the_sums_is_seen() -> None:
    """Control for the test above: the plain loops sum in another order, and the bits differ."""
    *fused, plain = with_each_set(lambda: Attention(SHAPES["64"]).compute([16]))
    assert all((one != plain).any() for one in fused)


@pytest.mark.parametrize("shape", ["64", "64, int8"])
def test_the_caches_are_written_in_place(shape: str) -> None:
    """If input and output are bound to the same memory; rows after the call's stay unchanged."""
    attention = Attention(SHAPES[shape])
    copied, bound = attention.caches(), attention.caches()
    want = attention.run(copied, [0], 9)
    out = in_place(attention.session, attention.feeds(bound, [0], 9), "keys", "values")
    assert (out == want).all()
    for mine, theirs in zip(bound, copied, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        mine = read(mine) if mine.dtype == np.int8 else mine
        assert np.isnan(mine[:, :, 9:]).all() and not np.isnan(mine[:, :, :9]).any()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_caches_that_another_node_has_written(instruction_set: str, shape: Shape) -> None:
    """A node that only reads such caches gives bitwise the same results."""
    attention = Attention(shape)
    caches = attention.caches(3)
    for position, width in (([0, 0, 0], 130), ([130, 126, 5], 5), ([135, 2, 127], 2)):
        want = attention.run(caches, position, width)
        feeds = attention.feeds(caches, position, width)
        feeds["query"] = feeds["query"][..., : HEADS * shape.width]
        right = {name: feeds[name] for name in ("query", "keys", "values", "position")}
        reader = attention.open(reads=True)
        assert (reader.run(None, right)[0] == want).all()
    wide = np.zeros((3, width, HEADS * shape.width + 1), np.float32)
    refused(reader, right, OTHER_SIZE, query=wide)


@pytest.mark.parametrize("shape", ["64", "64, int8"])
@pytest.mark.parametrize("slots", [0, 2])
def test_a_call_without_tokens(shape: str, slots: int) -> None:
    """Returns an empty output and leaves the caches unchanged. Fault: a division by zero, the
    number of visits to a head."""
    attention = Attention(SHAPES[shape])
    caches = attention.caches(2)
    attention.run(caches, [0, 0], 3)
    feeds = {name: part[:slots] for name, part in attention.feeds(caches, [3, 2], 1).items()}
    feeds["query"] = feeds["query"][:, :0]
    out, *left = attention.session.run(None, feeds)
    assert out.shape == (slots, 0, HEADS * 64)
    for mine, theirs in zip(left, caches, strict=True):
        np.testing.assert_array_equal(mine, theirs[:slots])
    feeds["query"] = feeds["query"][..., : HEADS * 64]
    assert attention.open(reads=True).run(None, feeds)[0].shape == out.shape


@pytest.mark.parametrize("row", [3, 140, 290])
def test_a_key_that_outweighs_all_others(instruction_set: str, row: int) -> None:
    """In whichever part the key lies, the sums of the others vanish and do not overflow."""
    attention = Attention(Shape(64, packed=False), scale=1.0)
    query, key, values = np.split(attention.text[0], [HEADS, HEADS + KEY_HEADS], axis=1)
    query[:], key[:] = 0, 0
    query[..., 0], key[row, :, 0] = 1, 1000
    want = values[row].repeat(HEADS // KEY_HEADS, axis=0)
    for widths in ([60], [5]):
        out = attention.compute(widths)[row:].reshape(-1, HEADS, 64)
        np.testing.assert_allclose(out, want[None].repeat(len(out), axis=0), rtol=1e-6)


@pytest.mark.parametrize("row", [3, 128, 200])
def test_a_score_of_minus_infinity_weighs_nothing(instruction_set: str, row: int) -> None:
    """Also when it is the only score of a part so far. Fault: -inf minus -inf gave NaN."""
    attention = Attention(Shape(64, packed=False), scale=1.0)
    query, key, values = np.split(attention.text[0], [HEADS, HEADS + KEY_HEADS], axis=1)
    query[:], key[:] = 0, 0
    query[..., 0], key[row, :, 0] = 1e20, -1e20
    for widths in ([60], [5]):
        out = attention.compute(widths, tokens=row + 1)[row].reshape(HEADS, 64)
        want = values[:row].mean(axis=0).repeat(HEADS // KEY_HEADS, axis=0)
        np.testing.assert_allclose(out, want, atol=1e-6)


def test_a_number_that_is_not_finite_does_not_get_lost(instruction_set: str) -> None:
    """In quantised rows, which are scaled by their largest element."""
    attention = Attention(SHAPES["64, int8"])
    for odd in (np.nan, np.inf, -np.inf):
        attention.text[0, 3, -1, 7] = odd  # a value of the last head
        out = attention.compute([5], tokens=5).reshape(5, HEADS, -1)
        assert np.isfinite(out[:3]).all() and np.isfinite(out[:, : HEADS // 2]).all()
        assert np.isnan(out[3:, HEADS // 2 :]).all()
    attention.text[0, 3, -1] = 1e-33  # too small to divide by; treated as zero
    assert np.isfinite(attention.compute([5], tokens=5)).all()


def test_a_row_beyond_the_cache_is_refused() -> None:
    """Also positions whose sum with the width overflows."""
    attention = Attention(SHAPES["64"])
    for position in (ROWS - 3, ROWS, -1, 2**63 - 1, -(2**63)):
        feeds = attention.feeds(attention.caches(), [0], 4)
        refused(attention.session, feeds, "a row is beyond the cache", position=[position])


OTHER_SIZES = {  # wrong sizes of inputs for two tokens of the shape "128"
    "query": [(1, 2, HEADS * 128 - 1), (1, 3, HEADS * 128), (2, 2, HEADS * 128), (2, HEADS * 128)],
    "key": [(1, 1, KEY_HEADS * 128), (1, 2, 128), (KEY_HEADS * 256,)],
    "value": [(1, 2, 0), (2, 2, KEY_HEADS * 128)],
    "keys": [
        (1, KEY_HEADS, ROWS, 64), (2, KEY_HEADS, ROWS, 128), (1, 1, ROWS, 128),
        (1, KEY_HEADS, ROWS, 0), (KEY_HEADS, ROWS, 128), (),
    ],
    "values": [(1, KEY_HEADS, ROWS - 1, 128), (1, KEY_HEADS, ROWS, 64), (1,)],
    "position": [(0,), (2,), (), (1, 1)],
}  # fmt: skip


def test_inputs_of_other_sizes_are_refused() -> None:
    """As in hand-made graphs, where an input would be read past its end or with a wrong stride."""
    attention = Attention(SHAPES["128"])
    right = attention.feeds(attention.caches(), [0], 2)
    attention.session.run(None, right)
    for name, wrong in OTHER_SIZES.items():
        for sizes in wrong:
            refused(
                attention.session, right, OTHER_SIZE, **{name: np.zeros(sizes, right[name].dtype)}
            )
    packed = Attention(SHAPES["64"])
    right = packed.feeds(packed.caches(), [0], 2)
    refused(packed.session, right, OTHER_SIZE, query=right["query"][..., : HEADS * 64])


def test_quantised_caches_of_other_sizes_are_refused() -> None:
    """Their rows have no place for a scale, or another head width."""
    attention = Attention(SHAPES["64, int8"])
    right = attention.feeds(attention.caches(), [0], 2)
    attention.session.run(None, right)
    for width in (0, 3, 4, 64, 67, 4 * 64, 4 * 68):
        wrong = np.zeros((1, KEY_HEADS, ROWS, width), np.int8)
        for names in (["keys"], ["values"], ["keys", "values"]):
            refused(attention.session, right, OTHER_SIZE, **dict.fromkeys(names, wrong))


def test_tables_of_other_sizes_are_refused() -> None:
    attention = Attention(SHAPES["64"])
    cos, sin = attention.cosine, attention.sine
    wide = np.zeros((ROWS, 33), np.float32)
    for attention.cosine, attention.sine in (
        (cos, sin[:, :-1]), (cos[:-1], sin), (cos, sin[0]), (wide, wide),
    ):  # fmt: skip
        refused(attention.open(), attention.feeds(attention.caches(), [0], 2), OTHER_SIZE)


def test_biases_of_other_sizes_are_refused() -> None:
    attention = Attention(SHAPES["64, bias"])
    bias = attention.bias
    for attention.bias in (bias[:-1], bias[0], bias[:, :BIAS_PADDING]):
        refused(attention.open(), attention.feeds(attention.caches(), [0], 2), OTHER_SIZE)
    attention.bias = bias[:, 1:]
    session = attention.open()
    session.run(None, attention.feeds(attention.caches(), [ROWS - 3], 2))
    beyond = attention.feeds(attention.caches(), [ROWS - 2], 2)
    refused(session, beyond, "a row is beyond the cache")


def test_sinks_and_soft_caps_of_other_sizes_are_refused() -> None:
    attention = Attention(SHAPES["32, all of it"])
    feeds, sinks = attention.feeds(attention.caches(), [0], 2), attention.sinks
    for attention.sinks in (sinks[:-1], sinks[None]):
        refused(attention.open(), feeds, OTHER_SIZE)
    attention.sinks, softcap = sinks, attention.softcap
    for attention.softcap in (softcap[:0], softcap.repeat(2), softcap[0]):
        refused(attention.open(), feeds, OTHER_SIZE)


@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_a_soft_cap_of_scores_of_any_size(instruction_set: str, cap: float) -> None:
    """With scores s and 0, the first key has weight 1 / (1 + e^(-cap tanh(s / cap)))."""
    attention = Attention(Shape(64, packed=False, softcap=cap), scale=1.0)
    for size in (*np.geomspace(1e-6, 1e4, 300), np.inf):
        caches = attention.caches()
        feeds = attention.feeds(caches, [0], 2)
        feeds["query"][:], feeds["key"][:], feeds["value"][:] = 0, 0, 0
        feeds["query"][..., ::64], feeds["key"][:, 0, ::64] = 1, size
        feeds["value"][:, 0] = 1
        want = 1 / (1 + np.exp(-cap * np.tanh(size / cap)))
        got = attention.session.run(None, feeds)[0][0, 1]
        np.testing.assert_allclose(got, want, rtol=2e-6)


class SourceAttention:
    """The node in its own session, and a source for each of three slots."""

    def __init__(self, width: int = 64, *, rows: int = ROWS, threads: int = 1, bent: bool = False):
        rng = np.random.default_rng(0)
        self.tables = {"sinks": rng.normal(4, 2, HEADS).astype("f4"), "softcap": np.ones(1, "f4")}
        self.lengths = np.array([70, 1, ROWS])
        self.query = rng.normal(size=(3, 40, HEADS, width)).astype("f4")
        self.sides = rng.normal(size=(2, 3, KEY_HEADS, ROWS, width)).astype("f4")
        behind = np.arange(ROWS) >= self.lengths[:, None]
        self.sides.swapaxes(2, 3)[:, behind] = np.nan  # as another source left it
        self.sides = np.pad(self.sides, ((0, 0), (0, 0), (0, 0), (0, rows - ROWS), (0, 0)))
        inputs = dict.fromkeys(["query", "keys", "values"], FLOAT) | {"length": INT64}
        self.session = session_of(
            "SourceAttention", inputs, {"out": FLOAT}, self.tables if bent else {}, threads=threads,
            heads=HEADS, key_heads=KEY_HEADS, scale=width**-0.5, window=0, interleaved=0,
        )  # fmt: skip

    def feeds(self, slots: slice = slice(None), tokens: slice = slice(None)) -> Feeds:
        query = self.query[slots, tokens]
        keys, values = self.sides[:, slots]
        flat = query.reshape(*query.shape[:2], -1)
        return {"query": flat, "keys": keys, "values": values, "length": self.lengths[slots]}

    def run(self, *which: slice) -> Array:
        return np.asarray(self.session.run(None, self.feeds(*which))[0])


@pytest.mark.parametrize(("width", "bent"), [(64, False), (20, False), (64, True)])
def test_it_is_attention_to_the_rows_of_a_source(
    instruction_set: str, width: int, bent: bool
) -> None:
    attention = SourceAttention(width, bent=bent)
    found = attention.run().reshape(3, 40, HEADS, width)
    for slot, length in enumerate(attention.lengths):
        keys, values = attention.sides[:, slot, :, :length].astype(np.float64)
        for head in range(HEADS):
            own = head * KEY_HEADS // HEADS
            scores = attention.query[slot, :, head] @ keys[own].T * width**-0.5
            sinks = np.full((len(scores), 1), attention.tables["sinks"][head] if bent else -np.inf)
            scores = np.concatenate([np.tanh(scores) if bent else scores, sinks], axis=1)
            want = softmax(scores, axis=1)[:, :-1] @ values[own]
            np.testing.assert_allclose(found[slot, :, head], want, atol=4e-6, rtol=0)


def test_bits_of_a_query_depend_on_its_source_alone(instruction_set: str) -> None:
    want = SourceAttention().run()
    for width in (1, 2, 5, 33):
        parts = [
            SourceAttention().run(slice(2, 3), slice(i, i + width)) for i in range(0, 40, width)
        ]
        assert (np.concatenate(parts, axis=1)[0] == want[2]).all(), f"width {width}"
    assert (SourceAttention(rows=1024).run() == want).all(), "rows"
    assert (SourceAttention(threads=3).run() == want).all(), "threads"


@pytest.mark.parametrize("slots", [0, 3])
def test_a_call_to_sources_without_tokens(slots: int) -> None:
    attention = SourceAttention()
    feeds = {name: part[:slots] for name, part in attention.feeds().items()}
    feeds["query"] = feeds["query"][:, :0]
    assert attention.session.run(None, feeds)[0].shape == (slots, 0, HEADS * 64)


def test_sources_of_other_sizes_are_refused() -> None:
    attention = SourceAttention()
    right = attention.feeds()
    for length in (0, -1, ROWS + 1, 2**63 - 1):
        refused(attention.session, right, "a length is not from 1", length=[1, length, 1])
    for name, sizes in (
        ("query", (3, 2, 64)), ("query", (2, 2, HEADS * 64)), ("keys", (3, 1, ROWS, 64)),
        ("values", (3, KEY_HEADS, ROWS - 1, 64)), ("values", (3, KEY_HEADS, 64)), ("length", (2,)),
    ):  # fmt: skip
        wrong = np.zeros(sizes, right[name].dtype)
        refused(attention.session, right, OTHER_SIZE, **{name: wrong})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key_heads": 4}, "heads is out of range"), ({"key_heads": 0}, "heads is out of range"),
        ({"heads": -6}, "heads is out of range"), ({"heads": 2**40}, "heads is out of range"),
        ({"window": -1}, "window is negative"),
    ],
)  # fmt: skip
def test_attributes_that_do_not_fit_are_refused(changed: dict[str, int], message: str) -> None:
    with pytest.raises(Exception, match=message):
        Attention(SHAPES["64"], **changed)


def test_places_in_the_table_are_those_of_the_official_header(tmp_path: Path) -> None:
    """ORT_ROOT names a release of ONNX Runtime with include/."""
    source = tmp_path / "places.cpp"
    functions = {
        "CreateStatus": "CreateStatus", "CreateDomain": "CreateCustomOpDomain",
        "AddOperator": "CustomOpDomain_Add", "AddDomain": "AddCustomOpDomain",
        "TensorData": "GetTensorMutableData", "CountDimensions": "GetDimensionsCount",
        "GetDimensions": "GetDimensions", "GetShape": "GetTensorTypeAndShape",
        "FloatAttribute": "KernelInfoGetAttribute_float",
        "IntegerAttribute": "KernelInfoGetAttribute_int64", "GetInput": "KernelContext_GetInput",
        "CountOutputs": "KernelContext_GetOutputCount", "GetOutput": "KernelContext_GetOutput",
        "ReleaseShape": "ReleaseTensorTypeAndShapeInfo",
        "ParallelFor": "KernelContext_ParallelFor", "GetMessage": "GetErrorMessage",
        "CreateEnvironment": "CreateEnv", "CreateSession": "CreateSession",
        "CreateOptions": "CreateSessionOptions", "SetSeverity": "SetSessionLogSeverityLevel",
        "SetThreads": "SetIntraOpNumThreads", "CreateTensor": "CreateTensorWithDataAsOrtValue",
        "CreateCpuMemory": "CreateCpuMemoryInfo", "ReleaseEnvironment": "ReleaseEnv",
        "ReleaseStatus": "ReleaseStatus", "ReleaseMemory": "ReleaseMemoryInfo",
        "ReleaseSession": "ReleaseSession", "ReleaseValue": "ReleaseValue",
        "ReleaseOptions": "ReleaseSessionOptions", "ReleaseDomain": "ReleaseCustomOpDomain",
        "SetEntry": "AddSessionConfigEntry", "RunBinding": "RunWithBinding",
        "CreateBinding": "CreateIoBinding", "ReleaseBinding": "ReleaseIoBinding",
        "BindInput": "BindInput", "BindOutput": "BindOutput",
    }  # fmt: skip
    header = (PLUGINS_FOLDER / "onnxruntime" / "outrider_ort_api.h").read_text()
    assert {*functions} == {*re.findall(r"^using (\w+) =\s+ApiFunction<", header, re.MULTILINE)}
    if not ORT_ROOT:
        pytest.skip("ORT_ROOT names no ONNX Runtime with headers")
    fields = {
        "create": "CreateKernel", "name": "GetName", "input_type": "GetInputType",
        "destroy": "KernelDestroy", "input_characteristic": "GetInputCharacteristic",
        "input_memory": "GetInputMemoryType", "variadic": "GetVariadicInputMinArity",
        "create_or_fail": "CreateKernelV2", "compute_or_fail": "KernelComputeV2",
        "first_version": "GetStartVersion", "last_version": "GetEndVersion",
        "in_place": "GetMayInplace",
    }  # fmt: skip
    checks = [
        f"ort::{ours}::index * sizeof(void*) == offsetof(OrtApi, {theirs})"
        for ours, theirs in functions.items()
    ] + [
        f"offsetof(ort::Operator, {ours}) == offsetof(OrtCustomOp, {theirs})"
        for ours, theirs in fields.items()
    ]
    lines = ["#include <onnxruntime_c_api.h>", '#include "outrider_ort_api.h"']
    source.write_text("\n".join([*lines, *(f'static_assert({c}, "");' for c in checks)]))
    command = [*find_compiler(), "-std=c++17", "-fsyntax-only", *include_options()]
    subprocess.run([*command, f"-I{Path(ORT_ROOT) / 'include'}", source], check=True)
