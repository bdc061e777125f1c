"""The command line's arguments: the parser, the combinations it refuses, and `Options` from them.

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
from ..beam.text import unsupported_option
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
Generate text with exact speculative decoding: a draft model proposes tokens, the target model
verifies them, and the output has exactly the target's distribution. The text goes to stdout,
statistics and messages to stderr."""

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
  {PROGRAM} --engines build/qwen --prompt "..." --color        # which tokens came from the draft?
  {PROGRAM} --engines build/qwen --batch in.jsonl --slots 4 > out.jsonl
  {PROGRAM} --engines build/t5 --source "translate English to German: Good day."
  {PROGRAM} --engines build/whisper --audio talk.wav --format srt > talk.srt

exit status:
  0 success, also if the reader of stdout exits early (| head); 130 Ctrl-C; 143 SIGTERM;
  on failure, the status of the kind of error, as in the line `error: <kind>: ...` on stderr:
  {_STATUSES}"""


def _integer(least: int, *names: str) -> Callable[[str], Any]:
    """A converter of integers. names: values accepted instead of a number."""

    def convert(text: str) -> int | str:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least and text not in names:
            more = f", {' or '.join(names)}" if names else ""
            raise ArgumentTypeError(f"{text!r} is not an integer >= {least}{more}")
        return text if text in names else value

    return convert


def _token_bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return _integer(0)(token), float(value)
    except (ArgumentTypeError, ValueError):
        raise ArgumentTypeError(f"{text!r} is not a token id and a number, as ID=X") from None


def _unescape(text: str) -> str:
    """A stop string with its escape sequences replaced."""

    def character(match: re.Match[str]) -> str:
        sequence = match[1]
        if sequence in ESCAPES:
            return ESCAPES[sequence]
        if len(sequence) > 1 and int(sequence[1:], 16) not in range(0xD800, 0xE000):
            return chr(int(sequence[1:], 16))
        raise ArgumentTypeError(
            f"{text!r}: unknown escape sequence \\{sequence}; known are \\n \\t \\r \\xHH "
            r"\uHHHH, and \\ for a backslash"
        )

    return re.sub(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.|$)", character, text, flags=re.DOTALL)


def _parser() -> ArgumentParser:
    parser = CommandParser(
        prog=PROGRAM, description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False
    )
    # fmt: off
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    add = parser.add_argument_group("engines").add_argument
    add("--engines", type=Path, required=True, metavar="DIR",
        help="bundle written by `make engines`")
    add("--slots", type=_integer(1), metavar="N",
        help="number of sequences decoded at a time (default: the bundle's)")
    add("--threads", type=_integer(0), default=0, metavar="N",
        help="CPU threads per model (default: 0, chosen by the backend)")
    add("--plain-width", type=_integer(1), metavar="N",
        help="smallest number of tokens per call of the target (default: 1 or 2, whichever makes "
        "the output the same for every gamma). Where the default is 2, 1 makes plain decoding on "
        "the CPU a few percent faster, but the output is then the same only for the same gamma")
    add("--device", default="auto", metavar="D",
        help="auto, cpu, cuda or cuda:N (default: auto, the device that the bundle was compiled "
        "for; the CPU if BACKEND=onnxruntime)")
    add("--no-graphs", action="store_false", dest="graphs",
        help="on a GPU, launch each call separately instead of each round as one CUDA graph")
    add("--table", type=Path, metavar="FILE.npz",
        help="token counts written by `python -m export.ngram`, for --draft unigram, bigram and "
        "skip")
    add("--corpus", type=Path, metavar="FILE",
        help="UTF-8 text file that lookup drafts (--draft ngram, copy, chain) also search")
    add("--no-verify-files", action="store_false", dest="verify_files",
        help="skip the hash check of the bundle's files: an edited or damaged file may then give "
        "wrong text without an error")

    group = parser.add_argument_group(
        "prompt", "One of --prompt, --prompt-file, --messages, --batch, --chat and --audio is "
        "required;\n--source or --source-file suffices for encoder-decoders. The value - reads "
        "standard input.\nOne final newline of a file or of standard input is dropped.")
    add = group.add_mutually_exclusive_group().add_argument
    add("--prompt", metavar="TEXT", help="prompt text")
    add("--prompt-file", metavar="FILE", help="UTF-8 text file with the prompt")
    add("--messages", metavar="FILE.json",
        help='JSON file of chat messages: [{"role": ..., "content": ...}, ...]')
    add("--batch", metavar="FILE.jsonl",
        help='file with one request per line: {"prompt": ...}, {"messages": [...]} or '
        '{"source": ...}, plus any generation option by its Python name (max_new_tokens); prints '
        "one JSON line per request, in the same order. A file with an invalid request is refused "
        "before anything runs")
    add("--chat", action="store_true", dest="conversation",
        help="chat in the terminal: Ctrl-C stops an answer, /reset starts a new conversation, "
        "Ctrl-D exits")
    add("--audio", metavar="FILE",
        help="recording to transcribe with a Whisper model: WAV, FLAC and others, of any length")
    add = group.add_mutually_exclusive_group().add_argument
    add("--source", metavar="TEXT",
        help="input to the encoder of an encoder-decoder, such as a text to translate; --prompt is "
        "then optional and begins the output")
    add("--source-file", metavar="FILE", help="UTF-8 text file with the source")
    add = group.add_argument
    add("--system", metavar="TEXT", help="system message, placed before the prompt or messages")
    add = group.add_mutually_exclusive_group().add_argument
    add("--chat-template", type=Path, metavar="FILE",
        help="file with the Jinja source of a chat template, which replaces the checkpoint's")
    add("--no-chat-template", action="store_const", const=False, dest="chat",
        help="pass the prompt to the model unchanged (default: as a user message if there is a "
        "chat template)")
    add = group.add_argument
    add("--special-tokens", choices=("control", "text"), default="control",
        help="how to treat special tokens that are spelled out in a prompt or message: as control "
        "tokens, as Transformers does, or as ordinary text (default: control)")

    add_options(parser)

    add = parser.add_argument_group("length").add_argument
    add("--max-new-tokens", type=_integer(1), metavar="N",
        help="maximum number of new tokens (default: 256; with --audio, as many as fit, per "
        "window)")
    add("--min-new-tokens", type=_integer(0), metavar="N",
        help="minimum number of new tokens before end-of-text (default: the checkpoint's, or 0)")
    add("--stop", type=_unescape, action="append", default=[], metavar="TEXT",
        help=r"stop before this text; repeatable; recognises the escapes \n \t \r \xHH \uHHHH \\")
    add("--stop-token-id", type=_integer(0), action="append", default=[], metavar="ID",
        dest="stop_token_ids", help="stop at this token; repeatable")
    add("--ignore-eos", action="store_true", help="continue after end-of-text")

    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T",
        help="sampling temperature (default: 0, always the most probable token, whatever top-k, "
        "top-p and min-p are)")
    add("--top-k", type=_integer(0), default=0, metavar="K",
        help="keep only the K most probable tokens (default: 0, off)")
    add("--top-p", type=float, default=1.0, metavar="P",
        help="keep only the most probable tokens that together reach probability P (default: 1, "
        "off)")
    add("--min-p", type=float, default=0.0, metavar="P",
        help="keep only tokens with at least P times the probability of the most probable one "
        "(default: 0, off)")
    add("--repetition-penalty", type=float, default=1.0, metavar="X",
        help="penalise tokens that occur in the prompt or output by a factor of X, as in "
        "Transformers (default: 1, off)")
    add("--frequency-penalty", type=float, default=0.0, metavar="X",
        help="subtract X from a token's logit for each time it occurs in the output (default: 0, "
        "off)")
    add("--presence-penalty", type=float, default=0.0, metavar="X",
        help="subtract X once from the logit of each token that occurs in the output (default: 0, "
        "off)")
    add("--no-repeat-ngram-size", type=_integer(0), metavar="N",
        help="never repeat a sequence of N tokens from the prompt or output (default: the "
        "checkpoint's, or 0, off)")
    add("--logit-bias", type=_token_bias, action="append", default=[], metavar="ID=X",
        help="add X, from -100 to 100, to the logit of token ID; repeatable")
    add("--seed", type=_integer(0), metavar="N",
        help="random seed (default: drawn at random, and printed)")

    add = parser.add_argument_group("speculation").add_argument
    add("--gamma", type=_integer(0, *get_args(GammaName)), metavar="N",
        help="draft tokens per round; 0 is plain decoding; auto picks the fastest number for each "
        "round from measured costs and acceptance; transformers follows that library's schedule "
        "(default: 4 if the draft is a model, otherwise 8; 0 without a draft)")
    add("--fallback", choices=("auto", "off"), default="off",
        help="auto: decode without drafts while they lose time, as --gamma auto always does "
        "(default: off, since with choices based on timing a seed reproduces its text only with "
        "--verify coupled)")
    add("--draft", choices=(*KINDS, "none"), metavar="KIND",
        help="where draft tokens come from. "
        + "; ".join(f"{k}: {KINDS[k].help}" for k in KINDS).replace("%", "%%")
        + "; none: plain decoding (default: as the bundle was built). The draft model is loaded "
        "only if a request may need it")
    add("--draft-temperature", type=float, metavar="T",
        help="sampling temperature of the draft (default: the target's); remains exact")
    add("--draft-threshold", type=float, default=0.0, metavar="P",
        help="stop a round's drafting after a token to which the draft gives a probability below P "
        "(default: 0, off); remains exact")
    add("--verify", choices=get_args(VerifyRule), default="token",
        help="acceptance rule: token, block (accepts more) and coupled (the seed alone determines "
        "the text, whatever is drafted, also with --gamma 0) are exact; sigmoid is not (default: "
        "token)")
    add("--lenience", type=float, default=1.0, metavar="L",
        help="values below 1 accept more drafts and are not exact: a token may be drawn with up to "
        "1/L times its probability (default: 1)")

    add = parser.add_argument_group(
        "beam search", "Search for the most probable text instead of sampling. With --gamma, a "
        "wider beam of the draft runs ahead; the result is the same.").add_argument
    add("--beams", type=_integer(1), metavar="W", help="beam width of the target")
    add("--draft-beams", type=_integer(1), metavar="U",
        help="beam width of the draft, at least W (default: twice W)")
    add("--length-penalty", type=float, metavar="X",
        help="rank results by log-probability / length^X (default: 1, the mean per token)")

    add = parser.add_argument_group("output").add_argument
    add("--stream", action=BooleanOptionalAction,
        help="print text as it is generated (default, except with --json, --batch, --baseline and "
        "--beams)")
    add("--pace", choices=("burst", "smooth"),
        help="when streaming, burst shows a round's text at once, smooth spreads it over the time "
        "until the next round is expected (default: burst)")
    add("--color", action="store_true",
        help="show accepted draft tokens, corrections and bonus tokens in three colours")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add("--logprobs", type=_integer(0), metavar="N",
        help="with --json or --batch: report the log-probability of each token under the target, "
        "before any sampling options, and those of the N most probable tokens")
    add("--stats", choices=("none", "summary", "detailed"), default="summary",
        help="statistics on stderr (default: summary); detailed includes Theorem 3.8 if a plain "
        "step was timed, by --baseline or --gamma auto")
    add("--baseline", action="store_true",
        help="also run plain decoding, and print the speedup over it")
    add("--check", action="store_true",
        help="certify that the output is the target's; exit with status "
        f"{EXIT_STATUS['certificate']} if it is not")
    # fmt: on
    # These have no option: the first is for Python only, the others also for --batch.
    parser.set_defaults(processors=(), bad_words_ids=None, encoder_no_repeat_ngram_size=None)
    return parser


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the arguments and refuse contradictory ones. Raises OutriderError("option"), or exits
    for --help.

    `stream` is resolved to True or False.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    prompts = ("prompt", "prompt_file", "messages", "batch", "conversation", "audio")
    if not any(getattr(args, name) not in (None, False) for name in (*prompts, *SOURCES)):
        parser.error(
            "one of the arguments --prompt --prompt-file --messages --batch --chat --audio "
            "--source --source-file is required"
        )
    plain = args.draft == "none" or args.gamma == 0
    no_text = "--json" if args.json else "--batch" if args.batch else ""
    leave = "Leave one of them out."
    no_stream = no_text or args.baseline or args.beams
    files = ("prompt_file", "messages", "batch", "audio", "source_file")
    rules: list[tuple[object, str, str]] = [
        *((getattr(args, name) == "", f"--{flag(name)}: the file name is empty",
           "Name a file.")
          for name in files),
        (sum(getattr(args, name) == "-" for name in (*prompts, *SOURCES)) > 1,
         "two options read standard input, which can be read only once",
         "Write one of them to a file."),
        (args.draft in KINDS and "tables" in KINDS[args.draft].needs and args.table is None,
         f"--draft {args.draft} needs a table", "Add --table; python -m export.ngram writes one."),
        (args.color and no_text, f"--color applies to text, and {no_text} prints JSON", leave),
        (args.stream and no_text, f"--stream prints text, and {no_text} prints JSON", leave),
        (args.stream and args.baseline, "--baseline measures without streaming, so that both ways "
         "of decoding are timed alike", "Leave --stream out."),
        (args.baseline and args.batch, "--baseline measures one request, and --batch has many",
         "Use --baseline with --prompt."),
        (args.check and args.batch, "--check certifies one request, and --batch has many",
         "Use --check with --prompt."),
        (args.baseline and plain, "--baseline compares with plain decoding, and this run already "
         "decodes plainly", "Use --gamma 1 or more."),
        (args.logprobs is not None and not no_text, "--logprobs is part of the JSON output",
         "Add --json."),
        ((args.draft_beams or args.length_penalty is not None) and not args.beams,
         "--draft-beams and --length-penalty are options of beam search", "Add --beams."),
        (args.draft_beams and args.beams and args.draft_beams < args.beams,
         f"--draft-beams {args.draft_beams} is narrower than --beams {args.beams}",
         "Make it at least as wide."),
        (args.beams and args.stats == "detailed",
         "--stats detailed reports acceptance by draft position, which beam search does not have",
         leave),
        (args.messages and args.chat is False, "--messages needs the chat template", leave),
        (args.conversation and args.chat is False, "--chat needs the chat template", leave),
        *((args.conversation and getattr(args, name) is not None,
           "--chat is for decoder-only models, which read no source", leave) for name in SOURCES),
        *((args.conversation and getattr(args, name) not in (None, False),
           f"--{name} applies to one request, and --chat has many", leave)
          for name in ("json", "baseline", "check", "logprobs")),
        (args.conversation and args.stream is False, "--chat streams its answers",
         "Leave --no-stream out."),
        (args.pace and (args.stream is False or no_stream),
         "--pace applies to streaming, and nothing is streamed", leave),
        *audio_rules(args, parser),
    ]  # fmt: skip
    refuse_first(rules)
    if args.stream is None:
        args.stream = not no_stream
    if not args.batch and (plain or args.draft is not None):
        refuse_unread(args, [] if plain else [args.draft])
    return args


def refuse_unread(args: Namespace, drafts: Collection[str]) -> None:
    """Refuse --corpus and --table if none of these drafts reads them. Raises "option"."""
    all_readers = {
        "corpus": [name for name, kind in KINDS.items() if kind.reads_corpus],
        "table": [name for name, kind in KINDS.items() if "tables" in kind.needs],
    }
    refuse_first(
        (getattr(args, name) is not None and not set(readers) & set(drafts),
         f"--{name} is read only by the drafts {', '.join(readers)}",
         f"Add --draft {readers[0]} or another of them, or leave --{name} out.")
        for name, readers in all_readers.items()
    )  # fmt: skip


def options_from(args: Namespace) -> Options:
    """The options of a request, with a seed if the text depends on one."""
    if len(dict(args.logit_bias)) < len(args.logit_bias):
        raise OutriderError("option", "--logit-bias names an id twice", "Name each id once.")
    given = {f.name: getattr(args, f.name) for f in fields(Options)}
    given["logit_bias"] = tuple(args.logit_bias)
    if args.max_new_tokens is None:
        del given["max_new_tokens"]
    if args.beams and args.gamma is None:
        given["gamma"] = 0
    options = Options(**given)
    options.check()
    if args.beams:
        more = ("stream", "color", "baseline", "check", "batch", "conversation", "corpus", "table")
        name = unsupported_option(options, {name: getattr(args, name) for name in more})
        if name is not None:
            cause = f"--{flag(name)} has no meaning for a beam search"
            raise OutriderError("option", cause, "Leave it or --beams out.")
    return options if args.batch else seeded(options)


def seeded(options: Options) -> Options:
    """Options with one seed for all runs of a command; 0 at temperature 0, which uses none."""
    return options.seeded() if options.temperature or options.seed else replace(options, seed=0)
