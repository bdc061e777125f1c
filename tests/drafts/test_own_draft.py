"""An application's own kind of draft: registered in one line, exact at every temperature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from exact import V, by_keys
from fakes import VOCAB_SIZE, Context, random_model
from rounds import finish, ids, make_decoder, on_host, plain, run, run_all

from examples.own_draft import Phrases
from runtime.cli.arguments import parse
from runtime.drafts import registry
from runtime.drafts.draft import Draft
from runtime.files.errors import OutriderError
from runtime.sequence import ActiveSequence, Request


class Liar(Phrases):
    """A draft that reports a uniform q for tokens that it did not draw."""

    point_masses = False

    def row(self, sequence: Any, drafts: Sequence[int]) -> np.ndarray:
        return np.zeros(V, np.float32)


class Careless(Draft):
    """A draft that ignores how many tokens are wanted, and which ones exist."""

    at_once = True
    proposal: ClassVar[list[int]] = []

    def propose(self, wanted: Mapping[ActiveSequence, int]) -> dict[ActiveSequence, list[int]]:
        return dict.fromkeys(wanted, self.proposal)

    def row(self, sequence: Any, drafts: Sequence[int]) -> np.ndarray:
        return np.zeros(self.sources.width, np.float32)


@pytest.fixture(autouse=True)
def _known(sampler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phrases that begin with every token."""
    monkeypatch.setattr(Phrases, "known", [[i, 7 - i, 3] for i in range(8)])
    monkeypatch.setattr(Phrases, "min_match", 1)
    monkeypatch.setitem(registry.KINDS, "phrases", Phrases)
    monkeypatch.setitem(registry.KINDS, "liar", Liar)


@on_host
def test_the_distribution_is_the_targets() -> None:
    for seed in (1, 2):
        assert by_keys(2, 4, seed, draft="phrases") < 1e-12
    liar = max(by_keys(2, 4, seed, draft="liar") for seed in (1, 2))
    assert liar > 0.01, "the control: a misreported q"


def test_the_command_line_knows_it() -> None:
    assert parse(["--engines", "x", "--prompt", "p", "--draft", "phrases"]).draft == "phrases"


def test_its_help_is_not_a_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: with a percent sign in it, --help was a TypeError."""
    monkeypatch.setattr(Phrases, "help", "50% of the time")
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert "phrases: 50% of the time" in " ".join(capsys.readouterr().out.split())


def test_a_name_has_one_meaning() -> None:
    registry.register_draft("phrases", Phrases)
    for name in ("phrases", "model", "none"):
        with pytest.raises(OutriderError, match="already exists"):
            registry.register_draft(name, Liar)
    for nameless in (5, ""):
        with pytest.raises(OutriderError, match=r"^option: name="):
            registry.register_draft(nameless, Liar)


@on_host
@pytest.mark.parametrize(("proposal", "drafted"), [([3, 10**6], 1), ([-5, 3], 0), ([3] * 20, 4)])
def test_what_cannot_be_a_draft_is_left_out(
    proposal: list[int], drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proposed tokens beyond the vocabulary, and more than were requested, are dropped; also if the
    draft returns rows."""
    monkeypatch.setitem(registry.KINDS, "careless", Careless)
    monkeypatch.setattr(Careless, "proposal", proposal)
    decoder = make_decoder(random_model(1))
    request = Request([2, 3, 2], gamma=4, draft="careless", max_new_tokens=20, ignore_eos=True)
    sequence = decoder.admit(request)
    decoder.round([sequence])
    assert sequence.stats.drafted == drafted
    decoder.release(sequence)
    assert ids(run(decoder, request)) == plain(decoder, request)


@on_host
@pytest.mark.parametrize("point_masses", [False, True])
def test_a_sequence_that_a_draft_leaves_out(
    point_masses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: its gamma stayed that of the request, and the round failed for all its sequences."""

    class Selective(Careless):
        def propose(self, wanted: Mapping[ActiveSequence, int]) -> dict[ActiveSequence, list[int]]:
            return {x: [3, 4] for x in wanted if x.slot.index == 1}

    monkeypatch.setattr(Selective, "point_masses", point_masses)
    monkeypatch.setitem(registry.KINDS, "selective", Selective)
    decoder = make_decoder(random_model(1), slots=3)
    request = Request([2, 3, 2], max_new_tokens=20, ignore_eos=True)
    kinds = ("selective", "selective", "phrases")
    left_out, *others = run_all(decoder, [replace(request, draft=kind) for kind in kinds])
    assert left_out.stats.drafted == 0 < min(sequence.stats.drafted for sequence in others)
    expected = plain(decoder, request)
    assert [ids(sequence) for sequence in (left_out, *others)] == [expected] * 3


@on_host
def test_a_draft_that_cannot_be_made_or_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: what its constructor raised ended the other sequences of the round too. Neither was an
    error that names the draft."""

    class Unmade(Draft):
        def __init__(self) -> None:
            """Lacks the sources."""

    class Unforgetting(Phrases):
        def forget(self, sequence: ActiveSequence) -> None:
            raise KeyError

    monkeypatch.setitem(registry.KINDS, "unmade", Unmade)
    monkeypatch.setitem(registry.KINDS, "unforgetting", Unforgetting)
    decoder = make_decoder(random_model(1), slots=2)
    request = Request([2, 3, 2], max_new_tokens=9, ignore_eos=True)
    unmade, forgetting = [
        decoder.admit(replace(request, draft=kind)) for kind in ("unmade", "unforgetting")
    ]
    decoder.round([unmade, forgetting])
    with pytest.raises(OutriderError, match=r"^option: draft=unmade raised TypeError"):
        raise unmade.error or AssertionError
    decoder.release(unmade)
    finish(decoder, forgetting)
    assert ids(forgetting) == plain(decoder, request)
    with pytest.raises(OutriderError, match=r"^option: draft=unforgetting raised KeyError"):
        decoder.release(forgetting)
    assert decoder.slots.free == 2


@on_host
def test_rows_are_cleared_even_if_a_draft_cannot_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: rows that may hold NaN stayed, and another text copied them."""

    class Unforgetting(Phrases):
        def forget(self, sequence: ActiveSequence) -> None:
            raise KeyError

    def fails_later(context: Context) -> np.ndarray:
        return np.full(VOCAB_SIZE, np.nan) if len(context) > 30 else model(context)

    model = random_model(1)
    monkeypatch.setitem(registry.KINDS, "unforgetting", Unforgetting)
    decoder = make_decoder(fails_later)
    sequence = decoder.admit(Request([2] * 29, draft="unforgetting"))
    finish(decoder, sequence)
    with pytest.raises(OutriderError, match="raised KeyError"):
        decoder.release(sequence)
    assert sequence.finish_reason == "error" and decoder.target.cached_rows.length(0) == 0


def test_a_kind_that_needs_what_there_never_is() -> None:
    """Fault: every request of every engine failed."""

    class Typo(Phrases):
        needs = ("korpus",)

    with pytest.raises(OutriderError, match="needs 'korpus'"):
        registry.register_draft("typo", Typo)
    assert "typo" not in registry.KINDS


def test_point_masses_that_nothing_names() -> None:
    """Fault: every round failed with a ValueError, for all its sequences."""

    class Nameless(Draft):
        point_masses = True

    with pytest.raises(OutriderError, match=r"^option: draft 'nameless' has point_masses"):
        registry.register_draft("nameless", Nameless)
    assert "nameless" not in registry.KINDS
