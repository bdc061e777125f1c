"""The CUDA kernels without a GPU: emulated on the host, and compiled for every architecture.

The emulation runs plugins/outrider_cuda.cu itself, its threads as coroutines: it shows that the
logic is right. NVRTC (from PyPI, no toolkit, no driver) shows that it compiles; it is not a
dependency of this project, so that test is skipped where it is missing.
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from test_kernel import LIBRARIES, OPTIONS, Case, by_library, cpu_library

from plugins.build import HERE, BuildError, build_emulated
from runtime import kernel
from runtime.errors import OutriderError
from runtime.kernel import Place, RoundSampler
from runtime.warping import SamplingParams

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@cache
def emulated():
    """The CPU library, whose `outrider_verify` is the emulated kernels'."""
    try:
        library = kernel.load(build_emulated(Path(LIBRARIES)))
    except BuildError as error:
        pytest.skip(f"cannot be built here: {error}")
    verify = library.outrider_emulate_verify
    verify.restype, verify.argtypes = kernel._SIGNATURES["outrider_verify"]
    library.outrider_verify = verify
    return library


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["plain", "cool", "greedy", "lenient", "greedy-lenient", "sigmoid"]
)
@pytest.mark.parametrize("vocab_size", [8, 127, 1024, 2500])
def test_the_kernels_give_what_the_cpu_gives(vocab_size, name, dtype):
    for gamma in (0, 1, 4):
        case = Case(20, vocab_size, gamma, slots=3, dtype=dtype)
        places = [Place(SamplingParams(**OPTIONS[name], seed=b), gamma, 5 * b, b) for b in range(3)]
        assert by_library(emulated(), case, places) == by_library(cpu_library(), case, places)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows(temperature):
    params = SamplingParams(temperature=temperature)
    good, nothing = [0.0, 1.0, 2.0], [-math.inf] * 3
    for row, cause in (([0, math.nan, 1], "NaN"), ([0, math.inf, 1], "NaN"), (nothing, "-inf")):
        sampler = RoundSampler(3, 1, library=emulated())
        sampler.begin([Place(params, 1, 17, name="slot 3")])
        sampler.draw(np.array([good], np.float32), 0)
        with pytest.raises(OutriderError, match=f"target, slot 3, position 17: .*{cause}"):
            sampler.verify(np.array([[row, good]], np.float32))
    # -inf beside numbers is not broken, at temperature 0 either
    sampler = RoundSampler(3, 0, library=emulated())
    sampler.begin([Place(params, 0, 0)])
    rows = np.array([[[-math.inf, 3.0, -math.inf]]], np.float32)
    assert sampler.verify(rows)[0].token == 1


def test_what_is_missing_is_refused_not_wrong():
    for options in (OPTIONS["block"], OPTIONS["top-k"], OPTIONS["top-p"], OPTIONS["min-p"]):
        sampler = RoundSampler(3, 0, library=emulated())
        sampler.begin([Place(SamplingParams(**options), 0, 0)])
        with pytest.raises(OutriderError, match="parameter"):
            sampler.verify(np.zeros((1, 1, 3), np.float32))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_for(architecture):
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    source = (HERE / "outrider_cuda.cu").read_bytes()
    _, program = nvrtc.nvrtcCreateProgram(source, b"outrider_cuda.cu", 0, [], [])
    options = [
        f"--gpu-architecture={architecture}", "--fmad=false", "--std=c++17", f"-I{HERE}",
        "--ptxas-options=-v",
    ]  # fmt: skip
    encoded = [option.encode() for option in options]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.decode()
    assert int(error) == 0, text
    spilt = [int(size) for size in re.findall(r"(\d+) bytes spill stores", text)]
    assert len(spilt) == 4 and max(spilt) <= 16, text
