"""The file contract between the rooms: what `export/`, `engines/` and `runtime/` hand each other.

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
from .records import Count, Rule, Small, TokenId, between, read_json, readable
from .torch_files import ENCODER_WEIGHTS_FILE, PROGRAM_FILE, WEIGHTS_FILE

KINDS = ("manifest", "pair", "graph")
MANIFEST_FILE, PAIR_FILE, PART_FILE = "manifest.json", "pair.json", "graph.json"
GRAPH_FILE = "graph.onnx"
HOST_FILE = "host.onnx"  # the same for the CPU, with the operators of plugins/onnxruntime
HOST_WEIGHTS_FILE = "host.bin"  # its own weights, where they are quantised
ENCODER_FILE = "encoder.onnx"  # with ENCODER_WEIGHTS_FILE, as a program has
ENCODER_DECODERS = "encoder-decoders"  # as `engines --supports` says that a backend runs them
RECURRENT_STATES = "recurrent-states"  # likewise
PACKAGE_FILE, ENCODER_PACKAGE_FILE = "engine.pt2", "encoder_engine.pt2"  # AOTInductor's
# Optimisers of ONNX Runtime that are left out. In float16 this one makes a node and does not say
# so; the next one asks for the node's operator, which nobody looked up, and the process dies.
ORT_LEFT_OUT = {"float16": ["MatmulTransposeFusion"]}
TOKENIZER_FILE, TEMPLATE_FILE = "tokenizer.json", "chat_template.jinja"
MOST_GAMMA = 64  # OUTRIDER_MAX_WIDTH of plugins/include/outrider.h
Dtype = Literal["float32", "float16", "bfloat16"]
Format = Literal["onnx", "torch"]  # of a graph: GRAPH_FILE or PROGRAM_FILE
Weights = Literal["int8", "int4", "fp8"]
Cache = Literal["int8"]
SCALE_BYTES = 4  # behind the levels of a quantised row: OUTRIDER_ATTENTION_SCALE
MOST_SLOTS = 1 << 16
FIRST_ROWS = 256  # of a slot on the CPU; they double as texts grow
CHUNK = 256  # tokens of a prompt in one call, at most; bounds the activations

# What more a field may be: see `records`.
Vocabulary = Annotated[int, between(1, 1 << 30)]  # what outrider_workspace_size takes
Bytes = Annotated[int, between(0, 1 << 62)]
Finite = Annotated[float, between(0, 1e30)]
Digest = Annotated[
    str, Rule("a SHA-256", lambda text: re.fullmatch("[0-9a-f]{64}", text) is not None)
]
RowShape = Annotated[list[Small], Rule("[heads, width]", lambda shape: len(shape) == 2)]
Sizes = Annotated[
    list[Count],
    Rule("three ascending sizes", lambda sizes: len(sizes) == 3 and sizes == sorted(sizes)),
]
Target = Annotated[
    str,
    Rule("a GPU such as sm89", lambda text: re.fullmatch(r"sm\d{2,4}|(?!sm).+", text) is not None),
]


def _inside(name: str) -> bool:
    path = Path(name)
    return path.name != "" and not path.is_absolute() and ".." not in path.parts


FileName = Annotated[str, Rule("a file's name: it leads out of the folder", _inside)]
PlainName = Annotated[FileName, Rule("the name of a file", lambda name: "/" not in name)]


@dataclass(frozen=True)
class FileFacts:
    size: Bytes
    sha256: Digest


@dataclass(frozen=True)
class Quality:
    """What quantised weights cost, over `tokens` next-token predictions.

    kl: mean KL(full || quantised) in nats, with its standard error. top1: how often both prefer
    the same token. perplexity, full_perplexity: of the text, of the quantised and the full model.
    """

    tokens: Count
    kl: Finite
    kl_error: Finite
    top1: Annotated[float, between(0, 1)]
    perplexity: Finite
    full_perplexity: Finite


@dataclass(frozen=True)
class EncoderFacts:
    """What a decoder reads of its encoder: per layer [heads, head_dim] of a source's row.

    features: what the encoder reads; None for token ids. rows: that it makes of them; None where
    they are as many as the ids. shared: the width D of the target's encoder's states, where a draft
    reads those in place of the source, because its own encoder is the same.
    """

    key_shapes: list[RowShape]
    value_shapes: list[RowShape]
    features: FeatureFacts | None = None
    rows: Count | None = None
    shared: Count | None = None


@dataclass(frozen=True)
class StateFacts:
    """What recurrent layers carry from token to token: per state [heads, width] of a row.

    rows: of a slot's ring, in which row p lies at p modulo them. reach: how many rows before its
    first token a call reads.
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
        context: the longest that the checkpoint was made for, None where it does not say.
    key_shapes, value_shapes: per layer [kv_heads, head_dim] of a cache row.
    weights: the type of the quantised ones; None where all are of `dtype`. bits: a weight, that
        int4 was given; None has 8 at its ends alone.
    max_difference: largest absolute difference of the logits from the original model's; None
        where the graph could not be run (see `comparison`).
    tolerance: the bound that `max_difference` was held to.
    quality: of quantised weights; None where they are not.
    cache: the type of a quantised row; None where it is of `dtype`.
    encoder: of an encoder-decoder, whose encoder is a graph of its own; None for the others.
    states: of recurrent layers; None where there are none.
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
    def host_alone(self) -> bool:
        """Whether the graph for the CPU has weights of its own: a bundle for CPUs has no other."""
        return HOST_WEIGHTS_FILE in self.files

    @property
    def reads(self) -> FeatureFacts | None:
        """What its encoder reads, where that is no text."""
        return self.encoder.features if self.encoder else None

    @property
    def format(self) -> Format:
        return "torch" if PROGRAM_FILE in self.files else "onnx"

    def cache_bytes(self, slots: int, rows: int | None = None) -> int:
        """rows: of a slot, and of its source; None for all of them."""
        shapes = [*self.key_shapes, *self.value_shapes]
        rows = self.capacity if rows is None else min(rows, self.capacity)
        if self.cache:
            return slots * rows * sum(heads * (width + SCALE_BYTES) for heads, width in shapes)
        numbers = rows * sum(heads * width for heads, width in shapes)
        if self.encoder:
            shapes = [*self.encoder.key_shapes, *self.encoder.value_shapes]
            numbers += (self.encoder.rows or rows) * sum(heads * width for heads, width in shapes)
        if self.states:
            row = sum(heads * width for heads, width in self.states.shapes)
            numbers += self.states.rows * row
        return slots * numbers * (4 if self.dtype == "float32" else 2)


@dataclass(frozen=True)
class TokenizerFacts:
    """The target's tokenizer, carried along.

    vocab_size: largest id + 1. special_tokens: what chat templates name (bos_token, eos_token...).
    """

    key: str
    vocab_size: Count
    eos_token_ids: list[TokenId]
    special_tokens: dict[str, str]
    chat_template: bool
    files: dict[FileName, FileFacts]


def slot_rows(max_len: int, max_gamma: int) -> int:
    """The capacity of a slot: a verification never writes past it. A multiple of 8, so that slots
    of any head width begin where GPUs like to read."""
    return -(-(max_len + max_gamma + 1) // 8) * 8


@dataclass(frozen=True)
class Pair:
    """What `export/` hands to `engines/`.

    vocab_size: the common width; logits beyond it are padding with probability 0.
    max_len: longest prompt + output. max_gamma: most draft tokens a round.
    capacity: rows of a slot, at least max_len + max_gamma + 1 (see `slot_rows`).
    lookup: what proposes where there is no draft model and a request does not say; None: nothing.
    start_ids: what an encoder-decoder's text begins with: the decoder's start token, and what is
        forced behind it, where there is any; None for decoder-only models.
    audio: of a target that transcribes; None for the others.
    rules: of all texts, where the target's generation config has any.
    """

    target: GraphFacts
    draft: GraphFacts | None
    tokenizer: TokenizerFacts
    vocab_size: Vocabulary
    max_len: Count
    max_gamma: Annotated[int, between(1, MOST_GAMMA)]
    capacity: Count
    lookup: Literal["ngram"] | None = None
    start_ids: Annotated[list[TokenId], Rule("some tokens", bool)] | None = None
    audio: AudioFacts | None = None
    rules: TextRules | None = None

    def models(self) -> Iterator[tuple[str, GraphFacts]]:
        """("target", facts), and ("draft", facts) where there is one."""
        yield "target", self.target
        if self.draft is not None:
            yield "draft", self.draft

    def audio_holds(self) -> bool:
        """Whether what is said of audio can be true together."""
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
        """Of a round's buffers, in float32: the target's gamma + 1 rows and the draft's gamma.

        A CPU's engines have gamma + 1 rows in each buffer, as a chain verifies with the draft, and
        a target alone has lookups. On a GPU a target alone decodes plainly.
        """
        gamma = self.max_gamma
        rows = {"target": gamma + 1, "draft": gamma * (gamma + 1)}
        if gpu:
            rows = {"target": gamma + 1 if self.draft else 1, "draft": gamma}
        return 4 * slots * sum(rows[role] * facts.vocab_size for role, facts in self.models())

    def carried_files(self, engines: dict[str, EngineFacts] | None) -> dict[str, FileFacts]:
        """What a bundle takes over from the graphs folder: not what its engines hold."""
        if not engines:
            alone = {
                f"{role}/{file}"
                for role, facts in self.models()
                if facts.host_alone
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
        """Every file of the pair, by its path from the folder that holds it."""
        parts = (("tokenizer", self.tokenizer), ("target", self.target), ("draft", self.draft))
        return {
            f"{part}/{name}": file
            for part, facts in parts
            if facts is not None
            for name, file in facts.files.items()
        }


@dataclass(frozen=True)
class Profile:
    """The shapes that a compiled engine takes: B, N and K as [smallest, expected, largest].

    S is the capacity. memory: bytes for activations; None where the builder did not say.
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
    targets: the GPU architectures that it runs on, such as sm89; of a CPU, what it must have.
    weights: the graph's file that holds them; None where they are in the engine. level: of
    optimisation, None for the builder's own. encoder: as file, of an encoder-decoder's encoder,
    whose weights are the graph's too.
    """

    key: str
    file: PlainName
    targets: list[Target]
    profiles: list[Profile]
    weights: PlainName | None = None
    level: int | None = None
    encoder: PlainName | None = None

    @property
    def activations(self) -> int | None:
        """Bytes: a model's calls follow each other, so its contexts can share the memory of the
        largest. None where the builder did not say of all."""
        sizes = [profile.memory for profile in self.profiles if profile.memory is not None]
        return max(sizes) if sizes and len(sizes) == len(self.profiles) else None

    @property
    def compiled(self) -> list[str]:
        """The files that no graph has."""
        return [self.file, *([self.encoder] if self.encoder else [])]


@dataclass(frozen=True)
class CallBits:
    """Which calls of the target give the same logits to the bit, as they were measured.

    widths: numbers of tokens that agree with each other; others: those that do not. The others say
    whether a call gives the same alone and with neighbours, with one thread and with all, with
    room for few rows and for many.
    """

    widths: Annotated[list[Small], Rule("some widths", bool)]
    others: list[Small]
    neighbours: bool
    threads: bool
    rows: bool


@dataclass(frozen=True)
class Invariance:
    """What the target's bits depend on, where the bundle was built.

    processor: which that was (`machine.processor`). one, several: with one slot and with more.
    slots: whether these two give the same.
    """

    processor: str
    one: CallBits
    several: CallBits
    slots: bool


@dataclass(frozen=True)
class Manifest:
    """A bundle: the pair, the backend it was built for, and every file with its hash.

    engines: by role; None where the backend runs the graphs, which the bundle then holds.
    invariance: None where nobody measured it, on a GPU for one.
    """

    name: str
    backend: str
    versions: dict[str, str]
    slots: Annotated[int, between(1, MOST_SLOTS)]
    pair: Pair
    files: dict[FileName, FileFacts]
    engines: dict[str, EngineFacts] | None = None
    invariance: Invariance | None = None

    def contradiction(self) -> str | None:
        """What in here cannot be true together; None for what `engines/` wrote."""
        pair, models = self.pair, dict(self.pair.models())
        rows = pair.max_len + pair.max_gamma + 1
        needed = {f"tokenizer/{TOKENIZER_FILE}"}
        if pair.tokenizer.chat_template:
            needed.add(f"tokenizer/{TEMPLATE_FILE}")
        files = pair.carried_files(self.engines)
        for role, facts in models.items():
            code = [HOST_FILE if facts.host_alone else GRAPH_FILE]
            code += [ENCODER_FILE] if facts.encoder else []
            if self.engines and (engine := self.engines.get(role)):
                code = engine.compiled
                for name in (f"{role}/{file}" for file in code):  # no file of the pair
                    files[name] = self.files.get(name, FileFacts(-1, ""))
            needed |= {f"{role}/{name}" for name in (*code, *self.weight_files(role))}
        facts_that_hold = {
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
            "its audio": pair.audio_holds(),
        }
        return next((what for what, holds in facts_that_hold.items() if not holds), None)

    def weight_files(self, role: str) -> list[str]:
        """What a model's folder has its weights in, and those of its encoder."""
        facts, engine = dict(self.pair.models())[role], (self.engines or {}).get(role)
        own = HOST_WEIGHTS_FILE if facts.host_alone else WEIGHTS_FILE
        if engine:
            own = engine.weights or engine.file
        return [own, ENCODER_WEIGHTS_FILE] if facts.encoder else [own]

    def without_draft(self) -> Manifest:
        """What is opened where nobody will ask for the draft model."""
        engines = self.engines and {"target": self.engines["target"]}
        return replace(self, pair=replace(self.pair, draft=None), engines=engines)

    @property
    def activations(self) -> int | None:
        """Bytes of all engines together; None without engines, or where one does not know."""
        sizes = [engine.activations for engine in (self.engines or {}).values()]
        known = [size for size in sizes if size is not None]
        return sum(known) if known and known == sizes else None

    def gpu_targets(self) -> list[str]:
        """The GPU architectures that the engines were compiled for, such as sm89."""
        engines = (self.engines or {}).values()
        targets = {target for engine in engines for target in engine.targets}
        return sorted((t for t in targets if t.startswith("sm")), key=lambda t: int(t[2:]))

    def rebuild_command(self, out: Path, gpu: str | None = None) -> str:
        """What makes this bundle again, for the remedy of an error. gpu: one more, such as sm89."""
        pair = self.pair
        level = next((engine.level for engine in (self.engines or {}).values()), None)
        targets = {*self.gpu_targets(), *([gpu] if gpu else [])}
        # The others build for the GPU that is there.
        gpus = [t.removeprefix("sm") for t in targets if self.backend == "tensorrt_rtx"]
        chips = ",".join(sorted(gpus, key=int))
        if self.backend == "aotinductor" and not targets:
            chips = "cpu"
        variables = {
            "MODEL": f"<{pair.target.source}>",
            "DRAFT": f"<{pair.draft.source}>" if pair.draft else pair.lookup or "none",
            "BACKEND": self.backend,
            "DTYPE": pair.target.dtype,
            # Where nobody says, a checkpoint that is quantised already keeps its bits.
            "WEIGHTS": pair.target.weights or "full",
            **({"BITS": f"{pair.target.bits:g}"} if pair.target.bits else {}),
            **(
                {"DRAFT_WEIGHTS": pair.draft.weights or "full"}
                if pair.draft and pair.draft.weights != pair.target.weights
                else {}
            ),
            **({"CACHE": pair.target.cache} if pair.target.cache else {}),
            **({"SM": chips} if chips else {}),
            **({"OPT_LEVEL": level} if level is not None else {}),
            "MAX_LEN": pair.max_len,
            "MAX_GAMMA": pair.max_gamma,
            "SLOTS": self.slots,
            "OUT": out,
        }
        return "make engines " + " ".join(f"{name}={value}" for name, value in variables.items())


def file_facts(path: Path) -> FileFacts:
    with path.open("rb") as file:
        return FileFacts(os.fstat(file.fileno()).st_size, _sha256(file))


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


EXPORT_AGAIN = "Export the checkpoints again: python -m export --help."


def read_pair(folder: Path) -> Pair:
    return read_json(folder / PAIR_FILE, "pair", Pair, EXPORT_AGAIN)


_REBUILD = "Build one: make engines MODEL=<target> DRAFT=<draft> OUT=<folder>."


def read_bundle(folder: Path, *, verify: bool = True) -> Manifest:
    """Read and validate a bundle's manifest and (unless verify=False) the hash of every file.

    Raises OutriderError "bundle".
    """
    path = folder / MANIFEST_FILE
    with readable(folder, _REBUILD):
        if not folder.is_dir():
            raise OutriderError("bundle", f"{folder} is not a folder", _REBUILD)
        if not path.is_file():
            other = (folder / "config.json").is_file()
            what = "a Hugging Face checkpoint" if other else "no bundle"
            named = "the current folder (or an empty path)" if folder == Path() else folder
            cause = f"{named} is {what}: it has no {MANIFEST_FILE}"
            raise OutriderError("bundle", cause, _REBUILD)
    manifest = read_json(path, "manifest", Manifest, _REBUILD)
    if (odd := manifest.contradiction()) is not None:
        cause = f"{path} contradicts itself about {odd}: it was edited"
        raise OutriderError("bundle", cause, _REBUILD)
    verify_files(folder, manifest.files, contents=verify, remedy=_REBUILD)
    return manifest


def verify_part(folder: Path, manifest: Manifest, *, weights: bool) -> None:
    """The hashes of the files that hold numbers alone, or of all others. Whoever opens the former
    while they are damaged computes nonsense and runs none of it; an engine that holds its own
    weights is among the latter. Raises OutriderError "bundle"."""
    kinds = (WEIGHTS_FILE, HOST_WEIGHTS_FILE, ENCODER_WEIGHTS_FILE)
    numbers = {f"{role}/{file}" for role, _ in manifest.pair.models() for file in kinds}
    files = {name: f for name, f in manifest.files.items() if (name in numbers) == weights}
    verify_files(folder, files, contents=True, remedy=_REBUILD)


def verify_files(folder: Path, files: dict[str, FileFacts], *, contents: bool, remedy: str) -> None:
    """Refuse missing, unreadable, truncated and (with `contents`) edited files. Raises "bundle"."""
    for name, facts in files.items():
        path = folder / name
        with readable(path, remedy):
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
