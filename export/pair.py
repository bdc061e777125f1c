"""Export a pair: two models and their common tokenizer, in one folder for `engines/`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import transformers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from runtime.files.errors import OutriderError, refuse_first
from runtime.files.folders import refuse_foreign, symlink_or_copy, write_folder
from runtime.files.generation import FeatureFacts
from runtime.files.graphs import (
    GAMMA_LIMIT,
    PAIR_FILE,
    Cache,
    Dtype,
    Format,
    GraphFacts,
    Pair,
    Weights,
    slot_rows,
)
from runtime.files.manifest import ENCODER_DECODERS, RECURRENT_STATES
from runtime.files.progress import note, stage
from runtime.files.records import write_json
from runtime.files.texts import read_text

from . import part, vocabulary
from .checkpoint import Checkpoint, find, has_same_encoder
from .formats.packed import Packed
from .loading import check_length
from .weights.blocks import recover

DEFAULT_MAX_LEN = 2048
SAMPLED_MATRICES = 8  # matrices of a checkpoint that are inspected to see how it is quantised
BITS = {"int4": 4, "int8": 8, "fp8": 8, "full": 16}
SHORTEST_MAX_LEN = 32  # the comparison with the original needs room to roll back and continue

# By role: "target", and "draft" if the draft is a model.
Models = Mapping[str, Checkpoint]
Parts = Mapping[str, tuple[Path, GraphFacts]]


@dataclass(frozen=True)
class ExportOptions:
    """The options of `python -m export`, by name.

    draft: "self" for the target with fewer bits, "ngram" for lookups in the text, None for no
    draft. form: format of the graphs; a backend that is given the wrong one names the right one.
    weights: None means "full", or int4 or int8 for a quantised checkpoint. draft_weights: see
    `_default_draft_weights` for None. backend_runs: the kinds of weights that the backend runs, and
    whether it runs encoder-decoders and recurrent states; anything else is refused before the
    export. text: a UTF-8 file to measure the quality of quantised weights on. bits: maximum bits
    per weight of an int4 target, some of whose matrices may have 8. cache_type: type of the cache
    rows, only for ONNX Runtime on the CPU; None means `dtype`. max_gamma: 1 to 64. max_len: None
    means 2048, or the target's context if that is shorter. cache: folder of finished models. force:
    make them again even if they are there.
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


def export(model: str, draft: str | None, out: Path, **fields: Any) -> Pair:
    """Write target, draft and tokenizer to `out`, completely or not at all. See `Pair`.

    fields: see `ExportOptions`. Raises OutriderError "checkpoint", "architecture", "vocabulary",
    "difference", "option", "backend" or "disk".
    """
    options = ExportOptions(model, draft, out, **fields)
    _silence_libraries()
    refuse_foreign(out, PAIR_FILE)
    models = _find_checkpoints(options)
    kinds = _choose_weights(options, models)
    lengths = _choose_lengths(options, models)
    tokenizer = _load_tokenizer(models)
    parts = _make_parts(options, models, kinds, lengths, tokenizer)
    return _write_pair(options, models["target"], tokenizer, parts)


def _find_checkpoints(options: ExportOptions) -> Models:
    """Find both checkpoints; refuse them if they do not match or the backend does not run them.
    Raises OutriderError "checkpoint", "architecture", "option", "backend"."""
    dtype, cache_type = options.dtype, options.cache_type
    if cache_type and (dtype != "float32" or options.form != "onnx"):
        raise OutriderError(
            "option",
            f"CACHE={cache_type} is supported only by ONNX Runtime on the CPU in float32",
            "Leave CACHE out, or build with BACKEND=onnxruntime DTYPE=float32.",
        )
    models = {"target": (target := find(options.model))}
    if options.draft not in (None, "ngram"):
        models["draft"] = target if options.draft == "self" else find(options.draft)
    if target.has_encoder:
        if ENCODER_DECODERS not in options.backend_runs:
            raise OutriderError(
                "backend",
                f"{target.source} is a {target.architecture}, and the backend does not run "
                f"encoder-decoders with DTYPE={dtype} in this version",
                "Build with BACKEND=onnxruntime DTYPE=float32, or BACKEND=aotinductor SM=cpu.",
            )
        make_options = {"DTYPE": dtype if options.form == "onnx" else None, "CACHE": cache_type}
        _check_encoder_decoder(models, make_options)
    elif "draft" in models and models["draft"].has_encoder:
        raise _mixed_kinds(target, models["draft"])
    return models


def _choose_weights(options: ExportOptions, models: Models) -> dict[str, str]:
    """Choose each model's kind of weights. Raises OutriderError "option", "backend"."""
    target, text, is_self_draft = models["target"], options.text, options.draft == "self"
    named = "" if options.bits is None else f"BITS={options.bits:g}"
    kinds = {"target": options.weights or _default_weights(target)}
    if "draft" in models:
        kinds["draft"] = options.draft_weights or _default_draft_weights(options, kinds["target"])
    refuse_first([
        ("draft" not in models and options.draft_weights,
         f"DRAFT_WEIGHTS={options.draft_weights} is set, but there is no draft model",
         "Set DRAFT to a model, or leave DRAFT_WEIGHTS out."),
        (text is not None and target.features,
         f"TEXT={text} is text, but {target.source} reads audio",
         "Leave TEXT out."),
        (text is not None and {*kinds.values()} == {"full"},
         f"TEXT={text} is for measuring quantised weights, but no weights are quantised",
         "Set WEIGHTS, or leave TEXT out."),
        (named and kinds["target"] != "int4",
         f"{named} requires WEIGHTS=int4, but WEIGHTS is {kinds['target']}",
         "Set WEIGHTS=int4, or leave BITS out."),
        (options.bits is not None and not 4.5 <= options.bits <= 8.5,
         f"{named} is out of range: a weight takes 4.5 bits if all matrices have 4, scales "
         "included, and 8.5 if all have 8",
         "Give BITS from 4.5 to 8.5, or set WEIGHTS=int8."),
        (named and target.features,
         f"{named} requires text that the model generates, but {target.source} reads audio",
         "Leave BITS out, or set WEIGHTS=int8."),
        (is_self_draft and BITS[kinds["draft"]] >= BITS[kinds["target"]],
         f"DRAFT=self with WEIGHTS={kinds['target']} and DRAFT_WEIGHTS={kinds.get('draft')}: the "
         "draft would be hardly cheaper than the target, if at all",
         "Give the draft fewer bits than the target, or choose another DRAFT."),
    ])  # fmt: skip
    _check_weights(options, "WEIGHTS", kinds["target"], "WEIGHTS=full")
    if "draft" in kinds:
        instead = "another DRAFT" if is_self_draft else "DRAFT_WEIGHTS=full"
        _check_weights(options, "DRAFT_WEIGHTS", kinds["draft"], instead)
    return kinds


def _choose_lengths(options: ExportOptions, models: Models) -> dict[str, int]:
    """Choose the maximum sequence length of each model. Raises OutriderError "option",
    "architecture"."""
    target, length = models["target"], options.max_len
    if length is None:
        length = min(DEFAULT_MAX_LEN, target.max_len)
    refuse_first([
        (length > target.max_len,
         f"MAX_LEN={length} exceeds the context of {target.source}, {target.max_len} tokens",
         f"Build with MAX_LEN={target.max_len} or less."),
        (not 1 <= options.max_gamma <= GAMMA_LIMIT,
         f"MAX_GAMMA={options.max_gamma} is out of range",
         f"Build with MAX_GAMMA from 1 to {GAMMA_LIMIT}."),
        (length < SHORTEST_MAX_LEN,
         f"MAX_LEN={length} is too short to compare the graph with the original",
         f"Build with MAX_LEN={SHORTEST_MAX_LEN} or more."),
    ])  # fmt: skip
    lengths = {role: min(length, model.max_len) for role, model in models.items()}
    for role, model in models.items():
        check_length(model, lengths[role])
    return lengths


def _load_tokenizer(models: Models) -> PreTrainedTokenizerFast:
    """Load the pair's common tokenizer. Everything else that `_write_pair` reads is read here too,
    so that errors in it are reported before the graphs are made, which takes minutes. Raises
    OutriderError "checkpoint", "vocabulary", "architecture"."""
    target = models["target"]
    tokenizer = vocabulary.load_tokenizer(target)
    if not vocabulary.end_of_text_ids(target, tokenizer):
        note(
            f"{target.source} names no eos_token_id: generation ends only at the length limit or "
            "at a stop string"
        )
    vocabulary.check_chat_template(target, tokenizer)
    vocabulary.start_ids(target)
    vocabulary.audio_facts(target)
    vocabulary.text_rules(target)
    _note_ignored_settings(target, tokenizer)
    if "draft" in models:
        with stage("pair", "compare vocabularies") as progress:
            theirs = vocabulary.load_tokenizer(models["draft"])
            progress.note = vocabulary.check_same_tokens(
                tokenizer, theirs, _smallest_vocab_size(models)
            )
    return tokenizer


def _make_parts(
    options: ExportOptions,
    models: Models,
    kinds: Mapping[str, str],
    lengths: Mapping[str, int],
    tokenizer: PreTrainedTokenizerFast,
) -> Parts:
    """Make each model's graph, or find it in the cache. Raises OutriderError "option", and as
    `part.make`."""
    text_ids = None
    if options.text is not None:
        text_ids = _text_ids(options.text, tokenizer, _smallest_vocab_size(models))
    capacity = slot_rows(lengths["target"], options.max_gamma)
    same_encoders = (
        "draft" in models and models["target"].has_encoder and has_same_encoder(*models.values())
    )
    if same_encoders:
        note("target and draft have the same encoder, which runs once for both")

    def make(role: str, kind: str) -> tuple[Path, GraphFacts]:
        request = part.PartRequest(
            role, models[role], options.dtype, lengths[role], capacity, options.max_gamma,
            form=options.form,
            weights=None if kind == "full" else cast(Weights, kind),
            cache=options.cache_type,
            text=text_ids,
            bits=options.bits if role == "target" else None,
            shares_encoder=same_encoders and role == "draft",
            backend_runs_states=RECURRENT_STATES in options.backend_runs,
        )  # fmt: skip
        return part.make(request, options.cache, options.force)

    parts = {"target": make("target", kinds["target"])}
    if "draft" in models:
        try:
            parts["draft"] = make("draft", kinds["draft"])
        except OutriderError as error:
            given = options.draft_weights or (kinds["target"], kinds["draft"]) != ("full", "int8")
            if given or error.kind in ("option", "disk"):
                raise
            # Nobody asked for int8, so a draft that it breaks is not refused.
            parts["draft"] = make("draft", "full")
            note(f"DRAFT_WEIGHTS is full: {error.cause}")
    return parts


def _write_pair(
    options: ExportOptions, target: Checkpoint, tokenizer: PreTrainedTokenizerFast, parts: Parts
) -> Pair:
    with write_folder(options.out, PAIR_FILE) as partial:
        (partial / "tokenizer").mkdir()
        tokenizer_facts = vocabulary.write_tokenizer(target, tokenizer, partial / "tokenizer")
        for role, (folder, facts) in parts.items():
            for name in facts.files:
                symlink_or_copy(folder / name, partial / role / name)
        facts = parts["target"][1]
        pair = Pair(
            target=facts,
            draft=parts["draft"][1] if "draft" in parts else None,
            tokenizer=tokenizer_facts,
            # Whisper's tokenizers may lack the timestamps, which are ordinary tokens to the model.
            vocab_size=facts.vocab_size
            if target.features
            else min(tokenizer_facts.vocab_size, facts.vocab_size),
            max_len=facts.max_len,
            max_gamma=options.max_gamma,
            capacity=facts.capacity,
            lookup="ngram" if options.draft == "ngram" else None,
            start_ids=vocabulary.start_ids(target),
            audio=vocabulary.audio_facts(target),
            rules=vocabulary.text_rules(target),
        )
        write_json(partial / PAIR_FILE, "pair", pair)
    return pair


def _check_encoder_decoder(models: Models, make_options: Mapping[str, str | None]) -> None:
    """Refuse options that only decoder-only models support, and pairs of different kinds. Raises
    OutriderError "option", "architecture"."""
    target = models["target"]
    for name, value in make_options.items():
        if value not in (None, "float32"):
            raise OutriderError(
                "option",
                f"{name}={value} supports only decoder-only models in this version, and "
                f"{target.source} is a {target.architecture}",
                f"Leave {name} out, and build with BACKEND=onnxruntime.",
            )
    for checkpoint in models.values():
        if not checkpoint.has_encoder:
            raise _mixed_kinds(target, checkpoint)
        if checkpoint.features != target.features:
            raise OutriderError(
                "architecture",
                f"{target.source} reads {_describe_features(target.features)}, but its draft "
                f"{checkpoint.source} reads {_describe_features(checkpoint.features)}",
                "Choose a DRAFT of the target's kind, or DRAFT=none.",
            )
        if checkpoint.packed:
            reason = "only decoder-only models may have quantised weights in this version"
            raise checkpoint.refused(reason)


def _describe_features(features: FeatureFacts | None) -> str:
    if features is None:
        return "text"
    return f"{features.feature_size} x {features.frames} log-mel features"


def _mixed_kinds(target: Checkpoint, drafter: Checkpoint) -> OutriderError:
    kinds = [f"{x.source} is a {x.architecture}" for x in (target, drafter)]
    return OutriderError(
        "architecture",
        f"{kinds[0]} and its draft {kinds[1]}: only one of them is an encoder-decoder",
        "Choose a DRAFT of the target's kind, or DRAFT=none.",
    )


def _check_weights(options: ExportOptions, option: str, kind: str, instead: str) -> None:
    """Refuse now what the backend would refuse after the export. option: name of make's option."""
    default = getattr(options, option.lower()) is None
    setting = f"{option}={kind}" + (", the default here," if default else "")
    if options.form == "torch" and kind != "full":
        cause = f"{setting} requires graphs in ONNX format, and these are in torch's"
        raise OutriderError("option", cause, f"Build with {instead}, or --format onnx.")
    if kind == "fp8" and options.dtype == "float32":
        cause = f"{setting} is only for GPUs, and graphs of DTYPE={options.dtype} are for CPUs"
        raise OutriderError("option", cause, "Build with DTYPE=float16 or bfloat16.")
    if kind not in options.backend_runs:
        cause = f"{setting} is not supported by the backend with this DTYPE"
        raise OutriderError("backend", cause, f"Build with {instead}, or another BACKEND or DTYPE.")


def _default_weights(target: Checkpoint) -> str:
    """The default kind of weights: "full", or for a quantised checkpoint the smallest that loses
    next to nothing. That is 4 bits only if they can hold its levels, otherwise 8."""
    packed = target.packed
    if packed is None or packed.bits not in (4, 8):
        return "full"
    if packed.bits == 8 or _fits_4_bits(packed, target.vocab_size):
        return f"int{packed.bits}"
    note(
        f"{target.source}: blocks of 32 4-bit weights without zero points cannot hold its levels, "
        "so WEIGHTS is int8; int4 is smaller, but quantises the weights anew"
    )
    return "int8"


def _default_draft_weights(options: ExportOptions, target: str) -> str:
    """The draft's default kind of weights: the target's. For a full target on the CPU it is int8,
    which costs a quarter: a draft decides how fast the output comes, not what it is."""
    if options.draft == "self":
        return "int4"
    for_cpu = options.form == "onnx" and options.dtype == "float32"
    if target == "full" and for_cpu and "int8" in options.backend_runs:
        return "int8"
    return target


def _fits_4_bits(packed: Packed, vocab_size: int) -> bool:
    """Whether 4-bit blocks exactly hold at least half of a sample of the layers' matrices."""
    matrices = [
        tensor
        for tensor in packed.tensors().values()
        if len(tensor.shape) == 2 and tensor.shape[0] != vocab_size
    ]
    sample = matrices[:: -(-len(matrices) // SAMPLED_MATRICES) or 1]
    found = [recover(tensor[...], 4) is not None for tensor in sample]
    return 2 * sum(found) >= len(found)


def _text_ids(file: Path, tokenizer: PreTrainedTokenizerFast, width: int) -> list[int]:
    """Token ids of a text file, without those that some model of the pair lacks."""
    text = read_text(file, f"TEXT={file}")
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [token for token in ids if token < width]


def _smallest_vocab_size(models: Models) -> int:
    return min(model.vocab_size for model in models.values())


def _note_ignored_settings(target: Checkpoint, tokenizer: PreTrainedTokenizerFast) -> None:
    defaults, options = vocabulary.sampling_defaults(target), vocabulary.request_fields(target)
    for names, consequence in (
        (defaults.keys() & options, "pass the ones you want when generating"),
        (defaults.keys() - options, "no option has one of these names"),
    ):
        if names:
            settings = ", ".join(f"{name}={defaults[name]}" for name in defaults if name in names)
            note(
                f"the generation config sets {settings}, which the bundle does not keep: "
                f"{consequence}"
            )
    if tokenizer.split_special_tokens:
        note(
            "the tokenizer treats special tokens in a prompt as text: pass special_tokens=text for "
            "that"
        )
    templates: Any = tokenizer.chat_template
    if isinstance(templates, dict) and "default" not in templates:
        note(f"none of its chat templates ({', '.join(templates)}) is called default: none is kept")
    is_bpe = isinstance(tokenizer.backend_tokenizer.model, BPE)
    if tokenizer.clean_up_tokenization_spaces and not is_bpe:
        note("the tokenizer config removes spaces before punctuation; the bundle's texts keep them")
    beyond = max(tokenizer.get_vocab().values()) + 1 - target.vocab_size
    if beyond > 0:
        note(f"{beyond} tokens of the tokenizer have no embedding: prompts with them are refused")


def _silence_libraries() -> None:
    """Silence the libraries' progress bars and advice, which would drown the stage lines."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for name in ("huggingface_hub", "onnxscript"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch|onnxscript|transformers")
