"""The file contract between `export/`, `engines/` and `runtime/`.

`export/` writes a *graphs* folder (`pair.json` and the graphs), `engines/` turns it into a
*bundle* (`manifest.json` and the backend's engines), `runtime/` reads the bundle. All three use
the dataclasses of this module and nothing else of each other. docs/architecture.md has the layout.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Literal

from .errors import OutriderError
from .generation import AudioFacts, FeatureFacts, TextRules
from .records import Count, Rule, SmallCount, TokenId, between, convert_read_errors, read_json
from .torch_files import ENCODER_WEIGHTS_FILE, PROGRAM_FILE, WEIGHTS_FILE

KINDS = ("manifest", "pair", "graph")
MANIFEST_FILE, PAIR_FILE, PART_FILE = "manifest.json", "pair.json", "graph.json"
GRAPH_FILE = "graph.onnx"
HOST_FILE = "host.onnx"  # the CPU's graph, with the operators of plugins/onnxruntime
HOST_WEIGHTS_FILE = "host.bin"  # its own weights, if they are quantised
ENCODER_FILE = "encoder.onnx"  # its weights are in ENCODER_WEIGHTS_FILE, as those of a program
ENCODER_DECODERS = "encoder-decoders"  # printed by `engines --supports` if a backend runs them
RECURRENT_STATES = "recurrent-states"  # the same for recurrent layers
PACKAGE_FILE, ENCODER_PACKAGE_FILE = "engine.pt2", "encoder_engine.pt2"  # AOTInductor's
# Optimisers of ONNX Runtime that are disabled. In float16, this one creates a node without
# reporting it; the next optimiser then reads the node's unresolved operator, and the process dies.
ORT_LEFT_OUT = {"float16": ["MatmulTransposeFusion"]}
TOKENIZER_FILE, TEMPLATE_FILE = "tokenizer.json", "chat_template.jinja"
GAMMA_LIMIT = 64  # OUTRIDER_MAX_WIDTH of plugins/include/outrider.h
Dtype = Literal["float32", "float16", "bfloat16"]
Format = Literal["onnx", "torch"]  # of a graph: GRAPH_FILE or PROGRAM_FILE
Weights = Literal["int8", "int4", "fp8"]
Cache = Literal["int8"]
SCALE_BYTES = 4  # after the levels of a quantised row: OUTRIDER_ATTENTION_SCALE
MAX_SLOTS = 1 << 16
FIRST_ROWS = 256  # initial rows of a slot on the CPU; doubled as texts grow
CHUNK = 256  # most tokens of a prompt in one call; bounds the activations

# More types of fields: see `records`.
Vocabulary = Annotated[int, between(1, 1 << 30)]  # what outrider_workspace_size takes
Bytes = Annotated[int, between(0, 1 << 62)]
Finite = Annotated[float, between(0, 1e30)]
Digest = Annotated[
    str, Rule("a SHA-256", lambda text: re.fullmatch("[0-9a-f]{64}", text) is not None)
]
RowShape = Annotated[list[SmallCount], Rule("[heads, width]", lambda shape: len(shape) == 2)]
Sizes = Annotated[
    list[Count],
    Rule("three ascending sizes", lambda sizes: len(sizes) == 3 and sizes == sorted(sizes)),
]
Target = Annotated[
    str,
    Rule("a GPU such as sm89", lambda text: re.fullmatch(r"sm\d{2,4}|(?!sm).+", text) is not None),
]


def _is_inside(name: str) -> bool:
    path = Path(name)
    return path.name != "" and not path.is_absolute() and ".." not in path.parts


FileName = Annotated[str, Rule("a path inside the folder", _is_inside)]
PlainName = Annotated[FileName, Rule("a file name without folders", lambda name: "/" not in name)]


@dataclass(frozen=True)
class FileFacts:
    size: Bytes
    sha256: Digest


@dataclass(frozen=True)
class Quality:
    """The quality loss of quantised weights, over `tokens` next-token predictions.

    kl: mean KL(full || quantised) in nats; kl_error: its standard error. top1: how often both have
    the same most probable token. perplexity, full_perplexity: of the quantised and the full model.
    """

    tokens: Count
    kl: Finite
    kl_error: Finite
    top1: Annotated[float, between(0, 1)]
    perplexity: Finite
    full_perplexity: Finite


@dataclass(frozen=True)
class EncoderFacts:
    """What a decoder reads from its encoder: per layer [heads, head_dim] of a source's row.

    features: the encoder's input; None for token ids. rows: how many rows the encoder outputs; None
    if as many as there are ids. shared: set for a draft that reads the states of the target's
    encoder instead of the source, because its own encoder is the same; their width D.
    """

    key_shapes: list[RowShape]
    value_shapes: list[RowShape]
    features: FeatureFacts | None = None
    rows: Count | None = None
    shared: Count | None = None


@dataclass(frozen=True)
class StateFacts:
    """The state that recurrent layers carry from token to token: per state [heads, width] of a row.

    rows: number of rows of a slot's ring, in which row p is at p modulo rows. reach: how many rows
    before its first token a call reads.
    """

    shapes: list[RowShape]
    rows: Count
    reach: Count


@dataclass(frozen=True)
class GraphFacts:
    """One model's graph.

    key: content address of everything the graph was made from.
    vocab_size: the width of the logits, padding included.
    max_len: the longest sequence, in tokens, that the graph was made for, and the longest source;
        context: the longest that the checkpoint was made for, None if it does not specify one.
    key_shapes, value_shapes: per layer [kv_heads, head_dim] of a cache row.
    weights: the type of quantised weights; None if all are of `dtype`. bits: bits per weight
        requested for int4 (`BITS`); None for the default.
    max_difference: largest absolute difference of the logits from the original model's; None
        if the graph could not be run (see `comparison`).
    tolerance: the bound that `max_difference` was checked against.
    quality: of quantised weights; None if there are none.
    cache: the type of a quantised cache row; None if it is of `dtype`.
    encoder: of an encoder-decoder, whose encoder is a separate graph; None for other models.
    states: of recurrent layers; None if there are none.
    """

    key: str
    source: str
    architecture: str
    parameters: Bytes
    dtype: Dtype
    vocab_size: Vocabulary
    max_len: Count
    capacity: Count
    key_shapes: list[RowShape]
    value_shapes: list[RowShape]
    max_difference: Finite | None
    tolerance: Finite
    comparison: str
    versions: dict[str, str]
    files: dict[FileName, FileFacts]
    context: Count | None = None
    weights: Weights | None = None
    bits: Finite | None = None
    quality: Quality | None = None
    cache: Cache | None = None
    encoder: EncoderFacts | None = None
    states: StateFacts | None = None

    @property
    def has_host_weights(self) -> bool:
        """Whether the graph for the CPU has its own weights; a bundle for CPUs then has no other
        graph."""
        return HOST_WEIGHTS_FILE in self.files

    @property
    def reads(self) -> FeatureFacts | None:
        """The features that its encoder reads; None if it reads text, or there is no encoder."""
        return self.encoder.features if self.encoder else None

    @property
    def format(self) -> Format:
        return "torch" if PROGRAM_FILE in self.files else "onnx"

    def cache_bytes(self, slots: int, rows: int | None = None) -> int:
        """Bytes of the caches. rows: per slot, and per source; None for the capacity."""
        shapes = [*self.key_shapes, *self.value_shapes]
        rows = self.capacity if rows is None else min(rows, self.capacity)
        if self.cache:
            return slots * rows * sum(heads * (width + SCALE_BYTES) for heads, width in shapes)
        numbers = rows * _row_numbers(shapes)
        if (encoder := self.encoder) is not None:
            shapes = [*encoder.key_shapes, *encoder.value_shapes]
            numbers += (encoder.rows or rows) * _row_numbers(shapes)
        if self.states is not None:
            numbers += self.states.rows * _row_numbers(self.states.shapes)
        return slots * numbers * (4 if self.dtype == "float32" else 2)


def _row_numbers(shapes: list[RowShape]) -> int:
    """How many numbers the rows of these shapes have together."""
    return sum(heads * width for heads, width in shapes)


@dataclass(frozen=True)
class TokenizerFacts:
    """The target's tokenizer, which the bundle includes.

    vocab_size: largest id + 1. special_tokens: those that chat templates name (bos_token,
    eos_token...).
    """

    key: str
    vocab_size: Count
    eos_token_ids: list[TokenId]
    special_tokens: dict[str, str]
    chat_template: bool
    files: dict[FileName, FileFacts]


def slot_rows(max_len: int, max_gamma: int) -> int:
    """The capacity of a slot: a verification never writes past it. A multiple of 8, so that slots
    of any head width start at addresses that are aligned for GPUs."""
    return -(-(max_len + max_gamma + 1) // 8) * 8


@dataclass(frozen=True)
class Pair:
    """What `export/` passes to `engines/`.

    vocab_size: the common width; logits beyond it are padding with probability 0.
    max_len: longest prompt + output. max_gamma: most draft tokens per round.
    capacity: rows of a slot, at least max_len + max_gamma + 1 (see `slot_rows`).
    lookup: the default draft if there is no draft model; None: plain decoding.
    start_ids: the first tokens of an encoder-decoder's output: the decoder's start token, and any
        that are forced after it; None for decoder-only models.
    audio: for a target that transcribes; None for other models.
    rules: defaults from the target's generation config, if it has any.
    """

    target: GraphFacts
    draft: GraphFacts | None
    tokenizer: TokenizerFacts
    vocab_size: Vocabulary
    max_len: Count
    max_gamma: Annotated[int, between(1, GAMMA_LIMIT)]
    capacity: Count
    lookup: Literal["ngram"] | None = None
    start_ids: Annotated[list[TokenId], Rule("a non-empty list", bool)] | None = None
    audio: AudioFacts | None = None
    rules: TextRules | None = None

    def models(self) -> Iterator[tuple[str, GraphFacts]]:
        """("target", facts), and ("draft", facts) if there is a draft model."""
        yield "target", self.target
        if self.draft is not None:
            yield "draft", self.draft

    def is_audio_consistent(self) -> bool:
        """Whether the facts about audio are consistent."""
        features = self.target.reads
        if features is None or self.audio is None or self.start_ids is None:
            return features is None and self.audio is None
        audio, start = self.audio, self.start_ids
        return (
            self.target.encoder is not None
            and self.target.encoder.rows is not None
            and 0 < features.frames < 1 << 16
            and start[0] == audio.decoder_start_token_id
            and max([*audio.tokens(), *start]) < self.vocab_size
            and (not audio.language_detected or (start[1:2] != [] and bool(audio.lang_to_id)))
        )

    def logits_bytes(self, slots: int, *, gpu: bool) -> int:
        """Bytes of a round's float32 logits: the target's gamma + 1 rows and the draft's gamma.

        On the CPU, each buffer has gamma + 1 rows, because a chain verifies with the draft model,
        and a target without a draft model may use lookups. On a GPU it only decodes plainly.
        """
        gamma = self.max_gamma
        rows = {"target": gamma + 1, "draft": gamma * (gamma + 1)}
        if gpu:
            rows = {"target": gamma + 1 if self.draft else 1, "draft": gamma}
        return 4 * slots * sum(rows[role] * facts.vocab_size for role, facts in self.models())

    def copied_files(self, engines: dict[str, EngineFacts] | None) -> dict[str, FileFacts]:
        """The files that a bundle copies from the graphs folder, without those whose contents are
        in its engines."""
        if not engines:
            alone = {
                f"{role}/{file}"
                for role, facts in self.models()
                if facts.has_host_weights
                for file in (GRAPH_FILE, WEIGHTS_FILE)
            }
            return {name: file for name, file in self.all_files().items() if name not in alone}
        beside = {f"{role}/{engine.weights}" for role, engine in engines.items()}
        beside |= {f"{r}/{ENCODER_WEIGHTS_FILE}" for r, engine in engines.items() if engine.encoder}
        return {
            name: file
            for name, file in self.all_files().items()
            if name.startswith("tokenizer/") or name in beside
        }

    def all_files(self) -> dict[str, FileFacts]:
        """Every file of the pair, by its path relative to the folder."""
        parts = (("tokenizer", self.tokenizer), ("target", self.target), ("draft", self.draft))
        return {
            f"{part}/{name}": file
            for part, facts in parts
            if facts is not None
            for name, file in facts.files.items()
        }


@dataclass(frozen=True)
class Profile:
    """The shapes that a compiled engine accepts: B, N and K as [smallest, expected, largest].

    S is the capacity. memory: bytes for activations; None if the builder did not report it.
    """

    name: str
    slots: Sizes
    tokens: Sizes
    outputs: Sizes
    memory: Bytes | None


@dataclass(frozen=True)
class EngineFacts:
    """One model compiled ahead of time.

    key: content address of everything the engine was made from. file: in the model's folder.
    targets: the GPU architectures that it runs on, such as sm89; for a CPU, what it must support.
    weights: the graph's file that contains them; None if they are in the engine. level: of
    optimisation, None for the builder's default. encoder: the file of an encoder-decoder's encoder,
    whose weights are also the graph's.
    """

    key: str
    file: PlainName
    targets: list[Target]
    profiles: list[Profile]
    weights: PlainName | None = None
    level: int | None = None
    encoder: PlainName | None = None

    @property
    def activation_bytes(self) -> int | None:
        """Bytes for activations: a model's calls run one after another, so its contexts can share
        the memory of the largest. None unless the builder reported all of them."""
        sizes = [profile.memory for profile in self.profiles if profile.memory is not None]
        return max(sizes) if sizes and len(sizes) == len(self.profiles) else None

    @property
    def compiled_files(self) -> list[str]:
        """The compiled files, which the graphs folder does not have."""
        return [self.file] if self.encoder is None else [self.file, self.encoder]


@dataclass(frozen=True)
class CallBits:
    """Which calls of the target give bitwise equal logits, as measured.

    widths: numbers of tokens per call that agree with each other; others: those that do not.
    neighbours, threads, rows: whether a call gives the same result alone and with neighbours, with
    one thread and with all, and with room for few rows and for many.
    """

    widths: Annotated[list[SmallCount], Rule("a non-empty list", bool)]
    others: list[SmallCount]
    neighbours: bool
    threads: bool
    rows: bool


@dataclass(frozen=True)
class Invariance:
    """What the target's bitwise results depend on, on the machine that built the bundle.

    processor: of that machine (`machine.processor`). one, several: with one slot and with more.
    slots: whether these two give the same results.
    """

    processor: str
    one: CallBits
    several: CallBits
    slots: bool


@dataclass(frozen=True)
class Manifest:
    """A bundle: the pair, the backend it was built for, and every file with its hash.

    engines: by role; None if the backend runs the graphs, which the bundle then contains.
    invariance: None if it was not measured, for example on a GPU.
    """

    name: str
    backend: str
    versions: dict[str, str]
    slots: Annotated[int, between(1, MAX_SLOTS)]
    pair: Pair
    files: dict[FileName, FileFacts]
    engines: dict[str, EngineFacts] | None = None
    invariance: Invariance | None = None

    def contradiction(self) -> str | None:
        """Which facts are inconsistent; None if none are, as in any file that `engines/` wrote."""
        pair, models = self.pair, dict(self.pair.models())
        rows = pair.max_len + pair.max_gamma + 1
        needed = {f"tokenizer/{TOKENIZER_FILE}"}
        if pair.tokenizer.chat_template:
            needed.add(f"tokenizer/{TEMPLATE_FILE}")
        files = pair.copied_files(self.engines)
        for role, facts in models.items():
            code = [HOST_FILE if facts.has_host_weights else GRAPH_FILE]
            code += [ENCODER_FILE] if facts.encoder else []
            if self.engines and (engine := self.engines.get(role)):
                code = engine.compiled_files
                for name in (f"{role}/{file}" for file in code):  # not among the pair's files
                    files[name] = self.files.get(name, FileFacts(-1, ""))
            needed |= {f"{role}/{name}" for name in (*code, *self.weight_files(role))}
        consistent = {
            "its engines": self.engines is None
            or {role: engine.encoder is not None for role, engine in self.engines.items()}
            == {role: facts.encoder is not None for role, facts in models.items()},
            "its files": files == self.files and needed <= files.keys(),
            "its sizes": all(rows <= pair.capacity == facts.capacity for facts in models.values()),
            "its vocabulary": pair.vocab_size <= pair.target.vocab_size,
            "its caches": all(
                len(facts.key_shapes) == len(facts.value_shapes) > 0 for facts in models.values()
            ),
            "its encoders": all(
                (facts.encoder is None) == (pair.start_ids is None)
                and facts.reads == pair.target.reads
                for facts in models.values()
            ),
            "its audio": pair.is_audio_consistent(),
        }
        return next((what for what, holds in consistent.items() if not holds), None)

    def weight_files(self, role: str) -> list[str]:
        """The files in a model's folder that contain its weights and those of its encoder."""
        facts, engine = dict(self.pair.models())[role], (self.engines or {}).get(role)
        own = HOST_WEIGHTS_FILE if facts.has_host_weights else WEIGHTS_FILE
        if engine:
            own = engine.weights or engine.file
        return [own, ENCODER_WEIGHTS_FILE] if facts.encoder else [own]

    def without_draft(self) -> Manifest:
        """The manifest without the draft model, to open only the target."""
        engines = self.engines and {"target": self.engines["target"]}
        return replace(self, pair=replace(self.pair, draft=None), engines=engines)

    @property
    def activation_bytes(self) -> int | None:
        """Bytes of all engines together; None without engines, or if one of them is unknown."""
        sizes = [engine.activation_bytes for engine in (self.engines or {}).values()]
        known = [size for size in sizes if size is not None]
        return sum(known) if known and known == sizes else None

    def gpu_targets(self) -> list[str]:
        """The GPU architectures that the engines were compiled for, such as sm89."""
        engines = (self.engines or {}).values()
        targets = {target for engine in engines for target in engine.targets}
        return sorted((t for t in targets if t.startswith("sm")), key=lambda t: int(t[2:]))

    def rebuild_command(self, out: Path, gpu: str | None = None) -> str:
        """The command that rebuilds this bundle, for error messages. gpu: an architecture to add,
        such as sm89."""
        pair = self.pair
        level = next((engine.level for engine in (self.engines or {}).values()), None)
        targets = {*self.gpu_targets(), *([gpu] if gpu else [])}
        # Other backends build for the GPU that is present.
        gpus = [t.removeprefix("sm") for t in targets if self.backend == "tensorrt_rtx"]
        chips = ",".join(sorted(gpus, key=int))
        if self.backend == "aotinductor" and not targets:
            chips = "cpu"
        # Without them the weights depend on the checkpoint and the backend.
        weights = {role: facts.weights or "full" for role, facts in pair.models()}
        variables = {  # those that are None are left out
            "MODEL": f"<{pair.target.source}>",
            "DRAFT": f"<{pair.draft.source}>" if pair.draft else pair.lookup or "none",
            "BACKEND": self.backend,
            "DTYPE": pair.target.dtype,
            "WEIGHTS": weights["target"],
            "BITS": f"{pair.target.bits:g}" if pair.target.bits else None,
            "DRAFT_WEIGHTS": weights.get("draft"),
            "CACHE": pair.target.cache,
            "SM": chips or None,
            "OPT_LEVEL": level,
            "MAX_LEN": pair.max_len,
            "MAX_GAMMA": pair.max_gamma,
            "SLOTS": self.slots,
            "OUT": out,
        }
        given = (f"{name}={value}" for name, value in variables.items() if value is not None)
        return "make engines " + " ".join(given)


def file_facts(path: Path) -> FileFacts:
    with path.open("rb") as file:
        return FileFacts(os.fstat(file.fileno()).st_size, _sha256(file))


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


EXPORT_REMEDY = "Export the checkpoints again: see python -m export --help."


def read_pair(folder: Path) -> Pair:
    return read_json(folder / PAIR_FILE, "pair", Pair, EXPORT_REMEDY)


_BUILD_REMEDY = "Build the bundle with make engines MODEL=<target> DRAFT=<draft> OUT=<folder>."


def read_bundle(folder: Path, *, verify: bool = True) -> Manifest:
    """Read and validate a bundle's manifest and (unless verify=False) the hash of every file.

    Raises OutriderError "bundle".
    """
    path = folder / MANIFEST_FILE
    with convert_read_errors(folder, _BUILD_REMEDY):
        if not folder.is_dir():
            raise OutriderError("bundle", f"{folder} is not a folder", _BUILD_REMEDY)
        if not path.is_file():
            other = (folder / "config.json").is_file()
            what = "a Hugging Face checkpoint" if other else "not a bundle"
            named = "the current folder (or an empty path)" if folder == Path() else folder
            cause = f"{named} is {what}: it has no {MANIFEST_FILE}"
            raise OutriderError("bundle", cause, _BUILD_REMEDY)
    manifest = read_json(path, "manifest", Manifest, _BUILD_REMEDY)
    if (mismatch := manifest.contradiction()) is not None:
        cause = f"{path} contradicts itself about {mismatch}: it was edited"
        raise OutriderError("bundle", cause, _BUILD_REMEDY)
    verify_files(folder, manifest.files, contents=verify, remedy=_BUILD_REMEDY)
    return manifest


def verify_hashes(folder: Path, manifest: Manifest, *, weights: bool) -> None:
    """Verify the hashes of the files that contain only numbers, or of all others. The former are
    safe to open even if damaged: the results are wrong, but no code in them is run. An engine that
    contains its weights is among the latter. Raises OutriderError "bundle"."""
    kinds = (WEIGHTS_FILE, HOST_WEIGHTS_FILE, ENCODER_WEIGHTS_FILE)
    numbers = {f"{role}/{file}" for role, _ in manifest.pair.models() for file in kinds}
    files = {name: f for name, f in manifest.files.items() if (name in numbers) == weights}
    verify_files(folder, files, contents=True, remedy=_BUILD_REMEDY)


def verify_files(folder: Path, files: dict[str, FileFacts], *, contents: bool, remedy: str) -> None:
    """Refuse missing, unreadable, truncated and (with `contents`) edited files. Raises "bundle"."""
    for name, facts in files.items():
        path = folder / name
        with convert_read_errors(path, remedy):
            if not path.is_file():
                raise OutriderError("bundle", f"{path} is missing", remedy)
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != facts.size:
                    cause = f"{path} has {size:,} bytes, not {facts.size:,}: truncated or replaced"
                    raise OutriderError("bundle", cause, remedy)
                edited = contents and _sha256(file) != facts.sha256
        if edited:
            raise OutriderError("bundle", f"{path} was edited or damaged: its hash differs", remedy)
