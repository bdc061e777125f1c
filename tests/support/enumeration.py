"""The exact distribution of a round by enumeration at V = 8, for any sampler.

Chosen uniforms replace Philox. The outcome is piecewise constant in each of them; bisection finds
the edges, for all drafts and outcomes at once, in one slot each. The reference is a float64
softmax, which shares no code with the samplers. No verification rule is reimplemented here.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from samplers import BISECTIONS, NUMPY, ONE
from scipy.special import softmax

from runtime.sampling.native import RoundSampler
from runtime.sampling.rules import verify
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import warp

V = 8


def bisect(accepted, count):
    """Lengths [count] of {u: accepted(u)}, for predicates that are true below some point."""
    low, high = np.zeros(count), np.ones(count)
    never, always = ~accepted(np.zeros(count)), accepted(np.full(count, ONE))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        true = accepted(middle)
        low, high = np.where(true, middle, low), np.where(true, high, middle)
    return np.where(never, 0.0, np.where(always, 1.0, low))


class Models:
    """Target and draft rows for every prefix over V tokens: float32 logits."""

    def __init__(self, seed, gamma, scale=1.5):
        rng = np.random.default_rng([seed, gamma])
        self.gamma = gamma
        self.target = [
            scale * rng.normal(size=(V,) * (i + 1)).astype(np.float32) for i in range(gamma + 1)
        ]
        self.draft = [
            scale * rng.normal(size=(V,) * (i + 1)).astype(np.float32) for i in range(gamma)
        ]
        for rows in (*self.target[:1], *self.draft[:1]):
            rows[..., rng.integers(1, V)] = -np.inf

    def processed(self, change):
        """The models with `change(row, prefix)` applied to every row."""
        made = Models(0, self.gamma)
        made.target, made.draft = (
            [
                np.stack([change(rows[at], at) for at in np.ndindex(rows.shape[:-1])]).reshape(
                    rows.shape
                )
                for rows in tables
            ]
            for tables in (self.target, self.draft)
        )
        return made

    def joint(self):
        """The target's distribution over gamma + 1 tokens."""
        joint = np.ones(())
        for rows in self.target:
            joint = joint[..., None] * softmax(np.float64(rows), axis=-1)
        return joint


def round_logits(models, drafts):
    """Target [N, gamma + 1, V] and draft [N, gamma, V] along N rows of drafts."""
    count, gamma = len(drafts), models.gamma
    target = np.empty((count, gamma + 1, V), np.float32)
    draft = np.empty((count, gamma, V), np.float32)
    for i in range(gamma + 1):
        prefix = tuple(drafts[:, :i].T)
        target[:, i] = models.target[i][prefix]
        if i < gamma:
            draft[:, i] = models.draft[i][prefix]
    return target, draft


def rounds(library, models, drafts, params, context=None):
    """Return a function from uniforms [N, gamma + 1] to (accepted, token), each [N], with one slot
    per row of drafts.

    context: ids before the round; all but the first count as output."""
    count, gamma = len(drafts), models.gamma
    target, draft = round_logits(models, drafts)
    if library is NUMPY:
        ids = np.array([] if context is None else context, np.int64)

        def warped(rows, b, i):
            return warp(rows[b, i], params, np.append(ids, drafts[b, :i]), output_start=1)

        p = [[warped(target, b, i) for i in range(gamma + 1)] for b in range(count)]
        q = [[warped(draft, b, i) for i in range(gamma)] for b in range(count)]

        def run(u):
            got = [
                verify(p[b], q[b], drafts[b].tolist(), u[b, :gamma].tolist(), u[b, gamma], params)
                for b in range(count)
            ]
            return np.array([(v.accepted, v.token) for v in got]).T

        return run
    sampler = RoundSampler(V, gamma, count, library=library)
    ids = None if context is None else np.array(context, np.int64)
    sampler.begin(
        [SlotSampling(params, gamma, 0, index=b, context=ids, output_start=1) for b in range(count)]
    )
    sampler.drafts[:] = drafts

    def run(u):
        got = sampler.verify(target, draft, np.ascontiguousarray(u))
        return np.array([(v.accepted, v.token) for v in got]).T

    return run


def output_joint(library, models, params, sampled=None, **control):
    """Return the joint distribution of gamma + 1 tokens (those of a round, completed by the target)
    and the mean number accepted.

    sampled: the models after the processing that `params` ask for, where they ask for any."""
    gamma, sampled = models.gamma, sampled or models
    drafts = np.array(list(itertools.product(range(V), repeat=gamma)))
    q = np.ones(len(drafts))
    for i in range(gamma):
        q *= softmax(np.float64(sampled.draft[i]), axis=-1)[tuple(drafts[:, : i + 1].T)]
    drafts, q = drafts[q > 0], q[q > 0]
    run = rounds(library, models, drafts, params, **control)
    others = ONE if params.verify == "block" else 0.0
    edges = np.empty((len(drafts), gamma))
    for i in range(gamma):

        def is_accepted(u, i=i):
            uniforms = np.full((len(drafts), gamma + 1), others)
            uniforms[:, i], uniforms[:, gamma] = u, 0.0
            return run(uniforms)[0] > i

        edges[:, i] = bisect(is_accepted, len(drafts))

    joint, mean = np.zeros((V,) * (gamma + 1)), 0.0
    for below in itertools.product((True, False), repeat=gamma):
        cell = np.prod(np.where(below, edges, 1 - edges), axis=1)
        uniforms = np.zeros((len(drafts), gamma + 1))
        uniforms[:, :gamma] = np.where(below, edges / 2, (edges + 1) / 2)
        accepted = run(uniforms)[0]
        mean += (q * cell * accepted).sum()
        previous = np.zeros(len(drafts))
        for token in range(V):  # the inverse CDF of the final draw is monotone in its uniform

            def at_most(u, token=token, uniforms=uniforms):
                uniforms[:, gamma] = u
                return run(uniforms)[1] <= token

            edge = bisect(at_most, len(drafts)) if token < V - 1 else np.ones(len(drafts))
            weight = q * cell * (edge - previous)
            previous = edge
            for n in range(gamma + 1):
                chosen = accepted == n
                head = (*drafts[chosen, :n].T, np.full(chosen.sum(), token))
                tail = completion(sampled, n + 1, head)
                np.add.at(joint, head, weight[chosen].reshape(-1, *[1] * (gamma - n)) * tail)
    assert joint.sum() == pytest.approx(1, abs=1e-6)
    return joint, mean


def completion(models, start, prefix):
    """The target's distribution of tokens start .. gamma after each of N prefixes."""
    rows = np.ones(len(prefix[0]))
    for i in range(start, models.gamma + 1):
        table = softmax(np.float64(models.target[i]), axis=-1)
        rows = rows[..., None] * table[prefix]  # [N, V, ...]: for all longer prefixes
    return rows


def distance(library, models, params, sampled=None, **control):
    """Return the total variation distance between a round's tokens and the target's, and the mean
    number accepted."""
    joint, mean = output_joint(library, models, params, sampled, **control)
    return 0.5 * np.abs(joint - (sampled or models).joint()).sum(), mean
