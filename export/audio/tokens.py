"""Which tokens steer a model that transcribes, as its generation config says it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, GenerationConfig
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from runtime.files.audio import AudioFacts
from runtime.files.errors import OutriderError, first_line

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_REMEDY = "Mend its generation_config.json, or download the checkpoint again."


class _NoSound:
    """A model without a sound to detect the language of: any will do."""

    device = "cpu"

    def __init__(self, languages: dict[str, int]):
        self._languages, self.asked = languages, False

    def detect_language(self, **_: Any) -> torch.Tensor:
        self.asked = True
        return torch.tensor([min(self._languages.values())])


def begin(checkpoint: Checkpoint, config: GenerationConfig) -> tuple[list[int], bool]:
    """The decoder's first tokens as Transformers' own `generate` makes them of the checkpoint's
    defaults for one source, without timestamps; and whether the second is a language to detect.

    Raises OutriderError "checkpoint".
    """
    kind: Any = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING[type(checkpoint.config)]
    retrieve = getattr(kind, "_retrieve_init_tokens", None)
    if retrieve is None:
        raise _odd(checkpoint, f"Transformers' {kind.__name__} has no tokens of its own to begin")
    model = _NoSound(_ids(checkpoint, config, "lang_to_id"))
    own: Any = copy.deepcopy(config)
    own.return_timestamps = False
    try:
        (ids,) = retrieve(model, None, 1, own, checkpoint.config, 0, {}).tolist()
    except Exception as error:  # noqa: BLE001 - Transformers checks fields by using them
        raise _odd(checkpoint, first_line(error)) from None
    return _tokens(checkpoint, "decoder_input_ids", ids), model.asked


def facts(checkpoint: Checkpoint, config: GenerationConfig) -> AudioFacts:
    """Raises OutriderError "checkpoint" for fields that are not what they should be."""

    def number(field: str) -> Any:
        return getattr(config, field, None)

    def token(field: str) -> int | None:
        ids = _tokens(checkpoint, field, [] if number(field) is None else [number(field)])
        return ids[0] if ids else None

    def tokens(field: str) -> list[int]:
        return _tokens(checkpoint, field, number(field) or [])

    ids, detected = begin(checkpoint, config)
    codes = {name.strip("<|>") for name in _ids(checkpoint, config, "lang_to_id")}
    multilingual, first = number("is_multilingual"), number("max_initial_timestamp_index")
    longest = min(number("max_length") or checkpoint.max_len, checkpoint.max_len)
    if type(multilingual) not in (bool, type(None)):
        raise _odd(checkpoint, f"is_multilingual is {repr(multilingual)[:60]}")
    if first is not None and (type(first) is not int or not 0 <= first < 1 << 16):
        raise _odd(checkpoint, f"max_initial_timestamp_index is {repr(first)[:60]}")
    if type(longest) is not int or longest < 1:
        raise _odd(checkpoint, f"max_length is {repr(longest)[:60]}")
    return AudioFacts(
        decoder_start_token_id=ids[0],
        lang_to_id=_ids(checkpoint, config, "lang_to_id"),
        task_to_id=_ids(checkpoint, config, "task_to_id"),
        is_multilingual=bool(multilingual),
        suppress_tokens=tokens("suppress_tokens"),
        begin_suppress_tokens=tokens("begin_suppress_tokens"),
        max_length=longest,
        language_detected=detected,
        no_timestamps_token_id=token("no_timestamps_token_id"),
        prev_sot_token_id=token("prev_sot_token_id"),
        max_initial_timestamp_index=first,
        language_names={n: code for n, code in TO_LANGUAGE_CODE.items() if code in codes} or None,
    )


def _ids(checkpoint: Checkpoint, config: GenerationConfig, field: str) -> dict[str, int]:
    found = getattr(config, field, None) or {}
    if not isinstance(found, dict) or not all(type(name) is str for name in found):
        raise _odd(checkpoint, f"{field} is {repr(found)[:60]}")
    _tokens(checkpoint, field, list(found.values()))
    return found


def _tokens(checkpoint: Checkpoint, field: str, found: Any) -> list[int]:
    width = checkpoint.text_config.vocab_size
    known = isinstance(found, list)
    odd = [i for i in found if type(i) is not int or not 0 <= i < width] if known else found
    if odd or not known:
        raise _odd(checkpoint, f"{field} has {repr(odd)[:60]}, and there are {width} tokens")
    return list(found)


def _odd(checkpoint: Checkpoint, what: str) -> OutriderError:
    return OutriderError("checkpoint", f"{checkpoint.source} cannot transcribe: {what}", _REMEDY)
