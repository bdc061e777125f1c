"""Random Whisper models with a small vocabulary in the usual order, audio for them, and the
transcription by Transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from runtime.audio.transcription import Segment

RATE = 16_000
# In Whisper's order: text, its end, start, languages, tasks, start of context, no speech, no times,
# and 1,501 times.
TEXT = 60
END, START, EN, DE, TRANSLATE, TRANSCRIBE, CONTEXT, NO_SPEECH, NO_TIMES = range(TEXT, TEXT + 9)
ZERO, VOCAB_SIZE = NO_TIMES + 1, NO_TIMES + 1 + 1501
MOST = 40  # maximum number of tokens of a text
torch.set_num_threads(1)  # more threads only slow models of this size down
LANGUAGES = {"en": EN, "de": DE}


@cache
def model(seed: int = 0, english: bool = False) -> WhisperForConditionalGeneration:
    """A model with random weights, large enough that texts depend on sound and context."""
    config = WhisperConfig(
        vocab_size=VOCAB_SIZE, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, num_mel_bins=80, max_target_positions=MOST, pad_token_id=END,
        bos_token_id=END, eos_token_id=END, decoder_start_token_id=START,
        begin_suppress_tokens=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = WhisperForConditionalGeneration(config).eval()
        for parameter in made.parameters():
            parameter.data += torch.randn_like(parameter) * 0.3
    with torch.no_grad():
        made.proj_out.weight[END] *= 1.6  # so that windows end before the token limit
    own: dict[str, Any] = {
        "no_timestamps_token_id": NO_TIMES, "prev_sot_token_id": CONTEXT, "max_length": MOST,
        "suppress_tokens": [3, 5, START, EN, DE, TRANSLATE, TRANSCRIBE, CONTEXT, NO_SPEECH],
        "begin_suppress_tokens": [7, END], "max_initial_timestamp_index": 50,
        "is_multilingual": not english,
    }  # fmt: skip
    if not english:
        own["lang_to_id"] = {f"<|{code}|>": token for code, token in LANGUAGES.items()}
        own["task_to_id"] = {"transcribe": TRANSCRIBE, "translate": TRANSLATE}
    made.generation_config.update(allow_custom_entries=True, _from_model_config=False, **own)
    return made


def talk(seconds: float, seed: int = 0) -> np.ndarray:
    """A signal that varies: syllables of noise and tones, and pauses."""
    rng = np.random.default_rng(seed)
    pieces, count = [], round(seconds * RATE)
    while sum(map(len, pieces)) < count:
        length = int(rng.integers(RATE // 20, RATE // 2))
        tone = np.sin(2 * np.pi * rng.uniform(80, 4000) * np.arange(length) / RATE)
        size = rng.choice([0, 0.05, 0.3, 0.8])
        pieces.append(size * (tone + 0.3 * rng.standard_normal(length)))
    return np.concatenate(pieces)[:count].astype(np.float32)


def expected_segments(
    sound: np.ndarray, seed: int = 0, english: bool = False, **options: Any
) -> list[dict[str, Any]]:
    extractor = WhisperFeatureExtractor()
    long = {"truncation": False, "padding": "longest"} if len(sound) > 30 * RATE else {}
    given = extractor(sound, sampling_rate=RATE, return_tensors="pt", **long).input_features
    settings = {"return_timestamps": True, "return_segments": True, "do_sample": False, **options}
    if not english:
        settings = {"task": "transcribe", **settings}
    found = model(seed, english).generate(given, **settings)
    return found["segments"][0]


def check(found: list[Segment], expected: list[dict[str, Any]]) -> None:
    assert [part.token_ids for part in found] == [part["tokens"].tolist() for part in expected]
    assert [part.start for part in found] == [float(part["start"]) for part in expected]
    ends = [float(part["end"]) for part in expected]
    np.testing.assert_allclose([part.end for part in found], ends, rtol=0, atol=1e-9)
