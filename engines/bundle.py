"""From a graphs folder to a bundle, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from runtime.files import records
from runtime.files.errors import OutriderError
from runtime.files.folders import replacing, settle_file, take_file, write_folder
from runtime.files.machine import host_memory, processor
from runtime.files.manifest import (
    ENCODER_DECODERS,
    EXPORT_AGAIN,
    FIRST_ROWS,
    MANIFEST_FILE,
    RECURRENT_STATES,
    EngineFacts,
    Invariance,
    Manifest,
    Pair,
    Weights,
    file_facts,
    read_bundle,
    read_pair,
    verify_files,
)
from runtime.files.progress import note, size_text, stage

from .gpus import present_gpus
from .registry import find

PATIENCE = 600  # seconds for the measurement of a bundle's bits; 135M parameters take some ten


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
    """Write the bundle; False where `out` already is this very bundle, intact, and nothing more has
    been found out about it.

    sm: GPU architectures as in "80,89"; empty leaves them to the backend. level: of optimisation,
    for a backend that has some. measure: on a CPU, find out what the target's bits depend on.
    Raises OutriderError "bundle", "backend", "option" or "disk".
    """
    pair = read_pair(graphs)
    models = dict(pair.models())
    does = runs(backend, pair.target.dtype, sm)
    if pair.start_ids is not None and ENCODER_DECODERS not in does:
        raise OutriderError(
            "backend",
            f"the backend {backend} does not run encoder-decoders such as {pair.target.source} "
            f"with DTYPE={pair.target.dtype} in this version",
            "Use BACKEND=onnxruntime DTYPE=float32, or BACKEND=aotinductor SM=cpu.",
        )
    if any(facts.states for facts in models.values()) and RECURRENT_STATES not in does:
        raise OutriderError(
            "backend",
            f"the backend {backend} does not run models with a recurrent state, such as "
            f"{pair.target.source}, in this version",
            "Use BACKEND=onnxruntime.",
        )
    weights = [facts.weights or "full" for facts in models.values()]
    check_backend(backend, pair.target.dtype, sm, level, weights)
    builder = find(backend)
    for facts in models.values():
        if facts.format != builder.FORMAT:
            raise OutriderError(
                "backend",
                f"the backend {backend} builds from {builder.FORMAT} graphs, and {graphs} has "
                f"{facts.format} graphs",
                f"Export the checkpoints again, with --format {builder.FORMAT}.",
            )
    engines = builder.plan(models, slots, pair.max_gamma, sm, level)
    wanted = Manifest(
        name=out.name,
        backend=backend,
        versions=builder.versions(),
        slots=slots,
        pair=pair,
        files=pair.carried_files(engines),
        engines=engines,
    )
    found = None if force else _intact(out)
    if found and _same(found, wanted):
        _settle(graphs, out, wanted)
        return measure and _measure(out, found)
    if found and found.pair.target.key != pair.target.key:
        was = found.pair.target
        note(f"{out} was a bundle of {was.source}, {was.weights or was.dtype}: it is replaced")
    verify_files(graphs, pair.all_files(), contents=True, remedy=EXPORT_AGAIN)
    with write_folder(out, MANIFEST_FILE) as partial:
        for name in wanted.files:
            take_file(graphs / name, partial / name, out)
        made: dict[str, EngineFacts] = {}
        files = dict(wanted.files)
        for role, facts in models.items():
            to = engines[role] if engines else None
            old = (found.engines or {}).get(role) if found else None
            if to and old and old.key == to.key:  # only the other model changed
                for name in old.compiled:
                    take_file(out / role / name, partial / role / name, out)
                engine: EngineFacts | None = old
            else:
                engine = builder.compile(role, graphs / role, partial / role, facts, to)
            if engine:
                made[role] = engine
                for name in engine.compiled:
                    files[f"{role}/{name}"] = file_facts(partial / role / name)
        manifest = dataclasses.replace(wanted, files=files, engines=made or None)
        records.write_json(partial / MANIFEST_FILE, "manifest", manifest)
        if measure:
            _measure(partial, manifest)
    _settle(graphs, out, wanted)
    return True


def _measure(folder: Path, manifest: Manifest) -> bool:
    """Complete the bundle in this folder by what its bits depend on, where that can be found out
    here and was not; whether it was now."""
    known = manifest.invariance is not None and manifest.invariance.processor == processor()
    facts = None if known or manifest.gpu_targets() else _invariance(folder)
    if facts is not None:
        with replacing(folder / MANIFEST_FILE) as new:
            records.write_json(new, "manifest", dataclasses.replace(manifest, invariance=facts))
    return facts is not None


def _invariance(folder: Path) -> Invariance | None:
    """By a process of its own: a library that dies of it takes no build along. None then."""
    command = [sys.executable, "-m", "runtime.backends.invariance", str(folder.resolve())]
    try:
        with stage("bundle", "bits of the target's calls"):
            done = subprocess.run(
                command, cwd=Path(__file__).parents[1], capture_output=True, text=True,
                check=False, timeout=PATIENCE,
            )  # fmt: skip
        if done.returncode == 0:
            answer = json.loads(done.stdout.strip().splitlines()[-1])
            found: Invariance = records.build(Invariance, answer, "its answer")
            return found
        cause = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        cause = f"it took more than {PATIENCE} s"
    except (ValueError, LookupError, TypeError):
        cause = f"{done.stdout.strip()[:100]!r} is no answer"
    note(
        f"what its bits depend on was not measured, so it promises nothing: {cause[:200]} "
        "(make engines MEASURE=0 does without)"
    )
    return None


def _settle(graphs: Path, out: Path, made: Manifest) -> None:
    """The bundle owns its files from here on. Each time: a build may have been killed before."""
    for name in made.files:
        settle_file(graphs / name, out / name)


def check_backend(
    backend: str,
    dtype: str,
    sm: str = "",
    level: int | None = None,
    weights: Sequence[str] = (),
    cache: str | None = None,
) -> list[str]:
    """What it will be built for. weights: of the target and of the draft, full, int8, int4 or fp8.
    cache: int8 of its rows. Refuses, before minutes of export, what cannot be built: raises
    "backend" or "option"."""
    builder = find(backend)
    if dtype not in builder.DTYPES:
        raise OutriderError(
            "backend",
            f"the backend {backend} does not run {dtype} in this version",
            f"Use DTYPE={' or '.join(builder.DTYPES)}.",
        )
    kinds = [kind for kind in get_args(Weights) if dtype in builder.RUNS.get(kind, ())]
    for option, kind in zip(("WEIGHTS", "DRAFT_WEIGHTS"), weights, strict=False):
        if kind not in ("full", *kinds):
            known = kind in get_args(Weights)
            raise OutriderError(
                "backend",
                f"the backend {backend} does not run {option}={kind} with DTYPE={dtype} in this "
                "version",
                f"Use DTYPE={' or '.join(builder.RUNS[kind])}."
                if known and kind in builder.RUNS
                else f"Use {option}={' or '.join(['full', *kinds])}"
                + (", or another BACKEND." if known else "."),
            )
    if cache and backend != "onnxruntime":
        raise OutriderError(
            "backend",
            f"the backend {backend} does not run CACHE={cache} in this version",
            "Leave CACHE out, or use BACKEND=onnxruntime.",
        )
    levels = builder.LEVELS
    if level is not None and level not in levels:
        raise OutriderError(
            "option",
            f"OPT_LEVEL={level} means nothing to the backend {backend}"
            if not levels
            else f"OPT_LEVEL={level} is out of range",
            f"Use {levels[0]} to {levels[-1]}." if levels else "Leave OPT_LEVEL out.",
        )
    return builder.targets(sm, dtype, weights)


def runs(backend: str, dtype: str, sm: str = "") -> tuple[str, ...]:
    """What an export has to know of the backend: its kinds of weights in this precision, and
    whether it runs encoder-decoders and recurrent states, which none does on a GPU."""
    builder = find(backend)
    found = ["full", *(kind for kind, dtypes in builder.RUNS.items() if dtype in dtypes)]
    if ENCODER_DECODERS in found and _on_gpu(builder.targets(sm, dtype)):
        found.remove(ENCODER_DECODERS)
    return tuple(found)


def _intact(out: Path) -> Manifest | None:
    try:
        return read_bundle(out)
    except OutriderError:
        return None


def _same(found: Manifest, wanted: Manifest) -> bool:
    """Equal but for what is known only after compiling: hashes, figures and measurements."""
    found = dataclasses.replace(found, invariance=None)
    keys = [
        {role: engine.key for role, engine in (manifest.engines or {}).items()}
        for manifest in (found, wanted)
    ]
    if wanted.engines:
        found = dataclasses.replace(found, files=wanted.files, engines=wanted.engines)
    return keys[0] == keys[1] and found == wanted


def _on_gpu(targets: Sequence[str]) -> bool:
    return any(target.startswith("sm") for target in targets)


def memory_plan(
    pair: Pair, slots: int, targets: Sequence[str], rows: int | None = None
) -> dict[str, int]:
    """Bytes that the bundle takes when it runs: weights of both models, all slots' caches, and the
    logits of a round. targets: what it is built for. rows: of a slot; None for all of them."""
    plan = dict.fromkeys((role for role, _ in pair.models()), 0)
    for name, file in pair.carried_files(None).items():
        role = name.partition("/")[0]
        if role in plan:
            plan[role] += file.size
    plan["KV"] = sum(facts.cache_bytes(slots, rows) for _, facts in pair.models())
    plan["logits"] = pair.logits_bytes(slots, gpu=_on_gpu(targets))
    return plan


def check_memory(pair: Pair, slots: int, targets: list[str]) -> None:
    """Refuse, before minutes of compiling, what this machine has no room for: no GPU of it for all
    rows of the slots, or its processor for those that slots begin with. Nothing is said of GPUs
    that are elsewhere. Raises OutriderError "memory"."""
    if _on_gpu(targets):
        here = [size for number, size in present_gpus().items() if f"sm{number}" in targets]
        need, room, what = memory_plan(pair, slots, targets), max(here, default=0), "the GPU"
    else:
        need, room = memory_plan(pair, slots, targets, FIRST_ROWS), host_memory()
        what = "this machine"
        if sum(memory_plan(pair, slots, targets).values()) > room > 0:
            note(f"{what} has {size_text(room)}: not enough for {slots} texts of {pair.max_len}")
    if room and (least := sum(need.values())) > room:
        raise OutriderError(
            "memory",
            f"the bundle needs {size_text(least)}, and {what} has {size_text(room)}",
            "Use a smaller MAX_LEN, fewer SLOTS, or a smaller checkpoint.",
        )


def engine_plan(manifest: Manifest) -> dict[str, int] | None:
    """`memory_plan` with what the engines take; None where their builder did not say."""
    activations = manifest.activations
    if activations is None:
        return None
    plan = memory_plan(manifest.pair, manifest.slots, manifest.gpu_targets())
    return {**plan, "activations": activations}
