"""`--chat`: the messages sent, the history, and interrupted answers."""

from __future__ import annotations

import os
import sys

import fakes
import pytest
from commands import Cli
from fakes import make_text_engine, script

from runtime.files.errors import EXIT_STATUS, Terminated


def test_a_conversation(chat_cli):
    """Every prompt contains the history; /reset clears it; the template is the bundle's."""
    asked = []
    stream = chat_cli.engine.stream
    chat_cli.monkeypatch.setattr(
        chat_cli.engine, "stream",
        lambda talk, options: asked.append([dict(m) for m in talk]) or stream(talk, options),
    )  # fmt: skip
    stdin = "do you\n\nreally\n/reset\nhm"
    status, out, err = chat_cli("--chat", "--stats", "detailed", stdin=stdin)
    assert (status, out) == (0, "yes, i do.\n" * 3)
    contents = [[m["content"] for m in messages] for messages in asked]
    assert contents == [["do you"], ["do you", "yes, i do.", "really"], ["hm"]]
    assert [m["role"] for m in asked[1]] == ["user", "assistant", "user"]
    assert err.count("| output 11 tok |") == err.count("ms  target prefill") == 3


def test_a_template_may_be_the_messages_alone(tmp_path, capsys, monkeypatch):
    """Fault: --chat was refused, because it checked its options with a message without text."""
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


def test_a_message_that_is_not_utf_8(chat_cli):
    """Fault: the messages beside it were lost too, including those before it."""
    stdin = b"do you\n\xff\nreally\n"
    status, out, err = chat_cli("--chat", "--stats", "none", stdin=stdin)
    assert (status, out) == (0, "yes, i do.\n" * 2)
    assert err == "error: prompt: the message is not UTF-8. Type it again.\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_conversation(chat_cli):
    """Fault: the answers after the first were lost without an error, and the status was 0."""
    with open("/dev/full", "w") as full, chat_cli.monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        status, _, err = chat_cli("--chat", "--stats", "none", stdin="do you\nreally\n")
    assert status == EXIT_STATUS["disk"]
    assert err.startswith("error: disk: cannot write to stdout: ") and err.count("\n") == 1


@pytest.mark.parametrize("how", [KeyboardInterrupt, Terminated])
def test_an_answer_that_is_interrupted_stays_as_far_as_it_came(chat_cli, how):
    """Fault: SIGTERM ends only the answer, not the conversation."""
    stream, asked = chat_cli.engine.stream, []

    def interrupted(talk, options):
        asked.append([dict(message) for message in talk])
        running = stream(talk, options)
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
