"""The samplers are exact, by enumeration at V = 8.

test_kernel.py covers large vocabularies. Enumerating the emulated kernels takes minutes, so that is
done once in test_kernel_cuda.py, which shows that they are bitwise equal to the CPU library.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from enumeration import Models, distance, output_joint, softmax
from rounds import cases
from samplers import BLOCK, NUMPY, SIGMOID, TOKEN, open_backend

from runtime.sampling.warp import SamplingParams

EXACT = pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])


@pytest.fixture(params=[NUMPY, "cpu", "cuda"])
def library(request):
    return open_backend(request.param)


@EXACT
@pytest.mark.parametrize(("seed", "gamma"), cases([(0, 2)], [(0, 1), (1, 2), (5, 3)]))
def test_a_round_has_the_targets_joint_distribution(library, params, seed, gamma):
    assert distance(library, Models(seed, gamma), params)[0] < 1e-6


def test_enumeration_notices_rules_that_are_not_exact(library):
    models = Models(0, 1)
    assert distance(library, models, replace(TOKEN, lenience=0.3))[0] > 0.02
    assert distance(library, models, SIGMOID)[0] > 0.05


def test_block_accepts_more_than_token(library):
    models = Models(0, 2)
    for rows, p in ((models.target, [1, 2]), (models.draft, [2, 1])):
        for table in rows:
            table[...] = -np.inf
            table[..., :2] = np.log(p)
    for params, mean in ((TOKEN, 10 / 9), (BLOCK, 11 / 9)):
        far, accepted = distance(library, models, params)
        assert accepted == pytest.approx(mean, abs=1e-6) and far < 1e-6


# --- penalties, bias, filters: p and q alike, drafted tokens counted ---------------------------

CONTEXT = [2, 5, 3, 3]  # a prompt of one id, and the output after it
BIAS = {0: 1.5, 3: -2.0, 6: 0.5}
PENALISED = SamplingParams(
    temperature=1.0, frequency_penalty=0.6, presence_penalty=0.9, repetition_penalty=1.3,
    logit_bias=BIAS,
)  # fmt: skip


def processed(row, drafted, output=CONTEXT[1:]):
    """By definition: bias, then Transformers' penalty on all, then OpenAI's on the output."""
    row = row.astype(np.float64)
    for token, bias in BIAS.items():
        row[token] += bias
    for token in {*CONTEXT, *drafted}:
        row[token] = row[token] * 1.3 if row[token] < 0 else row[token] / 1.3
    for token in {*output, *drafted}:
        row[token] -= 0.6 * (*output, *drafted).count(token) + 0.9
    return row


@pytest.mark.parametrize("rule", ["token", "block"])
def test_penalties_and_bias_are_exact_with_drafted_tokens_counted(library, rule):
    params, models = replace(PENALISED, verify=rule), Models(3, 2)
    sampled = models.processed(processed)
    assert distance(library, models, params, sampled, context=CONTEXT)[0] < 1e-6


def test_enumeration_notices_a_prompt_that_is_counted(library):
    """Control: penalties for a prompt counted as output, and drafted tokens not counted."""
    models = Models(3, 1)
    for wrong in (
        models.processed(lambda row, drafted: processed(row, drafted, CONTEXT)),
        models.processed(lambda row, drafted: processed(row, ())),
    ):
        joint, _ = output_joint(library, models, PENALISED, models.processed(processed),
                                context=CONTEXT)  # fmt: skip
        assert 0.5 * np.abs(joint - wrong.joint()).sum() > 0.01


@EXACT
def test_rows_with_filtered_tokens_are_exact(library, params):
    """top-k sets different tokens of target and draft to zero probability."""
    models = Models(4, 2)

    def top_5(row, _):
        return np.where(row < np.sort(row)[-5], -np.inf, row) / 0.8

    params = replace(params, temperature=0.8, top_k=5)
    assert distance(library, models, params, models.processed(top_5))[0] < 1e-6


# --- lenience: not exact, within its bound -----------------------------------------------------


@pytest.mark.parametrize("lenience", [1.0, 0.3])
def test_lenience_keeps_its_guarantee(library, lenience):
    models = Models(1, 1, scale=2.0)
    joint, accepted = output_joint(library, models, replace(TOKEN, lenience=lenience))
    out, p, q = joint.sum(axis=1), softmax(models.target[0]), softmax(models.draft[0])
    assert accepted == pytest.approx(np.minimum(p / lenience, q).sum(), abs=1e-6)  # A.5
    assert (out <= p / lenience + 1e-6).all()
    # Tokens that the draft proposes too rarely never exceed p, so the distance is the smallest
    # possible with this acceptance.
    assert (out[p > q] <= p[p > q] + 1e-6).all()
    least = np.maximum(np.minimum(q, p / lenience) - p, 0).sum()
    assert 0.5 * np.abs(out - p).sum() == pytest.approx(least, abs=1e-6)
    if lenience < 1:  # control: it does leave the target's distribution
        assert least > 0.02 and (out > p + 0.01).any()
