"""One model's graph as a content-addressed part: made once, found again by its key."""

from __future__ import annotations

import gc
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import onnxscript
import torch
import transformers
from transformers import PreTrainedModel

from runtime.files import torch_files
from runtime.files.errors import OutriderError, first_line
from runtime.files.folders import write_folder
from runtime.files.library import find_library
from runtime.files.manifest import (
    ENCODER_FILE,
    ENCODER_WEIGHTS_FILE,
    HOST_FILE,
    HOST_WEIGHTS_FILE,
    PART_FILE,
    Cache,
    Dtype,
    EncoderFacts,
    Format,
    GraphFacts,
    Weights,
    file_facts,
    verify_files,
)
from runtime.files.progress import stage
from runtime.files.records import digest_json, read_json, write_json

from . import compare, graph, host, program
from .checkpoint import Checkpoint, content_hashes, refuse_architecture
from .decoder import Decoder, UnsupportedArchitecture, example
from .encoder import Encoder, SourceDecoder, example_decoder, example_encoder
from .loading import CacheShapes, cache_shapes, learned_positions, load
from .weights.layers import rounding_activations
from .weights.quantising import Quantising


def versions() -> dict[str, str]:
    modules = (torch, transformers, onnx, onnx_ir, onnxscript)
    return {module.__name__: module.__version__ for module in modules}


def exporter_digest() -> str:
    """A hash of this package and of what lays out its weights: other code makes another graph."""
    digest = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.rglob("*.py")), Path(torch_files.__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make(
    role: str,
    checkpoint: Checkpoint,
    dtype: Dtype,
    max_len: int,
    capacity: int,
    cache: Path,
    *,
    form: Format = "onnx",
    weights: Weights | None = None,
    cache_type: Cache | None = None,
    text: Sequence[int] | None = None,
    force: bool = False,
) -> tuple[Path, GraphFacts]:
    """The folder of the checkpoint's graph, exported now or earlier.

    text: token ids to measure the quality of quantised weights on; None has the model write them.

    Raises OutriderError "checkpoint", "architecture", "difference" or "disk".
    """
    if weights and form == "onnx" and dtype == "float32" and find_library() is None:
        raise OutriderError(
            "backend",
            f"WEIGHTS={weights} on the CPU needs liboutrider, which was not compiled",
            "Install a C++ compiler, and type make plugins.",
        )
    with stage(role, "hash") as said:
        key = digest_json(
            {
                "files": content_hashes(checkpoint),
                "dtype": dtype,
                "max_len": max_len,
                "capacity": capacity,
                "exporter": exporter_digest(),
                "versions": versions(),
                **({"format": form} if form != "onnx" else {}),
                **({"weights": weights, "text": text} if weights else {}),
                **({"cache": cache_type} if cache_type else {}),
                **({} if find_library() else {"host": "no library to check it with"}),
            }
        )
        folder = cache / key[:16]
        facts = None if force else _cached(folder, key)
        said.note = f"{checkpoint.source}, " + (
            f"cached (key {key[:8]})" if facts is not None else f"key {key[:8]}"
        )
    if facts is None:
        _check_space(cache, checkpoint, dtype)
        step = None
        if weights:
            step = Quantising(role, weights, checkpoint.source, text, bool(checkpoint.packed))
        facts = _export(
            role, checkpoint, dtype, max_len, capacity, form, step, cache_type, folder, key
        )
    return folder, facts


def _cached(folder: Path, key: str) -> GraphFacts | None:
    """A finished part with this key whose files are what they were; else it is made again."""
    if not (folder / PART_FILE).is_file():
        return None
    try:
        facts = read_json(folder / PART_FILE, "graph", GraphFacts, "")
        verify_files(folder, facts.files, contents=True, remedy="")
    except OutriderError:
        return None
    return facts if facts.key == key else None


def _export(
    role: str,
    checkpoint: Checkpoint,
    dtype: Dtype,
    max_len: int,
    capacity: int,
    form: Format,
    quantising: Quantising | None,
    cache_type: Cache | None,
    folder: Path,
    key: str,
) -> GraphFacts:
    torch_dtype = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    with stage(role, "load") as said:
        model = load(checkpoint, torch_dtype[dtype])
        parameters = model.num_parameters()
        said.note = f"{parameters / 1e6:,.1f} M parameters, {checkpoint.architecture}"
        if checkpoint.packed:
            said.note += f", {checkpoint.packed}, made {dtype}"
    vocab_size = _width(model)
    if quantising:
        compare.reference(model, capacity, vocab_size)  # says NaN or infinity, if anything does
        quantising.quantise(model, max_len)
    with stage(role, "run the original"):
        original = compare.reference(model, capacity, vocab_size)
        rounded = None
        if quantising:
            with rounding_activations():
                rounded = compare.reference(model, capacity, vocab_size)
        shapes = cache_shapes(model, checkpoint)

    def in_float32() -> PreTrainedModel:
        model = load(checkpoint, torch.float32)
        return quantising.again(model) if quantising else model

    with stage(role, f"trace, {dtype}") as said:
        try:
            traced = _traced(model, checkpoint, shapes, capacity, torch_dtype[dtype], form)
        except Exception as error:  # noqa: BLE001 - torch.export wraps whatever the model raised
            raise refuse_architecture(
                checkpoint.source, checkpoint.config, _reason(error)
            ) from None
        said.note = f"{len(shapes.keys)} layers, {capacity} rows a slot"
    if form == "onnx":  # a compiler of torch's graphs does this itself
        with stage(role, "simplify") as said:
            said.note = _simplify(traced)
    with write_folder(folder, PART_FILE) as partial:
        with stage(role, "write") as said:
            (program if form == "torch" else graph).save(traced[0], partial)
            if checkpoint.has_encoder:
                graph.save(traced[1], partial, ENCODER_FILE, ENCODER_WEIGHTS_FILE)
            files = {path.name: file_facts(path) for path in sorted(partial.iterdir())}
            said.note = f"{sum(f.size for f in files.values()) / 2**20:,.1f} MiB"
        del model, traced  # the comparison loads the weights a second time
        gc.collect()
        with stage(role, "compare with the original") as said:
            result = compare.compare(
                partial,
                original,
                dtype,
                # A second load, of twice the size: only where the first answer is in doubt.
                lambda: compare.reference(in_float32(), capacity, vocab_size),
            )
            said.note = result.what
            if result.max_difference is not None:
                said.note = (
                    f"largest difference {result.max_difference:.1e} (bound {result.bound:.1e})"
                    + original.remark
                )
        if not result.passed:
            raise OutriderError(
                "difference",
                f"the graph of {checkpoint.source} differs from the original by "
                f"{result.max_difference:.1e}, more than {result.bound:.1e}",
                "Build with DTYPE=float32; if that fails too, please report the architecture.",
            )
        if form == "onnx" and dtype == "float32" and not checkpoint.has_encoder:
            with stage(role, "for ONNX Runtime on the CPU") as said:
                said.note = _host(partial, original, capacity, rounded, cache_type)
            for name in (HOST_FILE, HOST_WEIGHTS_FILE):
                if (partial / name).exists():
                    files[name] = file_facts(partial / name)
        quality = None
        if quantising:
            of_engine = partial / HOST_FILE if HOST_WEIGHTS_FILE in files else None
            quality = quantising.measure(of_engine, dtype)
        facts = GraphFacts(
            key=key,
            source=checkpoint.source,
            architecture=checkpoint.architecture,
            parameters=parameters,
            dtype=dtype,
            vocab_size=vocab_size,
            max_len=max_len,
            capacity=capacity,
            key_shapes=_listed(shapes.keys),
            value_shapes=_listed(shapes.values),
            max_difference=result.max_difference,
            tolerance=result.bound,
            comparison=result.what,
            versions=versions(),
            files=files,
            context=checkpoint.context,
            cache=cache_type,
            weights=quantising.weights if quantising else None,
            quality=quality,
            encoder=EncoderFacts(_listed(shapes.source_keys), _listed(shapes.source_values))
            if checkpoint.has_encoder
            else None,
        )
        write_json(partial / PART_FILE, "graph", facts)
    return facts


def _traced(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    shapes: CacheShapes,
    capacity: int,
    dtype: torch.dtype,
    form: Format,
) -> list[Any]:
    """The decoder's graph, and then the encoder's, where there is one: what `save` of the format
    takes."""
    positions = learned_positions(model, checkpoint)
    rows = program.EXAMPLE_ROWS if form == "torch" else capacity
    of_text = example(shapes.keys, shapes.values, rows, dtype)
    if not checkpoint.has_encoder:
        decoder = Decoder(model, positions).eval()
        return [(program if form == "torch" else graph).trace(decoder, of_text)]
    source = shapes.source_keys, shapes.source_values
    return [
        graph.trace(SourceDecoder(model, positions).eval(), example_decoder(of_text, *source)),
        graph.trace(Encoder(model).eval(), example_encoder(*source)),
    ]


def _simplify(traced: list[Any]) -> str:
    before = sum(len(each.graph) for each in traced)
    for each in traced:
        graph.simplify(each)
    return f"{before:,} -> {sum(len(each.graph) for each in traced):,} nodes"


def _listed(shapes: Sequence[tuple[int, int]]) -> list[list[int]]:
    return [list(shape) for shape in shapes]


def _host(
    folder: Path,
    original: compare.Reference,
    capacity: int,
    rounded: compare.Reference | None = None,
    cache: Cache | None = None,
) -> str:
    """Write the graph for the CPU, unless there is none or it is not right; what to say of it. With
    quantised rows only when it is right without, and they cost no more than `TOLERANCE`."""
    try:
        nodes = host.write(folder, capacity)
        result = compare.compare(folder, original, "float32", file=HOST_FILE, rounded=rounded)
        if not result.passed:
            raise host.NotLowered(f"it would differ by {result.max_difference:.1e}")
        if cache:
            host.write(folder, capacity, cache)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told or refused
        if cache:
            cause = f"CACHE={cache} needs a graph of our own: {first_line(error)}"
            raise OutriderError("backend", cause, "Build without CACHE.") from None
        if rounded is not None:
            raise OutriderError(
                "difference",
                f"the graph for the CPU is not right: {first_line(error)}",
                "Build without WEIGHTS; and please report the architecture.",
            ) from None
        (folder / HOST_FILE).unlink(missing_ok=True)
        return f"none: {first_line(error)}"
    said = f"{nodes:,} nodes, largest difference {result.max_difference:.1e}"
    if cache:
        rows = compare.compare(
            folder, original, "float32", file=HOST_FILE, rounded=rounded, cache=cache
        )
        found = f"{rows.max_difference:.1e}"
        if not rows.passed:
            cause = f"rows of {cache} change a logit by {found}, more than {rows.bound:.1e}"
            raise OutriderError("difference", cause, "Build without CACHE.")
        said += f", with rows of {cache} {found} (bound {rows.bound:.1e})"
    return said


def _check_space(cache: Path, checkpoint: Checkpoint, dtype: Dtype) -> None:
    """Fail before minutes of work, not after them."""
    cache.mkdir(parents=True, exist_ok=True)
    # A graph holds what the checkpoint holds; at worst 16-bit weights become 32-bit ones.
    sizes = sum(path.stat().st_size for path in checkpoint.files)
    stored = min(16, checkpoint.packed.bits) if checkpoint.packed else 16
    need = sizes * (32 if dtype == "float32" else 16) // stored
    free = shutil.disk_usage(cache).free
    if need > free:
        raise OutriderError(
            "disk",
            f"{cache} has {free / 2**20:,.0f} MiB free, and the graph may need {need / 2**20:,.0f}",
            "Free some space, or set another --cache.",
        )


def _width(model: PreTrainedModel) -> int:
    """V of the logits. No variable of the caller may hold a weight: it would keep all mapped."""
    outputs: torch.nn.Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return int(outputs.weight.shape[0])


def _reason(error: BaseException) -> str:
    """The innermost cause in a chain of exporter errors, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, UnsupportedArchitecture):
        return str(error)
    return f"torch.export: {first_line(error)}"
