"""The graphs folder, which `export/` writes and `engines/` compiles.

Its facts are the dataclasses `GraphFacts` (of a part, `graph.json`) and `Pair` (`pair.json`).
docs/architecture.md has the layout.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Literal

from .errors import OutriderError
from .generation import AudioFacts, FeatureFacts, TextRules
from .records import Count, Rule, SmallCount, TokenId, between, convert_read_errors, read_json
from .torch_files import PROGRAM_FILE

KINDS = ("manifest", "pair", "graph")
PAIR_FILE, PART_FILE = "pair.json", "graph.json"
GRAPH_FILE = "graph.onnx"
HOST_FILE = "host.onnx"  # the CPU's graph, with the operators of plugins/onnxruntime
HOST_WEIGHTS_FILE = "host.bin"  # its own weights, if they are quantised
ENCODER_FILE = "encoder.onnx"  # its weights are in ENCODER_WEIGHTS_FILE, as those of a program
TOKENIZER_FILE, TEMPLATE_FILE = "tokenizer.json", "chat_template.jinja"
GAMMA_LIMIT = 64  # OUTRIDER_MAX_WIDTH of plugins/include/outrider.h
Dtype = Literal["float32", "float16", "bfloat16"]
Format = Literal["onnx", "torch"]  # of a graph: GRAPH_FILE or PROGRAM_FILE
Weights = Literal["int8", "int4", "fp8"]
Cache = Literal["int8"]
SCALE_BYTES = 4  # after the levels of a quantised row: OUTRIDER_ATTENTION_SCALE

# More types of fields: see `records`.
Vocabulary = Annotated[int, between(1, 1 << 30)]  # what outrider_workspace_size takes
Bytes = Annotated[int, between(0, 1 << 62)]
Finite = Annotated[float, between(0, 1e30)]
Digest = Annotated[
    str, Rule("a SHA-256", lambda text: re.fullmatch("[0-9a-f]{64}", text) is not None)
]
RowShape = Annotated[list[SmallCount], Rule("[heads, width]", lambda shape: len(shape) == 2)]


def _is_inside(name: str) -> bool:
    path = Path(name)
    return path.name != "" and not path.is_absolute() and ".." not in path.parts


FileName = Annotated[str, Rule("a path inside the folder", _is_inside)]


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

    def loaded_bytes(self, stored: int, *, host: bool) -> int:
        """Bytes of memory for weights whose files have `stored` bytes. host: whether host.onnx can
        run; graph.onnx makes those of 16 bits float32."""
        as_stored = host and HOST_FILE in self.files
        if as_stored or self.format != "onnx" or self.dtype != "float32" or self.weights:
            return stored
        # The parameters of a draft that shares the target's encoder include that.
        shares = self.encoder is not None and self.encoder.shared is not None
        return stored if shares else max(stored, 4 * self.parameters)

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

    def all_files(self) -> dict[str, FileFacts]:
        """Every file of the pair, by its path relative to the folder."""
        parts = (("tokenizer", self.tokenizer), ("target", self.target), ("draft", self.draft))
        return {
            f"{part}/{name}": file
            for part, facts in parts
            if facts is not None
            for name, file in facts.files.items()
        }


def file_facts(path: Path) -> FileFacts:
    with path.open("rb") as file:
        return FileFacts(os.fstat(file.fileno()).st_size, _sha256(file))


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


EXPORT_REMEDY = "Export the checkpoints again: see python -m export --help."


def read_pair(folder: Path) -> Pair:
    return read_json(folder / PAIR_FILE, "pair", Pair, EXPORT_REMEDY)


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
