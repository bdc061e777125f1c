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
from runtime.files.graphs import (
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
from runtime.files.library import find_library
from runtime.files.progress import note, size_text, stage
from runtime.files.records import digest_json, read_json, write_json

from . import compare, graph, program
from .checkpoint import Checkpoint, content_hashes
from .decoder import Decoder, example
from .encoder import Encoder, SourceDecoder, example_decoder, example_encoder
from .functions.stateful_layers import UnsupportedArchitecture
from .host.checked import write_checked
from .loading import (
    CacheShapes,
    cache_shapes,
    has_recurrent_state,
    learned_positions,
    load,
    release_memory,
)
from .weights import quality
from .weights.blocks import BLOCK
from .weights.experts import QuantisedExperts, are_experts
from .weights.feedback import load_rounding
from .weights.halves import store_in_16_bits
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
class PartRequest:
    """A request for the graph of a checkpoint.

    role: "target" or "draft", as in progress lines. text: token ids to measure the quality of
    quantised weights on; if None, the model generates them. bits: maximum bits per weight of int4;
    None: see `quantise_model`. shares_encoder: whether the model reads the states of the target's
    encoder. backend_runs_states: whether the backend runs models with recurrent states. The others
    are as in `GraphFacts`.
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
    shares_encoder: bool = False
    backend_runs_states: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def exporter(self) -> Any:
        """The module whose `trace` and `save` make this format."""
        return program if self.form == "torch" else graph

    @property
    def supports_states(self) -> bool:
        """Whether layers with a recurrent state can be exported with these options."""
        return self.backend_runs_states and self.has_host_graph and not self.cache

    @property
    def has_host_graph(self) -> bool:
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
                "shares": self.shares_encoder,
                "checked": find_library() is not None,  # whether the CPU's graph can be compared
            }
        )


def make(request: PartRequest, folder: Path, force: bool = False) -> tuple[Path, GraphFacts]:
    """Export the checkpoint's graph to a subfolder of `folder`, unless it is there already; returns
    the subfolder.

    Raises OutriderError "checkpoint", "architecture", "difference" or "disk", and "backend" if the
    weights need liboutrider and it is missing.
    """
    role, checkpoint = request.role, request.checkpoint
    if request.weights == "int4" or (request.weights and request.has_host_graph):
        load_rounding()  # fail now, not after minutes of work
    with stage(role, "hash") as progress:
        key = request.key()
        part_folder = folder / key[:16]
        facts = None if force else _find_cached(part_folder, key)
        progress.note = f"{checkpoint.source}, " + (
            f"cached (key {key[:8]})" if facts is not None else f"key {key[:8]}"
        )
    if facts is None:
        _check_space(folder, request)
        return part_folder, _export(request, part_folder, key)
    if facts.states and not request.supports_states:
        raise _states_unsupported(request)
    if facts.quality:
        with stage(role, "quality") as progress:
            progress.note = quality.describe(facts.quality)
    return part_folder, facts


def _find_cached(folder: Path, key: str) -> GraphFacts | None:
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
    reference: compare.Reference
    rounded: compare.Reference | None
    exact: compare.Reference | None


def _export(request: PartRequest, folder: Path, key: str) -> GraphFacts:
    role, checkpoint = request.role, request.checkpoint
    quantising = None
    if request.weights:
        quantising = Quantising(
            role, request.weights, checkpoint, request.text, request.shares_encoder, request.bits
        )
    with write_folder(folder, PART_FILE) as partial:
        original = _write_graphs(request, quantising, partial)
        release_memory()  # the comparison loads the weights again
        exact = _precise_reference(request, quantising, original.exact)
        result = _compare(request, original, exact, partial)
        if request.has_host_graph:
            with stage(role, "for ONNX Runtime on the CPU") as progress:
                progress.note = write_checked(
                    partial, original.reference, original.rounded, exact,
                    request.capacity, request.cache,
                )  # fmt: skip
        quality_facts = None
        if quantising:
            engine = partial / HOST_FILE if request.has_host_graph else None
            quality_facts = quantising.measure(engine, request.dtype)
        shapes = original.shapes
        facts = GraphFacts(
            key=key,
            source=checkpoint.source,
            architecture=checkpoint.architecture,
            parameters=original.parameters,
            dtype=request.dtype,
            vocab_size=original.reference.logits.shape[2],
            max_len=request.max_len,
            capacity=request.capacity,
            key_shapes=shapes.keys,
            value_shapes=shapes.values,
            max_difference=result.max_difference,
            tolerance=result.bound,
            comparison=result.summary,
            versions=versions(),
            files={path.name: file_facts(path) for path in sorted(partial.iterdir())},
            context=checkpoint.context,
            cache=request.cache,
            weights=request.weights,
            bits=request.bits,
            quality=quality_facts,
            encoder=_encoder_facts(request, shapes),
            states=_state_facts(request, shapes),
        )
        write_json(partial / PART_FILE, "graph", facts)
    return facts


def _write_graphs(request: PartRequest, quantising: Quantising | None, folder: Path) -> _Original:
    """Load the model, quantise, run, trace and write it. The result refers to no weights."""
    role, checkpoint = request.role, request.checkpoint
    with stage(role, "load") as progress:
        as_stored = quantising and request.dtype == "float32"
        model = load_as_stored(checkpoint) if as_stored else load(checkpoint, request.torch_dtype)
        parameters = model.num_parameters()
        progress.note = f"{parameters / 1e6:,.1f} M parameters, {checkpoint.architecture}"
        if checkpoint.packed:
            progress.note += f", {checkpoint.packed}" + (
                "" if as_stored else f", made {request.dtype}"
            )
        if not request.supports_states and has_recurrent_state(model):
            raise _states_unsupported(request)
    if quantising:
        quantising.quantise(model, request.max_len, folder)
    elif request.has_host_graph and any(are_experts(module) for module in model.modules()):
        option = "DRAFT_WEIGHTS" if role == "draft" else "WEIGHTS"
        note(f"all experts compute every token; with {option}=int4 or int8 only the chosen ones do")
    with stage(role, "run the original"):
        arguments = model, request.capacity, checkpoint.features, request.shares_encoder
        original, rounded, exact = compare.reference(*arguments), None, None
        if quantising:
            with rounding_activations():
                rounded = compare.reference(*arguments)
        experts = any(isinstance(module, QuantisedExperts) for module in model.modules())
        if as_stored and (experts or (checkpoint.has_encoder and not checkpoint.features)):
            # If two experts score alike, rounding decides which one is chosen; and T5 does not
            # scale its attention scores down. Some models cannot compute in float64.
            with in_double(model), suppress(OutriderError):
                exact = compare.reference(*arguments)
        shapes = cache_shapes(model, checkpoint)
        if shapes.state_shapes and not request.supports_states:
            raise _states_unsupported(request)
    traced = _trace(request, model, shapes)
    if request.form == "onnx":  # compilers of torch's graphs simplify them themselves
        with stage(role, "simplify") as progress:
            progress.note = _simplify(traced)
            if request.has_host_graph and not quantising:
                progress.note += store_in_16_bits(traced[0])
    with stage(role, "write") as progress:
        for i, each in enumerate(traced):
            request.exporter.save(each, folder, encoder=i > 0)
        size = sum(path.stat().st_size for path in folder.iterdir())
        progress.note = f"{size / 2**20:,.1f} MiB"
    return _Original(parameters, shapes, original, rounded, exact)


def _trace(request: PartRequest, model: PreTrainedModel, shapes: CacheShapes) -> list[Any]:
    """Trace the decoder, and the encoder if there is one. The results are for the format's
    `save`."""
    checkpoint = request.checkpoint
    with stage(request.role, f"trace, {request.dtype}") as progress:
        progress.note = f"{len(shapes.keys)} layers, {request.capacity} rows per slot"
        positions = learned_positions(model, checkpoint)
        rows = program.EXAMPLE_ROWS if request.form == "torch" else request.capacity
        text_example = example(
            shapes.keys, shapes.values, rows, request.torch_dtype, shapes.state_shapes,
            _state_rows(request, shapes),
        )  # fmt: skip
        source = shapes.source_keys, shapes.source_values
        try:
            if not checkpoint.has_encoder:
                return [request.exporter.trace(Decoder(model, positions).eval(), text_example)]
            decoder_example = example_decoder(text_example, *source)
            states = torch.zeros(
                1, shapes.source_rows or 3, shapes.encoder_width, dtype=model.dtype
            )
            encoder_example = example_encoder(
                *source, checkpoint.features, states if request.shares_encoder else None
            )
            encoder = Encoder(model, request.shares_encoder)
            return [
                request.exporter.trace(SourceDecoder(model, positions).eval(), decoder_example),
                request.exporter.trace(encoder.eval(), encoder_example),
            ]
        except Exception as error:  # noqa: BLE001 - torch.export wraps whatever the model raised
            raise checkpoint.refused(_innermost_reason(error)) from None


def _simplify(traced: list[Any]) -> str:
    before = sum(len(each.graph) for each in traced)
    for each in traced:
        graph.simplify(each)
    return f"{before:,} -> {sum(len(each.graph) for each in traced):,} nodes"


def _encoder_facts(request: PartRequest, shapes: CacheShapes) -> EncoderFacts | None:
    if not request.checkpoint.has_encoder:
        return None
    shared = shapes.encoder_width if request.shares_encoder else None
    features, rows = request.checkpoint.features, shapes.source_rows
    return EncoderFacts(shapes.source_keys, shapes.source_values, features, rows, shared)


def _states_unsupported(request: PartRequest) -> OutriderError:
    """The error for an option or backend that does not support recurrent states."""
    which = f"{request.checkpoint.source} is a {request.checkpoint.architecture}"
    if request.has_host_graph and not request.cache:
        return OutriderError(
            "backend",
            f"{which}, and the backend does not run models with a recurrent state in this version",
            "Build with BACKEND=onnxruntime.",
        )
    name = f"CACHE={request.cache}" if request.cache else f"DTYPE={request.dtype}"
    name = "BACKEND=aotinductor" if request.form == "torch" else name
    return OutriderError(
        "option",
        f"{name} supports only models without a recurrent state in this version, and {which}",
        f"Leave {name.partition('=')[0]} out: the model runs on the CPU in float32, also with "
        "WEIGHTS=int8 or int4.",
    )


def _state_rows(request: PartRequest, shapes: CacheShapes) -> int:
    """Rows R of a state's ring: those that a round writes, with a draft that starts two tokens
    earlier, or that the comparison with the original rolls back over; plus the earlier rows that a
    call reads."""
    return max(request.max_gamma + 3, 8) + shapes.reach


def _state_facts(request: PartRequest, shapes: CacheShapes) -> StateFacts | None:
    if not shapes.state_shapes:
        return None
    return StateFacts(shapes.state_shapes, _state_rows(request, shapes), shapes.reach)


def _precise_reference(
    request: PartRequest, quantising: Quantising | None, stored_reference: compare.Reference | None
) -> Callable[[], compare.Reference] | None:
    """A function that computes the original's logits in twice the precision. It loads the model
    again, at twice the size, but only once. For quantised float32 models, whose levels are not
    kept, it returns `stored_reference`, computed while they were there; None if that is missing."""
    if quantising and request.dtype == "float32":
        return (lambda: stored_reference) if stored_reference else None

    @functools.cache
    def reference() -> compare.Reference:
        model = load(request.checkpoint, torch.float32)
        if quantising:
            quantising.requantise(model)
        if request.dtype == "float32":
            model = model.double()
            model.config._experts_implementation = "eager"  # grouped products lack float64
        features = request.checkpoint.features
        return compare.reference(model, request.capacity, features, request.shares_encoder)

    return reference


def _compare(
    request: PartRequest,
    original: _Original,
    exact: Callable[[], compare.Reference] | None,
    folder: Path,
) -> compare.Comparison:
    """Compare the graph with the original. Raises OutriderError "difference", "architecture",
    "backend"."""
    with stage(request.role, "compare with the original") as progress:
        try:
            result = compare.compare(folder, original.reference, request.dtype, exact)
        except OutriderError as error:
            if error.kind != "backend" or request.dtype != "float32":
                raise
            raise request.checkpoint.refused(f"its graph does not run: {error.cause}") from None
        progress.note = result.summary
        if result.max_difference is not None:
            progress.note = f"largest difference {result.describe()}{original.reference.remark}"
    if not result.passed:
        source, by = request.checkpoint.source, result.describe()
        cause = f"the graph of {source} differs from the original by {by}"
        raise OutriderError("difference", cause, compare.report_remedy(request.dtype))
    return result


def _check_space(folder: Path, request: PartRequest) -> None:
    """Raise OutriderError "disk" before minutes of work, not after them."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = request.checkpoint
    sizes = sum(path.stat().st_size for path in checkpoint.files)
    # A graph holds the checkpoint's weights; at worst 16-bit ones become 32-bit ones. On the CPU
    # dense ones do not.
    text = checkpoint.text_config
    stored_bits = min(16, checkpoint.packed.bits) if checkpoint.packed else 16
    numbers, width = sizes * 8 // stored_bits, 32 if request.dtype == "float32" else 16
    experts = any(value for name, value in vars(text).items() if "experts" in name)
    if request.weights:
        # Dense, for ONNX's Gather.
        table = min(numbers, text.vocab_size * getattr(text, "hidden_size", 0))
        bits_per_number = 4 if request.weights == "int4" else 8
        bits = int(table * 8 + (numbers - table) * (request.bits or bits_per_number))
        # The width of their scales, in bits.
        graphs = [width, 16] if request.has_host_graph else [width]
        need = (table * width + sum(bits + numbers * scale // BLOCK for scale in graphs)) // 8
    elif request.has_host_graph and not (checkpoint.packed or checkpoint.has_encoder or experts):
        need = sizes
    else:
        need = numbers * width // 8
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OutriderError(
            "disk",
            f"{folder} has {size_text(free)} free, but the graph may need {size_text(need)}",
            "Free some space, or set another --cache.",
        )


def _innermost_reason(error: BaseException) -> str:
    """The innermost cause in a chain of exporter errors, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, UnsupportedArchitecture):
        return str(error)
    if "data-dependent" in str(error):
        return "its code depends on values that are known only at run time"
    return f"torch.export cannot follow its code ({first_line(error)})"
