"""GGUF files: the loaded weights are bitwise those that the file encodes, for every family. A file
with content that would be lost is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import torch
from checkpoints import CONTEXT, EOS, TOKENS, VOCAB_SIZE, WINDOW
from dense import bytes_per_number, different, loaded, recovers
from exported import Refused, random_ids, run_export
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from workshop import MAX_LEN, Workshop, traced_once

from export.checkpoint import content_hashes, find
from export.formats import gguf
from export.loading import load
from export.vocabulary import load_tokenizer
from export.weights.layers import Table
from export.weights.stored import load_as_stored
from runtime.files.graphs import PAIR_FILE, TEMPLATE_FILE, TOKENIZER_FILE, Pair
from runtime.files.records import read_json


@pytest.mark.parametrize(("kind", "exact"), [
    ("Q8_0", 8), ("Q4_0", 4), ("Q4_1", None), ("Q4_K", None), ("Q6_K", None), ("Q5_0", 8),
    ("Q5_1", None), ("F32", None),
])  # fmt: skip
def test_gguf(source: Path, tmp_path: Path, kind: str, exact: int | None) -> None:
    """Loaded by file name, and from the folder that contains it."""
    dense = gguf_files.write(tmp_path / "model.gguf", source, kind)
    found = find(str(tmp_path / "model.gguf"))
    assert found.packed and kind in str(found.packed)
    for path in (tmp_path / "model.gguf", tmp_path):
        tensors = loaded(path)
        assert different(tensors, dense) == []
    assert bytes_per_number(found, dense) == ({1} if kind != "F32" else set())
    for bits in (4, 8):
        down = tensors["model.layers.0.mlp.down_proj.weight"]
        assert recovers(down, bits) == bool(exact and bits >= exact)


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_kinds_of_gguf_that_are_made_dense_from_the_file(
    source: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of rare kinds, taken here by common ones."""
    monkeypatch.setattr(gguf, "_SPLIT", {})
    dense = gguf_files.write(tmp_path / "model.gguf", source, kind)
    assert bytes_per_number(find(str(tmp_path)), dense) == set()


def rope(kind: str, theta: float, **own: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **own}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Settings stored in GGUF files that the tiny checkpoints leave at their defaults.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": rope("linear", 1e4, factor=4.0)},
    "llama3": {"rope_parameters": rope("llama3", 5e5, factor=8.0, **LLAMA3)},
    "qwen2": {},
    "qwen3": {},
    "qwen3-moe": {"norm_topk_prob": True},
    "gemma2": {"num_hidden_layers": 2},  # one with a window
    "gemma3": {
        "num_hidden_layers": 6, "layer_types": None, "final_logit_softcapping": 4.0,
        "rope_parameters": {
            "full_attention": rope("linear", 1e6, factor=8.0),
            "sliding_attention": rope("default", 2e4),
        },
    },
    "phi3": {
        "rope_parameters": rope("default", 2e4, partial_rotary_factor=0.5),
        "sliding_window": WINDOW,
    },
    "phi3-longrope": {"sliding_window": None},
    "granite": {
        "attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "smollm3": {"num_hidden_layers": 4},  # one without rotation
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_gguf_says_the_same_as_its_original(workshop: Workshop, tmp_path: Path, name: str) -> None:
    """Tests the configuration too: rotation, heads, norms, biases, windows, caps, tied matrices."""
    source = workshop.checkpoint(name, **{"num_hidden_layers": 1, **FAMILIES[name]})
    original = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    more = {}
    if name == "llama3":
        llama3, _ = ROPE_INIT_FUNCTIONS["llama3"](original.config)
        default = 5e5 ** -(np.arange(0, 16, 2) / 16)
        more = {"tensors": {"rope_freqs.weight": default / llama3.numpy()}}
    gguf_files.write(tmp_path / "model.gguf", source, **more)
    ids = torch.from_numpy(random_ids(2, 100))
    with torch.no_grad():
        logits = load(find(str(tmp_path)), torch.float32)(ids).logits
        torch.testing.assert_close(logits, original(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_its_scores_otherwise(
    workshop: Workshop, tmp_path: Path, name: str, layers: int
) -> None:
    """It uses hidden_size / heads, 64 / 4; only the number of layers in the file identifies it."""
    source = workshop.checkpoint(name)
    for count, scale in ((layers, 16), (layers - 1, 32)):
        width = {f"{name}.attention.{part}_length": 32 for part in ("key", "value")}
        gguf_files.write(tmp_path / "m.gguf", source, more={f"{name}.block_count": count, **width})
        assert find(str(tmp_path)).config.query_pre_attn_scalar == scale


def test_the_oldest_files_of_phi3(workshop: Workshop, tmp_path: Path) -> None:
    """They lack the original context length: it defaults to the context length."""
    more = {
        "phi3.rope.scaling.original_context_length": None,
        "phi3.attention.sliding_window": None,
    }
    gguf_files.write(
        tmp_path / "m.gguf", workshop.checkpoint("phi3", **FAMILIES["phi3"]), more=more
    )
    config = find(str(tmp_path)).config
    assert (config.original_max_position_embeddings, config.sliding_window) == (CONTEXT, None)


def test_the_experts_of_gguf_files(workshop: Workshop, tmp_path: Path) -> None:
    """Stacked experts are loaded in Transformers' order, gate before up, and bitwise equal."""
    source = workshop.checkpoint("qwen3-moe", num_hidden_layers=1)
    dense = gguf_files.write(tmp_path / "model.gguf", source, "Q8_0")
    mlp = "model.layers.0.mlp.experts."
    gate, up, down = (dense.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up", "down"))
    dense |= {mlp + "gate_up_proj": torch.cat([gate, up], 1), mlp + "down_proj": down}
    found = find(str(tmp_path))
    assert different(loaded(tmp_path), dense) == []
    kept = dict(load_as_stored(found).named_parameters())
    assert isinstance(kept["model.layers.0.mlp.gate.weight"], Table)
    assert torch.equal(kept[mlp + "gate_up_proj"], dense[mlp + "gate_up_proj"])
    assert recovers(down[0], 8) and not recovers(down[0], 4)


def test_a_changed_nibble_of_a_file_is_another_model(source: Path, tmp_path: Path) -> None:
    """Control of the tests above."""
    dense = gguf_files.write(tmp_path / "model.gguf", source, "Q4_0")
    content = bytearray((tmp_path / "model.gguf").read_bytes())
    assert content[-1 - 64 * 4] != 0  # beyond the norms, within the last projection
    content[-1 - 64 * 4] ^= 1
    (tmp_path / "model.gguf").write_bytes(content)
    assert len(different(loaded(tmp_path / "model.gguf"), dense)) == 1


# Tokenizers, and a complete export


def test_export_of_a_gguf_file(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = workshop.checkpoint("llama")
    gguf_files.write(tmp_path / "model.gguf", source, "Q4_0")
    with traced_once():  # the graph is that of the original with 4 bits
        status, err = run_export(capsys, tmp_path, tmp_path / "model.gguf", f"--max-len={MAX_LEN}")
    assert status == 0, err
    assert "GGUF, Q4_0 and F32\n" in err
    tokenizer = json.loads((tmp_path / "out" / "tokenizer" / TOKENIZER_FILE).read_text())
    assert len(tokenizer["model"]["vocab"]) == VOCAB_SIZE
    assert (tmp_path / "out" / "tokenizer" / TEMPLATE_FILE).exists()
    pair = read_json(tmp_path / "out" / PAIR_FILE, "pair", Pair, "")
    assert pair.tokenizer.eos_token_ids == [0] and pair.tokenizer.special_tokens["eos_token"] == EOS
    assert pair.target.max_difference is not None and pair.target.max_difference < 1e-4
    named = find(str(tmp_path / "model.gguf"))
    before = content_hashes(named)
    gguf_files.write(tmp_path / "model.gguf", source, "Q4_1")
    assert before.keys() == {"model.gguf"} and content_hashes(named) != before


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_what_nobody_asks_for_is_what_costs_next_to_nothing(
    source: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before the export if the backend does not run such weights; the error shows the
    default, which loses next to nothing."""
    gguf_files.write(tmp_path / "model.gguf", source, kind)
    status, output = run_export(capsys, tmp_path, tmp_path / "model.gguf", "--backend-runs", "full")
    bits = "int4" if kind == "Q4_0" else "int8"
    assert status and f"WEIGHTS={bits}, the default here, is not supported by the backend" in output
    assert "Build with WEIGHTS=full" in output
    assert ("cannot hold its levels" in output) == (bits == "int8")


def test_tokenizers_of_gguf_files(source: Path, tmp_path: Path) -> None:
    """The same ids as the original's tokenizer; single digits if the pre-tokenizer splits them; a
    begin-of-text token, and whole words without merges, as in Llama 3."""
    gguf_files.write(tmp_path / "model.gguf", source)
    original = load_tokenizer(find(str(source)))
    own = load_tokenizer(find(str(tmp_path / "model.gguf")))
    sentence = f"Größe 1234, don't{EOS}"
    assert own(sentence).input_ids == original(sentence).input_ids
    gguf_files.write(tmp_path / "model.gguf", source, more={"tokenizer.ggml.pre": "smollm"})
    digits = load_tokenizer(find(str(tmp_path / "model.gguf"))).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in digits.pre_tokenize_str("a 12")] == ["a", "Ġ", "1", "2"]
    more = {"tokenizer.ggml.tokens": [*TOKENS[:-1], "ab"], "tokenizer.ggml.bos_token_id": 0}
    for pre, ids in (("llama-bpe", [0, 256]), ("gpt-4o", [TOKENS.index("a"), TOKENS.index("b")])):
        gguf_files.write(tmp_path / "model.gguf", source, more={"tokenizer.ggml.pre": pre, **more})
        assert load_tokenizer(find(str(tmp_path / "model.gguf")))("ab").input_ids == ids
    # Special and user-defined tokens outside the byte alphabet: each is one token with its own id.
    whole = ["<｜User｜>", "    ", "<｜end▁of▁sentence｜>"]
    kinds = [*[1] * (len(TOKENS) - 3), 3, 4, 1]  # the last one is eos_token_id
    more = {"tokenizer.ggml.tokens": [*TOKENS[:-3], *whole], "tokenizer.ggml.token_type": kinds}
    more["tokenizer.ggml.bos_token_id"] = more["tokenizer.ggml.eos_token_id"] = len(TOKENS) - 1
    gguf_files.write(tmp_path / "model.gguf", source, more={"tokenizer.ggml.pre": "qwen2", **more})
    own = load_tokenizer(find(str(tmp_path / "model.gguf")))
    text = "a<｜User｜>    b<｜end▁of▁sentence｜>"
    user, spaces, end = range(len(TOKENS) - 3, len(TOKENS))
    assert own(text).input_ids == [TOKENS.index("a"), user, spaces, TOKENS.index("b"), end]
    assert own.decode(own(text).input_ids) == text and own.bos_token_id == end
    assert own.decode(own(text).input_ids, skip_special_tokens=True) == "a    b"
    # The tokenizer has no more tokens than the model.
    assert len(own) == len(TOKENS) and max(own("<|endoftext|>").input_ids) < len(TOKENS)
    more = {"tokenizer.ggml.pre": "deepseek-coder"}
    gguf_files.write(tmp_path / "model.gguf", source, more=more)
    pieces = load_tokenizer(find(str(tmp_path / "model.gguf"))).backend_tokenizer.pre_tokenizer
    pieces_cut = [piece for piece, _ in pieces.pre_tokenize_str("if x: 23!\n\nx中a")]
    assert pieces_cut == ["if", "Ġx", ":", "Ġ", "2", "3", "!", "Ċ", "Ċ", "x", "ä¸Ń", "a"]
    (tmp_path / TOKENIZER_FILE).write_bytes((source / TOKENIZER_FILE).read_bytes())
    beside = load_tokenizer(find(str(tmp_path))).backend_tokenizer
    assert beside.to_str() == original.backend_tokenizer.to_str()


def sentencepiece(spaces: str, prefix: bool | None) -> dict[str, Any]:
    """A SentencePiece vocabulary as stored in a file. spaces: spelling of the token of two spaces.
    prefix: add_space_prefix; None leaves it out."""
    pieces = ["▁", spaces, "a", "b", "▁a", "▁b", "ab", "<|end|>", "<|endoftext|>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [1, 4 if spaces == "  " else 1, *[1] * 5, 3, 3]  # 4: user-defined, of spaces alone
    ids = {"bos": 1, "eos": 2, "unknown": 0}
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": None,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *kinds],
        "tokenizer.ggml.add_space_prefix": prefix,
        **{f"tokenizer.ggml.{role}_token_id": i for role, i in ids.items()},
    }  # fmt: skip


# llama.cpp's tokens, without begin-of-text.
@pytest.mark.parametrize(("family", "prefix", "sentence", "pieces"), [
    ("llama", None, " ab", ["▁▁", "ab"]),
    ("llama", None, "a<|end|>b\n", ["▁a", "<|end|>", "▁b", "<0x0A>"]),
    ("llama", False, "ab b", ["ab", "▁b"]),
    ("phi3", None, "a<|end|>  b </s> ", ["▁a", "<|end|>", "▁b", "▁", "</s>"]),
    ("gemma3", False, "ab  ab ", ["ab", "▁▁", "ab", "▁"]),
])  # fmt: skip
def test_sentencepiece_in_gguf_files(
    workshop: Workshop, tmp_path: Path, family: str, prefix: bool | None, sentence: str,
    pieces: list[str],
) -> None:  # fmt: skip
    """Spaces are added as llama.cpp adds them, although no key specifies it; and decoding."""
    source = workshop.checkpoint(family, **FAMILIES[family])
    spaces = "  " if family == "gemma3" else "▁▁"
    gguf_files.write(tmp_path / "model.gguf", source, more=sentencepiece(spaces, prefix))
    own = load_tokenizer(find(str(tmp_path)))
    assert own.convert_ids_to_tokens(260) == "▁▁"
    begin, *ids = own(sentence).input_ids
    assert begin == 1 and own.convert_ids_to_tokens(ids) == pieces
    if "<" not in sentence:  # the spaces added after special tokens remain
        assert own.decode(own(sentence, add_special_tokens=False).input_ids) == sentence


# Damaged files, and unsupported content


def _meta(key: str, value: Any) -> dict[str, Any]:
    return {"more": {key: value}}


@pytest.mark.parametrize("end_tokens", [["<end_of_turn>"], ["<|end|>", "<|eot_id|>"]])
def test_a_turn_ends_where_the_tokens_say(
    source: Path, tmp_path: Path, end_tokens: list[str]
) -> None:
    """A file has one eos_token_id; other end tokens are recognised by their names."""
    tokens = [*TOKENS[: -len(end_tokens)], *end_tokens]
    gguf_files.write(tmp_path / "m.gguf", source, more={"tokenizer.ggml.tokens": tokens})
    assert find(str(tmp_path)).config.eos_token_id == [0, *range(VOCAB_SIZE)[-len(end_tokens) :]]


def _factors(table: np.ndarray) -> dict[str, Any]:
    return {"tensors": {"rope_freqs.weight": table}}


ODD_GGUF: dict[str, tuple[dict[str, Any], str]] = {
    "another family": (_meta("general.architecture", "mamba"), "a GGUF file of 'mamba'"),
    "a key that would be lost": (
        _meta("llama.rope.scaling.type", "yarn"), "llama.rope.scaling.type = yarn",
    ),
    "an encoder": (_meta("llama.attention.causal", False), "attention.causal = False"),
    "half a rotation": (_meta("llama.rope.dimension_count", 8), "dimension_count = 8"),
    "sizes by layer": (
        _meta("llama.attention.head_count_kv", [2, 4]), "differ from layer to layer",
    ),
    "sizes that are words": (_meta("llama.rope.freq_base", "high"), "or are not positive"),
    "an end that is a word": (
        _meta("tokenizer.ggml.eos_token_id", "</s>"), "its metadata is not valid",
    ),
    "one of two": (_meta("split.count", 2), "one of 2 parts"),
    "an unknown tokenizer": (_meta("tokenizer.ggml.pre", "odd"), "tokenizer.ggml.pre = 'odd'"),
    "no tokens": (
        _meta("tokenizer.ggml.tokens", []), "has no tokenizer. Put it into a folder with the",
    ),
    "a tokenizer of words": (
        _meta("tokenizer.ggml.model", "bert"), "Put it into a folder with the original's",
    ),
    "rotary factors too few": (_factors(np.ones(5)), "a positive factor for each of 8"),
    "rotary factors that are none": (_factors(np.zeros(8)), "a positive factor for each"),
    "rotary factors that are NaN": (_factors(np.full(8, np.nan)), "a positive factor for each"),
    "factors below one": (_factors(np.full(8, 0.5)), "other than Llama 3's"),
    "other rotary factors": (_factors(np.linspace(1, 9, 8)), "other than Llama 3's"),
    "a tensor too many": (
        {"tensors": {"blk.0.attn_sinks.weight": np.ones(4)}}, "blk.0.attn_sinks.weight first",
    ),
}  # fmt: skip


LONG = "rope_factors_long.weight"
ODD_FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no window": ("gemma3", _meta("gemma3.attention.sliding_window", None), "lacks sliding_window"),
    "a window of none": (
        "gemma2", _meta("gemma2.attention.sliding_window", 0), "or are not positive",
    ),
    "windows by layer": (
        "gemma2", _meta("gemma2.attention.sliding_window_pattern", [1, 0]), "pattern = [1, 0]",
    ),
    "no cap": ("gemma2", _meta("gemma2.attn_logit_softcapping", None), "lacks attn_logit_soft"),
    "caps by layer": (
        "gemma3", _meta("gemma3.final_logit_softcapping", [4.0, 5.0]), "differ from layer to layer",
    ),
    "another rotation near by": (
        "qwen3", _meta("qwen3.rope.freq_base_swa", 1e4), "rope.freq_base_swa = 10000.0",
    ),
    "a factor of no kind": (
        "gemma3",
        {"more": {"gemma3.rope.scaling.type": "none", "gemma3.rope.scaling.factor": 8.0}},
        "rope.scaling.factor = 8.0",
    ),
    "more than a whole rotation": (
        "phi3", _meta("phi3.rope.dimension_count", 18), "a rotary embedding of 18 in 16",
    ),
    "heads of no width": (
        "phi3", _meta("phi3.attention.head_count", 128), "a rotary embedding of 8 in 0",
    ),
    "louder without factors": (
        "phi3", _meta("phi3.rope.scaling.attn_factor", 1.19), "attn_factor = 1.19",
    ),
    "long factors alone": ("phi3", {"tensors": {LONG: np.ones(8)}}, "it lacks rope_factors_short"),
    "long factors too few": (
        "phi3-longrope", {"tensors": {LONG: np.ones(7)}},
        f"{LONG} lacks a positive factor for each of 8",
    ),
    "factors of two kinds": (
        "phi3", {"tensors": {"rope_freqs.weight": np.ones(8)}}, "beside another kind of rotary",
    ),
    "long factors of a Llama": ("llama", {"tensors": {LONG: np.ones(8)}}, f"{LONG} first"),
    "no rotation": ("granite", _meta("granite.rope.scaling.finetuned", False), "finetuned = False"),
    "a multiplier too few": ("granite", _meta("granite.logit_scale", None), "lacks logits_scaling"),
    "weights of experts": (
        "qwen3-moe", _meta("qwen3moe.expert_weights_scale", 2.5), "expert_weights_scale = 2.5",
    ),
    "experts of other sizes": (
        "qwen3-moe", _meta("qwen3moe.expert_feed_forward_length", 64), "experts.down_proj first",
    ),
    "experts of two sizes": (
        "qwen3-moe", {"tensors": {"blk.0.ffn_up_exps.weight": np.ones((4, 16, 64))}},
        "up_proj is F32 [4, 16, 64] instead of F32 [4, 32, 64]",
    ),
    "a layer that is dense": (
        "qwen3-moe", {"tensors": {"blk.0.ffn_gate.weight": np.ones((96, 64))}}, "gate_proj.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", [*ODD_GGUF, *ODD_FAMILIES])
def test_what_gguf_files_say_and_lose(
    source: Path, workshop: Workshop, tmp_path: Path, what: str, refused: Refused
) -> None:
    name, more, words = ODD_FAMILIES.get(what) or ("", *ODD_GGUF[what])
    model = workshop.checkpoint(name, **FAMILIES[name]) if name else source
    gguf_files.write(tmp_path / "model.gguf", model, **more)
    kind = "architecture" if what == "another family" else "checkpoint"
    assert words in refused(tmp_path / "model.gguf", kind=kind)


@pytest.mark.parametrize("length", [3, 4, 100, 3000, -100])
def test_truncated_gguf_files(source: Path, tmp_path: Path, length: int, refused: Refused) -> None:
    gguf_files.write(tmp_path / "model.gguf", source, "Q8_0")
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content[:length])
    words = "it ends before" if length < 0 else "cannot be read as GGUF"
    assert words in refused(tmp_path / "model.gguf")


def test_a_folder_with_two_gguf_files(source: Path, tmp_path: Path, refused: Refused) -> None:
    for name in ("a.gguf", "b.gguf"):
        gguf_files.write(tmp_path / name, source)
    assert "has 2 GGUF files" in refused(tmp_path)
