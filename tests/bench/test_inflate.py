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
from commands import CHECKOUT, error_line
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import inflate
from bench.inflate import SHAPES, grow, load
from bench.inflate_draft import blur
from bench.inflate_weights import CONSTANTS, Growth, grown_config
from runtime import load as load_bundle
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.manifest import read_pair
from runtime.sampling.warp import SamplingParams
from runtime.theory.formulas import acceptance_of_logits

EPS = 0.05  # so large that what is done to it shows
LAYERS = {"num_hidden_layers": 5}
WIDE = {"hidden_size": 96}
INNER = {"intermediate_size": 200}
HEADS = {"num_attention_heads": 8}
KEYS = {"num_attention_heads": 8, "num_key_value_heads": 4}
SMALLER_GROUPS = {"num_attention_heads": 8, "num_key_value_heads": 8}
WIDE_HEADS = {"head_dim": 48}
TOKENS = {"hidden_size": 64 + 8, "vocab_size": 700}
ALL = {
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 700,
}


def original(workshop: Workshop) -> Path:
    return workshop.checkpoint("llama", rms_norm_eps=EPS, head_dim=16)


@pytest.fixture(scope="module")
def grown(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("grown") / "all"
    grow(str(original(workshop)), out, ALL)
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
    [LAYERS, WIDE, INNER, HEADS, KEYS, SMALLER_GROUPS, WIDE_HEADS, TOKENS, ALL],
    ids=["layers", "hidden", "inter", "heads", "kv-heads", "groups", "head-dim", "vocab", "all"],
)
def test_logits_are_the_originals(
    workshop: Workshop, tmp_path: Path, sizes: dict[str, int]
) -> None:
    source = original(workshop)
    result = grow(str(source), tmp_path / "out", sizes)
    (_, old), (_, new) = load(str(source)), load(str(tmp_path / "out"))
    assert {name: getattr(new.config, name) for name in sizes} == sizes
    assert result.parameters == new.num_parameters() > old.num_parameters()
    assert result.difference < 1e-4
    assert difference(old, new) < 1e-4


def test_an_output_of_its_own_grows_too(workshop: Workshop, tmp_path: Path) -> None:
    source = workshop.checkpoint("llama", rms_norm_eps=EPS, head_dim=16, tie_word_embeddings=False)
    grow(str(source), tmp_path / "out", ALL)
    new = load(str(tmp_path / "out"))[1]
    assert new.lm_head.weight is not new.model.embed_tokens.weight
    assert difference(load(str(source))[1], new) < 1e-4


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
            part.weight.copy_(part.weight.roll(32, 0))


def _queries(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.div_(2**0.5)


def _frequencies(model: Any) -> None:
    """The old pairs where they were, next to each other."""
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            part.weight.copy_(part.weight.unflatten(0, (-1, 2, 16)).roll(1, 2).flatten(0, 2))


def _writers(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.normal_(std=0.1)  # a new layer's


def _constants(model: Any) -> None:
    model.model.norm.weight[-CONSTANTS:].abs_()


@pytest.mark.parametrize(
    "damage", [_norms, _eps, _key_heads, _queries, _frequencies, _writers, _constants]
)
def test_control_each_part_of_it_is_needed(
    workshop: Workshop, grown: Path, damage: Callable[[Any], None]
) -> None:
    old, new = (AutoModelForCausalLM.from_pretrained(p) for p in (original(workshop), grown))
    assert difference(old, new) < 1e-4
    with torch.no_grad():
        damage(new)
    assert difference(old, new) > 1e-3


def test_what_is_new_is_random_or_writes_nothing(grown: Path) -> None:
    model = load(str(grown))[1]
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
    old, new = load(str(original(workshop)))[1], load(str(grown))[1]
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
    rows = logits(load(str(grown))[1], ids)[:, -1]
    assert (rows[:, :VOCAB_SIZE].amax(-1) > rows[:, VOCAB_SIZE:].amax(-1) + 10).all()


def test_new_ids_have_names_and_texts_the_old_ids(workshop: Workshop, grown: Path) -> None:
    source = original(workshop)
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (source, grown))
    assert (len(old), len(new)) == (VOCAB_SIZE, 700)
    text = "def f(x):\n    return x  # <inflated300> é\n"
    assert new(text).input_ids == old(text).input_ids
    assert new.decode(old(text).input_ids) == text
    assert json.loads((grown / "generation_config.json").read_text())["eos_token_id"] == 0


# As any other checkpoint


def test_the_exported_graph_says_what_the_original_says(workshop: Workshop, grown: Path) -> None:
    source = original(workshop)
    pair = read_pair(workshop.graphs(grown, source))
    assert (pair.vocab_size, pair.target.vocab_size) == (700, 700)
    assert pair.target.parameters == load(str(grown))[1].num_parameters()
    engine = load_bundle(workshop.bundle(grown, source))
    ids = np.random.default_rng(3).integers(0, VOCAB_SIZE, (1, 24))
    calls = [
        engine.decoder.target.forward(ids[:, i : i + 8], np.array([i]), np.arange(8)).copy()
        for i in range(0, 24, 8)
    ]
    said = np.concatenate(calls, 1)[..., :VOCAB_SIZE]
    expected = logits(load(str(source))[1], torch.from_numpy(ids)).numpy()
    assert np.abs(said - expected).max() < 1e-4
    # Its own original as the draft: at temperature 0 every token is right.
    stats = engine.generate([5, 6, 7], max_new_tokens=40, gamma=4, ignore_eos=True).stats
    assert stats.accepted == stats.examined > 30


def test_shards(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "SHARD_BYTES", 100_000)
    source = original(workshop)
    grow(str(source), tmp_path / "out", WIDE)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    names: list[str] = []
    for path in files:
        with safe_open(path, "pt") as file:
            names += file.keys()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(names) == sorted(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(path.stat().st_size for path in files) - sum(
        8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files
    )
    assert difference(load(str(source))[1], load(str(tmp_path / "out"))[1]) < 1e-4


@pytest.mark.parametrize(
    ("shape", "parameters"),
    # As counted in the published checkpoints, Qwen's without its biases.
    [("smollm-135m", 134_515_008), ("0.5b", 494_032_768 - 27_648), ("1b", 1_235_814_400)],
)
def test_the_bundled_target_fits_the_named_shapes(shape: str, parameters: int) -> None:
    model = load(str(CHECKOUT / "models" / "target"))[1]
    sizes = {**vars(SHAPES[shape]), "head_dim": 64}
    assert Growth(model, grown_config(model.config, sizes), 20.0, 0).parameters == parameters


def test_what_came_out_wrong_is_not_left(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growth, "_norm", lambda self, shape, like, last=False: torch.ones(*shape))
    with pytest.raises(OutriderError, match="differs by") as refused:
        grow(str(original(workshop)), tmp_path / "out", WIDE)
    assert refused.value.kind == "difference"
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_replaced_and_no_disk_filled(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(original(workshop))
    (tmp_path / "out").mkdir()
    grow(source, tmp_path / "out", LAYERS)  # an empty folder will do
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(OutriderError, match="cannot be replaced"):
        grow(source, tmp_path / "out", WIDE)
    monkeypatch.setattr(inflate.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 9))
    with pytest.raises(OutriderError, match="free, and this takes"):
        grow(source, tmp_path / "other", WIDE)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


def test_only_llamas_without_biases(workshop: Workshop, tmp_path: Path) -> None:
    for source in (
        workshop.checkpoint("qwen2"),
        workshop.checkpoint("llama", attention_bias=True),
    ):
        with pytest.raises(OutriderError, match="Llamas without biases only") as refused:
            grow(str(source), tmp_path / "out", LAYERS)
        assert refused.value.kind == "architecture"


# Drafts


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_bytes(np.random.default_rng(4).integers(32, 127, 5000).astype(np.uint8).tobytes())
    return path


@pytest.mark.parametrize("wanted", [0.85, 0.6])
def test_a_draft_has_the_alpha_that_was_wanted(
    workshop: Workshop, tmp_path: Path, words: Path, wanted: float
) -> None:
    source = original(workshop)
    result = blur(str(source), str(source), tmp_path / "out", wanted, texts=[words])
    assert abs(result.alpha - wanted) < 0.02
    # Computed otherwise, on other text.
    ids = torch.randint(33, 127, (8, CONTEXT), generator=torch.Generator().manual_seed(8))
    p, q = (logits(load(str(f))[1], ids).flatten(0, 1).numpy() for f in (source, tmp_path / "out"))
    assert abs(acceptance_of_logits(p, q, SamplingParams(temperature=1.0)) - wanted) < 0.03
    agree = acceptance_of_logits(p, q, SamplingParams())
    assert abs(agree - result.alpha_greedy) < 0.06
    # On what the target writes it is another, and the greedy one more so.
    assert 0 < result.own_alpha < 1 and 0 < result.own_alpha_greedy <= 1


def test_noise_only_takes_away(workshop: Workshop, tmp_path: Path, words: Path) -> None:
    source = original(workshop)
    worse = workshop.checkpoint("llama", rms_norm_eps=EPS, head_dim=16, seed=7)
    with pytest.raises(OutriderError, match="itself has an alpha of") as refused:
        blur(str(source), str(worse), tmp_path / "out", 0.8, texts=[words])
    assert refused.value.kind == "option"
    assert list(tmp_path.iterdir()) == [words]


# Refusals


@pytest.mark.parametrize(
    ("arguments", "kind", "cause"),
    [
        ([], "option", "a shape or sizes, or --draft and --alpha, are needed"),
        (["--alpha", "0.8"], "option", "a shape or sizes"),
        (["--layers", "3", "--draft", "SOURCE", "--alpha", "0.8"], "option", "a shape or sizes"),
        (["--layers", "3", "--text", "SOURCE"], "option", "--text goes with --draft"),
        (["--layers", "x"], "option", "argument --layers"),
        (["--layers", "1"], "option", "--layers 1 is less than the checkpoint's 2"),
        (["--hidden", "65"], "option", "Transformers refuses this shape"),
        (["--heads", "6", "--kv-heads", "4", "--hidden", "66"], "option", "no multiple of"),
        (["--heads", "4", "--kv-heads", "4", "--head-dim", "24"], "option", "--head-dim 24"),
        (["--kv-heads", "2", "--heads", "2"], "option", "--heads 2 is less"),
        (["--heads", "3", "--kv-heads", "3", "--hidden", "66"], "option", "--heads 3 is less"),
        (["--vocab", "300"], "option", "--vocab 300 needs 3 hidden channels more"),
        (["--draft", "SOURCE", "--alpha", "1.5"], "option", "--alpha 1.5 is out of range"),
        (["--draft", "SOURCE", "--alpha", "0.5", "--text", "nowhere"], "option", "--text nowhere"),
        (["--draft", "nowhere", "--alpha", "0.5"], "checkpoint", "nowhere is not a folder"),
        (["--draft", "OTHER", "--alpha", "0.5"], "vocabulary", "257 tokens and"),
        (["--shape", "smollm-135m", "--layers", "1"], "option", "--layers 1 is less"),
    ],
)
def test_refusals(
    workshop: Workshop,
    grown: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    kind: str,
    cause: str,
) -> None:
    source = original(workshop)
    names = {"SOURCE": str(source), "OTHER": str(grown)}
    status = inflate.main(
        [str(source), str(tmp_path / "out"), *(names.get(word, word) for word in arguments)]
    )
    assert status == EXIT_STATUS[kind]
    assert cause in error_line(capsys.readouterr().err, kind)
    assert list(tmp_path.iterdir()) == []
