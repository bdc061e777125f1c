"""The host side of the GPU: what it launches, with which addresses, and what failures become.

Over a driver that runs the emulated kernels, so that results count and not only calls.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from fake_cuda import FakeDriver
from test_kernel import OPTIONS, Case, by_library, cpu_library, emulated_library

from bench.kernel_gpu import DeviceRound, Shape
from bench.on_gpu import OnGpu
from runtime import cuda_kernel, kernel
from runtime.cuda_kernel import Device, Plan, Sizes, find_image
from runtime.errors import OutriderError
from runtime.kernel import RoundSampler
from runtime.sampler import Place
from runtime.warping import SamplingParams


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "outrider_sm_90.cubin"
    path.write_bytes(b"code")
    return path


@pytest.fixture
def driver():
    return FakeDriver(emulated_library())


@pytest.fixture
def device(driver, image):
    return Device(image=image, driver=driver)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_rounds_through_the_driver(device, driver, name, dtype):
    """Everything crosses: logits, slots, ids, drafts, rows, verdicts, ratios."""
    rng = np.random.default_rng(0)
    params = SamplingParams(**OPTIONS[name])
    places = [
        Place(
            params, gamma, 7 * b, b, rng.integers(0, 300, 9), np.array([1, 5 + b]), b,
            name=f"slot {b}",
        )
        for b, gamma in enumerate((3, 0, -1, 2))
    ]  # fmt: skip
    case = Case(3, 300, 3, slots=4, dtype=dtype)
    on_gpu = OnGpu(device, cpu_library())
    for keep in (True, False):
        got = by_library(on_gpu, case, places, keep)
        assert got == by_library(cpu_library(), case, places, keep)
    assert driver.launched
    assert not driver.allocated, "memory that was not given back"


def test_what_is_launched_depends_on_sizes_alone(device, driver):
    """Or a graph could not replay it."""
    on_gpu, seen = OnGpu(device, cpu_library()), []
    for seed in range(3):
        case = Case(seed, 5000, 2, slots=2)
        places = [Place(SamplingParams(temperature=1.0, seed=seed + b), 2, 40, b) for b in range(2)]
        driver.launched.clear()
        by_library(on_gpu, case, places)
        seen.append(list(driver.launched))
    assert seen[0] == seen[1] == seen[2]
    assert {name for name, *_ in seen[0]} == {
        "outrider_draw_scan", "outrider_verify_scan", "outrider_verify_rest",
    }  # fmt: skip


def test_the_benchmarks_rounds_are_the_cpu_librarys(device):
    params = SamplingParams(temperature=0.7)
    for dtype in ("float32", "bfloat16"):
        round_ = DeviceRound(device, Shape(1500, 3, 2, dtype), params, sets=2, where="cpu")
        for s in range(2):
            device.launch(round_.verifies[s])
            # The library knows NumPy's types: bfloat16 as its bits.
            logits = [
                x.numpy() if dtype == "float32" else x.view(round_.torch.int16).numpy().view("u2")
                for x in (round_.target[s], round_.draft[s])
            ]
            sampler = RoundSampler(1500, 3, 2, library=cpu_library())
            sampler.begin([Place(SamplingParams(temperature=0.7, seed=b), 3, 500, b)
                           for b in range(2)])  # fmt: skip
            for step in range(3):
                sampler.draw(logits[1][:, step], step)
            want = [(v.accepted, v.token) for v in sampler.verify(logits[0])]
            np.testing.assert_array_equal(round_.drafts(s), sampler.drafts[:2])
            got = [(int(v["accepted"]), int(v["token"])) for v in round_.verdicts(s)]
            assert got == want


def test_a_plan_outlives_what_it_was_made_of(device, driver):
    """The parameter is copied into the plan, and from it into the launch."""
    plan = Plan()
    plan.launch_count = 1
    plan.launches[0].kernel = b"no such kernel"
    with pytest.raises(OutriderError, match="CUDA_ERROR_NOT_FOUND"):
        device.launch(plan)


def test_memory_that_is_not_there(image):
    device = Device(image=image, driver=FakeDriver(emulated_library(), memory=1000))
    case = Case(0, 300, 1, slots=1)
    with pytest.raises(OutriderError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        by_library(OnGpu(device, cpu_library()), case, [Place(SamplingParams(), 1, 0)])
    assert caught.value.kind == "backend"


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((9, 0), "outrider_sm_90.cubin"),
        ((8, 0), "outrider_sm_80.cubin"),
        ((8, 7), "outrider_sm_86.cubin"),  # machine code runs on later minor versions
        ((12, 1), "outrider_sm_120.cubin"),
        ((11, 0), "outrider_compute_80.ptx"),
        ((13, 0), "outrider_compute_80.ptx"),
    ],
)
def test_the_image_for_a_chip(tmp_path, capability, name):
    for made in ("sm_80.cubin", "sm_86.cubin", "sm_90.cubin", "sm_120.cubin", "compute_80.ptx"):
        (tmp_path / f"outrider_{made}").write_bytes(b"")
    assert find_image(*capability, folders=(tmp_path,)).name == name
    with pytest.raises(OutriderError, match=r"7\.5"):
        find_image(7, 5, folders=(tmp_path,))


def test_ptx_ends_in_a_zero(driver, image):
    Device(image=image, driver=driver)
    assert driver.loaded == b"code\0"


def test_structures_are_those_of_the_header():
    assert ctypes.sizeof(Sizes) == 24
    assert ctypes.sizeof(Plan) == 8 + 4 * 32 + 64 * 8
    assert cuda_kernel.workspace_size(Sizes(1, 4, 1000, 1000, 0, 0), cpu_library()) > 0
    assert cuda_kernel.workspace_size(Sizes(0, 4, 1000, 1000, 0, 0), cpu_library()) == 0
    assert kernel.SLOT.itemsize % 8 == 0
