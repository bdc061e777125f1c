"""The pair's common vocabulary: check it, and write the tokenizer to the bundle."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from runtime.files.errors import OutriderError, convert_errors, first_line
from runtime.files.generation import AudioFacts, TextRules
from runtime.files.graphs import TEMPLATE_FILE, TOKENIZER_FILE, TokenizerFacts, file_facts
from runtime.files.records import build, digest_json

from .audio import tokens
from .checkpoint import REMOVE, Checkpoint, check_token_ids, generation_config, read_raw_config
from .formats import gguf, gguf_tokenizer

# Files that hold the tokens. Without any, Transformers makes up a tokenizer for some models.
_VOCABULARY_PATTERNS = ("tokenizer.json", "vocab.*", "tekken.json", "*.model", "*.tiktoken")


def _vocabulary_files(checkpoint: Checkpoint) -> list[Path]:
    return [path for pattern in _VOCABULARY_PATTERNS for path in checkpoint.path.glob(pattern)]


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerFast:
    """Load the checkpoint's fast tokenizer. Raises OutriderError "checkpoint"."""
    gguf_file = checkpoint.gguf
    if gguf_file and (checkpoint.path / TOKENIZER_FILE).is_file():
        gguf_file = None
    copy = "Copy the checkpoint's tokenizer.json beside its weights."
    if checkpoint.path.is_file():
        copy = "Put it into a folder with the original's tokenizer.json, and give that folder."

    def refuse(cause: str, remedy: str = copy) -> OutriderError:
        return OutriderError("checkpoint", cause, remedy)

    found = gguf_file.metadata.get(gguf.TOKENS) if gguf_file else _vocabulary_files(checkpoint)
    if not found:
        raise refuse(f"{checkpoint.source} has no tokenizer")
    try:
        if gguf_file:
            return gguf_tokenizer.read(checkpoint.source, gguf_file)
        tokenizer = _read_tokenizer(checkpoint)
    except OutriderError:
        raise
    except Exception as error:  # noqa: BLE001 - a dozen unrelated classes, by tokenizer kind
        own_code, remedy = "trust_remote_code" in str(error), copy
        why = "it requires its own code, which is never run" if own_code else first_line(error)
        if (checkpoint.path / TOKENIZER_FILE).is_file():
            remedy = (
                "Remove auto_map from its tokenizer_config.json."
                if own_code
                else "Download its tokenizer*.json and special_tokens_map.json again."
            )
        cause = f"the tokenizer of {checkpoint.source} cannot be read: {why}"
        raise refuse(cause, remedy) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or len(tokenizer) == 0:
        raise refuse(f"{checkpoint.source} has no fast tokenizer")
    return tokenizer


def _read_tokenizer(checkpoint: Checkpoint) -> Any:
    """Load it by Transformers. Its class for Marian reads only SentencePiece files, and needs the
    SentencePiece library, so a tokenizer.json beside them is read directly."""
    if checkpoint.config.model_type == "marian":
        if (checkpoint.path / TOKENIZER_FILE).is_file():
            return PreTrainedTokenizerFast.from_pretrained(checkpoint.path)
        raise OutriderError(
            "checkpoint",
            f"{checkpoint.source} has no fast tokenizer, and SentencePiece files are not supported",
            "Put a tokenizer.json beside them; converted copies of the checkpoint have one.",
        )
    config = {"config": checkpoint.config} if checkpoint.gguf else {}
    return AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False, **config)


def check_same_tokens(
    target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast, width: int
) -> str:
    """Refuse a pair whose ids below `width` name different tokens; otherwise return a summary.

    Ids that only the target has are never drafted, which costs acceptance but not exactness.
    """
    target_tokens, draft_tokens = (
        {i: t for t, i in tokenizer.get_vocab().items() if i < width}
        for tokenizer in (target, draft)
    )
    different = sorted(
        i for i in target_tokens.keys() & draft_tokens.keys() if target_tokens[i] != draft_tokens[i]
    )
    if different:
        first = different[0]
        raise OutriderError(
            "vocabulary",
            f"id {first} is {target_tokens[first]!r} in the target and {draft_tokens[first]!r} in "
            f"the draft (first of {len(different)})",
            "Choose a DRAFT with the target's tokenizer, or DRAFT=none.",
        )
    extra = len(set(target.get_vocab().values()) - draft_tokens.keys())
    return f"{extra} of the target's tokens are unknown to the draft" if extra else "same tokens"


def write_tokenizer(
    checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> TokenizerFacts:
    """Write the tokenizer and chat template into `folder`."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    # Not backend.save, which raises disk errors as a bare Exception.
    (folder / TOKENIZER_FILE).write_text(backend.to_str(), encoding="utf-8")
    template = _chat_template(checkpoint, tokenizer)
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    special = tokenizer.special_tokens_map
    files = {path.name: file_facts(path) for path in sorted(folder.iterdir())}
    eos = end_of_text_ids(checkpoint, tokenizer)
    return TokenizerFacts(
        key=digest_json([{n: f.sha256 for n, f in files.items()}, special, eos]),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        eos_token_ids=eos,
        special_tokens=special,
        chat_template=template is not None,
        files=files,
    )


def end_of_text_ids(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that `generate` stops at: those of generation_config.json, else of config.json,
    else of the tokenizer.

    Raises OutriderError "checkpoint" if one is not a token of the model.
    """
    configs = checkpoint.config, checkpoint.text_config
    sources: list[Any] = [getattr(config, "eos_token_id", None) for config in configs]
    if (generation := generation_config(checkpoint)) is not None:
        sources.insert(0, generation.eos_token_id)
    ids_in_config = next((ids for ids in sources if ids is not None), None)
    if ids_in_config is None:  # the tokenizer may have added one that is not a token of the model
        own, width = tokenizer.eos_token_id, checkpoint.vocab_size
        return [own] if isinstance(own, int) and own < width else []
    found = ids_in_config if isinstance(ids_in_config, list) else [ids_in_config]
    _check_tokens(checkpoint, "eos_token_id", found)
    return sorted(set(found))


def _check_tokens(checkpoint: Checkpoint, field: str, ids: list[Any]) -> None:
    """Raise OutriderError "checkpoint" for ids that are not tokens of the model."""
    width = checkpoint.vocab_size
    if invalid := [i for i in ids if type(i) is not int or not 0 <= i < width]:
        raise OutriderError(
            "checkpoint",
            f"{checkpoint.source} has {field} {repr(invalid[0])[:40]}, none of its {width} tokens",
            f"Correct {field} in generation_config.json or config.json.",
        )


def start_ids(checkpoint: Checkpoint) -> list[int] | None:
    """The first tokens of an encoder-decoder's output: the one that `generate` gives the decoder
    first, and the one that it forces next, if the checkpoint has one. None for other models.

    Raises OutriderError "checkpoint" if none is named, or one is not a token of the model.
    """
    if not checkpoint.has_encoder:
        return None
    config = checkpoint.config
    generation = _generation(checkpoint)
    if checkpoint.features:
        return tokens.initial_tokens(checkpoint, generation)[0]
    starts = (
        generation.decoder_start_token_id,
        getattr(config, "decoder_start_token_id", None),
        generation.bos_token_id,
    )
    found: dict[str, Any] = {
        "decoder_start_token_id": next((i for i in starts if i is not None), None)
    }
    if generation.forced_bos_token_id is not None:
        found["forced_bos_token_id"] = generation.forced_bos_token_id
    for field, token in found.items():
        _check_tokens(checkpoint, field, [token])
    return list(found.values())


def audio_facts(checkpoint: Checkpoint) -> AudioFacts | None:
    """The facts needed to transcribe; None for models that do not. Raises OutriderError
    "checkpoint"."""
    if not checkpoint.features:
        return None
    return tokens.audio_facts(checkpoint, _generation(checkpoint))


def _generation(checkpoint: Checkpoint) -> GenerationConfig:
    """The generation config as Transformers has it: that of an old checkpoint comes from
    config.json. It is made from the file, as configuration objects have dropped the fields that
    only generation reads. Raises OutriderError "checkpoint"."""
    if (own := generation_config(checkpoint)) is not None:
        return own
    config: Any = checkpoint.config
    if not checkpoint.gguf:
        config = read_raw_config(checkpoint.source, checkpoint.path)
    what = f"{checkpoint.source}/config.json cannot be read"
    with convert_errors("checkpoint", what, "Correct it, or download the checkpoint again."):
        return GenerationConfig.from_model_config(config)


def text_rules(checkpoint: Checkpoint) -> TextRules | None:
    """The rules of the generation config that a bundle keeps. Raises OutriderError
    "checkpoint"."""
    own = _generation(checkpoint)
    values = {field.name: getattr(own, field.name) for field in fields(TextRules)}
    end = values.pop("forced_eos_token_id")
    values = {name: value for name, value in values.items() if value not in (None, 0, [])}
    if end is not None:
        values["forced_eos_token_id"] = end[0] if isinstance(end, list) and len(end) == 1 else end
    remedy = "Correct its generation_config.json or config.json, or download the checkpoint again."
    with convert_errors("checkpoint", checkpoint.source, remedy):
        found: TextRules = build(TextRules, values, "generation_config")
        token_ids = [token for word in found.bad_words_ids or () for token in word]
        check_token_ids(checkpoint, [*token_ids, found.forced_eos_token_id or 0])
    return found if values else None


# Fields that are absent from a generation config unless they are in use.
_ABSENT_UNLESS_USED = (
    "sequence_bias", "exponential_decay_length_penalty", "max_new_tokens", "max_time",
    "stop_strings", "top_h", "force_words_ids", "constraints", "penalty_alpha", "dola_layers",
    "watermarking_config",
)  # fmt: skip


# Fields that a request can set, under the same name or another; and only one for text.
_REQUEST_FIELDS = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens",
    "max_length", "return_timestamps", "condition_on_prev_tokens", "compression_ratio_threshold",
    "logprob_threshold", "no_speech_threshold",
}  # fmt: skip
_TEXT_FIELDS = {"num_beams", "length_penalty", "stop_strings"}


def request_fields(checkpoint: Checkpoint) -> set[str]:
    """The fields of a generation config that have an option."""
    return _REQUEST_FIELDS if checkpoint.features else _REQUEST_FIELDS | _TEXT_FIELDS


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """Fields of the generation config that affect `generate` but are not kept in a bundle."""
    generation = _generation(checkpoint)
    neutral: dict[str, tuple[Any, ...]] = {  # besides None
        "do_sample": (False,),
        "temperature": (1.0,),
        "top_k": (0, 50),  # 50 is Transformers' default, not a choice of the model
        "top_p": (1.0,),
        "min_p": (0.0,),
        "repetition_penalty": (1.0,),
        "num_beams": (1,),
        "length_penalty": (1.0,),
        "early_stopping": (False,),
        "renormalize_logits": (False,),  # affects the scores of beams
        "encoder_repetition_penalty": (1.0,),
        "guidance_scale": (1.0,),
        "typical_p": (1.0,),
        "epsilon_cutoff": (0.0,),
        "eta_cutoff": (0.0,),
        "token_healing": (False,),
    }
    neutral |= dict.fromkeys(_ABSENT_UNLESS_USED, ())
    if not checkpoint.features:  # 20 is Transformers' default too, and the context no limit
        context = getattr(checkpoint.text_config, "max_position_embeddings", None)
        neutral["max_length"] = (20, context)
    if not checkpoint.has_encoder:  # of an encoder-decoder, `start_ids` has it
        neutral["forced_bos_token_id"] = ()
    if checkpoint.features:  # options of a transcription
        thresholds = "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"
        neutral |= dict.fromkeys(("return_timestamps", "condition_on_prev_tokens"), (False,))
        neutral |= dict.fromkeys(thresholds, ())
    else:
        neutral |= dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([],))
    values = {name: getattr(generation, name, None) for name in neutral}
    return {
        n: value for n, value in values.items() if value is not None and value not in neutral[n]
    }


# The message contents that a template may expect: a text, or a list of parts.
_CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
]


def check_chat_template(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerFast) -> None:
    """Render the shortest conversation. Raises OutriderError "checkpoint" if that fails."""
    template = _chat_template(checkpoint, tokenizer)
    if template is None:
        return
    for conversation in _CONVERSATIONS:
        try:
            tokenizer.apply_chat_template(
                conversation, chat_template=template, tokenize=False, add_generation_prompt=True
            )
            return
        except Exception as error:  # noqa: BLE001 - the template's code may raise any class
            failure = first_line(error)
    raise OutriderError(
        "checkpoint",
        f"the chat template of {checkpoint.source} cannot render a message: {failure}",
        "Correct or remove it (chat_template.jinja or .json, or in tokenizer_config.json).",
    )


# Multimodal models may have their template here; Transformers gives it only to their processor.
_PROCESSOR_FILES = ("processor_config.json", "chat_template.json")


def _chat_template(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerFast) -> str | None:
    template, file = tokenizer.chat_template, "tokenizer_config.json"
    for name in _PROCESSOR_FILES:
        if template is None and (checkpoint.path / name).is_file():
            file = name
            with convert_errors("checkpoint", f"{checkpoint.source}/{name} cannot be read", REMOVE):
                content = json.loads((checkpoint.path / name).read_text(encoding="utf-8"))
                template = content.get("chat_template")
    # Several named templates: the one called default is what apply_chat_template takes.
    template = template.get("default") if isinstance(template, dict) else template
    if template is None or isinstance(template, str):
        return template
    cause = f"{checkpoint.source}/{file} cannot be read: its chat_template is {repr(template)[:40]}"
    raise OutriderError("checkpoint", cause, REMOVE)
