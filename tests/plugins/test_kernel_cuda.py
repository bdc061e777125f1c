"""The CUDA kernels without a GPU: emulated on the host, planned, compiled for every architecture.

The emulation runs plugins/cuda/outrider_cuda.cu itself as outrider_device.h plans it, with blocks
and warps in random order, which checks the logic. The tests of test_kernel_edges.py run against it
too; here it is compared bitwise with the CPU library. NVRTC checks that the source compiles, and
the resources it needs.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from contextlib import contextmanager

import numpy as np
import pytest
from cuda_standin import emulation
from rounds import cases
from samplers import OPTIONS, TOKEN, Case, by_library, cpu_library, emulated_library

from plugins.tools import cubins
from plugins.tools.build import BuildError
from runtime.gpu import launch as cuda_kernel
from runtime.gpu.launch import FILTERS, PENALTIES, SHAPES, KernelSizes, Plan
from runtime.sampling import kernel
from runtime.sampling.native import RoundSampler
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams

slow = pytest.mark.slow
NEEDS = {
    "top-k": FILTERS, "top-p": FILTERS, "min-p": FILTERS, "greedy-penalty": PENALTIES,
    "block": cuda_kernel.BLOCK, "coupled": cuda_kernel.COUPLED,
}  # fmt: skip


@contextmanager
def emulated(added=0, removed=0, seed=0):
    """The emulated library. added, removed: plan flags set or cleared; seed: for block order."""
    library = emulated_library()
    library.added, library.removed = added, removed
    emulation().outrider_emulate_seed(seed)
    try:
        yield library
    finally:
        library.added = library.removed = 0


def plain_places(case, params):
    """Slots without penalties and suppression, which the fast kernels do not support."""
    return [SlotSampling(params, case.gamma, 5 * b, b) for b in range(case.slots)]


def run_round(library, case, places):
    """All results of a round: drafts, rows of the draws, verdicts with ratios."""
    width, slots = case.gamma, len(places)
    sampler = RoundSampler(
        case.vocab_size, width, slots, draft_vocab_size=case.draft.shape[2], library=library
    )
    sampler.begin(places)
    for step in range(width):
        sampler.draw(case.draft[:, step], step)
    verdicts = sampler.verify(case.target, case.draft if width else None)
    rows = sampler.rows[["total", "peak", "rate", "cut", "tie_from", "min_weight", "token"]]
    return sampler.drafts.tolist(), rows.tolist(), verdicts


# --- bitwise equal to the CPU library ---------------------------------------------------------


DTYPES = ("float32", "float16", "bfloat16")


def assert_same(case, places, want=None, **plan):
    """Check that the emulation gives the results of the CPU library."""
    expected = want or run_round(cpu_library(), case, places)
    with emulated(**plan) as library:
        assert run_round(library, case, places) == expected


@pytest.mark.parametrize(
    ("vocab_size", "name", "dtype"),
    cases(
        [(1500, name, DTYPES[i % 3]) for i, name in enumerate(OPTIONS)],
        itertools.product((8, 127, 1024, 2500), OPTIONS, DTYPES),
    ),
)
def test_the_kernels_give_what_the_cpu_gives(vocab_size, name, dtype):
    """The fast cases cover one full tile and one partial tile."""
    params = SamplingParams(**OPTIONS[name])
    for seed, gamma in enumerate((3,) if vocab_size == 1500 else (0, 1, 4)):
        case = Case(20, vocab_size, gamma, slots=3, dtype=dtype)
        for places in (plain_places(case, params), case.places(params)):
            assert_same(case, places, seed=seed)


@slow
@pytest.mark.parametrize(
    "name", ["plain", "all", "block-top-p", "coupled", "sigmoid-narrow", "greedy"]
)
def test_a_large_vocabulary(name):
    """Vector loads, scalar rows (51,865 elements), and more than one tile per lane of a warp."""
    for vocab_size, dtype in ((51_864, "bfloat16"), (51_865, "float32"), (300_000, "float16")):
        case = Case(21, vocab_size, 2, slots=2, dtype=dtype)
        assert_same(case, case.places(SamplingParams(**OPTIONS[name])))


@pytest.mark.parametrize("name", cases(["plain"], ["top-p", "coupled"]))
def test_many_slots(name):
    """So many that each has a single block, in which a warp processes several tiles."""
    case, params = Case(27, 3000, 3, slots=300), SamplingParams(**OPTIONS[name])
    ((_, blocks, _, _, threads), *_) = launches(make_plan(slots=300, width=3, vocab_size=3000)[1])
    assert blocks * threads // 32 < 4 * 3, "tiles of a slot"
    places = plain_places(case, params) if name == "plain" else case.places(params)
    assert_same(case, places)


@pytest.mark.parametrize("name", cases(["block"], ["all", "sigmoid", "greedy-lenient"]))
def test_slots_that_differ(name):
    """Slots that differ in gamma and rule, one of them idle; with minimal and with all flags, in
    two block orders."""
    case = Case(22, 1100, 5, slots=6)
    places = case.places(SamplingParams(**OPTIONS[name]), gammas=[5, 0, -1, 2, 5, 1])
    places[4] = SlotSampling(TOKEN, 5, 3, 4)
    for added in (0, FILTERS | PENALTIES | cuda_kernel.BLOCK | SHAPES):
        for seed in (1, 2):  # the second round reuses the workspace of the first
            assert_same(case, places, added=added, seed=seed)


@pytest.mark.parametrize(
    ("name", "width"),
    cases([("plain", 900)], itertools.product(("plain", "block", "all", "sigmoid"), (900, 2000))),
)
def test_a_draft_of_another_width(name, width):
    case, params = Case(23, 2500, 2, slots=2), SamplingParams(**OPTIONS[name])
    case.draft, case.target, case.vocab_size = (
        case.draft[:, :, :width],
        case.target[..., :1500],
        1500,
    )
    for places in (plain_places(case, params), case.places(params)):
        assert_same(case, places)


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    cases([(0, 0.5), (700, 0.9)], itertools.product((0, 3, 700), (0.05, 0.5, 0.9, 0.9999999))),
)
def test_ties(top_k, top_p):
    """Many equal logits: the edge of the nucleus is inside a tie."""
    params = SamplingParams(temperature=1.3, top_k=top_k, top_p=top_p)
    case = Case(24, 2500, 1, slots=2)
    case.target, case.draft = np.round(case.target), np.round(case.draft)
    case.draft[0] = 0
    assert_same(case, plain_places(case, params))


ROWS = {
    "peaked": lambda z: np.where(np.arange(z.shape[-1]) % 500 == 7, z + 12, z),
    "flat": lambda z: z / 50,
    "equal": np.zeros_like,
    # More tokens within a bin of the histogram than the list holds, all different.
    "dense": lambda z: np.where(np.arange(z.shape[-1]) % 2 == 0, 3 + z / 1e3, z),
    "few": lambda z: np.where(np.arange(z.shape[-1]) % 200 == 7, z, -np.inf),
    "huge": lambda z: z * 3e37,  # differences overflow
    "far": lambda z: z - 1e4,
}


@pytest.mark.parametrize("name", cases(["equal", "dense", "huge"], ROWS))
def test_filters_on_all_kinds_of_rows(name):
    """Rows of several blocks: with few and many candidates for the cut, among equal logits too."""
    case = Case(28, 9 * 1024 * 2, 1, slots=1)
    for rows in (case.target, case.draft):
        rows[:] = ROWS[name](rows)
    for top_k, top_p in ((0, 0.5), (0, 0.9), (60, 1), (300, 0.9), (5000, 0.7), (18_000, 0.99)):
        assert_same(
            case, plain_places(case, SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p))
        )


@pytest.mark.parametrize(
    ("name", "dtype"),
    cases(
        [("plain", "float16")], itertools.product(("plain", "all", "block"), ("float32", "float16"))
    ),
)
def test_rows_that_are_not_aligned_to_vectors(name, dtype):
    case = Case(25, 2500, 3, slots=2, dtype=dtype)
    places = case.places(SamplingParams(**OPTIONS[name]))
    want = run_round(cpu_library(), case, places)

    def moved(array, padding):
        wide = np.zeros((*array.shape[:2], array.shape[2] + padding), array.dtype)
        wide[:, :, padding:] = array
        return wide[:, :, padding:]

    for padding in (1, 4, 8):
        case.target, case.draft = moved(case.target, padding), moved(case.draft, 9 - padding)
        assert_same(case, places, want=want)


# --- slots that a plan does not support -------------------------------------------------------


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_flag_is_refused_not_wrong(name):
    """The other slot still gets its result."""
    case = Case(26, 1500, 2, slots=2)
    places = plain_places(case, TOKEN)
    want = by_library(cpu_library(), case, places)
    places[1] = SlotSampling(SamplingParams(**OPTIONS[name]), 2, 7, 1, case.context[1])
    with emulated(removed=NEEDS[name]) as library:
        sampler = RoundSampler(1500, 2, 2, library=library)
        sampler.begin(places)
        for step in range(2):
            if name == "block":  # draws do not depend on the rule
                sampler.draw(case.draft[:, step], step)
                continue
            with pytest.raises(ValueError, match="parameter is out of range"):
                sampler.draw(case.draft[:, step], step)
            assert sampler.drafts[1, step] == -1
        with pytest.raises(ValueError, match="parameter is out of range"):
            sampler.verify(case.target, case.draft)
    verdict = sampler._verdicts[0]
    assert sampler.drafts[0].tolist() == want[0][0]
    assert (verdict["accepted"], verdict["token"]) == (want[1][0].accepted, want[1][0].token)
    assert sampler._verdicts[["status", "token"]].tolist()[1] == (2, -1)


# --- the plan ---------------------------------------------------------------------------------


BASE = 1 << 20  # addresses are not dereferenced


def make_plan(flags=0, slots=4, width=5, vocab_size=128_256, base=BASE, size=None, drawing=False):
    """(status, plan) of a verification, or of a draw if `drawing`."""
    library = cpu_library()
    sizes = KernelSizes(slots, width, vocab_size, vocab_size, flags)
    row = vocab_size * 2
    logits = kernel.Logits(BASE, row * (width + 1), row, vocab_size, 2)
    size = library.outrider_device_workspace_size(ctypes.byref(sizes)) if size is None else size
    plan = Plan()
    if drawing:
        status = library.outrider_device_plan_draw(
            ctypes.byref(sizes), ctypes.byref(logits), BASE, 0, None, BASE, BASE, None, base,
            size, ctypes.byref(plan),
        )  # fmt: skip
    else:
        status = library.outrider_device_plan_verify(
            ctypes.byref(sizes), ctypes.byref(logits), ctypes.byref(logits), BASE, None, BASE, BASE,
            BASE, None, base, size, ctypes.byref(plan),
        )  # fmt: skip
    return status, plan


def launches(plan):
    return [(la.kernel.decode(), *la.grid, la.block) for la in plan.launches[: plan.launch_count]]


def test_launches():
    """One kernel for an unfiltered draw, two for an unfiltered verification."""
    assert launches(make_plan(drawing=True)[1]) == [("outrider_draw_scan", 16, 1, 4, 256)]
    assert launches(make_plan()[1]) == [
        ("outrider_verify_scan", 95, 1, 4, 256),
        ("outrider_verify_rest", 16, 1, 4, 256),
    ]
    assert launches(make_plan(cuda_kernel.BLOCK)[1])[1] == ("outrider_verify_rest", 16, 5, 4, 256)
    assert launches(make_plan(slots=32, width=8)[1])[0] == ("outrider_verify_scan", 16, 1, 32, 256)
    assert launches(make_plan(FILTERS | PENALTIES | cuda_kernel.COUPLED)[1]) == [
        ("outrider_mark", 1, 1, 4, 512),
        ("outrider_verify_scan_general", 95, 1, 4, 256),
        ("outrider_verify_filter", 5, 6, 4, 512),
        ("outrider_verify_mass", 95, 1, 4, 256),
        ("outrider_verify_couple", 95, 1, 4, 256),
        ("outrider_verify_rest_general", 16, 1, 4, 256),
    ]


def test_a_workspace_is_as_large_as_its_size():
    """The workspace addresses in a kernel's parameter begin at its start and stay within it."""
    for flags in range(32):
        for slots, width, vocab_size in ((1, 0, 8), (3, 5, 2500), (32, 8, 128_256)):
            sizes = KernelSizes(slots, width, vocab_size, vocab_size, flags)
            size = cpu_library().outrider_device_workspace_size(ctypes.byref(sizes))
            start = 1 << 40
            status, plan = make_plan(flags, slots, width, vocab_size, base=start)
            assert status == 0 and size % 256 == 0
            inside = {word - start for word in plan.call if start <= word < start + 2 * size}
            assert 0 in inside and len(inside) >= 6 and max(inside) <= size
            assert all(offset % 256 == 0 for offset in inside)


def test_illegal_plans_are_refused():
    assert make_plan()[0] == 0
    assert make_plan(size=100)[0] == 3
    assert make_plan(base=BASE + 64)[0] == 1  # not 256-byte-aligned
    assert make_plan(width=65)[0] == make_plan(slots=0)[0] == make_plan(flags=32)[0] == 1
    assert make_plan(slots=65_536)[0] == 1
    assert make_plan(vocab_size=0)[0] == 1
    for sizes in (
        KernelSizes(1, -1, 8, 8, 0),
        KernelSizes(1, 1, 0, 0, 0),
        KernelSizes(1, 1, 8, 8, 32),
    ):
        assert cpu_library().outrider_device_workspace_size(ctypes.byref(sizes)) == 0
    assert cpu_library().outrider_device_workspace_size(None) == 0


# --- compiled ---------------------------------------------------------------------------------


BOOKKEEPING_KERNELS = {"outrider_begin", "outrider_feed", "outrider_commit"}


@slow
@pytest.mark.parametrize("architecture", cubins.ARCHITECTURES)
def test_compiles_for(nvrtc, architecture):
    made = cubins.build(cubins.PLUGINS_FOLDER.parent / "build" / "cuda", [architecture])
    code = made[architecture].read_bytes()
    record = cubins.read_record(made[architecture].parent)[architecture]["kernels"]
    expected = kernels_of_plans() | BOOKKEEPING_KERNELS
    names = {name for name in expected if name.encode() in code}
    assert names == expected
    if architecture.startswith("sm_"):
        assert code.startswith(b"\x7fELF")
        assert set(record) == names | {f"outrider_interface_{kernel.ABI_VERSION}"}
        for needs in record.values():
            assert 0 < needs["registers"] <= 255 and needs["shared"] <= 48 * 1024
    else:
        assert b".target sm_80" in code


def kernels_of_plans():
    return {
        launch[0]
        for flags in range(32)
        for drawing in (False, True)
        for launch in launches(make_plan(flags, drawing=drawing)[1])
    }


def test_nothing_is_compiled_twice_and_errors_are_told(nvrtc, tmp_path, monkeypatch, capsys):
    source = tmp_path / "small.cu"
    source.write_text('extern "C" __global__ void f(float* x) { x[threadIdx.x] *= 2; }')
    out = tmp_path / "out"
    (path,) = cubins.build(out, ["sm_90"], source, "small").values()
    first = path.stat().st_mtime_ns
    assert cubins.build(out, ["sm_90"], source, "small") == {"sm_90": path}
    assert path.stat().st_mtime_ns == first and capsys.readouterr().err.count("compile") == 1
    record = json.loads((out / "small.json").read_text())
    assert list(record["sm_90"]["kernels"]) == ["f"]
    assert cubins.resource_table(record, ["sm_90"]).splitlines()[1].startswith("f ")
    monkeypatch.setattr(cubins, "SPILL_LIMIT", -1)
    with pytest.raises(BuildError, match=r"f spills 0 bytes on sm_90, more than -1\. Give"):
        cubins.build(out, ["sm_90"], source, "small")
    source.write_text("this is not C++")
    with pytest.raises(BuildError, match=r"small.cu does not compile for sm_90"):
        cubins.build(out, ["sm_90"], source, "small")
    monkeypatch.setattr(cubins, "_candidate_libraries", list)
    with pytest.raises(BuildError, match=r"NVRTC was not found\. Install it"):
        cubins.Nvrtc()


def test_the_compilers_report_is_read():
    log = """
ptxas info    : Compiling entry function 'outrider_a' for 'sm_90'
ptxas info    : Function properties for outrider_a
    304 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 304 bytes cumulative stack size, 39064 bytes smem
ptxas info    : Function properties for _Z10filter_row
    0 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Compiling entry function 'outrider_b' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers
"""  # noqa: E501
    a, b = cubins.parse_log(log).values()
    assert a == {
        "registers": 128, "spill_stores": 24, "spill_loads": 24, "shared": 39064, "stack": 304,
    }  # fmt: skip
    assert b["registers"] == 24 and b["spill_stores"] == b["shared"] == b["stack"] == 0
