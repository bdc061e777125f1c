"""The examples run when a user copies them. For code in the documents see test_documents.py."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path

from commands import CHECKOUT

from runtime import Result, TextEngine, load
from runtime.audio.transcription import Segment, SpeechOptions
from runtime.drafts.registry import KINDS
from runtime.files.errors import EXIT_STATUS
from runtime.text.options import Options
from runtime.text.results import Event
from runtime.text.speech import Transcription

SERVERS = {"ray_serve", "server"}  # tests/serving/ tests them and openai/, their interface
FOLDER = CHECKOUT / "examples"
PAGE = (FOLDER.parent / "docs" / "python.md").read_text(encoding="utf-8")
MODULES = {path.stem for path in FOLDER.glob("*.py")}
EXAMPLES = sorted(MODULES - SERVERS)


def test_there_are_examples() -> None:
    assert (
        EXAMPLES == ["batch", "generate", "json_schema", "own_draft", "stream"]
        and MODULES > SERVERS
    )


RUN = """
import runpy, sys
bundle, *examples = sys.argv[1:]
for path in examples:
    sys.argv = [path, bundle]
    runpy.run_path(path, run_name="__main__")
    print(end="\\f")
"""


def test_they_run(llama_bundle: Path, tmp_path: Path) -> None:
    """Copied to another folder, as a user's own; in one process, since imports take longest."""
    copies = [shutil.copy(FOLDER / f"{name}.py", tmp_path) for name in EXAMPLES]
    command = [sys.executable, "-c", RUN, str(llama_bundle), *map(str, copies)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outputs = dict(zip(EXAMPLES, done.stdout.split("\f")[:-1], strict=True))
    assert all(text.strip() for text in outputs.values())
    assert json.loads(outputs["json_schema"].split("\n")[0]).keys() == {"name", "age", "tags"}
    for name in ("json_schema", "own_draft"):
        assert "same text as without drafts: True" in outputs[name]


def test_the_page_names_all_that_there_is() -> None:
    named = set(re.findall(r'`"?(\w+)', PAGE))
    records = (Options, Result, Event, Transcription, Segment)
    there = {field.name for record in records for field in fields(record)}
    there |= {name for record in records for name in vars(record) if name[0] != "_"}
    there |= {*KINDS, *EXIT_STATUS, *[*signature(load).parameters][1:]}
    there |= {field.name for field in fields(SpeechOptions)}
    there |= {"generate", "stream", "batch", "transcribe", "stats", "close"} & {*vars(TextEngine)}
    inside = {"seeded", "updated", "sampling", "plain", "check", "check_plain"}
    assert sorted(there - inside - named) == []
