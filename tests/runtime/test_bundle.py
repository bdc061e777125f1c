"""A bundle is complete or refused, and written completely or not at all.

A damaged folder is refused in one line when it is opened; a failure while a folder is written
leaves the disk unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from commands import CHECKOUT, error_line, leftovers, run
from fakes import edited
from workshop import MAX_LEN, Workshop, traced_once

import export.compare
import export.part
from engines.bundle import build
from export.pair import export as export_pair
from runtime import Options, beam_texts, generate, load
from runtime.files.errors import EXIT_STATUS, OutriderError, run_command
from runtime.files.folders import write_folder
from runtime.files.graphs import PAIR_FILE, file_facts, read_pair
from runtime.files.manifest import MANIFEST_FILE, read_bundle
from runtime.files.records import SCHEMA, write_json
from runtime.round import HostRounds


@pytest.fixture
def bundle(llama_bundle: Path, tmp_path: Path) -> Path:
    """A copy without links into the cache."""
    return Path(shutil.copytree(llama_bundle, tmp_path / "bundle"))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# Reading


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda bundle: (bundle / name).write_bytes(change((bundle / name).read_bytes()))


def _flip(name: str) -> Callable[[Path], object]:
    """Flip one bit in the middle."""
    return _bytes(
        name, lambda c: c[: len(c) // 2] + bytes([c[len(c) // 2] ^ 1]) + c[len(c) // 2 + 1 :]
    )


def _truncate(name: str) -> Callable[[Path], object]:
    return _bytes(name, lambda content: content[: len(content) // 2])


def _only_config(bundle: Path) -> None:
    shutil.rmtree(bundle)
    bundle.mkdir()
    (bundle / "config.json").write_text("{}")


# test_manifest.py tests nonsense in the manifest's fields.
DAMAGE = {
    "truncated manifest": (_truncate(MANIFEST_FILE), "truncated or edited"),
    "binary manifest": (_bytes(MANIFEST_FILE, lambda _: b"\xff\x00\xfe"), "not UTF-8"),
    "a list": (_bytes(MANIFEST_FILE, lambda _: b"[]"), "not a manifest file"),
    "other kind": (edited(lambda c: c.update(kind="pair")), "not a manifest file"),
    "older schema": (edited(lambda c: c.update(schema=SCHEMA - 1)), f"schema {SCHEMA - 1}"),
    "newer schema": (edited(lambda c: c.update(schema=SCHEMA + 1)), f"schema {SCHEMA + 1}"),
    "edited": (edited(lambda c: c["facts"].update(slots=7), checksum=False), "checksum"),
    "no checksum": (edited(lambda c: c.pop("checksum"), checksum=False), "checksum"),
    "unknown field": (edited(lambda c: c["facts"].update(odd=1)), "odd"),
    "missing field": (edited(lambda c: c["facts"].pop("slots")), "slots"),
    "wrong type": (edited(lambda c: c["facts"].update(slots="1")), "slots"),
    "gamma out of range": (
        edited(lambda c: c["facts"]["pair"].update(max_gamma=65)),
        "max_gamma is 65, not from 1 to 64",
    ),
    "a short slot": (
        edited(lambda c: c["facts"]["pair"].update(max_len=c["facts"]["pair"]["capacity"] - 1)),
        "contradicts itself about its sizes",
    ),
    "files elsewhere": (
        edited(lambda c: c["facts"]["files"].update({"../x": {"size": 1, "sha256": "0"}})),
        "not a path inside the folder",
    ),
    "unknown backend": (edited(lambda c: c["facts"].update(backend="tensorrt")), "tensorrt"),
    "edited graph": (_flip("target/graph.onnx"), "its hash differs"),
    "edited weights": (_flip("draft/weights.bin"), "its hash differs"),
    "edited tokenizer": (_flip("tokenizer/tokenizer.json"), "its hash differs"),
    "truncated weights": (_truncate("target/weights.bin"), "truncated or replaced"),
    "missing weights": (lambda b: (b / "target/weights.bin").unlink(), "is missing"),
    "no manifest": (lambda b: (b / MANIFEST_FILE).unlink(), "not a bundle"),
    "no folder": (shutil.rmtree, "is not a folder"),
    "Hugging Face folder": (_only_config, "is a Hugging Face checkpoint"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_bundle_is_refused_in_one_line(
    bundle: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, words = DAMAGE[what]
    damage(bundle)
    kind = "backend" if what == "unknown backend" else "bundle"
    assert generate.main(["--engines", str(bundle), "--prompt", "x"]) == EXIT_STATUS[kind]
    cause = error_line(capsys.readouterr().err, kind)
    assert words in cause and (str(bundle) in cause or kind == "backend")


def test_logits_take_what_the_engines_hold(llama_bundle: Path) -> None:
    """Faults: a build counted gamma rows of draft logits, but each of the gamma buffers has
    gamma + 1; and one row for a target without a draft model, which still verifies lookups."""
    decoder = load(llama_bundle, slots=3).decoder
    pair = read_bundle(llama_bundle).pair
    target, draft = (model._logits.nbytes for model in (decoder.target, decoder.draft))
    assert pair.logits_bytes(3, gpu=False) == target + draft
    assert dataclasses.replace(pair, draft=None).logits_bytes(3, gpu=False) == target


def test_invalid_queue_options_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="queue=-1 is out of range"):
        load(tmp_path / "nothing", queue=-1)


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        (None, "cannot read .*template: No such file"),
        ("{{ 1 }}\n{% if %}", "template does not compile in line 2: Expected an expression"),
        ("{{ x | y }}", "does not compile in line 1: No filter named 'y'"),
        ("{% if x %}" * 200 + "{% endif %}" * 200, "does not compile: too many levels"),
        ("{{" + "-" * 9999 + "1 }}", "does not compile: maximum recursion depth"),
    ],
)
def test_a_chat_template_is_refused_before_anything_is_read(
    tmp_path: Path, template: str | None, cause: str
) -> None:
    if template is not None:
        (tmp_path / "template").write_text(template)
    with pytest.raises(OutriderError, match=f"^option: .*{cause}[^.]*[.] [^.]+[.]$"):
        load(tmp_path / "nothing", chat_template=tmp_path / "template")


def test_a_chat_template_for_a_bundle_without_one(llama_bundle: Path, tmp_path: Path) -> None:
    """A plain prompt passes through it, as through a checkpoint's own."""
    (tmp_path / "template").write_text("{{ messages[0].content }}{{ messages[0].content }}")
    engine = load(llama_bundle, chat_template=tmp_path / "template")
    plain = engine.request("ab", Options(chat=False)).prompt
    assert engine.request("ab", Options()).prompt == [*plain, *plain]


def test_a_path_that_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cause = (
        r"the current folder \(or an empty path\) is not a bundle: .* Build the bundle with make"
    )
    with pytest.raises(OutriderError, match=cause):
        load("")


def test_options_of_another_type_are_refused(bundle: Path) -> None:
    """Fault: verify=None and "" left the hashes unchecked, and "False" checked them."""
    with pytest.raises(OutriderError, match=r"option: folder=None \(NoneType\) is not a path"):
        load(cast(Path, None))
    paths = [(name, 5) for name in ("table", "corpus", "chat_template")]
    flags = [(name, None) for name in ("verify", "graphs", "reuse", "draft_model")]
    threads = [("threads", value) for value in ("a", 2.5, True)]
    for name, value in (*paths, *flags, *threads, ("device", 3)):
        nonsense: dict[str, Any] = {name: value}
        with pytest.raises(OutriderError, match=rf"option: {name}={value!r} (\(.*\) )?is"):
            load(bundle, **nonsense)


def test_a_small_numpy_number_of_slots(bundle: Path) -> None:
    """Fault: the memory of the caches overflowed."""
    with load(bundle, slots=np.int8(3)) as engine:  # type: ignore[arg-type]
        assert engine.memory == load(bundle, slots=3).memory
        assert {type(size) for size in engine.memory.values()} == {int}


def test_unverified_files_are_still_there_and_whole(bundle: Path) -> None:
    """verify=False skips the hashes only."""
    _flip("target/weights.bin")(bundle)
    with pytest.raises(OutriderError, match="its hash differs"):
        read_bundle(bundle)
    read_bundle(bundle, verify=False)
    _truncate("target/weights.bin")(bundle)
    with pytest.raises(OutriderError, match="truncated"):
        read_bundle(bundle, verify=False)


@pytest.mark.parametrize(
    ("event", "cause"),
    [("none", "it cannot be opened"), ("damage", "its hash differs"),
     ("replaced", "was replaced while"), ("replaced, opened", "was replaced while")],
)  # fmt: skip
def test_what_happens_to_a_folder_is_the_cause_of_what_it_breaks(
    bundle: Path, event: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are verified while the engines are opened. An engine may fail first, with its own
    error; or not at all, if the bundle is replaced meanwhile and its files come from two builds."""

    def opens(*arguments: Any, **options: Any) -> HostRounds:
        if event.startswith("replaced"):
            with write_folder(bundle, MANIFEST_FILE) as new:
                shutil.copytree(bundle, new, dirs_exist_ok=True, copy_function=shutil.copy)
        if event.endswith("opened"):
            return HostRounds(*arguments, **options)
        raise OutriderError("backend", "it cannot be opened", "")

    monkeypatch.setattr("runtime.host.HostRounds", opens)
    if event == "damage":
        _flip("draft/weights.bin")(bundle)
    with pytest.raises(OutriderError, match=cause) as caught:
        load(bundle)
    assert caught.value.kind == ("backend" if event == "none" else "bundle")


GENERATE_AT_EXIT = """
import sys, threading, runtime
engine, begun = runtime.load(sys.argv[1], verify=False), threading.Event()
def generate():
    while True:
        for _ in engine.stream([5, 6, 7], max_new_tokens=100, ignore_eos=True):
            begun.set()
threading.Thread(target=generate, daemon=True).start()
begun.wait()
"""


def test_a_daemon_thread_in_a_round_at_exit(llama_bundle: Path) -> None:
    """Fault: the process aborted, in most runs."""
    command = [sys.executable, "-c", GENERATE_AT_EXIT, str(llama_bundle)]
    for _ in range(3):
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


FORK = """
import os, signal
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends a child that hangs
    {}
    sys.exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 7)
"""
GENERATE_ONCE = """
import sys, runtime
engine = runtime.load(sys.argv[1], verify=False)
engine.generate([5, 6, 7], max_new_tokens=4)
"""


@pytest.mark.parametrize("begin", [GENERATE_ONCE, GENERATE_AT_EXIT])
@pytest.mark.parametrize("what", ["pass", "engine.close()"])
def test_a_forked_process_ends(llama_bundle: Path, begin: str, what: str) -> None:
    """Fault: it waited for ONNX Runtime's threads, or for a lock, which only its parent has."""
    command = [sys.executable, "-c", begin + FORK.format(what), str(llama_bundle)]
    subprocess.run(command, cwd=CHECKOUT, check=True)


@pytest.mark.parametrize("use", ["engine.generate([5])", "next(stream)", "next(new)", "slot()"])
def test_a_fork_cannot_use_its_parents_engine(llama_bundle: Path, use: str) -> None:
    """Fault: while the parent was generating, the fork waited forever."""
    begin = """
stream, new = (engine.stream([5], max_new_tokens=50, ignore_eos=True) for _ in range(2))
next(stream)
def slot():
    with engine.exclusive_slot([5]):
        pass
"""
    program = GENERATE_AT_EXIT.replace("verify=False", "verify=False, slots=2")
    program += begin + FORK.format(use)
    command = [sys.executable, "-c", program, str(llama_bundle)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert "the engine belongs to the process that loaded it" in done.stderr


CHEAP: list[dict[str, Any]] = [{"draft": "ngram"}, {"draft": "none"}, {}]


def test_a_draft_model_that_is_left_closed(bundle: Path) -> None:
    """With lookups the output is the same; options that need the draft model are refused, and the
    error names the option."""
    asked: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    with load(bundle, slots=4) as engine:
        whole, caches = (
            engine.memory,
            [facts.cache_bytes(4) for _, facts in engine.manifest.pair.models()],
        )
        texts = [engine.generate("a b a b a", **asked, **draft).token_ids for draft in CHEAP]
    _flip("draft/weights.bin")(bundle)
    with pytest.raises(OutriderError, match="its hash differs"):
        load(bundle)
    with load(bundle, slots=4, draft_model=False) as engine:
        assert engine.decoder.draft is None
        assert engine.memory == {"target": whole["target"], "cache": caches[0]}
        assert whole["cache"] == sum(caches)
        found = [engine.generate("a b a b a", **asked, **draft) for draft in CHEAP]
        assert [result.token_ids for result in found] == texts
        assert [result.stats.drafted > 0 for result in found] == [True, False, False]
        for option in ({"draft": "model"}, {"draft": "chain"}, {"gamma": 4}, {"gamma": "auto"}):
            name = "=".join(map(str, *option.items()))
            with pytest.raises(OutriderError, match=f"{name} needs the draft model") as caught:
                engine.generate("a b a b a", **asked, **option)
            assert "draft_model=True" in caught.value.remedy
        assert beam_texts(engine, "a b", beams=2, max_new_tokens=3).stats.drafted == 0
        with pytest.raises(OutriderError, match=r"gamma=2 needs a draft model, .* opened without"):
            beam_texts(engine, "a b", beams=2, gamma=2)


# Writing


def marked(text: str) -> str:
    """Content that `write_folder` accepts as a manifest of ours."""
    return json.dumps({"kind": "manifest", "text": text})


@pytest.mark.parametrize(
    ("when", "exists"),
    [("error", False), ("error", True), ("partial", False), ("partial", True), ("replaced", True)],
)
def test_an_interrupted_folder_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, exists: bool
) -> None:
    """Up to the last step, when the folders are exchanged: before the new one is renamed, or just
    after the old one was renamed. The old one stays complete."""
    folder, rename = tmp_path / "out", Path.rename
    if exists:
        with write_folder(folder, MANIFEST_FILE) as partial:
            (partial / MANIFEST_FILE).write_text(marked("old"))
    before = snapshot(tmp_path)

    def interrupted(path: Path, target: Path) -> Path:
        if when == "partial" and ".partial-" in path.name:
            raise KeyboardInterrupt
        result = rename(path, target)
        if when == "replaced" and ".replaced-" in target.name:
            raise KeyboardInterrupt
        return result

    def write() -> None:
        with write_folder(folder, MANIFEST_FILE) as partial:
            (partial / MANIFEST_FILE).write_text(marked("new"))
            (partial / "deeper").mkdir()
            if when == "error":
                raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write()
    assert snapshot(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if exists else [])


# Building


def test_building_twice_does_nothing_twice(llama_graphs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def is_built(slots: int = 1, force: bool = False) -> bool:
        return build(llama_graphs, out, backend="onnxruntime", slots=slots, force=force)

    assert is_built()
    made = (out / MANIFEST_FILE).stat().st_ino
    assert not is_built()
    assert (out / MANIFEST_FILE).stat().st_ino == made
    assert is_built(force=True)
    assert is_built(slots=2)
    assert read_bundle(out).slots == 2
    (out / "target" / "weights.bin").unlink()
    assert is_built(slots=2)  # a damaged bundle is rebuilt
    read_bundle(out)


def test_damaged_graphs_are_not_built(llama_graphs: Path, tmp_path: Path) -> None:
    """The same checks as for a bundle: of the pair file and of the files that it lists."""
    for damage in (_truncate(PAIR_FILE), _flip("target/weights.bin"), shutil.rmtree):
        copy = Path(shutil.copytree(llama_graphs, tmp_path / "graphs", dirs_exist_ok=True))
        damage(copy)
        with pytest.raises(OutriderError, match=r"^bundle: "):
            build(copy, tmp_path / "out", backend="onnxruntime", slots=1)
        assert not (tmp_path / "out").exists()


def test_a_graph_that_the_backend_refuses(llama_graphs: Path, tmp_path: Path) -> None:
    """The hash matches, but the file is not a graph."""
    copy = Path(shutil.copytree(llama_graphs, tmp_path / "graphs"))
    (copy / "draft" / "graph.onnx").write_bytes(b"no protocol buffer")
    pair = read_pair(copy)
    assert pair.draft is not None
    facts = file_facts(copy / "draft" / "graph.onnx")
    draft = dataclasses.replace(pair.draft, files={**pair.draft.files, "graph.onnx": facts})
    write_json(copy / PAIR_FILE, "pair", dataclasses.replace(pair, draft=draft))
    with pytest.raises(OutriderError, match=r"^backend: "):
        build(copy, tmp_path / "out", backend="onnxruntime", slots=1)
    assert [path.name for path in tmp_path.iterdir()] == ["graphs"]


@pytest.mark.slow  # a process that imports Transformers; exit statuses: tests/cli
def test_a_command_ends_with_a_status_and_one_line(tmp_path: Path) -> None:
    """Only a process can show this: the interpreter's exit, and the absence of warnings from
    libraries."""
    missing = run("export", "--model", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert missing.returncode == EXIT_STATUS["checkpoint"]
    assert "nowhere is not a folder" in error_line(missing.stderr, "checkpoint")
    assert (missing.stdout, missing.stderr.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_part_is_checked(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last possible moment: the weights are written, but the part is not finished."""
    seen = []

    def interrupt(folder: Path, *_: object) -> None:
        seen.extend(path.name for path in folder.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(export.compare, "compare", interrupt)
    model = str(workshop.example("gpt2"))

    def work() -> int:
        with traced_once():
            export_pair(model, None, tmp_path / "out", max_len=MAX_LEN, cache=tmp_path / "cache")
        return 0

    assert run_command(work) == 130
    assert sorted(seen) == ["graph.onnx", "weights.bin"]
    assert snapshot(tmp_path) == {}
    assert leftovers(tmp_path) == []
