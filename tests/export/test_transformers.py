"""At temperature 0 a bundle generates exactly the tokens of Transformers' `generate`.

Every architecture is exported, compiled and decoded by this repository, and compared with the eager
model with its own cache: prompts of one token, of five, and longer than the sliding window, with a
draft that is nearly always wrong. The cache contents after rejected drafts are tested by the random
walk of test_graph.py and by the tests of rounds. Speculative and plain requests share the calls of
three slots; one slot runs a graph of its own. Each gamma in its own batch: `make test-slow`.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from checkpoints import WINDOW, write_any
from exported import graph, nodes
from originals import PROMPTS, Original, check_batch, check_text, greedy, one_thread, original_of
from rounds import cases
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from workshop import MAX_LEN, Workshop, traced_once

from export.pair import export as export_pair
from runtime.files.errors import OutriderError
from runtime.files.graphs import HOST_FILE

GAMMAS = (0, 1, 2, 4, 8)

# One of each kind of decoder: tied and grouped; a window; biases; norms of queries and keys; soft
# caps and mixed windows; packed products and learned positions; experts; positions of three
# numbers; a recurrent state; ALiBi. The others resemble one of them.
FAST = [
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "mixtral", "qwen2.5-vl", "qwen3.5",
    "mpt",
]  # fmt: skip
SLOW = [
    "llama3", "gemma3", "gemma4", "opt", "phi3", "gpt-neox", "olmo2", "gemma", "phi",
    "phi3-longrope", "llama-dynamic", "stablelm", "granite", "cohere", "smollm3", "starcoder2",
    "qwen3-moe", "deepseek2", "deepseek3", "phi-moe", "gpt-oss", "lfm2", "granite4", "bloom",
    "codegen", "falcon", "falcon-40b", "gpt-neo", "gpt-neox-japanese", "gptj", "xglm",
]  # fmt: skip
COMPILED = ["gemma2", "llama", "mistral", "qwen2", "gemma3", "gemma4", "gpt2", "gpt-oss", "mpt"]
SLIDING = ["mistral", "gemma2", "gemma3", "gemma4", "starcoder2", "gpt-oss"]


@pytest.mark.parametrize(
    ("name", "backend", "which"),
    cases(
        [*product(FAST, ["onnxruntime"], ["mixed"]), ("llama", "aotinductor", "mixed")],
        [
            *product(SLOW, ["onnxruntime"], ["mixed"]),
            *product(COMPILED, ["aotinductor"], ["mixed", "each"]),
            *product(FAST + SLOW, ["onnxruntime"], ["each"]),
        ],
    ),
)
def test_greedy_text_is_that_of_transformers(
    workshop: Workshop, name: str, backend: str, which: str
) -> None:
    # An unrelated draft: nearly everything is rejected.
    target, draft = workshop.example(name), workshop.checkpoint("llama", seed=7)
    if (name, backend) == ("llama", "aotinductor"):
        target, draft = workshop.pair(backend)
    original = original_of(target)
    for prompt in PROMPTS:
        assert len(set(original.text(prompt))) >= 5, "a degenerate text proves nothing"
    bundle = workshop.bundle(target, draft, backend=backend)
    three = one_thread(bundle, 3)
    for gammas in [(0, 3, 8)] if which == "mixed" else [(gamma,) * 3 for gamma in GAMMAS]:
        check_batch(three, original, gammas)
    one = one_thread(bundle, 1)
    for prompt, gamma in zip(PROMPTS, (3, 5, 7), strict=True):
        check_text(original, prompt, one.generate(prompt, greedy(gamma)), f"gamma {gamma}")


@pytest.mark.parametrize("name", cases(["mistral"], SLIDING))
def test_control_the_window_slides(workshop: Workshop, name: str) -> None:
    """Without its window the checkpoint generates another text, so equality proves the window."""
    checkpoint = workshop.example(name)
    windowed = original_of(checkpoint)
    assert windowed.model.config.sliding_window == WINDOW
    full = Original(checkpoint, sliding_window=10 * WINDOW)
    assert windowed.text(PROMPTS[2]) != full.text(PROMPTS[2])
    # Within the window there is no difference.
    assert windowed.text(PROMPTS[0])[: WINDOW - 1] == full.text(PROMPTS[0])[: WINDOW - 1]


def test_control_a_wrong_cache_row_shows(workshop: Workshop) -> None:
    """The comparison can fail: one row of the cache zeroed after the prefill changes the text."""
    checkpoint = workshop.checkpoint("llama")
    engine = one_thread(workshop.bundle(checkpoint, workshop.checkpoint("llama", seed=7)), 1)
    stream = engine.stream(PROMPTS[2], greedy(0))
    tokens = list(next(stream).tokens)
    for array in engine.decoder.target._cache.values():
        array[0, :, 20] = 0
    for event in stream:
        tokens += event.tokens
    assert [token.id for token in tokens] != original_of(checkpoint).text(PROMPTS[2])


# The first numbers its positions differently if none are given; the second's checkpoint is a
# classifier's, although Transformers lists the model as a decoder.
OTHERWISE = {"kosmos-2.5": "difference", "shieldgemma2": "checkpoint"}
# Errors of configurations that were made from common field names and are inconsistent.
ODD = (
    "Transformers itself cannot run", "differ from its config.json", "has eos_token_id",
    "split_with_sizes",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mapping"),
    [
        *product(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), [MODEL_FOR_CAUSAL_LM_MAPPING]),
        *product(sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES), [MODEL_FOR_MULTIMODAL_LM_MAPPING]),
    ],
)
def test_every_decoder_is_exported_or_refused_by_name(
    kind: str, mapping: Any, tmp_path: Path
) -> None:
    """No architecture ends in another error or in a graph with other logits. Quantised experts are
    computed one by one."""
    config = CONFIG_MAPPING[kind]
    try:
        reason = write_any(tmp_path / kind, config, mapping[config])
    except Exception as error:  # noqa: BLE001 - some defaults cannot be built
        reason = type(error).__name__
    if reason is not None:
        pytest.skip(f"no tiny {kind}: {reason}")
    refusal, given = None, (str(tmp_path / kind), None, tmp_path / "out")
    try:
        with traced_once():
            pair = export_pair(*given, max_len=MAX_LEN, cache=tmp_path)
    except OutriderError as error:
        refusal = error
    if refusal is None:
        assert pair.target.max_difference is not None
        assert pair.target.max_difference <= pair.target.tolerance
        weights = graph(tmp_path / "out").graph.initializer
        products = {n.input[1] for n in graph(tmp_path / "out").graph.node if n.op_type == "MatMul"}
        if any(len(weight.dims) == 3 and weight.name in products for weight in weights):
            pair = export_pair(*given, max_len=MAX_LEN, weights="int4", cache=tmp_path, force=True)
            found = nodes(tmp_path / "out", HOST_FILE)
            assert found["outrider.QuantizedExperts"] and not found[".DequantizeLinear"]
    elif any(odd in refusal.cause for odd in ODD):
        pytest.skip(refusal.cause)
    else:
        assert refusal.kind == OTHERWISE.get(kind, "architecture"), refusal
