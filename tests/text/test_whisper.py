"""Speech models: the tokens of Transformers' `generate`, called per source, at temperature 0.

Features are noise, different for each request. Output of the random model repeats itself, so every
request has a repetition penalty, defined as in Transformers; the checkpoint lists the suppressed
tokens.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FEATURES, WHISPER
from encoders import (
    COMPILED,
    NEW_TOKENS,
    PENALTY,
    certify,
    greedy,
    original,
    same_for_every_gamma,
    texts,
)
from originals import one_thread
from rounds import cases
from transformers import WhisperForConditionalGeneration
from workshop import MAX_LEN, Workshop

from export import vocabulary
from export.audio.tokens import initial_tokens
from export.checkpoint import find, generation_config
from runtime.audio.transcription import language_code, languages
from runtime.beam.text import beam_texts
from runtime.files.errors import OutriderError
from runtime.files.generation import FeatureFacts, TextRules
from runtime.files.manifest import read_bundle
from runtime.text.options import Options
from runtime.text.requests import text_rules
from runtime.text.speech import language_and_task

SOURCES = [np.random.default_rng(seed).standard_normal(FEATURES, np.float32) for seed in range(4)]
START, LANGUAGES, NO_TIMESTAMPS = 240, (242, 245), 250
ENGLISH = {"lang_to_id": None, "task_to_id": None, "is_multilingual": False}


def expected(checkpoint: Path, source: np.ndarray, **options: Any) -> list[int]:
    """The tokens that Transformers generates, including those that it starts with."""
    import torch

    found = original(checkpoint, WhisperForConditionalGeneration).generate(
        torch.from_numpy(source)[None], return_timestamps=False, do_sample=False,
        max_new_tokens=NEW_TOKENS, repetition_penalty=PENALTY, return_dict_in_generate=True,
        force_unique_generate_call=True, **options,
    )  # fmt: skip
    output: list[int] = found.sequences[0].tolist()
    assert len(set(output)) > NEW_TOKENS // 2, "a degenerate text proves nothing"
    return output


def distilled(target: Path, folder: Path) -> Path:
    """A copy with only the first decoder layer; Distil-Whisper also drops most layers."""
    model = WhisperForConditionalGeneration.from_pretrained(target)
    del model.model.decoder.layers[1:]
    model.config.decoder_layers = 1
    shutil.copytree(target, folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and a draft that is sometimes right."""
    target = workshop.checkpoint("whisper")
    return target, distilled(target, tmp_path_factory.mktemp("distilled") / "draft")


@pytest.fixture(scope="module", params=["onnxruntime", COMPILED])
def whisper(
    workshop: Workshop, pair: tuple[Path, Path], request: pytest.FixtureRequest
) -> tuple[Path, Path]:
    """The checkpoint, and the pair's bundle."""
    return pair[0], workshop.bundle(*pair, backend=request.param)


@pytest.mark.parametrize("which", cases(["mixed"], [("mixed",), ("each",)]))
def test_greedy_text_is_that_of_transformers(whisper: tuple[Path, Path], which: str) -> None:
    target, bundle = whisper
    want = [expected(target, source) for source in SOURCES]
    assert {text[1] for text in want} == set(LANGUAGES), "both languages are detected"
    for slots in (1, 3):
        engine = one_thread(bundle, slots)
        for gammas in [(0, 3, 8, 5)] if which == "mixed" else [(g,) * 4 for g in range(9)]:
            found = texts(engine, list(map(greedy, SOURCES, gammas)))
            assert found == [text[3:] for text in want], (slots, gammas)
        stats = engine.stats()
        assert 0 < stats["accepted"] < stats["drafted"]


def test_what_a_text_begins_with(whisper: tuple[Path, Path]) -> None:
    target, bundle = whisper
    engine = one_thread(bundle, 1)
    for source in SOURCES[:2]:
        text = expected(target, source)
        assert text[0] == START and text[1] in LANGUAGES and text[2] == NO_TIMESTAMPS
        # A beam of one is greedy decoding; it is the first to encode the source.
        short = {"source": source, "max_new_tokens": 4, "ignore_eos": True}
        (beam,) = beam_texts(engine, None, beams=1, **short).texts
        assert beam.token_ids == engine.generate(None, **short).token_ids
        sequence = engine.decoder.admit(engine.request(None, greedy(source)))
        assert list(sequence.request.prompt) == text[:3]
        engine.decoder.release(sequence)
        # An explicit prompt is used unchanged, and no language is detected.
        asked = expected(target, source, language="de", task="translate")
        assert asked[:4] == [START, 242, 244, NO_TIMESTAMPS]
        result = engine.generate(asked[:4], greedy(source))
        assert result.token_ids == asked[4:]
    # The tokens after the start token count as prompt here; for other models, as new tokens.
    pair = replace(engine.manifest.pair, rules=TextRules(min_new_tokens=9))
    assert text_rules(Options(), pair, pair.start_ids, [])[0] == 9


def test_an_english_checkpoint_begins_with_fewer_tokens(workshop: Workshop) -> None:
    """Also a checkpoint whose config forces the tokens after the start token, as the first
    Whisper checkpoints on the hub do."""
    english = workshop.checkpoint("whisper", generation={**ENGLISH, "forced_decoder_ids": None})
    assert start_of(english) == ([START, NO_TIMESTAMPS], False)
    forced = {"forced_decoder_ids": [[1, None], [2, 243]]}
    assert start_of(workshop.checkpoint("whisper", generation=forced)) == (
        [START, LANGUAGES[0], 243, NO_TIMESTAMPS], True,
    )  # fmt: skip
    chosen = {"language": "german", "task": "translate"}
    assert start_of(workshop.checkpoint("whisper", generation=chosen)) == (
        [START, 242, 244, NO_TIMESTAMPS], False,
    )  # fmt: skip


@pytest.mark.parametrize("given", [{}, {"language": "en"}, {"task": "transcribe"}])
@pytest.mark.parametrize(
    "generation",
    [
        {}, {"language": "german", "task": "translate"}, {"task": "translate"},
        {"language": "<|de|>"}, {"forced_decoder_ids": [[1, 242], [2, 244]]},
        {"forced_decoder_ids": [[1, None], [2, 244]]},
    ],
)  # fmt: skip
def test_language_and_task_of_a_recording(
    workshop: Workshop, generation: dict[str, Any], given: dict[str, str]
) -> None:
    """Fault: those of the checkpoint's generation config were ignored. Transformers names the
    tokens, without a task if none is named."""
    checkpoint = find(str(workshop.checkpoint("whisper", generation=generation)))
    facts, start = vocabulary.audio_facts(checkpoint), vocabulary.start_ids(checkpoint)
    assert facts is not None and start is not None
    found = language_and_task(given, facts, start)
    code = found["language"] and language_code(found["language"], facts)
    config = generation_config(checkpoint)
    assert config is not None
    config.update(allow_custom_entries=True, **given)
    want, detected = initial_tokens(checkpoint, config)
    assert (code is None) == detected
    assert detected or languages(facts)[code] == want[1]
    assert facts.task_to_id[found["task"]] == (want[2] if len(want) == 4 else 243)


@pytest.mark.parametrize(
    ("suppressed", "mark"), [([7, 20, 21], 20), ([7, 20], 7), ([7], None), (None, None)]
)
def test_an_old_checkpoint_does_not_name_what_precedes_context(
    workshop: Workshop, suppressed: list[int] | None, mark: int | None
) -> None:
    """Fault: context had no token before it. Transformers takes the last token but one that the
    checkpoint suppresses."""
    old = {"prev_sot_token_id": None, "suppress_tokens": suppressed}
    facts = vocabulary.audio_facts(find(str(workshop.checkpoint("whisper", generation=old))))
    assert facts is not None and facts.prev_sot_token_id == mark


def start_of(checkpoint: Path) -> tuple[list[int] | None, bool]:
    found = find(str(checkpoint))
    facts = vocabulary.audio_facts(found)
    assert facts is not None
    return vocabulary.start_ids(found), facts.language_detected


def test_what_the_manifest_says(whisper: tuple[Path, Path]) -> None:
    pair = read_bundle(whisper[1]).pair
    assert pair.target.reads == FeatureFacts(16_000, FEATURES[0], 400, 1000, 16_000)
    assert pair.target.encoder is not None and pair.target.encoder.rows == FEATURES[1] // 2
    assert pair.draft is not None and len(pair.draft.key_shapes) == 1
    assert pair.vocab_size == pair.target.vocab_size
    assert pair.audio is not None
    assert {name: getattr(pair.audio, name) for name in WHISPER} == WHISPER
    assert pair.audio.language_names == {"english": "en", "german": "de"}


def test_certificate(whisper: tuple[Path, Path]) -> None:
    """With suppressed tokens (test_processors.py: a round that ignores them fails)."""
    certify(whisper[1], SOURCES[1])


@pytest.mark.slow
def test_certificate_in_bfloat16(workshop: Workshop, pair: tuple[Path, Path]) -> None:
    """Its encoder still reads float32."""
    certify(workshop.bundle(*pair, backend="aotinductor", dtype="bfloat16"), SOURCES[1])


@pytest.mark.slow
def test_what_its_bits_depend_on_is_measured(workshop: Workshop) -> None:
    """And holds, where it is guaranteed."""
    target = workshop.checkpoint("whisper")
    bundle = workshop.bundle(target, workshop.checkpoint("whisper", blur=0.1), measure=True)
    assert read_bundle(bundle).invariance is not None
    engine = one_thread(bundle, 3)
    if engine.bits.independent_of_gamma:
        same_for_every_gamma(engine, SOURCES[1])


# Refusals


@pytest.mark.parametrize(
    ("prompt", "options", "cause"),
    [
        ([START], {}, "there is no source: the target, a WhisperForConditionalGeneration, reads"),
        (None, {"source": "abc"}, "the source is text, and the target, a Whisper"),
        (None, {"source": [1, 2]}, "the source is token ids, and the target"),
        (None, {"source": SOURCES[0].astype(np.float64)}, r"the source is float64 \[8, 16\], and"),
        (None, {"source": SOURCES[0][:, 1:]}, r"reads float32 log-mel features \[8, 16\]"),
        (None, {"source": SOURCES[0] * np.inf}, "the source has NaN or infinity"),
        ([START] * MAX_LEN, {"source": SOURCES[0]}, f"the prompt has {MAX_LEN} tokens"),
    ],
)
def test_refused_of_a_model_that_transcribes(
    whisper: tuple[Path, Path], prompt: list[int] | None, options: dict[str, Any], cause: str
) -> None:
    with pytest.raises(OutriderError, match=f"^prompt: .*{cause}"):
        one_thread(whisper[1], 1).generate(prompt, **options)
