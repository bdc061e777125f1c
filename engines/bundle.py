"""From a graphs folder to a bundle, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from runtime.manifest import (
    MANIFEST_FILE,
    GraphFacts,
    Manifest,
    OutriderError,
    Pair,
    link_file,
    read_bundle,
    read_pair,
    verify_files,
    write_folder,
    write_json,
)

from . import onnxruntime_backend

BACKENDS = {"onnxruntime": onnxruntime_backend}


def build(graphs: Path, out: Path, *, backend: str, slots: int, force: bool = False) -> bool:
    """Write the bundle; False where `out` already is this very bundle, intact.

    Raises OutriderError "bundle", "backend", "option" or "disk".
    """
    pair = read_pair(graphs)
    check_backend(backend, pair.target.dtype)
    models = {
        role: facts for role, facts in (("target", pair.target), ("draft", pair.draft)) if facts
    }
    files = pair.all_files()
    manifest = Manifest(
        name=out.name,
        backend=backend,
        versions=BACKENDS[backend].versions(),
        slots=slots,
        pair=pair,
        files=files,
    )
    if not force and _is_current(out, manifest):
        return False
    remedy = "Export the checkpoints again: python -m export --help."
    verify_files(graphs, files, contents=True, remedy=remedy)
    with write_folder(out, MANIFEST_FILE) as partial:
        for name in files:
            link_file(graphs / name, partial / name)
        for role, facts in models.items():
            BACKENDS[backend].compile(partial / role, facts)
        write_json(partial / MANIFEST_FILE, "manifest", manifest)
    return True


def check_backend(backend: str, dtype: str) -> None:
    """Refuse, before minutes of export, what cannot be built. Raises OutriderError "backend"."""
    if backend not in BACKENDS:
        raise OutriderError(
            "backend",
            f"this version cannot build for the backend {backend}",
            f"Use BACKEND={' or '.join(BACKENDS)}.",
        )
    if dtype not in BACKENDS[backend].DTYPES:
        raise OutriderError(
            "backend",
            f"the backend {backend} does not run {dtype} in this version",
            f"Use DTYPE={' or '.join(BACKENDS[backend].DTYPES)}.",
        )


def _is_current(out: Path, manifest: Manifest) -> bool:
    try:
        return read_bundle(out) == manifest
    except OutriderError:
        return False


def memory_plan(pair: Pair, slots: int) -> dict[str, int]:
    """Bytes that the bundle takes when it runs: weights of both models, and all slots' caches."""
    models: dict[str, GraphFacts | None] = {"target": pair.target, "draft": pair.draft}
    plan = {
        role: sum(file.size for file in facts.files.values())
        for role, facts in models.items()
        if facts
    }
    plan["KV"] = sum(facts.cache_bytes(slots) for facts in models.values() if facts)
    return plan
