"""The pair: two parts, one vocabulary, one folder for `engines/`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import transformers
from transformers import PreTrainedTokenizerFast

from runtime.files.audio import FeatureFacts
from runtime.files.errors import OutriderError, first_line
from runtime.files.folders import point_to, refuse_foreign, write_folder
from runtime.files.manifest import (
    ENCODER_DECODERS,
    MOST_GAMMA,
    PAIR_FILE,
    Cache,
    Dtype,
    Format,
    GraphFacts,
    Pair,
    Weights,
)
from runtime.files.progress import note, stage
from runtime.files.records import write_json

from . import part, vocabulary
from .checkpoint import Checkpoint, find, refuse_architecture, same_encoder
from .loading import check_length
from .weights.recover import recover

DEFAULT_MAX_LEN = 2048
SAMPLED = 8  # matrices of a checkpoint, to learn how it is quantised
BITS = {"int4": 4, "int8": 8, "fp8": 8, "full": 16}
SHORTEST_MAX_LEN = 32  # what the comparison with the original needs to roll back and go on


def export(
    model: str,
    draft: str | None,
    out: Path,
    *,
    lookup: Literal["ngram"] | None = None,
    dtype: Dtype = "float32",
    max_len: int | None = None,
    max_gamma: int = 8,
    cache: Path = Path("build/.cache"),
    form: Format = "onnx",
    weights: Weights | Literal["full"] | None = None,
    draft_weights: Weights | Literal["full"] | None = None,
    backend_runs: Sequence[str] = (*BITS, ENCODER_DECODERS),
    cache_type: Cache | None = None,
    text: Path | None = None,
    force: bool = False,
) -> Pair:
    """Write target, draft and tokenizer to `out`, whole or not at all. See `Pair`.

    draft: "self" is the target with fewer bits. lookup: what proposes in place of a draft. form: of
    the graphs; which one a backend wants, it says when it is given the other. weights: None is
    "full", or as few bits as the checkpoint has, of the draft as the target's; of the draft "self"
    4 bits. backend_runs: kinds of weights, and whether encoder-decoders, that the graphs' backend
    runs; others are refused before the export.
    text: a file, UTF-8, to measure the quality of quantised weights on.
    cache_type: of the caches' rows, of ONNX Runtime on the CPU alone; None is `dtype`.
    max_gamma: 1 to 64. max_len: None takes 2048, or the target's own context where that is shorter.
    Raises OutriderError "checkpoint", "architecture", "vocabulary", "difference", "option", "disk".
    """
    _quiet()
    refuse_foreign(out, PAIR_FILE)
    if cache_type and (dtype != "float32" or form != "onnx"):
        raise OutriderError(
            "option",
            f"CACHE={cache_type} is for ONNX Runtime on the CPU in float32",
            "Leave CACHE out, or build with BACKEND=onnxruntime DTYPE=float32.",
        )
    target = find(model)
    itself = draft == "self"
    drafter = target if itself else find(draft) if draft is not None else None
    if target.has_encoder:
        if ENCODER_DECODERS not in backend_runs:
            raise OutriderError(
                "backend",
                f"{target.source} is a {target.architecture}, and the backend does not run "
                f"encoder-decoders with DTYPE={dtype} in this version",
                "Build with BACKEND=onnxruntime DTYPE=float32, or BACKEND=aotinductor SM=cpu.",
            )
        asked_for = {"DTYPE": dtype if form == "onnx" else None, "CACHE": cache_type}
        _check_encoder_decoder(target, drafter, asked_for)
        if form == "torch":
            backend_runs = ["full"]  # quantised layers have been compiled of decoders alone
    elif drafter and drafter.has_encoder:
        raise _two_kinds(target, drafter)
    own = weights or _bits_of(target, "WEIGHTS")
    draft_own = draft_weights or ("int4" if itself else own)
    if drafter is None and draft_weights:
        cause = f"DRAFT_WEIGHTS={draft_weights} is for a draft model, and there is none"
        raise OutriderError("option", cause, "Name a DRAFT, or leave it out.")
    if text is not None and target.features:
        cause = f"TEXT={text} is what a model reads, and {target.source} reads sound"
        raise OutriderError("option", cause, "Leave TEXT out.")
    if text is not None and {own, draft_own} == {"full"}:
        cause = f"TEXT={text} is to measure quantised weights on, and none are"
        raise OutriderError("option", cause, "Set WEIGHTS, or leave it out.")
    if itself and BITS[draft_own] >= BITS[own]:
        raise OutriderError(
            "option",
            f"DRAFT=self with WEIGHTS={own} and DRAFT_WEIGHTS={draft_own}: the draft would be no "
            "cheaper than the target",
            "Give the draft fewer bits than the target, or another DRAFT.",
        )
    graphs = form, dtype, backend_runs
    _check_weights(f"WEIGHTS={own}", own, not weights, *graphs, "WEIGHTS=full")
    if drafter is not None:
        instead = "another DRAFT" if itself else "DRAFT_WEIGHTS=full"
        asked = f"DRAFT_WEIGHTS={draft_own}"
        _check_weights(asked, draft_own, not draft_weights, *graphs, instead)
    length = min(DEFAULT_MAX_LEN, target.max_len) if max_len is None else max_len
    if length > target.max_len:
        raise OutriderError(
            "option",
            f"MAX_LEN={length} is beyond the context of {target.source}, {target.max_len} tokens",
            f"Build with MAX_LEN={target.max_len} or less.",
        )
    if not 1 <= max_gamma <= MOST_GAMMA:
        raise OutriderError(
            "option",
            f"MAX_GAMMA={max_gamma} is out of range",
            f"Build with MAX_GAMMA from 1 to {MOST_GAMMA}.",
        )
    if length < SHORTEST_MAX_LEN:
        raise OutriderError(
            "option",
            f"MAX_LEN={length} is too short to compare the graph with the original",
            f"Build with MAX_LEN={SHORTEST_MAX_LEN} or more.",
        )
    check_length(target, length)
    draft_length = min(length, drafter.max_len) if drafter else length
    if drafter:
        check_length(drafter, draft_length)
    # A multiple of 8, so that slots of any head width begin where GPUs like to read.
    capacity = -(-(length + max_gamma + 1) // 8) * 8

    tokenizer = vocabulary.load_tokenizer(target)
    if not vocabulary.end_of_text_ids(target, tokenizer):  # `carry` wants them in minutes
        note(f"{target.source} names no eos_token_id: a text ends at its length or a stop string")
    vocabulary.check_chat_template(target, tokenizer)
    vocabulary.start_ids(target)
    vocabulary.audio(target)
    vocabulary.rules(target)
    _say_what_is_not_carried(target, tokenizer)
    widths = [_width(checkpoint) for checkpoint in (target, drafter) if checkpoint]
    if drafter:
        with stage("pair", "compare vocabularies") as said:
            said.note = vocabulary.check_same_tokens(
                tokenizer, vocabulary.load_tokenizer(drafter), min(widths)
            )

    words = _words(text, tokenizer, min(widths)) if text is not None else None

    shares = drafter is not None and target.has_encoder and same_encoder(target, drafter)
    if shares:
        note("the draft's encoder is the target's, which is run once for both")

    def made(role: str, checkpoint: Checkpoint, longest: int, bits: str) -> tuple[Path, GraphFacts]:
        form_of = None if bits == "full" else cast(Weights, bits)
        wanted = part.Wanted(
            role, checkpoint, dtype, longest, capacity, form, form_of, cache_type, words,
            shares and role == "draft",
        )  # fmt: skip
        return part.make(wanted, cache, force)

    parts = {"target": made("target", target, length, own)}
    if drafter:
        parts["draft"] = made("draft", drafter, draft_length, draft_own)
    with write_folder(out, PAIR_FILE) as partial:
        (partial / "tokenizer").mkdir()
        facts = vocabulary.carry(target, tokenizer, partial / "tokenizer")
        for role, (folder, graph_facts) in parts.items():
            for name in graph_facts.files:
                point_to(folder / name, partial / role / name)
        target_facts = parts["target"][1]
        pair = Pair(
            target=target_facts,
            draft=parts["draft"][1] if drafter else None,
            tokenizer=facts,
            # Tokenizers of Whisper may lack the timestamps, which are tokens like all others.
            vocab_size=target_facts.vocab_size
            if target.features
            else min(facts.vocab_size, target_facts.vocab_size),
            max_len=length,
            max_gamma=max_gamma,
            capacity=capacity,
            lookup=lookup,
            start_ids=vocabulary.start_ids(target),
            audio=vocabulary.audio(target),
            rules=vocabulary.rules(target),
        )
        write_json(partial / PAIR_FILE, "pair", pair)
    return pair


def _check_encoder_decoder(
    target: Checkpoint, drafter: Checkpoint | None, asked: Mapping[str, str | None]
) -> None:
    """Refuse what there is for decoder-only models alone. Raises OutriderError "option",
    "architecture"."""
    for name, value in asked.items():
        if value not in (None, "float32"):
            raise OutriderError(
                "option",
                f"{name}={value} is for decoder-only models in this version, and {target.source} "
                f"is a {target.architecture}",
                f"Leave {name} out, and build with BACKEND=onnxruntime.",
            )
    for checkpoint in filter(None, (target, drafter)):
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
            raise refuse_architecture(checkpoint.source, checkpoint.config, reason)


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


def _check_weights(
    asked: str,
    kind: str,
    default: bool,
    form: Format,
    dtype: Dtype,
    backend: Sequence[str],
    instead: str,
) -> None:
    """Refuse now what the backend would refuse after the export. asked: in the words of make."""
    said = asked + (", the default here," if default else "")
    if form == "torch" and kind != "full":
        cause = f"{said} is for graphs in ONNX, and these are torch's"
        raise OutriderError("option", cause, f"Build with {instead}, or --format onnx.")
    if kind == "fp8" and dtype == "float32":
        cause = f"{said} is for GPUs, and graphs of DTYPE={dtype} are for CPUs"
        raise OutriderError("option", cause, "Build with DTYPE=float16 or bfloat16.")
    if kind not in backend:
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
        if len(tensor.shape) == 2 and tensor.shape[0] != _width(checkpoint)
    ]
    sample = matrices[:: -(-len(matrices) // SAMPLED) or 1]
    found = [recover(tensor[...], 4) is not None for tensor in sample]
    return 2 * sum(found) >= len(found)


def _words(file: Path, tokenizer: PreTrainedTokenizerFast, width: int) -> list[int]:
    """Token ids of a text, those that every model has."""
    try:
        words = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(
            "option", f"TEXT={file} cannot be read: {first_line(error)}", "Name a UTF-8 text."
        ) from None
    ids: list[int] = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
    return [token for token in ids if token < width]


def _width(checkpoint: Checkpoint) -> int:
    return int(checkpoint.text_config.vocab_size)


def _say_what_is_not_carried(target: Checkpoint, tokenizer: PreTrainedTokenizerFast) -> None:
    if defaults := vocabulary.sampling_defaults(target):
        options = ", ".join(f"{name}={value}" for name, value in defaults.items())
        note(f"the generation config asks for {options}: pass what you want of it when generating")
    beyond = max(tokenizer.get_vocab().values()) + 1 - _width(target)
    if beyond > 0:
        note(f"{beyond} tokens of the tokenizer have no embedding: prompts with them are refused")


def _quiet() -> None:
    """Loading bars and advice of the libraries would drown the stage lines."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch|onnxscript|transformers")
