"""Bundles for the checks and times on a GPU, built as `make engines` builds them.

A folder holds the checkpoints, what was exported of them, the bundle, what `check` holds it against
and built.json, which names all of these.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.files.errors import OutriderError
from runtime.files.folders import write_folder
from runtime.files.manifest import MANIFEST_FILE, read_bundle
from runtime.files.records import write_json

from ...core.timed import timed
from . import constructed
from .suite import CHECKOUT

BUNDLED = CHECKOUT / "models"
PAIRS = ("bundled", *constructed.PRESETS)
FACTS_FILE = "built.json"
DTYPE = "bfloat16"


@dataclass
class BuiltPair:
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
    def read(folder: Path) -> BuiltPair:
        return BuiltPair(**json.loads((folder / FACTS_FILE).read_text()))

    def write(self, folder: Path) -> None:
        (folder / FACTS_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")

    def run(self, step: str, module: str, *arguments: object) -> None:
        """Raises OutriderError "backend"."""
        self.seconds[step] = round(timed(module, *arguments).seconds, 1)
        print(f"{self.name}: {step} {self.seconds[step]:.1f} s", flush=True)


def build(
    pair: str, out: Path, device: str, *, delta: float = constructed.DELTA, checks: bool = False
) -> BuiltPair:
    """A bundle of AOTInductor in bfloat16. pair: one of `PAIRS`. device: "cuda" or "cpu". checks:
    also what `check` wants, for the bundled pair in any case."""
    out.mkdir(parents=True, exist_ok=True)
    (out / FACTS_FILE).unlink(missing_ok=True)
    begin, folder = time.perf_counter(), out / "checkpoints"
    length: list[Any] = []
    if pair == "bundled":
        # The reference shall compute with the same numbers, in float32.
        target, draft = (rounded(BUNDLED / role, folder / role) for role in ("target", "draft"))
    else:
        preset = constructed.PRESETS[pair]
        target, draft = constructed.write_pair(preset, folder, delta=delta)
        length = ["--max-len", preset.max_len]
    built = BuiltPair(pair, str(target), str(draft), str(out / "bundle"))
    built.seconds["checkpoints"] = round(time.perf_counter() - begin, 1)
    common = ["--model", target, "--draft", draft, "--cache", out / "cache", *length]
    graphs = out / "graphs"
    built.run("export", "export", *common, "--dtype", DTYPE, "--format", "torch", "--out", graphs)
    built.run("engines", "engines", "--graphs", graphs, "--out", built.bundle, "--backend",
              "aotinductor", "--sm", "cpu" if device == "cpu" else "")  # fmt: skip
    built.write(out)
    if checks or pair == "bundled":
        graphs, reference = out / "reference-graphs", out / "reference"
        try:
            built.run("reference export", "export", *common, "--out", graphs)
            built.run("reference", "engines", "--graphs", graphs, "--out", reference)
            built.reference = str(reference)
        except OutriderError as error:  # the bundle is none the worse
            built.failures.append(f"reference: {error}")
        built.same = str(twin(Path(built.bundle), out / "same"))
        built.write(out)
    return built


def rounded(source: Path, folder: Path) -> Path:
    """A checkpoint with its weights rounded to bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
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
