"""The command line, from `main` to the streams; what only a process can show, in one."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import fakes
import pytest
from commands import PLAIN_ERROR, Cli
from fakes import EOS, UNKNOWN, VOCAB_SIZE, make_text_engine, near, random_model, script
from rounds import accept_everything

import runtime
from runtime import generate
from runtime.cli import command, output
from runtime.cli.arguments import PROGRAM, parse
from runtime.cli.report import json_line, json_object
from runtime.files.errors import EXIT_STATUS, OutriderError, Terminated
from runtime.sampling import reference

ROOT = Path(__file__).parents[2]


@pytest.fixture
def engine(tmp_path):
    target = random_model(1, never=[UNKNOWN, EOS])
    return make_text_engine(tmp_path, target, near(target, 2, 1.0), slots=2)


@pytest.fixture
def cli(engine, capsys, monkeypatch):
    return Cli(engine, capsys, monkeypatch)


@pytest.fixture
def chat_cli(tmp_path, capsys, monkeypatch):
    target = script("yes, i do.")
    engine = make_text_engine(tmp_path, target, near(target, 2, 1.0), order=None, chat=True)
    return Cli(engine, capsys, monkeypatch)


# Text and summary


def test_text_goes_to_stdout_and_the_summary_to_stderr(cli, engine):
    status, out, err = cli("--prompt", "hello", "--max-new-tokens", "30")
    assert status == 0
    assert out == engine.generate("hello", max_new_tokens=30).text + "\n"
    expected = [
        "prompt 5 tok | TTFT ", "output 30 tok | ", "rounds ", "accepted by position ",
        "time draft ", "bits: nothing is promised: ",
        "memory 6.0 MiB = target 3.0 + draft 1.0 + KV 2.0",
    ]  # fmt: skip
    for line, begins in zip(err.splitlines(), expected, strict=True):
        assert line.startswith(begins)
    assert "| finish length" in err and err.count("| gamma 4\n") == 1


def test_how_the_bundle_is_loaded(cli):
    cli("--prompt", "a", "--max-new-tokens", "1")
    usual = {"folder": Path("bundle"), "slots": None, "threads": 0, "verify": True}
    usual |= {"table": None, "corpus": None, "reuse": True, "plain_width": None}
    usual |= {"draft_model": True}
    assert cli.loaded == {**usual, "device": "auto", "graphs": True, "loop": False}
    more = "--slots 3 --threads 2 --no-verify-files --device cuda:1 --no-graphs --loop"
    cli("--prompt", "a", "--max-new-tokens", "1", *more.split())
    own = {"slots": 3, "threads": 2, "verify": False, "device": "cuda:1"}
    assert cli.loaded == {**usual, **own, "graphs": False, "loop": True}


@pytest.mark.parametrize(
    ("argv", "opened"),
    [
        ("--prompt a", True), ("--prompt a --gamma auto", True), ("--prompt a --beams 2", True),
        *((f"--prompt a --draft {kind}", kind in ("model", "chain"))
          for kind in ("model", "chain", "ngram", "copy", "random", "none")),
        ("--prompt a --draft ngram --baseline", False), ("--prompt a --draft ngram --check", False),
        ("--prompt a --gamma 0", False), ("--prompt a --beams 2 --gamma 0", False),
        ("--batch -", True), ("--batch - --draft ngram", True), ("--batch - --gamma 0", False),
    ],
)  # fmt: skip
def test_the_draft_model_is_opened_where_a_text_needs_it(cli, argv, opened):
    """Of a batch it takes one line."""
    second = "" if "--gamma" in argv else ', "draft": "model"'
    lines = f'{{"prompt": "a"}}\n{{"prompt": "a"{second}}}\n'
    cli(*argv.split(), "--max-new-tokens", "3", stdin=lines)
    assert cli.loaded["draft_model"] == opened


def test_the_draft_model_of_a_conversation(chat_cli):
    for more, opened in (((), True), (("--draft", "copy"), False)):
        chat_cli("--chat", *more, stdin="")
        assert chat_cli.loaded["draft_model"] == opened


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        ("--temperature 0.9 --seed 3 --top-k 7", {"temperature": 0.9, "top_k": 7}),
        ("--temperature 1 --seed 3 --top-p .5", {"temperature": 1, "top_p": 0.5}),
        ("--temperature 1 --seed 3 --min-p .2", {"temperature": 1, "min_p": 0.2}),
        ("--temperature 1 --seed 3 --lenience .5", {"temperature": 1, "lenience": 0.5}),
        ("--temperature 1 --seed 3 --verify block", {"temperature": 1, "verify": "block"}),
        ("--repetition-penalty 1.5", {"repetition_penalty": 1.5}),
        ("--frequency-penalty 1.5", {"frequency_penalty": 1.5}),
        ("--presence-penalty 2", {"presence_penalty": 2}),
        ("--logit-bias 9=-100 --logit-bias 5=3.5", {"logit_bias": {9: -100, 5: 3.5}}),
        ("--min-new-tokens 9", {"min_new_tokens": 9}),
        ("--stop e --stop k", {"stop": ["e", "k"]}),
        ("--stop-token-id 9 --stop-token-id 10", {"stop_token_ids": [9, 10]}),
        ("--gamma 2", {"gamma": 2}),
        ("--gamma 0", {"gamma": 0}),
        ("--draft none", {"gamma": 0}),
        ("--draft model", {}),
        ("--ignore-eos", {"ignore_eos": True}),
    ],
)
def test_options_reach_the_engine(cli, argv, options):
    _, out, _ = cli("--prompt", "hello", "--json", "--max-new-tokens", "40", *argv.split())
    expected = cli.engine.generate("hello", max_new_tokens=40, seed=3, **options)
    body = json.loads(out)
    assert body["token_ids"] == expected.token_ids
    assert body["stats"]["drafted"] == expected.stats.drafted
    assert body["finish_reason"] == expected.finish_reason
    assert body["stopped_by"] == expected.stopped_by


def test_streamed_or_not_the_text_is_the_same(cli):
    writes = []
    write = output.Output.write
    cli.monkeypatch.setattr(
        output.Output, "write", lambda self, text: (writes.append(text), write(self, text))
    )
    _, streamed, _ = cli("--prompt", "hello", "--stats", "none")
    assert len(writes) > 20
    writes.clear()
    _, whole, _ = cli("--prompt", "hello", "--stats", "none", "--no-stream")
    assert writes == [whole] == [streamed]


def test_a_random_seed_is_printed_and_repeats_the_text(cli):
    _, first, err = cli("--prompt", "hello", "--temperature", "1")
    seed = re.search(r"\| seed (\d+)\n", err)[1]
    _, other, _ = cli("--prompt", "hello", "--temperature", "1")
    _, again, _ = cli("--prompt", "hello", "--temperature", "1", "--seed", seed)
    assert first == again != other


def test_detailed_statistics(cli):
    _, _, err = cli("--prompt", "hello", "--stats", "detailed")
    assert "\ndraft 4: accepted " in err
    assert "rounds by accepted drafts  0: " in err
    assert "Theorem 3.8" not in err, "nobody timed a plain step"
    for argv in (["--baseline"], ["--gamma", "auto"]):
        _, _, err = cli("--prompt", "hello", "--stats", "detailed", *argv)
        assert re.search(r"a plain step \S+ ms \| Theorem 3.8 at alpha ", err)


def test_escape_sequences_of_stop(cli):
    given = [r"\n\n", r"a\tb", r"\\n", r"\x41\u00e9", "\n", "\\\\"]
    args = parse(["--engines", "x", "--prompt", "x", *(f"--stop={text}" for text in given)])
    assert args.stop == ["\n\n", "a\tb", r"\n", "Aé", "\n", "\\"]
    for text in (r"\d", "\\", r"\x4", r"\ud800", r"\u12"):
        assert "escape sequence" in cli.refused("--prompt", "x", "--stop", text)


def test_colors(cli):
    status, out, err = cli("--prompt", "hello", "--temperature", "1", "--seed", "1", "--color")
    painted = {"accepted": "\x1b[32m", "corrected": "\x1b[34m", "bonus": "\x1b[35m"}
    legend = err.splitlines()[0]
    pieces = [
        (piece, token.origin)
        for event in cli.engine.stream("hello", temperature=1, seed=1)
        for (piece, _), token in zip(event.pieces, event.tokens, strict=True)
    ]
    assert status == 0
    assert out == "".join(
        f"{painted[origin]}{piece}\x1b[0m" if origin in painted else piece
        for piece, origin in pieces
    ) + "\n"  # fmt: skip
    assert all(
        f"{code}{origin}\x1b[0m" in legend and code in out for origin, code in painted.items()
    )


def test_notes_on_what_is_not_exact(cli):
    argv = ("--prompt", "a", "--temperature", "1", "--stats", "none", "--max-new-tokens", "9")
    assert cli(*argv)[2] == ""
    assert re.fullmatch(
        r"note: verify=sigmoid is not exact.*\n", cli(*argv, "--verify", "sigmoid")[2]
    )
    note = cli(*argv, "--lenience", "0.5")[2]
    assert re.fullmatch(r"note: lenience=0.5 is not exact.* up to 2 times .*\n", note)


# JSON


def test_json(cli):
    status, out, _ = cli("--prompt", "hello", "--json", "--logprobs", "2", "--max-new-tokens", "5")
    body = json.loads(out)
    result = cli.engine.generate("hello", max_new_tokens=5, logprobs=2)
    assert status == 0
    assert out.count("\n") == 1
    keys = ["text", "token_ids", "finish_reason", "stopped_by", "seed", "stats", "logprobs", "bits"]
    assert list(body) == keys
    assert body["text"] == result.text
    assert body["seed"] == 0
    assert body["stats"].keys() == result.stats.summary().keys()
    assert body["logprobs"] == json.loads(json_line(json_object(result, logprobs=True)))["logprobs"]


def test_json_is_utf8_whatever_the_locale(cli, monkeypatch):
    body = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(body, encoding="ascii"))
    cli("--prompt", "a", "--json", "--max-new-tokens", "30", "--stop", "é")
    assert json.loads(body.getvalue())


def test_baseline(cli):
    status, out, err = cli("--prompt", "hello", "--baseline")
    assert status == 0
    assert out == cli.engine.generate("hello").text + "\n"
    assert re.search(
        r"\nbaseline \d+\.\d tok/s -> \d+\.\d\dx \| same tokens\nbits: .*\nmemory", err
    )
    _, out, err = cli("--prompt", "hello", "--baseline", "--json", "--temperature", "1")
    baseline = json.loads(out)["baseline"]
    assert baseline.keys() == {"tokens_per_second", "output_tokens", "speedup"}
    assert re.search(r"\nbaseline .*x \| output 256 tok\n", err)
    coupled = "--temperature 1 --top-p .9 --gamma auto --verify coupled"
    _, out, err = cli("--prompt", "hello", "--baseline", "--json", *coupled.split())
    assert json.loads(out)["baseline"]["same_tokens"] is True and "| same tokens" in err


def test_baseline_warms_both_ways_up_first(cli):
    asked = []
    run = cli.engine.stream
    cli.monkeypatch.setattr(
        cli.engine,
        "stream",
        lambda prompt, options: asked.append(options) or run(prompt, options),
    )
    cli("--prompt", "hello", "--baseline", "--temperature", "1", "--verify", "block")
    found = [(o.gamma, o.max_new_tokens) for o in asked]
    assert found == [(g, n) for n in (command.WARM_UP, 256) for g in (None, 0)]
    assert len({o.seed for o in asked}) == 1


def test_check(cli):
    status, _, err = cli("--prompt", "hello", "--check", "--stats", "none")
    assert status == 0
    assert err.startswith("certificate PASSED | temperature 0 | 256 tokens")
    argv = ("--prompt", "a", "--check", "--stats", "none", "--json", "--temperature", "1")
    status, out, _ = cli(*argv)
    assert status == 0
    assert json.loads(out)["check"]["passed"] is True


def test_a_check_that_fails(cli, monkeypatch):
    monkeypatch.setattr(reference, "verify", accept_everything)
    status, out, err = cli("--prompt", "a", "--check", "--json", "--stats", "none")
    assert status == EXIT_STATUS["certificate"]
    assert json.loads(out)["check"]["passed"] is False
    assert "certificate FAILED" in err
    assert PLAIN_ERROR.fullmatch(err.splitlines(keepends=True)[-1])


# Prompts


def test_a_file_and_standard_input(cli, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffhello\n\n".encode())
    expected = cli.engine.generate("hello\n", max_new_tokens=9).text + "\n"
    argv = ("--max-new-tokens", "9")
    assert cli("--prompt-file", str(file), *argv)[1] == expected
    assert cli("--prompt-file", "-", *argv, stdin="hello\n\n")[1] == expected
    assert cli("--prompt", "-", *argv, stdin="hello\n\r\n")[1] == expected


def test_messages_and_system(chat_cli, tmp_path):
    messages = [{"role": "user", "content": "do you"}]
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(messages))
    for argv, stdin in (
        (["--messages", str(file)], None),
        (["--messages", "-"], json.dumps(messages)),
        (["--prompt", "do you"], None),
    ):
        status, out, err = chat_cli(*argv, stdin=stdin)
        assert (status, out) == (0, "yes, i do.\n")
        assert f"prompt {len('u do you|a|')} tok" in err
    _, _, err = chat_cli("--messages", str(file), "--system", "be kind")
    assert f"prompt {len('s be kind|u do you|a|')} tok" in err
    _, _, err = chat_cli("--prompt", "do you\n", "--no-chat-template")
    assert "prompt 7 tok" in err


ONE = '{"prompt": "a"}'


@pytest.mark.parametrize(
    ("argv", "stdin", "kind", "words"),
    [
        ("--prompt-file missing.txt", None, "prompt", "cannot read missing.txt"),
        ("--prompt-file .", None, "prompt", "cannot read ."),
        ("--prompt-file /dev/zero", None, "prompt", "/dev/zero has more than 16.0 MiB"),
        ("--prompt -", b"ab\xff", "prompt", "standard input is not UTF-8: byte 2 is 0xff"),
        ("--messages -", '[{"content": ' + "[" * 100_000, "prompt", "is not JSON"),
        ("--messages -", "[{", "prompt", "standard input is not JSON"),
        ("--messages -", "[]", "prompt", "no list of messages"),
        ("--messages -", '[{"content": "x"}]', "prompt", "message 0 has no role"),
        ("--messages - --system x", '[{"role": "system", "content": "x"}]', "option",
         "--system contradicts"),
        ("--messages - --no-chat-template", '[{"role": "user", "content": "a"}]', "option",
         "--messages need"),
        ("--batch -", "[" * 100_000, "prompt", "line 1 of standard input is not JSON"),
        ("--batch -", "\n \n", "prompt", "has no requests"),
        ("--batch -", ONE + "\n\n{", "prompt", "line 3 of standard input"),
        ("--batch -", "[1]", "prompt", "line 1 of standard input is not a JSON object"),
        ("--batch -", '{"prompt": "a", "messages": []}', "prompt", "needs either"),
        ("--batch -", '{"prompt": 7}', "prompt", "neither a text nor a list of token ids"),
        ("--batch -", '{"prompt": [1, true]}', "prompt", "neither a text nor"),
        ("--batch -", '{"prompt": "a", "topk": 7}', "option", "line 1 of standard input: "
         "unknown key 'topk'"),
        ("--batch -", '{"prompt": "a", "top_k": "7"}', "option", "top_k='7' is out of range"),
        ("--batch -", '{"prompt": "a", "max_new_tokens": null}', "option",
         "max_new_tokens=None is out of range"),
        ("--batch - --draft none", '{"prompt": "a", "gamma": 2}', "option",
         "draft=none contradicts gamma=2"),
        ("--batch - --no-chat-template", '{"messages": [{"role": "user"}]}', "option",
         "messages need the chat template"),
        ("--batch - --color", ONE, "option", "--color paints text"),
        ("--batch - --stream", ONE, "option", "--stream prints text"),
        ("--batch - --baseline", ONE, "option", "--batch has many"),
        ("--batch - --check", ONE, "option", "--batch has many"),
        ("--chat --json", "", "option", "--chat"),
        ("--chat --baseline", "", "option", "--chat"),
        ("--chat --check", "", "option", "--chat"),
        ("--chat --no-stream", "", "option", "--chat"),
    ],
)  # fmt: skip
def test_bad_prompts_are_refused_before_loading(cli, argv, stdin, kind, words):
    assert words in cli.refused(*argv.split(), kind=kind, stdin=stdin)


# Refusals


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--draft none --gamma 3", "--draft none contradicts --gamma 3"),
        ("--draft ngram --gamma 0", "--draft ngram contradicts --gamma 0"),
        ("--color --json", "--color paints text"),
        ("--stream --json", "--stream prints text"),
        ("--stream --baseline", "without streaming"),
        ("--baseline --gamma 0", "which this is already"),
        ("--baseline --draft none", "which this is already"),
        ("--stop=", "stop=[''] is out of range"),
        ("--logit-bias 5", "'5' is not a token id and a number"),
        ("--logit-bias 5=1 --logit-bias 5=2", "--logit-bias names an id twice"),
        ("--corpus x --draft model", "--corpus is only read by the drafts ngram"),
        ("--table x --draft ngram", "--table is only read by the drafts unigram"),
        ("--corpus x --beams 2", "--corpus has no meaning for a beam search"),
        ("--seed 0 --beams 2", "--seed has no meaning for a beam search"),
        ("--top-k 3 --beams 2", "--top-k has no meaning for a beam search"),
        ("--check --beams 2", "--check has no"),
        ("--draft-beams 2 --beams 3", "narrower than --beams 3"),
        ("--length-penalty 0", "Add --beams"),
        ("--pace smooth --beams 2", "nothing is streamed"),
        ("--pace smooth --json", "nothing is streamed"),
        ("--chat", "not allowed with argument --prompt"),
        ("--logprobs 3", "part of the JSON output"),
        ("--system x --no-chat-template", "needs the chat template"),
        ("--gamma 0 --verify block", "no effect in plain decoding"),
        ("--gamma 0 --fallback auto", "no effect in plain decoding"),
        ("--min-new-tokens 300", "min_new_tokens=300 is over"),
        ("--verify sigmoid", "not defined at temperature=0"),
        ("--top-p 0", "top_p=0.0 is out of range"),  # all other values: test_warp.py
        # What argparse itself refuses.
        ("--max-new-tokens 0", "'0' is not a whole number from 1 up"),
        ("--gamma often", "'often' is not a whole number from 0 up, auto or transformers"),
        ("--temperature warm", "invalid float value"),
        ("--verify magic", "invalid choice"),
        ("--temp 1", "unrecognized arguments: --temp"),
        ("--prompt-file x", "not allowed with argument --prompt"),
        ("--stop", "--stop: expected one argument. See "),
        ("--stop -x", "A value that begins with - is written --stop=-x."),
    ],
)
def test_contradictions_are_refused_before_loading(cli, argv, words):
    assert words in cli.refused("--prompt", "hello", *argv.split())


@pytest.mark.parametrize(
    ("argv", "kind", "words"),
    [
        ("--prompt=", "prompt", "empty"),
        ("--prompt " + "a" * 500, "prompt", "500 tokens"),
        ("--prompt a --gamma 9", "option", "gamma=9"),
        ("--prompt a --system x", "option", "system message"),
        ("--prompt a --corpus x", "option", "--corpus is only read by"),
        ("--chat", "option", "--chat needs a chat template, and bundle has none"),
        ("--messages -", "prompt", "chat template"),
        (f"--prompt a --stop-token-id {VOCAB_SIZE}", "option", "does not exist"),
        (f"--prompt a --logit-bias {VOCAB_SIZE}=1", "option", "logit_bias: the token id"),
        ("--prompt a --json --logprobs 33", "option", "logprobs=33"),
        ("--batch -", "prompt", "line 2 of standard input: the prompt is empty"),
    ],
)
def test_what_only_the_bundle_can_refuse(cli, argv, kind, words):
    stdin = '[{"role": "user"}]' if "--messages" in argv else ONE + '\n{"prompt": ""}\n'
    assert words in cli.refused(*argv.split(), kind=kind, loaded=True, stdin=stdin)


def test_what_needs_a_draft(tmp_path, capsys, monkeypatch):
    cli = Cli(make_text_engine(tmp_path, random_model(1)), capsys, monkeypatch)
    for argv, words in (
        ("--draft model", "built without a draft"),
        ("--gamma 2", "needs a draft"),
        ("--baseline", "without a draft there is nothing else"),
        ("--verify block", "no effect in plain decoding"),
    ):
        assert words in cli.refused("--prompt", "a", *argv.split(), loaded=True)


def test_no_prompt_at_all(cli):
    assert "one of the arguments --prompt" in cli.refused()


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        generate.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"outrider {runtime.__version__}\n"


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as exit_info:
        generate.main(["--help"])
    out = capsys.readouterr().out
    assert exit_info.value.code == 0
    for words in ("examples:", "exit status:", "13 certificate", PROGRAM, "--repetition-penalty"):
        assert words in out


# Batch


def test_a_batch_answers_in_the_order_of_its_lines(cli):
    lines = [
        {"prompt": "hello", "max_new_tokens": 60},
        {"prompt": "a", "max_new_tokens": 2, "temperature": 1, "seed": 4},
        {"prompt": [5, 6], "gamma": 0},
        {"prompt": "a\u2028b", "stop": ["e"], "logprobs": 1},
        {"prompt": "b", "seed": None, "logit_bias": {"5": 9.5}},
    ]
    stdin = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    status, out, err = cli("--batch", "-", "--max-new-tokens", "9", stdin=stdin)
    assert status == 0
    answers = [json.loads(line) for line in out.removesuffix("\n").split("\n")]
    assert len(answers) == len(lines)
    for line, answer in zip(lines, answers, strict=True):
        options = {"max_new_tokens": 9, **line}
        prompt = options.pop("prompt")
        if "logit_bias" in options:
            options["logit_bias"] = {5: 9.5}
        assert answer["token_ids"] == cli.engine.generate(prompt, **options).token_ids
        assert ("logprobs" in answer) == ("logprobs" in line)
    assert err.startswith("requests 5 | prompts 12 tok | finish ")
    assert "| gamma 0-4\n" in err
    assert "done" not in err


def test_progress_on_a_terminal(cli):
    cli.monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    stdin = '{"prompt": "a"}\n' * 3
    _, _, err = cli("--batch", "-", "--stats", "none", stdin=stdin)
    assert re.match(r"\r1/3 done, \d+\.\d tok/s\x1b\[K", err)
    assert err.endswith("\r\x1b[K")


def test_a_line_that_fails_is_named_and_the_others_are_printed(cli, monkeypatch):
    failing = cli.engine.enter

    def enter(request):
        if len(request.prompt) == 3:
            raise OutriderError("numeric", "NaN in the logits", "Build it again.")
        return failing(request)

    monkeypatch.setattr(cli.engine, "enter", enter)
    stdin = '{"prompt": "a"}\n{"prompt": "abc"}\n{"prompt": "b"}\n'
    status, out, err = cli("--batch", "-", "--stats", "none", stdin=stdin)
    assert status == EXIT_STATUS["numeric"]
    bodies = [json.loads(line) for line in out.splitlines()]
    assert [body["finish_reason"] for body in bodies] == ["length", "error", "length"]
    assert bodies[1]["error"] == {"kind": "numeric", "cause": "NaN in the logits"}
    assert err == ("error: numeric: line 2 of standard input: NaN in the logits. Build it again.\n")


# Conversations


def test_a_conversation(chat_cli):
    """Every prompt has what was said before; /reset forgets it; the template is the bundle's."""
    asked = []
    stream = chat_cli.engine.stream
    chat_cli.monkeypatch.setattr(
        chat_cli.engine, "stream",
        lambda said, options: asked.append([dict(m) for m in said]) or stream(said, options),
    )  # fmt: skip
    status, out, err = chat_cli("--chat", stdin="do you\n\nreally\n/reset\nhm")
    assert (status, out) == (0, "yes, i do.\n" * 3)
    said = [[m["content"] for m in messages] for messages in asked]
    assert said == [["do you"], ["do you", "yes, i do.", "really"], ["hm"]]
    assert [m["role"] for m in asked[1]] == ["user", "assistant", "user"]
    assert err.count("| output 11 tok |") == 3


def test_a_template_may_be_the_messages_alone(tmp_path, capsys, monkeypatch):
    """Fault: --chat asks first whether its options can be run, with a message that has no text."""
    monkeypatch.setattr(fakes, "CHAT_TEMPLATE", "{{ messages[-1].content }}")
    engine = make_text_engine(tmp_path, script("yes, i do."), order=None, chat=True)
    status, out, _ = Cli(engine, capsys, monkeypatch)("--chat", "--gamma", "0", stdin="do you\n")
    assert status == 0 and out.endswith("do.\n")


def test_a_message_that_is_refused_is_not_said(chat_cli):
    stdin = "x" * 500 + "\ndo you\n"
    status, out, err = chat_cli("--chat", "--stats", "none", stdin=stdin)
    assert (status, out) == (0, "yes, i do.\n")
    assert err.startswith("error: prompt: the prompt has ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("how", [KeyboardInterrupt, Terminated])
def test_an_answer_that_is_interrupted_stays_as_far_as_it_came(chat_cli, how):
    """Fault: SIGTERM ends the answer alone."""
    stream, asked = chat_cli.engine.stream, []

    def interrupted(said, options):
        asked.append([dict(message) for message in said])
        running = stream(said, options)
        if len(asked) == 1:
            advance = running._advance

            def once():
                if running.text:
                    raise how
                return advance()

            running._advance = once
        return running

    chat_cli.monkeypatch.setattr(chat_cli.engine, "stream", interrupted)
    status, out, _ = chat_cli("--chat", stdin="do you\nwell\n")
    if how is Terminated:
        assert (status, len(asked)) == (143, 1)
        return
    partial, whole = out.splitlines()
    assert (status, whole) == (0, "yes, i do.")
    assert whole.startswith(partial) and partial != whole
    assert asked[1][1] == {"role": "assistant", "content": partial}
    assert chat_cli.engine.decoder.slots.free == 1


# Failures while running


def test_an_error_in_the_middle_keeps_the_text(cli):
    class Broken(type(cli.engine.decoder.target)):
        def forward(self, *arguments, **options):
            if len(self.calls) > 5:
                raise OutriderError("numeric", "NaN in the logits", "Build it again.")
            return super().forward(*arguments, **options)

    cli.engine.decoder.target.__class__ = Broken
    status, out, err = cli("--prompt", "hello")
    assert status == EXIT_STATUS["numeric"]
    assert len(out) > 5
    assert out.endswith("\n")
    assert err == "error: numeric: NaN in the logits. Build it again.\n"
    assert cli.engine.decoder.slots.free == 2


def test_memory(cli, monkeypatch):
    def load(*_arguments, **_options):
        raise MemoryError

    monkeypatch.setattr(command, "load", load)
    status, _, err = cli("--prompt", "a")
    assert status == EXIT_STATUS["memory"] and PLAIN_ERROR.fullmatch(err)


SLOW = """
    import pathlib, signal, sys, time
    sys.path[:0] = [{root!r}, {tests!r}]
    from fakes import make_text_engine, random_model
    from runtime import generate
    from runtime.cli import command
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = random_model(1, never=[1])
    def slow(context):
        time.sleep({pause})
        return model(context)
    engine = make_text_engine(pathlib.Path({folder!r}), slow)
    command.load = lambda *_, **__: engine
    sys.exit(generate.main(["--engines", "x", "--prompt", "a", *sys.argv[1:]]))
"""


def process(folder, *argv, pause=0.0, **streams):
    code = SLOW.format(
        root=str(ROOT), tests=str(ROOT / "tests" / "support"), folder=str(folder), pause=pause
    )
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *argv],
        stderr=subprocess.PIPE,
        **streams,
    )


def test_ctrl_c_keeps_what_was_streamed(tmp_path):
    with process(tmp_path, pause=0.01, stdout=subprocess.PIPE) as child:
        first = child.stdout.read(3)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert err == b"\ninterrupted\n"
    assert len(first + out) >= 3


def test_a_closed_pipe_ends_quietly(tmp_path):
    with process(tmp_path, pause=0.005, stdout=subprocess.PIPE) as child:
        child.stdout.read(3)
        child.stdout.close()
        err = child.stderr.read()
        child.wait(timeout=20)
    assert (child.returncode, err) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(tmp_path, cli, monkeypatch):
    with open("/dev/full", "w") as full, process(tmp_path, stdout=full) as child:
        _, err = child.communicate(timeout=20)
    assert child.returncode == EXIT_STATUS["disk"]
    last = err.decode().splitlines()[-1]
    assert last.startswith("error: disk: cannot write to stdout: No space left on device. ")
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert cli("--prompt", "a", "--json")[0] == EXIT_STATUS["disk"]


def test_closed_streams(cli, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert cli("--prompt", "a")[0] == EXIT_STATUS["disk"]
    monkeypatch.setattr(sys, "stderr", None)
    status, out, _ = cli("--prompt", "a", "--max-new-tokens", "5")
    assert (status, out) == (0, cli.engine.generate("a", max_new_tokens=5).text + "\n")
