"""The host side of the GPU: launches, their addresses, and how failures are reported.

The fake driver runs the emulated kernels, so results are tested and not only calls.
"""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from cuda_standin import FakeDriver, make_device
from on_gpu import OnGpu
from rounds import cases
from samplers import Case, by_library, cpu_library

from bench.suites.gpu import kernel as kernel_gpu
from bench.suites.gpu.kernel import DeviceRound, KernelShape
from bench.suites.gpu.profiling import Kernel
from bench.suites.kernel.rounds import VARIANTS
from runtime.files.errors import OutriderError
from runtime.gpu.launch import find_image
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams


@pytest.fixture
def device(driver):
    return make_device(driver)


class Event:
    """A fake torch.cuda.Event: work completes when enqueued; every span takes a millisecond."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, end):
        return 1.0


@pytest.fixture
def torch_cuda(monkeypatch):
    properties = SimpleNamespace(name="none", L2_cache_size=100_000)
    for name, fake in {
        "Event": Event,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": contextlib.nullcontext,
        "synchronize": lambda: None,
        "current_stream": lambda: SimpleNamespace(cuda_stream=77),
        "get_device_properties": lambda ordinal: properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(kernel_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(kernel_gpu, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(kernel_gpu, "PASSES", 2)


@pytest.fixture
def emulated_gpu(monkeypatch, device):
    """The GPU that the benchmark opens is the emulated one."""
    monkeypatch.setattr(kernel_gpu, "Device", lambda: device)


@pytest.mark.parametrize("names", cases([["token"]], [(list(VARIANTS),)]), ids=len)
def test_the_benchmark_runs_to_its_end(
    torch_cuda, emulated_gpu, driver, capsys, monkeypatch, names
):
    """Tests its arithmetic, not its times: a rare run on a GPU must not end in a typo."""
    monkeypatch.setattr(kernel_gpu, "GOALS_US", {(2500, 2, 1): 1e9})
    profiled = [Kernel("scan", 0, 3), Kernel("scan", 4, 8), Kernel("rest", 9, 10)]
    monkeypatch.setattr(kernel_gpu, "profile_kernels", lambda work: work() or profiled)
    jobs = [
        (name, KernelShape(2500, 2, batch, dtype))
        for name in names
        for batch, dtype in ((1, "bfloat16"), (2, "float32"))
    ]
    report = kernel_gpu.time_all(jobs)
    json.dumps(report)
    assert len(report["results"]) == len(jobs) and report["disagree"] == 0
    for result in report["results"]:
        # A millisecond for two passes over all sets.
        assert result["verify"]["us"] == pytest.approx(500 / result["sets"], abs=1e-3)
        assert result["bytes"] >= result["B"] * 3 * 2500 * 2
        aimed = result["name"] == "token" and result["B"] == 1
        assert result.get("goal", {}).get("met", False) == aimed
        assert result.get("launches_us") == ({"scan": 3.5, "rest": 1} if aimed else None)
    assert {stream for *_, stream in driver.launched} == {77}
    assert "token" in capsys.readouterr().err


def test_what_watching_tools_run(torch_cuda, emulated_gpu, monkeypatch):
    monkeypatch.setattr(kernel_gpu, "SANITIZER_SHAPES", ((300, 2),))
    assert kernel_gpu.main([]) == 0


@pytest.mark.parametrize("name", cases(["token"], [name for name in VARIANTS if name != "token"]))
def test_the_benchmarks_rounds_are_the_references(device, torch_cuda, name):
    """Control: the kernel gets other logits than the reference."""
    for dtype in ("float32", "bfloat16"):
        round_ = DeviceRound(device, KernelShape(1500, 3, 2, dtype), VARIANTS[name], sets=2)
        assert [round_.disagreements(s) for s in range(2)] == [[], []]
    round_.target.reverse()
    assert round_.disagreements(0)


def test_memory_that_is_not_there():
    device = make_device(FakeDriver(memory=1000))
    case = Case(0, 300, 1, slots=1)
    with pytest.raises(OutriderError, match=r"^memory: .*the GPU has no room for .* more bytes"):
        by_library(OnGpu(device, cpu_library()), case, [SlotSampling(SamplingParams(), 1, 0)])


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


def test_what_is_loaded(driver):
    """PTX is text and zero-terminated; code with another interface version is refused."""
    assert make_device(driver) and driver.loaded == b"\0"
    driver.interface = b"outrider_interface_1"
    with pytest.raises(OutriderError, match=r"compiled for another version.* make cubins again"):
        make_device(driver)
