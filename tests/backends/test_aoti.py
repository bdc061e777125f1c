"""Bundles of AOTInductor on the CPU: exact, in place, growing, and refused where they do not fit.

test_transformers.py has their texts at temperature 0, with the same bundle.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, Workshop
from commands import CHECKOUT, command, environment, error_line, leftovers, run
from originals import check_batch, original_of

import engines.__main__
from engines import aotinductor as aotinductor_backend
from engines.bundle import build
from export import compare, program
from runtime import Options, load
from runtime.backends import host as host_engine
from runtime.backends.aotinductor import AotiEngine
from runtime.certificate import check
from runtime.files.errors import EXIT_STATUS, OutriderError, run_command
from runtime.files.manifest import MANIFEST_FILE, PACKAGE_FILE, read_bundle, read_pair
from runtime.files.records import digest_json
from runtime.files.torch_files import PROGRAM_FILE, WEIGHTS_FILE, cpu_targets, read_tensors


@pytest.fixture(scope="module")
def bundle(workshop: Workshop) -> Path:
    """Shared: not to be damaged."""
    return workshop.bundle(*workshop.compiled_parts(), backend="aotinductor")


@pytest.fixture(scope="module")
def graphs(workshop: Workshop) -> Path:
    """What it was built from."""
    return workshop.graphs(*workshop.compiled_parts(), form="torch")


# What crosses from export/ to engines/


def test_the_program_has_no_weights_and_no_traces_of_its_maker(
    workshop: Workshop, graphs: Path
) -> None:
    facts = read_pair(graphs).target
    assert (facts.format, facts.files.keys()) == ("torch", {PROGRAM_FILE, WEIGHTS_FILE})
    assert facts.max_difference is not None
    content = (graphs / "target" / PROGRAM_FILE).read_bytes()
    source = workshop.compiled_parts()[0]
    for trace in (CHECKOUT, source.parent, sys.prefix, "site-packages", ".py"):
        assert str(trace).encode() not in content
    tensors = read_tensors(graphs / "target" / WEIGHTS_FILE)
    weight = tensors["decoder.model.model.layers.1.self_attn.k_proj.weight"]
    assert weight.data_ptr() % 64 == 0
    assert not any(weight.numpy().tobytes()[i : i + 64] in content for i in range(0, 4096, 64))


def test_tied_weights_are_stored_once(workshop: Workshop) -> None:
    tensors = read_tensors(
        workshop.graphs(*workshop.compiled_parts(), form="torch") / "draft" / WEIGHTS_FILE
    )
    embedding = tensors["decoder.model.model.embed_tokens.weight"]
    assert embedding.data_ptr() == tensors["decoder.model.lm_head.weight"].data_ptr()
    assert embedding.shape == (VOCAB_SIZE, 64)


def test_one_wrong_weight_is_seen(workshop: Workshop, graphs: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(graphs / "target", tmp_path / "target"))
    original = compare.reference(original_of(workshop.compiled_parts()[0]).model, 137, VOCAB_SIZE)
    assert compare.compare(copy, original, "float32").passed
    content = bytearray((copy / WEIGHTS_FILE).read_bytes())
    middle = len(content) // 2 & ~3
    content[middle : middle + 4] = np.float32(3).tobytes()
    (copy / WEIGHTS_FILE).write_bytes(content)
    assert not compare.compare(copy, original, "float32").passed


def test_graphs_of_the_other_format_are_refused(
    workshop: Workshop, graphs: Path, tmp_path: Path
) -> None:
    for folder, backend, wants in (
        (workshop.graphs(workshop.checkpoint("llama")), "aotinductor", "torch"),
        (graphs, "onnxruntime", "onnx"),
    ):
        with pytest.raises(OutriderError, match=f"with --format {wants}") as caught:
            build(folder, tmp_path / "out", backend=backend, slots=1)
        assert caught.value.kind == "backend"
    assert list(tmp_path.iterdir()) == []


# The bundle


def test_the_weights_are_the_graphs_and_the_engine_is_code(bundle: Path, graphs: Path) -> None:
    manifest = read_bundle(bundle)
    assert manifest.engines is not None
    for role in ("target", "draft"):
        assert {path.name for path in (bundle / role).iterdir()} == {PACKAGE_FILE, WEIGHTS_FILE}
        weights = (graphs / role / WEIGHTS_FILE).read_bytes()
        assert (bundle / role / WEIGHTS_FILE).read_bytes() == weights
        assert weights[-4096:] not in (bundle / role / PACKAGE_FILE).read_bytes()
        assert manifest.engines[role].targets == cpu_targets()
    assert manifest.versions == {"torch": torch.__version__}
    assert not build(graphs, bundle, backend="aotinductor", slots=1)  # nothing changed


def test_it_runs_without_compiler_and_model_libraries(bundle: Path) -> None:
    script = (
        "import json, sys, runtime\n"
        "lazy = 'torch' not in sys.modules\n"
        "runtime.load(sys.argv[1]).generate([5, 6, 7], max_new_tokens=8)\n"
        "heavy = {'torch._inductor', 'transformers', 'onnx', 'onnxruntime', 'export', 'engines'}\n"
        "print(json.dumps([lazy, sorted(heavy & set(sys.modules))]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(bundle)],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(ran.stdout) == [True, []]


@pytest.mark.parametrize(
    "options",
    [
        Options(max_new_tokens=60, gamma=4, ignore_eos=True),
        Options(max_new_tokens=60, gamma=4, temperature=1.0, seed=5),
        Options(max_new_tokens=60, gamma=3, temperature=0.7, top_p=0.9, verify="block", seed=6),
    ],
)
def test_the_certificate(bundle: Path, options: Options) -> None:
    certificate = check(load(bundle, slots=2, threads=1), [5, 6, 7], options)
    assert certificate.passed, certificate.lines()


def test_control_the_certificate_sees_a_lost_row(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(bundle, threads=1)
    target = engine.decoder.target
    forward = target.forward

    def forgetful(ids, position, index, *more, **options):  # type: ignore[no-untyped-def]
        logits = forward(ids, position, index, *more, **options)
        if ids.shape[1] > 1:  # a verification, or the prompt: its first row is lost
            target._cache["key_1"][0, :, int(position[0])] = 0  # type: ignore[attr-defined]
        return logits

    monkeypatch.setattr(target, "forward", forgetful)
    options = Options(max_new_tokens=60, gamma=4, ignore_eos=True)
    assert not check(engine, [5, 6, 7], options).passed


def test_slots_grow_and_nobody_sees_it(
    workshop: Workshop, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_engine, "FIRST_ROWS", 16)
    engine = load(bundle, slots=3, threads=1)
    target = engine.decoder.target
    assert isinstance(target, AotiEngine)
    seen = []
    reserve = target._reserve
    monkeypatch.setattr(target, "_reserve", lambda *a: (reserve(*a), seen.append(target.rows)))
    check_batch(engine, original_of(workshop.compiled_parts()[0]), (4, 2, 8))
    assert list(dict.fromkeys(seen)) == [16, 32, 64, 128]


def test_buffers_are_views_that_stay(bundle: Path) -> None:
    """Logits of consecutive calls lie evenly spaced, and one call leaves the others' alone."""
    draft = load(bundle, slots=2, threads=1).decoder.draft
    assert draft is not None
    ids = np.arange(6).reshape(2, 3)
    views = [draft.forward(ids + i, np.zeros(2, np.int64), [2], buffer=i) for i in range(3)]
    kept = [view.copy() for view in views]
    draft.forward(ids + 9, np.zeros(2, np.int64), [2], buffer=3)
    assert all((view == copy).all() for view, copy in zip(views, kept, strict=True))
    addresses = [view.ctypes.data for view in views]
    assert addresses[1] - addresses[0] == addresses[2] - addresses[1] > 0


def test_threads_are_those_asked_for_and_given_back(bundle: Path) -> None:
    before = torch.get_num_threads()
    seen = []

    class Spy:
        def __init__(self, loader: object):
            self.loader = loader

        def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            seen.append(torch.get_num_threads())
            return self.loader.run(inputs)  # type: ignore[attr-defined,no-any-return]

    for threads in (before + 1, 0):
        engine = load(bundle, threads=threads)
        for model in (engine.decoder.target, engine.decoder.draft):
            model._loader = Spy(model._loader)  # type: ignore[union-attr]
        engine.generate([5, 6, 7], max_new_tokens=4)
        assert set(seen) == {threads or before}
        assert torch.get_num_threads() == before
        seen.clear()


@pytest.mark.parametrize("how", ["same", "sealed"])
def test_the_cache_is_updated_in_place(bundle: Path, how: str) -> None:
    """See protected_cache.py: a step writes its own row of the cache and no other page."""
    script = [
        sys.executable,
        str(CHECKOUT / "tests" / "standins" / "protected_cache.py"),
        str(bundle),
        how,
    ]
    process = subprocess.run(script, env=environment(), capture_output=True, text=True)
    if how == "sealed":
        assert process.returncode == -signal.SIGSEGV, process.stderr
        return
    assert process.returncode == 0, process.stderr
    said = json.loads(process.stdout)
    assert said["growth"] < said["steps"] * said["cache"] / 10


# Refused when it is opened


def _edit(folder: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    content = json.loads((folder / MANIFEST_FILE).read_text())
    change(content["facts"])
    content.pop("checksum")
    content["checksum"] = digest_json(content)
    (folder / MANIFEST_FILE).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda f: f["versions"].update(torch="2.12.1"), "was built with torch 2.12.1"),
        (lambda f: f["engines"]["draft"]["targets"].append("avx1024"), "with avx1024, which"),
        (lambda f: f["engines"]["target"]["targets"].append("sve9"), "with sve9, which"),
    ],
)
def test_a_bundle_of_another_torch_or_processor(
    bundle: Path,
    tmp_path: Path,
    change: Callable[[dict], None],
    cause: str,  # type: ignore[type-arg]
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    _edit(copy, change)
    with pytest.raises(OutriderError, match=r"make engines MODEL=.* BACKEND=aotinductor") as caught:
        load(copy)
    assert caught.value.kind == "backend"
    assert cause in caught.value.cause


def test_without_torch(bundle: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from runtime import generate\n"
        f"sys.exit(generate.main(['--engines', {str(bundle)!r}, '--prompt', 'x']))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert ran.returncode == EXIT_STATUS["backend"]
    assert "PyTorch is not installed" in error_line(ran.stderr, "backend")
    assert f"pip install torch=={torch.__version__.partition('+')[0]}," in ran.stderr


def test_a_package_that_is_none(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    size = (copy / "target" / PACKAGE_FILE).stat().st_size
    (copy / "target" / PACKAGE_FILE).write_bytes(bytes(size))
    with pytest.raises(OutriderError, match="cannot load") as caught:
        load(copy, verify=False)
    assert caught.value.kind == "backend"
    assert "\n" not in str(caught.value)


# Building


def test_gpus_and_missing_compilers_are_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OutriderError, match="for this CPU") as caught:
        aotinductor_backend.targets("89", "float32")
    assert caught.value.kind == "option"
    monkeypatch.setenv("CXX", "no-such-compiler")
    asked = ["--backend", "aotinductor", "--supports", "float32"]
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):  # CXX, when it starts
        assert engines.__main__.main(asked) == EXIT_STATUS["backend"]
    assert "there is no no-such-compiler" in error_line(capsys.readouterr().err, "backend")


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (KeyboardInterrupt(), 130),
        (RuntimeError("g++: fatal error: a.o: No space left on device"), EXIT_STATUS["disk"]),
        (RuntimeError("LoweringException: no such operator\nand more"), EXIT_STATUS["backend"]),
    ],
)
def test_a_compile_that_ends_early_leaves_nothing(
    graphs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: BaseException,
    status: int,
) -> None:
    import torch._inductor

    def compile(*_: object, package_path: str, **__: object) -> None:
        Path(package_path).write_bytes(b"half")
        raise failure

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile)

    def work() -> int:
        build(graphs, tmp_path / "out", backend="aotinductor", slots=1)
        return 0

    assert run_command(work) == status
    assert "Traceback" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", "full disk"])
def test_a_process_that_ends_early_leaves_nothing(graphs: Path, tmp_path: Path, how: str) -> None:
    arguments = ("engines", "--graphs", graphs, "--out", tmp_path / "out")
    if how == "full disk":
        failed = run(*arguments, "--backend", "aotinductor", largest_file=65536)
        assert failed.returncode == EXIT_STATUS["disk"], failed.stderr
        error_line(failed.stderr, "disk")
    else:
        process = subprocess.Popen(
            command(*arguments, "--backend", "aotinductor"),
            cwd=CHECKOUT, env=environment(), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        while not list(tmp_path.rglob("*.cpp")):  # the compiler's turn has come
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        # Python itself ends by the signal, 130 to a shell too, where an exec() was interrupted.
        assert process.wait(60) in (130, -signal.SIGINT), said
        assert said.endswith("interrupted\n") and "Traceback" not in said
    assert leftovers(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(workshop: Workshop, dtype: str) -> None:
    """The compiled model is as far from the original as the comparison of the export allows."""
    source = workshop.checkpoint("qwen2")
    folder = workshop.bundle(source, backend="aotinductor", dtype=dtype)
    facts = read_bundle(folder).pair.target
    assert facts.max_difference is not None and 0 < facts.max_difference <= facts.tolerance
    engine = AotiEngine(folder / "target", facts, slots=1, widest=1, threads=1)
    ids = np.random.default_rng(5).integers(0, VOCAB_SIZE, (1, 40))
    with torch.no_grad():
        expected = original_of(source).model(torch.from_numpy(ids)).logits.numpy()
    for i in range(40):
        logits = engine.forward(ids[:, i : i + 1], np.array([i]), np.array([0]))
        assert np.abs(logits[0, 0] - expected[0, i]).max() < facts.tolerance
    result = load(folder).generate([5, 6, 7], max_new_tokens=8, ignore_eos=True)
    assert len(result.token_ids) == 8


def test_the_program_takes_every_size(workshop: Workshop, graphs: Path) -> None:
    """B, N, K and S are open, one of each included, which torch.export likes to make constants."""
    assert read_pair(graphs).capacity > program._EXAMPLE_ROWS
    module = compare._Program(graphs / "target", 19)
    assert module(np.array([[5], [6]]), [18, 0]).shape == (2, 1, VOCAB_SIZE)
