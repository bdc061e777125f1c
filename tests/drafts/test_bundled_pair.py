"""Every kind of draft on trained models: the certificate of `--check` at temperature 0 and 1.

Their distributions are those of text, and their engines are real. The fast tests have the bundled
draft as the target, and as its draft the same with noise on its weights, which is one trace of two
layers; `make test-slow` has the bundled pair. What the certificate finds out is in
test_certificate.py.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rounds import cases
from safetensors.torch import load_file, save_file
from workshop import Workshop

from export import ngram
from runtime import load
from runtime.certificate import check
from runtime.costs import Costs
from runtime.drafts.registry import KINDS
from runtime.text.engine import TextEngine
from runtime.text.options import Options

CHECKOUT = Path(__file__).parents[2]
MODELS = CHECKOUT / "models"
NOISE = 0.2  # relative to the weights
PROMPT = "import os\n\ndef load(path):\n    with open(path) as file:\n"
SAMPLED = Options(temperature=1.0, seed=11, max_new_tokens=128, ignore_eos=True)
GREEDY = Options(max_new_tokens=96, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    **{kind: {"draft": kind} for kind in sorted(KINDS)},
    "block": {"verify": "block", "draft": "chain"},
    "auto": {"gamma": "auto"},  # chosen by what rounds have cost
    "stops": {"draft_threshold": 0.4, "gamma": 8},
}


def noisy(source: Path, folder: Path) -> Path:
    """A copy that agrees with its source now and then."""
    shutil.copytree(source, folder)
    weights, dice = load_file(source / "model.safetensors"), torch.Generator().manual_seed(1)
    for weight in weights.values():
        weight += NOISE * weight.std() * torch.randn(weight.shape, generator=dice).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=cases(["small"], ["pair"]))
def engine(
    request: pytest.FixtureRequest, workshop: Workshop, tmp_path_factory: pytest.TempPathFactory
) -> TextEngine:
    target, draft = MODELS / "target", MODELS / "draft"
    if request.param == "small":
        target, draft = draft, noisy(draft, tmp_path_factory.mktemp("noisy") / "draft")
    bundle = workshop.bundle(target, draft)
    table = tmp_path_factory.mktemp("table") / "table.npz"
    texts = [str(path) for path in sorted((CHECKOUT / "runtime").glob("*.py"))]
    tokenizer = str(bundle / "tokenizer")
    assert ngram.main(["--tokenizer", tokenizer, "--out", str(table), *texts]) == 0
    return load(bundle, slots=1, table=table, corpus=CHECKOUT / "runtime" / "round.py", threads=1)


@pytest.mark.parametrize(
    ("way", "options"),
    cases(
        [("bigram", SAMPLED), ("chain", SAMPLED), ("auto", GREEDY), ("stops", GREEDY)],
        product(WAYS, (GREEDY, SAMPLED)),
    ),
)
def test_the_output_is_the_targets(
    engine: TextEngine, way: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = Costs.observe  # injected: on a busy machine it may rightly be 0
    monkeypatch.setattr(Costs, "observe", lambda *seen: observe(*seen[:3], 0.1 * seen[2], 1.0))
    monkeypatch.setattr(Costs, "caught_up", lambda *_: None)
    certificate = check(engine, PROMPT, replace(options, **WAYS[way]))
    assert certificate.passed, certificate.lines()
    assert certificate.drafted > 0
    if options is GREEDY:
        plain = engine.generate(PROMPT, replace(options, gamma=0)).token_ids
        drafted = engine.generate(PROMPT, replace(options, **WAYS[way])).token_ids
        assert drafted == plain or certificate.near_ties


def test_a_draft_temperature(engine: TextEngine) -> None:
    certificate = check(engine, PROMPT, replace(SAMPLED, draft_temperature=0.6))
    assert certificate.passed, certificate.lines()
