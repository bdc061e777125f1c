"""--audio: its options, and the output of a transcription."""

from __future__ import annotations

import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import count
from typing import Any

from ..audio.subtitles import WEBVTT_HEADER, lines, subrip, webvtt
from ..audio.transcription import Segment, SpeechOptions
from ..files.progress import Stage, stage
from ..text.options import Options
from ..text.speech import FIXED_OPTIONS, Transcription
from . import report
from .output import Session

FORMATS = ("text", "srt", "vtt", "json")
SPEECH_OPTIONS = (
    "language", "task", "timestamps", "format", "condition_on_prev_tokens", "temperatures",
    "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold",
)  # fmt: skip
# Options of the command line that do not apply to --audio.
TEXT_OPTIONS = (
    "source", "source_file", "system", "chat", "chat_template", "special_tokens", "min_new_tokens",
    "stop", "stop_token_ids", "ignore_eos", "beams", "draft_beams", "length_penalty", "stream",
    "pace", "color", "json", "logprobs", "baseline", "check",
)  # fmt: skip
IRREGULAR_FLAGS = {
    "chat": "no-chat-template", "conversation": "chat", "stop_token_ids": "stop-token-id",
}  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    """Add the audio group to the parser; --audio itself is in the prompt group."""
    # fmt: off
    group = parser.add_argument_group("audio", "Only with --audio and a Whisper bundle.")
    add = group.add_argument
    add("--language", metavar="NAME",
        help="language spoken, such as en or English (default: the checkpoint's, else detected in "
        "the first window)")
    add("--task", choices=("transcribe", "translate"),
        help="transcribe, or translate into English (default: the checkpoint's, else transcribe)")
    add("--timestamps", action="store_true", default=None,
        help="print the times of each segment; srt and vtt always have them, and recordings over "
        "30 s are always divided into segments")
    add("--format", choices=FORMATS,
        help="output format: text, srt or vtt subtitles, or one JSON object (default: text)")
    add("--condition-on-prev-tokens", action="store_true", default=None,
        help="in a long recording, prompt each window with the text before it")
    add("--temperatures", type=_comma_separated_floats, metavar="T,T,...",
        help="temperatures to try in turn while a window's text misses one of the thresholds "
        "below, such as 0,0.2,0.4,0.6,0.8,1")
    add("--compression-ratio-threshold", type=float, metavar="X",
        help="retry if zlib compresses the tokens by a factor of more than X, as it does when the "
        "text repeats itself (typically 1.35)")
    add("--logprob-threshold", type=float, metavar="X",
        help="retry if the mean log-probability is below X (typically -1)")
    add("--no-speech-threshold", type=float, metavar="P",
        help="treat a window as silent if the no-speech token has a probability above P and the "
        "text misses --logprob-threshold (typically 0.6)")
    # fmt: on


def _comma_separated_floats(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,0.5") from None


def rules(args: Namespace, parser: ArgumentParser) -> Iterator[tuple[object, str, str]]:
    """Combinations to refuse, for `refuse_first`."""
    leave = "Leave one of them out."

    def given(name: str) -> bool:
        return getattr(args, name) not in (parser.get_default(name), None)

    for name in SPEECH_OPTIONS:
        yield (not args.audio and given(name), f"--{flag(name)} is an option of --audio",
               "Add --audio FILE, or leave it out.")  # fmt: skip
    for name in TEXT_OPTIONS:
        yield (args.audio and given(name), f"--{flag(name)} has no meaning for --audio",
               leave)  # fmt: skip
    yield (args.temperatures and given("temperature"),
           "--temperatures and --temperature set the same option", leave)  # fmt: skip
    yield (args.audio == "-",
           "--audio cannot read standard input, because a recording is read twice",
           "Write it to a file, and name the file.")  # fmt: skip
    yield (args.audio and args.draft is None and (args.corpus or args.table),
           "with --audio, --corpus and --table need a draft that reads them",
           "Add --draft.")  # fmt: skip


def flag(name: str) -> str:
    """The command-line name of an option, without the dashes."""
    return IRREGULAR_FLAGS.get(name, name.replace("_", "-"))


def transcribe_arguments(args: Namespace, options: Options) -> dict[str, Any]:
    """The arguments of `TextEngine.transcribe`. options: sampling and drafting."""
    speech = {f.name: getattr(args, f.name, None) for f in fields(SpeechOptions)}
    arguments = {name: value for name, value in speech.items() if value is not None}
    arguments["temperature"] = args.temperatures or options.temperature
    arguments["timestamps"] = bool(args.timestamps) or args.format in ("srt", "vtt")
    if any(args.temperatures or ()) and args.seed is None:
        options = replace(options, seed=None).seeded()  # a retry may sample after all
    shared = {n: v for n, v in vars(options).items() if n not in (*FIXED_OPTIONS, "temperature")}
    return {**shared, **arguments, "max_new_tokens": args.max_new_tokens}


def transcribe(session: Session) -> None:
    """Print the text to stdout as it comes, progress and a summary to stderr."""
    args, out = session.args, session.out
    options = transcribe_arguments(args, session.options)
    write = _writer(args.format or "text", options["timestamps"])
    session.err.lines(report.notes([session.options]))
    begin = time.perf_counter()
    # A terminal that shows the text as it comes needs no other progress.
    shown = args.stats != "none" and not (out.is_terminal and args.format != "json")
    name = " ".join(args.audio.split())[-34:]
    with stage("audio", name) if shown else nullcontext(Stage()) as stage_info:

        def show_window(seconds: float, duration: float, new: Sequence[Segment]) -> None:
            stage_info.phase = f"{_minutes_text(seconds)} of {_minutes_text(duration)}"
            for text in write(new):
                out.write(text)

        transcription = session.engine.transcribe(args.audio, heard=show_window, **options)
    for text in write(None):
        out.write(text)
    if args.format == "json":
        out.line(report.json_line(json_object(transcription)))
    if args.stats != "none":
        seed = any(args.temperatures or [options["temperature"]])
        session.err.lines(_summary(transcription, time.perf_counter() - begin, seed))
    if args.stats == "detailed":
        session.err.lines(report.detailed(transcription.stats))
    session.show_engine()


Writer = Callable[[Sequence[Segment] | None], Iterator[str]]


def _writer(form: str, timed: bool) -> Writer:
    """A function from new segments to the texts to print; None marks the end."""
    numbers = count(1)

    def text(new: Sequence[Segment] | None) -> Iterator[str]:
        for segment in new or ():
            yield segment.text if next(numbers) > 1 else segment.text.lstrip()
        if new is None:
            yield "\n"

    def vtt(new: Sequence[Segment] | None) -> Iterator[str]:
        if next(numbers) == 1:
            yield WEBVTT_HEADER
        yield from webvtt(new or ())

    writers: dict[str, Writer] = {
        "text": (lambda new: lines(new or ())) if timed else text,
        "srt": lambda new: subrip(new or (), numbers),
        "vtt": vtt,
        "json": lambda new: iter(()),
    }
    return writers[form]


def _minutes_text(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _summary(transcription: Transcription, seconds: float, seed: bool) -> list[str]:
    """The summary of a transcription. seconds: wall time. seed: whether to print the seed."""
    stats = transcription.stats
    language = f" | language {transcription.language}" if transcription.language else ""
    return [
        f"audio {transcription.duration:.1f} s | windows {transcription.windows}{language} | "
        f"{seconds:.1f} s, {transcription.duration / seconds:.1f} times real time",
        f"output {stats.output_tokens} tok | {stats.tokens_per_second:.1f} tok/s"
        + (f" | seed {transcription.seed}" if seed else ""),
        *report.round_lines(stats, str(len(stats.drafted_at))),
    ]


def json_object(transcription: Transcription) -> dict[str, Any]:
    """The object of --format json. Times are in seconds, except those in `stats`."""
    return {
        "text": transcription.text,
        "language": transcription.language,
        "duration": round(transcription.duration, 3),
        "segments": [
            {
                "start": round(segment.start, 2), "end": round(segment.end, 2),
                "text": segment.text, "token_ids": segment.token_ids,
            }
            for segment in transcription.segments
        ],
        "windows": transcription.windows,
        "seed": transcription.seed,
        "stats": transcription.stats.summary(),
    }  # fmt: skip
