"""The loop over windows returns the tokens and times of Transformers' `generate`.

Here its decoder is Transformers' model, called token by token, so nothing has to be exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from speech import (
    CONTEXT,
    EN,
    END,
    LANGUAGES,
    MOST,
    NO_TIMES,
    RATE,
    START,
    TRANSCRIBE,
    TRANSLATE,
    VOCAB_SIZE,
    ZERO,
    check,
    expected_segments,
    model,
    talk,
)  # fmt: skip
from transformers import WhisperForConditionalGeneration

from runtime.audio import transcription
from runtime.audio.mel import LogMel, MelFrames
from runtime.audio.recording import Recording
from runtime.audio.transcription import (
    GenerateTokens,
    PromptLogits,
    Segment,
    SpeechOptions,
    Transcriber,
    language_code,
)
from runtime.audio.windows import Windows
from runtime.files.errors import OutriderError
from runtime.files.generation import AudioFacts, FeatureFacts
from runtime.sampling.processors import SuppressTokens
from runtime.sampling.softmax import log_softmax
from runtime.sequence import Token

FEATURES = FeatureFacts(
    sampling_rate=RATE, feature_size=80, n_fft=400, hop_length=160, n_samples=30 * RATE
)  # fmt: skip


def facts(english: bool = False) -> AudioFacts:
    config = model(0, english).generation_config
    return AudioFacts(
        decoder_start_token_id=START,
        lang_to_id={} if english else config.lang_to_id,
        task_to_id={} if english else config.task_to_id,
        is_multilingual=not english,
        suppress_tokens=config.suppress_tokens,
        begin_suppress_tokens=config.begin_suppress_tokens,
        max_length=MOST,
        language_detected=not english,
        no_timestamps_token_id=NO_TIMES,
        prev_sot_token_id=CONTEXT,
        max_initial_timestamp_index=50,
        language_names=None if english else {"english": "en", "german": "de"},
    )


def windows(sound: np.ndarray) -> Windows:
    return Windows(Recording(sound, RATE), LogMel(80, RATE, 400, 160), 30 * RATE)


def transcriber(
    options: SpeechOptions, generate: GenerateTokens, logits: PromptLogits, english: bool = False
) -> Transcriber:
    return Transcriber(
        facts(english), FEATURES, options, generate, logits, lambda tokens: str(list(tokens)),
        end=END, max_len=MOST,
    )  # fmt: skip


class TorchDecoder:
    """Implements `GenerateTokens` and `PromptLogits` with PyTorch. prompts: those of `generate`."""

    def __init__(self, model: WhisperForConditionalGeneration):
        self.model, self.prompts = model, list[list[int]]()
        config = model.generation_config
        self.suppress = SuppressTokens(config.suppress_tokens, config.begin_suppress_tokens)

    @torch.no_grad()
    def logits(self, text: list[int], window: MelFrames, encoded: Any = None) -> np.ndarray:
        encoded = encoded or self.model.model.encoder(torch.from_numpy(window)[None])
        ids = torch.tensor([text])
        return self.model(decoder_input_ids=ids, encoder_outputs=encoded).logits[0, -1].numpy()

    @torch.no_grad()
    def generate(
        self, prompt: list[int], window: MelFrames, processors: Sequence[Any], temperature: float,
        *, logprobs: bool,
    ) -> list[Token]:  # fmt: skip
        assert temperature == 0, "sampled texts cannot be compared"
        self.prompts.append(prompt)
        encoded = self.model.model.encoder(torch.from_numpy(window)[None])
        text = list(prompt)
        output = list[Token]()
        while len(text) < MOST and (not output or output[-1].id != END):
            row = self.logits(text, window, encoded)
            for processor in (self.suppress, *processors):
                processor(row, np.array(text), len(prompt))
            text.append(int(row.argmax()))
            logprob = float(log_softmax(row)[text[-1]])
            output.append(Token(text[-1], "plain", logprob if logprobs else None))
        return output


def transcribed(
    sound: np.ndarray, seed: int = 0, english: bool = False, **options: Any
) -> tuple[TorchDecoder, Transcriber, list[Segment]]:
    decoder = TorchDecoder(model(seed, english))
    made = transcriber(SpeechOptions(**options), decoder.generate, decoder.logits, english)
    return decoder, made, [part for parts, _ in made.segments(windows(sound)) for part in parts]


@pytest.mark.parametrize("english", [False, True])
def test_without_times(english: bool) -> None:
    """The language is detected if the model has several."""
    sound = talk(30)
    decoder, made, found = transcribed(sound, 1, english)
    check(found, expected_segments(sound, 1, english, return_timestamps=False))
    language = [] if english else [LANGUAGES[str(made.language)], TRANSCRIBE]
    assert decoder.prompts[0] == [START, *language, NO_TIMES]


def test_what_is_asked_for() -> None:
    sound = talk(30, seed=4)
    requested: dict[str, Any] = {"language": "German", "task": "translate"}
    decoder, made, found = transcribed(sound, 1, timestamps=True, **requested)
    check(found, expected_segments(sound, 1, **requested))
    begin = [START, LANGUAGES["de"], TRANSLATE]
    assert decoder.prompts == [begin] * made.window_count and made.language == "de"


@pytest.mark.parametrize(
    ("language", "code"), [("en", "en"), ("<|de|>", "de"), ("German", "de"), ("EN", "en")]
)
def test_names_of_languages(language: str, code: str) -> None:
    assert language_code(language, facts(english=False)) == code


def test_a_short_recording_ends_where_it_does() -> None:
    """Transformers continues into the silence that pads the window."""
    sound = talk(20)
    *_, found = transcribed(sound, 4, timestamps=True)
    expected = expected_segments(sound, 4)
    check(found, expected[: len(found)])
    assert len(found) < len(expected)
    assert found[-1].end >= 20


def test_windows_without_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows that are skipped are those that Transformers skips."""
    sound, silences, real = talk(65), list[float](), Transcriber._no_speech_probability

    def silence(self: Transcriber, prompt: list[int], window: MelFrames) -> float:
        silences.append(real(self, prompt, window))
        return silences[-1]

    monkeypatch.setattr(Transcriber, "_no_speech_probability", silence)
    common = {"logprob_threshold": 0.0, "condition_on_prev_tokens": True}
    transcribed(sound, 1, **common, no_speech_threshold=1.0)
    ordered, middle = sorted(silences), len(silences) // 2
    threshold = sum(ordered[middle - 1 : middle + 1]) / 2  # midway, so that rounding has no effect
    silences.clear()
    _, made, found = transcribed(sound, 1, **common, no_speech_threshold=threshold)
    assert 0 < sum(value > threshold for value in silences) < made.window_count == len(silences)
    expected = expected_segments(sound, 1, **common, no_speech_threshold=threshold, temperature=0.0)
    check(found, expected)


# Temperatures


class Script:
    """A `GenerateTokens` that returns the tokens of one attempt after the other, each with the
    log-probability of its attempt."""

    def __init__(self, *attempts: tuple[list[int], float]):
        self.attempts = list(attempts)
        self.temperatures = list[float]()
        self.prompts = list[list[int]]()

    def __call__(
        self, prompt: list[int], _: object, __: object, temperature: float, *, logprobs: bool
    ) -> list[Token]:
        self.temperatures.append(temperature)
        self.prompts.append(prompt)
        tokens, logprob = self.attempts.pop(0)
        return [Token(token, "plain", logprob) for token in tokens]


def attempts(script: Script, seconds: float = 20, **options: Any) -> list[list[int]]:
    """The segments' tokens."""
    nothing = np.zeros(VOCAB_SIZE, np.float32)
    made = transcriber(SpeechOptions(language="en", **options), script, lambda *_: nothing)
    sound = np.zeros(round(seconds * RATE), np.float32)
    return [part.token_ids for parts, _ in made.segments(windows(sound)) for part in parts]


AGAIN = [8] * 40


def test_the_next_temperature_is_tried_while_a_threshold_is_missed() -> None:
    thresholds = {"compression_ratio_threshold": 1.5, "logprob_threshold": -1.0}
    script = Script((AGAIN, -0.1), ([9, 10], -1.5), ([11, 12, END], -0.5))
    assert attempts(script, temperature=(0.0, 0.2, 0.4, 0.6), **thresholds) == [[11, 12]]
    assert script.temperatures == [0.0, 0.2, 0.4]
    script = Script(([9], -2.0), (AGAIN, -0.1))
    several = np.array([0.0, 0.2])
    assert attempts(script, temperature=several, **thresholds) == [AGAIN], "the last one is used"
    assert len(SpeechOptions(temperature=np.array(0.2)).temperatures) == 1


@pytest.mark.parametrize(("hot", "conditioned"), [(0.4, True), (0.5, False)])
def test_a_hot_text_is_no_context(hot: float, conditioned: bool) -> None:
    script = Script(
        ([9], -2.0), ([ZERO, 9, ZERO + 5, END], -0.5), ([ZERO, 10, ZERO + 5, END], -0.5)
    )  # fmt: skip
    attempts(
        script, 31, temperature=(0.0, hot), logprob_threshold=-1.0, condition_on_prev_tokens=True
    )  # fmt: skip
    context = [CONTEXT, ZERO, 9, ZERO + 5] if conditioned else []
    assert script.prompts[2] == [*context, START, EN, TRANSCRIBE]


def test_compression_is_that_of_transformers() -> None:
    rng = np.random.default_rng(0)
    for length in (1, 10, 200):
        tokens = rng.integers(0, 9, length)
        expected = WhisperForConditionalGeneration._retrieve_compression_ratio(tokens, VOCAB_SIZE)
        assert transcription.compression_ratio(tokens.tolist()) == expected


# Refusals


@pytest.mark.parametrize(
    ("english", "options", "cause"),
    [
        (True, {"language": "en"}, "the model is English-only"),
        (True, {"task": "translate"}, "no token for this task"),
        (False, {"language": "fr"}, "language=fr is unknown"),
        (False, {"task": "sing"}, "task=sing is unknown"),
        (False, {"language": 5}, r"language=5 \(int\) is not a string"),
        (False, {"task": []}, r"task=\[\] \(list\) is not a string"),
        (False, {"timestamps": "no"}, r"timestamps='no' \(str\) is not True or False"),
        (False, {"condition_on_prev_tokens": 1}, r"condition_on_prev_tokens=1 \(int\) is not True"),
        (False, {"temperature": ()}, "empty list"),
        (False, {"temperature": (0.0, 0.2)}, "only the first has an effect"),
        (False, {"compression_ratio_threshold": 2.0}, "but there is only one"),
        (False, {"logprob_threshold": -1.0}, "but there is only one"),
        (False, {"no_speech_threshold": 0.6}, "miss logprob_threshold"),
    ],
)
def test_refused(english: bool, options: dict[str, Any], cause: str) -> None:
    with pytest.raises(OutriderError, match=f"^option: .*{cause}"):
        SpeechOptions(**options).check(facts(english))
