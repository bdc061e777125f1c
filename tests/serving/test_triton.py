"""The Triton example with a stand-in for Triton's own module, on a fake engine."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils
from commands import CHECKOUT
from fakes import EOS, make_text_engine, random_model

import runtime
from runtime import TextEngine

FOLDER = CHECKOUT / "examples" / "triton" / "outrider"
MODEL = random_model(1, never=[EOS])


@pytest.fixture
def engine(tmp_path: Path) -> TextEngine:
    return make_text_engine(tmp_path, MODEL, slots=1)


@pytest.fixture
def model(engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example, initialised from config.pbtxt; it imports the checkout's runtime."""
    loaded: dict[str, Any] = {}

    def load(bundle: str, **options: Any) -> TextEngine:
        loaded.update(options, bundle=bundle)
        engine.slot_queue._queue = options["queue"]
        return engine

    monkeypatch.setitem(sys.modules, "outrider", runtime)
    monkeypatch.setattr(runtime, "load", load, raising=False)
    spec = spec_from_file_location("triton_model", FOLDER / "1" / "model.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    config = (FOLDER / "config.pbtxt").read_text()
    pairs = re.findall(r'key: "(\w+)" value: \{ string_value: "(.*?)" \}', config)
    parameters = {key: {"string_value": value} for key, value in pairs}
    made = module.TritonPythonModel()
    made.initialize({
        "model_config": json.dumps({"parameters": parameters}),
        "model_instance_kind": "CPU", "model_instance_device_id": "0",
    })  # fmt: skip
    assert loaded == {"bundle": "/bundle", "slots": 4, "queue": 64, "device": "cpu"}
    yield made
    made.finalize()
    assert not any(thread.is_alive() for thread in made.running)


def request(
    text: str, stream: bool | None = None, options: str | None = None,
    on_send: Callable[[Any], None] | None = None,
) -> pb_utils.InferenceRequest:  # fmt: skip
    tensors = [pb_utils.Tensor("text_input", np.array([text.encode()], np.object_))]
    if stream is not None:
        tensors.append(pb_utils.Tensor("stream", np.array([stream], np.bool_)))
    if options is not None:
        texts = np.array([options.encode()], np.object_)
        tensors.append(pb_utils.Tensor("sampling_parameters", texts))
    return pb_utils.InferenceRequest(tensors, on_send)


def responses(submitted: pb_utils.InferenceRequest) -> list[pb_utils.InferenceResponse]:
    """All responses up to the final flag."""
    return list(iter(lambda: submitted.sent.get(timeout=60), None))


def outputs(response: pb_utils.InferenceResponse) -> dict[str, str]:
    assert response.error() is None, response.error().message()
    names = re.findall(r'name: "(\w+)"', (FOLDER / "config.pbtxt").read_text())
    tensors = {t.name(): t.as_numpy() for t in response.output_tensors()}
    assert tensors.keys() < set(names) and all(value.shape == (1,) for value in tensors.values())
    return {name: value[0].decode() for name, value in tensors.items()}


OPTIONS = '{"max_new_tokens": 24, "temperature": 0.9, "seed": 4, "gamma": 0}'


def test_many_requests_and_both_ways_to_answer(model: Any, engine: TextEngine) -> None:
    """`execute` takes more requests than there are slots and returns before they are answered."""
    expected = engine.generate("abc", **json.loads(OPTIONS))
    submitted = [request("abc", stream, OPTIONS) for stream in (None, False, True, True, False)]
    assert model.execute(submitted) is None
    for streamed, one in zip((False, False, True, True, False), submitted, strict=True):
        answers = [outputs(response) for response in responses(one)]
        assert (len(answers) > 1) == streamed
        assert "".join(answer["text_output"] for answer in answers) == expected.text
        finished = [answer["finish_reason"] for answer in answers]
        assert finished == [""] * (len(answers) - 1) + ["length"]


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        ("abc", '{"temperature": -1}', "temperature"),
        ("abc", '{"top_q": 1}', "top_q"),
        ("abc", "[1]", "no option 1"),
        ("abc", '{"logit_bias": {"99999": 1}}', "99999 does not exist"),
        ("abc", "{", "Expecting"),
        ("", "{}", "empty"),
    ],
)
def test_what_is_refused(model: Any, text: str, options: str, cause: str) -> None:
    submitted = request(text, options=options)
    model.execute([submitted])
    (response,) = responses(submitted)
    assert response.error().code() == pb_utils.TritonError.INVALID_ARG
    assert cause in response.error().message()


def test_what_is_cancelled_makes_room(model: Any, engine: TextEngine) -> None:
    """A cancelled request ends with the next round, instead of running on to its 400 tokens."""

    def leave(_: Any) -> None:
        submitted.cancelled.set()

    submitted = request("abc", True, '{"max_new_tokens": 400, "gamma": 0}', on_send=leave)
    model.execute([submitted])
    first, last = responses(submitted)
    assert outputs(first)["finish_reason"] == ""
    assert last.error().code() == pb_utils.TritonError.CANCELLED
    assert engine.slot_queue.free == 1


def test_more_than_may_wait(model: Any, engine: TextEngine) -> None:
    engine.slot_queue._queue = 0
    with engine.stream("abc") as stream:
        next(stream)
        submitted = request("abc")
        model.execute([submitted])
        (response,) = responses(submitted)
    assert response.error().code() == pb_utils.TritonError.UNAVAILABLE


def test_a_fault_of_the_engine(model: Any, engine: TextEngine, monkeypatch: Any) -> None:
    """Fault: the request never got its final flag, and the client waited forever."""

    def broken(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(engine, "round", broken)
    submitted = request("abc", True)
    model.execute([submitted])
    *_, last = responses(submitted)
    assert last.error().code() == pb_utils.TritonError.INTERNAL
    assert "no such kernel" in last.error().message()
    assert engine.slot_queue.free == 1


def test_unloading_ends_what_is_under_way(model: Any, engine: TextEngine, monkeypatch: Any) -> None:
    def slow(sequences: Any, real: Any = engine.round) -> Any:
        time.sleep(0.02)  # so that generation does not finish before the model is unloaded
        return real(sequences)

    monkeypatch.setattr(engine, "round", slow)
    submitted = request("abc", True, '{"max_new_tokens": 400, "gamma": 0}')
    model.execute([submitted])
    submitted.sent.get(timeout=60)
    model.finalize()
    *_, last = responses(submitted)
    assert last.error().code() == pb_utils.TritonError.INTERNAL
    assert "closed" in last.error().message()
