"""An edited manifest with a valid checksum is either refused in one line or usable."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import edited

from runtime.backends.bits import promised_bits
from runtime.bundle import choose_device, load
from runtime.files.errors import EXIT_STATUS, OutriderError, run_command
from runtime.files.generation import AudioFacts, FeatureFacts, TextRules
from runtime.files.graphs import (
    EncoderFacts,
    FileFacts,
    GraphFacts,
    Pair,
    TokenizerFacts,
    file_facts,
)
from runtime.files.manifest import (
    MANIFEST_FILE,
    CallBits,
    EngineFacts,
    Invariance,
    Manifest,
    Profile,
    copied_files,
    read_bundle,
)
from runtime.files.records import write_json
from runtime.text.options import Options
from runtime.text.requests import text_rules

NONSENSE: list[Any] = [
    None, True, -1, 0, 1, 65, 2**31, 2**63, 10**400, 1.5, float("nan"), float("inf"), "", "x",
    "a\nb", "../x", "/etc/passwd", "a/b", "\0", "\ud800", [], [1], [[1]], [3, 2, 1], {}, {"a": 1},
    "sm", "smx", "sm999999", "float8",
]  # fmt: skip


@pytest.fixture(params=["onnxruntime", "tensorrt_rtx", "audio"])
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A bundle of two models whose files exist, but contain no graphs."""
    audio_model = request.param == "audio"
    compiled = request.param in ("tensorrt_rtx", "aotinductor")
    backend = request.param if compiled else "onnxruntime"
    folder = tmp_path / "bundle"

    def files(part: str, *names: str) -> dict[str, FileFacts]:
        (folder / part).mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / part / name).write_bytes(name.encode())
        return {name: file_facts(folder / part / name) for name in names}

    encoder, names = None, ["graph.onnx", "weights.bin"]
    if audio_model:
        features = FeatureFacts(16_000, 80, 400, 160, 480_000)
        encoder = EncoderFacts([[2, 16]] * 2, [[2, 16]] * 2, features, 1500)
        names += ["encoder.onnx", "encoder.bin"]
    if request.param == "int8":  # has separate files for the CPU
        names += ["host.onnx", "host.bin"]
    audio = AudioFacts(
        290, {"<|en|>": 291, "<|de|>": 292}, {"transcribe": 293}, True, [7, 8], [9], 100, True,
        294, 295, 50,
    )  # fmt: skip

    def graph(role: str) -> GraphFacts:
        return GraphFacts(
            key="0", source="some/name", architecture="Llama", parameters=10, dtype="float16",
            vocab_size=300, max_len=100, capacity=112, key_shapes=[[2, 16]] * 2,
            value_shapes=[[2, 16]] * 2, max_difference=None, tolerance=0.1, comparison="not run",
            versions={"torch": "2"}, files=files(role, *names), context=200,
            encoder=encoder,
        )  # fmt: skip

    pair = Pair(
        target=graph("target"), draft=graph("draft"),
        tokenizer=TokenizerFacts(
            "0", 299, [2], {"eos_token": "</s>"}, True,
            files("tokenizer", "tokenizer.json", "chat_template.jinja"),
        ),
        vocab_size=299, max_len=100, max_gamma=8, capacity=112,
        start_ids=[290, 291, 294] if audio_model else None, audio=audio if audio_model else None,
        rules=TextRules(5, 3, 3, [[7], [8, 9]], 2) if audio_model else None,
    )  # fmt: skip
    profile = Profile("decode", [1, 1, 2], [1, 9, 9], [1, 9, 9], 1000)
    beside = "weights.bin" if backend == "aotinductor" else None
    engine = EngineFacts("1", "engine.rtx", ["sm89"], [profile], beside)
    engines = {"target": engine, "draft": engine}
    made = {role: files(role, "engine.rtx")["engine.rtx"] for role in engines}
    listed = copied_files(pair, engines if compiled else None)
    if compiled:
        listed |= {f"{role}/engine.rtx": facts for role, facts in made.items()}
    calls = CallBits([2, 3], [1], True, True, False)
    manifest = Manifest(
        "bundle", backend, {"onnx": "1"}, 2, pair, listed, engines if compiled else None,
        None if compiled else Invariance("here", calls, calls, True),
    )  # fmt: skip
    write_json(folder / MANIFEST_FILE, "manifest", manifest)
    return folder


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield from paths(value[key], (*path, key))


def use(folder: Path) -> int:
    """Everything that a manifest is used for before a file of the bundle is opened."""
    manifest = read_bundle(folder)
    choose_device(manifest, folder, "auto")
    promised_bits(manifest, manifest.slots, 1)
    assert manifest.rebuild_command(folder, "sm90").startswith("make engines MODEL=")
    assert 0 < sum(f.cache_bytes(manifest.slots) for _, f in manifest.pair.models()) < 1 << 62
    for gpu in (False, True):
        assert 0 < manifest.pair.logits_bytes(manifest.slots, gpu=gpu) < 1 << 62
    for processor in text_rules(Options(), manifest.pair, [3] * 3, [])[1]:
        processor(np.zeros(manifest.pair.vocab_size, np.float32), np.zeros(3, np.int64), 3)
    return 0


def test_nonsense_under_a_right_checksum(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any exception other than OutriderError fails the test."""
    assert use(bundle) == 0
    sound = json.loads((bundle / MANIFEST_FILE).read_text())
    places, chance, refused = list(paths(sound["facts"])), random.Random(0), 0
    for _ in range(200):
        facts = copy.deepcopy(sound["facts"])
        *above, last = chance.choice(places)
        holder = facts
        for key in above:
            holder = holder[key]
        match chance.randrange(8):
            case 0 if isinstance(holder, dict):
                del holder[last]
            case 1 if isinstance(holder, dict):
                holder[str(chance.choice(NONSENSE))] = holder.pop(last)
            case 2 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[last]))
            case _:
                holder[last] = chance.choice(NONSENSE)
        edited(lambda c, changed=facts: c.update(facts=changed))(bundle)
        status = run_command(lambda: use(bundle))
        err = capsys.readouterr().err
        assert status in (0, EXIT_STATUS["bundle"]), err
        assert err.count("\n") == (status != 0)
        refused += status != 0
    assert refused > 120


@pytest.mark.parametrize(
    "bundle", ["onnxruntime", "int8", "tensorrt_rtx", "aotinductor", "audio"], indirect=True
)
def test_no_file_is_left_out(bundle: Path) -> None:
    """Fault: a manifest that omits a file from one of its lists is accepted, and the bundle fails
    later."""
    assert use(bundle) == 0
    sound = json.loads((bundle / MANIFEST_FILE).read_text())["facts"]
    for path in sound["files"]:
        facts, (part, name) = copy.deepcopy(sound), path.split("/")
        del facts["files"][path]
        listed = facts["pair"][part]["files"]
        listed.pop(name, None)  # the pair does not list engines
        edited(lambda c, changed=facts: c.update(facts=changed))(bundle)
        with pytest.raises(OutriderError, match="contradicts itself about its files"):
            read_bundle(bundle)


@pytest.mark.parametrize("bundle", ["tensorrt_rtx"], indirect=True)
def test_files_and_engines_must_agree(bundle: Path) -> None:
    manifest = read_bundle(bundle)
    assert manifest.engines is not None
    alone, files = {"target": manifest.engines["target"]}, manifest.pair.all_files()
    for wrong, what in (
        ({"engines": None}, "files"), ({"engines": alone}, "engines"), ({"files": files}, "files"),
    ):  # fmt: skip
        write_json(bundle / MANIFEST_FILE, "manifest", dataclasses.replace(manifest, **wrong))
        with pytest.raises(OutriderError, match=f"contradicts itself about its {what}"):
            read_bundle(bundle)


@pytest.mark.parametrize("bundle", ["onnxruntime"], indirect=True)
def test_more_tokens_than_the_sampling_takes(bundle: Path) -> None:
    """Fault: a traceback when the sampler was created, after the models had been opened."""
    for most, refused in ((1 << 30, False), ((1 << 30) + 1, True)):
        edited(lambda c, n=most: c["facts"]["pair"]["target"].update(vocab_size=n))(bundle)
        with pytest.raises(OutriderError) if refused else nullcontext():
            read_bundle(bundle, verify=False)


@pytest.mark.parametrize("bundle", ["onnxruntime"], indirect=True)
@pytest.mark.parametrize("depth", [900, 100_000])
def test_nesting_without_end(bundle: Path, depth: int) -> None:
    """Either the parser or the code that reads its result gives up."""
    for text in ("[" * depth, '{"kind": "manifest", "a": ' + "[" * depth + "]" * depth + "}"):
        (bundle / MANIFEST_FILE).write_text(text)
        with pytest.raises(OutriderError, match=r"^bundle: "):
            read_bundle(bundle)


@pytest.mark.parametrize("name", [MANIFEST_FILE, "tokenizer/tokenizer.json"])
def test_a_file_that_may_not_be_read(
    bundle: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is of kind "bundle" with a suitable remedy, not "disk". It is injected, because the
    user who runs the tests may be root."""
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == bundle / name:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert run_command(lambda: use(bundle)) == EXIT_STATUS["bundle"]
    err = capsys.readouterr().err
    assert f"{bundle / name} cannot be read: Permission denied. Make it readable" in err


@pytest.mark.parametrize("bundle", ["onnxruntime"], indirect=True)
def test_a_template_that_is_no_text(bundle: Path) -> None:
    """Fault: a traceback if no hash check rejects the file first."""
    template = bundle / "tokenizer" / "chat_template.jinja"
    template.write_bytes(b"\xff" * template.stat().st_size)
    with pytest.raises(OutriderError, match=r"^bundle: .*is not UTF-8"):
        load(bundle, verify=False)


def test_the_model_s_own_limit_travels_along(bundle: Path) -> None:
    """So that no remedy names a longer context; older bundles do not record it."""
    assert read_bundle(bundle).pair.target.context == 200
    edited(lambda c: c["facts"]["pair"]["target"].pop("context"))(bundle)
    assert read_bundle(bundle).pair.target.context is None
