"""The TensorRT plugin without TensorRT's libraries and without a GPU.

It is built against the real headers if TENSORRT_ROOT is set, otherwise against a stand-in's, and
then driven as TensorRT drives it, with a driver that records launches and runs them on the host.
This does not show that an engine builds, that the sampling kernels run, or how fast they are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from commands import TENSORRT
from plugin_child import drive
from rounds import cases
from samplers import LIBRARIES, Case
from test_sampling_node import OPTIONS, answers, feed, places_of, verifier

from plugins.tools import build_tensorrt
from plugins.tools.build import (
    FLAGS,
    PLUGINS_FOLDER,
    WARNINGS,
    BuildError,
    build_emulated,
    find_compiler,
    include_options,
)
from runtime.sampling.warp import SamplingParams

TESTS = Path(__file__).parents[1] / "standins"
ENTRY_POINTS = ["getCreators", "setLoggerFinder"]


# --- without headers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (None, "TENSORRT_ROOT is not set. Run make plugin TENSORRT_ROOT="),
        ("/nowhere", "TENSORRT_ROOT=/nowhere has no include/NvInferRuntime.h."),
    ],
)
def test_without_headers_it_says_what_to_do(root, message):
    run = subprocess.run(
        [sys.executable, "-m", "plugins.tools.build_tensorrt",
         *(["--tensorrt-root", root] if root else [])],
        cwd=PLUGINS_FOLDER.parent,
        env={k: v for k, v in os.environ.items() if k != "TENSORRT_ROOT"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 8 and run.stdout == ""
    assert run.stderr.startswith(f"error: backend: {message}") and run.stderr.count("\n") == 1


def test_without_cudas_headers_it_says_what_to_do(monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(Path, "is_file", lambda _: False)
    with pytest.raises(BuildError, match="pip install nvidia-cuda-runtime nvidia-cuda-crt"):
        build_tensorrt.cuda_headers()


def test_the_kernels_that_it_loads_are_there():
    source = (PLUGINS_FOLDER / "tensorrt" / "driver.cpp").read_text()
    kernels = re.findall(r'^    \{"(\w+)", "(\w+)"\},$', source, re.MULTILINE)
    assert len(kernels) == 4
    for module, name in kernels:
        text = build_tensorrt.MODULES[module].read_text()
        assert re.search(rf"(__global__ void|KERNEL\()[^;{{]*\b{name}\b", text), name


def test_the_small_kernels_compile(nvrtc):
    image, _ = nvrtc.compile(build_tensorrt.MODULES["outrider_tensorrt"], "sm_90")
    assert b"outrider_tensorrt_pack" in image and b"outrider_tensorrt_unpack" in image


# --- with headers -----------------------------------------------------------------------------


def images(path, *targets):
    return {(module, target): path for module in build_tensorrt.MODULES for target in targets}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The plugin, with dummy files that the fake driver accepts as cubins."""
    path = tmp_path_factory.mktemp("cubins") / "cubin"
    path.write_bytes(b"\x7fELF" + bytes(99))
    plugin = tmp_path_factory.mktemp("plugin")
    return build_tensorrt.build(TENSORRT, plugin, images(path, "sm_80", "sm_90", "compute_90"))


def test_nothing_but_the_entry_points_is_exported(library):
    def symbols(which):
        command = ["nm", "-D", f"--{which}-only", library]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert sorted(symbols("defined").split()[2::3]) == ENTRY_POINTS
    undefined = symbols("undefined")
    assert "nvinfer" not in undefined and " cu" not in undefined


def test_it_compiles_without_a_warning(library, tmp_path, capfd):
    build_tensorrt.build(TENSORRT, tmp_path, images(library, "sm_90"))
    assert capfd.readouterr().err == f"compile {build_tensorrt.PLUGIN} with {find_compiler()[0]}\n"


@pytest.fixture(scope="module")
def tools(library, tmp_path_factory):
    """Paths of the fake driver, the emulated kernels, the harness and the plugin."""
    folder = tmp_path_factory.mktemp("tools")
    public, cuda = build_tensorrt.tensorrt_headers(TENSORRT), build_tensorrt.cuda_headers()
    headers = [f"-isystem{public}", f"-isystem{cuda}", *include_options()]
    for name in ("driver_standin", "plugin_harness"):
        # The plugin loads the driver by this name, and gets the library already loaded.
        soname = ["-Wl,-soname,libcuda.so.1"] if name == "driver_standin" else []
        command = [*find_compiler(), *FLAGS, "-O1", *WARNINGS, "-shared", *soname, *headers]
        command += [f"{TESTS / name}.cpp", "-ldl", "-o", f"{folder / name}.so"]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0 and run.stderr == "", run.stderr
    kernels = build_emulated(Path(LIBRARIES))
    return folder / "driver_standin.so", kernels, folder / "plugin_harness.so", library


@pytest.fixture(scope="module")
def run_plugin(tools):
    """A function that runs cases and returns (answers, lines) for each: see plugin_child.py."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:

        def run(*cases, plugin=tools[3]):
            return process.submit(drive, *tools[:3], plugin, cases).result()

        yield run


def make_case(seed, vocab_size, gamma, slots, name="plain", dtype="float32"):
    """Return (inputs of the plugin, inputs of the graph's function)."""
    case = Case(seed, vocab_size, gamma, slots, dtype)
    places = places_of(case, SamplingParams(**OPTIONS[name]))
    drafts = np.random.default_rng(seed).integers(0, vocab_size, (slots, gamma))
    if gamma:
        likely = case.q.argmax(axis=2)
        drafts = np.where(np.arange(slots)[:, None] % 3 > 0, likely, drafts)
    sources = (case.p, case.q) if dtype == "bfloat16" else (case.target, case.draft)
    return feed(case.target, case.draft, drafts, places), feed(*sources, drafts, places)


def test_the_contract(run_plugin):
    ((_, lines),) = run_plugin(make_case(40, 127, 4, 3)[0])
    assert lines[0] == "1 PLUGIN CREATOR_V3ONE outrider::Verify 1"
    assert lines[1] == "types 3 1 1 1 1 1 1 1 1 1 1"  # number of types of each input and output
    assert lines[2] == "build 0 0 0"
    assert lines[3].startswith("workspace ") and int(lines[3].split()[1]) > 3 * 9 * 8
    assert lines[4:] == [
        "stored vocab_size 2147483647",
        "log: outrider::Verify: enqueue before attachToContext",
        "run 0 0",
        "load", "load",  # two modules
        "outrider_tensorrt_pack 1 1 1 128",
        "outrider_verify_scan 2 1 3 256",
        "outrider_verify_rest 1 1 3 256",
        "outrider_tensorrt_unpack 1 1 1 128",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", cases(["float32"], ["float16", "bfloat16"]))
def test_an_enqueue_gives_what_the_graphs_function_gives(run_plugin, dtype):
    cases = [
        make_case(41, vocab_size, gamma, slots, name, dtype)
        for name in OPTIONS
        for vocab_size, gamma, slots in ((8, 0, 1), (8, 2, 300), (127, 1, 3), (2500, 4, 5))
    ]
    accepted = 0
    got = run_plugin(*(inputs for inputs, _ in cases))
    for (_, function_inputs), (outcome, lines) in zip(cases, got, strict=True):
        assert outcome == answers(verifier(dtype), function_inputs)
        assert "run 0 0" in lines and not [
            line for line in lines if "odd" in line or "not 0" in line
        ]
        accepted += sum(n for n, *_ in outcome)
    assert accepted > 100


def test_widths_gammas_and_broken_slots(run_plugin):
    inputs, function_inputs = make_case(42, 64, 3, 8)
    for case in (inputs, function_inputs):
        case["target_logits"][0, 0, 5] = np.nan
        case["gamma"][1:6] = -1, 0, 4, -(2**40), 2**33
        case["lenience"][6], case["temperature"][7] = 0, np.nan
        case["seed"][1:] = -1
    narrow = {**inputs, "draft_logits": inputs["draft_logits"][..., :40]}
    wide = {**inputs, "target_logits": inputs["target_logits"][..., :40], "vocab_size": 33}
    got = run_plugin(inputs, narrow, wide)
    assert got[0][0] == answers(verifier(), function_inputs)
    assert [status for *_, status in got[0][0]] == [6, 0, 0, 2, 2, 2, 2, 2]
    assert got[1][0] == answers(
        verifier(), {**function_inputs, "draft_logits": narrow["draft_logits"]}
    )
    function_inputs["target_logits"] = wide["target_logits"]
    assert got[2][0] == answers(verifier(vocab_size=33), function_inputs)
    assert "stored vocab_size 33" in got[2][1]


def test_what_it_refuses(run_plugin):
    good = make_case(43, 16, 2, 2)[0]
    many = {
        name: np.zeros((2, rows, 8), np.float32)
        for name, rows in (("target_logits", 67), ("draft_logits", 66))
    }
    cases = {
        "rule must be": {**good, "rule": "block"},
        "vocab_size must be": {**good, "vocab_size": -1},
        "the largest logits are not": {**good, "draft_logits": good["draft_logits"][:, :1]},
        "the largest logits": {**good, **many},
    }
    for message, (outcome, lines) in zip(cases, run_plugin(*cases.values()), strict=True):
        assert any(line.startswith(f"log: outrider::Verify: {message}") for line in lines)
        assert set(sum(outcome, ())) == {99} and not any("outrider_" in line for line in lines)


def test_no_slots_are_nothing_to_do(run_plugin):
    no_slots = {name: array[:0] for name, array in make_case(44, 8, 2, 1)[0].items()}
    ((outcome, lines),) = run_plugin(no_slots)
    assert outcome == [] and "nothing to do" in lines and "run 0 0" in lines
    assert not any("outrider_" in line for line in lines)


def test_another_architecture_is_named(run_plugin, library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    others = images(library, "sm_80", "sm_100", "compute_100")
    other = build_tensorrt.build(TENSORRT, folder, others)
    ((_, lines),) = run_plugin(make_case(45, 8, 1, 1)[0], plugin=other)
    assert lines[-2:] == [
        "log: outrider::Verify: no kernels for sm_90 in this library", "not attached"
    ]  # fmt: skip
