"""Encoder-decoders: the tokens of Transformers' `generate` at temperature 0, and the guarantees.

Sources have from one to over a hundred tokens, in one slot and in three with different sources;
drafts are a model that is sometimes right, lookups, or none. Greedy output of a random model
repeats itself, so every request has a repetition penalty, defined as in Transformers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from checkpoints import CONTEXT, FEATURES, FORCED, VOCAB_SIZE, WITH_ENCODER
from encoders import SOURCES, bundle_of, certify, expected, greedy, same_for_every_gamma, texts
from originals import one_thread
from rounds import cases
from torch.utils._pytree import tree_leaves, tree_unflatten
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from workshop import MAX_LEN, Workshop

from engines.bundle import build
from runtime import Options, generate, load
from runtime.beam.text import beam_texts
from runtime.drafts.registry import KINDS
from runtime.drafts.tables import Tables, fingerprint
from runtime.files.errors import OutriderError
from runtime.files.folders import refuse_foreign
from runtime.files.generation import TextRules
from runtime.files.graphs import ENCODER_FILE, PART_FILE
from runtime.files.manifest import ENCODER_PACKAGE_FILE, PACKAGE_FILE, read_bundle
from runtime.files.torch_files import (
    ENCODER_PROGRAM_FILE,
    ENCODER_WEIGHTS_FILE,
    WEIGHTS_FILE,
    read_program,
    read_tensors,
)
from runtime.text.requests import text_rules
from runtime.theory.measure import measure


def test_greedy_text_is_that_of_transformers(t5: tuple[Path, Path]) -> None:
    target, bundle = t5
    want = [expected(target, source) for source in SOURCES]
    three = one_thread(bundle, 3)
    requests = [greedy(s, gamma) for s, gamma in zip(SOURCES, (0, 3, 8, 5), strict=True)]
    assert texts(three, requests) == want
    one = one_thread(bundle, 1)
    drafts = ("model", "ngram", "copy", "chain")
    assert texts(one, [greedy(s, None, d) for s, d in zip(SOURCES, drafts, strict=True)]) == want
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
    want, table = [expected(target, source) for source in SOURCES], tmp_path / "table.npz"
    tables = Tables.count(np.array(sum(want[1:], want[0]), np.int32), VOCAB_SIZE, 3)
    tables.tokenizer = fingerprint(one_thread(bundle, 1).tokenizer.vocabulary())
    tables.save(table)
    engine = load(bundle, slots=slots, threads=1, table=table)
    assert texts(engine, [greedy(source, 0) for source in SOURCES]) == want
    for draft in KINDS:
        before = engine.stats()
        for gamma in range(1, 9):
            assert texts(engine, [greedy(s, gamma, draft) for s in SOURCES]) == want, (draft, gamma)
        accepted, drafted = (engine.stats()[x] - before[x] for x in ("accepted", "drafted"))
        assert accepted < drafted, draft
        # With a repetition penalty, tokens looked up in the text are hardly ever accepted.
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
    """Rules as in the configs of BART and Marian: the tokens equal those of `generate`, which is
    called without beams."""
    target = workshop.checkpoint(name, generation=RULES)
    engine = one_thread(workshop.bundle(target, workshop.checkpoint(name, blur=0.1)), 1)
    model = AutoModelForSeq2SeqLM.from_pretrained(target, attn_implementation="eager").eval()
    for source in SOURCES:
        ids = torch.tensor([source])
        plain = {"num_beams": 1, "early_stopping": None, "do_sample": False}
        want = model.generate(ids, attention_mask=torch.ones_like(ids), **plain)[0].tolist()
        room, asked = RULES["max_length"] - 2, {"source": source, "repetition_penalty": 1.0}
        for gamma in (0, 4):
            found = engine.generate(None, **asked, gamma=gamma, max_new_tokens=room)
            assert found.token_ids == want[2:]
        off = {"no_repeat_ngram_size": 0, "bad_words_ids": (), "encoder_no_repeat_ngram_size": 0}
        assert engine.generate(None, **asked, **off, max_new_tokens=room).token_ids != want[2:]
    assert engine.stats()["accepted"] > 0
    # The forced token counts as a new token in Transformers, and as part of the prompt here.
    pair = replace(engine.manifest.pair, rules=TextRules(min_new_tokens=9))
    for prompt, least in (([1, FORCED], 8), ([1, FORCED, 7], 9)):
        assert text_rules(Options(), pair, prompt, SOURCES[1])[0] == least


@pytest.mark.parametrize("least", [None, 9])
def test_how_short_a_text_may_be(workshop: Workshop, least: int | None) -> None:
    """`min_new_tokens` overrides `min_length`, which counts the prompt. Here for a decoder-only
    model, which would otherwise end at once."""
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


# Compiled programs


class Uncompiled:
    """Replaces `aotinductor.Package`: torch runs the exported program itself, uncompiled."""

    folders: ClassVar[list[Path]] = []  # the graphs' folders, named by role

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
    """Everything but the compilation, which the slow tests cover: the export, the bundle and the
    engine's calls. Neither program contains the other's weights."""
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


def test_a_part_can_be_made_again(t5: tuple[Path, Path], workshop: Workshop) -> None:
    """`refuse_foreign` accepts an exported part, because all of its files are ours."""
    part = workshop.cache / read_bundle(t5[1]).pair.target.key[:16]
    refuse_foreign(part, PART_FILE)
    assert any((part / file).exists() for file in (ENCODER_FILE, ENCODER_PROGRAM_FILE))


def test_beams(workshop: Workshop, encoded: list[int], backend: str) -> None:
    """All hypotheses equal those of Transformers' beam search, plain and drafted, under the rules
    of the generation config, up to the length at which all end. Slots share the encoded source."""
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


# Guarantees


def test_certificate(t5: tuple[Path, Path]) -> None:
    certify(t5[1], SOURCES[1])


@pytest.mark.slow
def test_certificate_in_bfloat16(workshop: Workshop) -> None:
    bundle = bundle_of(workshop, "t5", backend="aotinductor", dtype="bfloat16")[1]
    certify(bundle, SOURCES[1])


@pytest.mark.parametrize("name", cases(["marian"], WITH_ENCODER))
def test_what_its_bits_depend_on_is_measured(workshop: Workshop, name: str) -> None:
    """And the measured guarantee holds. Fault: the longest source measured had as many tokens as a
    slot has rows, which is more than the model has positions."""
    longest = CONTEXT if name == "marian" else MAX_LEN
    _, bundle = bundle_of(workshop, name, measure=True, max_len=longest)
    assert read_bundle(bundle).invariance is not None
    engine = one_thread(bundle, 3)
    assert engine.bits.independent_of_gamma
    same_for_every_gamma(engine, SOURCES[1])


# Refusals


@pytest.mark.parametrize(
    ("target", "prompt", "options", "kind", "cause"),
    [
        ("t5", "abc", {}, "prompt", "there is no source"),
        ("t5", None, {"source": []}, "prompt", "there is no source"),
        # Fault: tokenizers that add no end of text made an encoder fail on it.
        ("t5", None, {"source": ""}, "prompt", "there is no source"),
        ("t5", None, {"source": [3] * (MAX_LEN + 1)}, "prompt",
         f"the source has {MAX_LEN + 1} tokens"),
        ("t5", None, {"source": [VOCAB_SIZE]}, "prompt",
         f"the source contains token id {VOCAB_SIZE}"),
        ("t5", None, {"source": 7}, "option", r"source=7 \(int\) is not a string"),
        ("t5", None, {"source": np.zeros(FEATURES, np.float32)}, "prompt",
         r"the source is float32 \[8, 16\], and the target, a T5"),
        ("t5", "abc", {"source": "abc", "system": "be kind"}, "option", "chat templates are for"),
        ("t5", None, {"source": "abc", "chat": True}, "option", "chat templates are for"),
        ("llama", "abc", {"source": "abc"}, "option", "a source is for encoder-decoders"),
        ("llama", "abc", {"source": ""}, "option", "a source is for encoder-decoders"),
        ("llama", None, {}, "prompt", "there is no prompt"),
    ],
)  # fmt: skip
def test_refused(
    t5: tuple[Path, Path], llama_bundle: Path, target: str, prompt: str | None,
    options: dict[str, object], kind: str, cause: str,
) -> None:  # fmt: skip
    bundle = t5[1] if target == "t5" else llama_bundle
    with pytest.raises(OutriderError, match=f"^{kind}: .*{cause}"):
        one_thread(bundle, 1).generate(prompt, **options)


def test_a_chat_template_is_refused(t5: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ messages }}")
    with pytest.raises(OutriderError, match="option: chat templates are for decoder-only models"):
        load(t5[1], chat_template=tmp_path / "template")


def test_prompts_alone_are_not_measured(t5: tuple[Path, Path]) -> None:
    with pytest.raises(OutriderError, match=r"reads a source, .* --source TEXT --baseline"):
        measure(one_thread(t5[1], 1), ["ab"], 0.0, 8)


# From the command line


def test_command_line(
    t5: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[list[int], str]:
        common = ["--engines", str(t5[1]), "--max-new-tokens", "12", "--ignore-eos"]
        assert generate.main([*common, *arguments]) == 0
        out, err = capsys.readouterr()
        return json.loads(out.splitlines()[0])["token_ids"], err

    (tmp_path / "source").write_text("translate: hello\n")
    (tmp_path / "batch").write_text(
        '{"source": "translate: hello"}\n{"source": "b", "prompt": "c"}'
    )
    ids, err = run("--json", "--source", "translate: hello")
    assert len(ids) == 12
    assert "source 16 tok | prompt 1 tok" in err
    assert run("--json", "--source-file", str(tmp_path / "source"))[0] == ids
    assert run("--batch", str(tmp_path / "batch"))[0] == ids
