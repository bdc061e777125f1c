"""The kernel's tests fail when its source is broken on purpose: one library per mutation.

A mutation is a replacement in a copy of plugins/, which is compiled and run through the kernel's
tests; at least one of them must fail. The unchanged source passes them all.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import test_interface as interface
import test_kernel as tests
import test_kernel_edges as edges
import test_kernel_exact as exact
from samplers import BLOCK, COUNTED, OPTIONS, SIGMOID, TOKEN, Case, disagreements, warp_weights
from test_kernel_fuzz import FAULTS, mutated

from plugins.tools.build import PLUGINS_FOLDER, build
from runtime.sampling import kernel
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams

# By file: the fault, the original source, its replacement.
MUTATIONS = {
    "core/outrider_sampling.h": {
        "tile tail dropped": ("(width + TILE - 1) / TILE", "(width < TILE ? 1 : width / TILE)"),
        "penalty on the wrong sign": ("z < 0 ? z * penalty", "z > 0 ? z * penalty"),
        "accepts at equality": (
            "accept_u(i) * lenience * q < p", "accept_u(i) * lenience * q <= p",
        ),
        "block accepts at equality": (
            "accept_u(gamma - 1) < prefix", "accept_u(gamma - 1) <= prefix",
        ),
        "ratio inverted": ("accept_u(i) * lenience * q < p", "accept_u(i) * lenience * p < q"),
        "reported ratio inverted": ("p / (lenience * q)", "(lenience * q) / p"),
        "lenience forgotten": ("accept_u(i) * lenience * q < p", "accept_u(i) * q < p"),
        "q = 0 accepted": ("!(q > 0 && round", "!(q >= 0 && round"),
        "residual not clamped": ("difference > 0 ? difference : 0.0f", "difference"),
        "residual's absolute value": (
            "difference > 0 ? difference : 0.0f", "difference > 0 ? difference : -difference",
        ),
        "block stops at the first failure": (
            "int tau = gamma - 1; tau >= 0; --tau", "int tau = 0; tau < gamma; ++tau",
        ),
        "block's prefix not clipped": ("product < 1 ? product : 1.0", "product"),
        "block's h without 1 - P": ("mass / (mass + 1 - scale)", "mass / (mass + 1)"),
        "block gives up at a tighter bound": (
            "accept_u(tau - 1) >= scale", "accept_u(tau - 1) >= scale * scale",
        ),
        "coupled: a tile's least number not divided": (
            "return {-log_of(v) * (1.0 / TILE),", "return {-log_of(v),",
        ),
        "coupled: tiles given up too soon": ("weight) * (1.0 + 1e-5)", "weight) * 0.5"),
        "coupled: one number for four tokens": ("words[i % 4]", "words[0]"),
        "coupled: the group's own token forgotten": ("i == group.at ? group.least :", ""),
        "block in lane 0": ("slot.rule == OUTRIDER_BLOCK ? slot.position : 0", "0 * slot.position"),
        "nine Philox rounds": ("round < 10", "round < 9"),
        "52 bits": ("| c[1]) >> 11", "| c[1]) >> 12"),
        "half-precision denormals": ("exponent == 0 ? denormal : normal", "normal"),
        "min-p is strict": ("e >= row.min_weight", "e > row.min_weight"),
        "fraction of a tile ignored": ("threshold = fraction * total", "threshold = 0 * fraction"),
        "past the end: nothing": ("return highest_bit(adds);", "return -1;"),
        "a run is entered at its end": ("upto.at(i - 1)", "upto.at(i)"),
        "no temperature in the sigmoid": ("z / s.temperature", "z / 1.0f"),
        "no slack at top-p": ("(top_p - 1e-6) * total", "top_p * total"),
    },
    "core/outrider_row.h": {
        "ties to the highest index": ("peak > shape->peak", "peak >= shape->peak"),
        "tiles not rescaled": (
            "tile_sum[k] *= static_cast<double>(scale)", "tile_sum[k] *= scale > 0 ? 1.0 : 0.0",
        ),
        "NaN not noticed": ("broken |= static_cast<int>(!(sum < outrider::INF));", ""),
        "NaN hidden by suppression": (
            "if (!(raw.at(id) < outrider::INF)) *status = diagnose(raw);", "",
        ),
        "top-k keeps one more": (
            "static_cast<int>(before), found) - 1", "static_cast<int>(before), found - 1)",
        ),
        "top-p keeps the lower ids": ("a.id > b.id", "a.id < b.id"),
        "top-p keeps too much": (
            "found && before < target", "found && before < target + target / 64",
        ),
        "drafts are not context": ("for (int c = 0; c < i; ++c) penalty(drafts[c]);", ""),
        "the prompt is counted": ("int c = slot.output_start; c <", "int c = 0; c <"),
        "a count forgotten": ("++counts[id];", "counts[id] = 1;"),
        "an id counted at each occurrence": ("    counts[id] = 0;\n", ""),
        "drafts are not counted": ("visit(drafts[c]);", "(void)0;"),
        "presence forgotten": ("frequency + slot.presence_penalty", "frequency"),
        "bias after the penalty": ("biased ? raw.at(id) + bias_of(slot, id) : ", ""),
        "half of the biases": ("c < slot.bias_length; ++c", "c < slot.bias_length / 2; ++c"),
        "suppression never ends": ("i < slot.suppress_rows && ", ""),
        "filtered total not recomputed": (
            "  shape->total = total_of(tile_sum, tiles);\n  return",
            "  shape->total = 1;\n  return",
        ),
    },
    "core/outrider_round.h": {
        "scale missing in the residual": (
            "residual_scale_ * (q_.total / p_[i].total)", "1.0 * (q_.total / p_[i].total)",
        ),
        "totals exchanged": ("(q_.total / p_[i].total)", "(p_[i].total / q_.total)"),
        "point mass not removed": ("w[token % TILE] = 0;", ""),
        "one uniform for all positions": (
            "slot_.seed, slot_.position + static_cast<uint32_t>(i)", "slot_.seed, slot_.position",
        ),
        "final uniform is an accept one": ("outrider::RESIDUAL", "outrider::ACCEPT"),
        "corrected from p": ("if (decision.residual)", "if (false)"),
        "a narrower draft repeats": (
            "if (!common) std::fill_n(v, TILE, 0.0f);", "if (!common) std::fill_n(v, TILE, 1.0f);",
        ),
    },
    "cpu/outrider_tiles.cpp": {
        "NaN not noticed by argmax": ("*broken |= any;", ""),
        "half a tile summed": ("v[i] = w[i] + w[i + TILE / 2]", "v[i] = w[i]"),
        "padding counts": (
            "for (int i = count; i < TILE; ++i) z[i] = -INF;",
            "for (int i = count; i < TILE; ++i) z[i] = 0;",
        ),
    },
}  # fmt: skip
CASES = {what: (name, *change) for name, of in MUTATIONS.items() for what, change in of.items()}


def half_precision_denormals(library):
    bits = np.arange(0x0400, dtype=np.uint16)
    rows = np.stack([bits, bits | 0x8000]).view(np.float16)
    params = SamplingParams(temperature=1e-6)
    for row in rows:
        got, _ = warp_weights(row, SlotSampling(params, 0, 0), library=library)
        want, _ = warp_weights(row.astype(np.float32), SlotSampling(params, 0, 0), library=library)
        assert np.array_equal(got, want) and len(np.unique(got)) > 2


def ties_across_tiles(library):
    row = np.zeros(5000, np.float32)
    row[[1500, 3000, 4999]] = 2.0
    for options, first in (({}, 1500), ({"temperature": 1.0, "min_p": 1.0}, 1500)):
        weights, _ = warp_weights(
            row, SlotSampling(SamplingParams(**options), 0, 0), library=library
        )
        assert weights.argmax() == first and weights[first] == 1


def a_narrow_draft_over_many_tiles(library):
    """q is 0 beyond its end, so there the residual is proportional to p."""
    p, q = [0.0] * 3000, [0.0] * 500
    for u, token in ((0.001, 502), (0.5, 1750), (0.999, 2997)):
        assert abs(edges.one(library, [p, p], [q], [2999], TOKEN, [0.9, u]).token - token) < 3


def counts(library, options):
    """test_counts_and_biases_agree_with_the_reference for this library."""
    for vocab_size, gamma in ((8, 3), (8, 8), (2500, 3)):
        case = Case(gamma, vocab_size, gamma, slots=4)
        assert not disagreements(library, case, SamplingParams(**options))


def checks(library):
    """The tests, those that are quick and likely to fail first."""
    yield lambda: interface.test_philox_gives_the_known_answers(library)
    yield lambda: half_precision_denormals(library)
    yield lambda: ties_across_tiles(library)
    yield lambda: a_narrow_draft_over_many_tiles(library)
    yield lambda: edges.test_a_token_of_weight_0_is_never_drawn(library, 5)
    yield lambda: edges.test_temperature_0_is_the_lowest_argmax(library)
    yield lambda: edges.test_lenience_at_temperature_0(library)
    rejected_at_u_0 = edges.test_zero_target_or_draft_probability_is_rejected_at_u_0
    for rule in (TOKEN, BLOCK, SIGMOID):
        yield lambda r=rule: rejected_at_u_0(library, r)
        yield lambda r=rule: edges.test_a_residual_of_nothing_is_the_target(library, r)
    for rule in (TOKEN, BLOCK):
        yield lambda r=rule: edges.test_the_test_is_strict(library, r)
        yield lambda r=rule: edges.test_vocabularies_of_different_width(library, r)
    for temperature in (0.0, 1.0):
        yield lambda t=temperature: edges.test_a_broken_row_names_model_slot_and_position(
            library, [0.0, np.nan, 1.0], "NaN in the logits", t
        )
    yield lambda: edges.test_ties_at_the_edge_of_the_nucleus(library, [0.0] * 8, 0.5, [4, 5, 6, 7])
    yield lambda: edges.test_top_k_keeps_ties(library, 150)
    yield lambda: edges.test_a_prefix_that_is_top_p_exactly_is_the_nucleus(library)
    yield lambda: tests.test_a_draft_without_a_distribution(library)
    agrees = tests.test_agrees_with_the_reference
    for options in OPTIONS.values():
        for vocab_size in (127, 2500):
            yield lambda v=vocab_size, o=options: agrees(library, v, o)
    large = tests.test_agrees_on_large_vocabularies_half_precision_and_far_from_zero
    yield lambda: large(library, "coupled", {"vocab_size": 51_864})
    for options in COUNTED.values():
        yield lambda o=options: counts(library, o)
    for rule in (TOKEN, BLOCK):
        enumerated = exact.test_a_round_has_the_targets_joint_distribution
        yield lambda r=rule, e=enumerated: e(library, r, 0, 2)


def is_detected(library):
    for check in checks(library):
        try:
            check()
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - any failure of a test
            return True
        except pytest.skip.Exception:
            continue
    return False


def compile_library(folder, sources=PLUGINS_FOLDER):
    """Compile these sources with little optimisation, and load the library."""
    library = build(folder / "lib", sources, extra=["-O1", "-w"], session=False)
    return kernel.load_file(library.resolve())


@pytest.mark.slow
def test_the_unchanged_source_passes(tmp_path: Path):
    assert not is_detected(compile_library(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("mutation", CASES.values(), ids=CASES)
def test_a_mutation_is_caught(tmp_path, mutation):
    assert is_detected(compile_library(tmp_path, mutated(tmp_path, *mutation)))


def test_every_mutation_still_applies():
    for name, old, _ in (*CASES.values(), *(fault[1:4] for fault in FAULTS.values())):
        assert (PLUGINS_FOLDER / name).read_text().count(old) == 1, f"{name}: {old}"
