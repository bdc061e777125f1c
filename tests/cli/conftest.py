"""The command line with an engine whose models are fakes."""

from __future__ import annotations

import pytest
from commands import Cli
from fakes import EOS, UNKNOWN, make_text_engine, near, random_model, script


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
