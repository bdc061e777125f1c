"""Compare the graph with the original model: prefill, steps, and a roll-back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from runtime.files.errors import OutriderError, convert_errors
from runtime.files.generation import FeatureFacts
from runtime.files.graphs import ENCODER_FILE, GRAPH_FILE, Cache, Dtype
from runtime.files.library import add_operators
from runtime.files.manifest import ORT_LEFT_OUT
from runtime.files.torch_files import PROGRAM_FILE, read_program

from .encoder import STATES, arguments, encoder_states
from .loading import first_token, logits_width
from .weights.experts import are_experts

# Allowed difference of a logit, relative to 1 + the largest logit: some hundred rounding errors.
# 8-bit cache rows are about as coarse as bfloat16.
TOLERANCE: dict[Dtype | Cache, float] = {
    "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1, "int8": 1e-1,
}  # fmt: skip
# The graph's allowed error, as a multiple of the original's own rounding error. In float32, where
# layers amplify the effect of another order of summation, 15 has been observed.
_SLACK: dict[Dtype, float] = {"float32": 30, "float16": 2, "bfloat16": 2}
# In a mixture of experts with rounded activations, one position in this many may differ without a
# bound: if two experts score alike, rounding decides which one is chosen. An error in one kind of
# call affects all of its positions, so less than half of a call's positions may differ like this.
_POSITIONS_PER_OUTLIER = 20
_MAX_TOKENS = 256  # most tokens to compare, even if a sliding window or distant biases need more


@dataclass(frozen=True)
class Reference:
    """Two sequences and the original model's logits: ids [2, T], logits float32 [2, T, V].

    remark: what the sequences are too short to test. sources: for each sequence, if there is an
    encoder: ids [1, E], features [1, F, T], or the states [1, E, D] that the encoder computes from
    them. mixture: whether the model is a mixture of experts.
    """

    ids: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]
    remark: str
    sources: tuple[npt.NDArray[Any], ...] = ()
    mixture: bool = False


@dataclass(frozen=True)
class Comparison:
    """How far the graph's logits are from the original's.

    max_difference: over all positions except the `outliers`; None if the graph was not run.
    outliers: number of positions of a mixture of experts that exceed the bound, which only `mean`
    limits. mean: the mean over positions of the largest difference at each, and its bound; None if
    no allowance is made for rounding, which can vary between positions.
    """

    max_difference: float | None
    bound: float
    summary: str
    mean: tuple[float, float] | None = None
    outliers: int = 0

    @property
    def passed(self) -> bool:
        if self.max_difference is None:
            return True
        mean, its_bound = self.mean or (0, 0)
        return self.max_difference <= self.bound and mean <= its_bound

    def describe(self) -> str:
        largest = f"{self.max_difference:.1e} (bound {self.bound:.1e})"
        if self.outliers:
            largest += f" except at {self.outliers} positions of a mixture"
        if self.mean is None:
            return largest
        return f"{largest}, mean {self.mean[0]:.1e} (bound {self.mean[1]:.1e})"


def reference(
    model: PreTrainedModel,
    capacity: int,
    features: FeatureFacts | None = None,
    shares_encoder: bool = False,
) -> Reference:
    """Run the eager model on whole sequences, without a cache: it shares nothing with the graph.

    features: the features that its encoder reads, if it does not read text. shares_encoder: whether
    the graph reads the output of an encoder.
    """
    config, vocab_size = model.config.get_text_config(decoder=True), logits_width(model)
    window = getattr(config, "sliding_window", None) or 0
    if "local" in getattr(config, "attention_layers", ()):  # of GPT-Neo
        window = config.window_size
    length = 40 if not window or 2 * window + 8 > _MAX_TOKENS else max(40, 2 * window + 8)
    # Include distances beyond the farthest that has its own bias.
    length = max(
        length, min(_MAX_TOKENS, getattr(config, "relative_attention_max_distance", 0) + 8)
    )
    length = min(length, capacity - 8)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab_size, (2, length))
    pad = getattr(config, "pad_token_id", None)
    if pad is not None:  # M2M100 does not count it in positions
        ids[ids == pad] = (pad + 1) % vocab_size
    # Without the first token, any rounding changes the output of some trained models a lot.
    first = first_token(model)
    if first is not None:
        ids[:, 0] = first
    sources: tuple[npt.NDArray[Any], ...] = ()
    if features:
        shape = (1, features.feature_size, features.frames)
        sources = tuple(rng.standard_normal(shape, np.float32) for _ in range(2))
    elif model.config.is_encoder_decoder:
        sources = tuple(rng.integers(0, vocab_size, (1, n)) for n in (length, length // 2))
    remark = f"; its window of {window} was not reached" if window >= length else ""
    source_tensors = [torch.from_numpy(source) for source in sources]
    computed = logits(model, torch.from_numpy(ids), source_tensors)
    if shares_encoder:
        sources = tuple(encoder_states(model, source).float().numpy() for source in source_tensors)
    mixture = any(are_experts(module) for module in model.modules())
    return Reference(ids, computed.float().numpy(), remark, sources, mixture)


def logits(
    model: PreTrainedModel, ids: torch.Tensor, sources: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Logits [B, T, V] of whole sequences [B, T], in the model's dtype. sources: for each sequence,
    if there is an encoder, as in `Reference`. Raises OutriderError "checkpoint" if the model does
    not run, or returns NaN or infinity."""
    result: torch.Tensor
    what = f"Transformers itself cannot run this {type(model).__name__}"
    remedy = "Check that config.json belongs to these weights."
    with convert_errors("checkpoint", what, remedy), torch.no_grad():
        if len(sources):  # one by one, without padding
            pairs = zip(sources, ids, strict=True)
            inputs = [arguments(model, text[None], source) for source, text in pairs]
        else:
            inputs = [arguments(model, ids)]
        result = torch.cat([model(**each, use_cache=False).logits for each in inputs])
    if not torch.isfinite(result).all():  # a bound computed from them would accept anything
        dtype = str(result.dtype).removeprefix("torch.")
        raise OutriderError(
            "checkpoint",
            f"this {type(model).__name__} returns NaN or infinity in {dtype}",
            "Build with another DTYPE; float16 overflows beyond 65504."
            if dtype == "float16"
            else "Check the weights.",
        )
    return result


def compare(
    folder: Path,
    original: Reference,
    dtype: Dtype,
    exact: Callable[[], Reference] | None = None,  # the original in twice the precision
    *,
    file: str = GRAPH_FILE,  # or HOST_FILE
    rounded: Reference | None = None,  # the original with activations rounded as in the graph
    cache: Cache | None = None,  # the type of the graph's cache rows, if not `dtype`
) -> Comparison:
    """Run the graph (in ONNX Runtime, or in torch) as the runtime does: two slots of different
    lengths, rejected drafts overwritten in place, every logit compared.

    If activations are rounded, the graph may be twice as far off as `rounded` is, at the worst
    position and on the mean: a wrong graph is off at all positions, whereas rounding moves one or
    two of them far (in a mixture any distance, by choosing another expert, so that a few positions
    are limited only by the mean, also if cache rows are rounded). If a bound is exceeded, `exact`
    decides, because some layers amplify rounding errors: the graph may then be as far from it as
    the original is, times `_SLACK`, plus the bound, at the worst position and on the mean. Raises
    OutriderError "backend" if ONNX Runtime cannot run the graph.
    """
    tolerance = TOLERANCE[cache or dtype]
    allowances = np.zeros(original.ids.shape, np.float32)
    if rounded is not None:  # sums that differ in the last bit may be rounded to different levels
        allowances = 2 * np.abs(rounded.logits - original.logits).max(-1)
    is_torch = (folder / PROGRAM_FILE).exists()
    if dtype == "bfloat16" and not is_torch:
        summary = "not run: ONNX Runtime has no bfloat16 kernels for the CPU"
        return Comparison(None, tolerance, summary)
    if dtype == "float16" and not is_torch and _crashes(folder):
        summary = "not run: ONNX Runtime crashes when it loads this float16 graph"
        return Comparison(None, tolerance, summary)
    length = original.ids.shape[1]
    summary = f"{length} tokens, 2 slots: prefill, steps, roll-back{original.remark}"

    def compare_with(
        expected: Reference, allowances: npt.NDArray[np.float32], summary: str
    ) -> Comparison:
        graph = (
            _Program(folder, length + 8) if is_torch else _Graph(folder / file, length + 8, dtype)
        )
        if expected.sources:
            graph.encode_sources(expected.sources)
        differences, calls = _differences(graph, expected)
        computed = differences >= 0
        differences, calls = differences[computed], calls[computed]
        allowances = allowances[computed]
        allowed = tolerance * (1 + float(np.abs(expected.logits).max()))
        mean = float(differences.mean()), float(allowances.mean()) + allowed
        bound = float(allowances.max()) + allowed
        if not allowances.any() and cache is None:
            return Comparison(float(differences.max()), bound, summary)
        far = differences > bound
        are_few = all(2 * far[calls == n].sum() < (calls == n).sum() for n in set(calls[far]))
        outliers = int(far.sum()) if are_few and expected.mixture else 0
        if outliers * _POSITIONS_PER_OUTLIER > len(differences):
            outliers = 0
        largest = float(np.sort(differences)[-1 - outliers])
        return Comparison(largest, bound, summary, mean, outliers)

    result = compare_with(original, allowances, summary)
    if result.passed or exact is None:
        return result
    precise = exact()
    rounding = np.abs(original.logits - precise.logits).max(-1)
    precise_dtype = "float64" if dtype == "float32" else "float32"
    summary += f"; from the original in {precise_dtype}, from which its own {dtype} is "
    summary += f"{rounding.max():.1e}"
    return compare_with(precise, allowances + _SLACK[dtype] * rounding, summary)


def _crashes(folder: Path) -> bool:
    """Whether ONNX Runtime crashes on loading the graph, as it can in float16. Tested in a child
    process."""
    load = (
        "import sys, onnxruntime as ort; o = ort.SessionOptions(); o.log_severity_level = 4; "
        "o.add_session_config_entry('session.disable_prepacking', '1'); "
        "ort.InferenceSession(sys.argv[1], o, providers=['CPUExecutionProvider'], "
        "disabled_optimizers=sys.argv[2:])"
    )
    left_out = ORT_LEFT_OUT.get("float16", [])
    command = [sys.executable, "-c", load, str(folder / GRAPH_FILE), *left_out]
    # Ended by a signal. If it raises an exception instead, the comparison reports that.
    return subprocess.run(command, capture_output=True, check=False).returncode < 0


_Call = Callable[[npt.NDArray[np.int64], list[int]], npt.NDArray[np.float32]]


def _differences(
    graph: _Call, original: Reference
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """The largest difference of a logit at each position, [2, T]: infinity for NaN, negative where
    nothing was computed; and the number of the last call that computed the position."""
    length = original.ids.shape[1]
    rng = np.random.default_rng(1)
    shape = original.ids.shape
    differences, calls = np.full(shape, -1, np.float32), np.zeros(shape, int)

    def run(position: list[int], accepted: int, rejected: int = 0) -> None:
        ids = np.stack([original.ids[b, p : p + accepted] for b, p in enumerate(position)])
        drafts = rng.integers(0, original.logits.shape[2], (2, rejected))
        logits = graph(np.concatenate([ids, drafts], axis=1), position)
        for b, p in enumerate(position):
            expected = original.logits[b, p : p + accepted]
            largest = np.abs(logits[b, :accepted] - expected).max(-1)
            differences[b, p : p + accepted] = np.maximum(differences[b, p : p + accepted], largest)
            calls[b, p : p + accepted] = calls.max() + (b == 0)

    # Few calls, as each dequantises all weights.
    prompt = length // 2
    run([0, 0], prompt, rejected=5)
    position = [prompt, prompt - 3]  # rolled back, one of them into the prompt
    for accepted, rejected in ((5, 0), (1, 0), (2, 4)):
        run(position, accepted, rejected)
        position = [p + accepted for p in position]
    run(position, length - max(position))
    differences[np.isnan(differences)] = np.inf
    return differences, calls


def run(
    file: Path,
    dtype: Dtype,
    ids: npt.NDArray[np.int64],
    sources: Sequence[npt.NDArray[Any]] = (),  # as in `Reference`
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the logits [T, V] of each of the sequences [B, T], computed by an exported graph."""
    graph = _Graph(file, ids.shape[1], dtype, slots=1)
    for i, text in enumerate(ids):
        if len(sources):
            graph.encode_sources(sources[i : i + 1])
        yield graph(text[None], [0])[0]


class _Graph:
    """Runs the exported graph and copies its caches in each call: slow, only for checking."""

    def __init__(self, file: Path, rows: int, dtype: Dtype, slots: int = 2):
        import onnxruntime as ort

        self._file, self._dtype = file, dtype
        self._source: dict[str, npt.NDArray[Any]] = {}
        options = ort.SessionOptions()
        options.log_severity_level = 4  # its exceptions carry the message
        # Do not keep rearranged and dequantised copies of the weights, which would set the peak
        # memory of the whole export, nor unused memory.
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_cpu_mem_arena = False
        left_out = [*ORT_LEFT_OUT.get(dtype, []), "ConstantFolding"]
        # If it fused a product with quantised weights, it would also round the activations.
        options.add_session_config_entry("session.enable_quant_qdq", "0")
        if file.name != GRAPH_FILE:
            add_operators(options)
        with _run_errors(dtype):
            self._session = ort.InferenceSession(
                str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=left_out
            )
        kinds: dict[str, type[np.generic]] = {
            "tensor(float)": np.float32,
            "tensor(float16)": np.float16,
            "tensor(int8)": np.int8,
        }
        self._caches = {
            value.name: np.zeros(
                [slots, heads, own if isinstance(own, int) else rows, width], kinds[value.type]
            )
            for value in self._session.get_inputs()
            if value.name.startswith(("key_", "value_", "state_"))
            for _, heads, own, width in [value.shape]
        }

    def encode_sources(self, sources: Sequence[npt.NDArray[Any]]) -> None:
        """Run the encoder's graph, which is beside it, on a source for each slot. The rows exceed
        the longest source, as in the runtime's slots."""
        encoder = _Graph(self._file.with_name(ENCODER_FILE), 0, self._dtype)._session
        names = [value.name for value in encoder.get_outputs() if value.name != STATES]
        (encoder_input,) = encoder.get_inputs()
        rows = [encoder.run(names, {encoder_input.name: source}) for source in sources]
        lengths = [parts[0].shape[2] for parts in rows]
        # An audio source fills its rows exactly, and nothing masks them.
        room = max(lengths) + (0 if isinstance(encoder_input.shape[1], int) else 8)
        for name, parts in zip(names, zip(*rows, strict=True), strict=True):
            padded = [
                np.pad(part, ((0, 0), (0, 0), (0, room - part.shape[2]), (0, 0))) for part in parts
            ]
            self._source[name] = np.concatenate(padded)
        self._source["source_length"] = np.array(lengths)

    def __call__(self, ids: npt.NDArray[np.int64], position: list[int]) -> npt.NDArray[np.float32]:
        feeds = {
            "input_ids": ids,
            "position": np.array(position),
            "logits_index": np.arange(ids.shape[1]),
            **self._source,
        }
        names = ["logits", *(f"{name}_out" for name in self._caches)]
        with _run_errors(self._dtype):
            logits, *updated = self._session.run(names, {**feeds, **self._caches})
        self._caches = dict(zip(self._caches, updated, strict=True))
        return np.asarray(logits)


def report_remedy(dtype: Dtype) -> str:
    """What to do about a graph that does not run, or is not correct."""
    if dtype == "float32":
        return "Please report the architecture."
    return "Build with DTYPE=float32; if that fails too, please report the architecture."


def _run_errors(dtype: Dtype) -> AbstractContextManager[None]:
    what = f"ONNX Runtime cannot run the {dtype} graph"
    return convert_errors("backend", what, report_remedy(dtype))


class _Program:
    """The counterpart of `_Graph` for a torch.export program, which writes to its caches."""

    def __init__(self, folder: Path, rows: int):
        program = read_program(folder)
        self._folder, self._run = folder, program.module()
        self._source: list[Any] = []
        # The example's caches have the program's own dtype and row widths.
        (_, _, _, keys, values, *_), _ = program.example_inputs
        self._caches = [
            [cache.new_zeros(2, cache.shape[1], rows, cache.shape[3]) for cache in side]
            for side in (keys, values)
        ]

    def encode_sources(self, sources: Sequence[npt.NDArray[Any]]) -> None:
        """As `_Graph.encode_sources`."""
        program = read_program(self._folder, encoder=True)
        encoder, ((encoder_input,), _) = program.module(), program.example_inputs
        with torch.no_grad():
            rows = [encoder(torch.from_numpy(source).to(encoder_input.dtype)) for source in sources]
        lengths = [keys[0].shape[2] for keys, *_ in rows]
        room = max(lengths) + (8 if program.range_constraints else 0)  # E is dynamic, or fixed

        def padded(side: int, layer: int) -> torch.Tensor:
            parts = [found[side][layer] for found in rows]
            fill = torch.nn.functional.pad
            return torch.cat([fill(x, (0, 0, 0, room - x.shape[2])) for x in parts])

        sides = [[padded(side, i) for i in range(len(rows[0][side]))] for side in (0, 1)]
        self._source = [*sides, torch.tensor(lengths)]

    def __call__(self, ids: npt.NDArray[np.int64], position: list[int]) -> npt.NDArray[np.float32]:
        arguments = (torch.from_numpy(ids), torch.tensor(position), torch.arange(ids.shape[1]))
        with torch.no_grad():
            logits: torch.Tensor = self._run(*arguments, *self._caches, *self._source)
        return logits.numpy()
