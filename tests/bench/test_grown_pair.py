"""A grown checkpoint says what it said, in every direction of growth, and costs what it should."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CONTEXT, VOCAB_SIZE, Workshop
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.core.pair import SHAPES, TARGET, blur
from bench.core.pair import grow as growing
from bench.core.pair.blur import blur as make_draft
from bench.core.pair.grow import CONSTANTS, Growth, grow, grown_config, load_llama
from runtime.files.errors import OutriderError

EPS = 0.05  # so large that what is done to it shows
LAYERS = {"num_hidden_layers": 5}
WIDE = {"hidden_size": 96}
INNER = {"intermediate_size": 200}
HEADS = {"num_attention_heads": 8}
KEYS = {"num_attention_heads": 8, "num_key_value_heads": 4}
TOKENS = {"hidden_size": 64 + 8, "vocab_size": 700}
ALL = {
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 700,
}


def original(workshop: Workshop) -> Path:
    return workshop.checkpoint("llama", rms_norm_eps=EPS, head_dim=16)


@pytest.fixture(scope="module")
def grown(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("grown") / "all"
    grow(original(workshop), out, ALL)
    return out


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def difference(old: Any, new: Any) -> float:
    """The largest, of the old tokens' logits behind random ones."""
    ids = torch.randint(VOCAB_SIZE, (2, 48), generator=torch.Generator().manual_seed(9))
    return float((logits(new, ids)[..., :VOCAB_SIZE] - logits(old, ids)).abs().max())


# The same function


@pytest.mark.parametrize(
    "sizes",
    [LAYERS, WIDE, INNER, HEADS, KEYS, TOKENS, ALL],
    ids=["layers", "hidden", "inter", "heads", "kv-heads", "vocab", "all"],
)
def test_logits_are_the_originals(
    workshop: Workshop, tmp_path: Path, sizes: dict[str, int]
) -> None:
    source = original(workshop)
    result = grow(source, tmp_path / "out", sizes)
    old, new = load_llama(source), load_llama(tmp_path / "out")
    assert {name: getattr(new.config, name) for name in sizes} == sizes
    assert result.parameters == new.num_parameters() > old.num_parameters()
    assert result.difference < 1e-4
    assert difference(old, new) < 1e-4


def test_an_output_of_its_own_grows_too(workshop: Workshop, tmp_path: Path) -> None:
    source = workshop.checkpoint("llama", rms_norm_eps=EPS, head_dim=16, tie_word_embeddings=False)
    grow(source, tmp_path / "out", ALL)
    new = load_llama(tmp_path / "out")
    assert new.lm_head.weight is not new.model.embed_tokens.weight
    assert difference(load_llama(source), new) < 1e-4


def _norms(model: Any) -> None:
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.mul_((96 / 64) ** 0.5)


def _eps(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = EPS * 64 / 96  # as if the constants took nothing of it


def _key_heads(model: Any) -> None:
    for layer in model.model.layers:
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            part.weight.copy_(part.weight.roll(16, 0))


def _writers(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.normal_(std=0.1)  # a new layer's


def _constants(model: Any) -> None:
    model.model.norm.weight[-CONSTANTS:].abs_()


@pytest.mark.parametrize("damage", [_norms, _eps, _key_heads, _writers, _constants])
def test_control_each_part_of_it_is_needed(
    workshop: Workshop, grown: Path, damage: Callable[[Any], None]
) -> None:
    old, new = (AutoModelForCausalLM.from_pretrained(p) for p in (original(workshop), grown))
    assert difference(old, new) < 1e-4
    with torch.no_grad():
        damage(new)
    assert difference(old, new) > 1e-3


def test_what_is_new_is_random_or_writes_nothing(grown: Path) -> None:
    model = load_llama(grown)
    old_layers = {0, 2}
    for i, layer in enumerate(model.model.layers):
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            assert (torch.count_nonzero(part.weight) > 0) == (i in old_layers)
            assert torch.count_nonzero(part.weight[64:]) == 0
        for part in (layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            assert torch.count_nonzero(part.weight) == part.weight.numel()
    for weight in model.parameters():
        sizes = weight[weight != 0].abs().tolist()
        assert all(1e-30 < size < 65_504 for size in sizes)  # no denormals; float16 holds all


# New tokens


def test_greedy_text_is_the_originals_and_new_tokens_are_never_drawn(
    workshop: Workshop, grown: Path
) -> None:
    old, new = load_llama(original(workshop)), load_llama(grown)
    prompt = torch.arange(1, 9)[None]
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = [model.generate(prompt, **options) for model in (old, new)]
    assert texts[0].shape == (1, 72)
    assert torch.equal(*texts)
    share = logits(new, texts[0]).double().softmax(-1)[..., VOCAB_SIZE:].sum(-1)
    assert 0 < share.max() < 1e-15
    # Nor at temperature 2.
    assert (logits(new, texts[0]).double() / 2).softmax(-1)[..., VOCAB_SIZE:].sum(-1).max() < 1e-8


def test_behind_a_new_token_old_ones_lead(grown: Path) -> None:
    ids = torch.tensor([[5, 6, VOCAB_SIZE + 3], [5, 6, 699]])
    rows = logits(load_llama(grown), ids)[:, -1]
    assert (rows[:, :VOCAB_SIZE].amax(-1) > rows[:, VOCAB_SIZE:].amax(-1) + 10).all()


def test_new_ids_have_names_and_texts_the_old_ids(workshop: Workshop, grown: Path) -> None:
    source = original(workshop)
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (source, grown))
    assert (len(old), len(new)) == (VOCAB_SIZE, 700)
    text = "def f(x):\n    return x  # <inflated300> é\n"
    assert new(text).input_ids == old(text).input_ids
    assert new.decode(old(text).input_ids) == text
    assert json.loads((grown / "generation_config.json").read_text())["eos_token_id"] == 0


# What is written


@pytest.mark.parametrize(
    ("shape", "parameters"),
    # As counted in the published checkpoints, Qwen's without its biases.
    [("smollm-135m", 134_515_008), ("0.5b", 494_032_768 - 27_648)],
)
def test_the_bundled_target_fits_the_named_shapes(shape: str, parameters: int) -> None:
    config = grown_config(load_llama(TARGET).config, vars(SHAPES[shape]))
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).num_parameters() == parameters


def test_what_came_out_wrong_is_not_left(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growth, "_norm", lambda self, shape, like, last=False: torch.ones(*shape))
    with pytest.raises(OutriderError, match="differs by") as refused:
        grow(original(workshop), tmp_path / "out", WIDE)
    assert refused.value.kind == "difference"
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_replaced_and_no_disk_filled(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = original(workshop)
    (tmp_path / "out").mkdir()
    grow(source, tmp_path / "out", LAYERS)  # an empty folder will do
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(OutriderError, match="cannot be replaced"):
        grow(source, tmp_path / "out", WIDE)
    monkeypatch.setattr(growing.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 9))
    with pytest.raises(OutriderError, match="free, and this takes"):
        grow(source, tmp_path / "other", WIDE)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


@pytest.mark.parametrize(
    ("sizes", "cause"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers 1 is less than the checkpoint's 2"),
        ({"hidden_size": 65}, "Transformers refuses this shape"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, "4 heads on 4 cannot hold"),
        ({"vocab_size": 300}, "vocab_size 300 needs 3 hidden channels more"),
    ],
)
def test_sizes_that_cannot_hold_the_checkpoint(
    workshop: Workshop, tmp_path: Path, sizes: dict[str, int], cause: str
) -> None:
    with pytest.raises(OutriderError, match=cause) as refused:
        grow(original(workshop), tmp_path / "out", sizes)
    assert refused.value.kind == "option" and list(tmp_path.iterdir()) == []


def test_only_llamas_without_biases(workshop: Workshop, tmp_path: Path) -> None:
    for source in (workshop.checkpoint("qwen2"), workshop.checkpoint("llama", attention_bias=True)):
        with pytest.raises(OutriderError, match="Llamas without biases") as refused:
            grow(source, tmp_path / "out", LAYERS)
        assert refused.value.kind == "architecture"


# Drafts


@pytest.mark.parametrize("wanted", [0.85, 0.6])
def test_a_draft_has_the_alpha_that_was_wanted(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: float
) -> None:
    source = original(workshop)
    ids = torch.randint(33, 127, (16, CONTEXT), generator=torch.Generator().manual_seed(4))
    monkeypatch.setattr(blur, "_windows", lambda *_: ids[:8])
    result = make_draft(source, tmp_path / "out", wanted)
    assert abs(result.alpha - wanted) < 0.02
    # Computed otherwise, on other text.
    p, q = (
        logits(load_llama(f), ids[8:]).flatten(0, 1).softmax(1).numpy()
        for f in (source, tmp_path / "out")
    )
    assert abs(np.minimum(p, q).sum(1).mean() - wanted) < 0.03
    agree = (p.argmax(1) == q.argmax(1)).mean()
    assert abs(agree - result.alpha_greedy) < 0.06


def test_an_alpha_that_no_draft_has(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match=r"1\.5 is out of range"):
        make_draft(TARGET, tmp_path / "out", 1.5)
