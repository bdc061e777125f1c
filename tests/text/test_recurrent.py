"""Models with recurrent layers: reuse of their state, the certificate and the refusals.

test_transformers.py compares their output with Transformers, test_rings.py tests the ring of
states of a slot, and test_recurrence.py the operators.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import error_line
from originals import PROMPTS, check_text, greedy, original_of
from rounds import broken, cases
from workshop import Workshop

from runtime import load
from runtime.certificate import check
from runtime.files.errors import OutriderError
from runtime.generate import main
from runtime.text.options import Options

KINDS = cases(["qwen3.5"], ["lfm2", "granite4"])


@pytest.fixture
def bundle(workshop: Workshop, request: pytest.FixtureRequest) -> Path:
    return make_bundle(workshop, *request.param.split())


def make_bundle(workshop: Workshop, name: str, weights: str = "full") -> Path:
    draft = workshop.checkpoint("llama", seed=7)
    return workshop.bundle(workshop.example(name), draft, weights=weights)


@pytest.mark.parametrize("name", KINDS)
def test_a_talk_goes_on_where_its_state_is(workshop: Workshop, name: str) -> None:
    """The states in the rings of the target and the draft are reused; a prompt that branches off
    earlier is computed from its beginning."""
    original = original_of(workshop.example(name))
    with load(make_bundle(workshop, name), threads=1) as engine:
        first = engine.generate(PROMPTS[1], replace(greedy(8), max_new_tokens=20))
        talk = [*PROMPTS[1], *first.token_ids, 7, 9]
        result = engine.generate(talk, greedy(3))
        check_text(original, talk, result, "a talk")
        assert result.stats.reused_tokens == len(talk) - 3
        branch = [*talk[:12], 11, 12]
        result = engine.generate(branch, greedy(3))
        check_text(original, branch, result, "a branch")
        assert result.stats.reused_tokens == 0


@pytest.mark.parametrize(
    "bundle", [*KINDS, *cases([], ["qwen3.5 int4", "granite4 int8"])], indirect=True
)
@pytest.mark.parametrize("temperature", cases([0.0], [1.0]))
def test_certificate(bundle: Path, temperature: float) -> None:
    """The certificate computes each sequence twice in a slot, plainly and as in rounds. In the
    control, the second computation continues from the state of the first."""
    options = Options(temperature=temperature, gamma=4, seed=2, max_new_tokens=24, ignore_eos=True)
    with load(bundle, slots=2, threads=1) as engine:
        found = check(engine, PROMPTS[1], options)
        assert found.passed, found.lines()
        assert found.rounding < 1e-4
        with broken("backends.engine.CachedRows.resume_position", lambda _, slot, length: length):
            assert check(engine, PROMPTS[1], options).rounding > 0.1


def test_few_drafts(workshop: Workshop) -> None:
    """Fault: with max_gamma=1, the ring was shorter than the export's comparison goes back, and
    too short for a draft that begins two tokens before the end of the sequence."""
    target = workshop.example("lfm2")
    bundle = workshop.bundle(target, workshop.checkpoint("lfm2", blur=0.1), max_gamma=1)
    with load(bundle, slots=2, threads=1) as engine:
        for index, result in engine.batch([(prompt, greedy(1)) for prompt in PROMPTS]):
            check_text(original_of(target), PROMPTS[index], result, f"prompt {index}")


@pytest.mark.parametrize("bundle", ["qwen3.5"], indirect=True)
def test_what_is_not_run(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OutriderError, match="was compiled for the CPU"):
        load(bundle, device="cuda")
    assert main(["--engines", str(bundle), "--prompt", "ab", "--beams", "2"]) != 0
    cause = error_line(capsys.readouterr().err, "option")
    assert "beam search is for models without a recurrent state" in cause
