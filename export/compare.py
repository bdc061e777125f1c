"""Does the graph compute what the original model computes? Prefill, steps, and a roll-back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from runtime.files.errors import OutriderError, first_line
from runtime.files.generation import FeatureFacts
from runtime.files.library import add_operators
from runtime.files.manifest import (
    ENCODER_FILE,
    GRAPH_FILE,
    ORT_LEFT_OUT,
    Cache,
    Dtype,
)
from runtime.files.torch_files import PROGRAM_FILE, read_program

from .encoder import STATES, arguments, states_of
from .loading import first_token, width
from .weights.experts import are_experts

# Allowed difference of a logit, relative to 1 + the largest logit: some hundred roundings.
# Rows of 8 bits are about as coarse as bfloat16.
TOLERANCE: dict[Dtype | Cache, float] = {
    "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1, "int8": 1e-1,
}  # fmt: skip
# How many times the original's own rounding error the graph's may be. In float32, where layers
# enlarge what another order of summing changes, 15 has been seen.
_SLACK: dict[Dtype, float] = {"float32": 30, "float16": 2, "bfloat16": 2}
# Of how many positions of a mixture one may go as far as it likes, where roundings are allowed for:
# of two experts that score alike they choose either. A fault of a kind of call is in all of it, so
# less than half of a call's may.
_APART = 20
_LONGEST = 256  # tokens compared; more only where a sliding window is to be seen to slide


@dataclass(frozen=True)
class Reference:
    """Two texts and what the original model says of them: ids [2, T], logits float32 [2, T, V].

    remark: what the texts are too short to show. sources: of each text, where there is an encoder:
    ids [1, E], features [1, F, T], or the states [1, E, D] that the model makes of them. mixture:
    whether the model chooses among experts.
    """

    ids: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]
    remark: str
    sources: tuple[npt.NDArray[Any], ...] = ()
    mixture: bool = False


@dataclass(frozen=True)
class Comparison:
    """How far the graph's logits are from the original's.

    max_difference: None where nothing ran; of all positions but those that are `apart`. mean: over
    the positions, of each one's largest difference, and its bound; None where no roundings are
    allowed for, which one may have more of.
    """

    max_difference: float | None
    bound: float
    what: str
    mean: tuple[float, float] | None = None
    apart: int = 0

    @property
    def passed(self) -> bool:
        if self.max_difference is None:
            return True
        mean, its_bound = self.mean or (0, 0)
        return self.max_difference <= self.bound and mean <= its_bound

    def told(self) -> str:
        largest = f"{self.max_difference:.1e} (bound {self.bound:.1e})"
        if self.apart:
            largest += f" but at {self.apart} of a mixture's positions"
        if self.mean is None:
            return largest
        return f"{largest}, on the mean by {self.mean[0]:.1e} ({self.mean[1]:.1e})"


def reference(
    model: PreTrainedModel,
    capacity: int,
    features: FeatureFacts | None = None,
    shares: bool = False,
) -> Reference:
    """The eager model, whole texts at once, no cache: nothing shared with the graph's road.

    features: what its encoder reads, where that is no text. shares: whether the graph reads what
    an encoder has made.
    """
    config, vocab_size = model.config.get_text_config(decoder=True), width(model)
    window = getattr(config, "sliding_window", None) or 0
    length = 40 if not window or 2 * window + 8 > _LONGEST else max(40, 2 * window + 8)
    # Distances beyond the farthest that have biases of their own.
    length = max(length, min(_LONGEST, getattr(config, "relative_attention_max_distance", 0) + 8))
    length = min(length, capacity - 8)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab_size, (2, length))
    pad = getattr(config, "pad_token_id", None)
    if pad is not None:  # M2M100 counts positions without it
        ids[ids == pad] = (pad + 1) % vocab_size
    # Without it, some trained models are thrown far off by any rounding.
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
    read = [torch.from_numpy(source) for source in sources]
    said = logits(model, torch.from_numpy(ids), read)
    if shares:
        sources = tuple(states_of(model, source).float().numpy() for source in read)
    mixture = any(are_experts(module) for module in model.modules())
    return Reference(ids, said.float().numpy(), remark, sources, mixture)


def logits(
    model: PreTrainedModel, ids: torch.Tensor, sources: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """[B, T, V] of whole texts [B, T], in the model's dtype. sources: of each text, where there is
    an encoder, as `Reference` has them. Raises OutriderError "checkpoint" where the model does not
    run, or says NaN or infinity."""
    said: torch.Tensor
    try:
        with torch.no_grad():
            if len(sources):  # one by one: nothing is padded
                pairs = zip(sources, ids, strict=True)
                inputs = [arguments(model, text[None], source) for source, text in pairs]
            else:
                inputs = [arguments(model, ids)]
            said = torch.cat([model(**each, use_cache=False).logits for each in inputs])
    except Exception as error:  # noqa: BLE001 - any model code may fail in any way
        raise OutriderError(
            "checkpoint",
            f"Transformers itself cannot run this {type(model).__name__}: {error}".splitlines()[0],
            "Check that config.json belongs to these weights.",
        ) from None
    if not torch.isfinite(said).all():  # a bound made of them would hold for anything
        dtype = str(said.dtype).removeprefix("torch.")
        raise OutriderError(
            "checkpoint",
            f"this {type(model).__name__} says NaN or infinity in {dtype}",
            "Check the weights."
            if dtype == "float32"
            else "Build with another DTYPE; float16 overflows beyond 65504.",
        )
    return said


def compare(
    folder: Path,
    original: Reference,
    dtype: Dtype,
    exact: Callable[[], Reference] | None = None,  # the original in twice as many bits
    *,
    file: str = GRAPH_FILE,  # or HOST_FILE
    rounded: Reference | None = None,  # the original with activations rounded as the graph does
    cache: Cache | None = None,  # the type of the graph's rows, if not `dtype`
) -> Comparison:
    """Run the graph (on ONNX Runtime, or as torch runs it) as the runtime does: two slots of
    different lengths, rejected drafts overwritten in place, every logit compared.

    Where activations are rounded, it may be twice as far off as `rounded` is, at most and on the
    mean: a fault moves all positions, rounding one or two of them far (of a mixture anywhere, by
    another expert, so that there a few are held by the mean alone). Beyond a bound it is `exact`
    that decides, for some layers make roundings large: the graph may be as far from that as the
    original's own roundings are, times `_SLACK`, and the bound more, at most and on the mean.
    Raises OutriderError "backend" where ONNX Runtime refuses the graph.
    """
    tolerance = TOLERANCE[cache or dtype]
    levels = np.zeros(original.ids.shape, np.float32)
    if rounded is not None:  # sums that end a bit apart are rounded a level apart
        levels = 2 * np.abs(rounded.logits - original.logits).max(-1)
    of_torch = (folder / PROGRAM_FILE).exists()
    if dtype == "bfloat16" and not of_torch:
        what = "not run: ONNX Runtime has no bfloat16 kernels for the CPU"
        return Comparison(None, tolerance, what)
    if dtype == "float16" and not of_torch and _crashes(folder):
        what = "not run: ONNX Runtime crashes when it loads this float16 graph"
        return Comparison(None, tolerance, what)
    rows = original.ids.shape[1] + 8
    what = f"{original.ids.shape[1]} tokens, 2 slots: prefill, steps, roll-back" + original.remark

    def held_against(said: Reference, levels: npt.NDArray[np.float32], what: str) -> Comparison:
        graph = _Program(folder, rows) if of_torch else _Graph(folder / file, rows, dtype)
        if said.sources:
            graph.read(said.sources)
        differences, calls = _differences(graph, said)
        computed = differences >= 0
        differences, levels, calls = differences[computed], levels[computed], calls[computed]
        allowed = tolerance * (1 + float(np.abs(said.logits).max()))
        mean = float(differences.mean()), float(levels.mean()) + allowed
        bound = float(levels.max()) + allowed
        if not levels.any():
            return Comparison(float(differences.max()), bound, what)
        far = differences > bound
        few = all(2 * far[calls == n].sum() < (calls == n).sum() for n in set(calls[far]))
        apart = int(far.sum()) if few and said.mixture else 0
        if apart * _APART > len(differences):
            apart = 0
        largest = float(np.sort(differences)[-1 - apart])
        return Comparison(largest, bound, what, mean, apart)

    result = held_against(original, levels, what)
    if result.passed or exact is None:
        return result
    truth = exact()
    rounding = np.abs(original.logits - truth.logits).max(-1)
    more = "float64" if dtype == "float32" else "float32"
    what += f"; from the original in {more}, from which its own {dtype} is {rounding.max():.1e}"
    return held_against(truth, levels + _SLACK[dtype] * rounding, what)


def _crashes(folder: Path) -> bool:
    """ONNX Runtime's float16 can end the process that loads a graph: let a child find out."""
    load = (
        "import sys, onnxruntime as ort; o = ort.SessionOptions(); o.log_severity_level = 4; "
        "o.add_session_config_entry('session.disable_prepacking', '1'); "
        "ort.InferenceSession(sys.argv[1], o, providers=['CPUExecutionProvider'], "
        "disabled_optimizers=sys.argv[2:])"
    )
    left_out = ORT_LEFT_OUT.get("float16", [])
    command = [sys.executable, "-c", load, str(folder / GRAPH_FILE), *left_out]
    # By a signal; what it raises, the comparison says.
    return subprocess.run(command, capture_output=True, check=False).returncode < 0


_Call = Callable[[npt.NDArray[np.int64], list[int]], npt.NDArray[np.float32]]


def _differences(
    graph: _Call, original: Reference
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Of each position the largest difference of a logit, [2, T]: infinity for NaN, and less than 0
    where nothing was computed; and the last call that has."""
    length = original.ids.shape[1]
    rng = np.random.default_rng(1)
    found, calls = np.full(original.ids.shape, -1, np.float32), np.zeros(original.ids.shape, int)

    def run(position: list[int], accepted: int, rejected: int = 0) -> None:
        ids = np.stack([original.ids[b, p : p + accepted] for b, p in enumerate(position)])
        drafts = rng.integers(0, original.logits.shape[2], (2, rejected))
        logits = graph(np.concatenate([ids, drafts], axis=1), position)
        for b, p in enumerate(position):
            expected = original.logits[b, p : p + accepted]
            largest = np.abs(logits[b, :accepted] - expected).max(-1)
            found[b, p : p + accepted] = np.maximum(found[b, p : p + accepted], largest)
            calls[b, p : p + accepted] = calls.max() + (b == 0)

    # Few calls: each makes all weights wide.
    prompt = length // 2
    run([0, 0], prompt, rejected=5)
    position = [prompt, prompt - 3]  # rolled back, one of them into the prompt
    for accepted, rejected in ((5, 0), (1, 0), (2, 4)):
        run(position, accepted, rejected)
        position = [p + accepted for p in position]
    run(position, length - max(position))
    found[np.isnan(found)] = np.inf
    return found, calls


def run(
    file: Path,
    dtype: Dtype,
    ids: npt.NDArray[np.int64],
    sources: Sequence[npt.NDArray[Any]] = (),  # as `Reference` has them
) -> Iterator[npt.NDArray[np.float32]]:
    """Logits [T, V] of whole texts [B, T] by an exported graph, one text after the other."""
    graph = _Graph(file, ids.shape[1], dtype, slots=1)
    for i, text in enumerate(ids):
        if len(sources):
            graph.read(sources[i : i + 1])
        yield graph(text[None], [0])[0]


class _Graph:
    """The exported graph with its caches handed around; plain and slow, for checking only."""

    def __init__(self, file: Path, rows: int, dtype: Dtype, slots: int = 2):
        import onnxruntime as ort

        self._file, self._dtype = file, dtype
        self._source: dict[str, npt.NDArray[Any]] = {}
        options = ort.SessionOptions()
        options.log_severity_level = 4  # what it raises says it all
        # Without its rearranged and dequantised copies of the weights, which would be the peak of
        # the whole export, and without memory that it keeps.
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_cpu_mem_arena = False
        left_out = [*ORT_LEFT_OUT.get(dtype, []), "ConstantFolding"]
        # A product with quantised weights that it fuses rounds the activations too.
        options.add_session_config_entry("session.enable_quant_qdq", "0")
        if file.name != GRAPH_FILE:
            add_operators(options)
        try:
            self._session = ort.InferenceSession(
                str(file),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=left_out,
            )
        except Exception as error:  # noqa: BLE001 - ONNX Runtime raises a dozen unrelated classes
            raise _refused(dtype, error) from None
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

    def read(self, sources: Sequence[npt.NDArray[Any]]) -> None:
        """Have the encoder's graph beside it read a source for each slot; there is room for more
        than the longest, as in slots."""
        encoder = _Graph(self._file.with_name(ENCODER_FILE), 0, self._dtype)._session
        names = [value.name for value in encoder.get_outputs() if value.name != STATES]
        (given,) = encoder.get_inputs()
        rows = [encoder.run(names, {given.name: source}) for source in sources]
        lengths = [parts[0].shape[2] for parts in rows]
        # A source that is no text fills its rows, and nothing looks at how many they are.
        room = max(lengths) + (0 if isinstance(given.shape[1], int) else 8)
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
        try:
            logits, *updated = self._session.run(names, {**feeds, **self._caches})
        except Exception as error:  # noqa: BLE001
            raise _refused(self._dtype, error) from None
        self._caches = dict(zip(self._caches, updated, strict=True))
        return np.asarray(logits)


def _refused(dtype: Dtype, error: Exception) -> OutriderError:
    return OutriderError(
        "backend",
        f"ONNX Runtime cannot run the {dtype} graph: {first_line(error)}",
        "Please report the architecture."
        if dtype == "float32"
        else "Build with DTYPE=float32; if that fails too, please report the architecture.",
    )


class _Program:
    """The same of a torch.export program, which writes into its caches."""

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

    def read(self, sources: Sequence[npt.NDArray[Any]]) -> None:
        """As there."""
        program = read_program(self._folder, encoder=True)
        encoder, ((given,), _) = program.module(), program.example_inputs
        with torch.no_grad():
            rows = [encoder(torch.from_numpy(source).to(given.dtype)) for source in sources]
        lengths = [keys[0].shape[2] for keys, *_ in rows]
        room = max(lengths) + (8 if program.range_constraints else 0)  # E is open, or fixed

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
