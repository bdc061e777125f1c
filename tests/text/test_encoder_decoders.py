"""Encoder-decoders: at temperature 0 the tokens of Transformers' `generate`, and whose source a
slot has.

Sources of one token to over a hundred, in one slot and in three that have different ones; drafts
that are right now and then, lookups, none. A random model's greedy text repeats itself, so all of
them have a repetition penalty, which is Transformers' own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from checkpoints import CONTEXT, FORCED, VOCAB_SIZE, WITH_ENCODER
from commands import error_line
from exported import command, nothing_left
from originals import one_thread
from rounds import cases
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves, tree_unflatten
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from workshop import MAX_LEN, Workshop

from engines import aotinductor
from engines.bundle import build, runs
from engines.registry import BACKENDS
from export.checkpoint import find, same_encoder
from export.encoder import _number
from runtime import Options, TextEngine, generate, load
from runtime.backends import host
from runtime.backends.engine import HeldRows, Ids
from runtime.backends.host import HostEngine
from runtime.backends.registry import host_engine
from runtime.beam.text import beam_texts
from runtime.certificate import check
from runtime.drafts.registry import KINDS
from runtime.drafts.tables import Tables, fingerprint
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.folders import refuse_foreign
from runtime.files.manifest import (
    ENCODER_DECODERS,
    ENCODER_FILE,
    ENCODER_PACKAGE_FILE,
    PACKAGE_FILE,
    PART_FILE,
    read_bundle,
)
from runtime.files.torch_files import (
    ENCODER_PROGRAM_FILE,
    ENCODER_WEIGHTS_FILE,
    WEIGHTS_FILE,
    read_program,
    read_tensors,
)
from runtime.theory.measure import measure

NEW_TOKENS, PENALTY = 48, 3.0
SOURCES = [
    np.random.default_rng(length).integers(1, VOCAB_SIZE, length).tolist()
    for length in (1, 7, 40, MAX_LEN)
]


@cache
def original(checkpoint: Path) -> AutoModelForSeq2SeqLM:
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    # No end of text, so that all of the tokens are compared.
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def expected(checkpoint: Path, source: list[int], prompt: list[int] | None = None) -> list[int]:
    """Transformers' own tokens after the decoder's first ones."""
    ids, model = torch.tensor([source]), original(checkpoint)
    begun = {} if prompt is None else {"decoder_input_ids": torch.tensor([prompt])}
    forced = model.generation_config.forced_bos_token_id is not None and prompt is None
    first = 1 + forced + len(prompt or ())
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
        max_new_tokens=NEW_TOKENS + forced, repetition_penalty=PENALTY, **begun,
    )[0].tolist()  # fmt: skip
    assert len(set(output)) > NEW_TOKENS // 2, "a degenerate text proves nothing"
    return output[first:]


def greedy(source: list[int], gamma: int | None = None, draft: str | None = None) -> Options:
    return Options(
        source=source, gamma=gamma, draft=draft, max_new_tokens=NEW_TOKENS, ignore_eos=True,
        repetition_penalty=PENALTY,
    )  # fmt: skip


def texts(engine: TextEngine, requests: list[Options]) -> list[list[int]]:
    results = dict(engine.batch([(None, options) for options in requests]))
    return [results[index].token_ids for index in range(len(requests))]


def bundle_of(workshop: Workshop, name: str, **options: Any) -> tuple[Path, Path]:
    """A checkpoint, and its bundle with a draft that is right now and then."""
    target = workshop.checkpoint(name)
    return target, workshop.bundle(target, workshop.checkpoint(name, blur=0.1), **options)


# Its compiler takes a minute for a model of two layers.
COMPILED = pytest.param("aotinductor", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["onnxruntime", COMPILED])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def t5(workshop: Workshop, backend: str) -> tuple[Path, Path]:
    return bundle_of(workshop, "t5", backend=backend)


def test_greedy_text_is_that_of_transformers(t5: tuple[Path, Path]) -> None:
    target, bundle = t5
    said = [expected(target, source) for source in SOURCES]
    three = one_thread(bundle, 3)
    requests = [greedy(s, gamma) for s, gamma in zip(SOURCES, (0, 3, 8, 5), strict=True)]
    assert texts(three, requests) == said
    one = one_thread(bundle, 1)
    drafts = ("model", "ngram", "copy", "chain")
    assert texts(one, [greedy(s, None, d) for s, d in zip(SOURCES, drafts, strict=True)]) == said
    accepted = one.stats()["accepted"] + three.stats()["accepted"]
    assert 0 < accepted < one.stats()["drafted"] + three.stats()["drafted"]


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(
    ("name", "backend"),
    [*product(WITH_ENCODER, ["onnxruntime"]), *product(["t5", "bart", "umt5"], ["aotinductor"])],
)
def test_greedy_text_with_every_draft_and_gamma(
    workshop: Workshop, tmp_path: Path, name: str, backend: str, slots: int
) -> None:
    target, bundle = bundle_of(workshop, name, backend=backend)
    said, table = [expected(target, source) for source in SOURCES], tmp_path / "table.npz"
    tables = Tables.count(np.array(sum(said[1:], said[0]), np.int32), VOCAB_SIZE, 3)
    tables.tokenizer = fingerprint(one_thread(bundle, 1).tokenizer.vocabulary())
    tables.save(table)
    engine = load(bundle, slots=slots, threads=1, table=table)
    assert texts(engine, [greedy(source, 0) for source in SOURCES]) == said
    for draft in KINDS:
        before = engine.stats()
        for gamma in range(1, 9):
            assert texts(engine, [greedy(s, gamma, draft) for s in SOURCES]) == said, (draft, gamma)
        accepted, drafted = (engine.stats()[x] - before[x] for x in ("accepted", "drafted"))
        assert accepted < drafted, draft
        # What is looked up in a text that is kept from repeating itself hardly ever stands.
        assert accepted > 0 or draft not in ("model", "chain", "bigram"), draft


@pytest.mark.parametrize("name", cases(["t5"], ["mbart"]))
def test_a_prompt_is_how_the_output_begins(workshop: Workshop, name: str, backend: str) -> None:
    target, bundle = bundle_of(workshop, name, backend=backend)
    engine, prompt = one_thread(bundle, 1), [9, 200, 31]
    for ids in (prompt, [1, *prompt]):  # with the start token or without, as in Transformers
        result = engine.generate(ids, greedy(SOURCES[1]))
        assert result.token_ids == expected(target, SOURCES[1], prompt)
    start = read_bundle(bundle).pair.start_ids
    assert start == ([1, FORCED] if name == "mbart" else [1])
    assert engine.request(None, greedy(SOURCES[1])).prompt == start


RULES = {
    "no_repeat_ngram_size": 2, "bad_words_ids": [[9], [20, 21]], "min_length": 30,
    "forced_eos_token_id": 0, "forced_bos_token_id": FORCED, "encoder_no_repeat_ngram_size": 3,
    "num_beams": 4, "early_stopping": True, "max_length": 40,
}  # fmt: skip


@pytest.mark.parametrize("name", cases(["t5"], WITH_ENCODER))
def test_what_the_generation_config_asks_for(workshop: Workshop, name: str) -> None:
    """As BART's and Marian's do: their `generate` says the same, but for the beams."""
    target = workshop.checkpoint(name, generation=RULES)
    engine = one_thread(workshop.bundle(target, workshop.checkpoint(name, blur=0.1)), 1)
    model = AutoModelForSeq2SeqLM.from_pretrained(target, attn_implementation="eager").eval()
    for source in SOURCES:
        ids = torch.tensor([source])
        plain = {"num_beams": 1, "early_stopping": None, "do_sample": False}
        said = model.generate(ids, attention_mask=torch.ones_like(ids), **plain)[0].tolist()
        room, asked = RULES["max_length"] - 2, {"source": source, "repetition_penalty": 1.0}
        for gamma in (0, 4):
            found = engine.generate(None, **asked, gamma=gamma, max_new_tokens=room)
            assert found.token_ids == said[2:]
        off = {"no_repeat_ngram_size": 0, "bad_words_ids": (), "encoder_no_repeat_ngram_size": 0}
        assert engine.generate(None, **asked, **off, max_new_tokens=room).token_ids != said[2:]
    assert engine.stats()["accepted"] > 0


@pytest.mark.parametrize("least", [None, 9])
def test_how_short_a_text_may_be(workshop: Workshop, least: int | None) -> None:
    """`min_new_tokens` takes the place of `min_length`, which counts the prompt; of a decoder too,
    which would end at once."""
    ends = [*range(0, VOCAB_SIZE, 2)]
    rules = {"eos_token_id": ends, "min_length": 8, "min_new_tokens": least}
    target = workshop.checkpoint("llama", generation=rules)
    model, prompt = AutoModelForCausalLM.from_pretrained(target).eval(), [5, 6, 7]
    want = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[0, 3:]
    engine = one_thread(workshop.bundle(target), 1)
    found = engine.generate(prompt, max_new_tokens=30)
    assert found.token_ids == want.tolist() and len(want) >= (least or 5)
    free = engine.generate(prompt, max_new_tokens=30, min_new_tokens=0)
    assert len(free.token_ids) < 5, "the control"


def test_a_source_is_looked_into(t5: tuple[Path, Path]) -> None:
    """The copying draft proposes what followed in the source."""
    engine = one_thread(t5[1], 1)
    source = [20, 21, 22, 23, 24]
    request = engine.request([20, 21], greedy(source, 3, "copy"))
    sequence = engine.decoder.admit(request)
    try:
        sequence.slot.tokens[:] = [1, 20, 21]
        proposer = engine.decoder.rounds.proposer
        assert proposer._of(sequence).guess(sequence, [], 3) == [22, 23, 24]
    finally:
        engine.decoder.release(sequence)


# What is compiled


class Uncompiled:
    """See `aotinductor.Package`: torch runs the program itself, in no time."""

    folders: ClassVar[list[Path]] = []  # of the graphs, by role

    def __init__(self, folder: Path, *, encoder: bool = False):
        (graphs,) = (x for x in self.folders if x.name == folder.name)
        program = read_program(graphs, encoder=encoder)
        self.weights, module = program.state_dict, program.module(check_guards=False)

        def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            arguments, _ = tree_unflatten(inputs, program.call_spec.in_spec)
            with torch.no_grad():
                return tree_leaves(module(*arguments))

        self.run = run


def test_programs_without_a_compiler(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the compiling, which the slow tests do: the export, the bundle, the engine's calls.
    Neither program has the other's weights."""
    target = workshop.checkpoint("t5", num_layers=1, num_decoder_layers=1)
    graphs, bundle = workshop.graphs(target, form="torch"), tmp_path / "bundle"

    def compile(_: object, *, package_path: str, **__: object) -> None:
        Path(package_path).write_bytes(b"code")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", compile)
    monkeypatch.setattr("runtime.backends.aotinductor.Package", Uncompiled)
    monkeypatch.setattr(Uncompiled, "folders", [graphs / "target"])
    build(graphs, bundle, backend="aotinductor", slots=1, sm="cpu", measure=False)
    assert {path.name for path in (bundle / "target").iterdir()} == {
        PACKAGE_FILE, WEIGHTS_FILE, ENCODER_PACKAGE_FILE, ENCODER_WEIGHTS_FILE,
    }  # fmt: skip
    sources = SOURCES[0], SOURCES[2]
    asked = [greedy(sources[0], 0), greedy(sources[1], 8, "copy")]
    assert texts(one_thread(bundle, 2), asked) == [expected(target, each) for each in sources]
    text, source = (
        {name.partition("model.")[2] for name in read_tensors(graphs / "target" / file)}
        for file in (WEIGHTS_FILE, ENCODER_WEIGHTS_FILE)
    )
    block, attention = "decoder.block.0.layer", "EncDecAttention"
    assert not any(name.startswith("encoder.") for name in text)
    assert {name for name in source if name.startswith("decoder.")} == {
        f"{block}.1.{attention}.k.weight", f"{block}.1.{attention}.v.weight",
    }  # fmt: skip
    assert f"{block}.1.{attention}.q.weight" in text and "lm_head.weight" in text


# Slots


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch, backend: str) -> list[int]:
    """The length of each source that an encoder has read, of token ids."""
    lengths: list[int] = []
    engine = host_engine(backend)
    real = engine._encode

    def encode(self: HostEngine[Any], source: Ids, names: Sequence[str]) -> dict[str, Any]:
        if source.ndim == 2:
            lengths.append(source.shape[1])
        return real(self, source, names)

    monkeypatch.setattr(engine, "_encode", encode)
    return lengths


def test_an_encoder_runs_once_a_request(t5: tuple[Path, Path], encoded: list[int]) -> None:
    engine = one_thread(t5[1], 1)
    texts(engine, [greedy(SOURCES[1], 0)])
    assert encoded == [7], "the target's alone, where nothing is drafted by a model"
    texts(engine, [greedy(SOURCES[2], 4)])
    assert encoded == [7, 40, 40]
    texts(engine, [greedy(SOURCES[2], 4)])
    assert encoded == [7, 40, 40], "the slot has it still"


def with_encoder_of(draft: Path, target: Path, folder: Path) -> Path:
    """The draft with the target's encoder, and so with its embeddings."""
    shutil.copytree(draft, folder)
    theirs, weights = (load_file(x / "model.safetensors") for x in (target, draft))
    same = {name: theirs[name] for name in weights if name.startswith(("encoder.", "shared."))}
    save_file({**weights, **same}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_draft_with_the_targets_encoder_runs_none(
    workshop: Workshop, tmp_path: Path, encoded: list[int], backend: str
) -> None:
    """What the target's has made is projected by the draft's own decoder."""
    target, other = workshop.checkpoint("t5"), workshop.checkpoint("t5", blur=0.1)
    draft = with_encoder_of(other, target, tmp_path / "draft")
    assert same_encoder(find(str(target)), find(str(draft)))
    assert not same_encoder(find(str(target)), find(str(other)))
    bundle = workshop.bundle(target, draft, backend=backend)
    facts = read_bundle(bundle).pair.draft
    assert facts and facts.encoder and facts.encoder.shared == 64
    engine, one = one_thread(bundle, 3), one_thread(bundle, 1)
    said = [expected(target, source) for source in SOURCES]
    assert texts(engine, [greedy(source, 4) for source in SOURCES]) == said
    assert encoded == [len(source) for source in SOURCES]
    assert texts(one, [greedy(SOURCES[1], 0), greedy(SOURCES[1], 4)]) == [said[1]] * 2
    assert encoded[4:] == [7], "kept for the draft, which asks for it later"
    states = engine.decoder.target._states
    model = AutoModelForSeq2SeqLM.from_pretrained(target).get_encoder()
    slot = engine.decoder.target.held.slot_of(SOURCES[3])  # the last to come
    want = model(torch.tensor([SOURCES[3]])).last_hidden_state.detach().numpy()
    np.testing.assert_allclose(states[slot], want, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"num_decoder_layers": 1}, True),
        ({"num_heads": 8}, False),
        ({"d_ff": 90}, False),
        ({"pad_token_id": 5}, False),  # some count positions from it
    ],
)
def test_what_a_configuration_says_of_an_encoder(
    workshop: Workshop, tmp_path: Path, change: dict[str, int], same: bool
) -> None:
    """The same weights mean something else under another configuration."""
    target = workshop.checkpoint("t5")
    other = Path(shutil.copytree(target, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **change}))
    assert same_encoder(find(str(target)), find(str(other))) is same


def test_an_embedding_by_another_name_is_none_to_compare(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Of tied matrices a file may have the output's alone."""
    target, names = workshop.checkpoint("t5"), ("shared.weight", "lm_head.weight")
    folders = [Path(shutil.copytree(target, tmp_path / name)) for name in names]
    assert same_encoder(*(find(str(folder)) for folder in folders))
    for name, folder in zip(names, folders, strict=True):
        weights = load_file(target / "model.safetensors")
        weights[name] = weights.pop("shared.weight")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tied = find(str(folders[1]))
    assert not same_encoder(tied, tied)


@pytest.mark.parametrize("looks", [True, False], ids=["as it is", "control"])
def test_rows_of_another_source_are_not_used_again(
    t5: tuple[Path, Path], looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: rows that are taken for those of any source give another text."""
    if not looks:
        real = HeldRows.common

        def common(self: HeldRows, slot: int, text: list[int], _: object) -> int:
            return real(self, slot, text, self._sources[slot])

        def encoded(self: HeldRows, slot: int, source: list[int]) -> None:
            self._sources[slot] = tuple(source)

        monkeypatch.setattr(HeldRows, "common", common)
        monkeypatch.setattr(HeldRows, "encoded", encoded)
    engine, prompt = one_thread(t5[1], 1), list(range(60, 72))
    for source in SOURCES[1:3]:
        result = engine.generate(prompt, greedy(source))
    assert (result.token_ids == expected(t5[0], SOURCES[2], prompt)) == looks
    assert (result.stats.reused_tokens == 0) == looks


def test_room_for_sources_grows(t5: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours keep theirs while a longer one comes, and one slot gives its room back."""
    monkeypatch.setattr(host, "FIRST_ROWS", 16)
    said = [expected(t5[0], source) for source in SOURCES]
    three = one_thread(t5[1], 3)
    assert texts(three, [greedy(source, 4) for source in SOURCES]) == said
    assert three.decoder.target.source_rows == MAX_LEN
    one, rows = one_thread(t5[1], 1), []
    for source, text in zip(reversed(SOURCES), reversed(said), strict=True):
        assert texts(one, [greedy(source, 4)]) == [text]
        rows.append(one.decoder.target.source_rows)
    assert rows == [MAX_LEN, 64, 16, 16]


def test_a_part_can_be_made_again(t5: tuple[Path, Path], workshop: Workshop) -> None:
    """What is replaced holds files of ours alone."""
    part = workshop.cache / read_bundle(t5[1]).pair.target.key[:16]
    refuse_foreign(part, PART_FILE)
    assert any((part / file).exists() for file in (ENCODER_FILE, ENCODER_PROGRAM_FILE))


def test_beams(workshop: Workshop, encoded: list[int], backend: str) -> None:
    """All hypotheses of Transformers' beam search, plain and drafted, with what the generation
    config asks for, to the length at which all end. Slots share what was read."""
    rules = {**RULES, "min_length": 18, "max_length": 18}
    target = workshop.checkpoint("t5", generation=rules)
    draft = workshop.checkpoint("t5", blur=0.1)
    engine = one_thread(workshop.bundle(target, draft, backend=backend), 12)
    original = AutoModelForSeq2SeqLM.from_pretrained(target).eval()
    for source in SOURCES[1:3]:
        want = original.generate(
            torch.tensor([source]), do_sample=False, num_beams=3, num_return_sequences=3,
            early_stopping=False,
        )[:, 2:].tolist()  # fmt: skip
        for gamma in (0, 3):
            found = beam_texts(engine, None, beams=3, gamma=gamma, source=source, max_new_tokens=16)
            assert [one.token_ids for one in found.texts] == want
    assert encoded == [7, 7, 40, 40], "once for the target and once for the draft"


# Promises


def test_certificate(t5: tuple[Path, Path]) -> None:
    """Above temperature 0, with a draft that has read the source, too."""
    certified(t5[1])


@pytest.mark.slow
def test_certificate_in_bfloat16(workshop: Workshop) -> None:
    certified(bundle_of(workshop, "t5", backend="aotinductor", dtype="bfloat16")[1])


def certified(bundle: Path) -> None:
    """And the control."""
    engine = one_thread(bundle, 1)
    options = Options(source=SOURCES[1], temperature=1.0, seed=5, max_new_tokens=100)
    found = check(engine, None, options)
    assert found.passed and found.tokens == 512 and found.drafted
    lenient = Options(**{**vars(options), "verify": "sigmoid"})
    assert not check(engine, None, lenient).passed


@pytest.mark.slow
def test_positions_do_not_depend_on_how_a_text_is_cut() -> None:
    """Fault: M2M100 counts those of a call without its padding."""

    def positions(*widths: int) -> list[int]:
        parts = torch.tensor([[5, 0, 6, 7]]).split(widths, dim=1)
        begins = torch.tensor([sum(widths[:i]) for i in range(len(widths))])
        found = [
            _number(None, None, x, 0, b[None, None]) for x, b in zip(parts, begins, strict=True)
        ]
        return torch.cat(found, dim=1)[0].tolist()

    assert positions(4) == positions(1, 1, 1, 1) == positions(2, 2) == [1, 0, 3, 4]


@pytest.mark.parametrize("name", cases(["t5", "marian"], WITH_ENCODER))
def test_what_its_bits_depend_on_is_measured(workshop: Workshop, name: str) -> None:
    """And held to: a seed's text by the coupled rule. Fault: the longest source was of a slot's
    rows, which are more than the model has positions."""
    longest = CONTEXT if name == "marian" else MAX_LEN
    _, bundle = bundle_of(workshop, name, measure=True, max_len=longest)
    assert read_bundle(bundle).invariance is not None
    engine = one_thread(bundle, 3)
    assert engine.bits.of_gamma
    options = [
        Options(source=SOURCES[1], temperature=1.0, seed=5, gamma=gamma, verify="coupled")
        for gamma in (0, 1, 4, 8)
    ]
    first, *others = texts(engine, options)
    assert others == [first] * 3


# Refusals


@pytest.mark.parametrize(
    ("target", "prompt", "options", "kind", "cause"),
    [
        ("t5", "abc", {}, "prompt", "there is no source"),
        ("t5", None, {"source": []}, "prompt", "there is no source"),
        (
            "t5",
            None,
            {"source": [3] * (MAX_LEN + 1)},
            "prompt",
            f"the source has {MAX_LEN + 1} tokens",
        ),
        (
            "t5",
            None,
            {"source": [VOCAB_SIZE]},
            "prompt",
            f"the source has the token id {VOCAB_SIZE}",
        ),
        ("t5", None, {"source": 7}, "option", "source=7 is out of range"),
        ("t5", "abc", {"source": "abc", "system": "be kind"}, "option", "chat templates are of"),
        ("t5", None, {"source": "abc", "chat": True}, "option", "chat templates are of"),
        ("llama", "abc", {"source": "abc"}, "option", "a source is for encoder-decoders"),
        ("llama", "abc", {"source": ""}, "option", "a source is for encoder-decoders"),
        ("llama", None, {}, "prompt", "there is no prompt"),
    ],
)
def test_refused(
    t5: tuple[Path, Path], llama_bundle: Path, target: str, prompt: str | None,
    options: dict[str, object], kind: str, cause: str,
) -> None:  # fmt: skip
    bundle = t5[1] if target == "t5" else llama_bundle
    with pytest.raises(OutriderError, match=cause) as refused:
        one_thread(bundle, 1).generate(prompt, **options)
    assert refused.value.kind == kind


def test_prompts_alone_are_not_measured(t5: tuple[Path, Path]) -> None:
    with pytest.raises(OutriderError, match=r"reads a source, .* --source TEXT --baseline"):
        measure(one_thread(t5[1], 1), ["ab"], 0.0, 8)


@pytest.mark.parametrize(
    ("options", "kind", "cause"),
    [
        (["--dtype", "float16"], "option", "DTYPE=float16 is for decoder-only models"),
        (
            ["--backend-runs", "full"],
            "backend",
            "the backend does not run encoder-decoders with DTYPE=",
        ),
        (["--cache-type", "int8"], "option", "CACHE=int8 is for decoder-only models"),
        (["--draft", "llama"], "architecture", "one of them reads a source"),
    ],
)
def test_not_exported(
    workshop: Workshop, tmp_path: Path, options: list[str], kind: str, cause: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    named = [str(workshop.checkpoint(x)) if x == "llama" else x for x in options]
    status, err = command(capsys, tmp_path, workshop.checkpoint("t5"), *named)
    assert status == EXIT_STATUS[kind]
    assert cause in error_line(err, kind)
    assert nothing_left(tmp_path)


def test_backends_that_run_no_encoder(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = workshop.graphs(workshop.checkpoint("t5"), workshop.checkpoint("t5", blur=0.1))
    for name, dtype in product(BACKENDS, ("float32", "float16", "bfloat16")):
        dtypes = {"aotinductor": ["float32", "bfloat16"], "onnxruntime": ["float32"]}
        does = dtype in dtypes.get(name, [])
        sm = "cpu" if name == "aotinductor" else ""
        assert (ENCODER_DECODERS in runs(name, dtype, sm)) == does  # which the export is told
    monkeypatch.setattr(aotinductor, "targets", lambda *_: ["sm90"])
    for name in ("tensorrt_rtx", "aotinductor"):
        with pytest.raises(OutriderError, match="does not run encoder-decoders") as refused:
            build(graphs, tmp_path / "out", backend=name, slots=1)
        assert refused.value.kind == "backend"


# From the command line


def test_command_line(
    t5: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> tuple[list[int], str]:
        common = ["--engines", str(t5[1]), "--max-new-tokens", "12", "--ignore-eos"]
        assert generate.main([*common, *arguments]) == 0
        out, err = capsys.readouterr()
        return json.loads(out.splitlines()[0])["token_ids"], err

    (tmp_path / "source").write_text("translate: hello\n")
    (tmp_path / "batch").write_text(
        '{"source": "translate: hello"}\n{"source": "b", "prompt": "c"}'
    )
    ids, err = said("--json", "--source", "translate: hello")
    assert len(ids) == 12
    assert "source 16 tok | prompt 1 tok" in err
    assert said("--json", "--source-file", str(tmp_path / "source"))[0] == ids
    assert said("--batch", str(tmp_path / "batch"))[0] == ids
