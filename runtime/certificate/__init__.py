"""The certificate: checks on the spot that a bundle emits what its target alone would emit.

The text is generated as usual, by speculation. Then its tokens are *teacher-forced* through the
target one at a time, which is plain decoding of the same text, and each token is compared with the
plain row that predicts it (`replay`).

If the bundle promises it (`backends.bits`), plain decoding and calls of gamma + 1 tokens give the
same logits: the text is then teacher-forced in such calls too, and one differing bit fails.

Temperature 0. Every token must be the argmax of its plain row. Without that promise it may also be
a near-tie: a verification runs gamma + 1 tokens in one call and rounds differently from a plain
step. Suppose that no logit differs by more than d. If x is the argmax of the wide row z' and a that
of the plain row z, then z_x >= z'_x - d >= z'_a - d >= z_a - 2d: a margin z_a - z_x above 2d is not
rounding. d is measured on the same text, by teacher-forcing it in calls of gamma + 1 tokens too, on
the largest logits of each row. The bound is capped (`_max_bound`); otherwise engines whose wide
calls are simply wrong would measure a large d and pass.

Temperature above 0. The randomised probability integral transform (Rosenblatt 1952, "Remarks on a
multivariate transformation"; Brockwell 2007, "Universal residuals"): with p the plain distribution
after the prefix, x the token and v uniform, U = F(x-) + v p(x), where F sums p over tokens in an
order fixed by the prefix, is uniform given the prefix if x was drawn from p. So the U of a text are
independent and uniform, which the Kolmogorov-Smirnov test checks. Any order is valid, and each has
power against different faults. The order by p/q, with q the draft's distribution, detects output
that leans towards the draft: for tokens drawn from q, D is the total variation distance of p and q.
The order by p detects tokens drawn from the row of another text, after a fault of the cache. Both
are tested; twice the smaller p-value counts (Bonferroni).

That texts end causes no bias. Whether token t exists was decided by the tokens before it, and given
those U_t is uniform: however texts end, the U of the concatenated texts are independent uniforms.
The test takes the first `TEST_TOKENS` of them, a number fixed beforehand. Only if `MAX_TEXTS` texts
yield fewer does the count depend on the tokens, and then only through the lengths.

With the coupled rule a text must equal plain decoding with its seed. That is generated too, and one
differing token fails.

A sample has limited power: a distribution that differs from the target's by less than about 0.09 in
total variation passes at 512 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..backends.engine import source_ids
from ..calls import encode_source
from ..files.graphs import Dtype
from ..sequence import Request
from ..text.engine import TextEngine
from ..text.options import Options, Prompt
from .replay import Mismatch, Replay, Rounding, TeacherForced

TEST_TOKENS = 512  # of the distribution test
MAX_TEXTS = 64  # maximum number of texts generated to get them
SIGNIFICANCE_LEVEL = 1e-3  # an exact decoder fails one certificate in a thousand at temperature > 0


@dataclass(frozen=True)
class Certificate:
    """The outcome of `check`.

    texts, tokens: how many were tested. drafted: draft tokens of these texts. rounding: largest
    difference, in logits, between calls of `width` tokens and plain steps on these texts. bound:
    the largest margin that rounding explains. near_ties: mismatches within the bound; violations:
    those beyond it, or all of them if they are too many.
    statistic, p_value: of the distribution test (D of the worse order), None at temperature 0.
    repeated: how many of the texts plain decoding repeats token for token; None for rules that do
    not promise that.
    identical: whether both kinds of calls gave bitwise the same logits; None if the bundle does not
    promise that, or nothing was drafted.
    caveat: why nothing can be certified whatever the result: an inexact rule, or no drafts.
    """

    passed: bool
    temperature: float
    texts: int
    tokens: int
    drafted: int
    width: int
    rounding: float
    bound: float
    near_ties: tuple[Mismatch, ...]
    violations: tuple[Mismatch, ...]
    statistic: float | None = None
    p_value: float | None = None
    repeated: int | None = None
    identical: bool | None = None
    caveat: str | None = None

    def lines(self) -> list[str]:
        """Two to six lines of text."""
        verdict = "PASSED" if self.passed else "NOT POSSIBLE" if self.caveat else "FAILED"
        texts = "1 text" if self.texts == 1 else f"{self.texts} texts"
        lines = [
            f"certificate {verdict} | temperature {self.temperature:g} | {self.tokens} tokens of "
            f"{texts} ({self.drafted} drafted), each checked against the target alone"
        ]
        count = len(self.near_ties) + len(self.violations)
        if self.p_value is None and self.identical:
            lines.append(f"argmax {self.tokens - count} | other {count}")
        elif self.p_value is None:
            lines.append(
                f"argmax {self.tokens - count} | near-ties {len(self.near_ties)} "
                f"| other {len(self.violations)} | bound {self.bound:.2g} logits "
                f"({self.width}-token calls differ by {self.rounding:.2g})"
            )
        else:
            lines.append(
                f"uniformity D {self.statistic:.4f}, p-value {self.p_value:.3g} (fails below "
                f"{SIGNIFICANCE_LEVEL:g}) | outside the target's support {count}"
            )
        if self.identical is not None:
            bits = "identical" if self.identical else f"NOT identical, by up to {self.rounding:.2g}"
            lines.append(f"logits of {self.width}-token calls and of plain steps: {bits}")
        shown = [*self.violations[:3], *self.near_ties][:4]
        if shown:
            more = f" | and {count - len(shown)} more" if count > len(shown) else ""
            items = (
                f"text {m.run} token {m.position}: id {m.token}, not {m.best} (+{m.margin:.2g})"
                for m in shown
            )
            lines.append(" | ".join(items) + more)
        if self.repeated is not None:
            lines.append(f"plain decoding repeats {self.repeated} of {texts}")
        if self.caveat:
            lines.append(self.caveat)
        return lines

    def json_object(self) -> dict[str, Any]:
        """The `check` object of --json; infinite margins are null."""
        fields = asdict(self)
        for name in ("near_ties", "violations"):
            fields[name] = [
                {k: None if v == math.inf else v for k, v in mismatch.items()}
                for mismatch in fields[name]
            ]
        return fields


def check(
    engine: TextEngine,
    prompt: Prompt | None,
    options: Options,
    on_progress: Callable[[str], None] = lambda text: None,  # receives progress messages
) -> Certificate:
    """Generate from `prompt` through the engine as it is, and check the tokens against the target.

    At temperature 0 this generates one text; above, texts with seeds seed, seed + 1, ... until
    there are `TEST_TOKENS` tokens. Inexact rules (sigmoid, lenience below 1) run too, for
    their p-value, but never pass: a sample can refute exactness but not establish it.
    Raises OutriderError as `generate` does.
    """
    request = engine.request(prompt, options)
    params, width = request.params, request.gamma + 1
    generated = _generate(engine, prompt, options, request, on_progress)
    texts = generated.texts
    tokens = sum(map(len, texts))
    transforms, mismatches, rounding = _replay(engine, request, generated, on_progress)
    identical = rounding.identical if width > 1 and engine.bits.independent_of_gamma else None
    bound = min(2 * rounding.largest, _max_bound(engine.manifest.pair.target.dtype, rounding.scale))
    near_ties = tuple(m for m in mismatches if m.margin <= bound and identical is None)
    violations = tuple(m for m in mismatches if m not in near_ties)
    statistic = p_value = None
    if params.temperature > 0:
        tests = [kolmogorov_smirnov(column) for column in zip(*transforms, strict=True)]
        statistic, p_value = min(tests, key=lambda test: test[1])
        p_value = min(1.0, 2 * p_value)
        # Two rows whose logits differ by at most d have total variation <= tanh(d / 2) <= d / 2.
        # Rounding moves mass of that order across a filter's edge; allow one token more by chance.
        if len(near_ties) > 1 + tokens * bound / 4:
            near_ties, violations = (), (*violations, *near_ties)
    caveat = _caveat(request, generated.drafted)
    passed = (
        not violations
        and caveat is None
        and (p_value is None or p_value >= SIGNIFICANCE_LEVEL)
        and generated.repeated in (None, len(texts))
        and identical is not False
    )
    return Certificate(
        passed=passed, temperature=params.temperature, texts=len(texts), tokens=tokens,
        drafted=generated.drafted, width=width, rounding=rounding.largest, bound=bound,
        near_ties=near_ties, violations=violations, statistic=statistic, p_value=p_value,
        repeated=generated.repeated, identical=identical, caveat=caveat,
    )  # fmt: skip


@dataclass(frozen=True)
class _Generated:
    """Texts generated as usual, each with a seed. drafted, repeated: as in `Certificate`."""

    seeds: list[int]
    texts: list[list[int]]
    drafted: int
    repeated: int | None


def _generate(
    engine: TextEngine,
    prompt: Prompt | None,
    options: Options,
    request: Request,
    on_progress: Callable[[str], None],
) -> _Generated:
    params = request.params
    seeds = [(params.seed + run) % 2**64 for run in range(MAX_TEXTS if params.temperature else 1)]
    texts: list[list[int]] = []
    drafted = 0
    repeated = 0 if params.verify == "coupled" and request.gamma else None
    for seed in seeds:
        on_progress(f"text {len(texts) + 1}, {sum(map(len, texts))} tokens")
        seeded = replace(options, seed=seed)
        result = engine.generate(prompt, seeded)
        drafted += result.stats.drafted
        texts.append(result.token_ids)
        if repeated is not None:
            plain_ids = engine.generate(prompt, seeded.plain()).token_ids
            repeated += plain_ids == texts[-1]
        if sum(map(len, texts)) >= TEST_TOKENS and params.temperature:
            texts[-1] = texts[-1][: TEST_TOKENS - sum(map(len, texts[:-1]))]
            break
    return _Generated(seeds[: len(texts)], texts, drafted, repeated)


def _replay(
    engine: TextEngine, request: Request, generated: _Generated, on_progress: Callable[[str], None]
) -> tuple[list[tuple[float, float]], list[Mismatch], Rounding]:
    """Teacher-force the texts. Returns the U of all tokens, in the order by p/q and in that by p;
    the tokens that were not the argmax, or outside the support; and how calls of gamma + 1 tokens
    differ."""
    params, width = request.params, request.gamma + 1
    transforms: list[tuple[float, float]] = []
    mismatches: list[Mismatch] = []
    rounding = Rounding(engine.decoder.vocab_size, params.repetition_penalty)
    with engine.exclusive_slot() as slot:
        request = encode_source(engine.decoder.target, slot.index, request)
        replay = Replay(engine, request)
        target, draft = TeacherForced(engine.decoder.target, slot, request), None
        if params.temperature and request.gamma and request.draft == "model":
            draft_model, draft_max_len = engine.decoder.draft, engine.decoder.draft_max_len
            draft_tokens = max(len(request.prompt) + 1, len(source_ids(request.source)))
            if draft_model is not None and draft_tokens <= draft_max_len:
                draft = TeacherForced(draft_model, slot, request, draft_max_len)
        for run, (seed, text) in enumerate(zip(generated.seeds, generated.texts, strict=True)):
            on_progress(f"replaying text {run + 1} of {len(generated.texts)}")
            plain = rounding.record(target.rows(text))
            if params.temperature == 0:
                mismatches += replay.not_argmax(plain, text)
            else:
                q_rows = draft.rows(text) if draft is not None else iter(())
                transforms += replay.integral_transforms(plain, q_rows, text, seed, run, mismatches)
            if width > 1:
                rounding.compare(target.rows(text, width))
    return transforms, mismatches, rounding


def _caveat(request: Request, drafted: int) -> str | None:
    params = request.params
    if request.gamma and not drafted:
        return "nothing was drafted, so speculation was not tested: generate longer texts"
    if params.verify == "sigmoid":
        return "verify=sigmoid is not exact by design: no sample can certify it"
    if params.lenience != 1:
        return f"lenience={params.lenience:g} is not exact by design: no sample can certify it"
    return None


def kolmogorov_smirnov(sample: Sequence[float]) -> tuple[float, float]:
    """(D, p-value) of a sample against the uniform distribution on [0, 1].

    The asymptotic series with Stephens' correction for finite n (1970, "Use of the Kolmogorov-
    Smirnov, Cramer-von Mises and related statistics without extensive tables").
    """
    n = len(sample)
    values = np.sort(np.asarray(sample, np.float64))
    steps = np.arange(1, n + 1) / n
    statistic = float(max((steps - values).max(), (values - steps + 1 / n).max()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * statistic
    if scaled < 0.3:  # 1 - p is below 1e-5, and the series converges slowly
        return statistic, 1.0
    terms = ((-1) ** (j - 1) * math.exp(-2 * (j * scaled) ** 2) for j in range(1, 101))
    return statistic, min(1.0, max(0.0, 2 * sum(terms)))


def _max_bound(dtype: Dtype, scale: float) -> float:
    """The largest margin, in logits, that may ever count as a near-tie.

    At most half a logit: a token 1.6 times as likely is not a tie in any arithmetic. In float32
    also at most 2^-11 of the largest logit, as if every number had been rounded once to
    TensorFloat-32, the coarsest float32 that backends compute with.
    """
    return min(0.5, scale * 2**-11) if dtype == "float32" else 0.5
