"""The command line's words: the parser, what contradicts what, and the options they make.

Nothing here needs a bundle: whatever can be refused without one is refused before it is loaded.
"""

from __future__ import annotations

import re
import textwrap
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

from .. import __version__
from ..beam.text import excluded
from ..drafts.registry import KINDS
from ..files.errors import EXIT_STATUS, PACKAGE, CommandParser, OutriderError, refuse_first
from ..sampling.warp import VerifyRule
from ..text.options import GammaName, Options
from .audio import add_options, flag
from .audio import rules as audio_rules

PROGRAM = "outrider" if PACKAGE == "outrider" else f"python -m {PACKAGE}.generate"
SOURCES = ("source", "source_file")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}

_DESCRIPTION = """\
Generate text with exact speculative decoding: a draft model rides ahead, the target checks its
tokens, and what comes out has exactly the target's distribution. Text goes to stdout, everything
about it to stderr."""

_STATUSES = textwrap.fill(
    ", ".join(f"{status} {kind}" for kind, status in EXIT_STATUS.items()),
    width=90,
    subsequent_indent="  ",
)
_EPILOG = f"""\
examples:
  {PROGRAM} --engines build/qwen --prompt "Why is the sky blue?"
  {PROGRAM} --engines build/qwen --prompt-file story.txt --no-chat-template \\
      --temperature 0.8 --top-p 0.95 --seed 7 --stop '\\n\\n'
  {PROGRAM} --engines build/qwen --prompt "..." --baseline     # is it faster than plain decoding?
  {PROGRAM} --engines build/qwen --prompt "..." --check        # is it exact?
  {PROGRAM} --engines build/qwen --prompt "..." --color        # which tokens were the draft's?
  {PROGRAM} --engines build/qwen --batch in.jsonl --slots 4 > out.jsonl
  {PROGRAM} --engines build/t5 --source "translate English to German: Good day."
  {PROGRAM} --engines build/whisper --audio talk.wav --format srt > talk.srt

exit status:
  0 success, also when the reader of stdout leaves early (| head); 130 Ctrl-C; 143 SIGTERM;
  otherwise that of the kind that the line `error: <kind>: ...` on stderr names:
  {_STATUSES}"""


def _whole(least: int, *names: str) -> Callable[[str], Any]:
    """names: that may stand in place of a number."""

    def convert(text: str) -> int | str:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least and text not in names:
            more = f", {' or '.join(names)}" if names else ""
            raise ArgumentTypeError(f"{text!r} is not a whole number from {least} up{more}")
        return text if text in names else value

    return convert


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return _whole(0)(token), float(value)
    except (ArgumentTypeError, ValueError):
        raise ArgumentTypeError(f"{text!r} is not a token id and a number, ID=X") from None


def _escaped(text: str) -> str:
    """A stop string with its escape sequences replaced."""

    def character(match: re.Match[str]) -> str:
        sequence = match[1]
        if sequence in ESCAPES:
            return ESCAPES[sequence]
        if len(sequence) > 1 and int(sequence[1:], 16) not in range(0xD800, 0xE000):
            return chr(int(sequence[1:], 16))
        raise ArgumentTypeError(
            f"{text!r}: there is no escape sequence \\{sequence}; there are \\n \\t \\r \\xHH "
            r"\uHHHH, and \\ for a backslash"
        )

    return re.sub(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.|$)", character, text, flags=re.DOTALL)


def _parser() -> ArgumentParser:
    parser = CommandParser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    # fmt: off
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    add = parser.add_argument_group("engines").add_argument
    add("--engines", type=Path, required=True, metavar="DIR", help="what `make engines` wrote")
    add("--slots", type=_whole(1), metavar="N", help="sequences at a time (default: the bundle's)")
    add("--threads", type=_whole(0), default=0, metavar="N",
        help="CPU threads of each model's engine (default 0: the backend's choice)")
    add("--plain-width", type=_whole(1), metavar="N",
        help="tokens of the narrowest calls of the target (default: as many as it takes for the "
        "same text with every gamma, 1 or 2). Where that is 2, 1 makes plain decoding on the CPU a "
        "few percent faster, and a text is then the same only for the same gamma")
    add("--device", default="auto", metavar="D",
        help="auto, cpu, cuda or cuda:N (default auto: what the bundle was compiled for, and the "
        "CPU for BACKEND=onnxruntime)")
    add("--no-graphs", action="store_false", dest="graphs",
        help="on a GPU, launch each call by itself instead of a round as one CUDA graph")
    add("--loop", action="store_true",
        help="let the GPU go on to the next round by itself, a whole text as one launch "
        "(CUDA 12.4; not measured yet)")
    add("--table", type=Path, metavar="FILE.npz",
        help="what `python -m export.ngram` counted, for --draft unigram, bigram and skip")
    add("--corpus", type=Path, metavar="FILE",
        help="a text, UTF-8, in which lookups (--draft ngram, copy, chain) look too")
    add("--no-verify-files", action="store_false", dest="verify_files",
        help="do not check the bundle's files against their hashes")

    group = parser.add_argument_group(
        "prompt", "One of them; the value - reads standard input. One final newline of a file or "
        "of\nstandard input is no part of the prompt.")
    add = group.add_mutually_exclusive_group().add_argument
    add("--prompt", metavar="TEXT", help="the text itself")
    add("--prompt-file", metavar="FILE", help="a text file, UTF-8")
    add("--messages", metavar="FILE.json",
        help='chat messages: [{"role": ..., "content": ...}, ...]')
    add("--batch", metavar="FILE.jsonl",
        help='a request a line: {"prompt": ...}, {"messages": [...]} or {"source": ...}, and any '
        "of these options by its Python name (max_new_tokens); prints a JSON line for each, in the "
        "same order")
    add("--chat", action="store_true", dest="conversation",
        help="a conversation in the terminal: Ctrl-C ends an answer, /reset forgets what was said, "
        "Ctrl-D ends it")
    add("--audio", metavar="FILE",
        help="a recording that a Whisper transcribes: WAV, FLAC and others, of any length")
    add = group.add_mutually_exclusive_group().add_argument
    add("--source", metavar="TEXT",
        help="what the encoder of an encoder-decoder reads, such as a text to translate; --prompt "
        "then is how the output begins, and need not be there")
    add("--source-file", metavar="FILE", help="the same from a text file, UTF-8")
    add = group.add_argument
    add("--system", metavar="TEXT", help="the system message before the prompt or messages")
    add("--no-chat-template", action="store_const", const=False, dest="chat",
        help="give the prompt to the model as it is (default: as a user's message where the "
        "bundle has a chat template)")
    add("--special-tokens", choices=("control", "text"), default="control",
        help="how to read special tokens that are written out in a prompt or message: as control "
        "tokens, as Transformers does (default), or as text like any other")

    add_options(parser)

    add = parser.add_argument_group("length").add_argument
    add("--max-new-tokens", type=_whole(1), metavar="N",
        help="default 256; of each window of --audio all that fit")
    add("--min-new-tokens", type=_whole(0), metavar="N",
        help="no end-of-text before this many (default: what the checkpoint asks for, or 0)")
    add("--stop", type=_escaped, action="append", default=[], metavar="TEXT",
        help=r"end before this text; repeatable; \n \t \r \xHH \uHHHH and \\ are understood")
    add("--stop-token-id", type=_whole(0), action="append", default=[], metavar="ID",
        dest="stop_token_ids", help="end at this token; repeatable")
    add("--ignore-eos", action="store_true", help="go on after end-of-text")

    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T",
        help="0 is the most probable token each time, whatever top-k, top-p and min-p (default)")
    add("--top-k", type=_whole(0), default=0, metavar="K", help="default 0: off")
    add("--top-p", type=float, default=1.0, metavar="P", help="default 1: off")
    add("--min-p", type=float, default=0.0, metavar="P", help="default 0: off")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="default 1: off")
    add("--frequency-penalty", type=float, default=0.0, metavar="X",
        help="taken from a token's logit each time that it stands in the output; default 0: off")
    add("--presence-penalty", type=float, default=0.0, metavar="X",
        help="taken once, where it stands there at all; default 0: off")
    add("--no-repeat-ngram-size", type=_whole(0), metavar="N",
        help="no N tokens in a row stand twice in prompt and output (default: what the checkpoint "
        "asks for, or 0: off)")
    add("--logit-bias", type=_bias, action="append", default=[], metavar="ID=X",
        help="added to the logit of a token id, -100 to 100; repeatable")
    add("--seed", type=_whole(0), metavar="N", help="default: a random one, which is printed")

    add = parser.add_argument_group("speculation").add_argument
    add("--gamma", type=_whole(0, *get_args(GammaName)), metavar="N",
        help="draft tokens a round; 0 is plain decoding (default 4, of a lookup 8, without a "
        "draft 0); auto chooses the fastest for each round, by measured costs and acceptance; "
        "transformers is the schedule of that library")
    add("--fallback", choices=("auto", "off"), default="off",
        help="auto: go without drafts while they lose (--gamma auto always does; default off, "
        "since rounds that go by the clock repeat a seed's text with --verify coupled only)")
    add("--draft", choices=(*KINDS, "none"), metavar="WHO",
        help="who proposes them. " + "; ".join(f"{k}: {KINDS[k].help}" for k in KINDS)
        + "; none: plain decoding (default: what the bundle was built with). The draft model is "
        "opened where a text may need it")
    add("--draft-temperature", type=float, metavar="T",
        help="sample the draft at this temperature (default: the target's); still exact")
    add("--draft-threshold", type=float, default=0.0, metavar="P",
        help="end a round's drafting after a token to which the draft gave a probability below P "
        "(default 0: off); still exact")
    add("--verify", choices=get_args(VerifyRule), default="token",
        help="token (default), block (accepts more) and coupled (the seed alone decides the text, "
        "whatever is drafted, with --gamma 0 too) are exact; sigmoid is not")
    add("--lenience", type=float, default=1.0, metavar="L",
        help="below 1 accepts more and is not exact: no token gets more than 1/L times its "
        "probability (default 1)")

    add = parser.add_argument_group(
        "beam search", "The most probable text that a search of this width finds, in place of "
        "sampling; a wider beam of the draft runs ahead.").add_argument
    add("--beams", type=_whole(1), metavar="W", help="width of the target's beam")
    add("--draft-beams", type=_whole(1), metavar="U",
        help="width of the draft's, at least W (default: twice W)")
    add("--length-penalty", type=float, metavar="X",
        help="rank the result by log-probability / length^X (default 1: of a token on average)")

    add = parser.add_argument_group("output").add_argument
    add("--stream", action=BooleanOptionalAction,
        help="print text as it comes (default, except with --json, --batch and --baseline)")
    add("--pace", choices=("burst", "smooth"),
        help="of a stream: burst shows what a round brings at once (default), smooth spreads it "
        "over the time until the next round is expected")
    add("--color", action="store_true",
        help="accepted draft tokens, corrections and bonus tokens in three colours")
    add("--json", action="store_true", help="one JSON object instead of the text")
    add("--logprobs", type=_whole(0), metavar="N",
        help="with --json or --batch: the log-probability of each token under the target, before "
        "any of the sampling options, and of the N most probable ones")
    add("--stats", choices=("none", "summary", "detailed"), default="summary",
        help="on stderr (default summary); detailed has Theorem 3.8 too where a plain step was "
        "timed, by --baseline or --gamma auto")
    add("--baseline", action="store_true",
        help="also decode plainly, and print how many times faster speculation was")
    add("--check", action="store_true",
        help=f"certify the output: exit {EXIT_STATUS['certificate']} unless it is the target's")
    # fmt: on
    # Of Python, and the latter of --batch, alone.
    parser.set_defaults(processors=(), bad_words_ids=None, encoder_no_repeat_ngram_size=None)
    return parser


def parse(argv: Sequence[str] | None) -> Namespace:
    """The arguments, free of contradictions. Raises OutriderError("option"), or exits for --help.

    `stream` is resolved to True or False; --draft none to `gamma` 0.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    prompts = ("prompt", "prompt_file", "messages", "batch", "conversation", "audio")
    if not any(getattr(args, name) not in (None, False) for name in (*prompts, *SOURCES)):
        parser.error(
            "one of the arguments --prompt --prompt-file --messages --batch --chat --audio is "
            "required"
        )
    plain = args.draft == "none" or args.gamma == 0
    no_text = "--json" if args.json else "--batch" if args.batch else ""
    leave = "Leave one of them out."
    no_stream = no_text or args.baseline or args.beams
    files = ("prompt_file", "messages", "batch", "audio", "source_file")
    rules: list[tuple[object, str, str]] = [
        *((getattr(args, name) == "", f"--{name.replace('_', '-')} names no file", "Give one.")
          for name in files),
        (sum(getattr(args, name) == "-" for name in (*prompts, *SOURCES)) > 1,
         "standard input is read once, and two options name it", "Write one of them into a file."),
        (args.draft == "none" and args.gamma, f"--draft none contradicts --gamma {args.gamma}",
         leave),
        (args.draft not in (None, "none") and args.gamma == 0,
         f"--draft {args.draft} contradicts --gamma 0", leave),
        (args.draft in KINDS and "tables" in KINDS[args.draft].needs and args.table is None,
         f"--draft {args.draft} needs a table", "Add --table; python -m export.ngram writes one."),
        (args.color and no_text, f"--color paints text, and {no_text} prints JSON", leave),
        (args.stream and no_text, f"--stream prints text, and {no_text} prints JSON", leave),
        (args.stream and args.baseline, "--baseline measures without streaming, so that both ways "
         "of decoding are timed alike", "Leave --stream out."),
        (args.baseline and args.batch, "--baseline measures one request, and --batch has many",
         "Use --baseline with --prompt."),
        (args.check and args.batch, "--check certifies one request, and --batch has many",
         "Use --check with --prompt."),
        (args.baseline and plain, "--baseline compares with plain decoding, which this is already",
         "Use --gamma 1 or more."),
        (args.logprobs is not None and not no_text, "--logprobs is part of the JSON output",
         "Add --json."),
        ((args.draft_beams or args.length_penalty is not None) and not args.beams,
         "--draft-beams and --length-penalty are of a beam search", "Add --beams."),
        (args.draft_beams and args.beams and args.draft_beams < args.beams,
         f"--draft-beams {args.draft_beams} is narrower than --beams {args.beams}",
         "Make it at least as wide."),
        (args.beams and args.stats == "detailed",
         "--stats detailed tells of drafts at each position, which a beam search has not", leave),
        (args.messages and args.chat is False, "--messages need the chat template", leave),
        (args.conversation and args.chat is False, "--chat needs the chat template", leave),
        *((args.conversation and getattr(args, name) is not None,
           "--chat is of decoder-only models, which read no source", leave) for name in SOURCES),
        *((args.conversation and getattr(args, name) not in (None, False),
           f"--{name} is of one text, and --chat has many", leave)
          for name in ("json", "baseline", "check", "logprobs")),
        (args.conversation and args.stream is False, "--chat shows answers as they come",
         "Leave --no-stream out."),
        (args.pace and (args.stream is False or no_stream),
         "--pace is of a stream, and nothing is streamed", leave),
        *audio_rules(args, parser),
    ]  # fmt: skip
    refuse_first(rules)
    if args.stream is None:
        args.stream = not no_stream
    if plain:
        args.gamma = 0
    if not args.batch and (plain or args.draft is not None):
        refuse_unread(args, [] if plain else [args.draft])
    return args


def refuse_unread(args: Namespace, drafts: Collection[str]) -> None:
    """--corpus and --table, where none of these drafts reads them. Raises "option"."""
    all_readers = {
        "corpus": [name for name, kind in KINDS.items() if kind.reads_corpus],
        "table": [name for name, kind in KINDS.items() if "tables" in kind.needs],
    }
    refuse_first(
        (getattr(args, name) is not None and not set(readers) & set(drafts),
         f"--{name} is only read by the drafts {', '.join(readers)}",
         f"Add --draft {readers[0]} or another of them, or leave --{name} out.")
        for name, readers in all_readers.items()
    )  # fmt: skip


def options_from(args: Namespace) -> Options:
    """The options of a request, with a seed where one has a part in the text."""
    given = {f.name: getattr(args, f.name) for f in fields(Options)}
    if args.max_new_tokens is None:
        del given["max_new_tokens"]
    options = Options(**given)
    if len(dict(args.logit_bias)) < len(args.logit_bias):
        raise OutriderError("option", "--logit-bias names an id twice", "Give one number for each.")
    options = replace(options, logit_bias=tuple(args.logit_bias))
    options.check()
    if args.beams:
        more = ("stream", "color", "baseline", "check", "batch", "conversation", "corpus", "table")
        name = excluded(options, {name: getattr(args, name) for name in more})
        if name is not None:
            name = "chat" if name == "conversation" else flag(name)
            cause = f"--{name} has no meaning for a beam search"
            raise OutriderError("option", cause, "Leave it or --beams out.")
    return options if args.batch else seeded(options)


def seeded(options: Options) -> Options:
    """Every run of a command has the same seed; at temperature 0, where it has no part, 0."""
    return options.seeded() if options.temperature or options.seed else replace(options, seed=0)
