"""Which matrices get 8 bits where there is room for some: what each of them costs with 4."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from checkpoints import ARCHITECTURES
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from workshop import Workshop

from export.weights import whole
from export.weights.blocks import Quantised
from export.weights.costs import NoCosts, costs, dearest
from export.weights.layers import Table, _Product
from export.weights.quality import Texts, measure, sample
from export.weights.whole import least, quantise_model
from runtime.bundle import load
from runtime.files.errors import OutriderError
from runtime.files.manifest import HOST_FILE, read_bundle

DRAFT = Path(__file__).parents[2] / "models" / "draft"
Refused = Callable[..., str]


def _trained() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def _bits(found: dict[str, Quantised]) -> float:
    return 8 * sum(w.size for w in found.values()) / sum(w.levels.size for w in found.values())


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(sample(_trained(), 24, 64, seed=1))


def _kl(model: PreTrainedModel, texts: Texts) -> float:
    full = _trained()(input_ids=texts.ids).logits
    slices = zip(full, model(input_ids=texts.ids).logits, texts.ids, strict=True)
    return measure([(f[:-1], s[:-1], ids[1:]) for f, s, ids in slices]).kl


def test_costs_are_the_divergence_that_there_is(texts: Texts) -> None:
    """All of them together, and what goes with the dearest. Who forgets a factor of 2 fails."""
    model, dense = _trained(), _trained()
    found = quantise_model(model, 4, texts)
    inner = [name for name, weight in found.items() if weight.bits == 4]
    weights = {name: dense.get_parameter(name) for name in inner}
    layers = {name: [model.get_submodule(name.removesuffix(".weight"))] for name in inner}
    each = costs(model, weights, layers, texts)  # type: ignore[arg-type]
    before = _kl(model, texts)
    assert sum(each.values()) == pytest.approx(before, rel=0.25)
    dear = sorted(each, key=lambda name: each[name])[-8:]
    for name in dear:
        path = name.removesuffix(".weight")
        model.set_submodule(path, dense.get_submodule(path))
    gone = sum(each[name] for name in dear)
    assert gone > 0.3 * before
    assert before - _kl(model, texts) == pytest.approx(gone, rel=0.25)


def test_what_there_is_room_for_goes_to_what_costs_the_most(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the cheapest, it would gain next to nothing."""
    room = least(_trained()) + 0.2
    held: list[float] = []
    for sign in (1, -1):

        def signed(*given: Any, sign: int = sign) -> dict[str, float]:
            return {name: sign * cost for name, cost in costs(*given).items()}

        monkeypatch.setattr(whole, "costs", signed)
        model = _trained()
        found = quantise_model(model, 4, texts, most=room)
        assert room - 0.05 < _bits(found) <= room
        held.append(_kl(model, texts))
    model = _trained()
    found = quantise_model(model, 4, texts)
    assert _bits(found) == pytest.approx(room - 0.2)
    none = _kl(model, texts)
    assert held[0] < 0.8 * none < 0.9 * held[1]


def test_what_does_not_fit_leaves_its_room_to_others() -> None:
    each = {"a": 9.0, "b": 5.0, "c": 4.0, "d": 1.0}
    sizes = {"a": 10, "b": 1, "c": 2, "d": 3}
    assert dearest(each, sizes, 12.5) == ["b", "c", "d"]
    assert dearest(each, sizes, 13.5) == ["b", "c", "a"]
    assert dearest(each, sizes, 6) == ["b", "c", "d"]
    assert dearest(each, sizes, 0.5) == []


@pytest.mark.parametrize("name", ["gpt2", "t5", "qwen3-moe", "gemma4", "deepseek3"])
def test_models_of_all_kinds_have_costs(name: str) -> None:
    """Matrices of an encoder too; experts keep their 4 bits."""
    torch.manual_seed(0)
    config = ARCHITECTURES[name]()
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_config(config).eval()
    ids = torch.randint(1, 200, (4, 12))
    texts = Texts(ids, ids if config.is_encoder_decoder else None)
    found = quantise_model(model, 4, texts, most=7.9)
    eight = {path for path, weight in found.items() if weight.bits == 8}
    assert 7 < _bits(found) <= 7.9 or any("experts" in path for path in found)
    assert not any(path.endswith("experts.down_proj") for path in eight)
    sides = ["encoder", "decoder"] if config.is_encoder_decoder else ["layers", "h."]
    assert any(any(side in path for side in sides) for path in eight)
    if config.is_encoder_decoder:
        assert all(any(path.startswith(side) for path in eight) for side in sides)


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
    with pytest.raises(NoCosts, match="none of those"):
        costs(_trained(), {}, {}, texts)
    model = _trained()
    last: Any = model.base_model.norm
    last.register_forward_hook(lambda *given: given[-1].detach())
    with pytest.raises(NoCosts, match="does not require grad"):
        quantise_model(model, 4, texts, most=8)
    model = _trained()
    last = model.base_model.norm
    last.register_forward_hook(lambda *given: given[-1] + (given[-1] * 0).sqrt())
    with pytest.raises(NoCosts, match="NaN or infinite"):
        quantise_model(model, 4, texts, most=8)


def test_a_build_has_both_in_one_graph(workshop: Workshop) -> None:
    bundle = workshop.bundle(workshop.checkpoint("llama"), weights="int4", bits=6.5)
    assert "WEIGHTS=int4 BITS=6.5" in read_bundle(bundle).rebuild_command(bundle)
    graph = onnx.load(bundle / "target" / HOST_FILE, load_external_data=False).graph
    bits = [
        {each.name: each.i for each in node.attribute}["bits"]
        for node in graph.node
        if node.op_type == "QuantizedMatMul"
    ]
    assert bits.count(8) > 1 and 4 in bits
    with load(bundle) as engine:
        plain = engine.generate("abc", max_new_tokens=24, gamma=0)
        fast = engine.generate("abc", max_new_tokens=24, draft="ngram")
    assert fast.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("asked", "cause", "remedy"),
    [
        ("--bits 5", "BITS=5 is for WEIGHTS=int4, and WEIGHTS is full", "Set WEIGHTS=int4"),
        ("--weights int4 --bits 9", "BITS=9 is out of range", "from 4.5 to 8.5"),
        ("--weights int4 --bits nan", "BITS=nan is out of range", "from 4.5 to 8.5"),
        ("--weights int4 --bits 4.6", "more than BITS=4.6", "Build with BITS=5.4 or more"),
    ],
)
def test_bits_that_nothing_can_have_are_refused(
    workshop: Workshop, refused: Refused, asked: str, cause: str, remedy: str
) -> None:
    said = refused(workshop.checkpoint("llama"), *asked.split(), kind="option")
    assert cause in said and remedy in said


def test_a_model_without_gradients_is_refused_by_name(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(*given: Any) -> dict[str, float]:
        raise NoCosts("it has none")

    monkeypatch.setattr(whole, "costs", none)
    with pytest.raises(OutriderError, match="costs cannot be told: it has none") as error:
        workshop.graphs(workshop.checkpoint("llama"), weights="int4", bits=6.75)
    assert error.value.remedy == "Build without BITS."
