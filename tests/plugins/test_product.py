"""The matrix products of plugins/onnxruntime as single nodes: compared with NumPy in float64, and
bitwise with themselves."""

from __future__ import annotations

import re
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import pytest
from commands import CHECKOUT
from operators import FLOAT, INT64, session_of, with_each_set

from export.weights.blocks import BLOCK, RANGE, Bits, Quantised
from export.weights.halves import Half, pack_halves
from export.weights.operators import pack_levels, pack_scales
from runtime.sampling import kernel

Array = npt.NDArray[np.float32]
Packed = tuple[npt.NDArray[Any], npt.NDArray[Any]]
SETS = ("avx512vnni", "avx512", "avxvnni", "avx2", "dotprod", "plain")
ROWS, COLUMNS = 37, 83  # of a matrix: no multiples of a panel or a block
WIDTHS = range(1, 21)
OTHER_SIZE = "the size of a matrix does not match the attributes"


@pytest.fixture(params=get_args(Bits))
def bits(request: pytest.FixtureRequest) -> Bits:
    return request.param


def matrix(bits: Bits, rows: int = ROWS, columns: int = COLUMNS) -> Quantised:
    """A matrix with every level, and scales of every kind: both signs, subnormal, zero, largest."""
    rng = np.random.default_rng(bits)
    low, high = RANGE[bits]
    levels = rng.integers(low, high, (rows, columns), endpoint=True).astype(np.int8)
    levels[:3], levels[3] = np.resize([low, high], columns), high  # the largest possible sums
    scales = rng.normal(scale=0.02, size=(rows, -(-columns // BLOCK))).astype(np.float16)
    scales[4::9], scales[5::9, 0] = np.float16(6e-8), np.float16(-6e-5)
    scales[6::9, 1:] = 0
    levels[6::9, BLOCK:] = 0
    scales[7] = np.finfo(np.float16).max
    return Quantised(levels, scales, bits)


def activations(rows: int = WIDTHS[-1], columns: int = COLUMNS) -> Array:
    x = np.random.default_rng(1).normal(size=(rows, columns)).astype(np.float32)
    x[0], x[1] = np.resize([1, -1], columns), np.where(x[1] > 0, 3, -3)  # each level is +-127
    x[2, :BLOCK], x[3] = 0, 1
    return x


def packed(weight: Quantised) -> Packed:
    return pack_levels(weight), pack_scales(weight)


class Node:
    """A node of one of the operators, with its matrix."""

    def __init__(
        self, weight: Quantised, kind: str = "QuantizedMatMul", *, threads: int = 1,
        parts: Packed | None = None, more: Packed | None = None, **attributes: int,
    ):  # fmt: skip
        rows, columns = weight.levels.shape
        attributes = {"bits": weight.bits, "rows": rows, "columns": columns} | attributes
        matrix = dict(zip(("levels", "scales"), parts or packed(weight), strict=True))
        matrix |= dict(zip(("more_levels", "more_scales"), more or (), strict=False))
        given = {"x": FLOAT if kind == "QuantizedMatMul" else INT64}
        self.session = session_of(kind, given, {"y": FLOAT}, matrix, threads=threads, **attributes)

    def __call__(self, x: npt.ArrayLike) -> Array:
        return np.asarray(self.session.run(None, {"x": np.asarray(x)})[0])


def rounded(x: Array) -> npt.NDArray[np.float64]:
    """Activations [.., K] as the operator quantises them: int8 with a float32 scale per 32."""
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(len(x), -1, BLOCK)
    most = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, where=most > 4e-37, out=np.zeros_like(most))
    levels = np.rint(blocks * inverse).astype(np.float64)
    return (levels * (most / np.float32(127))).reshape(len(x), -1)[:, : x.shape[1]]


def check(got: Array, x: Array, weight: Quantised) -> None:
    """Check the result to within the rounding of a short float32 sum."""
    levels, dense = rounded(x), weight.dense().astype(np.float64)
    allowed = 1e-6 * (np.abs(levels) @ np.abs(dense.T)) + 1e-40
    assert (np.abs(got - levels @ dense.T) <= allowed).all()


def test_it_is_the_product(instruction_set: str, bits: Bits) -> None:
    """For every number of rows."""
    weight, x = matrix(bits), activations()
    node = Node(weight)
    for width in WIDTHS:
        check(node(x[:width]), x[:width], weight)
    batch = x[:18].reshape(2, 9, -1)
    assert (node(batch) == node(x[:18]).reshape(2, 9, -1)).all() and not node(x[:0]).size


def test_bits_depend_on_a_row_alone(instruction_set: str, bits: Bits) -> None:
    """They do not depend on the other rows or on the number of threads, which share this matrix."""
    weight, x = matrix(bits, 1000, 600), activations(columns=600)
    nodes = [Node(weight, threads=threads) for threads in (1, 2)]
    want = np.concatenate([nodes[0](row[None]) for row in x])
    for node in nodes:
        for width in WIDTHS:
            got = np.concatenate([node(x[i : i + width]) for i in range(0, len(x), width)])
            assert (got == want).all(), f"width {width}"
        many = np.resize(x, (150, 600))
        assert (node(many) == np.resize(want, (150, 1000))).all()


def test_sums_that_are_rounded_in_another_way_are_seen(bits: Bits) -> None:
    """Control for the test above. The plain loops multiply and add in two steps, all others in one
    fused step; otherwise they are the same."""
    weight, x = matrix(bits), activations()
    *fused, plain = with_each_set(lambda: Node(weight)(x), SETS)
    assert all((y == fused[0]).all() for y in fused) and (plain != fused[0]).any()


def test_one_level_that_differs_is_seen(instruction_set: str, bits: Bits) -> None:
    """Control for `check`, with a changed level at the start and at the end of a row."""
    weight, x = matrix(bits), activations()
    for place in ((20, 0), (20, COLUMNS - 1)):
        levels = weight.levels.copy()
        levels[place] ^= 1
        got = Node(Quantised(levels, weight.scales, bits))(x)
        with pytest.raises(AssertionError):
            check(got, x, weight)
        others = np.arange(ROWS) != place[0]
        assert (got == Node(weight)(x))[:, others].all()


@pytest.mark.parametrize(("rows", "more"), [(48, ROWS), (16, 8), (400, 200)])
def test_two_matrices_in_one_node_give_the_bits_of_each_alone(
    instruction_set: str, bits: Bits, rows: int, more: int
) -> None:
    """The second matrix has the other number of bits. (400, 200) is split between threads."""
    first, second = matrix(bits, rows, 600), matrix(12 - bits, more, 600)  # type: ignore[arg-type]
    x = activations(columns=600)
    alone = np.concatenate([Node(first)(x), Node(second)(x)], axis=1)
    for threads in (1, 2):
        node = Node(first, more=packed(second), rows=rows + more, threads=threads)
        for width in WIDTHS:
            assert (node(x[:width]) == alone[:width]).all()


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-36, 1e-37, 1e-40, 1e-45, 0])
def test_activations_of_any_size(instruction_set: str, bits: Bits, size: float) -> None:
    weight = matrix(bits)
    x = (activations() * np.float64(size)).astype(np.float32)
    got = Node(weight)(x)
    want = x.astype(np.float64) @ weight.dense().astype(np.float64).T
    if size > 1e-35:
        check(got, x, weight)
    else:
        bound = 1e-36 * np.abs(weight.dense()).sum(1)
        assert (np.abs(got - want) <= bound + 1e-44).all()


@pytest.mark.parametrize("damage", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_ends_as_nan_in_its_row(
    instruction_set: str, bits: Bits, damage: float
) -> None:
    node, x = Node(matrix(bits)), activations()
    clean = node(x)
    x[3, 40] = x[11, COLUMNS - 1] = damage
    got, hit = node(x), np.isin(np.arange(len(x)), (3, 11))
    assert np.isnan(got[hit]).all() and (got[~hit] == clean[~hit]).all()


def test_rows_are_those_of_the_dense_matrix(bits: Bits) -> None:
    weight = matrix(bits)
    gather, dense = Node(weight, "QuantizedGather"), weight.dense()
    assert (gather(np.arange(ROWS)) == dense).all()
    ids = np.random.default_rng(3).integers(0, ROWS, (2, 1, 5))
    assert (gather(ids) == dense[ids]).all() and (gather(np.int64(36)) == dense[36]).all()
    assert gather(ids[:0]).shape == (0, 1, 5, COLUMNS)


@pytest.mark.parametrize("kind", ["QuantizedMatMul", "QuantizedGather"])
def test_a_matrix_of_other_sizes_is_refused(kind: str, bits: Bits) -> None:
    weight = matrix(bits)
    levels, scales = packed(weight)
    x = activations() if kind == "QuantizedMatMul" else np.arange(3)
    damaged = [
        (levels[:-1], scales), (levels, scales[:-1]), (levels[:, :-1], scales),
        (levels, scales[:, :-1]), (levels[..., :-1], scales), (levels, scales[..., :-1]),
        (levels.reshape(-1), scales), (levels, scales[None]), (levels[:0], scales[:0]),
    ]  # fmt: skip
    others = {"rows": ROWS + 16}, {"columns": COLUMNS + 32}, {"bits": 12 - bits}
    for wrong in (*({"parts": parts} for parts in damaged), *others):
        with pytest.raises(Exception, match=OTHER_SIZE):
            Node(weight, kind, **wrong)(x)
    for attributes in ({"rows": 0}, {"columns": -1}, {"rows": 2**62}, {"columns": 2**63 - 1}):
        with pytest.raises(Exception, match="rows, columns or experts is out of range"):
            Node(weight, kind, **attributes)
    with pytest.raises(Exception, match="bits is not 4 or 8"):
        Node(weight, kind, bits=5)


def test_a_second_matrix_of_other_sizes_is_refused(bits: Bits) -> None:
    first, second = matrix(bits, 32), matrix(12 - bits)  # type: ignore[arg-type]
    levels, scales = packed(second)
    few, rows = matrix(bits, 31), 32 + ROWS
    Node(first, more=(levels, scales), rows=rows)(activations())
    nothing = levels[:0], scales[:0]
    damaged = [(levels[:-1], scales), (levels, scales[:-1]), (levels[..., :-1], scales),
               packed(few), (levels[:, :-1], scales), nothing]  # fmt: skip
    wrong = [(more, rows) for more in damaged]
    wrong += [((levels, scales), count) for count in (rows + 16, rows - 16, 32, 31, 16, 1)]
    wrong += [(nothing, 32), (nothing, 31)]  # no rows are left for the second matrix
    for more, count in wrong:
        with pytest.raises(Exception, match=OTHER_SIZE):
            Node(first, more=more, rows=count)(activations())


def test_rows_of_another_length_are_refused() -> None:
    node, x = Node(matrix(4)), activations()
    for wrong in (x[:, :-1], x[0, :0], x[:, :1], np.float32(1)):
        with pytest.raises(Exception, match="the length of a row does not match the matrix"):
            node(wrong)
    with pytest.raises(Exception, match="too many dimensions"):
        node(x.reshape(*[1] * 7, *x.shape))


def test_ids_beyond_the_matrix_are_refused() -> None:
    gather = Node(matrix(4), "QuantizedGather")
    for wrong in (-1, ROWS, 2**63 - 1, -(2**63)):
        with pytest.raises(Exception, match="a token id is beyond the vocabulary"):
            gather(np.array([0, wrong]))
    with pytest.raises(Exception, match="too many dimensions"):
        gather(np.zeros([1] * 8, np.int64))


EXPERTS = 5


class Experts:
    """The operator with several matrices, and a node for each of them."""

    def __init__(self, bits: Bits, rows: int = ROWS, columns: int = COLUMNS, *, threads: int = 1,
                 parts: Packed | None = None, **attributes: int):  # fmt: skip
        weights = [matrix(bits, rows, columns) for _ in range(EXPERTS)]
        for expert, weight in enumerate(weights):
            weight.levels[:] = np.roll(weight.levels, expert, axis=1)
        self.alone = [Node(weight) for weight in weights]
        self.packed = tuple(map(np.concatenate, zip(*map(packed, weights), strict=True)))
        tables = dict(zip(("levels", "scales"), parts or self.packed, strict=True))
        sizes = {"bits": bits, "rows": rows, "columns": columns, "experts": EXPERTS}
        self.session = session_of(
            "QuantizedExperts", {"x": FLOAT, "chosen": INT64}, {"y": FLOAT}, tables,
            order=["x", "levels", "scales", "chosen"], threads=threads, **sizes | attributes,
        )  # fmt: skip

    def __call__(self, x: Array, chosen: npt.NDArray[np.int64]) -> Array:
        return np.asarray(self.session.run(None, {"x": x, "chosen": chosen})[0])

    def one_by_one(self, x: Array, chosen: npt.NDArray[np.int64]) -> Array:
        rows = np.broadcast_to(x, (*chosen.shape, x.shape[2]))
        return np.array([[self.alone[e](row) for e, row in zip(es, some, strict=True)]
                         for es, some in zip(chosen, rows, strict=True)])  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_experts_give_the_bits_of_each_alone(
    instruction_set: str, bits: Bits, shared: bool
) -> None:
    """Whichever other experts are chosen, by any number of tokens. shared: all experts of a token
    read the same row."""
    experts, x = Experts(bits), activations()
    for width in WIDTHS:
        chosen = np.random.default_rng(width).integers(0, EXPERTS, (3, width))
        rows = x[None, :width] if shared else np.stack([x[:width], -x[:width], x[:width] / 3])
        want = experts.one_by_one(rows, chosen)
        assert (experts(rows, chosen) == want).all()
        chosen[0, 0] = (chosen[0, 0] + 1) % EXPERTS  # control: another expert differs
        assert (experts(rows, chosen)[0, 0] != want[0, 0]).any()
    assert experts(x[None, :0], np.zeros((3, 0), np.int64)).shape == (3, 0, ROWS)


def test_experts_share_threads(bits: Bits) -> None:
    x = activations(150, columns=600)[None]
    chosen = np.random.default_rng(0).integers(0, EXPERTS, (2, 150))
    one, two = (Experts(bits, 1000, 600, threads=threads)(x, chosen) for threads in (1, 2))
    assert (one == two).all()


def test_what_experts_are_asked_wrongly_is_refused(bits: Bits) -> None:
    experts, x = Experts(bits), activations(4)[None]
    chosen = np.zeros((2, 4), np.int64)
    for wrong in (-1, EXPERTS, 2**63 - 1):
        with pytest.raises(Exception, match="a chosen expert does not exist"):
            experts(x, np.where(np.arange(4) == 3, wrong, chosen))
    for rows, asked in (
        (x[:, :3], chosen), (x[..., :-1], chosen), (x[0], chosen), (np.repeat(x, 3, 0), chosen),
        (x[:0], chosen), (x, chosen[0]), (x, chosen[None]), (x, np.int64(0)),
    ):  # fmt: skip
        with pytest.raises(Exception, match="the length of a row does not match the experts"):
            experts(rows, np.asarray(asked))
    levels, scales = experts.packed
    for wrong in ({"parts": (levels[:-1], scales)}, {"experts": EXPERTS + 1}):
        with pytest.raises(Exception, match=OTHER_SIZE):
            Experts(bits, **wrong)(x, chosen)
    with pytest.raises(Exception, match="rows, columns or experts is out of range"):
        Experts(bits, experts=0)


# Weights of 16 bits

HALF_TYPES: tuple[Half, ...] = get_args(Half)
DEEP = 1100  # inputs that are multiplied in two pieces if there are many rows


def half_matrix(dtype: Half, rows: int = ROWS, columns: int = COLUMNS) -> Array:
    """Numbers that float16 or bfloat16 holds: of both signs and many sizes, zero, subnormal."""
    dense = np.random.default_rng(dtype).normal(size=(rows, columns)).astype(np.float32)
    dense[2, ::3], dense[3, ::5], dense[4] = 0, -0.0, dense[4] * np.float32(1e-6)
    if dtype == 1:
        dense[5] = np.float16(6e-8)
        return dense.astype(np.float16).astype(np.float32)
    dense[5] = dense[5] * np.float32(1e30)
    return (dense.view(np.uint32) & 0xFFFF0000).view(np.float32)


def half_node(dense: Array, dtype: int, kind: str = "HalfMatMul", *, threads: int = 1,
              weights: npt.NDArray[np.uint16] | None = None, **attributes: int) -> Any:  # fmt: skip
    rows, columns = dense.shape
    attributes = {"dtype": dtype, "rows": rows, "columns": columns} | attributes
    weights = pack_halves(dense, cast(Half, dtype)) if weights is None else weights
    session = session_of(
        kind, {"x": FLOAT if kind == "HalfMatMul" else INT64}, {"y": FLOAT}, {"weights": weights},
        threads=threads, **attributes,
    )  # fmt: skip
    return lambda x: np.asarray(session.run(None, {"x": np.asarray(x)})[0])


def is_product(got: Array, x: Array, dense: Array) -> bool:
    """Whether it is within the rounding of a float32 sum."""
    wide, weights = x.astype(np.float64), dense.astype(np.float64)
    allowed = 1e-5 * (np.abs(wide) @ np.abs(weights.T)) + 1e-40
    return bool((np.abs(got - wide @ weights.T) <= allowed).all())


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("columns", [COLUMNS, DEEP])
def test_products_with_16_bits(instruction_set: str, dtype: Half, columns: int) -> None:
    """They are right, and have the bits of each row alone: also of many rows, whose weights are
    converted first, in pieces, and with threads that share the panels."""
    dense, x = half_matrix(dtype, 1000, columns), activations(150, columns)
    nodes = [half_node(dense, dtype, threads=threads) for threads in (1, 2)]
    want = np.concatenate([nodes[0](row[None]) for row in x])
    assert is_product(want, x, dense)
    for node in nodes:
        for width in (*WIDTHS, 24, 25, 64, 150):
            assert (node(x[:width]) == want[:width]).all(), f"width {width}"
        assert (node(x[:18].reshape(2, 9, -1)) == want[:18].reshape(2, 9, -1)).all()
    assert not nodes[0](x[:0]).size
    other = dense.copy()
    other[999, columns - 1] += np.float32(1)  # control
    assert not is_product(want, x, other)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_rows_that_fill_no_panel(instruction_set: str, dtype: Half) -> None:
    """In one piece and in two, with a second panel and without."""
    for rows in (1, 15, 17, ROWS, 47):
        dense, x = half_matrix(dtype, max(rows, 6), DEEP)[:rows], activations(40, DEEP)
        got = half_node(dense, dtype)(x)
        assert is_product(got, x, dense)
        assert (got[:9] == half_node(dense, dtype)(x[:9])).all()


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_lookups_in_16_bits(dtype: Half) -> None:
    dense = half_matrix(dtype)
    gather = half_node(dense, dtype, "HalfGather")
    ids = np.random.default_rng(3).integers(0, ROWS, (2, 1, 5))
    assert (gather(np.arange(ROWS)).view(np.int32) == dense.view(np.int32)).all()
    assert (gather(ids) == dense[ids]).all() and gather(ids[:0]).shape == (0, 1, 5, COLUMNS)
    for wrong in (-1, ROWS, 2**63 - 1):
        with pytest.raises(Exception, match="a token id is beyond the vocabulary"):
            gather(np.array([0, wrong]))


@pytest.mark.parametrize("kind", ["HalfMatMul", "HalfGather"])
def test_what_does_not_fit_16_bits_is_refused(kind: str) -> None:
    dense, x = half_matrix(1), activations() if kind == "HalfMatMul" else np.arange(3)
    weights = pack_halves(dense, 1)
    for wrong in (weights[:-1], weights[:, :-1], weights[..., :-1], weights.reshape(-1)):
        with pytest.raises(Exception, match=OTHER_SIZE):
            half_node(dense, 1, kind, weights=np.ascontiguousarray(wrong))(x)
    for attributes in ({"rows": ROWS + 16}, {"columns": COLUMNS - 1}):
        with pytest.raises(Exception, match="does not match"):
            half_node(dense, 1, kind, **attributes)(x)
    for dtype in (0, 3):
        with pytest.raises(Exception, match="dtype is not 1 or 2"):
            half_node(dense, dtype, kind, weights=weights)
    if kind == "HalfMatMul":
        with pytest.raises(Exception, match="the length of a row does not match the matrix"):
            half_node(dense, 1)(x[:, :-1])


def test_a_library_with_other_operators_has_another_interface() -> None:
    """An older library must be refused by its version, before ONNX Runtime meets an unknown node.
    Raise `ABI_VERSION` when the set of operators or their inputs change."""
    names: set[str] = set()
    for source in (CHECKOUT / "plugins" / "onnxruntime").glob("*.cpp"):
        names |= {*re.findall(r'operator_of<Kernel>\([^)]*\),\s*"(\w+)"', source.read_text())}
    products = {"QuantizedMatMul", "QuantizedGather", "QuantizedExperts"}
    products |= {"HalfMatMul", "HalfGather"}
    attentions = {"Attention", "QuantizedCacheAttention", "SourceAttention"}
    operators = {"Recurrence", "ShortConvolution", *attentions, *products}
    assert (names, kernel.ABI_VERSION) == (operators, 14)
