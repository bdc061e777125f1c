"""A grown checkpoint keeps its output in every direction of growth, and has the intended size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CONTEXT, VOCAB_SIZE
from transformers import AutoModelForCausalLM, AutoTokenizer
from workshop import Workshop

from bench.core.pair import SHAPES, TARGET, blur, grow, make
from bench.core.pair.grow import Growth, grown_config, load_llama
from runtime.files.errors import OutriderError

EPS = 0.05  # large enough that changes to it show
LAYERS, WIDE = {"num_hidden_layers": 5}, {"hidden_size": 96}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4}
ALL = {"num_hidden_layers": 3, **WIDE, "intermediate_size": 200, **HEADS, "vocab_size": 700}


def original(workshop: Workshop, **options: Any) -> Path:
    return workshop.checkpoint("llama", rms_norm_eps=EPS, head_dim=16, **options)


@pytest.fixture(scope="module")
def grown(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("grown") / "all"
    grow.grow(original(workshop), out, ALL)
    return out


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def difference(old: Any, new: Any) -> float:
    """The largest difference of the old tokens' logits, on random input."""
    ids = torch.randint(VOCAB_SIZE, (2, 48), generator=torch.Generator().manual_seed(9))
    return float((logits(new, ids)[..., :VOCAB_SIZE] - logits(old, ids)).abs().max())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sizes", [{"num_attention_heads": 8}, ALL], ids=["heads", "all"])
def test_logits_are_the_originals(
    workshop: Workshop, tmp_path: Path, sizes: dict[str, int], tied: bool
) -> None:
    """The case "heads" adds only query heads, which enlarges the group of each key head."""
    source = original(workshop, tie_word_embeddings=tied)
    grow.grow(source, tmp_path / "out", sizes)
    old, new = load_llama(source), load_llama(tmp_path / "out")
    assert {name: getattr(new.config, name) for name in sizes} == sizes
    assert (new.lm_head.weight is new.model.embed_tokens.weight) == tied
    assert new.num_parameters() > old.num_parameters()
    assert difference(old, new) < 1e-4


def test_what_is_new_is_random_or_writes_nothing(grown: Path) -> None:
    """Also, no weight is denormal or out of float16's range."""
    model = load_llama(grown)
    for i, layer in enumerate(model.model.layers):
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            assert (torch.count_nonzero(part.weight) > 0) == (i != 1)
            assert torch.count_nonzero(part.weight[64:]) == 0
        for part in (layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            assert torch.count_nonzero(part.weight) == part.weight.numel()
    for weight in model.parameters():
        sizes = weight[weight != 0].abs()
        assert ((sizes > 1e-30) & (sizes < 65_504)).all()


def test_new_tokens_are_never_drawn_and_old_ones_lead_behind_them(grown: Path) -> None:
    model = load_llama(grown)
    ids = torch.randint(VOCAB_SIZE, (2, 48), generator=torch.Generator().manual_seed(9))
    for temperature, most in ((1, 1e-15), (2, 1e-8)):
        share = (logits(model, ids).double() / temperature).softmax(-1)[..., VOCAB_SIZE:].sum(-1)
        assert 0 < share.max() < most
    rows = logits(model, torch.tensor([[5, 6, VOCAB_SIZE + 3], [5, 6, 699]]))[:, -1]
    assert (rows[:, :VOCAB_SIZE].amax(-1) > rows[:, VOCAB_SIZE:].amax(-1) + 10).all()


def test_new_ids_have_names_and_texts_the_old_ids(workshop: Workshop, grown: Path) -> None:
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (original(workshop), grown))
    assert (len(old), len(new)) == (VOCAB_SIZE, 700)
    text = "def f(x):\n    return x  # <inflated300> é\n"
    assert new(text).input_ids == old(text).input_ids
    assert new.decode(old(text).input_ids) == text
    assert json.loads((grown / "generation_config.json").read_text())["eos_token_id"] == 0


@pytest.mark.parametrize(
    ("shape", "parameters"),
    # Counts of the published checkpoints, Qwen's without its biases.
    [("smollm-135m", 134_515_008), ("0.5b", 494_032_768 - 27_648), ("1b", 1_235_814_400)],
)
def test_the_bundled_target_fits_the_named_shapes(shape: str, parameters: int) -> None:
    config = grown_config(load_llama(TARGET).config, vars(SHAPES[shape]))
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).num_parameters() == parameters


def test_nothing_is_left_that_came_out_wrong_and_nothing_replaced(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = original(workshop), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Growth, "_norm", lambda self, shape, like, last=False: torch.ones(*shape))
        with pytest.raises(OutriderError, match="differs by"):
            grow.grow(source, out, WIDE)
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    grow.grow(source, out, LAYERS)  # an empty folder may be used
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(OutriderError, match="cannot be replaced"):
        grow.grow(source, out, WIDE)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


@pytest.mark.parametrize(
    ("made_of", "sizes", "cause"),
    [
        ({}, {"num_hidden_layers": 1}, "cannot hold the checkpoint"),
        ({}, {"num_attention_heads": 4, "num_key_value_heads": 4}, "cannot hold the checkpoint"),
        ({}, {"vocab_size": 300}, "cannot hold the checkpoint"),
        ({"attention_bias": True}, LAYERS, "Llamas without biases"),
    ],
)
def test_what_cannot_grow(
    workshop: Workshop, tmp_path: Path, made_of: dict[str, Any], sizes: dict[str, int], cause: str
) -> None:
    with pytest.raises(OutriderError, match=cause):
        grow.grow(original(workshop, **made_of), tmp_path / "out", sizes)
    assert list(tmp_path.iterdir()) == []


def test_a_draft_has_the_alpha_that_was_wanted(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = original(workshop), tmp_path / "out"
    ids = torch.randint(33, 127, (16, CONTEXT), generator=torch.Generator().manual_seed(4))
    monkeypatch.setattr(blur, "_windows", lambda *_: ids[:8])
    blur.blur(source, out, 0.6)
    # Computed in another way, on other text.
    p, q = (logits(load_llama(f), ids[8:]).flatten(0, 1).softmax(1).numpy() for f in (source, out))
    assert abs(np.minimum(p, q).sum(1).mean() - 0.6) < 0.03


@pytest.mark.parametrize("shape", ["smollm-135m", "t5-base"])
def test_an_acceptance_out_of_range_is_refused(tmp_path: Path, shape: str) -> None:
    with pytest.raises(OutriderError, match=r"1\.5 is out of range"):
        make(shape, 1.5, tmp_path)
    assert list(tmp_path.iterdir()) == []
