"""Build a bundle from a folder of graphs, completely or not at all."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from runtime.files import records
from runtime.files.errors import OutriderError, refuse_first
from runtime.files.folders import finalize_file, place_file, replacing, write_folder
from runtime.files.graphs import EXPORT_REMEDY, Pair, Weights, file_facts, read_pair, verify_files
from runtime.files.machine import host_memory, processor
from runtime.files.manifest import (
    ENCODER_DECODERS,
    FIRST_ROWS,
    MANIFEST_FILE,
    RECURRENT_STATES,
    EngineFacts,
    Invariance,
    Manifest,
    copied_files,
    read_bundle,
)
from runtime.files.progress import note, size_text, stage

from .gpus import present_gpus
from .registry import find_backend

INVARIANCE_TIMEOUT = 600  # seconds; a model of 135M parameters takes about ten


def build(
    graphs: Path,
    out: Path,
    *,
    backend: str,
    slots: int,
    sm: str = "",
    level: int | None = None,
    force: bool = False,
    measure: bool = True,
) -> bool:
    """Write the bundle. Returns False if `out` already is this bundle, intact, and no measurement
    was added to it.

    sm: GPU architectures as in "80,89"; empty leaves the choice to the backend. level: optimisation
    level, for a backend that has them. measure: on a CPU, measure what the bitwise results of the
    target depend on.
    Raises OutriderError "bundle", "backend", "option" or "disk".
    """
    pair = read_pair(graphs)
    models = dict(pair.models())
    features = supported_features(backend, pair.target.dtype, sm)
    has_states = any(facts.states for facts in models.values())
    refuse_first([
        (pair.start_ids is not None and ENCODER_DECODERS not in features,
         f"the backend {backend} does not run encoder-decoders such as {pair.target.source} with "
         f"DTYPE={pair.target.dtype} in this version",
         "Use BACKEND=onnxruntime DTYPE=float32, or BACKEND=aotinductor SM=cpu."),
        (has_states and RECURRENT_STATES not in features,
         f"the backend {backend} does not run models with a recurrent state, such as "
         f"{pair.target.source}, in this version",
         "Use BACKEND=onnxruntime."),
    ], "backend")  # fmt: skip
    weights = [facts.weights or "full" for facts in models.values()]
    targets = check_backend(backend, pair.target.dtype, sm, level, weights)
    builder = find_backend(backend)
    if wrong := {facts.format for facts in models.values()} - {builder.FORMAT}:
        raise OutriderError(
            "backend",
            f"the backend {backend} builds from {builder.FORMAT} graphs, but {graphs} has "
            f"{wrong.pop()} graphs",
            f"Export the checkpoints again, with --format {builder.FORMAT}.",
        )
    engines = builder.plan(models, slots, pair.max_gamma, targets, level)
    planned = Manifest(
        name=out.name,
        backend=backend,
        versions=builder.versions(),
        slots=slots,
        pair=pair,
        files=copied_files(pair, engines),
        engines=engines,
    )
    existing = None if force else _read_if_intact(out)
    if existing and _is_same_bundle(existing, planned):
        _take_ownership(graphs, out, planned)
        return measure and _add_invariance(out, existing)
    if existing and existing.pair.target.key != pair.target.key:
        old = existing.pair.target
        note(f"replacing {out}, a bundle of {old.source}, {old.weights or old.dtype}")
    verify_files(graphs, pair.all_files(), contents=True, remedy=EXPORT_REMEDY)
    with write_folder(out, MANIFEST_FILE) as partial:
        for name in planned.files:
            place_file(graphs / name, partial / name, out)
        compiled_engines: dict[str, EngineFacts] = {}
        files = dict(planned.files)
        for role, facts in models.items():
            to = engines[role] if engines else None
            old_engine = (existing.engines or {}).get(role) if existing else None
            if to and old_engine and old_engine.key == to.key:  # only the other model changed
                for name in old_engine.compiled_files:
                    place_file(out / role / name, partial / role / name, out)
                engine: EngineFacts | None = old_engine
            else:
                engine = builder.compile(role, graphs / role, partial / role, facts, to)
            if engine:
                compiled_engines[role] = engine
                for name in engine.compiled_files:
                    files[f"{role}/{name}"] = file_facts(partial / role / name)
        manifest = dataclasses.replace(planned, files=files, engines=compiled_engines or None)
        records.write_json(partial / MANIFEST_FILE, "manifest", manifest)
        if measure:
            _add_invariance(partial, manifest)
    _take_ownership(graphs, out, planned)
    return True


def _add_invariance(folder: Path, manifest: Manifest) -> bool:
    """Measure what the bundle's bitwise results depend on and add it to the manifest, if that can
    be measured on this machine and has not been yet. Returns whether it was added."""
    is_current = manifest.invariance is not None and manifest.invariance.processor == processor()
    facts = None if is_current or manifest.gpu_targets() else _measure_invariance(folder)
    if facts is not None:
        with replacing(folder / MANIFEST_FILE) as new:
            records.write_json(new, "manifest", dataclasses.replace(manifest, invariance=facts))
    return facts is not None


def _measure_invariance(folder: Path) -> Invariance | None:
    """The measurement, made in a separate process so that a crash in a library does not end the
    build; None if it failed."""
    command = [sys.executable, "-m", "runtime.backends.invariance", str(folder.resolve())]
    try:
        with stage("bundle", "bits of the target's calls"):
            process = subprocess.run(
                command, cwd=Path(__file__).parents[1], capture_output=True, text=True,
                check=False, timeout=INVARIANCE_TIMEOUT,
            )  # fmt: skip
        if process.returncode == 0:
            answer = json.loads(process.stdout.strip().splitlines()[-1])
            invariance: Invariance = records.build(Invariance, answer, "its answer")
            return invariance
        cause = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        cause = f"it took more than {INVARIANCE_TIMEOUT} s"
    except (ValueError, LookupError, TypeError):
        cause = f"invalid answer {process.stdout.strip()[:100]!r}"
    note(
        "could not measure what the bitwise results depend on, so the bundle promises no "
        f"reproducibility: {cause[:200]} (make engines MEASURE=0 skips the measurement)"
    )
    return None


def _take_ownership(graphs: Path, out: Path, manifest: Manifest) -> None:
    """Make the bundle the owner of its files. Done on every build, since an earlier one may have
    been killed before this step."""
    for name in manifest.files:
        finalize_file(graphs / name, out / name)


def check_backend(
    backend: str,
    dtype: str,
    sm: str,
    level: int | None = None,
    weights: Sequence[str] = (),
    cache: str | None = None,
) -> list[str]:
    """The targets to build for. weights: kinds of target and draft: full, int8, int4 or fp8.
    cache: "int8" for quantised cache rows. Raises OutriderError "backend" or "option" if this
    cannot be built, before an export has taken minutes."""
    builder = find_backend(backend)
    if dtype not in builder.DTYPES:
        cause = f"the backend {backend} does not run {dtype} in this version"
        raise OutriderError("backend", cause, f"Use DTYPE={' or '.join(builder.DTYPES)}.")
    kinds = [kind for kind in get_args(Weights) if dtype in builder.RUNS.get(kind, ())]
    for option, kind in zip(("WEIGHTS", "DRAFT_WEIGHTS"), weights, strict=False):
        if kind not in ("full", *kinds):
            cause = f"the backend {backend} does not run {option}={kind} with DTYPE={dtype}"
            remedy = f"Use {option}={' or '.join(['full', *kinds])}"
            if kind in get_args(Weights):
                remedy += ", or another BACKEND"
                if kind in builder.RUNS:
                    remedy = f"Use DTYPE={' or '.join(builder.RUNS[kind])}"
            raise OutriderError("backend", f"{cause} in this version", remedy)
    if cache and backend != "onnxruntime":
        cause = f"the backend {backend} does not run CACHE={cache} in this version"
        raise OutriderError("backend", cause, "Leave CACHE out, or use BACKEND=onnxruntime.")
    refuse_first([
        (level is not None and not builder.LEVELS,
         f"OPT_LEVEL={level} does not apply to the backend {backend}", "Leave OPT_LEVEL out."),
        (level not in (None, *builder.LEVELS), f"OPT_LEVEL={level} is out of range",
         f"Use 0 to {len(builder.LEVELS) - 1}."),
    ])  # fmt: skip
    return builder.targets(sm, dtype, weights)


def supported_features(backend: str, dtype: str, sm: str) -> tuple[str, ...]:
    """What the backend supports, for the export: its kinds of weights in this precision, and
    whether it runs encoder-decoders and recurrent states, which no backend does on a GPU."""
    builder = find_backend(backend)
    features = ["full", *(kind for kind, dtypes in builder.RUNS.items() if dtype in dtypes)]
    if ENCODER_DECODERS in features and _on_gpu(builder.targets(sm, dtype)):
        features.remove(ENCODER_DECODERS)
    return tuple(features)


def _read_if_intact(out: Path) -> Manifest | None:
    try:
        return read_bundle(out)
    except OutriderError:
        return None


def _is_same_bundle(existing: Manifest, planned: Manifest) -> bool:
    """Whether they are equal except for what is known only after compiling: hashes, figures and
    measurements."""
    existing = dataclasses.replace(existing, invariance=None)
    keys = [
        {role: engine.key for role, engine in (manifest.engines or {}).items()}
        for manifest in (existing, planned)
    ]
    if planned.engines:
        existing = dataclasses.replace(existing, files=planned.files, engines=planned.engines)
    return keys[0] == keys[1] and existing == planned


def _on_gpu(targets: Sequence[str]) -> bool:
    return any(target.startswith("sm") for target in targets)


def memory_plan(
    pair: Pair, slots: int, targets: Sequence[str], rows: int | None = None
) -> dict[str, int]:
    """Bytes that the bundle takes at run time: the weights of both models, the caches of all slots
    and the logits of a round. targets: what it is built for. rows: cache rows per slot; None for
    the full capacity."""
    plan = dict.fromkeys((role for role, _ in pair.models()), 0)
    for name, file in copied_files(pair, None).items():
        role = name.partition("/")[0]
        if role in plan:
            plan[role] += file.size
    for role, facts in pair.models():
        plan[role] = facts.loaded_bytes(plan[role], host=not _on_gpu(targets))
    plan["KV"] = sum(facts.cache_bytes(slots, rows) for _, facts in pair.models())
    plan["logits"] = pair.logits_bytes(slots, gpu=_on_gpu(targets))
    return plan


def check_memory(pair: Pair, slots: int, targets: list[str]) -> None:
    """Raise OutriderError "memory", before minutes of compiling, if the bundle does not fit this
    machine: its GPU with all rows of the slots, or its main memory with the rows that slots begin
    with. Not checked for GPUs that this machine does not have."""
    if _on_gpu(targets):
        gpu_sizes = [size for number, size in present_gpus().items() if f"sm{number}" in targets]
        need, room, what = memory_plan(pair, slots, targets), max(gpu_sizes, default=0), "the GPU"
    else:
        need, room = memory_plan(pair, slots, targets, FIRST_ROWS), host_memory()
        what = "this machine"
        if sum(memory_plan(pair, slots, targets).values()) > room > 0:
            note(
                f"{what} has {size_text(room)}: not enough for {slots} texts of {pair.max_len} "
                "tokens"
            )
    if room and (total := sum(need.values())) > room:
        raise OutriderError(
            "memory",
            f"the bundle needs {size_text(total)}, but {what} has {size_text(room)}",
            "Use a smaller MAX_LEN, fewer SLOTS, or a smaller checkpoint.",
        )


def engine_plan(manifest: Manifest) -> dict[str, int] | None:
    """`memory_plan` with the engines' activations; None if the builder did not report them."""
    activations = manifest.activation_bytes
    if activations is None:
        return None
    plan = memory_plan(manifest.pair, manifest.slots, manifest.gpu_targets())
    return {**plan, "activations": activations}
