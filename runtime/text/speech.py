"""Transcribes a recording with a text engine; implements `TextEngine.transcribe`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..audio.mel import LogMel, MelFrames
from ..audio.recording import Audio, Recording
from ..audio.transcription import Segment, SpeechOptions, Transcriber, languages
from ..audio.windows import Windows
from ..backends.engine import Logits
from ..calls import prefill
from ..files.errors import OutriderError, refuse_first
from ..files.generation import AudioFacts
from ..sampling.processors import LogitsProcessor
from ..sequence import Token
from ..stats import Stats
from .options import Options, unknown_option
from .requests import make_request, read_source

if TYPE_CHECKING:
    from .engine import TextEngine

# Fields of `Options` that a transcription sets itself.
FIXED_OPTIONS = (
    "source", "processors", "chat", "system", "special_tokens", "min_new_tokens", "stop",
    "stop_token_ids", "ignore_eos", "logprobs",
)  # fmt: skip
# Called after each window with the seconds transcribed, the duration, and the new segments.
WindowCallback = Callable[[float, float, Sequence[Segment]], None]


@dataclass(frozen=True)
class Transcription:
    """The transcription of a recording.

    text: the whole text. segments: its parts in order; a single one without timestamps. language:
    the code given or detected; None for an English-only model. duration: seconds. windows: how
    many were decoded. stats: totals over all windows.
    """

    text: str
    segments: tuple[Segment, ...]
    language: str | None
    duration: float
    windows: int
    seed: int
    stats: Stats


def language_and_task(
    given: Mapping[str, Any], facts: AudioFacts, start_ids: Sequence[int]
) -> dict[str, Any]:
    """Language and task as in Transformers: those that are given, else the checkpoint's. Tokens
    that it forces count only if neither is named."""
    own = {"language": facts.language, "task": facts.task}
    named: dict[str, Any] = {n: own[n] if given.get(n) is None else given[n] for n in own}
    if named["language"] is None and named["task"] is None:
        codes = {} if facts.language_detected else languages(facts)
        for name, tokens in (("language", codes), ("task", facts.task_to_id)):
            named[name] = next((key for key, token in tokens.items() if token in start_ids), None)
    return {**named, "task": "transcribe" if named["task"] is None else named["task"]}


def transcribe(
    engine: TextEngine,
    audio: Audio,
    heard: WindowCallback | None = None,
    *,
    max_new_tokens: int | None = None,
    **options: Any,
) -> Transcription:
    """See `TextEngine.transcribe`. max_new_tokens: None for as many as fit."""
    pair = engine.manifest.pair
    facts, features = pair.audio, pair.target.reads
    if facts is None or features is None:
        cause = f"the target is a {pair.target.architecture}, which reads no audio"
        raise OutriderError("option", cause, "Use a Whisper bundle.")
    refuse_first(
        (name in options, f"{name} has no meaning for a transcription", "Leave it out.")
        for name in FIXED_OPTIONS
    )
    names = {field.name for field in fields(SpeechOptions)}
    if unknown := unknown_option(options, names):
        raise TypeError(". ".join(unknown))
    given = {name: options.pop(name) for name in names & options.keys()}
    speech = SpeechOptions(**given | language_and_task(given, facts, pair.start_ids or ()))
    speech.check(facts)
    max_window_tokens = pair.max_len - 1 if max_new_tokens is None else max_new_tokens
    base_options = Options(**options, max_new_tokens=max_window_tokens).seeded()
    window = np.zeros((features.feature_size, features.frames), np.float32)
    for temperature in speech.temperatures:  # check all: later ones may never be reached
        window_options = replace(base_options, source=window, temperature=temperature)
        make_request(engine, [facts.decoder_start_token_id], window_options)
    stats = Stats(requests=0)

    def max_new_tokens_after(prompt: int) -> int:
        """Most new tokens. As in Transformers, `max_length` excludes the prompt."""
        left = pair.max_len - prompt
        if max_new_tokens is not None:
            return min(max_new_tokens, left)
        return min(facts.max_length + min(pair.max_len // 2 - 1, prompt) - prompt, left)

    def decode_window(
        prompt: list[int],
        window: MelFrames,
        processors: Sequence[LogitsProcessor],
        temperature: float,
        *,
        logprobs: bool,
    ) -> Sequence[Token]:
        window_options = replace(
            base_options, source=window, processors=processors, temperature=temperature,
            logprobs=0 if logprobs else None, max_new_tokens=max_new_tokens_after(len(prompt)),
            # Each window, and each attempt at one, has its own random numbers.
            seed=((base_options.seed or 0) + stats.requests) % 2**64,
        )  # fmt: skip
        result = engine.generate(prompt, window_options)
        stats.add(result.stats)
        return result.tokens

    def first_logits(prompt: list[int], window: MelFrames) -> Logits:
        source = read_source(Options(source=window), pair, engine.tokenizer)
        with engine.exclusive_slot(prompt, source) as slot:
            target = engine.decoder.target
            # Kept for `decode_window`, which reads the same window.
            target.encode(slot.index, source)
            return prefill(target, slot.index, prompt, 0)[: pair.vocab_size].copy()

    transcriber = Transcriber(
        facts, features, speech, decode_window, first_logits, engine.tokenizer.decode,
        end=pair.tokenizer.eos_token_ids[0], max_len=pair.max_len,
    )  # fmt: skip
    rate = features.sampling_rate
    log_mel = LogMel(features.feature_size, rate, features.n_fft, features.hop_length)
    windows = Windows(Recording(audio, rate), log_mel, features.n_samples)
    segments: list[Segment] = []
    with engine.slot_queue.one_request():
        for new, frame in transcriber.segments(windows):
            segments += new
            if heard is not None:
                seconds = min(frame * features.hop_length / rate, windows.duration)
                heard(seconds, windows.duration, new)
    text = transcriber.decode([token for segment in segments for token in segment.token_ids])
    return Transcription(
        text, tuple(segments), transcriber.language, windows.duration, transcriber.window_count,
        base_options.seed or 0, stats,
    )  # fmt: skip
