"""Recurrent states and short convolutions of plugins/onnxruntime as single nodes: compared with
NumPy in float64, and bitwise with themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from operators import FLOAT, INT64, OTHER_SIZE, Feeds, in_place, refused, session_of, with_each_set

Array = npt.NDArray[np.float32]
TOKENS, ROWS = 40, 6


@dataclass(frozen=True)
class States:
    """A recurrent layer. keys: heads of queries and keys. depth, width: Dk, Dv. channels: whether
    each channel has its own decay."""

    heads: int
    keys: int
    depth: int
    width: int
    channels: bool = False
    beta: bool = True

    kind = "Recurrence"

    def text(self, rng: np.random.Generator) -> dict[str, Array]:
        """Random inputs of three slots, [3, TOKENS, ..]."""
        key = rng.normal(size=(3, TOKENS, self.keys, self.depth))
        key /= np.linalg.norm(key, axis=-1, keepdims=True)
        found = {
            "query": rng.normal(size=key.shape), "key": key,
            "value": rng.normal(size=(3, TOKENS, self.heads, self.width)),
            "decay": -rng.exponential(
                0.3, (3, TOKENS, self.heads, self.depth if self.channels else 1)
            ),
            "beta": rng.uniform(0, 1, (3, TOKENS, self.heads)),
        }  # fmt: skip
        found["decay"][:, 7] = -200  # erases the state
        return {k: v.astype("f4") for k, v in found.items() if k != "beta" or self.beta}

    def slot(self, slots: int, rows: int) -> Array:
        return np.full((slots, self.heads, rows, self.depth * self.width), np.nan, np.float32)

    def expected(self, text: dict[str, Array]) -> tuple[Any, Any]:
        """Outputs and states, [TOKENS, ..], of slot 0, by the definition."""
        x = {name: array[0].astype(np.float64) for name, array in text.items()}
        state, outs, states = np.zeros((self.heads, self.depth, self.width)), [], []
        for t in range(TOKENS):
            key, query = (np.repeat(x[n][t], self.heads // self.keys, 0) for n in ("key", "query"))
            state = state * np.exp(x["decay"][t])[:, :, None]
            more = x["value"][t]
            if self.beta:
                more = x["beta"][t][:, None] * (more - np.einsum("hd,hdv->hv", key, state))
            state = state + key[:, :, None] * more[:, None]
            outs.append(np.einsum("hd,hdv->hv", query, state))
            states.append(state.reshape(self.heads, -1))
        return np.array(outs), np.array(states)


@dataclass(frozen=True)
class Short:
    """A convolution over `taps` tokens. Its random input is [3, TOKENS, C] until it is fed."""

    width: int
    taps: int
    bias: bool = True

    kind = "ShortConvolution"

    def text(self, rng: np.random.Generator) -> dict[str, Array]:
        return {"x": rng.normal(size=(3, TOKENS, self.width)).astype("f4")}

    def tables(self) -> dict[str, Array]:
        rng = np.random.default_rng(1)
        weight = rng.normal(size=(self.width, self.taps)).astype("f4")
        bias = rng.normal(size=self.width).astype("f4")
        return {"weight": weight} | ({"bias": bias} if self.bias else {})

    def slot(self, slots: int, rows: int) -> Array:
        return np.full((slots, 1, rows, self.width), np.nan, np.float32)

    def expected(self, text: dict[str, Array]) -> tuple[Any, Any]:
        x, tables = text["x"][0].astype(np.float64), self.tables()
        padded = np.concatenate([np.zeros((self.taps - 1, self.width)), x])
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.taps, axis=0)
        return (windows * tables["weight"]).sum(-1) + tables.get("bias", 0), x[:, None]


LAYERS = {
    "delta rule": States(6, 2, 20, 148),
    "decay per channel": States(2, 2, 36, 16, channels=True),
    "no beta": States(4, 1, 16, 37, beta=False),
    "convolution": Short(70, 4),
    "convolution of 3": Short(150, 3, bias=False),
    "convolution of 5": Short(9, 5),
}
shaped = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


class Node:
    """The node of a layer in its own session, and random inputs for each of three slots."""

    def __init__(self, layer: States | Short, *, rows: int = ROWS, threads: int = 1):
        self.layer, self.rows = layer, rows
        self.text = layer.text(np.random.default_rng(0))
        order = ["query", "key", "value", "decay", "beta"]
        tables: dict[str, Array] = {}
        if isinstance(layer, Short):
            order, tables = ["x", "weight", "bias"], layer.tables()
        names = [name if name in self.text or name in tables else "" for name in order]
        self.session: ort.InferenceSession = session_of(
            layer.kind, dict.fromkeys(self.text, FLOAT) | {"slot": FLOAT, "position": INT64},
            {"out": FLOAT, "slot_out": FLOAT}, tables, order=[*names, "slot", "position"],
            threads=threads,
        )  # fmt: skip

    def feeds(self, slot: Array, position: list[int], width: int) -> Feeds:
        feeds = {
            name: np.stack([array[b, p : p + width] for b, p in enumerate(position)])
            for name, array in self.text.items()
        }
        if "x" in feeds:
            feeds["x"] = np.ascontiguousarray(feeds["x"].swapaxes(1, 2))
        return feeds | {"slot": slot, "position": np.array(position)}

    def run(self, slot: Array, position: list[int], width: int) -> Array:
        """Outputs [slots, width, ..] of one call, which updates `slot`."""
        out, slot[:] = self.session.run(None, self.feeds(slot, position, width))
        return np.asarray(out.swapaxes(1, 2) if "x" in self.text else out)

    def compute(
        self, widths: list[int], ahead: tuple[int, ...] = (), drafts: int = 0
    ) -> tuple[Array, Array]:
        """Outputs [TOKENS, ..] of slot 0, and its last 4 rows, computed in calls of these widths.

        ahead: fixed positions of other slots. drafts: rejected tokens written before each call.
        """
        slot, outs, start = self.layer.slot(1 + len(ahead), self.rows), [], 0
        while start < TOKENS:
            if drafts:
                others = self.feeds(slot, [0], drafts) | {"position": np.array([start])}
                slot[:] = self.session.run(None, others)[1]
            width = min(widths[len(outs) % len(widths)], TOKENS - start)
            outs.append(self.run(slot, [start, *ahead], width)[0])
            start += width
        last = np.arange(TOKENS - 4, TOKENS)
        return np.concatenate(outs), slot[0][:, last % self.rows].swapaxes(0, 1)


@shaped
def test_it_is_the_recurrence(instruction_set: str, layer: States | Short) -> None:
    """In calls with fewer and with more tokens than there are rows. Unwritten rows hold NaN."""
    node = Node(layer)
    outs, rows = layer.expected(node.text)
    out, last = node.compute([1, 9, 3, 1, 1, 20])
    np.testing.assert_allclose(out, outs, atol=2e-5, rtol=0)
    np.testing.assert_allclose(last, rows[-4:], atol=1e-5, rtol=0)


@shaped
def test_bits_depend_on_what_came_before_alone(instruction_set: str, layer: States | Short) -> None:
    node = Node(layer)
    want = node.compute([TOKENS])
    results = {f"widths {w}": node.compute(w) for w in ([1], [2, 5], [ROWS], [ROWS + 1, 33])}
    results["drafts"] = node.compute([1], drafts=2)
    results["neighbours"] = node.compute([4], ahead=(0, 31))
    results["rows"] = Node(layer, rows=ROWS + 5).compute([3])
    results["threads"] = Node(layer, threads=3).compute([20])
    for case, found in results.items():
        assert all((a == b).all() for a, b in zip(found, want, strict=True)), case

    beyond = node.compute([1], drafts=ROWS)  # control: the previous row is overwritten
    assert (beyond[0] != want[0]).any()


@shaped
def test_a_call_without_tokens(instruction_set: str, layer: States | Short) -> None:
    """Returns an empty output and leaves the rows unchanged."""
    node = Node(layer)
    slot = layer.slot(2, ROWS)
    node.run(slot, [0, 0], 3)
    kept = slot.copy()
    out = node.run(slot, [3, 2], 0)
    assert out.shape[:2] == (2, 0)
    np.testing.assert_array_equal(slot, kept)


def test_another_order_of_the_sums_is_seen() -> None:
    """Control for the bitwise test: the plain loops multiply and add in another way."""
    *fused, plain = with_each_set(lambda: Node(LAYERS["delta rule"]).compute([16])[0])
    assert all((one != plain).any() for one in fused)


def test_a_decay_is_off_by_an_ulp_at_most(instruction_set: str) -> None:
    """The error is below 1.3 ulp, and bitwise the same for a decay per head and per channel."""
    logarithms = np.concatenate(
        [np.linspace(-105, 88.7, 8000), -np.geomspace(1e-9, 1, 184), [0, -np.inf, 200, np.nan]]
    ).astype("f4")
    got = []
    for decays in (logarithms.reshape(-1, 1), logarithms.reshape(-1, 89)):
        heads, depth = decays.shape
        layer = States(heads, 1, depth, 1, channels=depth > 1, beta=False)
        feeds = {name: np.zeros((1, 1, 1, depth), np.float32) for name in ("query", "key")}
        feeds |= {"value": np.zeros((1, 1, heads, 1), np.float32), "decay": decays[None, None]}
        feeds |= {"slot": np.ones((1, heads, 1, depth), np.float32), "position": np.array([1])}
        got.append(Node(layer).session.run(None, feeds)[1].ravel())
    assert got[0].tobytes() == got[1].tobytes()
    with np.errstate(over="ignore"):
        want = np.exp(logarithms.astype(np.float64))
        near = want.astype("f4")
    assert (got[0][-3:-1] == near[-3:-1]).all() and np.isnan(got[0][-1])
    error = np.abs(got[0] - want)[:-3] / np.spacing(near[:-3])
    assert error.max() < 1.3 and error.mean() > 0.1


@shaped
def test_the_slot_is_written_in_place(layer: States | Short) -> None:
    """If input and output are bound to the same memory; other rows stay unchanged."""
    node = Node(layer)
    copied, bound = layer.slot(1, ROWS), layer.slot(1, ROWS)
    node.run(copied, [0], 4)
    in_place(node.session, node.feeds(bound, [0], 4), "slot")
    np.testing.assert_array_equal(bound, copied)
    assert np.isnan(bound[:, :, 4:]).all() and not np.isnan(bound[:, :, :4]).any()


OTHER_SIZES = {  # wrong sizes of inputs for two tokens
    "decay per channel": {
        "query": [(1, 2, 2, 35), (1, 2, 3, 36), (2, 2, 2, 36), (1, 2, 72)],
        "key": [(1, 2, 1, 36), (1, 1, 2, 36)], "value": [(1, 2, 3, 16), (1, 2, 2, 15), (2, 32)],
        "decay": [(1, 2, 2, 2), (1, 2, 2), (1, 2, 1, 36)], "beta": [(1, 2, 1), (1, 2, 2, 1)],
        "slot": [(1, 2, 0, 576), (1, 2, 6, 575), (1, 1, 6, 576), (1, 12, 576)],
        "position": [(0,), (2,), (), (1, 1)],
    },
    "convolution of 5": {
        "x": [(1, 8, 2), (2, 9, 2), (9, 2)], "slot": [(1, 1, 4, 9), (1, 2, 6, 9), (1, 1, 6, 8)],
        "position": [(0,), (2,), (1, 1)],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_inputs_of_other_sizes_are_refused(name: str) -> None:
    """As in hand-made graphs, where an input would be read past its end."""
    layer = LAYERS[name]
    node = Node(layer)
    right = node.feeds(layer.slot(1, ROWS), [0], 2)
    node.session.run(None, right)
    for wrong, shapes in OTHER_SIZES[name].items():
        for sizes in shapes:
            array = np.zeros(sizes, right[wrong].dtype)
            refused(node.session, right, OTHER_SIZE, **{wrong: array})
    for position in (-1, -(2**63), 2**63 - 1):
        refused(node.session, right, "a position is out of range", position=[position])
