"""What the command line refuses, and when: before it loads a bundle, if possible."""

from __future__ import annotations

import pytest
from commands import Cli
from fakes import VOCAB_SIZE, make_text_engine, random_model

ONE = '{"prompt": "a"}'


@pytest.mark.parametrize(
    ("argv", "stdin", "kind", "words"),
    [
        ("--prompt-file missing.txt", None, "prompt", "cannot read missing.txt"),
        ("--prompt-file .", None, "prompt", "cannot read ."),
        ("--prompt-file /dev/zero", None, "prompt", "/dev/zero is larger than 16.0 MiB"),
        ("--prompt -", b"ab\xff", "prompt", "standard input is not UTF-8: byte 2 is 0xff"),
        ("--messages -", '[{"content": ' + "[" * 100_000, "prompt", "is not JSON"),
        ("--messages -", "[{", "prompt", "standard input is not JSON"),
        ("--messages -", "[]", "prompt", "no list of messages"),
        ("--messages -", '[{"content": "x"}]', "prompt", "message 0 has no role"),
        ("--messages - --system x", '[{"role": "system", "content": "x"}]', "option",
         "--system contradicts"),
        ("--messages - --no-chat-template", '[{"role": "user", "content": "a"}]', "option",
         "--messages needs the chat template"),
        ("--batch -", "[" * 100_000, "prompt", "line 1 of standard input is not JSON"),
        ("--batch -", "\n \n", "prompt", "has no requests"),
        ("--batch -", ONE + "\n\n{", "prompt", "line 3 of standard input"),
        ("--batch -", "[1]", "prompt", "line 1 of standard input is not a JSON object"),
        ("--batch -", '{"prompt": "a", "messages": []}', "prompt", "needs either"),
        ("--batch -", '{"prompt": "a", "prompt": "b"}', "prompt",
         "line 1 of standard input has 'prompt' more than once"),
        ("--batch -", '{"prompt": 7}', "prompt", "neither a string nor a list of token ids"),
        ("--batch -", '{"prompt": [1, true]}', "prompt", "neither a string nor"),
        ("--batch -", '{"prompt": "a", "topk": 7}', "option", "line 1 of standard input: "
         "there is no option 'topk'"),
        ("--batch -", '{"prompt": "a", "processors": []}', "option", "no option 'processors'"),
        ("--batch -", '{"prompt": "a", "top_k": "7"}', "option", "top_k='7' (str) is not an int"),
        ("--batch -", '{"prompt": "a", "logit_bias": {"5": 1, "05": 2}}', "option",
         "logit_bias names an id twice"),
        ("--batch -", f'{{"prompt": "a", "logit_bias": {{"{"9" * 5000}": 1}}}}', "option",
         "is not token ids, each with a bias"),
        ("--batch -", '{"prompt": "a", "max_new_tokens": null}', "option",
         "max_new_tokens=None (NoneType) is not an integer"),
        ("--batch - --draft none", '{"prompt": "a", "gamma": 2}', "option",
         "draft=none contradicts gamma=2"),
        ("--batch - --no-chat-template", '{"messages": [{"role": "user"}]}', "option",
         "messages need the chat template"),
        ("--batch - --color", ONE, "option", "--color applies to text"),
        ("--batch - --stream", ONE, "option", "--stream prints text"),
        ("--batch - --baseline", ONE, "option", "--batch has many"),
        ("--batch - --check", ONE, "option", "--batch has many"),
        # The second option to read found nothing: an empty prompt, or a batch without requests.
        ("--source - --prompt -", "a", "option", "two options read standard input"),
        ("--source-file - --batch -", ONE, "option", "two options read standard input"),
        ("--chat --json", "", "option", "--chat"),
        ("--chat --baseline", "", "option", "--chat"),
        ("--chat --check", "", "option", "--chat"),
        ("--chat --no-stream", "", "option", "--chat"),
    ],
)  # fmt: skip
def test_bad_prompts_are_refused_before_loading(cli, argv, stdin, kind, words):
    assert words in cli.refused(*argv.split(), kind=kind, stdin=stdin)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--draft none --gamma 3", "draft=none contradicts gamma=3"),
        ("--draft ngram --gamma 0", "draft=ngram contradicts gamma=0"),
        ("--color --json", "--color applies to text"),
        ("--stream --json", "--stream prints text"),
        ("--stream --baseline", "without streaming"),
        ("--baseline --gamma 0", "this run already decodes plainly"),
        ("--baseline --draft none", "this run already decodes plainly"),
        ("--stop=", "stop=[''] is out of range"),
        ("--logit-bias 5", "'5' is not a token id and a number"),
        ("--logit-bias 5=1 --logit-bias 5=2", "--logit-bias names an id twice"),
        ("--corpus x --draft model", "--corpus is read only by the drafts ngram"),
        ("--table x --draft ngram", "--table is read only by the drafts unigram"),
        ("--corpus x --beams 2", "--corpus has no meaning for a beam search"),
        ("--seed 0 --beams 2", "--seed has no meaning for a beam search"),
        ("--stop-token-id 3 --beams 2", "--stop-token-id has no meaning for a beam search"),
        ("--check --beams 2", "--check has no"),
        ("--draft-beams 2 --beams 3", "narrower than --beams 3"),
        ("--beams 2 --stats detailed", "which beam search does not have"),
        ("--length-penalty 0", "Add --beams"),
        ("--pace smooth --beams 2", "nothing is streamed"),
        ("--pace smooth --json", "nothing is streamed"),
        ("--chat", "not allowed with argument --prompt"),
        ("--logprobs 3", "part of the JSON output"),
        ("--system x --no-chat-template", "needs the chat template"),
        ("--chat-template x --no-chat-template", "not allowed with argument --chat-template"),
        ("--gamma 0 --verify block", "no effect in plain decoding"),
        ("--gamma 0 --fallback auto", "no effect in plain decoding"),
        ("--min-new-tokens 300", "min_new_tokens=300 exceeds"),
        ("--verify sigmoid", "not defined at temperature=0"),
        ("--top-p 0", "top_p=0.0 is out of range"),  # all other values: test_warp.py
        # Refused by argparse itself.
        ("--max-new-tokens 0", "'0' is not an integer >= 1"),
        ("--gamma often", "'often' is not an integer >= 0, auto or transformers"),
        ("--temperature warm", "invalid float value"),
        ("--verify magic", "invalid choice"),
        ("--temp 1", "unrecognized arguments: --temp"),
        ("--prompt-file x", "not allowed with argument --prompt"),
        ("--stop", "--stop: expected one argument. See "),
        ("--stop -x", "Write a value that begins with - as --stop=-x."),
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
        ("--prompt a --corpus x", "option", "--corpus is read only by"),
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
        ("--draft model", "gamma=4 with draft=model needs a draft model"),
        ("--gamma 2", "and the bundle has none"),
        ("--baseline", "without a draft this run is plain too"),
        ("--verify block", "no effect in plain decoding"),
    ):
        assert words in cli.refused("--prompt", "a", *argv.split(), loaded=True)


def test_no_prompt_at_all(cli):
    assert "one of the arguments --prompt" in cli.refused()
