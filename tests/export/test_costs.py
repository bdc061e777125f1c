"""Which matrices get 8 bits when there is room for some: the cost of quantising each to 4 bits."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from checkpoints import trained, untrained
from exported import Refused, of_type
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from workshop import Workshop

from export.checkpoint import find
from export.weights import quantising, whole
from export.weights.blocks import Rows, bits_per_weight, quantise8, quantise_rows
from export.weights.costs import NoCosts, _row_cost, choose_costliest, costs
from export.weights.feedback import factor, quantise4
from export.weights.layers import Table, _Product
from export.weights.quality import Texts, measure, sample
from export.weights.quantising import Quantising
from export.weights.whole import minimum_bits, quantise_model
from runtime.bundle import load
from runtime.files.errors import OutriderError
from runtime.files.graphs import HOST_FILE
from runtime.files.manifest import read_bundle


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(sample(trained(), 24, 64, seed=1))


def _kl(model: PreTrainedModel, texts: Texts) -> float:
    full = trained()(input_ids=texts.ids).logits
    slices = zip(full, model(input_ids=texts.ids).logits, texts.ids, strict=True)
    return measure([(f[:-1], s[:-1], ids[1:]) for f, s, ids in slices]).kl


def test_costs_are_the_divergence_that_there_is(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The costs predict the KL divergence of all matrices, of the costliest ones, and of the output
    matrix, which is the embedding too. Fault: a forgotten factor of 2, or half of a matrix."""
    monkeypatch.setattr("export.weights.costs.LARGE_SLICE", 5000)
    model, dense = trained(), trained()
    found = quantise_model(model, 4, texts, max_bits=minimum_bits(model))
    assert {weight.bits for weight in found.values()} == {4}
    weights = {name: dense.get_parameter(name) for name in found}
    layers = {name: [model.get_submodule(name.removesuffix(".weight"))] for name in found}
    layers["model.embed_tokens.weight"].append(model.lm_head)  # type: ignore[arg-type]
    each = costs(model, weights, layers, texts)
    assert not any(module._forward_hooks for module in model.modules())
    before = _kl(model, texts)
    assert sum(each.values()) == pytest.approx(before, rel=0.25)
    table = each.pop("model.embed_tokens.weight")
    costliest = sorted(each, key=lambda name: each[name])[-8:]
    expected_gain = sum(each[name] for name in costliest)
    assert table > 0.3 * before and expected_gain > 0.1 * before
    for path in ("lm_head", "model.embed_tokens"):
        model.set_submodule(path, dense.get_submodule(path))
    without = _kl(model, texts)
    assert before - without == pytest.approx(table, rel=0.25)
    for path in (name.removesuffix(".weight") for name in costliest):
        model.set_submodule(path, dense.get_submodule(path))
    assert without - _kl(model, texts) == pytest.approx(expected_gain, rel=0.25)


def test_the_output_matrix_is_rounded_by_what_it_sees(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on texts that were not used for rounding."""
    errors = []
    dense = trained().get_output_embeddings().weight
    for seen in (factor, lambda inputs: None):
        monkeypatch.setattr(whole, "factor", seen)
        model = trained()
        quantise_model(model, 4, texts, max_bits=minimum_bits(model))
        x = model.base_model(texts.ids[-4:]).last_hidden_state
        error = model.get_output_embeddings().weight - dense
        errors.append(float((x @ error.T).square().mean()))
    assert errors[0] < 0.9 * errors[1]


def test_rows_that_a_model_scales_cost_what_they_are_off() -> None:
    model = untrained("gemma").requires_grad_(False)
    table, ids = model.get_input_embeddings(), torch.randint(0, 200, (3, 9))
    full, weight = table(ids), table.weight.clone()
    quantise_model(model, 4, Texts(ids), max_bits=minimum_bits(model))
    table = model.get_input_embeddings()
    gradient = torch.randn(full.shape)
    request = (gradient * (table(ids) - full)).sum(-1).square().sum()
    found = _row_cost(gradient, ids, weight, table, table(ids))
    assert found == pytest.approx(float(request), rel=1e-3)


def test_what_there_is_room_for_goes_to_what_costs_the_most(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: given to the cheapest matrices, the room gains next to nothing."""
    room = minimum_bits(trained()) + 0.2
    divergences: list[float] = []
    for sign in (1, -1):

        def signed(*given: Any, sign: int = sign) -> dict[str, float]:
            return {name: sign * cost for name, cost in costs(*given).items()}

        monkeypatch.setattr(whole, "costs", signed)
        model = trained()
        found = quantise_model(model, 4, texts, max_bits=room)
        assert room - 0.05 < bits_per_weight(found.values()) <= room
        divergences.append(_kl(model, texts))
    model = trained()
    assert bits_per_weight(
        quantise_model(model, 4, texts, max_bits=room - 0.2).values()
    ) == pytest.approx(room - 0.2)
    without = _kl(model, texts)
    assert divergences[0] < 0.95 * without and without - divergences[0] > 4 * (
        without - divergences[1]
    )


def test_what_does_not_fit_leaves_its_room_to_others() -> None:
    each = {"a": 9.0, "b": 5.0, "c": 4.0, "d": 1.0}
    sizes = {"a": 10, "b": 1, "c": 2, "d": 3}
    assert choose_costliest(each, sizes, 13.5) == ["b", "c", "a"]
    assert choose_costliest(each, sizes, 6) == ["b", "c", "d"]
    assert choose_costliest(each, sizes, 0.5) == []
    # A large matrix goes first if the others would leave no room for it and cost less.
    assert choose_costliest(each, sizes, 10) == ["b", "c", "d"]
    assert choose_costliest({**each, "a": 11.0}, sizes, 10) == ["a"]
    assert choose_costliest(each, sizes, 12.5) == ["a", "b"]
    # Or two large ones, although a small one would leave no room for one of them.
    large = {"a": 10.0, "b": 9.0, **{f"{i}": 0.1 for i in range(50)}, "c": 2.0}
    sizes = {**dict.fromkeys(large, 1), "a": 10, "b": 10, "c": 1}
    assert {"a", "b"} == {*choose_costliest({**large, "c": 1.1}, sizes, 20)}


@pytest.mark.parametrize("name", ["gpt2", "t5", "qwen3-moe", "gemma4", "deepseek3"])
def test_models_of_all_kinds_have_costs(name: str) -> None:
    """Also matrices of an encoder; experts keep 4 bits."""
    model = untrained(name)
    ids = torch.randint(1, 200, (4, 12))
    texts = Texts(ids, ids if model.config.is_encoder_decoder else None)
    found = quantise_model(model, 4, texts, max_bits=7.9)
    eight = {path for path, weight in found.items() if weight.bits == 8}
    assert 7 < bits_per_weight(found.values()) <= 7.9 or any("experts" in path for path in found)
    assert not any(path.endswith("experts.down_proj") for path in eight)
    sides = ["encoder", "decoder"] if model.config.is_encoder_decoder else ["layers", "h."]
    assert any(any(side in path for side in sides) for path in eight)
    if model.config.is_encoder_decoder:
        assert all(any(path.startswith(side) for path in eight) for side in sides)


def test_a_layer_that_several_have_costs_once() -> None:
    model = untrained("llama")
    layers = model.get_submodule("model.layers")
    layers[1].mlp = layers[0].mlp  # type: ignore[index,union-attr]
    texts, given = Texts(torch.randint(1, 200, (2, 9))), {}

    def keep(*arguments: Any) -> dict[str, float]:
        given.update(arguments[2])
        return costs(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "costs", keep)
        quantise_model(model, 4, texts, max_bits=5)
    shared = [layers for name, layers in given.items() if "mlp" in name]
    assert shared and all(len(layers) == 1 for layers in shared)


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_in_half_precision_8_bits_are_rows_and_biases_stay(name: str) -> None:
    """Faults: sizes were counted as if scales were per block, and part of the budget was unused;
    rows shorter than a block were counted with a scale per row."""
    model = untrained(name, dtype=torch.bfloat16)
    biases = {path: value.clone() for path, value in model.named_parameters() if "bias" in path}
    ids = torch.randint(1, 200, (4, 12))
    before = model(input_ids=ids).logits
    found = quantise_model(model, 4, Texts(ids), rows="int8", max_bits=7.5)
    assert 7 < bits_per_weight(found.values()) <= 7.5
    for weight in found.values():
        assert (weight.scales.shape[1] == 1) == (weight.bits == 8)
    dense = torch.randn(20, 70)
    for rows, eight in (("int8", quantise_rows(dense, "int8")), (None, quantise8(dense))):
        more = whole._extra_bytes(quantise4(dense), rows)  # type: ignore[arg-type]
        assert more == eight.size - quantise4(dense).size
    for columns in (16, 31, 32, 34):
        dense = torch.randn(8, columns)
        taken = quantise_rows(dense, "int8").size - quantise4(dense).size
        assert whole._extra_bytes(quantise4(dense), "int8") == max(1, taken)
    after = model(input_ids=ids).logits
    assert after.dtype == torch.bfloat16
    assert (after - before).abs().max() < 0.2 * before.abs().max()
    kept = dict(model.named_parameters())
    assert biases and all(torch.equal(kept[path], value) for path, value in biases.items())


def test_rows_that_fill_no_blocks_take_more() -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=99, num_hidden_layers=1, num_key_value_heads=1)
    model = AutoModelForCausalLM.from_config(config).eval()
    bits = minimum_bits(model)
    found = quantise_model(model, 4, Texts(torch.randint(1, 99, (2, 9))), max_bits=bits)
    assert 4.5 < bits == pytest.approx(bits_per_weight(found.values()))


def test_a_gradient_goes_through_what_is_made_for_it() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(40, 12), torch.randn(40), torch.randn(3, 5, 12)
    table = Table.of(lambda which: weight[which], weight.shape, weight.dtype)
    gradients = []
    for product in (
        lambda x: torch.nn.functional.linear(x, weight, bias),
        lambda x: _Product.apply(x, lambda: weight, bias),  # type: ignore[no-untyped-call]
        lambda x: torch.nn.functional.linear(x, table, bias),
    ):
        given = x.clone().requires_grad_()
        product(given).square().sum().backward()
        gradients.append(given.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_what_has_no_gradients_is_refused(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoCosts, match="no matrix that may"):
        costs(trained(), {}, {}, texts)
    model = trained()
    last: Any = model.base_model.norm
    last.register_forward_hook(lambda *given: given[-1].detach())
    with pytest.raises(NoCosts, match="does not require grad"):
        quantise_model(model, 4, texts, max_bits=8)
    model = trained()
    last = model.base_model.norm
    last.register_forward_hook(lambda *given: given[-1] + (given[-1] * 0).sqrt())
    with pytest.raises(NoCosts, match="NaN or infinite"):
        quantise_model(model, 4, texts, max_bits=8)


def test_without_a_number_of_bits_it_is_what_the_output_matrix_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default the output matrix gets 8 bits if costs cannot be computed. An embedding that is
    only looked up gets 8 bits in any case: a step does not read all of its bytes."""
    texts = Texts(torch.randint(1, 200, (4, 12)))
    why: list[str] = []

    def quantised(rows: Rows | None = None) -> tuple[set[str], int]:
        found = quantise_model(untrained("qwen2"), 4, texts, rows=rows, report_unranked=why.append)
        eight = {name for name, weight in found.items() if weight.bits == 8}
        return eight, sum(weight.size for weight in found.values())

    def none(*given: Any) -> dict[str, float]:
        raise NoCosts("it has none")

    def signed(*given: Any) -> dict[str, float]:
        assert "model.embed_tokens.weight" not in given[1]
        return {name: -1.0 if name == "lm_head.weight" else 1.0 for name in costs(*given)}

    ends = {"lm_head.weight", "model.embed_tokens.weight"}
    monkeypatch.setattr(whole, "costs", none)
    assert quantised()[0] == quantised(rows="int8")[0] == ends  # no costs in half precision
    assert why == ["it has none"]
    room = quantised()[1]
    monkeypatch.setattr(whole, "costs", signed)
    eight, size = quantised()
    assert len(eight) > 1 and eight & ends == {"model.embed_tokens.weight"}
    assert room * 0.95 < size <= room


def test_what_the_output_matrix_sees_may_be_something_else(texts: Texts) -> None:
    """Some models have a layer before the output matrix, others a factor."""
    model = trained()
    last = model.base_model(texts.ids).last_hidden_state.flatten(0, -2)
    assert whole._reads_last_states(model, last, texts) and not whole._reads_last_states(
        model, None, texts
    )
    assert not whole._reads_last_states(model, last[:, 1:], texts)
    head: Any = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, x: (3 * x[0],))
    assert whole._reads_last_states(model, last, texts)
    head.register_forward_pre_hook(lambda module, x: (x[0].flip(-1),))
    assert not whole._reads_last_states(model, last, texts)


def test_nothing_is_asked_where_there_is_no_choice(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but the output matrix is on levels already, or only the output matrix is."""
    model = trained()
    first = quantise_model(model, 4, texts, max_bits=minimum_bits(model))
    monkeypatch.setattr(whole, "costs", None)
    table = "model.embed_tokens.weight"
    for on_levels in ({*first} - {table}, {table}):
        model = trained()
        for name in on_levels:
            model.get_parameter(name).copy_(torch.from_numpy(first[name].dense()))
        found = quantise_model(model, 4, texts, keep=True)
        eight = {name for name, weight in found.items() if weight.bits == 8}
        assert eight == {table} - on_levels


def test_a_build_has_both_in_one_graph(workshop: Workshop) -> None:
    """Only in the target: a draft has to be fast."""
    model = workshop.checkpoint("llama")
    bundle = workshop.bundle(model, model, weights="int4", bits=6.5)
    assert "WEIGHTS=int4 BITS=6.5" in read_bundle(bundle).rebuild_command(bundle)
    products = of_type(bundle, "QuantizedMatMul", HOST_FILE)
    bits = [onnx.helper.get_node_attr_value(node, "bits") for node in products]
    assert bits.count(8) > 1 and 4 in bits
    assert read_bundle(bundle).pair.draft.bits is None  # type: ignore[union-attr]
    with load(bundle) as engine:
        plain = engine.generate("abc", max_new_tokens=24, gamma=0)
        fast = engine.generate("abc", max_new_tokens=24)
    assert fast.token_ids == plain.token_ids


def test_an_embedding_of_its_own_has_4_bits_in_the_graph_too(workshop: Workshop) -> None:
    folder = workshop.graphs(workshop.checkpoint("qwen2"), weights="int4", bits=4.5)
    (look_up,) = of_type(folder, "QuantizedGather", HOST_FILE)
    assert onnx.helper.get_node_attr_value(look_up, "bits") == 4


@pytest.mark.parametrize(
    ("options", "cause", "remedy"),
    [
        ("--bits 5", "BITS=5 requires WEIGHTS=int4, but WEIGHTS is full", "Set WEIGHTS=int4"),
        ("--weights int8 --bits 5", "BITS=5 requires WEIGHTS=int4, but WEIGHTS is int8", "Set"),
        ("--weights int4 --bits 9", "BITS=9 is out of range", "from 4.5 to 8.5"),
        ("--weights int4 --bits nan", "BITS=nan is out of range", "from 4.5 to 8.5"),
        ("--weights int4 --bits 4.4", "BITS=4.4 is out of range", "from 4.5 to 8.5"),
    ],
)
def test_bits_that_nothing_can_have_are_refused(
    workshop: Workshop, refused: Refused, options: str, cause: str, remedy: str
) -> None:
    message = refused(workshop.checkpoint("llama"), *options.split(), kind="option")
    assert cause in message and remedy in message


def test_a_model_that_cannot_have_them_is_refused_by_name(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that do not fill a block need more bits; and costs need gradients."""
    with monkeypatch.context() as patch:
        patch.setattr(quantising, "minimum_bits", lambda model: 4.87)
        with pytest.raises(OutriderError, match=r"take 4\.87 bits each") as error:
            workshop.graphs(workshop.checkpoint("llama"), weights="int4", bits=4.75)
    assert error.value.remedy == "Build with BITS=4.9 or more, or without BITS."

    def none(*given: Any) -> dict[str, float]:
        raise NoCosts("it has none")

    monkeypatch.setattr(whole, "costs", none)
    with pytest.raises(OutriderError, match="cannot be ranked by cost: it has none") as error:
        workshop.graphs(workshop.checkpoint("llama"), weights="int4", bits=6.75)
    assert error.value.remedy == "Build without BITS."


def test_a_target_far_from_its_model_is_told_what_loses_less(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, ids = find(str(workshop.checkpoint("llama"))), torch.randint(1, 9, (2, 9))
    lower, only = "BITS=5.6 or WEIGHTS=int8 loses less", "for a target: WEIGHTS=int8 loses less"
    for role, bits, noise, more, advice in (
        ("target", None, 0.5, 5.4, lower), ("target", None, 0.01, 5.4, None),
        ("target", None, 0.5, 6.3, "BITS=6.3 or"), ("target", None, 0.5, 8.2, only),
        ("target", 6.0, 0.5, 5.4, None), ("draft", None, 0.5, 5.4, None),
    ):  # fmt: skip
        quantising = Quantising(role, "int4", checkpoint, None, shares_encoder=False, bits=bits)
        quantising._texts, quantising._bits_per_weight = Texts(ids), 5.34
        quantising._next_bits_per_weight = more
        quantising._full_logits = torch.randn(2, 9, 50)
        quantising._quantised_logits = quantising._full_logits + noise * torch.randn(2, 9, 50)
        quantising.measure(None, "float32")
        output = capsys.readouterr().err
        assert advice in output if advice else not output.count("note:")


def test_where_the_next_matrix_has_8_bits_is_known() -> None:
    small, large, eight = (torch.randn(rows, 64) for rows in (8, 32, 16))
    found = [quantise4(large), quantise4(small), quantise8(eight)]
    more = [quantise4(large), quantise8(small), quantise8(eight)]
    assert quantising._bits_with_one_more(found) == pytest.approx(bits_per_weight(more))
    assert quantising._bits_with_one_more(more[1:]) == bits_per_weight(more[1:])
