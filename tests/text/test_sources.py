"""The source of a slot: it is encoded once, and rows of another source are never reused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import SOURCES, expected, greedy, texts
from originals import one_thread
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM
from workshop import MAX_LEN, Workshop

from runtime.backends import host
from runtime.backends.engine import CachedRows
from runtime.beam.text import beam_texts
from runtime.files.manifest import read_bundle


def test_a_source_is_looked_into(t5: tuple[Path, Path]) -> None:
    """The "copy" draft proposes the tokens that follow the match in the source."""
    engine = one_thread(t5[1], 1)
    source = [20, 21, 22, 23, 24, 25]
    request = engine.request([20, 21, 22], greedy(source, 3, "copy"))
    sequence = engine.decoder.admit(request)
    try:
        sequence.slot.tokens[:] = [1, 20, 21, 22]
        proposer = engine.decoder.rounds.proposer
        assert proposer._draft_of(sequence).guess(sequence, [], 3) == [23, 24, 25]
    finally:
        engine.decoder.release(sequence)


def test_an_encoder_runs_once_a_request(t5: tuple[Path, Path], encoded: list[int]) -> None:
    engine = one_thread(t5[1], 1)
    texts(engine, [greedy(SOURCES[1], 0)])
    assert encoded == [7], "only the target's, if no draft model is used"
    texts(engine, [greedy(SOURCES[2], 4)])
    assert encoded == [7, 40, 40]
    texts(engine, [greedy(SOURCES[2], 4)])
    assert encoded == [7, 40, 40], "the slot still has it"


def test_a_round_encodes_as_much_as_it_reads_of_prompts(t5: tuple[Path, Path]) -> None:
    """Fault: one source in a round, however short, or all of them, however long."""
    decoder = (engine := one_thread(t5[1], 3)).decoder
    long = [SOURCES[3], SOURCES[3][::-1]]
    for sources, read in ((SOURCES[:3], [True] * 3), (long, [True, False])):
        requests = [engine.request(None, greedy(source, 0)) for source in sources]
        active = [decoder.begin(request) for request in requests]
        decoder.round(active)
        assert [bool(sequence.output) for sequence in active] == read
        for sequence in active:
            decoder.release(sequence)


def test_rows_of_one_source_are_copied(t5: tuple[Path, Path]) -> None:
    """Fault: the slot got the source after its rows had been looked for."""
    engine = one_thread(t5[1], 2)
    request = engine.request(SOURCES[2], greedy(SOURCES[1], 0))
    first, second = (engine.decoder.admit(request) for _ in range(2))
    assert first.stats.reused_tokens == 0
    assert second.stats.reused_tokens == len(request.prompt) - 2
    assert [token.id for token in second.output] == [token.id for token in first.output]
    for sequence in (first, second):
        engine.decoder.release(sequence)


def with_encoder_of(draft: Path, target: Path, folder: Path) -> Path:
    """A copy of the draft with the target's encoder and, therefore, its embeddings."""
    shutil.copytree(draft, folder)
    theirs, weights = (load_file(x / "model.safetensors") for x in (target, draft))
    same = {name: theirs[name] for name in weights if name.startswith(("encoder.", "shared."))}
    save_file({**weights, **same}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_draft_with_the_targets_encoder_runs_none(
    workshop: Workshop, tmp_path: Path, encoded: list[int], backend: str
) -> None:
    """The draft's decoder projects the states of the target's encoder."""
    target, other = workshop.checkpoint("t5"), workshop.checkpoint("t5", blur=0.1)
    draft = with_encoder_of(other, target, tmp_path / "draft")
    bundle = workshop.bundle(target, draft, backend=backend)
    facts = read_bundle(bundle).pair.draft
    assert facts and facts.encoder and facts.encoder.shared == 64
    engine, one = one_thread(bundle, 3), one_thread(bundle, 1)
    want_ids = [expected(target, source) for source in SOURCES]
    assert texts(engine, [greedy(source, 4) for source in SOURCES]) == want_ids
    assert encoded == [len(source) for source in SOURCES]
    assert texts(one, [greedy(SOURCES[1], 0), greedy(SOURCES[1], 4)]) == [want_ids[1]] * 2
    assert encoded[4:] == [7], "kept for the draft, which needs it later"
    states = engine.decoder.target._states
    model = AutoModelForSeq2SeqLM.from_pretrained(target).get_encoder()
    slot = engine.decoder.target.cached_rows.slot_with(SOURCES[3])  # the last one encoded
    want = model(torch.tensor([SOURCES[3]])).last_hidden_state.detach().numpy()
    np.testing.assert_allclose(states[slot], want, atol=1e-5)
    # In a beam search, the draft uses slots that the target does not.
    asked = {"source": SOURCES[1], "beams": 1, "max_new_tokens": 8}
    plain, drafted = (
        beam_texts(one_thread(bundle, 3), None, **asked, **more).texts[0]
        for more in ({"gamma": 0}, {"gamma": 3, "draft_beams": 3})
    )
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("checked", [True, False], ids=["as it is", "control"])
def test_rows_of_another_source_are_not_used_again(
    t5: tuple[Path, Path], checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: reusing rows regardless of their source gives another output."""
    if not checked:
        real = CachedRows.common_prefix

        def common(self: CachedRows, slot: int, text: list[int], _: object) -> int:
            return real(self, slot, text, self._sources[slot])

        def encoded(self: CachedRows, slot: int, source: list[int]) -> None:
            self._sources[slot] = tuple(source)

        monkeypatch.setattr(CachedRows, "common_prefix", common)
        monkeypatch.setattr(CachedRows, "set_source", encoded)
    engine, prompt = one_thread(t5[1], 1), list(range(60, 72))
    for source in SOURCES[1:3]:
        result = engine.generate(prompt, greedy(source))
    assert (result.token_ids == expected(t5[0], SOURCES[2], prompt)) == checked
    assert (result.stats.reused_tokens == 0) == checked


def test_room_for_sources_grows(t5: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other slots keep their sources when a longer one is added, and a single slot shrinks again
    for a shorter source."""
    monkeypatch.setattr(host, "FIRST_ROWS", 16)
    want = [expected(t5[0], source) for source in SOURCES]
    three = one_thread(t5[1], 3)
    assert texts(three, [greedy(source, 4) for source in SOURCES]) == want
    assert three.decoder.target.source_row_count == MAX_LEN
    one, rows = one_thread(t5[1], 1), []
    for source, text in zip(reversed(SOURCES), reversed(want), strict=True):
        assert texts(one, [greedy(source, 4)]) == [text]
        rows.append(one.decoder.target.source_row_count)
    assert rows == [MAX_LEN, 64, 16, 16]
