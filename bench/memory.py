"""What a loaded bundle holds, in a process that has done nothing else.

`python -m bench.memory BUNDLE THREADS PATIENCE` prints one JSON object. Caches grow with the texts
(their pages are only committed then), so the slot is also filled to its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends.onnxruntime import OrtEngine
from runtime.bundle import load
from runtime.text.engine import TextEngine

from .machine import resident
from .timing import alternate


def measure(bundle: Path, threads: int, patience: float) -> dict[str, Any]:
    """Run this module on a bundle, in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, str(bundle), str(threads), str(patience)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def _report(bundle: Path, threads: int, patience: float) -> dict[str, Any]:
    import onnxruntime  # noqa: F401 - the library's own size belongs to "before"

    stages: dict[str, dict[str, int]] = {"before": {**resident(), "cache": 0}}
    begin = time.perf_counter()
    engine = load(bundle, threads=threads, verify=False)
    load_seconds = time.perf_counter() - begin
    stages["loaded"] = _stage(engine)
    prompt = [1 + i % 200 for i in range(64)]
    engine.generate(prompt, max_new_tokens=64, gamma=0, ignore_eos=True)
    stages["64 tokens"] = _stage(engine)
    if engine.decoder.draft is not None:
        engine.generate(prompt, max_new_tokens=64, ignore_eos=True)
        stages["64 tokens, speculating"] = _stage(engine)
    fill(engine)
    stages["slot full"] = _stage(engine)
    in_place = _in_place(engine, patience)
    return {
        "stages": stages,
        "load_seconds": load_seconds,
        "weights": {role: size for role, size in engine.memory.items() if role != "cache"},
        "in_place": in_place,
    }


def _stage(engine: TextEngine) -> dict[str, int]:
    """The process's memory, and the bytes that the caches of both models have by now."""
    engines: list[Any] = [engine.decoder.target, engine.decoder.draft]
    caches = [array for model in engines if model for array in model._cache.values()]
    return {**resident(), "cache": sum(array.nbytes for array in caches)}


def fill(engine: TextEngine) -> None:
    """Write every row of slot 0 once, as long texts do sooner or later."""
    for model in (engine.decoder.target, engine.decoder.draft):
        if model is None:
            continue
        for begin in range(0, model.capacity, model.chunk):
            width = min(model.chunk, model.capacity - begin)
            ids = np.ones((1, width), np.int64)
            model.forward(ids, np.array([begin]), np.array([width - 1]))


def _in_place(engine: TextEngine, patience: float) -> dict[str, Any]:
    """One step with the caches bound in place, as the engine does, and bound to other memory."""
    target = engine.decoder.target
    assert isinstance(target, OrtEngine)
    position = target.capacity // 2
    before = resident()["rss"]
    copying = _copying_step(target, position)
    ids, index = np.ones((1, 1), np.int64), np.zeros(1, np.int64)

    def in_place() -> None:
        target.forward(ids, np.array([position]), index)

    in_place()
    after_in_place = resident()["rss"]
    figures = alternate({"in place": in_place, "copying": copying}, rounds=8, patience=patience)
    return {
        "figures": {name: asdict(figure) for name, figure in figures.items()},
        "growth_in_place": after_in_place - before,
        "growth_copying": resident()["rss"] - after_in_place,
    }


def _copying_step(engine: OrtEngine, position: int) -> Callable[[], object]:
    """A step whose updated caches go elsewhere: what an ordinary run of the graph does."""
    binding = engine._session.io_binding()
    inputs = {
        "input_ids": np.ones((1, 1), np.int64),
        "position": np.array([position]),
        "logits_index": np.zeros(1, np.int64),
        **{name: array[:1] for name, array in engine._cache.items()},
    }
    # zeros, not zeros_like: its pages are only committed when the step writes them.
    outputs = {
        f"{name}_out": np.zeros(array[:1].shape, array.dtype)
        for name, array in engine._cache.items()
    }
    outputs["logits"] = np.zeros((1, 1, engine.vocab_size), np.float32)
    for name, array in inputs.items():
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def step(alive: object = (inputs, outputs)) -> None:  # bound by address: keep them
        engine._session.run_with_iobinding(binding)

    return step


if __name__ == "__main__":
    print(json.dumps(_report(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
