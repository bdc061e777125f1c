"""What the command line runs: one request, a batch, a beam search or a conversation."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..audio.recording import check_file
from ..beam.text import SLOTS_PER_BEAM, beam_texts
from ..bundle import load
from ..certificate import check
from ..drafts.registry import KINDS
from ..files.errors import OutriderError
from ..files.progress import stage
from ..gamma.costs import RoundCosts
from ..stats import Stats
from ..text.engine import TextEngine
from ..text.options import Options, Prompt
from ..text.results import Result
from ..theory.measure import summarise
from . import report
from .arguments import options_from, parse, refuse_unread
from .audio import transcribe
from .chat import converse
from .output import Progress, Session, standard_streams
from .prompts import batch_requests, error_at_line, prompt_from, text_from

WARM_UP_TOKENS = 16  # tokens generated with and without drafts before --baseline measures


def run(argv: Sequence[str] | None) -> int:
    """Run a command; returns the exit status. Refuses what it can before it loads the engines."""
    args = parse(argv)
    data = args.json or args.batch or args.format not in (None, "text")
    out, err = standard_streams(json=bool(data))
    args.source = text_from(args.source, args.source_file)
    options = options_from(args)
    prompt = prompt_from(args)
    requests = batch_requests(args, options) if args.batch else []
    if args.audio:
        check_file(args.audio)
    all_options = [each for _, _, each in requests] or [options]
    session = Session(_load(args, all_options), args, options, out, err)
    if args.batch:
        _run_batch(session, requests)
    elif args.audio:
        transcribe(session)
    elif args.conversation:
        converse(session)
    elif args.beams:
        _run_beams(session, prompt)
    else:
        _run_single(session, prompt)
    return 0


def _load(args: Namespace, all_options: Sequence[Options]) -> TextEngine:
    """Load the bundle, with its draft model if one of the requests needs it."""
    return load(
        args.engines, slots=args.slots or (SLOTS_PER_BEAM * args.beams if args.beams else None),
        threads=args.threads, verify=args.verify_files,
        device=args.device, graphs=args.graphs, table=args.table, corpus=args.corpus,
        chat_template=args.chat_template, reuse=not args.baseline, plain_width=args.plain_width,
        draft_model=any(map(_needs_model, all_options)),
    )  # fmt: skip


def _needs_model(options: Options) -> bool:
    """Whether the draft model may propose tokens, as it may if the request names no draft."""
    kind = options.draft
    return options.gamma != 0 and (kind is None or (kind in KINDS and KINDS[kind].needs_model()))


def _run_single(session: Session, prompt: Prompt | None) -> None:
    engine, args, options, err = session.engine, session.args, session.options, session.err
    request = engine.request(prompt, options)
    refuse_unread(args, [request.draft] if request.gamma else [])
    if args.baseline and request.gamma == 0:
        raise OutriderError(
            "option",
            "--baseline compares with plain decoding, and without a draft this run is plain too",
            "Leave --baseline out, or use a bundle that was built with DRAFT=<draft>.",
        )
    err.lines(report.notes([options]))
    plain_options = options.plain()
    if args.baseline:
        warm_up_tokens = min(WARM_UP_TOKENS, options.max_new_tokens)
        for warm_up in (options, plain_options):
            short = replace(
                warm_up, max_new_tokens=warm_up_tokens, min_new_tokens=0, stop=(), ignore_eos=True
            )
            engine.generate(prompt, short)
    if args.color:
        err.line(report.legend())
    result = _generate_text(session, prompt)

    greedy = options.temperature == 0
    objects: dict[str, Any] = {}
    if args.stats != "none":
        gamma = _gamma_text([options], [request.gamma], result.stats)
        err.lines(report.summary(result, gamma, seed=not greedy))
    plain = engine.generate(prompt, plain_options) if args.baseline else None
    if args.stats == "detailed":
        err.lines(report.detailed(result.stats, _costs(engine, request.draft, result, plain)))
    if plain is not None:
        same = greedy or options.verify == "coupled"
        objects["baseline"] = report.baseline_object(result, plain, same=same)
        err.line(report.baseline(result, plain, same=same))
    session.show_engine()
    certificate = None
    if args.check:
        with stage("check", "texts, compared with the target") as stage_info:
            set_phase = partial(setattr, stage_info, "phase")
            certificate = check(engine, prompt, options, set_phase)
        objects["check"] = certificate.json_object()
        err.lines(certificate.lines())
    if args.json:
        objects = {"bits": engine.bits.json_object(), **objects}
        body = report.json_object(result, logprobs=options.logprobs is not None, **objects)
        session.out.line(report.json_line(body))
    if certificate is not None and not certificate.passed:
        raise OutriderError(
            "certificate",
            "the output cannot be certified as the target's",
            "Decode with --gamma 0, and if your options are exact ones, please report this bundle."
            if certificate.caveat is None
            else "Use --verify token, block or coupled, and no --lenience."
            if certificate.drafted
            else "Generate a longer text, or use --draft none.",
        )


def _costs(
    engine: TextEngine, draft: str, result: Result, plain: Result | None
) -> RoundCosts | None:
    """The costs of rounds, from the plain run or else from the plain steps that a policy timed;
    None if there was no plain step."""
    stats = result.stats
    if plain is not None and plain.stats.rounds and stats.drafted:
        return summarise({0: [plain.stats], -(-stats.drafted // stats.rounds): [stats]}).costs
    return engine.decoder.shared_gamma(draft).costs.rounds_if_timed(1)


def _generate_text(session: Session, prompt: Prompt | None) -> Result:
    """Generate, and show the text as it comes or at the end (not at all with --json)."""
    args, out = session.args, session.out
    stream = session.engine.stream(prompt, session.options)
    try:
        shown = session.show(stream)
    except OutriderError:
        if args.stream:
            out.write("\n")  # the error begins a line of its own
        raise
    assert stream.result is not None, "a stream ends with a result"
    if not args.json:
        out.line("" if args.stream else shown)
    return stream.result


def _run_beams(session: Session, prompt: Prompt | None) -> None:
    engine, args, options = session.engine, session.args, session.options
    assert isinstance(options.gamma, int), "see `options_from`"
    engine.request(prompt, options)  # refuses what any request would be refused for
    found = beam_texts(
        engine, prompt, beams=args.beams, draft_beams=args.draft_beams, gamma=options.gamma,
        max_new_tokens=options.max_new_tokens, ignore_eos=options.ignore_eos,
        length_penalty=1.0 if args.length_penalty is None else args.length_penalty,
        chat=options.chat, system=options.system, special_tokens=options.special_tokens,
        source=options.source,
    )  # fmt: skip
    text = report.json_line(found.json_object()) if args.json else found.texts[0].text
    session.out.line(text)
    if args.stats != "none":
        session.err.lines(found.lines(args.beams, options.gamma))
    session.show_engine()


def _run_batch(session: Session, requests: Sequence[tuple[int, Prompt | None, Options]]) -> None:
    engine, args, err = session.engine, session.args, session.err
    prepared = []
    for number, prompt, options in requests:
        try:
            prepared.append(engine.request(prompt, options))
        except OutriderError as error:
            raise error_at_line(args, number, error) from None
    refuse_unread(args, {request.draft for request in prepared if request.gamma})
    all_options = [options for _, _, options in requests]
    err.lines(report.notes(all_options))
    begin = time.perf_counter()
    results: dict[int, Result] = {}
    printed = tokens = 0
    with Progress(err, len(requests)) as progress:
        for index, result in engine.batch([(prompt, options) for _, prompt, options in requests]):
            results[index] = result
            tokens += result.stats.output_tokens
            while printed in results:
                logprobs = all_options[printed].logprobs is not None
                body = report.json_object(results[printed], logprobs=logprobs)
                session.out.line(report.json_line(body))
                printed += 1
            progress.show(len(results), tokens / (time.perf_counter() - begin))
    seconds = time.perf_counter() - begin
    whole = [results[index] for index in range(len(requests))]
    total = Stats.total(result.stats for result in whole)
    if args.stats != "none":
        gamma = _gamma_text(all_options, [request.gamma for request in prepared], total)
        err.lines(report.batch_summary(whole, seconds, gamma))
    if args.stats == "detailed":
        err.lines(report.detailed(total))
    session.show_engine()
    failed = [(number, r.error) for (number, *_), r in zip(requests, whole, strict=True) if r.error]
    if failed:
        more = f" (and {len(failed) - 1} more lines)" if len(failed) > 1 else ""
        raise error_at_line(args, *failed[0], more)


def _gamma_text(options: Collection[Options], gammas: Collection[int], stats: Stats) -> str:
    """gamma for the summary: numbers, or what chose it and how many rounds had no drafts."""
    least, most = min(gammas), max(gammas)
    chosen = [one for one in options if isinstance(one.gamma, str) or one.fallback == "auto"]
    if not chosen:
        return f"{least}-{most}" if least < most else str(most)
    named = chosen[0].gamma if isinstance(chosen[0].gamma, str) else f"{most} or 0"
    return f"{named}, {stats.undrafted} rounds without drafts"
