"""Bundles for the checks and times on a GPU, built as `make engines` builds them.

A folder holds the checkpoints, what was exported of them, the bundle, what `check` holds it against
and built.json, which names all of these.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.files.folders import write_folder
from runtime.files.manifest import MANIFEST_FILE, read_bundle
from runtime.files.records import write_json

from . import constructed

CHECKOUT = Path(__file__).parents[1]
BUNDLED = CHECKOUT / "models"
PAIRS = ("bundled", *constructed.PRESETS)
FACTS_FILE = "built.json"
DTYPE = "bfloat16"


@dataclass
class Built:
    """Where things are. reference: the target and draft in float32 for ONNX Runtime on the CPU;
    same: the bundle's target as its own draft. None where they were not asked for."""

    name: str
    target: str
    draft: str
    bundle: str
    reference: str | None = None
    same: str | None = None
    failures: list[str] = field(default_factory=list)  # of the last two
    seconds: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path) -> Built:
        return Built(**json.loads((folder / FACTS_FILE).read_text()))

    def write(self, folder: Path) -> None:
        (folder / FACTS_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")


def build(
    pair: str, out: Path, device: str, *, delta: float = constructed.DELTA, checks: bool = False
) -> Built:
    """A bundle of AOTInductor in bfloat16. pair: one of `PAIRS`. device: "cuda" or "cpu". checks:
    also what `check` wants, for the bundled pair in any case."""
    out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    if pair == "bundled":
        # The reference shall compute with the same numbers, in float32.
        paths = [
            rounded(BUNDLED / role, out / "checkpoints" / role) for role in ("target", "draft")
        ]
        return build_from(
            pair, paths[0], paths[1], out, device, checks=True,
            seconds={"checkpoints": time.perf_counter() - begin},
        )  # fmt: skip
    preset = constructed.PRESETS[pair]
    target, draft = constructed.write_pair(preset, out / "checkpoints", delta=delta)
    return build_from(
        pair, target, draft, out, device, max_len=preset.max_len, checks=checks,
        seconds={"checkpoints": time.perf_counter() - begin},
    )  # fmt: skip


def build_from(
    name: str,
    target: Path,
    draft: Path,
    out: Path,
    device: str,
    *,
    max_len: int | None = None,
    checks: bool = False,
    seconds: dict[str, float] | None = None,
) -> Built:
    """The same, of two checkpoints."""
    (out / FACTS_FILE).unlink(missing_ok=True)
    built = Built(name, str(target), str(draft), str(out / "bundle"), seconds=dict(seconds or {}))
    common: list[Any] = ["--model", target, "--draft", draft, "--cache", out / "cache"]
    common += ["--max-len", max_len] if max_len else []
    _run(
        "export",
        ["export", *common, "--dtype", DTYPE, "--format", "torch", "--out", out / "graphs"],
        built,
    )
    _run(
        "engines",
        ["engines", "--graphs", out / "graphs", "--out", built.bundle, "--backend", "aotinductor",
         "--sm", "cpu" if device == "cpu" else ""],
        built,
    )  # fmt: skip
    built.write(out)
    if checks:
        folders = out / "reference-graphs", out / "reference"
        try:
            _run("reference export", ["export", *common, "--out", folders[0]], built)
            _run("reference", ["engines", "--graphs", folders[0], "--out", folders[1]], built)
            built.reference = str(folders[1])
        except subprocess.CalledProcessError as error:  # the bundle is none the worse
            built.failures.append(f"reference: {error}")
        built.same = str(twin(Path(built.bundle), out / "same"))
        built.write(out)
    return built


def _run(step: str, arguments: list[Any], built: Built) -> None:
    begin = time.perf_counter()
    command = [sys.executable, "-m", *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=CHECKOUT, check=True, env=environment)
    built.seconds[step] = round(time.perf_counter() - begin, 1)
    print(f"{built.name}: {step} {built.seconds[step]:.1f} s", flush=True)


def rounded(source: Path, folder: Path) -> Path:
    """A checkpoint with its weights rounded to bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix == ".json":
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": DTYPE}))
    weights = load_file(source / "model.safetensors")
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def twin(bundle: Path, out: Path) -> Path:
    """A bundle whose draft is its target, from one that is built: a compile takes a minute."""
    manifest = read_bundle(bundle, verify=False)
    assert manifest.engines is not None
    pair = replace(manifest.pair, draft=manifest.pair.target)
    engines = dict.fromkeys(("target", "draft"), manifest.engines["target"])
    files = {n: f for n, f in manifest.files.items() if not n.startswith("draft/")}
    files |= {
        n.replace("target/", "draft/"): f for n, f in files.items() if n.startswith("target/")
    }
    if out.exists():
        shutil.rmtree(out)
    with write_folder(out, MANIFEST_FILE) as partial:
        for name in files:
            source = bundle / name.replace("draft/", "target/")
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).hardlink_to(source)
        made = replace(manifest, name=out.name, pair=pair, engines=engines, files=files)
        write_json(partial / MANIFEST_FILE, "manifest", made)
    return out


def tensorrt_rtx(out: Path) -> dict[str, Any]:
    """What TensorRT-RTX says of this GPU, in its own words: does it build for it, and does an
    engine for the GPUs of its list run? NVIDIA's support matrix has no Hopper."""
    import importlib.util

    if importlib.util.find_spec("tensorrt_rtx") is None:
        return {"status": "skipped", "reason": "tensorrt_rtx is not installed"}
    out.mkdir(parents=True, exist_ok=True)
    graphs, verdicts = out / "graphs", {}
    common = ["--backend", "tensorrt_rtx", "--graphs", graphs]
    steps: dict[str, list[Any]] = {
        "export": ["export", "--model", BUNDLED / "target", "--draft", BUNDLED / "draft", "--dtype",
                   "float16", "--cache", out / "cache", "--out", graphs],
        "build for this GPU": ["engines", *common, "--out", out / "here"],
        "build for its list": ["engines", *common, "--out", out / "bundle", "--sm", "80,89,120"],
    }  # fmt: skip
    for step, arguments in steps.items():
        verdicts[step] = _verdict([sys.executable, "-m", *map(str, arguments)])
    # `load` itself refuses engines for other GPUs; here the library is asked.
    script = (
        "import sys, runtime.gpu; runtime.gpu.check_gpu = lambda *a: None\n"
        "engine = runtime.load(sys.argv[1], device='cuda')\n"
        "print(engine.generate('def f(', max_new_tokens=32, ignore_eos=True).token_ids)"
    )
    for name in ("here", "bundle"):
        if (out / name / MANIFEST_FILE).is_file():
            command = [sys.executable, "-c", script, str(out / name)]
            verdicts[f"load and run {name}"] = _verdict(command)
    return {"status": "ok", "verdicts": verdicts}


def _verdict(command: list[str]) -> str:
    """ "works", or the last line of what it said."""
    try:
        ran = subprocess.run(
            command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=120,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "no answer in 120 s"
    print(ran.stdout, flush=True)
    if ran.returncode == 0:
        return "works"
    lines = ran.stdout.strip().splitlines() or [f"exit {ran.returncode}"]
    return lines[-1] if ran.returncode > 0 else f"signal {-ran.returncode}: {lines[-1]}"
