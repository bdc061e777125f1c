"""Long-form transcription as in Transformers' `WhisperForConditionalGeneration.generate`: window
after window, each from where the last timestamp of the one before is."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..files.errors import out_of_range, refuse_first
from ..files.generation import AudioFacts, FeatureFacts
from ..sampling.processors import LogitsProcessor
from ..sampling.softmax import log_softmax
from ..sequence import Token
from .mel import MelFrames
from .timestamps import Cut, TimestampRule, cut
from .windows import Windows

COLD = 0.5  # a text of this temperature or a higher one is no context for the next


@dataclass(frozen=True)
class SpeechOptions:
    """What is asked of a transcription, as in Transformers.

    language: a code or a name, "en" or "English"; None detects it in the first window. task:
    "transcribe", or "translate" into English. timestamps: whether a recording of one window is cut
    into segments too; a longer one always is. condition_on_prev_tokens: whether a window reads what
    was said before. temperature: of the sampling; of several, the next one where the text missed a
    threshold: compression_ratio_threshold, the most times that its tokens may be compressed by;
    logprob_threshold, the least mean of its log-probabilities. no_speech_threshold: a window is
    silent where the probability of no speech is over this and the text missed logprob_threshold.
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
        given: Any = self.temperature
        return list(given) if isinstance(given, Sequence) or np.ndim(given) else [given]

    def check(self, facts: AudioFacts) -> None:
        """Refuse what the model cannot do. Raises OutriderError "option"."""
        codes = languages(facts)
        several = len(self.temperatures) > 1
        ratio, logprob = self.compression_ratio_threshold, self.logprob_threshold
        kinds: dict[str, tuple[Any, str]] = {
            "language": (str | None, "a text"),
            "task": (str, "a text"),
            "timestamps": (bool | np.bool_, "True or False"),
            "condition_on_prev_tokens": (bool | np.bool_, "True or False"),
        }
        for name, (kind, what) in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise out_of_range(name, value, what)
        for name, value in vars(self).items():
            number = isinstance(value, Real) and not math.isnan(value)
            if name.endswith("_threshold") and not (number or value is None):
                raise out_of_range(name, value, "a number")
        refuse_first([
            (facts.no_timestamps_token_id is None,
             "the checkpoint's generation_config.json has no no_timestamps_token_id",
             "Take a newer one from the model's page, and build the bundle again."),
            (self.language is not None and not codes,
             f"language={self.language}: the model knows English alone", "Leave it out."),
            (self.language is not None and language_code(self.language, facts) not in codes,
             f"language={self.language} is unknown",
             f"Use one of {', '.join(sorted(codes))}, or leave it out."),
            (self.task not in ("transcribe", "translate"), f"task={self.task} is unknown",
             "Use transcribe or translate."),
            (self.task not in facts.task_to_id and (codes or self.task == "translate"),
             f"task={self.task}: the model has no token that asks for it",
             "Use the other one, or another checkpoint."),
            (not self.temperatures, "temperature is an empty list", "Name one or more."),
            (ratio is not None and not several,
             "compression_ratio_threshold decides on the next temperature, and there is one",
             "Name several, such as 0, 0.2, 0.4, or leave it out."),
            (logprob is not None and not several and self.no_speech_threshold is None,
             "logprob_threshold decides on the next temperature, and there is one",
             "Name several, such as 0, 0.2, 0.4, or leave it out."),
            (self.no_speech_threshold is not None and logprob is None,
             "no_speech_threshold is of texts that miss logprob_threshold", "Add that one."),
            (several and ratio is None and logprob is None,
             "of several temperatures only the first has an effect without a threshold",
             "Add compression_ratio_threshold or logprob_threshold, or name one temperature."),
        ])  # fmt: skip


def languages(facts: AudioFacts) -> dict[str, int]:
    """The token of each language, by its code; none of a model that knows English alone."""
    return {name.strip("<|>"): token for name, token in facts.lang_to_id.items()}


def language_code(name: str, facts: AudioFacts) -> str:
    """As Transformers reads a language: "en" of "en", "<|en|>" and "English", in any case."""
    lower = name.lower()
    return (facts.language_names or {}).get(lower) or lower.strip("<|>")


@dataclass(frozen=True)
class Segment:
    """start, end: seconds. token_ids: with those of its timestamps."""

    start: float
    end: float
    text: str
    token_ids: list[int]


class Say(Protocol):
    """The tokens that the decoder says after a prompt, of a window [mels, frames], with their
    log-probabilities where they are asked for. It never says what the checkpoint suppresses."""

    def __call__(
        self,
        prompt: list[int],
        window: MelFrames,
        processors: Sequence[LogitsProcessor],
        temperature: float,
        *,
        logprobs: bool,
    ) -> Sequence[Token]: ...


# The logits [V] after a prompt, of a window, as they are.
Look = Callable[[list[int], MelFrames], npt.NDArray[np.float32]]


class Listener:
    """Says what is in a recording, segment by segment.

    facts, features: of the target. spell: the text of token ids. end: what ends a text. max_len:
    tokens of a text, the prompt among them.
    """

    def __init__(
        self,
        facts: AudioFacts,
        features: FeatureFacts,
        options: SpeechOptions,
        say: Say,
        look: Look,
        spell: Callable[[Sequence[int]], str],
        *,
        end: int,
        max_len: int,
    ):
        assert facts.no_timestamps_token_id is not None, "checked with the options"
        self._facts, self._options = facts, options
        self._say, self._look, self._spell = say, look, spell
        self._seconds = features.hop_length / features.sampling_rate  # of a frame
        self._languages = languages(facts)
        self._start, self._end, self._untimed = (
            facts.decoder_start_token_id, end, facts.no_timestamps_token_id
        )  # fmt: skip
        self._most_context = max_len // 2 - 1
        asked = options.language
        self.language = None if asked is None else language_code(asked, facts)
        self.windows = 0  # that were heard

    def segments(self, windows: Windows) -> Iterator[tuple[list[Segment], int]]:
        """Of each window its segments, and the frame up to which all is said."""
        timed = self._options.timestamps or windows.frames > windows.width
        if self.language is None and self._languages:
            self.language = self._detect(windows.at(0))
        begin, latest = self._prompt(timed), self._facts.max_initial_timestamp_index
        processors = [TimestampRule(self._untimed, self._end, latest)] if timed else []
        said: list[Cut] = []
        seek, warm = 0, self._options.condition_on_prev_tokens
        while seek < windows.frames:
            window, frames = windows.at(seek), min(windows.width, windows.frames - seek)
            before = self._before(said) if warm and said else []
            self.windows += 1
            tokens, temperature = self._text([*before, *begin], window, processors, len(begin))
            warm = self._options.condition_on_prev_tokens and temperature < COLD
            if tokens is None:
                cuts, further = list[Cut](), frames
            else:  # a text that was asked for no times seldom has any
                cuts, further = cut(
                    tokens, zero=self._untimed + 1, seek=seek, frames=frames, seconds=self._seconds
                )
            said += cuts
            seek += further
            segments = [Segment(x.begin, x.end, self.spell(x.tokens), x.tokens) for x in cuts]
            yield segments, min(seek, windows.frames)

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without timestamps, which are not special in every tokenizer."""
        return self._spell([token for token in tokens if token <= self._untimed])

    def _detect(self, window: MelFrames) -> str:
        """The most probable language of all."""
        logits = self._look([self._start], window)
        return max(self._languages, key=lambda code: logits[self._languages[code]])

    def _prompt(self, timed: bool) -> list[int]:
        """What Whisper is asked: start, language, task, times or none."""
        prompt = [self._start]
        if self.language is not None:
            prompt += [self._languages[self.language], self._facts.task_to_id[self._options.task]]
        return prompt if timed else [*prompt, self._untimed]

    def _before(self, said: Sequence[Cut]) -> list[int]:
        """What was said before, as a window's context. Of a pair at the end of a segment the second
        timestamp begins the next one, and is left out."""
        text: list[int] = []
        for part in said:
            paired = len(part.tokens) > 2 and part.tokens[-2] > self._untimed
            text += part.tokens[:-1] if paired else part.tokens
        mark = self._facts.prev_sot_token_id
        return [*([] if mark is None else [mark]), *text[-self._most_context :]]

    def _text(
        self, prompt: list[int], window: MelFrames, processors: Sequence[LogitsProcessor], own: int
    ) -> tuple[list[int] | None, float]:
        """A window's tokens without the end of the text, None where nobody speaks, and their
        temperature. own: how many tokens of the prompt are no context."""
        options, silence = self._options, 0.0
        if options.no_speech_threshold is not None:
            silence = self._silence(prompt[: len(prompt) - own + 1], window)
        for temperature in options.temperatures:
            logprobs = options.logprob_threshold is not None
            said = self._say(prompt, window, processors, temperature, logprobs=logprobs)
            tokens = [token.id for token in said]
            unsure = options.logprob_threshold is not None and (
                sum(token.logprob or 0.0 for token in said) / len(said) < options.logprob_threshold
            )
            if unsure and silence > (options.no_speech_threshold or 0.0):
                return None, temperature
            most = options.compression_ratio_threshold
            if not unsure and (most is None or compression(tokens) <= most):
                break
        return (tokens[:-1] if tokens[-1] == self._end else tokens), temperature

    def _silence(self, prompt: list[int], window: MelFrames) -> float:
        """The probability of the token for no speech, which is the one before that for no times."""
        return math.exp(log_softmax(self._look(prompt, window))[self._untimed - 1])


def compression(tokens: Sequence[int]) -> float:
    """By how much zlib compresses the tokens' bytes: two each, as of all of Whisper's."""
    content = b"".join(token.to_bytes(2, "little") for token in tokens)
    return len(content) / len(zlib.compress(content))
