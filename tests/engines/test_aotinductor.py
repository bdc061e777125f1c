"""AOTInductor's builds: the target processor, what is compiled, and builds that end early."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import ARCHITECTURES, NO_GRAPH, RECURRENT, VOCAB_SIZE, WITH_ENCODER
from commands import error_line, limited_files, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from workshop import Workshop

import engines.__main__
from engines import gpus
from engines.aotinductor import absent_gpu, builder, cpp_compiler
from engines.aotinductor import program as gpu_program
from engines.aotinductor.cpp_compiler import find_cpp_compiler
from engines.bundle import build
from runtime.backends.aotinductor import AotiEngine
from runtime.files.errors import EXIT_STATUS, OutriderError, run_command
from runtime.files.graphs import read_pair
from runtime.files.manifest import PACKAGE_FILE, EngineFacts
from runtime.files.torch_files import (
    JOINED,
    WEIGHTS_FILE,
    cpu_targets,
    read_program,
    read_tensors,
)

NEEDS_TRITON = "kernels for GPUs are written in Triton: pip install -e '.[aotinductor]'"
Machine = Callable[[tuple[int, int] | None], None]


@pytest.fixture(scope="module")
def graphs(workshop: Workshop) -> Path:
    """Shared: tests must not modify it."""
    return workshop.graphs(*workshop.pair("aotinductor"), form="torch")


# For which processor


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend that this machine has a GPU of that capability, and the tools to compile for one."""

    def make(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(builder, "find_spec", lambda name: "found")
        monkeypatch.setattr(builder, "cuda_toolkit", lambda named: "/cuda")

    return make


@pytest.mark.parametrize(
    ("capability", "sm", "dtype", "expected"),
    [
        ((9, 0), "", "bfloat16", "sm90"),
        ((9, 0), "120", "float32", "sm120"),
        (None, "90", "bfloat16", "sm90"),
        ((7, 5), "", "float16", "sm75"),
        ((7, 5), "cpu", "bfloat16", None),
        (None, "", "float32", None),
        (None, "cpu", "float32", None),
    ],
)
def test_it_builds_for_the_gpu_that_is_named_or_there(
    machine: Machine, capability: tuple[int, int] | None, sm: str, dtype: str, expected: str | None
) -> None:
    machine(capability)
    assert builder.targets(sm, dtype) == ([expected] if expected else cpu_targets())


@pytest.mark.parametrize(
    ("capability", "sm", "dtype", "cause"),
    [
        ((9, 0), "90,89", "float16", "one GPU or the CPU, not for SM=90,89"),
        (None, "x", "float16", "not for SM=x"),
        ((7, 0), "", "float16", "not for SM=70"),
        ((7, 5), "", "bfloat16", r"compute capability 7.5 do not support bfloat16"),
        (None, "75", "bfloat16", r"compute capability 7.5 do not support bfloat16"),
    ],
)
def test_other_gpus_are_refused(
    machine: Machine, capability: tuple[int, int] | None, sm: str, dtype: str, cause: str
) -> None:
    machine(capability)
    with pytest.raises(OutriderError, match=f"^option: .*{cause}"):
        builder.targets(sm, dtype)


@pytest.mark.parametrize(
    ("name", "what"), [("find_spec", "Triton"), ("cuda_toolkit", "the CUDA headers")]
)
def test_what_compiles_for_a_gpu_is_missing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    machine((9, 0))
    monkeypatch.setattr(builder, name, lambda asked: None)
    with pytest.raises(OutriderError, match=f"^backend: .*AOTInductor needs {what}.*SM=cpu"):
        builder.targets("", "float16")
    assert builder.targets("cpu", "float16") == cpu_targets()


def test_triton_that_only_interprets(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(OutriderError, match=r"^option: TRITON_INTERPRET is set"):
        builder.targets("90", "float16")
    assert builder.targets("cpu", "float16") == cpu_targets()


def test_the_toolkit_is_one_whose_headers_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def toolkit(name: str, headers: Iterable[str]) -> str:
        for header in headers:
            path = tmp_path / name / "include" / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return str(tmp_path / name)

    first, *rest = gpus.HEADERS
    pieces, whole = toolkit("pieces", [first]), toolkit("whole", gpus.HEADERS)
    assert gpus.cuda_toolkit(whole) == whole
    moved = toolkit("13", [*gpus.HEADERS[:-1], f"{gpus.CCCL}/{gpus.HEADERS[-1]}"])
    assert gpus.cuda_toolkit(moved) == moved
    nvcc = tmp_path / "bin" / "nvcc"  # a script, not inside a toolkit
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho '#$ _HERE_=x' >&2\necho '#$ TOP={whole}/bin/..' >&2\n")
    nvcc.chmod(0o755)
    (tmp_path / "whole" / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{nvcc.parent}:/bin")
    assert gpus.cuda_toolkit(pieces) == whole
    # A toolkit assembled from PyPI packages.
    nvcc.unlink()
    packages = toolkit("nvidia/cu13", rest)
    monkeypatch.setattr(gpus, "find_spec", lambda name: SimpleNamespace(
        submodule_search_locations=[str(tmp_path / "nvidia")]))  # fmt: skip
    without = gpus.cuda_toolkit(None)
    assert without != packages
    toolkit("nvidia/cu13", [first])
    assert gpus.cuda_toolkit(None) == (without or packages)


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for compilers. What was found before is forgotten."""
    find_cpp_compiler.cache_clear()
    monkeypatch.delenv("CXX", raising=False)
    yield tmp_path
    find_cpp_compiler.cache_clear()


def test_a_missing_compiler(
    compilers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    asked = ["--backend", "aotinductor", "--supports", "float32", "--sm", "cpu"]
    assert engines.__main__.main(asked) == EXIT_STATUS["backend"]
    assert "but no-such-compiler was not found" in error_line(capsys.readouterr().err, "backend")


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("#!/bin/sh\nshift 3\necho code > $2", "does not link the shared C++ standard library"),
        ("#!/bin/sh\necho '<regex>: fatal error: not found' >&2; exit 1",
         "cannot compile a library (<regex>: fatal error: not found)"),
        ("#!/bin/sh\nexit 0", "cannot compile a library (no message)"),
        ("#!/no/such/shell", "cannot be run (No such file or directory)"),
    ],
)  # fmt: skip
def test_a_compiler_that_torch_cannot_use(
    compilers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    script: str, cause: str,
) -> None:  # fmt: skip
    """It is passed over with a notice, and refused if there is no other."""
    own = compilers / "own"
    own.write_text(f"{script}\n")
    own.chmod(0o755)
    monkeypatch.setenv("CXX", str(own))
    real = cpp_compiler._find_defect  # of g++ it takes seconds, see below
    monkeypatch.setattr(cpp_compiler, "_find_defect", lambda x: None if x == "g++" else real(x))
    assert find_cpp_compiler() == "g++"
    assert capsys.readouterr().err.partition(", without")[0].startswith(f"{own} {cause}")
    find_cpp_compiler.cache_clear()
    monkeypatch.setattr(cpp_compiler.shutil, "which", lambda name: name == str(own))
    with pytest.raises(OutriderError, match=re.escape(f"{own} {cause}")):
        find_cpp_compiler()


def test_the_usual_compiler(compilers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_cpp_compiler() == "g++" and not capsys.readouterr().err


# What is compiled


def repeated_caches(program: torch.export.ExportedProgram, heads: int) -> list[torch.Tensor]:
    """Copies of keys or values for all query heads, [B, H, S, D], after torch's operators have been
    decomposed."""
    (_, _, _, (key, *_), _), _ = program.example_inputs
    with sdpa_kernel(SDPBackend.MATH):
        program = program.run_decompositions()
    nodes = (torch.utils._pytree.tree_leaves(n.meta.get("val")) for n in program.graph.nodes)
    values = [value for found in nodes for value in found if isinstance(value, torch.Tensor)]
    alike = [value for value in values if value.dim() == 4]
    return [value for value in alike if value.shape[1:] == (heads, *key.shape[2:])]


@pytest.fixture
def compiled(graphs: Path, tmp_path: Path) -> Callable[[str], EngineFacts]:
    """Compiles the target for a processor, into the test's folder."""

    def make(target: str) -> EngineFacts:
        to = EngineFacts("key", PACKAGE_FILE, [target], [], WEIGHTS_FILE)
        facts = read_pair(graphs).target
        assert builder.compile("target", graphs / "target", tmp_path, facts, to) == to
        return to

    return make


@pytest.mark.parametrize("target", ["sm90", "cpu"])
def test_what_is_compiled(
    graphs: Path, compiled: Callable[[str], EngineFacts], monkeypatch: pytest.MonkeyPatch,
    target: str,
) -> None:  # fmt: skip
    on_gpu = target == "sm90"
    if on_gpu:
        pytest.importorskip("triton", reason=NEEDS_TRITON)
    seen: dict[str, Any] = {}

    def compile(program: Any, *, package_path: str, inductor_configs: dict[str, Any]) -> None:
        (_, _, _, (key, *_), _), _ = program.example_inputs
        everything = [*program.state_dict.values(), *program.constants.values()]
        everything += torch.utils._pytree.tree_leaves(program.example_inputs)
        for node in program.graph.nodes:
            everything += torch.utils._pytree.tree_leaves(node.meta.get("val"))
        tensors = [each for each in everything if isinstance(each, torch.Tensor)]
        stubs = os.environ["LIBRARY_PATH"].partition(os.pathsep)[0]
        seen.update(
            devices={tensor.device.type for tensor in tensors}, rows=key.shape[2],
            config=inductor_configs, capability=torch.cuda.is_available()
            and torch.cuda.get_device_capability(),
            kernels=[str(node.target) for node in program.graph.nodes].count(
                "outrider.attention.default"
            ),
            stubs=sorted(os.listdir(stubs)) if on_gpu else None,
            toolkit=torch.utils.cpp_extension.CUDA_HOME, headers=os.environ.get("CPATH"),
        )  # fmt: skip
        Path(package_path).write_bytes(b"code")

    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/above/nvcc")
    monkeypatch.setattr(builder, "cuda_toolkit", {"/above/nvcc": "/cuda"}.get)
    monkeypatch.setenv("LIBRARY_PATH", "/before")
    monkeypatch.delenv("CPATH", raising=False)
    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", compile)
    compiled(target)
    facts, config = read_pair(graphs).target, seen.pop("config")
    assert config.pop("cpp.cxx") == (None, find_cpp_compiler())
    metadata = config.pop("aot_inductor.metadata", {})
    expected = builder.CONFIG | (builder.GPU_CONFIG if on_gpu else {})
    assert config == expected and set(metadata) == ({JOINED} if on_gpu else set())
    assert seen == {
        "devices": {"cuda" if on_gpu else "cpu"},
        "capability": (9, 0) if on_gpu else False,
        "kernels": len(facts.key_shapes) if on_gpu else 0,
        "rows": facts.capacity if on_gpu else 16,
        "stubs": ["libcuda.so", "libtorch_cuda.so"] if on_gpu else None,
        "toolkit": "/cuda" if on_gpu else "/above/nvcc",
        "headers": "/cuda/include/cccl" if on_gpu else None,
    }  # fmt: skip
    # Everything is as before.
    assert os.environ["LIBRARY_PATH"] == "/before" and "CPATH" not in os.environ
    assert torch.utils.cpp_extension.CUDA_HOME == "/above/nvcc"
    assert not torch.cuda.is_available()


@pytest.mark.slow
def test_a_package_for_a_gpu_that_is_not_there(
    graphs: Path, compiled: Callable[[str], EngineFacts], tmp_path: Path
) -> None:
    """Its machine code is for that GPU, it asks for the driver and for torch's library, and it
    reads no weights but those of the file."""
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    if not gpus.cuda_toolkit(None):
        pytest.skip("no CUDA headers: pip install -e '.[aotinductor]'")
    with zipfile.ZipFile(tmp_path / compiled("sm90").file) as package:
        package.extractall(tmp_path / "package")
    kernels = [path.read_bytes() for path in tmp_path.rglob("*.cubin")]
    assert len(kernels) > 8
    assert all(b".target sm_90" in code for code in kernels)
    (library,) = tmp_path.rglob("*.so")
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    assert "[libcuda.so.1]" in needed and "[libtorch_cuda.so]" in needed
    (source,) = tmp_path.rglob("*.wrapper.cpp")
    named = re.findall(r'constants_info_\[\d+\]\.original_fqn = "(.*)"', source.read_text())
    metadata = json.loads(source.with_name(source.stem + "_metadata.json").read_text())
    joined = json.loads(metadata[JOINED])
    assert set(named) <= {*read_tensors(graphs / "target" / WEIGHTS_FILE), *joined}
    assert set(joined) <= set(named)


def test_an_older_torch_compiles_for_a_gpu_and_for_no_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "torch._inductor.list_options",
        lambda: ["cpp.dynamic_threads", *builder.GPU_CONFIG, "x"],
    )
    assert builder._compile_options(gpu=True) == {
        "cpp.dynamic_threads": True,
        **builder.GPU_CONFIG,
    }
    assert builder._compile_options(gpu=False) == builder.CONFIG


def test_matrices_of_one_vector_are_one_matrix() -> None:
    """Weights of linear layers that read the same input are joined, unless something else reads
    them too; a matrix that is no parameter and a vector stay as they are."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"q": 8, "k": 2, "v": 2, "gate": 6, "up": 6, "tied": 4, "alone": 4}
            biased = {"q", "k", "v"}
            for name, size in sizes.items():
                setattr(self, name, torch.nn.Linear(4, size, bias=name in biased))
            self.requires_grad_(False)
            self.made, self.vector = torch.randn(4, 4), torch.nn.Parameter(torch.randn(4), False)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            first = [layer(x) for layer in (self.q, self.gate, self.k, self.tied, self.v, self.up)]
            others = [torch.nn.functional.linear(x, matrix) for matrix in (self.made, self.vector)]
            return [*first, *others, self.alone(x + 1), self.tied.weight * 2]

    x = torch.randn(3, 4)
    program = torch.export.export(Model(), (x,))
    module = program.module()
    assert isinstance(module, torch.fx.GraphModule)
    expected = module(x)
    gate = weakref.ref(program.state_dict["gate.weight"])
    joined = gpu_program._join_matrices(module, program.state_dict)
    module.recompile()
    gc.collect()  # the class above is part of a reference cycle
    assert gate() is None, "nothing refers to it any more"
    assert [*joined.values()] == [
        ["q.weight", "k.weight", "v.weight"], ["q.bias", "k.bias", "v.bias"],
        ["gate.weight", "up.weight"],
    ]  # fmt: skip
    assert {*module.state_dict()} == {*joined, "tied.weight", "alone.weight", "vector"}
    torch.testing.assert_close(module(x), expected)
    linear = torch.ops.aten.linear.default
    assert len(module.graph.find_nodes(op="call_function", target=linear)) == 6


def test_angles_are_no_matrix_product() -> None:
    class Angles(torch.nn.Module):
        def forward(self, inverse: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            angles = inverse[None, :, None].expand(positions.shape[0], -1, 1) @ positions[:, None]
            return angles @ angles.transpose(1, 2)

    given = torch.rand(8), torch.rand(2, 3)
    sizes = (None, {0: torch.export.Dim("slots"), 1: torch.export.Dim("tokens")})
    module = torch.export.export(Angles(), given, dynamic_shapes=sizes).module()
    assert isinstance(module, torch.fx.GraphModule)
    expected = module(*given)
    gpu_program._replace_outer_products(module.graph)
    module.recompile()
    left = module.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    assert len(left) == 1, "only the one that sums remains"
    torch.testing.assert_close(module(*given), expected)


@pytest.mark.parametrize("scale", [64**-0.5, 1.0])
def test_products_that_float16_cannot_hold(scale: float) -> None:
    """Fault: if they are scaled only after the product they overflow, and the result is NaN."""
    queries, keys = torch.full((1, 4, 3, 64), 40.0).half(), torch.full((1, 2, 8, 64), 40.0).half()
    assert (queries[0, 0] @ keys[0, 0].T).isinf().all(), "control"
    values, seen = torch.randn(1, 2, 8, 64).half(), torch.ones(1, 1, 3, 8, dtype=torch.bool)
    found = gpu_program._products(queries, keys, values, seen, scale)
    expected = values.float().mean(2, keepdim=True).repeat_interleave(2, 1).expand(1, 4, 3, 64)
    torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=0)


@pytest.mark.slow
def test_a_gpu_copies_no_cache(graphs: Path) -> None:
    facts, heads = read_pair(graphs).target, 4
    assert facts.key_shapes[0][0] < heads
    fitted, _ = gpu_program.adapt_to_gpu(read_program(graphs / "target"), facts.capacity)
    assert not repeated_caches(fitted, heads)
    sizes = {size for tensor in fitted.example_inputs[0][3] for size in tensor.shape}
    assert facts.capacity in sizes and all(
        node.meta["val"].shape[2] == facts.capacity
        for node in fitted.graph.nodes
        if node.op == "placeholder" and node.meta["val"].dim() == 4
    )
    # Control: torch's own attention does copy them.
    assert repeated_caches(read_program(graphs / "target"), heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted({*ARCHITECTURES} - {*NO_GRAPH, *RECURRENT, *WITH_ENCODER, "whisper"})
)
def test_every_architecture_computes_the_same_on_a_gpu(workshop: Workshop, name: str) -> None:
    """For a prompt and the next four tokens."""
    graphs = workshop.graphs(workshop.example(name), form="torch")
    capacity = read_pair(graphs).target.capacity
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, VOCAB_SIZE, (1, 20)))

    def logits(program: torch.export.ExportedProgram) -> torch.Tensor:
        (_, _, _, *sides), _ = program.example_inputs
        caches = [[x.new_zeros(1, x.shape[1], capacity, x.shape[3]) for x in s] for s in sides]
        module = program.module()
        with torch.no_grad():
            module(ids[:, :16], torch.tensor([0]), torch.tensor([15]), *caches)
            answer: torch.Tensor = module(ids[:, 16:], torch.tensor([16]), torch.arange(4), *caches)
        return answer

    fitted, _ = gpu_program.adapt_to_gpu(read_program(graphs / "target"), capacity)
    expected = logits(read_program(graphs / "target"))
    torch.testing.assert_close(logits(fitted), expected, atol=1e-4, rtol=1e-4)
    if find_spec("triton"):  # its weights are found, and nothing needs a GPU
        with absent_gpu.pretend(90):
            builder._move_to_gpu(read_program(graphs / "target"), capacity)


@pytest.mark.slow
def test_attention_of_every_size_is_the_same_attention(
    workshop: Workshop, graphs: Path, compiled: Callable[[str], EngineFacts], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Everything that differs in a build for a GPU, except for the device."""
    monkeypatch.setattr(builder, "_for_gpu", lambda capability, out: nullcontext())
    monkeypatch.setattr(builder, "_move_to_gpu", gpu_program.adapt_to_gpu)
    facts = read_pair(graphs).target
    (tmp_path / WEIGHTS_FILE).hardlink_to(graphs / "target" / WEIGHTS_FILE)
    compiled("sm90")
    usual = workshop.bundle(*workshop.pair("aotinductor"), backend="aotinductor") / "target"
    tokens = np.random.default_rng(2).integers(0, VOCAB_SIZE, (1, 33))
    found, expected = (
        AotiEngine(folder, facts, slots=1, max_outputs=1, threads=1).forward(
            tokens, np.zeros(1, np.int64), np.array([32])
        )
        for folder in (tmp_path, usual)
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert (found != expected).any(), "control: another kernel"


# A build that ends early leaves nothing behind


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (KeyboardInterrupt(), 130),
        (RuntimeError("g++: fatal error: a.o: No space left on device"), EXIT_STATUS["disk"]),
        (RuntimeError("LoweringException: no such operator\nand more"), EXIT_STATUS["backend"]),
    ],
)
def test_a_compile_that_ends_early(
    graphs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: BaseException,
    status: int,
) -> None:
    def compile(*_: object, package_path: str, **__: object) -> None:
        Path(package_path).write_bytes(b"half")
        raise failure

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile)

    def work() -> int:
        build(graphs, tmp_path / "out", backend="aotinductor", slots=1, sm="cpu")
        return 0

    assert run_command(work) == status
    assert "Traceback" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_torch_would_split(
    graphs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "with space" / "out"
    assert run_command(lambda: build(graphs, out, backend="aotinductor", slots=1, sm="cpu")) != 0
    assert "whose path has a space" in error_line(capsys.readouterr().err, "option")
    assert not out.exists()


@pytest.mark.slow
def test_a_full_disk(graphs: Path, tmp_path: Path) -> None:
    """As reported by its compilers."""
    out = ("--out", tmp_path / "out", "--backend", "aotinductor", "--sm", "cpu")
    with limited_files(65536):
        failed = run("engines", "--graphs", graphs, *out)
    assert failed.returncode == EXIT_STATUS["disk"], failed.stderr
    error_line(failed.stderr, "disk")
    assert list(tmp_path.iterdir()) == []
