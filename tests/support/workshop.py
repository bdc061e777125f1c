"""Builds checkpoints, graphs and bundles of tiny models, each only once.

Within a run, checkpoints, graphs and bundles are keyed by their inputs. Results that take seconds
are also kept in the checkout for later runs: parts, by the exporter's own key; traces and compiled
code, by everything they depend on, which excludes the values of the weights.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript
import pytest
import torch
import torch._inductor
from checkpoints import ONE_LAYER, SMALL, write
from commands import CHECKOUT
from onnx_ir.tensor_adapters import TorchTensor
from torch.utils._pytree import tree_leaves

import export.graph
from engines.bundle import build
from engines.registry import find_backend
from export import part
from export.decoder import Decoder, Example
from export.encoder import Encoder
from export.pair import export as export_pair
from runtime.files.graphs import GraphFacts
from runtime.files.records import digest_json

MAX_LEN, MAX_GAMMA = 128, 8  # of bundles, unless a test overrides them
CAPACITY = -(-(MAX_LEN + MAX_GAMMA + 1) // 8) * 8
KEPT = CHECKOUT / "build" / ".tests"
# Fields of a configuration that do not affect a trace. If one did, the export's comparison would
# fail.
NOT_TRACED = {"_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id"}


def _own_files(folder: Path) -> None:
    """Replace links into the cache by copies, so that no bundle that a test damages owns files from
    which others are built."""
    for link in filter(Path.is_symlink, list(folder.rglob("*"))):
        content = link.read_bytes()
        link.unlink()
        link.write_bytes(content)


@contextmanager
def _locked(place: Path) -> Iterator[Path]:
    """Hold the lock of `place`, so that no other test, worker or run creates it meanwhile."""
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(place.with_suffix(".lock"), os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place
    finally:
        os.close(lock)


# Signatures of torch's operators: otherwise each export parses the sources of all five hundred
# again.
_PARSED = functools.cache(onnxscript.TracedOnnxFunction.function_ir.fget)
onnxscript.TracedOnnxFunction.function_ir = property(_PARSED)


@contextmanager
def traced_once() -> Iterator[None]:
    """Decoders that differ only in the values of their weights share one trace."""
    real = export.graph.trace

    def trace(decoder: Decoder | Encoder, example: Example) -> ir.Model:
        config = decoder.model.config.to_dict()
        config = {name: value for name, value in config.items() if name not in NOT_TRACED}
        config["rms_norm_eps"] = str(np.float32(config.get("rms_norm_eps") or 0))
        weights = {
            **dict(decoder.named_parameters(remove_duplicate=False)),
            **dict(decoder.named_buffers(remove_duplicate=False)),
        }
        key = digest_json(
            {
                "config": config,
                "weights": {name: [*w.shape, str(w.dtype)] for name, w in weights.items()},
                "arguments": [
                    [*argument.shape, str(argument.dtype)]
                    for argument in tree_leaves(example.arguments)
                ],
                "results": example.outputs,
                "positions": getattr(decoder, "max_positions", None),
                "bits": [getattr(module, "bits", None) for module in decoder.modules()],
                "exporter": part.exporter_digest(),
                "versions": part.versions(),
            }
        )
        with _locked(KEPT / "traces" / f"{key[:16]}.onnx") as place:
            if not place.exists():
                traced = real(decoder, example)
                ir.save(traced, place.with_suffix(".part"))
                place.with_suffix(".part").rename(place)
                return traced
        traced = ir.load(place)
        for name, value in traced.graph.initializers.items():
            if name in weights:  # otherwise a constant of the code
                value.const_value = TorchTensor(weights[name], name)
        return traced

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export.graph, "trace", trace)
        yield


@contextmanager
def _parts_one_by_one() -> Iterator[None]:
    """A worker that needs a part which another is building waits for it and reuses it."""
    real = part.make

    def make(
        request: part.PartRequest, folder: Path, force: bool = False
    ) -> tuple[Path, GraphFacts]:
        # ONNX libraries may not log between a build's lines. Torch and Transformers log elsewhere.
        handler = BufferingHandler(sys.maxsize)
        handler.setLevel(logging.WARNING)
        with _locked(KEPT / "parts" / request.key()[:16]):
            logging.getLogger().addHandler(handler)
            try:
                made = real(request, folder, force)
            finally:
                logging.getLogger().removeHandler(handler)
            messages = [record.getMessage() for record in handler.buffer]
            assert not messages, messages
            return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part, "make", make)
        yield


@contextmanager
def _compiled_once() -> Iterator[None]:
    """Models that differ only in their weights share one AOTInductor package, which holds code but
    no weights."""
    real = torch._inductor.aoti_compile_and_package

    def compile(program: Any, *, package_path: str, **options: Any) -> None:
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in program.state_dict.items()}
        made_of = f"{torch.__version__} {program.graph} {shapes} {options}"
        key = hashlib.sha256(made_of.encode()).hexdigest()[:16]
        with _locked(KEPT / "compiled" / f"{key}.pt2") as place:
            if not place.exists():
                real(program, package_path=package_path, **options)
                shutil.copyfile(package_path, place.with_suffix(".part"))
                place.with_suffix(".part").rename(place)
            else:
                shutil.copyfile(place, package_path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor, "aoti_compile_and_package", compile)
        yield


class Workshop:
    """Checkpoints, graphs and bundles, keyed by their inputs and shared by all tests of a run.

    All tests and workers of a run share the folders: copy one before you damage it.
    """

    # Build only from `graphs`, which own their files. A bundle built from an export that links into
    # this cache would take over the cache's files, while others read them, until the run's folder
    # is deleted.
    cache = KEPT / "parts"

    def __init__(self, root: Path):
        self.root = root

    def checkpoint(self, name: str, **options: Any) -> Path:
        """See `write`."""
        options = {name: value for name, value in options.items() if (name, value) != ("seed", 0)}
        with self._once("checkpoint", name, options) as (folder, made):
            if not made:
                write(folder.with_suffix(".part"), name, **options).rename(folder)
        return folder

    def example(self, name: str) -> Path:
        """The example checkpoint of this architecture; one layer where all layers are alike."""
        layers = ({"n_layer": 1} if name == "gpt2" else SMALL) if name in ONE_LAYER else {}
        # Seed 0 happens to make a BLOOM and a Granite that repeat themselves.
        return self.checkpoint(name, seed=1 if name in ("bloom", "granite") else 0, **layers)

    def graphs(self, target: Path, draft: Path | None = None, **options: Any) -> Path:
        """The folder that `python -m export` writes. options: those of `export.pair.export`; the
        weights of a draft are the target's unless they are given."""
        options = {"max_len": MAX_LEN, "max_gamma": MAX_GAMMA, **options}
        if draft and str(draft) != "self" and "weights" not in options:
            options.setdefault("draft_weights", "full")
        with self._once("graphs", f"{target}+{draft}", options) as (folder, made):
            if not made:
                source = str(draft) if draft else None
                with traced_once(), _parts_one_by_one():
                    export_pair(str(target), source, folder, cache=self.cache, **options)
                _own_files(folder)
        return folder

    def bundle(
        self,
        target: Path,
        draft: Path | None = None,
        *,
        backend: str = "onnxruntime",
        measure: bool = False,
        **options: Any,
    ) -> Path:
        """The bundle that `python -m engines` writes, for one slot. options: as for `graphs`.
        measure: also measure what its bitwise results depend on, which takes seconds."""
        form = {"form": "torch"} if find_backend(backend).FORMAT == "torch" else {}
        graphs = self.graphs(target, draft, **form, **options)
        measured = {"measure": True} if measure else {}
        with self._once("bundle", str(graphs), measured) as (folder, made):
            if not made:
                # For the CPU, even on a machine with a GPU.
                sm = "cpu" if backend == "aotinductor" else ""
                with _compiled_once():
                    build(graphs, folder, backend=backend, slots=1, sm=sm, measure=measure)
        return folder

    def pair(self, backend: str = "onnxruntime") -> tuple[Path, Path]:
        """The two checkpoints that most tests share, which disagree; small ones for AOTInductor,
        which takes half a minute to compile."""
        if backend == "aotinductor":
            return self.small_pair()
        return self.checkpoint("llama"), self.checkpoint("llama", seed=7)

    def small_pair(self) -> tuple[Path, Path]:
        """Two checkpoints of one layer that disagree."""
        return self.checkpoint("llama", **SMALL), self.checkpoint("llama", seed=7, **SMALL)

    @contextmanager
    def _once(self, kind: str, name: str, options: dict[str, Any]) -> Iterator[tuple[Path, bool]]:
        """Yield the folder for these inputs and whether it exists, holding its lock."""
        key = hashlib.sha256(repr((name, sorted(options.items()))).encode()).hexdigest()[:12]
        with _locked(self.root / f"{kind}-{Path(name).name.split('+')[0]}-{key}") as folder:
            yield folder, folder.is_dir()
