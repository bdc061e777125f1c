"""Export one model's graph to a content-addressed cache: made once, then found by its key."""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    HOST_FILE,
    PART_FILE,
    Cache,
    Dtype,
    EncoderFacts,
    Format,
    GraphFacts,
    StateFacts,
    Weights,
    file_facts,
    verify_files,
)
from runtime.files.progress import note, stage
from runtime.files.records import digest_json, read_json, write_json

from . import compare, graph, program
from .checkpoint import Checkpoint, content_hashes
from .decoder import Decoder, example
from .encoder import Encoder, SharedEncoder, SourceDecoder, example_decoder, example_encoder
from .functions.carrying import UnsupportedArchitecture
from .host.checked import write_checked
from .loading import CacheShapes, cache_shapes, carries, give_back, learned_positions, load
from .weights import quality
from .weights.blocks import BLOCK
from .weights.experts import QuantisedExperts, are_experts
from .weights.feedback import load_rounding
from .weights.layers import in_double, rounding_activations
from .weights.quantising import Quantising
from .weights.stored import load_as_stored


def versions() -> dict[str, str]:
    modules = (torch, transformers, onnx, onnx_ir, onnxscript)
    return {module.__name__: module.__version__ for module in modules}


# The code that chooses 4-bit levels.
ROUNDING = Path(__file__).parents[1] / "plugins" / "cpu" / "outrider_rounding.cpp"


def exporter_digest() -> str:
    """A hash of this package and of the other code that decides a graph's contents: how weights are
    rounded, and how torch's files are laid out."""
    digest = hashlib.sha256()
    own = sorted(Path(__file__).parent.rglob("*.py"))
    for path in (*own, Path(torch_files.__file__), ROUNDING):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Wanted:
    """A request for the graph of a checkpoint.

    role: "target" or "draft", as in progress lines. text: token ids to measure the quality of
    quantised weights on; if None, the model generates them. bits: maximum bits per weight of int4;
    None: see `quantise_model`. shares: whether the model reads the states of the target's encoder.
    states: whether the backend runs models with recurrent states. The others are as in
    `GraphFacts`.
    """

    role: str
    checkpoint: Checkpoint
    dtype: Dtype
    max_len: int
    capacity: int
    max_gamma: int
    form: Format = "onnx"
    weights: Weights | None = None
    cache: Cache | None = None
    text: Sequence[int] | None = None
    bits: float | None = None
    shares: bool = False
    states: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def by(self) -> Any:
        """The module whose `trace` and `save` make this format."""
        return program if self.form == "torch" else graph

    @property
    def takes_states(self) -> bool:
        """Whether layers with a recurrent state can be exported with these options."""
        return self.states and self.for_host and not self.cache

    @property
    def for_host(self) -> bool:
        """Whether a separate graph is made for ONNX Runtime on the CPU."""
        return self.form == "onnx" and self.dtype == "float32"

    def key(self) -> str:
        """A digest of everything that decides the result."""
        return digest_json(
            {
                "files": content_hashes(self.checkpoint),
                "dtype": self.dtype,
                "max_len": self.max_len,
                "capacity": self.capacity,
                "max_gamma": self.max_gamma,
                "exporter": exporter_digest(),
                "versions": versions(),
                "format": self.form,
                "weights": self.weights,
                "text": self.text if self.weights else None,  # it matters only to quantised weights
                "bits": self.bits,
                "cache": self.cache,
                "shares": self.shares,
                "checked": find_library() is not None,  # whether the CPU's graph can be compared
            }
        )


def make(wanted: Wanted, folder: Path, force: bool = False) -> tuple[Path, GraphFacts]:
    """Export the checkpoint's graph to a subfolder of `folder`, unless it is there already; returns
    the subfolder.

    Raises OutriderError "checkpoint", "architecture", "difference" or "disk", and "backend" if the
    weights need liboutrider and it is missing.
    """
    role, checkpoint = wanted.role, wanted.checkpoint
    if wanted.weights == "int4" or (wanted.weights and wanted.for_host):
        load_rounding()  # fail now, not after minutes of work
    with stage(role, "hash") as said:
        key = wanted.key()
        own = folder / key[:16]
        facts = None if force else _cached(own, key)
        said.note = f"{checkpoint.source}, " + (
            f"cached (key {key[:8]})" if facts is not None else f"key {key[:8]}"
        )
    if facts is None:
        _check_space(folder, wanted)
        return own, _export(wanted, own, key)
    if facts.states and not wanted.takes_states:
        raise _without_states(wanted)
    if facts.quality:
        with stage(role, "quality") as said:
            said.note = quality.describe(facts.quality)
    return own, facts


def _cached(folder: Path, key: str) -> GraphFacts | None:
    """The facts of a finished part with this key and unchanged files; None if there is none."""
    if not (folder / PART_FILE).is_file():
        return None
    try:
        facts = read_json(folder / PART_FILE, "graph", GraphFacts, "")
        verify_files(folder, facts.files, contents=True, remedy="")
    except OutriderError:
        return None
    return facts if facts.key == key else None


@dataclass(frozen=True)
class _Original:
    """What is kept of the model after its weights are released.

    rounded: its logits with activations rounded as by liboutrider; None if weights are not
    quantised. exact: its logits in float64, for quantised experts and text encoders.
    """

    parameters: int
    shapes: CacheShapes
    said: compare.Reference
    rounded: compare.Reference | None
    exact: compare.Reference | None


def _export(wanted: Wanted, folder: Path, key: str) -> GraphFacts:
    role, checkpoint = wanted.role, wanted.checkpoint
    quantising = None
    if wanted.weights:
        quantising = Quantising(
            role, wanted.weights, checkpoint, wanted.text, wanted.shares, wanted.bits
        )
    with write_folder(folder, PART_FILE) as partial:
        original = _write(wanted, quantising, partial)
        give_back()  # the comparison loads the weights again
        exact = _exactly(wanted, quantising, original.exact)
        result = _compare(wanted, original, exact, partial)
        if wanted.for_host:
            with stage(role, "for ONNX Runtime on the CPU") as said:
                said.note = write_checked(
                    partial, original.said, original.rounded, exact, wanted.capacity, wanted.cache
                )
        found = None
        if quantising:
            engine = partial / HOST_FILE if wanted.for_host else None
            found = quantising.measure(engine, wanted.dtype)
        shapes = original.shapes
        facts = GraphFacts(
            key=key,
            source=checkpoint.source,
            architecture=checkpoint.architecture,
            parameters=original.parameters,
            dtype=wanted.dtype,
            vocab_size=original.said.logits.shape[2],
            max_len=wanted.max_len,
            capacity=wanted.capacity,
            key_shapes=_listed(shapes.keys),
            value_shapes=_listed(shapes.values),
            max_difference=result.max_difference,
            tolerance=result.bound,
            comparison=result.what,
            versions=versions(),
            files={path.name: file_facts(path) for path in sorted(partial.iterdir())},
            context=checkpoint.context,
            cache=wanted.cache,
            weights=wanted.weights,
            bits=wanted.bits,
            quality=found,
            encoder=_encoder_facts(wanted, shapes),
            states=_state_facts(wanted, shapes),
        )
        write_json(partial / PART_FILE, "graph", facts)
    return facts


def _write(wanted: Wanted, quantising: Quantising | None, folder: Path) -> _Original:
    """Load the model, quantise, run, trace and write it. The result refers to no weights."""
    role, checkpoint = wanted.role, wanted.checkpoint
    with stage(role, "load") as said:
        narrow = quantising and wanted.dtype == "float32"
        model = load_as_stored(checkpoint) if narrow else load(checkpoint, wanted.torch_dtype)
        parameters = model.num_parameters()
        said.note = f"{parameters / 1e6:,.1f} M parameters, {checkpoint.architecture}"
        if checkpoint.packed:
            said.note += f", {checkpoint.packed}" + ("" if narrow else f", made {wanted.dtype}")
        if not wanted.takes_states and carries(model):
            raise _without_states(wanted)
    if quantising:
        quantising.quantise(model, wanted.max_len, folder)
    elif wanted.for_host and any(are_experts(module) for module in model.modules()):
        option = "DRAFT_WEIGHTS" if role == "draft" else "WEIGHTS"
        note(f"all experts compute every token; with {option}=int4 or int8 only the chosen ones do")
    with stage(role, "run the original"):
        given = model, wanted.capacity, checkpoint.features, wanted.shares
        original, rounded, exact = compare.reference(*given), None, None
        if quantising:
            with rounding_activations():
                rounded = compare.reference(*given)
        experts = any(isinstance(module, QuantisedExperts) for module in model.modules())
        if narrow and (experts or (checkpoint.has_encoder and not checkpoint.features)):
            # If two experts score alike, rounding decides which one is chosen; and T5 does not
            # scale its attention scores down. Some models cannot compute in float64.
            with in_double(model), suppress(OutriderError):
                exact = compare.reference(*given)
        shapes = cache_shapes(model, checkpoint)
        if shapes.carried and not wanted.takes_states:
            raise _without_states(wanted)
    traced = _trace(wanted, model, shapes)
    if wanted.form == "onnx":  # compilers of torch's graphs simplify them themselves
        with stage(role, "simplify") as said:
            said.note = _simplify(traced)
    with stage(role, "write") as said:
        for i, each in enumerate(traced):
            wanted.by.save(each, folder, encoder=i > 0)
        size = sum(path.stat().st_size for path in folder.iterdir())
        said.note = f"{size / 2**20:,.1f} MiB"
    return _Original(parameters, shapes, original, rounded, exact)


def _trace(wanted: Wanted, model: PreTrainedModel, shapes: CacheShapes) -> list[Any]:
    """Trace the decoder, and the encoder if there is one. The results are for the format's
    `save`."""
    checkpoint = wanted.checkpoint
    with stage(wanted.role, f"trace, {wanted.dtype}") as said:
        said.note = f"{len(shapes.keys)} layers, {wanted.capacity} rows per slot"
        positions = learned_positions(model, checkpoint)
        rows = program.EXAMPLE_ROWS if wanted.form == "torch" else wanted.capacity
        of_text = example(
            shapes.keys, shapes.values, rows, wanted.torch_dtype, shapes.carried,
            _state_rows(wanted, shapes),
        )  # fmt: skip
        source = shapes.source_keys, shapes.source_values
        try:
            if not checkpoint.has_encoder:
                return [wanted.by.trace(Decoder(model, positions).eval(), of_text)]
            read_by_decoder = example_decoder(of_text, *source)
            states = torch.zeros(1, shapes.source_rows or 3, shapes.states, dtype=model.dtype)
            read = example_encoder(*source, checkpoint.features, states if wanted.shares else None)
            encoder = (SharedEncoder if wanted.shares else Encoder)(model)
            return [
                wanted.by.trace(SourceDecoder(model, positions).eval(), read_by_decoder),
                wanted.by.trace(encoder.eval(), read),
            ]
        except Exception as error:  # noqa: BLE001 - torch.export wraps whatever the model raised
            raise checkpoint.refused(_reason(error)) from None


def _simplify(traced: list[Any]) -> str:
    before = sum(len(each.graph) for each in traced)
    for each in traced:
        graph.simplify(each)
    return f"{before:,} -> {sum(len(each.graph) for each in traced):,} nodes"


def _encoder_facts(wanted: Wanted, shapes: CacheShapes) -> EncoderFacts | None:
    if not wanted.checkpoint.has_encoder:
        return None
    sides = _listed(shapes.source_keys), _listed(shapes.source_values)
    shared = shapes.states if wanted.shares else None
    return EncoderFacts(*sides, wanted.checkpoint.features, shapes.source_rows, shared)


def _without_states(wanted: Wanted) -> OutriderError:
    """The error for an option or backend that does not support recurrent states."""
    which = f"{wanted.checkpoint.source} is a {wanted.checkpoint.architecture}"
    if wanted.for_host and not wanted.cache:
        return OutriderError(
            "backend",
            f"{which}, and the backend does not run models with a recurrent state in this version",
            "Build with BACKEND=onnxruntime.",
        )
    name = f"CACHE={wanted.cache}" if wanted.cache else f"DTYPE={wanted.dtype}"
    name = "BACKEND=aotinductor" if wanted.form == "torch" else name
    return OutriderError(
        "option",
        f"{name} supports only models without a recurrent state in this version, and {which}",
        f"Leave {name.partition('=')[0]} out: the model runs on the CPU in float32, also with "
        "WEIGHTS=int8 or int4.",
    )


def _state_rows(wanted: Wanted, shapes: CacheShapes) -> int:
    """Rows R of a state's ring: those that a round writes, with a draft that starts two tokens
    earlier, or that the comparison with the original rolls back over; plus the earlier rows that a
    call reads."""
    return max(wanted.max_gamma + 3, 8) + shapes.reach


def _state_facts(wanted: Wanted, shapes: CacheShapes) -> StateFacts | None:
    if not shapes.carried:
        return None
    return StateFacts(_listed(shapes.carried), _state_rows(wanted, shapes), shapes.reach)


def _listed(shapes: Sequence[tuple[int, int]]) -> list[list[int]]:
    return [list(shape) for shape in shapes]


def _exactly(
    wanted: Wanted, quantising: Quantising | None, found: compare.Reference | None
) -> Callable[[], compare.Reference] | None:
    """A function that computes the original's logits in twice the precision. It loads the model
    again, at twice the size, but only once. For quantised float32 models, whose levels are not
    kept, it returns `found`, computed while they were present; None if that is missing."""
    if quantising and wanted.dtype == "float32":
        return (lambda: found) if found else None

    @functools.cache
    def reference() -> compare.Reference:
        model = load(wanted.checkpoint, torch.float32)
        if quantising:
            quantising.again(model)
        if wanted.dtype == "float32":
            model = model.double()
            model.config._experts_implementation = "eager"  # grouped products lack float64
        features = wanted.checkpoint.features
        return compare.reference(model, wanted.capacity, features, wanted.shares)

    return reference


def _compare(
    wanted: Wanted,
    original: _Original,
    exact: Callable[[], compare.Reference] | None,
    folder: Path,
) -> compare.Comparison:
    """Compare the graph with the original. Raises OutriderError "difference", "architecture",
    "backend"."""
    with stage(wanted.role, "compare with the original") as said:
        try:
            result = compare.compare(folder, original.said, wanted.dtype, exact)
        except OutriderError as error:
            if error.kind != "backend" or wanted.dtype != "float32":
                raise
            raise wanted.checkpoint.refused(f"its graph does not run: {error.cause}") from None
        said.note = result.what
        if result.max_difference is not None:
            said.note = f"largest difference {result.told()}{original.said.remark}"
    if not result.passed:
        raise OutriderError(
            "difference",
            f"the graph of {wanted.checkpoint.source} differs from the original by {result.told()}",
            "Please report the architecture."
            if wanted.dtype == "float32"
            else "Build with DTYPE=float32; if that fails too, please report the architecture.",
        )
    return result


def _check_space(folder: Path, wanted: Wanted) -> None:
    """Raise OutriderError "disk" before minutes of work, not after them."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = wanted.checkpoint
    sizes = sum(path.stat().st_size for path in checkpoint.files)
    # A graph holds the checkpoint's weights; at worst 16-bit ones become 32-bit ones.
    stored = min(16, checkpoint.packed.bits) if checkpoint.packed else 16
    numbers, width = sizes * 8 // stored, 32 if wanted.dtype == "float32" else 16
    need = numbers * width // 8
    if wanted.weights:
        text = checkpoint.text_config
        table = min(
            numbers, text.vocab_size * getattr(text, "hidden_size", 0)
        )  # dense, for ONNX's Gather
        each = 4 if wanted.weights == "int4" else 8
        bits = int(table * 8 + (numbers - table) * (wanted.bits or each))
        graphs = [width, 16] if wanted.for_host else [width]  # width of their scales, in bits
        need = (table * width + sum(bits + numbers * scale // BLOCK for scale in graphs)) // 8
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OutriderError(
            "disk",
            f"{folder} has {free / 2**20:,.0f} MiB free, but the graph may need "
            f"{need / 2**20:,.0f}",
            "Free some space, or set another --cache.",
        )


def _reason(error: BaseException) -> str:
    """The innermost cause in a chain of exporter errors, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, UnsupportedArchitecture):
        return str(error)
    if "complex-valued" in str(error):
        return "it computes with complex numbers"
    if "data-dependent" in str(error):
        return "its code depends on values that are known only at run time"
    return f"torch.export cannot follow its code ({first_line(error)})"
