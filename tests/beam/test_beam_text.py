"""Beam search on the command line and from text to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Cli
from fakes import make_text_engine, near, random_model

from runtime.beam.search import beam_search
from runtime.beam.text import SLOTS_PER_BEAM, BeamTexts, beam_texts
from runtime.files.errors import OutriderError
from runtime.text import slot_queue
from runtime.text.engine import TextEngine
from runtime.text.options import Options


@pytest.fixture
def engine(tmp_path: Path) -> TextEngine:
    target = random_model(1)
    return make_text_engine(tmp_path, target, near(target, 2, 0.7), slots=4, order=None)


def texts(found: BeamTexts) -> list[tuple[Any, ...]]:
    return [(one.text, one.token_ids, round(one.score, 6), one.finished) for one in found.texts]


def test_the_texts_of_the_search(engine: TextEngine) -> None:
    decoder = engine.decoder
    ids = engine.request("hello", Options()).prompt
    plain = beam_search(
        decoder.target, None, ids, width=3, gamma=0, max_new_tokens=12, max_len=decoder.max_len,
        eos_token_ids=engine.manifest.pair.tokenizer.eos_token_ids, vocab_size=decoder.vocab_size,
    )  # fmt: skip
    found = beam_texts(engine, "hello", beams=3, max_new_tokens=12, gamma=4)
    assert [tuple(one.token_ids) for one in found.texts] == [h.tokens for h in plain.hypotheses]
    assert found.stats.rounds < plain.stats.rounds == 12
    for one in found.texts:
        assert one.text == engine.tokenizer.decode(one.token_ids[: -1 if one.finished else None])
    assert texts(beam_texts(engine, "hello", beams=3, max_new_tokens=12)) == texts(found)
    assert decoder.slots.free == 4


def test_a_slot_in_use(engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_queue, "GRACE", 0.01)
    stream = engine.stream("hello", max_new_tokens=5)
    next(stream)
    with pytest.raises(OutriderError, match=r"^busy: "):
        beam_texts(engine, "hello")
    stream.close()
    beam_texts(engine, "hello", max_new_tokens=2)


@pytest.mark.parametrize(
    "given",
    [{"gamma": 9}, {"gamma": -1}, {"max_new_tokens": 0}, {"beams": 0},
     {"draft_beams": 2, "gamma": 4}, {"draft_beams": 9}, {"prompt": []}, {"prompt": [1] * 2000},
     {"prompt": [10**6]}],
)  # fmt: skip
def test_what_is_refused(engine: TextEngine, given: dict[str, Any]) -> None:
    with pytest.raises(OutriderError) as caught:
        beam_texts(engine, **{"prompt": "hello", **given})
    assert caught.value.kind == ("prompt" if "prompt" in given else "option")


def test_the_command(
    engine: TextEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = Cli(engine, capsys, monkeypatch)
    found = beam_texts(engine, "hello", beams=3, max_new_tokens=9)
    argv = ["--prompt", "hello", "--max-new-tokens", "9", "--beams", "3"]
    status, out, err = cli(*argv)
    assert (status, out) == (0, found.texts[0].text + "\n")
    assert cli.loaded["slots"] == 3 * SLOTS_PER_BEAM
    assert "beams 3 | rounds" in err and "| score -" in err
    status, out, err = cli(*argv, "--json", "--stats", "none", "--slots", "2")
    assert [one["text"] for one in json.loads(out)["hypotheses"]] == [t.text for t in found.texts]
    assert (err, cli.loaded["slots"]) == ("", 2)
