"""The compared systems decode what they are given, and report what they lack.

Systems whose packages are not installed are skipped; `python -m pip install '.[peers]'` installs
them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
from checkpoints import CONTEXT, VOCAB_SIZE
from transformers import AutoModelForCausalLM
from workshop import Workshop

from bench.core import pair as pairs
from bench.core.cache import cached_folder
from bench.suites.side.run import MEASURED
from bench.systems import SYSTEMS
from bench.systems.gguf import tensors, write
from bench.systems.peer import Peer
from bench.systems.protocol import Request, StepsRequest, Text, Unavailable, time_per_token
from bench.systems.worker import Arrivals

MODES = {name: modes for (name, bits), modes in MEASURED["text"].items() if bits == "float32"}
NEW_TOKENS = 48
END_OF_TEXT = 0  # the checkpoints' EOS
PROMPTS = [np.random.default_rng(0).integers(1, VOCAB_SIZE, 30).tolist(), [5, 6, 7] * 4]
BATCH = [PROMPTS[0][::-1], PROMPTS[0][3:] + PROMPTS[0][:3]]  # same length, not used elsewhere


@pytest.fixture(scope="module")
def pair(workshop: Workshop) -> tuple[Path, Path]:
    return workshop.checkpoint("llama"), workshop.checkpoint("llama", blur=0.03)


@pytest.fixture(scope="module")
def transformers(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Peer]:
    target, draft = pair
    work = tmp_path_factory.mktemp("systems")
    with Peer("transformers", target, draft=draft, threads=1, work=work) as peer:
        yield peer


def _texts(peer: Peer, mode: str, count: int = NEW_TOKENS, **options: float) -> list[Text]:
    requests = (Request([prompt], count, mode, **options) for prompt in PROMPTS)
    return [text for request in requests for text in peer.generate(request)]


def _tokens(peer: Peer, mode: str, seed: int) -> list[list[int]]:
    return [text.tokens for text in _texts(peer, mode, 16, temperature=1.0, seed=seed)]


@pytest.fixture(scope="module")
def plain(transformers: Peer) -> list[list[int]]:
    """The greedy tokens of the prompts. One output continues after an EOS."""
    texts = [text.tokens for text in _texts(transformers, "plain")]
    assert any(END_OF_TEXT in tokens[:-1] for tokens in texts)
    assert all(len(set(tokens)) > 5 for tokens in texts)
    return texts


def _check_greedy_tokens(peer: Peer, mode: str, plain: list[list[int]]) -> None:
    """Check greedy tokens, that rounds fit the mode, and that no part of the prompt was cached."""
    texts = _texts(peer, mode)
    assert [text.tokens for text in texts] == plain, mode
    for text in texts:
        assert len(text.times) == len(text.lost) == NEW_TOKENS
        assert 0 < text.first_token.seconds < text.times[-1]
        assert text.times == sorted(text.times) and text.lost == sorted(text.lost)
        assert text.peak > 1 << 20
        assert text.notes.get("reused_tokens", 0) == 0
    rounds = sum(1 + len(text.round_tokens()) for text in texts)
    assert (rounds == 2 * NEW_TOKENS) if mode == "plain" else (rounds <= 2 * NEW_TOKENS)
    assert mode not in ("draft", "assistant") or rounds < 1.5 * NEW_TOKENS


def _check_batch(peer: Peer, mode: str = "plain") -> None:
    """Check that each prompt of a batch gives the same tokens as alone, up to an EOS, after which a
    system may pad."""
    texts = peer.generate(Request(BATCH, 12, mode))
    assert len(texts) == len(BATCH)
    for prompt, text in zip(BATCH, texts, strict=True):
        alone = peer.generate(Request([prompt], 12))[0].tokens
        size = alone.index(END_OF_TEXT) if END_OF_TEXT in alone else len(alone)
        assert size > 2 and text.tokens[:size] == alone[:size]
        assert len(text.times) == 12 and text.times == sorted(text.times)
    assert mode != "plain" or texts[0].times[-1] == texts[1].times[-1]  # from the same step
    assert texts[0].tokens != texts[1].tokens


# Transformers


@pytest.mark.parametrize("mode", MODES["transformers"])
def test_transformers_says_the_same_in_every_mode(transformers, plain, mode):
    _check_greedy_tokens(transformers, mode, plain)


@pytest.mark.parametrize("mode", ["plain", "draft"])
def test_transformers_draws_by_the_seed(transformers, plain, mode):
    one, other, again = (_tokens(transformers, mode, seed) for seed in (1, 2, 1))
    assert one == again
    assert one != other and one != [tokens[:16] for tokens in plain]


@pytest.mark.slow
def test_transformers_applies_no_filters_of_the_checkpoint_s_own(pair, plain, tmp_path):
    checkpoint = shutil.copytree(pair[0], tmp_path / "own")
    filters = {"do_sample": True, "repetition_penalty": 2.0, "min_p": 0.9}
    (checkpoint / "generation_config.json").write_text(json.dumps(filters))
    with Peer("transformers", checkpoint, work=tmp_path) as peer:
        assert [text.tokens for text in _texts(peer, "plain")] == plain
        assert _tokens(peer, "plain", 1) != [tokens[:16] for tokens in plain]


def test_transformers_decodes_texts_together(transformers):
    _check_batch(transformers)
    with pytest.raises(Unavailable, match="batch_size = 1"):
        transformers.generate(Request(BATCH, 12, "draft"))


def test_facts_of_a_system(transformers, pair):
    facts = transformers.facts
    written = sum(file.stat().st_size for file in pair[0].glob("*.safetensors"))
    assert 0.9 * written < facts["weights"] <= written
    assert facts["load_seconds"] > 0 and facts["before"] > 1 << 20 and facts["dtype"] == "float32"


# What is missing


def test_a_system_without_its_packages_is_missing_with_the_reason(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else found(name)
    )
    with pytest.raises(Unavailable, match=r"llama_cpp.*extra llama"):
        Peer("llama.cpp", tmp_path)
    assert SYSTEMS["transformers"].missing_reason() is None


def test_what_a_peer_cannot_do_is_unavailable_with_the_reason(transformers):
    with pytest.raises(Unavailable, match="steps"):
        transformers.time_steps(StepsRequest(10, [1]))
    with pytest.raises(Unavailable, match="Error"):
        transformers.generate(Request([[]], 2))
    assert len(transformers.generate(Request([PROMPTS[1]], 2))[0].tokens) == 2  # still usable
    with pytest.raises(ValueError, match="twice"):  # a prefix cache would distort the times
        transformers.generate(Request([PROMPTS[1]], 2))


@pytest.mark.slow
def test_ctrl_c_ends_a_worker_without_a_traceback(pair, tmp_path, capfd):
    """A terminal sends it to the workers too."""
    with Peer("transformers", pair[0], work=tmp_path) as peer:
        os.kill(peer._process.pid, signal.SIGINT)
        with pytest.raises(Unavailable, match="ended with SIGINT"):
            peer.generate(Request([PROMPTS[0]], 2))
    assert "Traceback" not in capfd.readouterr().err


# Times


def test_tokens_of_a_round_share_its_time():
    arrivals = Arrivals(2)
    for tokens, same_round in (([1], False), ([2], True), ([3], False), ([4, 5], False)):
        arrivals.add([(0, tokens)], same_round=same_round)
    text, other = arrivals.texts
    assert text.tokens == [1, 2, 3, 4, 5] and other == Text()
    assert text.round_tokens() == [1, 2] and text.first_token.seconds == text.times[1]
    made = Text([1, 2, 3, 4], [1.0, 1.0, 1.5, 2.0], [0, 0, 0.1, 0.1])
    token = time_per_token([made])  # over the two tokens after the first round
    assert token is not None and (token.seconds, token.lost) == pytest.approx((1 / 2, 0.1))


# GGUF


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {"attention_bias": True}), ("llama3", {}), ("mistral", {"sliding_window": None}),
     ("qwen2", {}), ("qwen3", {})],
)  # fmt: skip
def test_a_gguf_file_has_the_checkpoint_s_tensors(kind, options, workshop, tmp_path):
    """The slow test checks llama.cpp's output, for Llama."""
    file, checkpoint = tmp_path / "model.gguf", workshop.checkpoint(kind, **options)
    write(checkpoint, file)
    read = gguf.GGUFReader(file)
    stored = {tensor.name: tensor for tensor in read.tensors}
    source = dict(tensors(checkpoint))
    slower = stored.pop("rope_freqs.weight", None)
    assert len(stored) == len(source)
    if kind == "llama3":  # the fastest frequency is unchanged, the slowest 8 times slower
        assert (slower.data[0], slower.data[-1]) == pytest.approx((1, 8))
        rotary = AutoModelForCausalLM.from_pretrained(checkpoint).model.rotary_emb
        plain = rotary.config.rope_parameters["rope_theta"] ** -(np.arange(0, 16, 2) / 16)
        np.testing.assert_allclose(rotary.inv_freq * slower.data, plain, rtol=1e-5)
    else:
        assert slower is None
    architecture = kind if "qwen" in kind else "llama"
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, 2)
    for name, tensor in source.items():
        other = stored[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        assert other.tensor_type == gguf.GGMLQuantizationType.F32
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = gguf_files.neighbours(tensor, len(tensor) // 16)
        assert tensor.any()
        np.testing.assert_array_equal(other.data.reshape(tensor.shape), tensor)
    for field, value in (("vocab_size", VOCAB_SIZE), ("context_length", CONTEXT)):
        assert read.fields[f"{architecture}.{field}"].contents() == value


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [("mistral", {}, "window"), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1},
     "window"), ("gpt2", {}, "only llama")],
)  # fmt: skip
def test_what_is_not_written_as_gguf(kind, options, words, workshop, tmp_path):
    with pytest.raises(ValueError, match=words):
        write(workshop.checkpoint(kind, **options), tmp_path / "model.gguf")


# The peers that are not Transformers


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MODES if n != "transformers"])
def test_a_system_says_what_transformers_says(name, pair, plain, tmp_path, workshop):
    if (reason := SYSTEMS[name].missing_reason()) is not None:
        pytest.skip(reason)
    target, draft = pair
    if name == "outrider":  # as if it had already built the pair
        folder, sources = pairs.bundle_sources(target, draft, tmp_path, max_len=CONTEXT)
        made = workshop.bundle(target, draft)
        cached_folder(folder, sources, lambda: shutil.copytree(made, folder, dirs_exist_ok=True))
    with Peer(name, target, draft=draft, slots=2, work=tmp_path, max_len=CONTEXT) as peer:
        _check_batch(peer)
        if name == "outrider":
            _check_batch(peer, "draft")
            samples = peer.time_steps(StepsRequest(40, [1, 3], slots=2, patience=0.0))
            assert set(samples) == {"draft", "1", "3"}
            assert all(s.seconds > 0 for some in samples.values() for s in some)
        else:
            with pytest.raises(Unavailable, match="drafts"):
                peer.generate(Request(BATCH, 12, "draft"))
        for mode in MODES[name]:
            _check_greedy_tokens(peer, mode, plain)
            one, again = (_tokens(peer, mode, 1) for _ in range(2))
            assert one != [tokens[:16] for tokens in plain], mode
            # "auto" chooses gamma by measured costs, and other rounds draw other tokens.
            assert mode == "auto" or one == again, mode


@pytest.mark.slow
def test_quantised_weights_of_llama_cpp_begin_alike(pair, plain, tmp_path):
    if (reason := SYSTEMS["llama.cpp"].missing_reason()) is not None:
        pytest.skip(reason)
    with Peer("llama.cpp", pair[0], precision="q8_0", work=tmp_path, max_len=CONTEXT) as peer:
        try:
            texts = _texts(peer, "plain")
        except Unavailable as error:  # a compiler bug: see the group in pyproject.toml
            pytest.skip(f"llama.cpp with q8_0: {error}")
        assert [text.tokens[:4] for text in texts] == [tokens[:4] for tokens in plain]
        with pytest.raises(Unavailable, match="no draft model"):
            peer.generate(Request([PROMPTS[0]], 2, "draft"))
        with pytest.raises(Unavailable, match="rows of"):
            peer.generate(Request([PROMPTS[0]], CONTEXT))
