"""Long-form transcription as in Transformers' `WhisperForConditionalGeneration.generate`: window
after window, each beginning at the last timestamp of the one before."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..files.errors import FLAG, NUMBER, STRING, check_value, refuse_first
from ..files.generation import AudioFacts, FeatureFacts
from ..sampling.processors import LogitsProcessor
from ..sampling.softmax import log_softmax
from ..sequence import Token
from .mel import MelFrames
from .timestamps import TimedTokens, TimestampRule, split_window
from .windows import Windows

CONTEXT_TEMPERATURE = 0.5  # a text sampled at this or above is not used as context for the next


@dataclass(frozen=True)
class SpeechOptions:
    """The options of a transcription, as in Transformers.

    language: a code or a name, "en" or "English"; None detects it in the first window. task:
    "transcribe", or "translate" into English. timestamps: whether a recording of one window is cut
    into segments too; a longer one always is. condition_on_prev_tokens: whether a window reads the
    text before it. temperature: of sampling; if there are several, the next one is tried when the
    text misses a threshold. compression_ratio_threshold: maximum factor by which its tokens can be
    compressed. logprob_threshold: minimum mean of its log-probabilities. no_speech_threshold: a
    window counts as silent if the probability of no speech exceeds this and the text misses
    logprob_threshold.
    """

    language: str | None = None
    task: str = "transcribe"
    timestamps: bool = False
    condition_on_prev_tokens: bool = False
    temperature: float | Sequence[float] | npt.NDArray[np.float64] = 0.0
    compression_ratio_threshold: float | None = None
    logprob_threshold: float | None = None
    no_speech_threshold: float | None = None

    @property
    def temperatures(self) -> list[float]:
        values: Any = self.temperature
        return list(values) if isinstance(values, Sequence) or np.ndim(values) else [values]

    def check(self, facts: AudioFacts) -> None:
        """Raise OutriderError "option" for options that the model does not support."""
        codes = languages(facts)
        several = len(self.temperatures) > 1
        ratio, logprob = self.compression_ratio_threshold, self.logprob_threshold
        if self.language is not None:
            check_value("language", self.language, STRING)
        check_value("task", self.task, STRING)
        check_value("timestamps", self.timestamps, FLAG)
        check_value("condition_on_prev_tokens", self.condition_on_prev_tokens, FLAG)
        for name, value in vars(self).items():
            if name.endswith("_threshold") and value is not None:
                check_value(name, value, NUMBER, lambda x: x == x, "a number")
        refuse_first([
            (facts.no_timestamps_token_id is None,
             "the checkpoint's generation_config.json has no no_timestamps_token_id",
             "Download a newer one from the model's page, and build the bundle again."),
            (self.language is not None and not codes,
             f"language={self.language}: the model is English-only", "Leave it out."),
            (self.language is not None and language_code(self.language, facts) not in codes,
             f"language={self.language} is unknown",
             f"Use one of {', '.join(sorted(codes))}, or leave it out."),
            (self.task not in ("transcribe", "translate"), f"task={self.task} is unknown",
             "Use transcribe or translate."),
            (self.task not in facts.task_to_id and (codes or self.task == "translate"),
             f"task={self.task}: the model has no token for this task",
             "Use the other task, or another checkpoint."),
            (not self.temperatures, "temperature is an empty list", "Give at least one."),
            (ratio is not None and not several,
             "compression_ratio_threshold selects the next temperature, but there is only one",
             "Give several, such as 0, 0.2, 0.4, or leave it out."),
            (logprob is not None and not several and self.no_speech_threshold is None,
             "logprob_threshold selects the next temperature, but there is only one",
             "Give several, such as 0, 0.2, 0.4, or leave it out."),
            (self.no_speech_threshold is not None and logprob is None,
             "no_speech_threshold applies only to texts that miss logprob_threshold",
             "Add logprob_threshold."),
            (several and ratio is None and logprob is None,
             "of several temperatures only the first has an effect without a threshold",
             "Add compression_ratio_threshold or logprob_threshold, or give one temperature."),
        ])  # fmt: skip


def languages(facts: AudioFacts) -> dict[str, int]:
    """The token of each language, by its code; empty for an English-only model."""
    return {name.strip("<|>"): token for name, token in facts.lang_to_id.items()}


def language_code(name: str, facts: AudioFacts) -> str:
    """The code of a language, read as in Transformers: "en" for "en", "<|en|>" and "English",
    ignoring case."""
    lower = name.lower()
    return (facts.language_names or {}).get(lower) or lower.strip("<|>")


@dataclass(frozen=True)
class Segment:
    """A part of a recording. start, end: seconds. token_ids: including its timestamps."""

    start: float
    end: float
    text: str
    token_ids: list[int]


class GenerateTokens(Protocol):
    """Generates the tokens that follow a prompt for a window [mels, frames], with log-probabilities
    if requested. Never generates tokens that the checkpoint suppresses."""

    def __call__(
        self,
        prompt: list[int],
        window: MelFrames,
        processors: Sequence[LogitsProcessor],
        temperature: float,
        *,
        logprobs: bool,
    ) -> Sequence[Token]: ...


# Computes the raw logits [V] after a prompt, for a window.
PromptLogits = Callable[[list[int], MelFrames], npt.NDArray[np.float32]]


class Transcriber:
    """Transcribes a recording, segment by segment.

    facts, features: of the target. decode: decodes token ids to text. end: the end-of-text token.
    max_len: maximum number of tokens of a text, including the prompt.
    """

    def __init__(
        self,
        facts: AudioFacts,
        features: FeatureFacts,
        options: SpeechOptions,
        generate: GenerateTokens,
        prompt_logits: PromptLogits,
        decode: Callable[[Sequence[int]], str],
        *,
        end: int,
        max_len: int,
    ):
        assert facts.no_timestamps_token_id is not None, "checked with the options"
        self._facts, self._options = facts, options
        self._generate, self._prompt_logits, self._decode = generate, prompt_logits, decode
        self._seconds = features.hop_length / features.sampling_rate  # of a frame
        self._languages = languages(facts)
        self._start, self._end = facts.decoder_start_token_id, end
        self._no_timestamps = facts.no_timestamps_token_id
        self._max_context = max_len // 2 - 1
        language = options.language
        self.language = None if language is None else language_code(language, facts)
        self.window_count = 0  # transcribed so far

    def segments(self, windows: Windows) -> Iterator[tuple[list[Segment], int]]:
        """For each window its segments, and the frame up to which the recording is transcribed."""
        timed = self._options.timestamps or windows.frames > windows.width
        if self.language is None and self._languages:
            self.language = self._detect_language(windows.window_at(0))
        begin, latest = self._prompt(timed), self._facts.max_initial_timestamp_index
        processors = [TimestampRule(self._no_timestamps, self._end, latest)] if timed else []
        previous: list[TimedTokens] = []
        seek, use_context = 0, self._options.condition_on_prev_tokens
        while seek < windows.frames:
            window, frames = windows.window_at(seek), min(windows.width, windows.frames - seek)
            context = self._previous_text(previous) if use_context and previous else []
            self.window_count += 1
            tokens, temperature = self._window_tokens(context, begin, window, processors)
            use_context = (
                self._options.condition_on_prev_tokens and temperature < CONTEXT_TEMPERATURE
            )
            if tokens is None:
                parts, step = list[TimedTokens](), frames
            else:  # a text without requested timestamps rarely has any
                parts, step = split_window(
                    tokens,
                    zero=self._no_timestamps + 1,
                    seek=seek,
                    frames=frames,
                    seconds=self._seconds,
                )
            previous += parts
            seek += step
            segments = [Segment(x.begin, x.end, self.decode(x.tokens), x.tokens) for x in parts]
            yield segments, min(seek, windows.frames)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without timestamps, which are not special in every tokenizer."""
        return self._decode([token for token in tokens if token <= self._no_timestamps])

    def _detect_language(self, window: MelFrames) -> str:
        """The code of the most probable language."""
        logits = self._prompt_logits([self._start], window)
        return max(self._languages, key=lambda code: logits[self._languages[code]])

    def _prompt(self, timed: bool) -> list[int]:
        """The prompt tokens: start, language, task, and whether to omit timestamps."""
        prompt = [self._start]
        if self.language is not None:
            prompt += [self._languages[self.language], self._facts.task_to_id[self._options.task]]
        return prompt if timed else [*prompt, self._no_timestamps]

    def _previous_text(self, previous: Sequence[TimedTokens]) -> list[int]:
        """The previous text, as context of a window. If a segment ends in a pair of timestamps, the
        second one begins the next segment and is left out."""
        text: list[int] = []
        for part in previous:
            paired = len(part.tokens) > 2 and part.tokens[-2] > self._no_timestamps
            text += part.tokens[:-1] if paired else part.tokens
        mark = self._facts.prev_sot_token_id
        return [*([] if mark is None else [mark]), *text[-self._max_context :]]

    def _window_tokens(
        self,
        context: list[int],
        begin: list[int],
        window: MelFrames,
        processors: Sequence[LogitsProcessor],
    ) -> tuple[list[int] | None, float]:
        """A window's tokens without the end of the text, or None if nobody speaks, and the
        temperature that was used. The prompt is `context`, then `begin`."""
        options, min_logprob = self._options, self._options.logprob_threshold
        no_speech = options.no_speech_threshold is not None and (
            self._no_speech_probability([*context, self._start], window)
            > options.no_speech_threshold
        )
        for temperature in options.temperatures:
            output = self._generate(
                [*context, *begin], window, processors, temperature,
                logprobs=min_logprob is not None,
            )  # fmt: skip
            tokens = [token.id for token in output]
            improbable = min_logprob is not None and (
                sum(token.logprob or 0.0 for token in output) / len(output) < min_logprob
            )
            if improbable and no_speech:
                return None, temperature
            max_ratio = options.compression_ratio_threshold
            if not improbable and (max_ratio is None or compression_ratio(tokens) <= max_ratio):
                break
        return (tokens[:-1] if tokens[-1] == self._end else tokens), temperature

    def _no_speech_probability(self, prompt: list[int], window: MelFrames) -> float:
        """The probability of the no-speech token, whose id is one below `no_timestamps`."""
        return math.exp(log_softmax(self._prompt_logits(prompt, window))[self._no_timestamps - 1])


def compression_ratio(tokens: Sequence[int]) -> float:
    """The factor by which zlib compresses the tokens, stored in two bytes each, which is enough for
    all of Whisper's ids."""
    content = b"".join(token.to_bytes(2, "little") for token in tokens)
    return len(content) / len(zlib.compress(content))
