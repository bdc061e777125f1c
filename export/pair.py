"""The pair: two parts, one vocabulary, one folder for `engines/`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import transformers
from transformers import PreTrainedTokenizerFast

from runtime.files.errors import OutriderError, refuse_first
from runtime.files.folders import refuse_foreign, symlink_or_copy, write_folder
from runtime.files.generation import FeatureFacts
from runtime.files.manifest import (
    ENCODER_DECODERS,
    GAMMA_LIMIT,
    PAIR_FILE,
    RECURRENT_STATES,
    Cache,
    Dtype,
    Format,
    GraphFacts,
    Pair,
    Weights,
    slot_rows,
)
from runtime.files.progress import note, stage
from runtime.files.records import write_json
from runtime.files.texts import read_text

from . import part, vocabulary
from .checkpoint import Checkpoint, find, same_encoder
from .loading import check_length
from .weights.blocks import recover

DEFAULT_MAX_LEN = 2048
SAMPLED = 8  # matrices of a checkpoint, to learn how it is quantised
BITS = {"int4": 4, "int8": 8, "fp8": 8, "full": 16}
SHORTEST_MAX_LEN = 32  # what the comparison with the original needs to roll back and go on

# By role: "target", and "draft" where that is a model.
Models = Mapping[str, Checkpoint]
Parts = Mapping[str, tuple[Path, GraphFacts]]


@dataclass(frozen=True)
class Asked:
    """What `python -m export` is asked for, by the names of its options.

    draft: "self" is the target with fewer bits, "ngram" lookups in the text, None no draft. form:
    of the graphs; which one a backend wants, it says when it is given the other. weights: None is
    "full", or as few bits as the checkpoint has, of the draft as the target's; of the draft "self"
    4 bits. backend_runs: kinds of weights, and whether encoder-decoders and recurrent states, that
    the graphs' backend runs; others are refused before the export.
    text: a file, UTF-8, to measure the quality of quantised weights on.
    bits: a weight, that the target's int4 may take with 8 in places.
    cache_type: of the caches' rows, of ONNX Runtime on the CPU alone; None is `dtype`.
    max_gamma: 1 to 64. max_len: None takes 2048, or the target's own context where that is shorter.
    cache: where finished parts are kept. force: make them again.
    """

    model: str
    draft: str | None
    out: Path
    dtype: Dtype = "float32"
    max_len: int | None = None
    max_gamma: int = 8
    cache: Path = Path("build/.cache")
    form: Format = "onnx"
    weights: Weights | Literal["full"] | None = None
    draft_weights: Weights | Literal["full"] | None = None
    backend_runs: Sequence[str] = (*BITS, ENCODER_DECODERS, RECURRENT_STATES)
    cache_type: Cache | None = None
    text: Path | None = None
    bits: float | None = None
    force: bool = False


def export(model: str, draft: str | None, out: Path, **options: Any) -> Pair:
    """Write target, draft and tokenizer to `out`, whole or not at all. See `Pair`.

    options: see `Asked`. Raises OutriderError "checkpoint", "architecture", "vocabulary",
    "difference", "option", "backend", "disk".
    """
    asked = Asked(model, draft, out, **options)
    _quiet()
    refuse_foreign(out, PAIR_FILE)
    models = _find(asked)
    kinds = _kinds(asked, models)
    lengths = _lengths(asked, models)
    tokenizer = _tokenizer(models)
    parts = _parts(asked, models, kinds, lengths, tokenizer)
    return _write_pair(asked, models["target"], tokenizer, parts)


def _find(asked: Asked) -> Models:
    """Find both checkpoints, and refuse two that do not go together or that the backend does not
    run. Raises OutriderError "checkpoint", "architecture", "option", "backend"."""
    dtype, cache_type = asked.dtype, asked.cache_type
    if cache_type and (dtype != "float32" or asked.form != "onnx"):
        raise OutriderError(
            "option",
            f"CACHE={cache_type} is for ONNX Runtime on the CPU in float32",
            "Leave CACHE out, or build with BACKEND=onnxruntime DTYPE=float32.",
        )
    models = {"target": (target := find(asked.model))}
    if asked.draft not in (None, "ngram"):
        models["draft"] = target if asked.draft == "self" else find(asked.draft)
    if target.has_encoder:
        if ENCODER_DECODERS not in asked.backend_runs:
            raise OutriderError(
                "backend",
                f"{target.source} is a {target.architecture}, and the backend does not run "
                f"encoder-decoders with DTYPE={dtype} in this version",
                "Build with BACKEND=onnxruntime DTYPE=float32, or BACKEND=aotinductor SM=cpu.",
            )
        options = {"DTYPE": dtype if asked.form == "onnx" else None, "CACHE": cache_type}
        _check_encoder_decoder(models, options)
    elif "draft" in models and models["draft"].has_encoder:
        raise _two_kinds(target, models["draft"])
    return models


def _kinds(asked: Asked, models: Models) -> dict[str, str]:
    """Choose the kind of each model's weights. Raises OutriderError "option", "backend"."""
    target, text, itself = models["target"], asked.text, asked.draft == "self"
    named = "" if asked.bits is None else f"BITS={asked.bits:g}"
    kinds = {"target": asked.weights or _bits_of(target, "WEIGHTS")}
    if "draft" in models:
        kinds["draft"] = asked.draft_weights or ("int4" if itself else kinds["target"])
    refuse_first([
        ("draft" not in models and asked.draft_weights,
         f"DRAFT_WEIGHTS={asked.draft_weights} is for a draft model, and there is none",
         "Name a DRAFT, or leave it out."),
        (text is not None and target.features,
         f"TEXT={text} is what a model reads, and {target.source} reads sound",
         "Leave TEXT out."),
        (text is not None and {*kinds.values()} == {"full"},
         f"TEXT={text} is to measure quantised weights on, and none are",
         "Set WEIGHTS, or leave it out."),
        (named and kinds["target"] != "int4",
         f"{named} is for WEIGHTS=int4, and WEIGHTS is {kinds['target']}",
         "Set WEIGHTS=int4, or leave BITS out."),
        (asked.bits is not None and not 4.5 <= asked.bits <= 8.5,
         f"{named} is out of range: all matrices take 4.5 with 4 bits, scales included, and 8.5 "
         "with 8",
         "Give BITS from 4.5 to 8.5, or set WEIGHTS=int8."),
        (named and target.features,
         f"{named} needs texts that the model writes, and {target.source} reads sound",
         "Leave BITS out, or set WEIGHTS=int8."),
        (itself and BITS[kinds["draft"]] >= BITS[kinds["target"]],
         f"DRAFT=self with WEIGHTS={kinds['target']} and DRAFT_WEIGHTS={kinds.get('draft')}: the "
         "draft would be no cheaper than the target, or hardly",
         "Give the draft fewer bits than the target, or another DRAFT."),
    ])  # fmt: skip
    _check_weights(asked, "WEIGHTS", kinds["target"], "WEIGHTS=full")
    if "draft" in kinds:
        instead = "another DRAFT" if itself else "DRAFT_WEIGHTS=full"
        _check_weights(asked, "DRAFT_WEIGHTS", kinds["draft"], instead)
    return kinds


def _lengths(asked: Asked, models: Models) -> dict[str, int]:
    """Choose the longest text of each model. Raises OutriderError "option", "architecture"."""
    target, length = models["target"], asked.max_len
    if length is None:
        length = min(DEFAULT_MAX_LEN, target.max_len)
    refuse_first([
        (length > target.max_len,
         f"MAX_LEN={length} is beyond the context of {target.source}, {target.max_len} tokens",
         f"Build with MAX_LEN={target.max_len} or less."),
        (not 1 <= asked.max_gamma <= GAMMA_LIMIT, f"MAX_GAMMA={asked.max_gamma} is out of range",
         f"Build with MAX_GAMMA from 1 to {GAMMA_LIMIT}."),
        (length < SHORTEST_MAX_LEN,
         f"MAX_LEN={length} is too short to compare the graph with the original",
         f"Build with MAX_LEN={SHORTEST_MAX_LEN} or more."),
    ])  # fmt: skip
    lengths = {role: min(length, model.max_len) for role, model in models.items()}
    for role, model in models.items():
        check_length(model, lengths[role])
    return lengths


def _tokenizer(models: Models) -> PreTrainedTokenizerFast:
    """Load the pair's one vocabulary. Whatever `_write_pair` reads beside it is read here too, so
    that what is wrong with it is said before the minutes that graphs take. Raises OutriderError
    "checkpoint", "vocabulary", "architecture"."""
    target = models["target"]
    tokenizer = vocabulary.load_tokenizer(target)
    if not vocabulary.end_of_text_ids(target, tokenizer):
        note(f"{target.source} names no eos_token_id: a text ends at its length or a stop string")
    vocabulary.check_chat_template(target, tokenizer)
    vocabulary.start_ids(target)
    vocabulary.audio(target)
    vocabulary.rules(target)
    _say_what_is_not_carried(target, tokenizer)
    if "draft" in models:
        with stage("pair", "compare vocabularies") as said:
            theirs = vocabulary.load_tokenizer(models["draft"])
            said.note = vocabulary.check_same_tokens(tokenizer, theirs, _narrowest(models))
    return tokenizer


def _parts(
    asked: Asked,
    models: Models,
    kinds: Mapping[str, str],
    lengths: Mapping[str, int],
    tokenizer: PreTrainedTokenizerFast,
) -> Parts:
    """Make each model's graph, or find it in the cache. Raises what `part.make` does, "option"."""
    words = _words(asked.text, tokenizer, _narrowest(models)) if asked.text is not None else None
    capacity = slot_rows(lengths["target"], asked.max_gamma)
    shares = "draft" in models and models["target"].has_encoder and same_encoder(*models.values())
    if shares:
        note("the draft's encoder is the target's, which is run once for both")
    return {
        role: part.make(
            part.Wanted(
                role, model, asked.dtype, lengths[role], capacity, asked.max_gamma, asked.form,
                weights=None if kinds[role] == "full" else cast(Weights, kinds[role]),
                cache=asked.cache_type,
                text=words,
                bits=asked.bits if role == "target" else None,
                shares=shares and role == "draft",
                states=RECURRENT_STATES in asked.backend_runs,
            ),
            asked.cache,
            asked.force,
        )
        for role, model in models.items()
    }  # fmt: skip


def _write_pair(
    asked: Asked, target: Checkpoint, tokenizer: PreTrainedTokenizerFast, parts: Parts
) -> Pair:
    with write_folder(asked.out, PAIR_FILE) as partial:
        (partial / "tokenizer").mkdir()
        words = vocabulary.carry(target, tokenizer, partial / "tokenizer")
        for role, (folder, facts) in parts.items():
            for name in facts.files:
                symlink_or_copy(folder / name, partial / role / name)
        facts = parts["target"][1]
        pair = Pair(
            target=facts,
            draft=parts["draft"][1] if "draft" in parts else None,
            tokenizer=words,
            # Tokenizers of Whisper may lack the timestamps, which are tokens like all others.
            vocab_size=facts.vocab_size
            if target.features
            else min(words.vocab_size, facts.vocab_size),
            max_len=facts.max_len,
            max_gamma=asked.max_gamma,
            capacity=facts.capacity,
            lookup="ngram" if asked.draft == "ngram" else None,
            start_ids=vocabulary.start_ids(target),
            audio=vocabulary.audio(target),
            rules=vocabulary.rules(target),
        )
        write_json(partial / PAIR_FILE, "pair", pair)
    return pair


def _check_encoder_decoder(models: Models, options: Mapping[str, str | None]) -> None:
    """Refuse what there is for decoder-only models alone. Raises OutriderError "option",
    "architecture"."""
    target = models["target"]
    for name, value in options.items():
        if value not in (None, "float32"):
            raise OutriderError(
                "option",
                f"{name}={value} is for decoder-only models in this version, and {target.source} "
                f"is a {target.architecture}",
                f"Leave {name} out, and build with BACKEND=onnxruntime.",
            )
    for checkpoint in models.values():
        if not checkpoint.has_encoder:
            raise _two_kinds(target, checkpoint)
        if checkpoint.features != target.features:
            raise OutriderError(
                "architecture",
                f"{target.source} reads {_spectrum(target.features)}, and its draft "
                f"{checkpoint.source} {_spectrum(checkpoint.features)}",
                "Choose a DRAFT of the target's kind, or DRAFT=none.",
            )
        if checkpoint.packed:
            reason = "quantised weights are read of decoder-only models alone in this version"
            raise checkpoint.refused(reason)


def _spectrum(features: FeatureFacts | None) -> str:
    if features is None:
        return "text"
    return f"{features.feature_size} x {features.frames} log-mel features"


def _two_kinds(target: Checkpoint, drafter: Checkpoint) -> OutriderError:
    kinds = [f"{x.source} is a {x.architecture}" for x in (target, drafter)]
    return OutriderError(
        "architecture",
        f"{kinds[0]} and its draft {kinds[1]}: one of them reads a source, the other does not",
        "Choose a DRAFT of the target's kind, or DRAFT=none.",
    )


def _check_weights(asked: Asked, option: str, kind: str, instead: str) -> None:
    """Refuse now what the backend would refuse after the export. option: in the words of make."""
    default = getattr(asked, option.lower()) is None
    said = f"{option}={kind}" + (", the default here," if default else "")
    if asked.form == "torch" and kind != "full":
        cause = f"{said} is for graphs in ONNX, and these are torch's"
        raise OutriderError("option", cause, f"Build with {instead}, or --format onnx.")
    if kind == "fp8" and asked.dtype == "float32":
        cause = f"{said} is for GPUs, and graphs of DTYPE={asked.dtype} are for CPUs"
        raise OutriderError("option", cause, "Build with DTYPE=float16 or bfloat16.")
    if kind not in asked.backend_runs:
        cause = f"{said} is not what the backend runs with this DTYPE"
        raise OutriderError("backend", cause, f"Build with {instead}, or another BACKEND or DTYPE.")


def _bits_of(checkpoint: Checkpoint, option: str) -> str:
    """What a checkpoint that is quantised already becomes where nobody says: the least that costs
    next to nothing. That is 4 bits only where they carry its levels over, and 8 otherwise."""
    packed = checkpoint.packed
    if packed is None or packed.bits not in (4, 8):
        return "full"
    if packed.bits == 8 or _carried(checkpoint):
        return f"int{packed.bits}"
    note(
        f"{checkpoint.source}: 4 bits in blocks of 32 without zero points do not carry its levels "
        f"over, so {option} is int8; int4 is smaller, and quantises it anew"
    )
    return "int8"


def _carried(checkpoint: Checkpoint) -> bool:
    """Whether blocks of 4 bits hold most of what a sample of the layers' matrices says."""
    assert checkpoint.packed is not None
    matrices = [
        tensor
        for tensor in checkpoint.packed.tensors().values()
        if len(tensor.shape) == 2 and tensor.shape[0] != checkpoint.vocab_size
    ]
    sample = matrices[:: -(-len(matrices) // SAMPLED) or 1]
    found = [recover(tensor[...], 4) is not None for tensor in sample]
    return 2 * sum(found) >= len(found)


def _words(file: Path, tokenizer: PreTrainedTokenizerFast, width: int) -> list[int]:
    """Token ids of a text, those that every model has."""
    words = read_text(file, f"TEXT={file}")
    ids: list[int] = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
    return [token for token in ids if token < width]


def _narrowest(models: Models) -> int:
    return min(model.vocab_size for model in models.values())


def _say_what_is_not_carried(target: Checkpoint, tokenizer: PreTrainedTokenizerFast) -> None:
    if defaults := vocabulary.sampling_defaults(target):
        options = ", ".join(f"{name}={value}" for name, value in defaults.items())
        note(f"the generation config asks for {options}: pass what you want of it when generating")
    if tokenizer.split_special_tokens:
        note(
            "its tokenizer takes special tokens in a prompt as text: special_tokens=text does that"
        )
    beyond = max(tokenizer.get_vocab().values()) + 1 - target.vocab_size
    if beyond > 0:
        note(f"{beyond} tokens of the tokenizer have no embedding: prompts with them are refused")


def _quiet() -> None:
    """Loading bars and advice of the libraries would drown the stage lines."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch|onnxscript|transformers")
