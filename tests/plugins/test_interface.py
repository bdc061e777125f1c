"""The C interface: its random numbers, the layout of its structures, and the calls it refuses."""

from __future__ import annotations

import ctypes
import math
import subprocess

import numpy as np
import pytest
from samplers import TOKEN, open_backend
from test_philox import KNOWN_ANSWERS

from plugins.tools.build import BuildError, build, find_compiler, include_options
from runtime.files import library
from runtime.files.errors import OutriderError
from runtime.gpu import launch as cuda_kernel
from runtime.sampling import kernel
from runtime.sampling.native import RoundSampler
from runtime.sampling.philox import Purpose, philox4x32, uniform
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams


@pytest.fixture(params=["cpu", "cuda"])
def native(request):
    return open_backend(request.param)


def test_philox_gives_the_known_answers(native):
    answer = np.zeros(4, np.uint32)
    for counter, key, want in KNOWN_ANSWERS:
        words = np.array(counter, np.uint32)
        native.outrider_philox4x32(key[1] << 32 | key[0], words.ctypes.data, answer.ctypes.data)
        assert tuple(answer.tolist()) == want == philox4x32(key[1] << 32 | key[0], counter)
    rng = np.random.default_rng(0)
    for seed in (0, 2**64 - 1, *rng.integers(0, 2**63, 50).tolist()):
        at = (seed, int(rng.integers(2**32)), Purpose(rng.integers(3)), int(rng.integers(2**32)))
        assert native.outrider_uniform(*at) == uniform(*at)


def test_structures_have_the_layout_of_the_header(tmp_path):
    """The compiler's sizes and offsets of the last fields equal those in Python."""
    source = tmp_path / "layout.cpp"
    lines = [
        f'printf("%zu %zu\\n", sizeof({name}), offsetof({name}, {field}));'
        for name, field in (
            ("outrider_slot", "reserved"), ("outrider_row", "status"),
            ("outrider_verdict", "reserved"), ("outrider_logits", "dtype"),
            ("outrider_device_sizes", "reserved"), ("outrider_device_launch", "block"),
            ("outrider_device_plan", "call"),
        )
    ]  # fmt: skip
    source.write_text(
        '#include <cstdio>\n#include "outrider.h"\nint main() {' + "".join(lines) + "}"
    )
    program = tmp_path / "layout"
    subprocess.run([*find_compiler(), *include_options(), source, "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    got = [n for t in (kernel.SLOT, kernel.ROW, kernel.VERDICT)
           for n in (t.itemsize, t.fields[t.names[-1]][1])]  # fmt: skip
    for structure, last in (
        (kernel.Logits, "dtype"), (cuda_kernel.KernelSizes, "reserved"),
        (cuda_kernel.Launch, "block"), (cuda_kernel.Plan, "call"),
    ):  # fmt: skip
        got += [ctypes.sizeof(structure), getattr(structure, last).offset]
    assert [int(n) for n in printed] == got
    assert kernel.SLOT.itemsize % 8 == kernel.VERDICT.itemsize % 8 == 0  # copied in words


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_draft_row_that_nobody_looked_at(native, temperature):
    """On a GPU the host does not check each draw of a round, so the verification must report it."""
    good, broken = np.array([[0.0, 1, 2]], np.float32), np.array([[0.0, np.nan, 2]], np.float32)
    sampler = RoundSampler(3, 2, library=native)
    sampler.begin([SlotSampling(SamplingParams(temperature=temperature), 2, 17)])
    with pytest.raises(OutriderError, match="NaN"):
        sampler.draw(broken, 0)
    sampler.draw(good, 1)
    with pytest.raises(OutriderError, match="draft, slot 0, position 17: NaN"):
        sampler.verify(np.stack([good[0]] * 3)[None], [broken, good])


def test_illegal_calls_are_refused_with_a_text(native):
    sampler = RoundSampler(4, 2, library=native)
    logits = np.zeros((1, 3, 4), np.float32)
    for field, value in (
        ("temperature", math.nan), ("temperature", -1), ("top_p", 0), ("top_p", math.nan),
        ("min_p", 2), ("lenience", 0), ("rule", 4), ("gamma", 3), ("top_k", -1), ("index", -1),
        ("repetition_penalty", 0), ("sigmoid_alpha", 1), ("context_length", 2),
        ("frequency_penalty", math.inf), ("presence_penalty", math.nan), ("output_start", -1),
        ("bias_length", 1),
    ):  # fmt: skip
        sampler.begin([SlotSampling(TOKEN, 2, 0)])
        sampler._slots[0][field] = value
        with pytest.raises(ValueError, match="parameter is out of range"):
            sampler.verify(logits, logits)
    sampler.begin([SlotSampling(TOKEN, 2, 0)])
    with pytest.raises(ValueError, match="too few"):
        sampler.verify(logits[:, :2])
    with pytest.raises(ValueError, match="too few"):
        sampler.verify(logits, logits[:, :1])
    for first_slot in (1, -1):
        with pytest.raises(ValueError, match="do not include slot 0"):
            sampler.verify(logits, logits, first_slot=first_slot)
        with pytest.raises(ValueError, match="do not include slot 0"):
            sampler.draw(logits[:, 0], 0, first_slot=first_slot)
    for drafts in ([[1]], [[1, 2, 3]], [[1, 2], [3, 0]]):
        with pytest.raises(ValueError, match=r"drafts for slot 0, not 2|argument"):
            sampler.set_drafts(drafts)
    with pytest.raises(ValueError, match="narrower"):
        sampler.verify(logits[..., :3])
    with pytest.raises(ValueError, match="contiguous"):
        sampler.verify(np.zeros((1, 3, 8), np.float32)[..., ::2])
    with pytest.raises(ValueError, match="float64"):
        sampler.verify(logits.astype(np.float64))
    with pytest.raises(ValueError, match="workspace"):
        RoundSampler(0, 1, library=native)
    for status in range(10):
        assert kernel.status_text(native, status)


def test_a_missing_or_foreign_library_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "FOLDERS", (tmp_path,))
    kernel.load.cache_clear()
    try:
        assert kernel.unavailable_reason().startswith(
            "liboutrider.so was not found. Run make plugins"
        )
        assert not kernel.available()
        (tmp_path / "liboutrider.so").write_bytes(b"not a library")
        with pytest.raises(OutriderError, match="cannot be loaded"):
            kernel.load()
    finally:
        kernel.load.cache_clear()


def test_a_missing_compiler_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"CXX=no-such-compiler was not found\. Set CXX"):
        build(tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found. Install"):
        build(tmp_path)
