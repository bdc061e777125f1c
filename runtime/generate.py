"""The command line: text to stdout, everything about it to stderr.

`outrider` once installed, `python -m runtime.generate` in the checkout.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TextIO

from .beam.text import SLOTS, beam_texts, gamma_of
from .bundle import load
from .certificate import check
from .cli import report
from .cli.arguments import options_from, parse
from .cli.prompts import batch_requests, prompt_from, source_name
from .drafts.registry import KINDS
from .files.errors import OutriderError, run_command
from .stats import Stats
from .text.engine import Options, Prompt, Result, TextEngine
from .text.pace import Smooth

WARM_UP = 16  # tokens generated in either way before --baseline measures
NOTES = {
    "sigmoid": "note: verify=sigmoid is not exact: the output is close to the draft's, and not "
    "distributed as the target's",
    "lenience": "note: lenience={lenience:g} is not exact: a token may be drawn with up to "
    "{factor:.3g} times the target's probability",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (`--help` lists them)."""
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    args = parse(argv)
    if sys.stdout is None:  # `>&-`; a closed stderr, `2>&-`, is a wish for silence
        raise OutriderError("disk", "stdout is closed", "Redirect it to a file or a pipe.")
    out, err = _Output(sys.stdout, "stdout"), _Output(sys.stderr, "stderr")
    if args.json or args.batch:
        out.encode("utf-8", "strict")  # as JSON prescribes
    else:
        out.encode(None, "backslashreplace")
    # All that can be refused is refused before the engines are loaded.
    options = options_from(args)
    if args.batch:
        requests = batch_requests(args, options)
        engine = _load(args)
        return _batch(engine, args, requests, out, err)
    prompt = prompt_from(args)
    engine = _load(args)
    run = _beams if args.beams else _single
    return run(engine, args, prompt, options, out, err)


def _gamma_text(options: Options, gamma: int, stats: Stats | None = None) -> str:
    """What the summary says of gamma: a number, or who chose and how often 0."""
    if not isinstance(options.gamma, str) and options.fallback == "off":
        return str(gamma)
    named = options.gamma if isinstance(options.gamma, str) else f"{gamma} or 0"
    return named if stats is None else f"{named} | {stats.undrafted} rounds without drafts"


def _load(args: Namespace) -> TextEngine:
    engine = load(
        args.engines, slots=args.slots or (SLOTS * args.beams if args.beams else None),
        threads=args.threads, verify=args.verify_files,
        device=args.device, graphs=args.graphs, loop=args.loop,
        table=args.table, corpus=args.corpus, reuse=not args.baseline,
    )  # fmt: skip
    if args.draft in KINDS and KINDS[args.draft].reads_model and engine.decoder.draft is None:
        raise OutriderError(
            "option",
            f"--draft {args.draft}: {args.engines} was built without a draft",
            "Leave --draft out, or build the bundle with DRAFT=<draft>.",
        )
    return engine


def _single(
    engine: TextEngine,
    args: Namespace,
    prompt: Prompt,
    options: Options,
    out: _Output,
    err: _Output,
) -> int:
    gamma = engine.request(prompt, options).gamma
    if args.baseline and gamma == 0:
        raise OutriderError(
            "option",
            "--baseline compares with plain decoding, and without a draft there is nothing else",
            "Leave --baseline out, or use a bundle that was built with DRAFT=<draft>.",
        )
    for note in _notes([options]):
        err.line(note)
    plain_options = options.plain()
    if args.baseline:
        few = min(WARM_UP, options.max_new_tokens)
        for warm_up in (options, plain_options):
            short = replace(warm_up, max_new_tokens=few, min_new_tokens=0, stop=(), ignore_eos=True)
            _run(engine, prompt, short)
    if args.color:
        err.line(report.legend())
    result = _text(engine, args, prompt, options, out)

    greedy = options.temperature == 0
    lines, objects = [], {}
    if args.stats != "none":
        shown = _gamma_text(options, gamma, result.stats)
        lines += report.summary(result, shown, seed=not greedy)
    if args.stats == "detailed":
        lines += report.detailed(result.stats)
    err.lines(lines)
    if args.baseline:
        plain = _run(engine, prompt, plain_options)
        objects["baseline"] = report.baseline_object(result, plain, greedy=greedy)
        err.line(report.baseline(result, plain, greedy=greedy))
    if args.stats != "none" and engine.memory:
        err.line(report.memory(engine.memory))
    certificate = None
    if args.check:
        certificate = check(engine, prompt, options)
        objects["check"] = certificate.json_object()
        err.lines(certificate.lines())
    if args.json:
        body = report.json_object(result, logprobs=options.logprobs is not None, **objects)
        out.line(report.json_line(body))
    if certificate is not None and not certificate.passed:
        raise OutriderError(
            "certificate",
            "the output cannot be certified as the target's",
            "Decode with --gamma 0; if the options are exact ones, please report this bundle."
            if certificate.caveat is None
            else "Use --verify token or block without --lenience, and texts of some length.",
        )
    return 0


def _beams(
    engine: TextEngine,
    args: Namespace,
    prompt: Prompt,
    options: Options,
    out: _Output,
    err: _Output,
) -> int:
    assert not isinstance(options.gamma, str), "refused with the other options"
    found = beam_texts(
        engine, prompt, beams=args.beams, draft_beams=args.draft_beams, gamma=options.gamma,
        max_new_tokens=options.max_new_tokens, ignore_eos=options.ignore_eos,
        length_penalty=1.0 if args.length_penalty is None else args.length_penalty,
        chat=options.chat, system=options.system,
    )  # fmt: skip
    out.line(report.json_line(found.json_object()) if args.json else found.texts[0].text)
    if args.stats != "none":
        err.lines(found.lines(args.beams, gamma_of(engine, options.gamma)))
        err.line(report.memory(engine.memory))
    return 0


def _text(
    engine: TextEngine, args: Namespace, prompt: Prompt, options: Options, out: _Output
) -> Result:
    """Generate, and show the text as it comes or at the end (with --json not at all)."""
    shown: list[str] = []
    result: Result | None = None
    try:
        with ExitStack() as stack:
            smooth = stack.enter_context(Smooth(out.write)) if args.pace == "smooth" else None
            for event in engine.stream(prompt, **vars(options)):
                pieces = [report.color(*p) if args.color else p[0] for p in event.pieces]
                if smooth is not None:
                    smooth.show(pieces)
                elif args.stream:
                    out.write("".join(pieces))
                shown += pieces
                result = event.result
    except OutriderError:
        if args.stream:
            out.write("\n")  # the error begins a line of its own
        raise
    assert result is not None, "a stream ends with a result"
    if not args.json:
        out.line("" if args.stream else "".join(shown))
    return result


def _run(engine: TextEngine, prompt: Prompt, options: Options) -> Result:
    return engine.generate(prompt, **vars(options))


def _batch(
    engine: TextEngine,
    args: Namespace,
    requests: Sequence[tuple[int, Prompt, Options]],
    out: _Output,
    err: _Output,
) -> int:
    gammas, chosen = set(), set[str]()
    for number, prompt, options in requests:
        try:
            gammas.add(engine.request(prompt, options).gamma)
            chosen.add(_gamma_text(options, 0))
        except OutriderError as error:
            where = f"line {number} of {source_name(args.batch)}"
            raise OutriderError(error.kind, f"{where}: {error.cause}", error.remedy) from None
    for note in _notes([options for _, _, options in requests]):
        err.line(note)
    begin = time.perf_counter()
    results: list[Result | None] = [None] * len(requests)
    printed = tokens = 0
    finished = engine.batch([(prompt, options) for _, prompt, options in requests])
    progress = _Progress(err, len(requests))
    try:
        for done, (index, result) in enumerate(finished, start=1):
            results[index] = result
            tokens += result.stats.output_tokens
            while printed < len(results) and (ready := results[printed]) is not None:
                logprobs = requests[printed][2].logprobs is not None
                out.line(report.json_line(report.json_object(ready, logprobs=logprobs)))
                printed += 1
            progress.show(done, tokens / (time.perf_counter() - begin))
    finally:
        progress.clear()
    seconds = time.perf_counter() - begin
    whole = [result for result in results if result is not None]
    if args.stats != "none":
        gamma = "-".join(str(g) for g in sorted({min(gammas), max(gammas)}))
        if chosen - {"0"}:
            gamma = _gamma_text(requests[0][2], max(gammas), report.total_stats(whole))
        err.lines(report.batch_summary(whole, seconds, gamma))
    if args.stats == "detailed":
        err.lines(report.detailed(report.total_stats(whole)))
    if args.stats != "none" and engine.memory:
        err.line(report.memory(engine.memory))
    return 0


def _notes(all_options: Sequence[Options]) -> Iterator[str]:
    """What is not exact, once each."""
    if any(options.verify == "sigmoid" for options in all_options):
        yield NOTES["sigmoid"]
    lenience = min(options.lenience for options in all_options)
    if lenience < 1:
        yield NOTES["lenience"].format(lenience=lenience, factor=1 / lenience)


class _Output:
    """A standard stream whose failures have a name: disk full, closed.

    A closed pipe passes as BrokenPipeError, which ends the command quietly.
    """

    def __init__(self, stream: TextIO | None, name: str):
        self._stream, self._name = stream, name
        self.terminal = stream is not None and stream.isatty()

    def encode(self, encoding: str | None, errors: str) -> None:
        if self._stream is not None and hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(encoding=encoding, errors=errors)

    def write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            # What is buffered would fail again when the interpreter exits, with a traceback.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            raise OutriderError(
                "disk",
                f"cannot write to {self._name}: {error.strerror}",
                "Free some space, or redirect it to another place.",
            ) from None

    def line(self, text: str) -> None:
        self.write(text + "\n")

    def lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.line(line)


class _Progress:
    """A line on a terminal that is rewritten in place, and gone at the end."""

    def __init__(self, err: _Output, count: int):
        self._err, self._count, self._shown = err, count, 0.0

    def show(self, done: int, speed: float) -> None:
        now = time.perf_counter()
        if self._err.terminal and now - self._shown > 0.1:
            self._shown = now
            self._err.write(f"\r{done}/{self._count} done, {speed:.1f} tok/s\x1b[K")

    def clear(self) -> None:
        if self._shown:
            self._err.write("\r\x1b[K")


if __name__ == "__main__":
    sys.exit(main())
