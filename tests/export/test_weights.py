"""Quantised weights: valid levels and scales, the error they cause, and how it is measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from checkpoints import trained, untrained
from commands import CHECKOUT
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MixtralConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D
from workshop import Workshop

from export import part
from export.checkpoint import find
from export.encoder import arguments
from export.functions.own import IMPLEMENTATION
from export.loading import first_token, load
from export.part import PartRequest
from export.weights import feedback, inputs, layers
from export.weights.blocks import BLOCK, RANGE, Bits, Quantised, Rows, quantise8, quantise_rows
from export.weights.experts import are_experts
from export.weights.feedback import factor, quantise4
from export.weights.inputs import _received_attention
from export.weights.layers import Table, in_double, rounding_as_stored
from export.weights.quality import Texts, check_quality, describe, measure, sample, windows
from export.weights.quantising import Quantising
from export.weights.stored import load_as_stored, widen
from export.weights.whole import quantise_model
from runtime.files.errors import OutriderError
from runtime.files.graphs import Format, Weights

Matrix = npt.NDArray[np.float32]


def _random(rows: int, columns: int) -> Matrix:
    return np.random.default_rng(0).standard_t(4, (rows, columns)).astype(np.float32)


def round_to_nearest(weight: Matrix, bits: Bits) -> Quantised:
    """Quantise without error feedback: each number separately, to the nearest level."""
    return {4: quantise4, 8: quantise8}[bits](torch.from_numpy(weight))


def _widest(weight: Matrix, bits: Bits) -> Matrix:
    """Round to nearest with the scale that just fits the largest number of a block."""
    rows, columns = weight.shape
    blocks = np.pad(weight, ((0, 0), (0, -columns % BLOCK))).reshape(rows, -1, BLOCK)
    max_level = RANGE[bits][1]
    scale = (
        (np.abs(blocks).max(-1, keepdims=True) / max_level).astype(np.float16).astype(np.float32)
    )
    levels = np.round(blocks / np.where(scale == 0, 1, scale)).clip(-max_level, max_level)
    return (levels * scale).reshape(rows, -1)[:, :columns]


def _model(architecture: str = "llama", **options: Any) -> PreTrainedModel:
    model = untrained(architecture, **options).requires_grad_(False)
    for parameter in model.parameters():  # larger than initialised: logits must not be flat
        if parameter.dim() == 2:
            parameter.mul_(8)
    return model


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(7, 64), (5, 70), (3, 5), (1, 1)])
def test_levels_are_in_range_and_no_block_is_worse_than_with_the_widest_scale(
    bits: Bits, shape: tuple[int, int]
) -> None:
    weight = _random(*shape)
    given = weight.copy()
    made = round_to_nearest(weight, bits)
    assert (weight == given).all() and made.levels.shape == shape and made.levels.dtype == np.int8
    assert made.scales.shape == (shape[0], -(-shape[1] // BLOCK))
    assert made.scales.dtype == np.float16 and np.isfinite(made.scales).all()
    assert bits == 4 or (made.scales >= 0).all()  # TensorRT rejects negative 8-bit scales
    assert RANGE[bits][0] <= made.levels.min() and made.levels.max() <= RANGE[bits][1]
    for start in range(0, shape[1], BLOCK):
        here = np.s_[:, start : start + BLOCK]
        error = ((made.dense() - weight)[here] ** 2).sum(1)
        floor = ((_widest(weight, bits) - weight)[here] ** 2).sum(1)
        assert (error <= floor * (1 + 1e-6)).all()


def _ratio(above: Matrix, below: Matrix) -> Matrix:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.abs(below) < np.float32(2**-25), np.float32(0), above / below)


def _level(x: Matrix, scale: Matrix) -> Matrix:
    return np.round(x * _ratio(np.float32(1), scale)).clip(-8, 7)


def _half(scale: Matrix) -> Matrix:
    return scale.clip(-65504, 65504).astype(np.float16).astype(np.float32)


def _expected_rounding(blocks: Matrix) -> tuple[Matrix, Matrix]:
    """Levels [N, 32] and scales [N] by the rule documented in outrider_rounding.cpp, number by
    number in float32."""
    peak = np.where(-blocks.min(1) > blocks.max(1), blocks.min(1), blocks.max(1))
    widest = _half(np.abs(peak) / np.float32(7))
    fitted, best_score = widest, np.zeros_like(peak)
    for reach in np.float32([-9.2, -8.8, -8.4, -8.1, -7.9, -7.6, -7.3, -7.0]):
        along, square = np.zeros_like(peak), np.zeros_like(peak)
        for x in blocks.T:
            level = _level(x, peak / reach)
            along, square = along + level * x, square + level * level
        score = _ratio(along * along, square)
        fitted = np.where(score > best_score, _half(_ratio(along, square)), fitted)
        best_score = np.maximum(score, best_score)
    errors = [np.zeros_like(peak), np.zeros_like(peak)]
    for x in blocks.T:
        for i, scale in enumerate((widest, fitted)):
            errors[i] = errors[i] + (_level(x, scale) * scale - x) ** 2
    scale = np.where(errors[1] > errors[0], widest, fitted)
    return np.stack([_level(x, scale) for x in blocks.T], axis=1), scale


def test_the_scales_of_four_bits_are_those_of_the_rule() -> None:
    """Bitwise equal, for numbers of all magnitudes, ties, and the limits of float16."""
    drawn = _random(400, 32)
    whole = np.random.default_rng(2).integers(-6, 7, (400, 32)).astype(np.float32)
    whole[:, :2] = 7, 3.5  # with a scale of 1 all are levels except 3.5, a tie
    clipped = np.full((1, 32), 140_686, np.float32)
    clipped[0, :2] = 458_528  # the largest value allowed; the fitted scale would be 67,968
    sizes = [drawn * np.float32(size) for size in (3e-7, 2e-5, 0.02, 1, 1e4)]
    blocks = np.concatenate([*sizes, whole, np.full((1, 32), 0.3, np.float32), clipped])
    made, (levels, scales) = round_to_nearest(blocks, 4), _expected_rounding(blocks)
    assert (made.scales[:, 0] == scales).all() and (made.levels == levels).all()
    clipped[0, 0] = np.nextafter(np.float32(458_528), np.float32(np.inf))
    with pytest.raises(ValueError, match="too large for"):
        round_to_nearest(clipped, 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_lies_on_levels_is_found_again(bits: Bits) -> None:
    random = np.random.default_rng(1)
    lowest, highest = (-8, 7) if bits == 4 else (-127, 127)
    levels = random.integers(lowest, highest, (16, 96), endpoint=True)
    levels[:, ::BLOCK] = lowest  # the lowest level occurs in each block
    signs = [0.5, 0.25, -0.125 if bits == 4 else 0.125]
    scales = np.repeat(random.choice(signs, (16, 3)), BLOCK, axis=1)
    weight = (levels * scales).astype(np.float32)
    assert (round_to_nearest(weight, bits).dense() == weight).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_nothing_of_next_to_nothing_and_with_one_huge_number(bits: Bits) -> None:
    weight = np.zeros((4, 32), np.float32)
    weight[1] = 1e-30
    weight[2] = 0.01
    weight[2, 5] = -1000
    weight[3] = 3e-5  # its 8-bit scale is a float16 subnormal
    made = round_to_nearest(weight, bits).dense()
    assert (made[:2] == 0).all()
    assert abs(made[2, 5] + 1000) < 1 and (np.delete(made[2], 5) == 0).all()
    assert np.abs(made[3] - weight[3]).max() < 3e-7


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e9])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_has_no_level_is_refused(bits: Bits, value: float) -> None:
    weight = _random(3, 64)
    weight[1, 40] = value
    with pytest.raises(ValueError, match="NaN, infinite or too large"):
        round_to_nearest(weight, bits)


@pytest.mark.parametrize(("kind", "max_level"), [("int8", 127), ("fp8", 448)])
@pytest.mark.parametrize("shape", [(7, 64), (5, 70), (1, 33)])
def test_a_row_has_the_scale_of_its_largest_number_and_the_nearest_levels(
    kind: Rows, max_level: int, shape: tuple[int, int]
) -> None:
    weight = _random(*shape) * 0.05
    made = quantise_rows(torch.from_numpy(weight), kind)
    levels, scales = made.levels.astype(np.float32), made.scales.astype(np.float32)
    assert made.scales.shape == (shape[0], 1) and (scales > 0).all()
    assert (np.abs(levels).max(1) == max_level).all()
    assert (made.dense() == levels * scales).all()
    assert made.size == weight.size + 2 * shape[0]
    error = np.abs(made.dense() - weight)
    bound = scales / 2 if kind == "int8" else np.maximum(np.abs(weight) / 16, scales / 2**10)
    assert (error <= 1.01 * bound).all()
    assert kind == "int8" or len(weight) == 1 or error.max() > scales.max() / 2  # coarser than int8


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rows_of_nothing_and_rows_that_have_no_level(kind: Rows) -> None:
    weight = _random(3, 64)
    weight[1] = 0
    assert (quantise_rows(torch.from_numpy(weight), kind).dense()[1] == 0).all()
    for value in (np.nan, np.inf, 1e9):
        weight[1, 40] = value
        with pytest.raises(ValueError, match="NaN, infinite or too large"):
            quantise_rows(torch.from_numpy(weight), kind)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_has_8_bits_has_a_scale_a_row_where_that_is_asked_for(kind: Rows) -> None:
    model = _model("mistral")
    made = quantise_model(model, 4 if kind == "int8" else 8, keep=True, rows=kind)
    for name, quantised in made.items():
        weight = model.get_submodule(name.removesuffix(".weight")).weight
        assert (weight == torch.from_numpy(quantised.dense())).all()
        assert (quantised.scales.shape[1] == 1) == (quantised.bits == 8)
        assert (quantised.levels.dtype == np.int8) == (kind == "int8")


def test_kl_of_a_model_with_itself_is_0_and_with_a_shuffled_one_is_not() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 20, generator=random) * 3
    following = torch.randint(20, (50,), generator=random)
    same = measure(
        [(logits[:30], logits[:30], following[:30]), (logits[30:],) * 2 + (following[30:],)]
    )
    assert (same.tokens, same.kl, same.kl_error, same.top1) == (50, 0, 0, 1)
    assert same.perplexity == same.full_perplexity
    expected = torch.nn.functional.cross_entropy(logits, following).exp()
    assert same.perplexity == pytest.approx(float(expected), rel=1e-5)
    other = measure([(logits, logits.roll(1, dims=1), following)])
    assert other.kl > 1 and other.top1 < 0.5 and other.kl_error > 0
    with pytest.raises(OutriderError, match="NaN or infinity"):
        measure([(logits, logits * torch.nan, following)])
    assert describe(same) == "KL 0.00000 ± 0.00000 nats, top-1 100.0 %" + (
        f", perplexity {same.perplexity:.2f} (full {same.perplexity:.2f}), 50 tokens"
    )
    check_quality(same, "int8", "it")
    with pytest.raises(OutriderError, match=r"it with WEIGHTS=int8 is .* nats"):
        check_quality(other, "int8", "it")


def test_text_of_the_user_is_cut_into_windows() -> None:
    ids = windows(list(range(23)), 10, 64)
    assert ids.tolist() == [list(range(10)), list(range(10, 20))]
    assert windows(list(range(7)), 10, 64).tolist() == [list(range(7))]
    assert windows(list(range(100)), 10, 3).shape == (3, 10)
    assert windows([1, 2, 3], 1, 8, first=9).shape == (3, 2)  # the minimum is two tokens
    begun = windows(list(range(23)), 10, 64, first=99).tolist()
    assert begun == [[99, *range(9)], [99, *range(9, 18)]]
    with pytest.raises(OutriderError, match="fewer than 2 tokens: 1"):
        windows([5], 10, 64)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_text_of_the_user_begins_as_a_text_of_the_model_does(workshop: Workshop, name: str) -> None:
    """An encoder's source has no start token."""
    checkpoint = find(str(workshop.checkpoint(name)))
    model, text = load(checkpoint, torch.float32), list(range(50, 150))
    step = Quantising("target", "int8", checkpoint, text, shares_encoder=False)
    step._generate_texts(model, 40)
    texts = step._texts.ids if name == "llama" else step._texts.sources
    assert texts is not None
    begun = [first_token(model)] if name == "llama" else []
    assert texts[0].tolist() == [*begun, *text][:20]
    model.config.bos_token_id, model.config.decoder_start_token_id = 3, 5
    assert first_token(model) == (3 if name == "llama" else 5)
    for impossible in (None, 257, -1):
        model.config.bos_token_id = model.config.decoder_start_token_id = impossible
        assert first_token(model) is None


def test_sampled_text_is_the_models_own_and_the_same_each_time() -> None:
    model = _model()
    messages: list[str] = []
    ids = sample(model, 4, 24, report=messages.append)
    assert ids.shape == (4, 24) and (ids == sample(model, 4, 24)).all()
    assert (
        len(messages) == 23 and messages[0] == "token 2 of 24" and messages[-1] == "token 24 of 24"
    )
    assert (ids[:, 0] == 0).all() and (ids != sample(model, 4, 24, seed=1)).any()
    # Its perplexity on its own text is far below that on random tokens.
    other = torch.randint(257, (4, 24), generator=torch.Generator().manual_seed(0))
    own, random = (model(input_ids=x, labels=x).loss.exp() for x in (ids, other))
    assert own < random / 2


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral", "mixtral", "gpt-oss"])
def test_a_model_becomes_what_its_levels_say(architecture: str) -> None:
    model = _model(architecture)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    made = quantise_model(model, 4)
    after = dict(model.named_parameters())
    assert not made.keys() & after.keys(), "no dense copy is kept"
    for name, quantised in made.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        dense = torch.from_numpy(quantised.dense())
        if before[name].dim() == 3:
            apart = dense.view(len(before[name]), -1, dense.shape[1])
            x = torch.eye(dense.shape[1])
            for expert, weight in enumerate(apart):
                assert (module.multiply(x, expert) == weight.T).all()
            turned = apart.transpose(1, 2) if architecture == "gpt-oss" else apart
            assert (turned - before[name]).abs().max() < 0.2 * before[name].abs().max()
        else:
            assert (module.weight == dense).all()
        ends = ("embed" in name, "lm_head" in name, "wte" in name)
        assert quantised.bits == (8 if any(ends) else 4)
    kept = before.keys() - made.keys()
    assert all((after[name] == before[name]).all() for name in kept)
    matrices = {n for n, p in before.items() if p.dim() > 1 and "wpe" not in n}
    routers = {n for n in matrices if n.endswith(("gate.weight", "router.weight", "_bias"))}
    assert bool(routers) == (architecture in ("mixtral", "gpt-oss"))
    assert made.keys() == matrices - routers


@pytest.mark.parametrize(
    ("kind", "sizes", "kept"),
    [
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}, "mlp.gate.wg"),
        ("qwen2_moe", {"num_experts": 4}, "mlp.shared_expert_gate"),
        ("llama", {}, None),
    ],
)
def test_what_decides_between_experts_is_left_whatever_its_name_is(
    kind: str, sizes: dict[str, int], kept: str | None
) -> None:
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small, **sizes))
    linear = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    unquantised = (
        linear - quantise_model(model.requires_grad_(False), 8).keys() - {"lm_head.weight"}
    )
    assert unquantised == ({f"model.layers.0.{kept}.weight"} if kept else set())


def test_a_layer_that_does_more_than_multiply_is_left() -> None:
    """Fault: a grouped linear layer of DeepSeek 4 was replaced by an ordinary one."""

    class Grouped(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).flip(-1)

    model = _model()
    layers = model.get_submodule("model.layers")
    layers[0].self_attn.o_proj.__class__ = Grouped  # type: ignore[index,union-attr]
    found = quantise_model(model, 8)
    assert "model.layers.0.self_attn.o_proj.weight" not in found
    assert "model.layers.1.self_attn.o_proj.weight" in found


def test_falcons_own_kind_of_linear_layer_is_quantised(workshop: Workshop) -> None:
    """Fault: only its embeddings and its output matrix would be."""
    model = load(find(str(workshop.checkpoint("falcon"))), torch.float32)
    matrices = {name for name, weight in model.named_parameters() if weight.dim() == 2}
    assert quantise_model(model, 8).keys() == matrices
    assert len(matrices) > 2 * 4


def test_experts_of_half_precision_stay_as_they_are() -> None:
    """Fault: they became float32 when the other weights were widened."""
    model = _model("qwen3-moe").to(torch.float16)
    before = {name: weight for name, weight in model.named_parameters() if weight.dim() == 3}
    assert before and not before.keys() & quantise_model(model, 8, rows="int8").keys()
    widen(model)
    after = dict(model.named_parameters())
    assert all(after[name].dtype == torch.float16 for name in before)


@pytest.mark.parametrize("architecture", ["qwen3-moe", "gpt-oss"])
def test_experts_that_are_asked_alone_say_what_all_of_them_do(architecture: str) -> None:
    """Experts computed one by one, as quantised ones are, against Transformers' implementation: in
    8 bits and float64, and in 16 bits that are widened."""
    model, ids = _model(architecture), torch.arange(24)[None]
    with torch.no_grad():
        full = model(input_ids=ids).logits
        for module in model.modules():
            if are_experts(module):
                module.config._experts_implementation = IMPLEMENTATION
                module.down_proj.data = module.down_proj.bfloat16()
        narrow = model(input_ids=ids).logits
        quantise_model(model, 8)
        single = model(input_ids=ids).logits
        with in_double(model):
            double = model(input_ids=ids).logits
        repeated = model(input_ids=ids).logits
    size = full.abs().max()
    assert 0 < (narrow - full).abs().max() < 1e-3 * size
    assert 0 < (single - narrow).abs().max() < 5e-2 * size
    assert double.dtype == torch.float64 and 0 < (double - single).abs().max() < 1e-5 * size
    assert (repeated == single).all()


def test_an_embedding_that_does_more_than_look_up_goes_on_doing_it() -> None:
    model = _model("gemma3")  # it multiplies rows by the square root of the width
    ids, embedding = torch.arange(9)[None], model.get_input_embeddings()
    before = embedding(ids)
    made = quantise_model(model, 8)
    rows = torch.from_numpy(made["model.embed_tokens.weight"].dense())[:9]
    after = model.get_input_embeddings()(ids)
    assert torch.allclose(after, before, atol=0.02 * before.abs().max())
    assert not torch.allclose(after[0], rows, atol=0.02 * before.abs().max())


def _mixture() -> PreTrainedModel:
    """The trained model as a mixture: two of eight experts, each the MLP with permuted neurons."""
    dense, random = trained(), torch.Generator().manual_seed(0)
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    config = MixtralConfig(**{**dense.config.to_dict(), **sizes, "model_type": "mixtral"})
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    model.load_state_dict(dense.state_dict(), strict=False)
    for layer, dense_layer in zip(model.model.layers, dense.model.layers, strict=True):
        mlp, experts = dense_layer.mlp, layer.mlp.experts
        for expert in range(8):
            order = torch.randperm(config.intermediate_size, generator=random)
            both = [mlp.gate_proj.weight[order], mlp.up_proj.weight[order]]
            experts.gate_up_proj[expert] = torch.cat(both)
            experts.down_proj[expert] = mlp.down_proj.weight[:, order]
        layer.mlp.gate.weight.normal_(generator=random)
    ids = torch.arange(40)[None]
    assert (model(input_ids=ids).logits - dense(input_ids=ids).logits).abs().max() < 1e-3
    mixture: PreTrainedModel = model
    return mixture


@pytest.mark.parametrize(("make_model", "ratio"), [(trained, 0.8), (_mixture, 0.55)])
def test_feedback_needs_less_than_rounding_to_nearest_and_is_the_same_each_time(
    make_model: Callable[[], PreTrainedModel], ratio: float
) -> None:
    """In a mixture the ratio requires feedback in both products of the experts."""

    original = make_model()
    text = sample(original, 8, 64)
    full = original(input_ids=text).logits[:, :-1].flatten(0, 1)

    def quality(texts: Texts | None) -> tuple[float, dict[str, Quantised]]:
        model = make_model()
        made = quantise_model(model, 4, texts)
        logits = model(input_ids=text).logits[:, :-1].flatten(0, 1)
        return measure([(full, logits, text[:, 1:].flatten())]).kl, made

    texts = Texts(sample(original, 16, 128, seed=1))
    (nearest, _), (less, made), (again, _) = quality(None), quality(texts), quality(texts)
    assert 0 < less < ratio * nearest and again == less
    for quantised in made.values():
        low, high = RANGE[quantised.bits]
        assert low <= quantised.levels.min() and quantised.levels.max() <= high


def _factors(
    monkeypatch: pytest.MonkeyPatch, name: str, sources: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The first attention matrix of three texts, [B, H, N, S]; and the weight of each token,
    [tokens, 1], by path of each layer whose factor weights tokens unequally."""
    model, texts = _model(name, attn_implementation="eager"), torch.randint(1, 257, (3, 20))
    embedding = model.get_input_embeddings().weight  # on 8-bit levels, so rounding keeps it
    embedding.copy_(torch.randint(-127, 128, embedding.shape) / 64)
    embedding[:, ::32] = 127 / 64
    calls: list[tuple[str, torch.Tensor]] = []
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            module.register_forward_pre_hook(lambda _, x, path=path: calls.append((path, x[0])))
    outputs = model(**arguments(model, texts, sources), output_attentions=True)
    counts: dict[str, torch.Tensor] = {}

    def factor(rows: torch.Tensor) -> torch.Tensor:
        path, x = calls[-1][0], calls[-1][1].flatten(0, -2)
        if not torch.equal(rows, x):
            counts[path] = (rows / x).square().nanmedian(-1, keepdim=True).values
        return feedback.factor(rows)

    monkeypatch.setattr(inputs, "factor", factor)
    quantise_model(model, 4, Texts(texts, sources))
    return (outputs.attentions if sources is None else outputs.encoder_attentions)[0], counts


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("llama", ["self_attn.q_proj"]), ("gpt2", ["attn.c_attn"]), ("phi3", ["qkv_proj"]),
        ("gpt-neox", ["query_key_value"]), ("phi", ["self_attn.q_proj"]),
        ("bart", ["encoder.*self_attn.q_proj", "decoder.*self_attn.q_proj", "encoder_attn.k_proj"]),
        ("t5", ["encoder.*SelfAttention.q", "decoder.*SelfAttention.q", "EncDecAttention.k"]),
        ("umt5", ["encoder.*SelfAttention.q", "decoder.*SelfAttention.q", "EncDecAttention.k"]),
        ("t5gemma", ["encoder.*self_attn.q_proj", "decoder.*self_attn.q_proj", "cross.*k_proj"]),
    ],
)  # fmt: skip
def test_a_token_counts_for_what_attends_as_much_as_it_is_attended_to(
    monkeypatch: pytest.MonkeyPatch, name: str, paths: list[str]
) -> None:
    """Tokens are weighted for query, key and value layers, but neither for an attention's output
    nor for Phi's MLP, which has the same input as its attention. Query layers of cross-attention,
    which read another text than the keys, are not weighted."""
    sources = torch.randint(1, 257, (3, 20)) if len(paths) > 1 else None
    attention, counts = _factors(monkeypatch, name, sources)
    for wanted in paths:
        assert sum(bool(re.search(f"{wanted}$", path)) for path in counts) in (1, 2), wanted
    assert all(any(re.search(f"{wanted}$", path) for wanted in paths) for path in counts)
    attended = attention.sum((1, 2)).reshape(-1, 1)  # by all heads of all tokens
    torch.testing.assert_close(next(iter(counts.values())), attended, rtol=1e-3, atol=1e-6)
    assert attended.max() > 1.02 * attended.min()  # otherwise this proves nothing


def test_what_is_no_attention_is_not_taken_for_it() -> None:
    """Recurrent layers return their state in its place."""
    attention = torch.rand(2, 3, 5, 4).softmax(-1)
    got = _received_attention((torch.zeros(2, 5, 8), torch.zeros(1, 3, 5, 4), attention))
    torch.testing.assert_close(got, attention.sum((1, 2)).flatten())
    for state in (-attention, 2 * attention, attention * torch.nan, attention[0], None):
        assert _received_attention((torch.zeros(2, 5, 8), state)) is None


# In float32 the square of 1e20 overflows, and so does a sum of squares of 1e19.
@pytest.mark.parametrize("size", [[1.0], [1e20], [1.0] * 39 + [1e19]])
def test_the_factor_is_of_what_the_inputs_weigh(size: list[float]) -> None:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 40, generator=random) * torch.tensor(size)
    upper = factor(inputs).double()
    hessian = inputs.double().T @ inputs.double()
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    middle = torch.linalg.solve_triangular(upper, hessian, upper=True)
    middle = torch.linalg.solve_triangular(upper.T, middle, upper=False, left=False)  # D of R D R^T
    assert torch.allclose(middle, middle.diagonal().diag(), atol=1e-5 * float(middle.max()))
    assert torch.equal(upper, upper.triu()) and (upper.diagonal() == 1).all()


def test_feedback_takes_the_levels_of_the_original_algorithm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Column by column, with the upper Cholesky factor of the inverse (Frantar et al. 2022,
    algorithm 1), choosing the scales of a block when it is reached; also across panels."""
    monkeypatch.setattr(feedback, "_PANEL", 64)
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 90, generator=random) @ torch.randn(90, 150, generator=random)
    weight = torch.from_numpy(_random(50, 150))
    made = quantise4(weight, factor(inputs))
    hessian = inputs.double().T @ inputs.double()
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    upper = torch.linalg.cholesky(hessian.inverse(), upper=True)
    levels, scales = torch.from_numpy(made.levels), torch.from_numpy(made.scales).float()
    remaining = weight.double()
    for column in range(150):
        block = column // 32
        if column % 32 == 0:
            best = quantise4(remaining[:, column : min(column + 32, 150)]).scales[:, 0]
            assert (best == made.scales[:, block]).mean() > 0.95
        scale, level = scales[:, block], levels[:, column]
        nearest = (remaining[:, column] / scale).round().clamp(*RANGE[4])
        assert (nearest == level).float().mean() > 0.95  # a tie goes either way
        error = (remaining[:, column] - level * scale) / upper[column, column]
        remaining -= torch.outer(error, upper[column])


def test_feedback_leaves_alone_what_no_input_connects() -> None:
    """With uncorrelated inputs there is no error to compensate."""
    weight = _random(5, 70)
    made, nearest = (
        quantise4(torch.from_numpy(weight), factor(torch.eye(70))),
        round_to_nearest(weight, 4),
    )
    assert (made.levels == nearest.levels).all() and (made.scales == nearest.scales).all()


def test_a_row_of_four_bits_depends_on_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the thread, the piece, or the other rows."""
    weight = torch.from_numpy(_random(1100, 70))
    found = []
    for threads, rows in ((1, 33), (1, 1100), (3, 1100)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(feedback, "_ROWS", rows)
        found.append(quantise4(weight))
    assert all((made.levels == found[0].levels).all() for made in found)
    assert all((made.scales == found[0].scales).all() for made in found)


def test_what_rounding_cannot_be_asked() -> None:
    numbers, levels, scales = torch.ones(33, 4), np.zeros((4, 33), np.int8), torch.empty(4)

    def status(columns: int, stride: int = 33, rows: int = 4, threads: int = 1) -> int:
        sources = numbers.data_ptr(), numbers.data_ptr(), rows, columns, None
        destination = levels.ctypes.data, stride, scales.data_ptr(), threads
        answer: int = feedback.load_rounding()(*sources, *destination)
        return answer

    assert status(32) == 0 and (levels[:, :32] != 0).all() and (levels[:, 32] == 0).all()
    assert [status(33), status(0), status(32, 31), status(32, rows=0), status(32, threads=0)] == [
        1
    ] * 5


NEED_THE_LIBRARY: list[tuple[Weights, Format]] = [
    ("int4", "torch"), ("int4", "onnx"), ("int8", "onnx")
]  # fmt: skip


def test_weights_of_few_bits_are_refused_before_any_work_without_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """4-bit weights need it for every backend, 8-bit weights only in ONNX graphs."""
    invalid = tmp_path / "liboutrider.so"
    invalid.write_bytes(b"another platform's")

    def begun(checkpoint: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(part, "content_hashes", begun)

    def make(weights: Weights, form: Format) -> None:
        feedback.load_rounding.cache_clear()
        checkpoint = find(str(CHECKOUT / "models" / "target"))
        given = PartRequest("target", checkpoint, "float32", 64, 72, 4, form, weights)
        part.make(given, tmp_path)

    with pytest.raises(InterruptedError):
        make("int4", "torch")  # control: with the library the work begins
    for library, cause in (
        (None, "was not compiled"),
        (invalid, "cannot round weights"),
        (Path("libc.so.6"), "cannot round weights"),  # like an older library, it lacks the function
    ):
        monkeypatch.setattr(feedback, "find_library", lambda library=library: library)
        with pytest.raises(InterruptedError):
            make("int8", "torch")
        for weights, form in NEED_THE_LIBRARY:
            with pytest.raises(OutriderError, match=cause) as refused:
                make(weights, form)
            assert refused.value.remedy == "Install a C++ compiler, and run make plugins."
    feedback.load_rounding.cache_clear()


def test_a_weight_that_is_nan_is_named() -> None:
    model = _model()
    dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: "):
        quantise_model(model, 8)


@pytest.mark.parametrize(("rows", "bias"), [(16, True), (300, False), (300, True)])
def test_a_product_by_pieces_has_the_bits_of_a_whole_one(
    monkeypatch: pytest.MonkeyPatch, rows: int, bias: bool
) -> None:
    """For one token and for many, and never more than one piece is dense."""
    monkeypatch.setattr(layers, "_PIECE_SIZE", 90 * 48)  # 80 rows, as a multiple of 16
    weight = torch.from_numpy(_random(rows, 48))
    sizes: list[int] = []

    def rows_of(which: slice) -> torch.Tensor:
        sizes.append(len(weight[which]))
        return weight[which]

    layer = torch.nn.Linear(48, rows, bias=bias).requires_grad_(False)
    bias_parameter = layer.bias
    layer.weight = torch.nn.Parameter(Table.of(rows_of, weight.shape, weight.dtype), False)
    for tokens in (1, 7, 129):
        x = torch.from_numpy(_random(2 * tokens, 48)).view(2, tokens, 48)
        assert torch.equal(layer(x), torch.nn.functional.linear(x, weight, bias_parameter))
    assert layer.weight.numel() == weight.numel() and max(sizes) == min(rows, 80)
    assert torch.equal(torch.stack([layer.weight, layer.weight])[1], weight)  # control
    assert max(sizes) == rows


def test_what_is_stored_in_bfloat16_is_multiplied_in_it_only_while_that_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.from_numpy(_random(40, 48)).bfloat16()
    layer = torch.nn.Linear(48, 40).requires_grad_(False)
    bias = layer.bias
    x = torch.from_numpy(_random(6, 48))

    def multiply_by(stored: torch.Tensor) -> torch.Tensor:
        table = Table.of(lambda which: stored[which].float(), stored.shape, x.dtype, stored)
        layer.weight = torch.nn.Parameter(table, False)
        product: torch.Tensor = layer(x)
        return product

    full = torch.nn.functional.linear(x, weight.float(), bias)
    narrow = torch.nn.functional.linear(x.bfloat16(), weight).float() + bias
    for supported, expected in ((True, narrow), (False, full)):
        monkeypatch.setattr(
            torch.cpu, "get_capabilities", lambda supported=supported: {"avx512_bf16": supported}
        )
        with rounding_as_stored():
            assert torch.equal(multiply_by(weight), expected)
            half = torch.nn.functional.linear(x, weight.half().float(), bias)
            assert torch.equal(multiply_by(weight.half()), half)  # float16 is widened
        assert torch.equal(multiply_by(weight), full)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    with suppress(InterruptedError), rounding_as_stored():
        raise InterruptedError
    assert torch.equal(multiply_by(weight), full)


def test_texts_are_written_by_products_in_the_bits_that_are_stored(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Using the processor's instruction, or else in pieces that are widened."""
    model = load_as_stored(find(str(workshop.checkpoint("llama", dtype=torch.bfloat16))))
    pieces: list[slice] = []
    for module in model.modules():
        table = module._parameters.get("weight")
        if isinstance(table, Table):

            def rows(which: Any, rows: Callable[[Any], torch.Tensor] = table._rows) -> torch.Tensor:
                pieces.extend([which] if isinstance(which, slice) else [])
                return rows(which)

            table._rows = rows
    for supported in (True, False):
        found = {"avx512_bf16": supported}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        sample(model, 2, 3)
        assert bool(pieces) is not supported
