"""The graph's sampling node on ONNX Runtime: it agrees with the reference and the library token for
token, and enumeration shows that its rule is exact. TensorRT: test_tensorrt_plugin.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import enumeration
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import samplers
from onnx import TensorProto, helper
from rounds import cases
from samplers import TOKEN, Case, by_library, by_reference, cpu_library

from export.functions import sampling as sampling_functions
from export.functions import verify as sampling_node
from export.functions.__main__ import main
from export.graph import OPSET
from runtime.files.graphs import GRAPH_FILE
from runtime.files.torch_files import WEIGHTS_FILE
from runtime.sampling.native import RoundSampler
from runtime.sampling.philox import Purpose, uniform
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
SLOT = {
    "drafts": (TensorProto.INT64, ["B", "G"]),
    "seed": (TensorProto.INT64, ["B"]),
    "position": (TensorProto.INT64, ["B"]),
    "gamma": (TensorProto.INT64, ["B"]),
    "temperature": (TensorProto.FLOAT, ["B"]),
    "lenience": (TensorProto.FLOAT, ["B"]),
}
OUTPUTS = {
    "accepted": (TensorProto.INT32, ["B"]),
    "token": (TensorProto.INT64, ["B"]),
    "status": (TensorProto.INT32, ["B"]),
}


def session(function, inputs, outputs, before=(), renamed=None, **attributes):
    """A session with one node that calls `function`. before: nodes that compute its inputs."""
    names = [(renamed or {}).get(name, name) for name in inputs]
    domain = sampling_functions.DOMAIN
    node = helper.make_node(function, names, list(outputs), domain=domain, **attributes)
    values = [
        [helper.make_tensor_value_info(name, *kind) for name, kind in ends.items()]
        for ends in (inputs, outputs)
    ]
    model = helper.make_model(
        helper.make_graph([*before, node], "test", *values),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(domain, 1)],
        functions=sampling_functions.functions(),
        ir_version=11,
    )
    onnx.checker.check_model(model, full_check=True)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def logits_of(kind):
    return {"target_logits": (kind, ["B", "K", "V"]), "draft_logits": (kind, ["B", "G", "W"])}


@cache
def verifier(dtype="float32", **attributes):
    """One session for all sizes. bfloat16 arrives as float32 and is cast in the graph."""
    before, renamed = [], {}
    if dtype == "bfloat16":
        renamed = {name: f"{name}_16" for name in logits_of(0)}
        before = [
            helper.make_node("Cast", [name], [cast], to=TensorProto.BFLOAT16)
            for name, cast in renamed.items()
        ]
    inputs = {**logits_of(TYPES.get(dtype, TensorProto.FLOAT)), **SLOT}
    return session("Verify", inputs, OUTPUTS, before, renamed, **attributes)


def judge():
    inputs = {**logits_of(TensorProto.FLOAT), **SLOT}
    slot = {name: inputs[name] for name in ("gamma", "temperature", "lenience")}
    uniforms = {"drafts": SLOT["drafts"], "uniforms": (TensorProto.DOUBLE, ["B", "K"])}
    return session("Judge", {**logits_of(TensorProto.FLOAT), **uniforms, **slot}, OUTPUTS)


def places_of(case, params):
    """The case's places without suppression, which the node does not support."""
    return [replace(place, suppress_rows=0) for place in case.places(params)]


def feed(target, draft, drafts, places):
    params = [place.params for place in places]
    return {
        "target_logits": target,
        "draft_logits": draft,
        "drafts": np.array(drafts, np.int64).reshape(len(places), -1),
        "seed": np.array([p.seed for p in params], np.uint64).view(np.int64),
        "position": np.array([place.position for place in places]),
        "gamma": np.array([place.gamma for place in places]),
        "temperature": np.array([p.temperature for p in params], np.float32),
        "lenience": np.array([p.lenience for p in params], np.float32),
    }


def answers(run, given):
    """[(accepted, token, status)]"""
    return list(zip(*(output.tolist() for output in run.run(list(OUTPUTS), given)), strict=True))


def test_the_uniforms_are_philox():
    run = session(
        "Uniforms",
        {"seed": SLOT["seed"], "position": SLOT["position"], "rows": (TensorProto.INT64, [1])},
        {"uniforms": (TensorProto.DOUBLE, ["B", "K"])},
    )
    seeds = [0, 2**64 - 1, 2**63, 0x0123456789ABCDEF]
    positions = [0, 2**32 - 9, 77, 2**31]
    for rows in (1, 2, 9):
        given = {
            "seed": np.array(seeds, np.uint64).view(np.int64),
            "position": np.array(positions),
            "rows": np.array([rows]),
        }
        expected = [
            [uniform(seed, start + i, Purpose.ACCEPT) for i in range(rows - 1)]
            + [uniform(seed, start, Purpose.RESIDUAL)]
            for seed, start in zip(seeds, positions, strict=True)
        ]
        assert run.run(None, given)[0].tolist() == expected


DTYPES = ("float32", "float16", "bfloat16")
OPTIONS = {name: samplers.OPTIONS[name] for name in ("plain", "cool", "greedy", "lenient")}
OPTIONS["greedy-lenient"] = {"lenience": 0.5}


@pytest.mark.parametrize(
    ("vocab_size", "name", "dtype"),
    cases(
        [(127, name, DTYPES[i % 3]) for i, name in enumerate(OPTIONS)],
        itertools.product((8, 127, 2500), OPTIONS, DTYPES),
    ),
)
def test_agrees_with_the_library(vocab_size, name, dtype):
    run, params, rejected = verifier(dtype), SamplingParams(**OPTIONS[name]), 0
    for gamma in (0, 1, 2, 5):
        for slots in (1, 3, 8):
            case = Case(30, vocab_size, gamma, slots, dtype)
            places = places_of(case, params)
            drafts, verdicts = by_library(cpu_library(), case, places)
            sources = (case.p, case.q) if dtype == "bfloat16" else (case.target, case.draft)
            got = answers(run, feed(*sources, drafts, places))
            assert got == [(verdict.accepted, verdict.token, 0) for verdict in verdicts]
            rejected += sum(accepted < gamma for accepted, *_ in got)
    assert rejected > 5 or params.lenience < 1  # rejections occur too


def test_agrees_with_the_library_at_every_edge():
    """Where a uniform is exactly a ratio or the end of a token's interval, and where a weight or
    the residual is 0; with other parameters in every slot."""
    rows = np.array([[0, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 1]], np.float32)
    with np.errstate(divide="ignore"):
        logits = np.log(rows)
    edges = 0, 0.5, np.nextafter(1, 0)
    options = [SamplingParams(**each) for each in OPTIONS.values()]
    every = itertools.product(logits, logits, range(4), edges, edges, options, (0, 1))
    p, q, drafts, accept, final, params, gammas = zip(*every, strict=True)
    target, draft = np.stack([p, p], axis=1), np.array(q)[:, None]
    places = [
        SlotSampling(own, gamma, 0, b)
        for b, (own, gamma) in enumerate(zip(params, gammas, strict=True))
    ]
    sampler = RoundSampler(4, 1, len(places), library=cpu_library())
    sampler.begin(places)
    sampler.set_drafts([[x] * gamma for x, gamma in zip(drafts, gammas, strict=True)])
    uniforms = np.stack([accept, final], axis=1)
    verdicts = sampler.verify(target, draft, uniforms)
    given = feed(target, draft, drafts, places)
    del given["seed"], given["position"]
    got = answers(judge(), {**given, "uniforms": uniforms})
    assert got == [(verdict.accepted, verdict.token, 0) for verdict in verdicts]


@pytest.mark.parametrize("widths", [(40, 29), (29, 40), (64, 64)])
@pytest.mark.parametrize("vocab_size", [None, 33])
def test_widths_of_target_and_draft(widths, vocab_size):
    """Tokens beyond a row's width, or beyond the vocabulary, have probability 0."""
    run = verifier(**({} if vocab_size is None else {"vocab_size": vocab_size}))
    case = Case(34, 64, 3, slots=6)
    case.target, case.p = (array[:, :, : widths[0]] for array in (case.target, case.p))
    case.draft, case.q = (array[:, :, : widths[1]] for array in (case.draft, case.q))
    cut = slice(vocab_size)
    cut_case = Case(34, 64, 3, slots=6)
    cut_case.p, cut_case.q = case.p[..., cut], case.q[..., cut]
    for name in ("plain", "greedy"):
        places = places_of(case, SamplingParams(**OPTIONS[name]))
        expected = [by_reference(cut_case, place) for place in places]
        drafts = [ids for ids, _ in expected]
        got = answers(run, feed(case.target, case.draft, drafts, places))
        assert got == [(verdict.accepted, verdict.token, 0) for _, verdict in expected]


def test_broken_rows_and_parameters():
    case, nan, inf = Case(35, 8, 2, slots=9), np.nan, np.inf
    places = places_of(case, SamplingParams(temperature=1.0))
    target, draft = case.target.copy(), case.draft.copy()
    drafts = draft.argmax(axis=2)
    best = np.take_along_axis(target[:, :2], drafts[..., None], 2)
    np.put_along_axis(target[:, :2], drafts[..., None], best + 40, 2)  # all are accepted
    target[0, 0, 3], target[1, 1] = nan, -inf
    target[2, 2, :2] = nan, inf
    target[3, 0, 4] = draft[4, 1, 4] = inf
    target[5, 0] = draft[5, 0]
    target[5, 0, drafts[5, 0]] = -inf  # rejected, so later rows are not read
    target[5, 1:] = draft[5, 1:] = nan
    given = feed(target, draft, drafts, places)
    given["gamma"][6] = -1
    given["gamma"][7] = 3
    given["temperature"][8] = -1
    got = answers(verifier(), given)
    statuses = [6, 8, 6, 7, 7, 0, 0, 2, 2]
    assert [status for *_, status in got] == statuses
    assert all((token >= 0) == (b == 5) for b, (_, token, _) in enumerate(got))
    assert all(accepted == 0 for accepted, *_ in got)
    given["temperature"][:4] = 0  # the same rows; the draft's distribution is not read
    given["temperature"][4] = 0
    statuses[4] = 0
    assert [status for *_, status in answers(verifier(), given)] == statuses
    given["temperature"][:] = [nan, inf, 1e-9, 1e8, 1, 1, 1, 1, 1]
    given["lenience"][4:6] = [0, 1.5]
    assert [status for *_, status in answers(verifier(), given)] == [2] * 6 + [0, 2, 0]


# --- enumeration ------------------------------------------------------------------------------


def graph_rounds(run):
    """`enumeration.rounds` computed by a session of `Judge`."""

    def rounds(_, models, drafts, params):
        count, gamma = len(drafts), models.gamma
        target, draft = enumeration.round_logits(models, drafts)
        given = {
            "target_logits": target,
            "draft_logits": draft,
            "drafts": drafts,
            "gamma": np.full(count, gamma),
            "temperature": np.full(count, params.temperature, np.float32),
            "lenience": np.full(count, params.lenience, np.float32),
        }

        def outcome(u):
            accepted, token, status = run.run(list(OUTPUTS), {**given, "uniforms": u})
            assert not status.any()
            return np.stack([accepted, token])

        return outcome

    return rounds


BREAKS = {
    "the ratio inverted": (
        "below = Less (left, p_x)",
        "right = Mul (u_l, p_x)\n  below = Less (right, q_x)",
    ),
    "no residual": ("difference = Sub (p_scaled, q_row)", "difference = Identity (p_scaled)"),
    "q not normalised": ("q_prob = Div (q_weight_64, q_total)", "q_prob = Identity (q_weight_64)"),
    "one uniform for all tests": (
        "u_l = Mul (uniforms, l)",
        "u_first = Gather <axis = 1> (uniforms, i0)\n  u_l = Mul (u_first, l)",
    ),
    "a number looked at twice": (
        "u = Gather <axis = 1> (uniforms, last)",
        "u = Gather <axis = 1> (uniforms, i0)",
    ),
}


def distance(monkeypatch, gamma):
    monkeypatch.setattr(enumeration, "rounds", graph_rounds(judge()))
    return enumeration.distance(None, enumeration.Models(0, gamma), TOKEN)[0]


@pytest.mark.parametrize("gamma", cases([2], [1]))
def test_a_round_has_the_targets_joint_distribution(monkeypatch, gamma):
    assert distance(monkeypatch, gamma) < 1e-6


@pytest.mark.parametrize("name", BREAKS)
def test_control_enumeration_notices_a_broken_body(monkeypatch, name):
    old, new = BREAKS[name]
    assert sum(body.count(old) for body in sampling_functions._BODIES) == 1
    bodies = tuple(body.replace(old, new) for body in sampling_functions._BODIES)
    monkeypatch.setattr(sampling_functions, "_BODIES", bodies)
    assert distance(monkeypatch, 2 if name == "one uniform for all tests" else 1) > 0.01


# --- in a model's graph -----------------------------------------------------------------------


def test_a_verify_graph_verifies_itself(workshop, tmp_path):
    graphs, out = workshop.graphs(workshop.checkpoint("llama")), tmp_path / "new" / "verify"
    assert main(["--graph", str(graphs / "target"), "--rows", "32", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [GRAPH_FILE, WEIGHTS_FILE]
    onnx.checker.check_model(out / GRAPH_FILE, full_check=True)
    run = onnxruntime.InferenceSession(out / GRAPH_FILE, providers=["CPUExecutionProvider"])
    inputs = {value.name: value.shape for value in run.get_inputs()}
    vocab_size = run.get_outputs()[0].shape[2]
    rng, params = np.random.default_rng(36), SamplingParams(temperature=1.0, seed=2**64 - 3)
    for slots, gamma in ((1, 3), (2, 0), (3, 4)):
        drafts = rng.integers(0, vocab_size, (slots, gamma))
        draft = rng.normal(size=(slots, gamma, vocab_size)).astype(np.float32)
        position = np.arange(slots) + 5
        given = {
            "input_ids": np.concatenate([rng.integers(0, vocab_size, (slots, 1)), drafts], 1),
            "position": position,
            "logits_index": np.arange(gamma + 1),
            "draft_logits": draft,
            "seed": np.full(slots, params.seed, np.uint64).view(np.int64),
            "gamma": np.full(slots, gamma),
            "temperature": np.ones(slots, np.float32),
            "lenience": np.ones(slots, np.float32),
        }
        given |= {
            name: np.zeros((slots, *shape[1:]), np.float32)
            for name, shape in inputs.items()
            if name.startswith(("key_", "value_"))
        }
        logits, *got = run.run(["logits", *OUTPUTS], given)
        case = Case(0, vocab_size, gamma, slots)
        case.p, case.q = logits, draft
        places = [
            replace(place, params=params, position=int(start) + 1)
            for place, start in zip(places_of(case, params), position, strict=True)
        ]
        theirs = [
            by_reference(case, place, ids)[1]
            for place, ids in zip(places, drafts.tolist(), strict=True)
        ]
        assert np.transpose(got).tolist() == [[v.accepted, v.token, 0] for v in theirs]


def test_what_tensorrts_parser_looks_for(workshop):
    folder = workshop.graphs(workshop.checkpoint("llama")) / "target"
    model = ir.load(folder / GRAPH_FILE)
    sampling_node.append_verify(model, vocab_size=257)
    node = model.graph.node("outrider_verify")
    assert (node.domain, node.op_type) == ("outrider", "Verify")
    found = {name: attribute.value for name, attribute in node.attributes.items()}
    assert found == {
        "plugin_namespace": "outrider", "plugin_version": "1", "rule": "token", "vocab_size": 257
    }  # fmt: skip
    # The parser finds local functions by name alone: none may have a standard operator's name.
    standard = {schema.name for schema in onnx.defs.get_all_schemas()}
    assert not {function.name for function in sampling_functions.functions()} & standard
    for function in sampling_functions.functions():
        assert {part.domain for part in function.node} <= {"", "outrider"}


def test_what_is_no_graph_of_ours_is_refused(workshop, tmp_path, capsys):
    folder = workshop.graphs(workshop.checkpoint("llama")) / "target"
    other = tmp_path / "other"
    other.mkdir()
    (other / WEIGHTS_FILE).touch()
    capsys.readouterr()  # discard the output of the export

    def refused(*options, graph=folder, out=tmp_path / "verify"):
        assert main(["--graph", str(graph), "--out", str(out), *options]) > 0
        assert sorted(tmp_path.iterdir()) == [other]  # nothing is left behind
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert f"no {GRAPH_FILE}" in refused(graph=other)
    assert "already exists" in refused(out=other)
    assert "out of range. Use 1 to 2147483647." in refused("--rows", "0")
    assert "exceeds the 257 logits. Leave" in refused("--vocab-size", "99999")
    (other / GRAPH_FILE).write_bytes(b"no graph")
    assert "is not an ONNX file" in refused(graph=other)
    ir.save(ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}), ir_version=11),
            other / GRAPH_FILE)  # fmt: skip
    assert "no input_ids. Give" in refused(graph=other)
    verifies = tmp_path.parent / f"{tmp_path.name}-verifies"
    assert main(["--graph", str(folder), "--out", str(verifies)]) == 0
    capsys.readouterr()
    assert "already has the Verify node" in refused(graph=verifies)
