"""Sessions over TensorRT's stand-in, compared with the same toy model under Python's rounds.

test_device_session.py runs this in a separate process, because the stand-ins have the sonames of
the driver's and TensorRT's libraries.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import numpy as np
import pytest
from native_session import NativeSession, compare_runtimes, refused, requests
from toy_model import make_bundle, python_engine

from runtime.files import library
from runtime.files.errors import OutriderError

library.FOLDERS = (Path(os.environ["STANDINS"]),)
PLAIN = {"max_new_tokens": 30, "ignore_eos": True, "gamma": 0}
DRAFTED = {**PLAIN, "gamma": 4, "draft": "model", "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def driver() -> ctypes.CDLL:
    found = ctypes.CDLL("libcuda.so.1")
    found.standin_count.restype = ctypes.c_longlong
    return found


def count(driver: ctypes.CDLL, what: str) -> int:
    return int(driver.standin_count(what.encode()))


@pytest.fixture(autouse=True)
def nothing_stays(driver: ctypes.CDLL) -> Iterator[None]:
    """A session releases all GPU resources, however it ends."""
    yield
    driver.standin_fail(ctypes.c_longlong(-1))
    driver.standin_break_captures(False)
    driver.standin_break(False)
    driver.standin_room(ctypes.c_size_t(1 << 30))
    left = ("device", "pinned", "streams", "graphs", "contexts", "current")
    assert {what: count(driver, what) for what in left} == dict.fromkeys(left, 0)


@pytest.mark.parametrize("slots", [1, 3])
def test_requests_join_and_leave(tmp_path: Path, driver: ctypes.CDLL, slots: int) -> None:
    """All kinds of drafts and rules, sequences up to the end of the context, and reused rows give
    the tokens of Python's rounds."""
    random, manifest = Random(slots), make_bundle(tmp_path, slots=slots)
    with (
        closing(python_engine(tmp_path, manifest, slots)) as engine,
        NativeSession(tmp_path, threads=1) as session,
    ):
        before = count(driver, "launches"), count(driver, "captures")
        assert compare_runtimes(engine, session, requests(engine, 40, random), random) > 300
        launches, captures = count(driver, "launches"), count(driver, "captures")
        assert launches - before[0] > 3 * (captures - before[1]) > 0  # graphs are replayed
        assert session.facts.slots == slots and not session.facts.output_invariant


def test_a_stale_row_would_be_noticed(tmp_path: Path) -> None:
    """Negative control: the toy model's tokens depend on every token before them."""
    make_bundle(tmp_path, slots=1)
    with NativeSession(tmp_path) as session:
        texts = [session.generate([first, *range(2, 30)], **PLAIN) for first in (3, 4)]
    assert texts[0] != texts[1]


LONG = np.random.default_rng(0).integers(2, 32, 600).tolist()


def test_other_requests_advance_while_a_prompt_is_read(tmp_path: Path) -> None:
    """Fault: they wait for the whole prompt, or for all that the draft reads of it; a short prompt
    waits for a long one."""
    options = {**DRAFTED, "gamma": 2, "max_new_tokens": 60}
    make_bundle(tmp_path, slots=3, max_len=700)
    prompts = [5, 6], LONG, [7, 8, 9]
    with NativeSession(tmp_path) as session:
        expected = [session.generate(prompt, **options) for prompt in prompts]
    with NativeSession(tmp_path) as session:
        requests = [
            session.admit(prompt, how, **options)
            for prompt, how in zip(prompts, ("admit", "begin", "begin"), strict=True)
        ]
        texts: list[list[int]] = [[], [], []]
        new = [[0, 0, 0] for _ in range(7)]
        session.take(requests[0])
        for counts in new:
            session.round()
            for i, request in enumerate(requests):
                tokens, _ = session.take(request)
                texts[i] += [token.id for token in tokens]
                counts[i] = len(tokens)
        # 256 tokens of the prompt, the short prompt, 256 and 88 tokens; then the draft's 256, 256
        # and 87.
        assert [counts[1] for counts in new[:6]] == [0, 0, 0, 1, 0, 0] and new[6][1] > 0, new
        assert [counts[2] for counts in new[:2]] == [0, 1], new
        assert all(counts[0] > 0 for counts in new), new
        for text, request in zip(texts, requests, strict=True):
            text += [token.id for token in session.tokens(request)]
        assert texts == [expected[0][1:], *expected[1:]]
        for request in requests:
            session.release(request)
        request = session.admit(LONG[::-1], "begin", **options)
        session.round()
        session.cancel(request)
        session.round()
        assert session.take(request) == ([], "cancelled")
        session.release(request)
        short = [session.admit([5, 6, number], "begin", **options) for number in (7, 8)]
        session.round()
        assert all(session.take(each)[0] for each in short), "one chunk holds several prompts"
        for each in short:
            session.release(each)
        # Fault: the prompt never has its turn while new requests keep coming.
        request, others = session.admit(LONG[::-1], "begin", **options), list[int]()
        for number in range(12):
            while len(others) < 2:
                others.append(session.admit([5, 6, number], "begin", **PLAIN))
            session.round()
            for other in others[:]:
                if session.take(other)[0]:
                    session.release(other)
                    others.remove(other)
        assert session.take(request)[0]


@pytest.mark.parametrize(
    ("prompt", "options", "bundle", "length"),
    [
        # Long prompts are processed in chunks.
        *((LONG[:n], options, {"max_len": 700}, 30) for n in (256, 257, 600)
          for options in (PLAIN, DRAFTED)),
        # A sequence grows to the capacity.
        ([5, 6, 7], {**DRAFTED, "max_new_tokens": 100}, {"max_len": 60}, 57),
        # The bundle has no draft model.
        ([5, 6, 5, 6], {**PLAIN, "gamma": 3, "draft": "ngram"}, {"draft": False}, 30),
    ],
    ids=lambda value: str(value)[:16],
)  # fmt: skip
def test_a_text_is_pythons(
    tmp_path: Path, prompt: list[int], options: dict[str, Any], bundle: dict[str, Any], length: int
) -> None:
    manifest = make_bundle(tmp_path, slots=2, **bundle)
    with (
        closing(python_engine(tmp_path, manifest, 2)) as engine,
        NativeSession(tmp_path) as session,
    ):
        expected = engine.generate(prompt, **options).token_ids
        assert session.generate(prompt, **options) == expected and len(expected) == length


def test_what_no_graph_can_hold_runs_without(tmp_path: Path, driver: ctypes.CDLL) -> None:
    make_bundle(tmp_path, slots=1)
    with NativeSession(tmp_path) as session:
        expected = session.generate([5, 6], **DRAFTED)
    driver.standin_break_captures(True)
    with NativeSession(tmp_path) as session:
        before = count(driver, "launches")
        assert session.generate([5, 6], **DRAFTED) == expected
        assert count(driver, "launches") == before


def test_contexts_that_are_kept_make_room(tmp_path: Path) -> None:
    """A context that is kept uses memory besides the scratch that all share; with memory for only
    three contexts, the output is the same."""
    make_bundle(tmp_path / "all", slots=1)
    make_bundle(tmp_path / "few", slots=1, contexts=3)
    texts = []
    for name in ("all", "few"):
        with NativeSession(tmp_path / name) as session:
            options = [{**DRAFTED, "gamma": gamma} for gamma in (1, 2, 3, 4, 5, 1)]
            texts.append([session.generate([5, 6], **each) for each in options])
    assert texts[0] == texts[1]


def test_sessions_beside_each_other_in_any_thread(tmp_path: Path) -> None:
    make_bundle(tmp_path, slots=1)
    with NativeSession(tmp_path) as session:
        expected = session.generate([5, 6], **DRAFTED)
    found: list[list[int]] = []

    def generate(session: NativeSession) -> None:
        found.append(session.generate([5, 6], **DRAFTED))

    def elsewhere(session: NativeSession) -> None:
        thread = Thread(target=generate, args=(session,))
        thread.start()
        thread.join()

    with NativeSession(tmp_path) as left:
        with NativeSession(tmp_path) as right:
            for session in (left, right):
                generate(session)
                elsewhere(session)
        elsewhere(left)
    assert found == [expected] * 5


def test_a_gpu_that_breaks(tmp_path: Path, driver: ctypes.CDLL) -> None:
    """TensorRT's objects are destroyed with the CUDA context current, as they require."""
    make_bundle(tmp_path, slots=1)
    with NativeSession(tmp_path) as session:
        session.generate([5, 6], **DRAFTED)
        driver.standin_break(True)
        with pytest.raises(OutriderError, match=r"^backend: .*cuStreamSynchronize failed"):
            session.admit([5, 6], **DRAFTED)


def test_a_broken_text_leaves_its_slot_empty(tmp_path: Path) -> None:
    """Rows of NaN are cleared: the next request in the slot runs as in a fresh one."""
    make_bundle(tmp_path, slots=2, nan_after=20)
    with NativeSession(tmp_path) as session:
        session.admit([5, 6], **{**PLAIN, "max_new_tokens": 1})  # the first slot stays taken
        with pytest.raises(OutriderError, match=r"^numeric: "):
            session.generate([5, 6, 7], **PLAIN)
        assert len(session.generate([5, 6, 7], **{**PLAIN, "max_new_tokens": 10})) == 10


@pytest.mark.parametrize("rounds", [1, 4], ids=["target", "draft"])
def test_a_prompt_that_cannot_be_read_ends_its_request(
    tmp_path: Path, driver: ctypes.CDLL, rounds: int
) -> None:
    """Fault: the round failed, and with it every other request's, until this one was released."""
    make_bundle(tmp_path, slots=1, max_len=700)
    with NativeSession(tmp_path) as session:
        request = session.admit(LONG, "begin", **DRAFTED)
        for _ in range(rounds):
            session.round()
        driver.standin_break(True)
        session.round()
        driver.standin_break(False)
        with pytest.raises(OutriderError, match=r"^backend: .*failed"):
            session.take(request)
        session.release(request)
        assert session.generate([5, 6, 7], **PLAIN)


def test_a_slot_that_cannot_be_emptied_is_free_all_the_same(
    tmp_path: Path, driver: ctypes.CDLL
) -> None:
    """Its rows are cleared on the next admission instead. If the slot were not free, a second
    release would free it while the next request uses it."""
    make_bundle(tmp_path, slots=1, nan_after=20)
    with NativeSession(tmp_path) as session:
        request = session.admit([5, 6, 7], **PLAIN)
        with pytest.raises(OutriderError, match="NaN"):
            list(session.tokens(request))
        driver.standin_break(True)
        with pytest.raises(OutriderError, match="failed"):
            session.release(request)
        with pytest.raises(OutriderError, match="failed"):
            session.admit([5, 6, 7], **PLAIN)
        driver.standin_break(False)
        with pytest.raises(OutriderError, match="there is no request"):
            session.release(request)
        assert len(session.generate([5, 6, 7], **{**PLAIN, "max_new_tokens": 10})) == 10


def test_every_allocation_may_fail(tmp_path: Path, driver: ctypes.CDLL) -> None:
    make_bundle(tmp_path, slots=2)
    # For each model: scratch, caches, logits on device and host, and three inputs on both.
    for number in range(2 * (1 + 2 * 2 + 1 + 1 + 2 * 3)):
        driver.standin_fail(ctypes.c_longlong(number))
        refused(tmp_path, "memory", "the GPU")
        assert count(driver, "device") == count(driver, "pinned") == 0
    driver.standin_fail(ctypes.c_longlong(number + 1))  # there are no more allocations
    NativeSession(tmp_path).close()


REFUSED = {
    "error": ("backend", "TensorRT cannot load .*: of version 9"),
    "odd_tensor": ("backend", r"built from another graph \(tensor odd\)"),
    "copies": ("backend", "does not update key_0 in place"),
    "half_logits": ("backend", "its logits are not float32"),
    "float_caches": ("backend", "key_0 has another type"),
}


@pytest.mark.parametrize("odd", REFUSED)
def test_engines_that_are_refused(tmp_path: Path, odd: str) -> None:
    kind, cause = REFUSED[odd]
    make_bundle(tmp_path, slots=1, **{odd: "of version 9"})
    refused(tmp_path, kind, cause, "Build the bundle again")


@pytest.mark.parametrize(
    ("odd", "kind", "cause"),
    [("no_context", "memory", "cannot make a context: no context today"),
     ("no_profile", "backend", "refuses profile 0: no such profile"),
     ("broken", "backend", "failed on 1 slots x 2 tokens: broken today")],
)  # fmt: skip
def test_calls_that_fail(tmp_path: Path, odd: str, kind: str, cause: str) -> None:
    make_bundle(tmp_path, slots=1, **{odd: 1})
    with NativeSession(tmp_path) as session:
        for first in (5, 7):  # twice: a failure leaves the session unchanged
            with pytest.raises(OutriderError, match=cause) as caught:
                session.admit([first, 6], **PLAIN)
            assert caught.value.kind == kind and "\n" not in caught.value.cause


@pytest.mark.parametrize(
    ("variable", "value", "kind", "cause"),
    [("STANDIN_NO_GPU", "1", "backend", "cuInit failed: CUDA_ERROR_NO_DEVICE"),
     ("STANDIN_VERSION", "91600", "backend",
      r"found TensorRT 9.16, but this library was compiled for"),
     ("STANDIN_NO_RUNTIME", "1", "backend", "cannot start: CUDA initialization failure"),
     ("OUTRIDER_TENSORRT", "/nowhere.so", "backend", "TensorRT cannot be loaded: /nowhere.so"),
     ("OUTRIDER_TENSORRT", "libcuda.so.1", "backend", "libcuda.so.1 is not TensorRT")],
)  # fmt: skip
def test_machines_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, kind: str,
    cause: str,
) -> None:  # fmt: skip
    make_bundle(tmp_path, slots=1)
    monkeypatch.setenv(variable, value)
    refused(tmp_path, kind, cause)


def test_what_does_not_fit(tmp_path: Path, driver: ctypes.CDLL) -> None:
    make_bundle(tmp_path / "bundle", slots=2)
    for config, kind, cause in (
        ({"slots": 3}, "option", "slots=3 is over the 2 that the bundle was built for"),
        ({"plain_width": 2}, "option", "plain_width is for the CPU"),
    ):
        refused(tmp_path / "bundle", kind, cause, **config)
    driver.standin_room(ctypes.c_size_t(1 << 16))
    cause = "a model needs 0 MiB of the GPU's memory, and 0"
    refused(tmp_path / "bundle", "memory", cause)
    make_bundle(tmp_path / "other", slots=2, target="sm80")
    refused(tmp_path / "other", "backend", "was compiled for sm80 and this GPU is sm90")
