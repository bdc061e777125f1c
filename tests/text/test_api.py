"""Arguments of the Python API are either interpreted as intended or refused."""

import copy
import json
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
from commands import CHECKOUT
from fakes import make_text_engine, near, random_model

import runtime
from runtime import Options
from runtime.bundle import check_slots
from runtime.files.errors import OutriderError
from runtime.sampling.philox import Purpose, uniform
from runtime.sampling.warp import SamplingParams


@pytest.fixture
def engine(tmp_path):
    target = random_model(1)
    return make_text_engine(tmp_path, target, near(target, 2, 1.5), slots=1)


@pytest.mark.parametrize("kind", [np.int32, np.uint64])
def test_numpy_numbers_are_numbers(engine, kind):
    assert uniform(kind(5), 7, Purpose.ACCEPT) == uniform(5, 7, Purpose.ACCEPT)
    assert type(SamplingParams(seed=kind(5)).seed) is int
    options = {"temperature": 1.0, "max_new_tokens": 20}
    arrays = {"seed": kind(5), "bad_words_ids": np.array([[9], [7]], kind)}
    found = engine.generate(np.array([5, 6], kind), **arrays, **options)
    lists = {"seed": 5, "bad_words_ids": [[9], [7]]}
    assert found.token_ids == engine.generate([5, 6], **lists, **options).token_ids
    json.dumps(found.stats.summary())


def test_small_numpy_numbers_do_not_overflow(engine):
    """Fault: 60 + int8(100) raised OverflowError, in every request of the round."""
    own = {"max_new_tokens": np.int8(100), "gamma": np.uint8(2), "temperature": np.float16(0.5)}
    with warnings.catch_warnings(action="error"):
        result = engine.generate([5] * 60, ignore_eos=True, **own)
    assert len(result.token_ids) == min(100, engine.decoder.max_len - 60)
    assert not {type(x) for x in vars(Options(**own).seeded()).values()} & {np.int8, np.uint8}


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 6.5}, {"max_new_tokens": None}, {"max_new_tokens": True},
        {"min_new_tokens": 1.5}, {"stop": None}, {"stop": [1]}, {"stop": ["a", ""]},
        {"stop": [np.array([1, 2])]}, {"stop_token_ids": None}, {"stop_token_ids": [10**9]},
        {"ignore_eos": None},
        {"temperature": None}, {"system": 7}, {"special_tokens": "none"}, {"draft": ["model"]},
        {"draft": "ngram", "gamma": 0}, {"gamma": "often"}, {"gamma": "auto", "fallback": "on"},
        {"stop": np.array(3)}, {"processors": np.array(3)}, {"draft": np.array([1, 2])},
        {"logprobs": -1}, {"gamma": 0, "lenience": 0.5}, {"gamma": 0, "verify": "block"},
    ],
)  # fmt: skip
def test_options_are_refused_by_the_api_too(engine, options):
    with pytest.raises(OutriderError, match=r"^option: "):
        engine.generate("ab", **options)
    assert engine.decoder.slots.free == 1


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"temperature": "hot"}, r"temperature='hot' \(str\) is not a number"),
        ({"temperature": -1}, "temperature=-1 is out of range"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens=2.5 \(float\) is not an integer"),
        ({"max_new_tokens": np.int64(0)}, r"max_new_tokens=.* is out of range"),
        ({"stop": 3}, r"stop=3 \(int\) is not a string or a list"),
        ({"gamma": 1.5}, r"gamma=1.5 \(float\) is not an integer, auto or transformers"),
        (
            {"temperature": np.eye(2)},
            r"temperature=array\(\[\[1., 0.\], \[0., 1.\]\]\) \(ndarray\)",
        ),
        ({"draft": "x" * 1000}, "draft='x{79} is unknown"),
        ({"verify": "tokens"}, r"verify='tokens' .* is not token, block, coupled or sigmoid"),
    ],
)
def test_a_wrong_type_is_told_from_a_wrong_range(engine, options, cause):
    """Fault: all of these were "out of range"."""
    with pytest.raises(OutriderError, match=cause):
        engine.generate("ab", **options)


@pytest.mark.parametrize(
    "prompt", [[2**63], [-1], b"abc", [], None, 7, np.array(3), ["a"], [1, {}], {}, [1.5]]
)
def test_invalid_prompts(engine, prompt):
    with pytest.raises(OutriderError, match=r"^prompt: "):
        engine.generate(prompt)


def test_no_messages_are_no_token_ids(engine):
    """Fault: the error was "special_tokens has no meaning where the prompt is token ids"."""
    for options in ({"special_tokens": "text"}, {"system": "be kind"}):
        with pytest.raises(OutriderError, match="the prompt is empty"):
            engine.generate([], **options)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([5, 6], {"chat": True}), ([5, 6], {"system": "be kind"}),
        ([5, 6], {"special_tokens": "text"}), ([{"role": "user", "content": "a"}], {"chat": False}),
    ],
)  # fmt: skip
def test_options_that_contradict_the_form_of_the_prompt(engine, prompt, options):
    """Fault: `chat` was ignored for token ids and for messages."""
    with pytest.raises(OutriderError, match=r"^option: "):
        engine.generate(prompt, **options)
    assert engine.generate([5, 6], chat=False, max_new_tokens=2).token_ids


def test_an_error_crosses_processes():
    """Fault: a process pool fails with BrokenProcessPool when a worker raises an OutriderError."""
    error = OutriderError("prompt", "it is empty.", "Fill it.")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is OutriderError and str(twin) == str(error)
        assert (twin.kind, twin.cause, twin.remedy, twin.exit_status) == (
            "prompt", "it is empty.", "Fill it.", 9,
        )  # fmt: skip


def test_what_holds_slots_cannot_be_copied(engine):
    """Fault: when a copy of a stream ends, it releases the slot that the original still uses."""
    with pytest.raises(TypeError, match="an engine belongs to its process"):
        pickle.dumps(engine)
    with engine.stream("ab", max_new_tokens=9) as stream:
        next(stream)
        for twin in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a Stream holds slots"):
                twin(stream)
        assert len([*stream]) > 0


@pytest.mark.parametrize("slots", [0, -1, 2.5, True, "2", 10**6, 10**30])
def test_slots_that_cannot_be(engine, slots):
    """Fault: a traceback, or a machine that swaps, instead of a one-line error. The control: 4."""
    check_slots(engine.manifest, 4, gpu=False)
    pair = engine.manifest.pair
    wide = replace(pair, target=replace(pair.target, vocab_size=2**17))
    with pytest.raises(OutriderError, match="slots") as error:
        check_slots(replace(engine.manifest, pair=wide), slots, gpu=False)
    assert error.value.kind == ("memory" if slots in (10**6, 10**30) else "option")


def test_what_the_package_says_of_itself():
    """`dir(runtime)` lists the public names without importing their modules, so that Ctrl-C during
    the import of a command gives no traceback."""
    script = "import sys, runtime; print(*dir(runtime), *sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    names = set(run.stdout.split())
    assert set(runtime.__all__) <= names
    assert not {"numpy", "tokenizers", "jinja2", "runtime.bundle"} & names
    assert "outrider.load(" in runtime.__doc__
    assert all(getattr(runtime, name) for name in runtime.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        runtime.nothing  # noqa: B018
