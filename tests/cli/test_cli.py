"""The command line, from `main` to its output: text, summaries, JSON, prompts, batches."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from commands import PLAIN_ERROR
from rounds import accept_everything

import runtime
from runtime import generate
from runtime.cli import command, output
from runtime.cli.arguments import PROGRAM, parse
from runtime.cli.report import json_line, json_object
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.sampling import reference


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
    usual |= {"draft_model": True, "chat_template": None}
    assert cli.loaded == {**usual, "device": "auto", "graphs": True}
    more = "--slots 3 --threads 2 --no-verify-files --device cuda:1 --no-graphs"
    cli("--prompt", "a", "--max-new-tokens", "1", *more.split(), "--chat-template", "x")
    own = {"slots": 3, "threads": 2, "verify": False, "device": "cuda:1"}
    own |= {"chat_template": Path("x")}
    assert cli.loaded == {**usual, **own, "graphs": False}


@pytest.mark.parametrize(
    ("argv", "opened"),
    [
        ("--prompt a", True), ("--prompt a --gamma auto", True),
        ("--prompt a --beams 2 --gamma 2", True),
        *((f"--prompt a --draft {kind}", kind in ("model", "chain"))
          for kind in ("model", "chain", "ngram", "copy", "random", "none")),
        ("--prompt a --draft ngram --baseline", False), ("--prompt a --draft ngram --check", False),
        ("--prompt a --gamma 0", False), ("--prompt a --beams 2", False),
        ("--batch -", True), ("--batch - --draft ngram", True), ("--batch - --gamma 0", False),
    ],
)  # fmt: skip
def test_the_draft_model_is_opened_where_a_text_needs_it(cli, argv, opened):
    """In a batch, a single line is enough."""
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
    for pace in ("smooth", "burst"):
        assert cli("--prompt", "hello", "--stats", "none", "--pace", pace)[:2] == (0, whole)


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
    assert "Theorem 3.8" not in err, "no plain step was timed"
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
        cli.engine, "stream", lambda prompt, options: asked.append(options) or run(prompt, options)
    )
    cli("--prompt", "hello", "--baseline", "--temperature", "1", "--verify", "block")
    found = [(o.gamma, o.max_new_tokens) for o in asked]
    assert found == [(g, n) for n in (command.WARM_UP_TOKENS, 256) for g in (None, 0)]
    assert len({o.seed for o in asked}) == 1


def test_check(cli):
    status, _, err = cli("--prompt", "hello", "--check", "--stats", "none")
    assert status == 0
    assert "certificate PASSED | temperature 0 | 256 tokens" in err
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


def test_a_check_of_a_text_in_which_nothing_is_drafted(cli):
    """Fault: FAILED, and the remedy was to leave out options that had not been given."""
    status, _, err = cli("--prompt", "a", "--check", "--max-new-tokens", "1")
    assert status == EXIT_STATUS["certificate"]
    assert "certificate NOT POSSIBLE" in err and "FAILED" not in err
    assert "Generate a longer text, or use --draft none" in err


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
    rounds = cli.engine.decoder.rounds
    read = rounds.read_prompt

    def failing(sequence):
        if len(sequence.request.prompt) == 3:
            raise OutriderError("numeric", "NaN in the logits", "Build it again.")
        return read(sequence)

    monkeypatch.setattr(rounds, "read_prompt", failing)
    stdin = '{"prompt": "a"}\n{"prompt": "abc"}\n{"prompt": "b"}\n'
    status, out, err = cli("--batch", "-", "--stats", "none", stdin=stdin)
    assert status == EXIT_STATUS["numeric"]
    bodies = [json.loads(line) for line in out.splitlines()]
    assert [body["finish_reason"] for body in bodies] == ["length", "error", "length"]
    assert bodies[1]["error"] == {"kind": "numeric", "cause": "NaN in the logits"}
    assert err == ("error: numeric: line 2 of standard input: NaN in the logits. Build it again.\n")
