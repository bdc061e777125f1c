"""The tokens that control transcription, from the checkpoint's generation config."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any

import torch
from transformers import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, GenerationConfig
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from runtime.files.errors import convert_errors
from runtime.files.generation import AudioFacts
from runtime.files.records import TokenId, build

from ..checkpoint import Checkpoint, check_token_ids

_FILE = "generation_config"
_REMEDY = "Correct its generation_config.json, or download the checkpoint again."


class _LanguageDetector:
    """A stand-in for a model whose language is to be detected, without audio: it returns any."""

    device = "cpu"

    def __init__(self, languages: dict[str, int]):
        self._languages, self.was_asked = languages, False

    def detect_language(self, **_: Any) -> torch.Tensor:
        self.was_asked = True
        return torch.tensor([min(self._languages.values())])


def initial_tokens(checkpoint: Checkpoint, config: GenerationConfig) -> tuple[list[int], bool]:
    """The decoder's first tokens as Transformers' `generate` derives them from the checkpoint's
    defaults for one source, without timestamps; and whether the second one is a language that has
    to be detected.

    Raises OutriderError "checkpoint".
    """
    kind: Any = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING[type(checkpoint.config)]
    retrieve = getattr(kind, "_retrieve_init_tokens", None)
    own: Any = copy.deepcopy(config)
    own.return_timestamps = False
    with _transcription_errors(checkpoint):
        if retrieve is None:
            raise TypeError(f"Transformers' {kind.__name__} does not define the first tokens")
        languages = getattr(config, "lang_to_id", None) or {}
        model = _LanguageDetector(build(dict[str, TokenId], languages, f"{_FILE}.lang_to_id"))
        (ids,) = retrieve(model, None, 1, own, checkpoint.config, 0, {}).tolist()
        check_token_ids(checkpoint, ids)
    return ids, model.was_asked


def audio_facts(checkpoint: Checkpoint, config: GenerationConfig) -> AudioFacts:
    """The facts that transcription needs. Raises OutriderError "checkpoint" for invalid fields."""
    ids, detected = initial_tokens(checkpoint, config)
    names = [field.name for field in fields(AudioFacts)]
    configured = {name: getattr(config, name, None) for name in names}
    suppressed, named = configured["suppress_tokens"], configured["prev_sot_token_id"]
    if named is None and isinstance(suppressed, list) and len(suppressed) >= 2:
        # So does `generate`, for checkpoints older than this field.
        configured["prev_sot_token_id"] = suppressed[-2]
    codes = {name.strip("<|>") for name in configured["lang_to_id"] or ()}
    values = {
        "lang_to_id": {},
        "task_to_id": {},
        "is_multilingual": False,
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        "max_length": checkpoint.max_len,
        **{name: value for name, value in configured.items() if value is not None},
        "decoder_start_token_id": ids[0],
        "language_detected": detected,
        "language_names": {n: c for n, c in TO_LANGUAGE_CODE.items() if c in codes} or None,
    }
    with _transcription_errors(checkpoint):
        found: AudioFacts = build(AudioFacts, values, _FILE)
        check_token_ids(checkpoint, found.tokens())
    return replace(found, max_length=min(found.max_length, checkpoint.max_len))


def _transcription_errors(checkpoint: Checkpoint) -> AbstractContextManager[None]:
    return convert_errors("checkpoint", f"{checkpoint.source} cannot transcribe", _REMEDY)
