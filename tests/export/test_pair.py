"""Two checkpoints become one pair, each part is exported once, and how much memory that takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch
from checkpoints import TOKENS, VOCAB_SIZE, tokenizer, write
from commands import CHECKOUT, environment
from exported import SHORT, SHORT_DRAFT, TIED, UNTIED, Refused, eager, edit_json, edit_weights
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from workshop import CAPACITY, MAX_GAMMA, MAX_LEN, Workshop

from engines.bundle import build
from export import checkpoint, loading, part, vocabulary
from export.pair import export as export_pair
from runtime import load
from runtime.files.graphs import GRAPH_FILE, PART_FILE, Pair, read_pair
from runtime.files.torch_files import WEIGHTS_FILE


def test_a_pair_of_different_tokenizers(workshop: Workshop, refused: Refused) -> None:
    """Refused before anything is exported, with the first differing id and the number of them."""
    other = [*TOKENS]
    other[139], other[140], other[141] = TOKENS[141], TOKENS[139], TOKENS[140]
    draft = workshop.checkpoint(TIED, tokens=tuple(other))
    message = refused(workshop.checkpoint(UNTIED), "--draft", str(draft), kind="vocabulary")
    assert (
        f"id 139 is {TOKENS[139]!r} in the target and {TOKENS[141]!r} in the draft (first of 3)"
    ) in message


def test_a_narrower_draft_and_padding(workshop: Workshop) -> None:
    """Vocabularies with different padding, and tokens that the draft lacks: 264 tokens in 320
    columns, and 257 in 260. tests/session/test_bits.py checks the texts of this pair."""
    tokens = (*TOKENS, *(f"<extra {i}>" for i in range(7)))
    target = workshop.checkpoint(TIED, tokens=tokens, vocab_size=320, num_hidden_layers=1)
    draft = workshop.checkpoint(TIED, seed=7, vocab_size=260, num_hidden_layers=1)
    pair = read_pair(workshop.graphs(target, draft))
    assert pair.draft is not None
    assert (pair.vocab_size, pair.target.vocab_size, pair.draft.vocab_size) == (264, 320, 260)
    summary = vocabulary.check_same_tokens(tokenizer(tokens), tokenizer(), 260)
    assert summary.startswith("7 of the target's tokens")


def test_a_draft_of_a_shorter_context(workshop: Workshop) -> None:
    """The draft proposes tokens up to the end of its context; then the target continues alone."""
    target, draft = workshop.checkpoint(TIED), workshop.checkpoint("gpt2", **SHORT_DRAFT)
    pair = read_pair(workshop.graphs(target, draft))
    assert pair.draft is not None
    assert (pair.max_len, pair.draft.max_len, pair.draft.capacity) == (MAX_LEN, SHORT, CAPACITY)
    engine = load(workshop.bundle(target, draft), slots=1)
    prompt = list(range(40, 50))
    result = engine.generate(prompt, max_new_tokens=100, gamma=4, ignore_eos=True)
    logits = eager(target, np.array([prompt + result.token_ids]))[0, len(prompt) - 1 : -1]
    assert result.token_ids == logits.argmax(-1).tolist()
    assert result.tokens[-1].origin == "plain"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([5, 3, 5], 9, [3, 5]),  # the list at which `generate` stops
        (7, 9, [7]),
        (None, [9, 4], [4, 9]),
        (None, None, [0]),  # the tokenizer's
    ],
)
def test_end_of_text_ids(
    tmp_path: Path, generation: object, config: object, expected: list[int]
) -> None:
    folder = write(tmp_path / "checkpoint", TIED)
    for name, ids in (("config.json", config), ("generation_config.json", generation)):
        edit_json(folder / name, eos_token_id=ids)
    found = checkpoint.find(str(folder))
    assert vocabulary.end_of_text_ids(found, vocabulary.load_tokenizer(found)) == expected
    if generation is None:
        (folder / "generation_config.json").unlink()
        assert vocabulary.end_of_text_ids(found, vocabulary.load_tokenizer(found)) == expected


@pytest.mark.parametrize(
    ("architecture", "own"),
    [(TIED, {"forced_bos_token_id"}), ("t5", set()), ("whisper", {"logprob_threshold"})],
)
def test_what_a_bundle_does_not_carry_is_named(
    tmp_path: Path, architecture: str, own: set[str]
) -> None:
    """forced_bos_token_id is ignored for a decoder-only model, but not for an encoder-decoder."""
    folder = write(tmp_path / "checkpoint", architecture)
    settings = {
        "typical_p": 0.5, "early_stopping": True, "renormalize_logits": True,
        "forced_bos_token_id": 6, "logprob_threshold": -1.0, "return_timestamps": False,
    }  # fmt: skip
    edit_json(folder / "generation_config.json", **settings)
    ignored_settings = vocabulary.sampling_defaults(checkpoint.find(str(folder)))
    common = {"typical_p", "early_stopping", "renormalize_logits"}
    assert ignored_settings == {name: settings[name] for name in common | own}


def test_a_maximum_length_is_a_setting_unless_it_is_the_context(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", TIED)
    context = checkpoint.find(str(folder)).text_config.max_position_embeddings
    for length, reported in ((context, False), (context - 1, True)):
        edit_json(folder / "generation_config.json", max_length=length)
        found = vocabulary.sampling_defaults(checkpoint.find(str(folder)))
        assert ("max_length" in found) is reported


@pytest.mark.parametrize("architecture", [TIED, "bart"])
def test_an_old_checkpoint_generates_by_its_config_json(tmp_path: Path, architecture: str) -> None:
    """As in Transformers, although its configuration classes drop these fields. Fault: a BART
    without generation_config.json began with the wrong token, and repeated itself."""
    folder = write(tmp_path / "checkpoint", architecture)
    settings = {"no_repeat_ngram_size": 3, "bad_words_ids": [[7]], "forced_bos_token_id": 5}
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", **settings, num_beams=4)
    found = checkpoint.find(str(folder))
    kind = AutoModelForSeq2SeqLM if found.has_encoder else AutoModelForCausalLM
    expected, rules = kind.from_pretrained(folder).generation_config, vocabulary.text_rules(found)
    assert rules and (rules.no_repeat_ngram_size, rules.bad_words_ids) == (3, [[7]])
    assert rules.forced_eos_token_id == expected.forced_eos_token_id
    ignored_settings = vocabulary.sampling_defaults(found)
    assert ignored_settings["num_beams"] == expected.num_beams == 4
    if found.has_encoder:
        assert vocabulary.start_ids(found) == [expected.decoder_start_token_id, 5]


@pytest.mark.parametrize("text_eos", [9, None])
def test_the_whole_model_says_where_texts_end(tmp_path: Path, text_eos: int | None) -> None:
    """As in `generate`, for a model with a nested text_config."""
    folder = write(tmp_path / "checkpoint", "qwen2.5-vl")
    (folder / "generation_config.json").unlink()
    text_config = json.loads((folder / "config.json").read_text())["text_config"]
    changed = {**text_config, "eos_token_id": text_eos}
    edit_json(folder / "config.json", eos_token_id=5, text_config=changed)
    found = checkpoint.find(str(folder))
    assert vocabulary.end_of_text_ids(found, vocabulary.load_tokenizer(found)) == [5]


def test_weights_that_need_not_be_there(tmp_path: Path) -> None:
    """Pegasus' sinusoids, which Transformers computes."""
    sines = "model.decoder.embed_positions.weight"
    pegasus = write(tmp_path / "pegasus", "pegasus")
    edit_weights(pegasus, lambda w: w.pop(sines))
    model = loading.load(checkpoint.find(str(pegasus)), torch.float32)
    table = model.get_submodule(sines.removesuffix(".weight"))
    assert torch.equal(table.weight, table.create_weight())


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("gpt2", ["h.0.attn.bias", "h.0.attn.masked_bias"]),
        ("gptj", ["h.0.attn.bias", "h.0.attn.masked_bias"]),
        ("gpt-neo", ["h.0.attn.attention.bias", "h.0.attn.attention.masked_bias"]),
        ("codegen", ["h.0.attn.causal_mask"]),
        ("xglm", ["embed_positions.weights"]),
    ],
)
def test_computed_tensors_in_old_files(tmp_path: Path, name: str, stored: list[str]) -> None:
    """Fault: GPT-J, GPT-Neo and CodeGen as they lie on the hub had weights that are not theirs."""
    base = "model" if name == "xglm" else "transformer"
    folder = write(tmp_path / name, name)
    computed = {f"{base}.{key}": torch.full((1, 1, 4, 4), -1e4) for key in stored}
    edit_weights(folder, lambda weights: weights.update(computed))
    loading.load(checkpoint.find(str(folder)), torch.float32)


def test_tokenizer_and_chat_template_travel_along(workshop: Workshop, tmp_path: Path) -> None:
    plain = read_pair(workshop.graphs(workshop.checkpoint(TIED))).tokenizer
    assert (plain.chat_template, plain.vocab_size) == (False, VOCAB_SIZE)
    copy = Path(shutil.copytree(workshop.checkpoint(TIED), tmp_path / "checkpoint"))
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ eos_token }}"
    tokenizer_with_template = tokenizer()
    tokenizer_with_template.chat_template = template
    tokenizer_with_template.save_pretrained(copy)
    out = workshop.graphs(copy)  # the cached graph: the tokenizer is not part of its key
    pair = read_pair(out)
    assert pair.tokenizer.chat_template
    assert (out / "tokenizer" / "chat_template.jinja").read_text() == template
    assert pair.tokenizer.key != plain.key
    assert pair.tokenizer.special_tokens == {"eos_token": TOKENS[0]}
    build(out, tmp_path / "bundle", backend="onnxruntime", slots=1)
    engine = load(tmp_path / "bundle")
    assert engine.tokenizer.render_chat([{"role": "user", "content": "hi"}]) == f"<hi>{TOKENS[0]}"
    other = tmp_path / "other.jinja"
    other.write_text("{{ eos_token }}{{ messages[0].content }}")
    replaced = load(tmp_path / "bundle", chat_template=other)
    assert replaced.tokenizer.render_chat([{"content": "hi"}]) == f"{TOKENS[0]}hi"
    assert engine.tokenizer.encode("hi") == tokenizer_with_template.encode(
        "hi", add_special_tokens=False
    )


def test_parts_are_found_again_by_what_they_are_made_from(
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache = tmp_path / "cache"
    source = Path(shutil.copytree(workshop.checkpoint(TIED), tmp_path / "checkpoint"))
    shutil.copytree(workshop.graphs(workshop.checkpoint(TIED)), tmp_path / "first")
    key = read_pair(tmp_path / "first").target.key
    shutil.copytree(workshop.cache / key[:16], cache / key[:16])
    exported_keys: list[str] = []

    def record_export(*arguments: object) -> None:
        exported_keys.append(str(arguments[-1]))
        raise StopIteration  # an export would start here

    monkeypatch.setattr(part, "_export", record_export)

    def export_again(**options: object) -> Pair | None:
        options = {"max_len": MAX_LEN, "max_gamma": MAX_GAMMA, "cache": cache, **options}
        try:
            return export_pair(str(source), None, tmp_path / "out", **options)
        except StopIteration:
            return None

    assert export_again() == read_pair(tmp_path / "first")
    assert exported_keys == []
    assert f"cached (key {key[:8]})" in capsys.readouterr().err
    for changed in (
        {"max_len": MAX_LEN - 1}, {"max_gamma": 4}, {"dtype": "float16"}, {"weights": "int4"},
        {"weights": "int4", "bits": 5.0}, {"weights": "int4", "bits": 5.5},
    ):  # fmt: skip
        assert export_again(**changed) is None
        assert "cached" not in capsys.readouterr().err
    assert len({key, *exported_keys}) == 7
    assert export_again(force=True) is None
    assert exported_keys[6:] == [key]
    # One bit of one weight changed.
    weights = source / "model.safetensors"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    assert export_again() is None
    weights.write_bytes(intact)
    assert export_again() is not None
    # Damaged parts.
    for name in (GRAPH_FILE, WEIGHTS_FILE, PART_FILE):
        intact = (cache / key[:16] / name).read_bytes()
        for damaged in (intact[:-2], b"\0" + intact[1:], None):
            path = cache / key[:16] / name
            path.unlink(missing_ok=True)
            if damaged is not None:
                path.write_bytes(damaged)
            assert export_again() is None, name
            path.write_bytes(intact)
    assert export_again() is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shards", "pickle"])
def test_other_ways_to_store_weights(workshop: Workshop, tmp_path: Path, kind: str) -> None:
    source = workshop.checkpoint(TIED)
    copy = Path(shutil.copytree(source, tmp_path / "checkpoint"))
    model = AutoModelForCausalLM.from_pretrained(source)
    (copy / "model.safetensors").unlink()
    if kind == "shards":
        model.save_pretrained(copy, max_shard_size="100KB")
        assert len(list(copy.glob("*.safetensors"))) > 2
    else:
        torch.save(model.state_dict(), copy / "pytorch_model.bin")
    options = {"max_len": MAX_LEN, "max_gamma": MAX_GAMMA, "cache": tmp_path / "cache"}
    pair = export_pair(str(copy), None, tmp_path / "out", **options)
    made, wanted = pair.target.files, read_pair(workshop.graphs(source)).target.files
    assert made.keys() == wanted.keys()
    assert made[WEIGHTS_FILE] == wanted[WEIGHTS_FILE]  # node numbers in graphs may differ


def test_other_code_in_a_subfolder_makes_another_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "__file__", str(tmp_path / "part.py"))
    monkeypatch.setattr(part, "ROUNDING", tmp_path / "rounding.cpp")
    part.ROUNDING.write_text("0")
    digests = [part.exporter_digest()]
    (tmp_path / "functions").mkdir()
    for name, code in (
        ("part.py", "1"),
        ("functions/verify.py", "1"),
        ("functions/verify.py", "2"),
        ("rounding.cpp", "1"),
    ):
        (tmp_path / name).write_text(code)
        digests.append(part.exporter_digest())
    assert len(set(digests)) == 5


PEAK = """
import sys, threading
from pathlib import Path
sys.modules["triton"] = None  # torch maps 70 MB of it where it is installed, for GPUs
import export.pair, onnxruntime, transformers.models.qwen2.modeling_qwen2
from export.weights import quality

quality.check_quality = lambda *_: None  # quantised random weights would fail it

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

before = peak = resident("RssAnon")
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, resident("RssAnon"))

watcher = threading.Thread(target=watch, daemon=True)  # daemon: it must not outlive a failure
watcher.start()
folder = Path(sys.argv[2])
options = {"max_len": 64, "cache": folder / "cache", "weights": sys.argv[3]}
export.pair.export(sys.argv[1], None, folder / "out", **options)
done.set()
watcher.join()
print(peak - before, resident("VmHWM") - before)
"""


_DEEP = {
    "name": UNTIED, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6,
    "num_attention_heads": 16,
}  # fmt: skip
# Nearly all of its weights are the per-layer embedding.
_TABLES = {
    "name": "gemma4", "vocab_size": 65_536, "vocab_size_per_layer_input": 65_536,
    "hidden_size": 256, "hidden_size_per_layer_input": 640, "enable_moe_block": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "weights", "bits", "most", "mapped"),
    [
        (_DEEP, "full", 32, 0.5, 1.0),
        (_DEEP, "int8", 32, 1.2, 1.0),
        ({**_DEEP, "num_hidden_layers": 12}, "int8", 16, 1.9, 1.0),
        (_TABLES, "int8", 16, 1.4, 2.0),  # the graph stores it in 32 bits
        (_DEEP, "int8", 4, 1.4, 1.0),  # it was 2.3 when the weights were made dense first
    ],
)
def test_exporting_takes_little_memory_beside_the_files(
    tmp_path: Path, sizes: dict[str, Any], weights: str, bits: int, most: float, mapped: float
) -> None:
    """Weights are read and written through mapped files, whose pages the system can drop at any
    time; the anonymous memory is a fraction of their size, although the graph is run as well. For
    quantised weights it also holds the levels, and one dense matrix at a time. Of a packed
    checkpoint it holds one byte per weight; bounds are relative to the dense size."""
    source = write(tmp_path / "checkpoint", **sizes)
    if bits == 16:
        edit_weights(source, lambda w: w.update({name: x.bfloat16() for name, x in w.items()}))
        edit_json(source / "config.json", dtype="bfloat16")
    size = (source / "model.safetensors").stat().st_size
    assert size > 330e6
    if bits == 4:
        method = {"quant_method": "gptq", "bits": 4, "group_size": 128}
        packers.write(tmp_path / "packed", source, packers.gptq(4, 128, symmetric=True), **method)
        source = tmp_path / "packed"
    process = subprocess.run(
        [sys.executable, "-c", PEAK, str(source), str(tmp_path), weights],
        cwd=CHECKOUT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    anonymous, everything = map(int, process.stdout.split())
    assert anonymous < most * size
    # Mapped pages included: the checkpoint too, and the libraries that PyTorch loads for tracing.
    assert everything < (mapped + most) * size + 128 * 2**20
