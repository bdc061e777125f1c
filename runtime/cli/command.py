"""What the command line does: one text, a batch, a beam search or a conversation."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..beam.text import SLOTS, beam_texts, gamma_of
from ..bundle import load
from ..certificate import check
from ..drafts.registry import KINDS
from ..files.errors import OutriderError
from ..sequence import Request
from ..stats import Stats
from ..text.engine import TextEngine
from ..text.options import Options, Prompt
from ..text.results import Result
from . import report
from .arguments import options_from, parse, refuse_unread
from .chat import converse
from .output import Output, Progress, show, standard_streams
from .prompts import batch_requests, prompt_from, source_name

WARM_UP = 16  # tokens generated in either way before --baseline measures
NOTES = {
    "sigmoid": "note: verify=sigmoid is not exact: the output is close to the draft's, and not "
    "distributed as the target's",
    "lenience": "note: lenience={lenience:g} is not exact: a token may be drawn with up to "
    "{factor:.3g} times the target's probability",
}


def run(argv: Sequence[str] | None) -> int:
    """The exit status. All that can be refused is refused before the engines are loaded."""
    args = parse(argv)
    out, err = standard_streams(json=bool(args.json or args.batch))
    options = options_from(args)
    if args.batch:
        requests = batch_requests(args, options)
        return _batch(_load(args), args, requests, out, err)
    if args.conversation:
        return converse(_load(args), args, options, out, err)
    prompt = prompt_from(args)
    engine = _load(args)
    if args.beams:
        return _beams(engine, args, prompt, options, out, err)
    return _single(engine, args, prompt, options, out, err)


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
    out: Output,
    err: Output,
) -> int:
    request = engine.request(prompt, options)
    refuse_unread(args, [request])
    gamma = request.gamma
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
    out: Output,
    err: Output,
) -> int:
    assert not isinstance(options.gamma, str), "refused with the other options"
    found = beam_texts(
        engine, prompt, beams=args.beams, draft_beams=args.draft_beams, gamma=options.gamma,
        max_new_tokens=options.max_new_tokens, ignore_eos=options.ignore_eos,
        length_penalty=1.0 if args.length_penalty is None else args.length_penalty,
        chat=options.chat, system=options.system, special_tokens=options.special_tokens,
    )  # fmt: skip
    out.line(report.json_line(found.json_object()) if args.json else found.texts[0].text)
    if args.stats != "none":
        err.lines(found.lines(args.beams, gamma_of(engine, options.gamma)))
        err.line(report.memory(engine.memory))
    return 0


def _text(
    engine: TextEngine, args: Namespace, prompt: Prompt, options: Options, out: Output
) -> Result:
    """Generate, and show the text as it comes or at the end (with --json not at all)."""
    stream = engine.stream(prompt, **vars(options))
    try:
        shown = show(stream, args, out)
    except OutriderError:
        if args.stream:
            out.write("\n")  # the error begins a line of its own
        raise
    assert stream.result is not None, "a stream ends with a result"
    if not args.json:
        out.line("" if args.stream else shown)
    return stream.result


def _run(engine: TextEngine, prompt: Prompt, options: Options) -> Result:
    return engine.generate(prompt, **vars(options))


def _batch(
    engine: TextEngine,
    args: Namespace,
    requests: Sequence[tuple[int, Prompt, Options]],
    out: Output,
    err: Output,
) -> int:
    gammas, chosen, drafts = set(), set[str](), list[Request]()
    for number, prompt, options in requests:
        try:
            drafts.append(engine.request(prompt, options))
            gammas.add(drafts[-1].gamma)
            chosen.add(_gamma_text(options, 0))
        except OutriderError as error:
            where = f"line {number} of {source_name(args.batch)}"
            raise OutriderError(error.kind, f"{where}: {error.cause}", error.remedy) from None
    refuse_unread(args, drafts)
    for note in _notes([options for _, _, options in requests]):
        err.line(note)
    begin = time.perf_counter()
    results: list[Result | None] = [None] * len(requests)
    printed = tokens = 0
    finished = engine.batch([(prompt, options) for _, prompt, options in requests])
    progress = Progress(err, len(requests))
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
    failed = [number for number, result in enumerate(whole) if result.error is not None]
    if args.stats != "none":
        gamma = "-".join(str(g) for g in sorted({min(gammas), max(gammas)}))
        if chosen - {"0"}:
            gamma = _gamma_text(requests[0][2], max(gammas), report.total_stats(whole))
        err.lines(report.batch_summary(whole, seconds, gamma))
    if args.stats == "detailed":
        err.lines(report.detailed(report.total_stats(whole)))
    if args.stats != "none" and engine.memory:
        err.line(report.memory(engine.memory))
    if failed:
        first = whole[failed[0]].error
        assert first is not None
        where = f"line {requests[failed[0]][0]} of {source_name(args.batch)}"
        more = f" (and {len(failed) - 1} lines more)" if len(failed) > 1 else ""
        raise OutriderError(first.kind, f"{where}{more}: {first.cause}", first.remedy)
    return 0


def _notes(all_options: Sequence[Options]) -> Iterator[str]:
    """What is not exact, once each."""
    if any(options.verify == "sigmoid" for options in all_options):
        yield NOTES["sigmoid"]
    lenience = min(options.lenience for options in all_options)
    if lenience < 1:
        yield NOTES["lenience"].format(lenience=lenience, factor=1 / lenience)
