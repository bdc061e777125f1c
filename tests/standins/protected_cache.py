"""A script: run steps of an engine whose cache pages are read-only except for the step's row.

    python tests/standins/protected_cache.py BUNDLE

Prints how much memory many more steps take. Then a negative control, in which the step's row is
read-only too: the process dies of SIGSEGV.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from pathlib import Path

import numpy as np

CHECKOUT = Path(__file__).parents[2]
sys.path.insert(0, str(CHECKOUT))

from bench.core.machine import resident_memory  # noqa: E402
from runtime.backends.registry import host_engine  # noqa: E402
from runtime.files.manifest import read_bundle  # noqa: E402

LONGEST_PROMPT, STEPS, MANY_STEPS = 300, 20, 500
LIBC = ctypes.CDLL(None, use_errno=True)


class Protected:
    """An array on its own memory pages."""

    def __init__(self, like: np.ndarray):
        self._memory = mmap.mmap(-1, like.nbytes)  # page-aligned
        self.array = np.frombuffer(self._memory, like.dtype).reshape(like.shape)

    def allow_all(self) -> None:
        self._protect(self.array, mmap.PROT_READ | mmap.PROT_WRITE)

    def allow_row(self, row: int) -> None:
        """Make only this row of each slot and head of [slots, Hkv, S, D] writable, rounded to
        pages."""
        self._protect(self.array, mmap.PROT_READ)
        for rows in self.array.reshape(-1, *self.array.shape[2:]):
            self._protect(rows[row], mmap.PROT_READ | mmap.PROT_WRITE)

    @staticmethod
    def _protect(array: np.ndarray, how: int) -> None:
        first = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        size = ctypes.c_size_t(array.ctypes.data + array.nbytes - first)
        if LIBC.mprotect(ctypes.c_void_p(first), size, how):
            raise OSError(ctypes.get_errno(), "mprotect")


def main(folder: Path) -> None:
    manifest = read_bundle(folder)
    facts = manifest.pair.target
    prompt = min(LONGEST_PROMPT, facts.max_len - STEPS)
    engine, reference = (
        host_engine(manifest.backend)(folder / "target", facts, slots=1, max_outputs=1, threads=1)
        for _ in range(2)
    )
    rng = np.random.default_rng(0)
    ids = rng.integers(0, facts.vocab_size, (1, prompt + STEPS))
    last = np.array([prompt - 1])
    for each in (engine, reference):
        each.forward(ids[:, :prompt], np.array([0]), last)
    # The prompt made the cache as large as the steps need, so it is not reallocated from here on.
    caches = {name: Protected(np.asarray(array)) for name, array in engine._cache.items()}
    for name, cache in caches.items():
        cache.array[:] = engine._cache[name]
    engine._cache = {name: cache.array for name, cache in caches.items()}
    if manifest.backend == "aotinductor":
        import torch

        engine._cache = {name: torch.from_numpy(array) for name, array in engine._cache.items()}
    engine._prepared.clear()  # they hold the old addresses
    for position in range(prompt, prompt + STEPS):
        for cache in caches.values():
            cache.allow_row(position)
        token = ids[:, position : position + 1]
        got = engine.forward(token, np.array([position]), np.array([0]))
        expected = reference.forward(token, np.array([position]), np.array([0]))
        np.testing.assert_array_equal(got, expected)
    for cache in caches.values():
        cache.allow_all()
    before = resident_memory()[0]
    for _ in range(MANY_STEPS):
        engine.forward(token, np.array([position]), np.array([0]))
    size = sum(cache.array.nbytes for cache in caches.values())
    result = {"growth": resident_memory()[0] - before, "cache": size, "steps": MANY_STEPS}
    print(json.dumps(result), flush=True)
    for cache in caches.values():
        cache.allow_row(0)
    engine.forward(token, np.array([position]), np.array([0]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
