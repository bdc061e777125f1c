"""The attention kernel of GPU packages. Triton's interpreter runs it on the CPU.

Triton reads TRITON_INTERPRET when it is imported, so the cases run in a process of their own: this
file, as a script.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

from engines.aotinductor import program as gpu_program

# Older interpreters do not work with NumPy 2.4.
NEEDS_TRITON = "the kernel is written in Triton: pip install -e '.[aotinductor]'"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3}
# tokens, heads per key, width of keys and of values, rows
SOME = [
    (1, 4, 64, 64, 300), (5, 3, 80, 48, 300), (2, 1, 16, 16, 24), (64, 4, 128, 128, 300),
    (64, 4, 16, 16, 300),
]  # fmt: skip
COUNTS, GROUPS, WIDTHS = (1, 2, 5, 9, 64, 300), (1, 3, 4, 8), ((16, 16), (64, 128), (80, 48))


@pytest.mark.parametrize("cases", ["some", pytest.param("every", marks=pytest.mark.slow)])
def test_the_kernel_computes_attention(cases: str) -> None:
    """Fault: a part that another program computed is lost or counted twice, a row or a token at the
    edge of a tile is left out, or a masked row has a weight."""
    pytest.importorskip("triton", "3.7", reason=NEEDS_TRITON)
    done = subprocess.run(
        [sys.executable, __file__, cases], capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_masks_that_are_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor reads a view of a view at wrong places. A mask for each head is left to the two
    products."""
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    monkeypatch.setattr(gpu_program, "_runs_triton", lambda tensor: True)
    query, key = torch.zeros(3, 4, 8, 16), torch.zeros(3, 2, 32, 16)

    def prepare(position: torch.Tensor, whole: bool) -> tuple[torch.Tensor, ...]:
        mask = torch.arange(32) <= position[:1].reshape(-1, 1, 1, 1) + torch.arange(8)[:, None]
        mask = mask.expand(3, 1, 8, 32) if whole else mask
        return tuple(tensor.int() + 0 for tensor in gpu_program._prepare_mask(mask, query, key))

    position = torch.tensor([3, 9, 20])
    compiled = torch.compile(prepare, dynamic=True)
    for whole in (True, False):
        found, begin, end, _ = compiled(position, whole)
        last = torch.arange(4, 12).expand(3, 8)
        assert not begin.any() and torch.equal(end.long(), last)
        assert torch.equal(found.bool(), (torch.arange(32) < last[:, None, :, None]))
    heads = torch.ones(3, 4, 8, 32, dtype=torch.bool)
    assert gpu_program._prepare_mask(heads, query, key) == (heads,)


def check(
    batch: int, count: int, groups: int, width: int, value_width: int, rows: int,
    window: int | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    from engines.aotinductor import attention

    heads, generator = 2, torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query = random(batch, count, heads * groups, width).transpose(1, 2)
    key, value = random(batch, heads, rows, width), random(batch, heads, rows, value_width)
    # The first text is as long as possible, the others are shorter.
    begin = (rows - count) // torch.arange(1, batch + 1)
    tokens = begin[:, None, None, None] + torch.arange(count)[:, None]
    mask = torch.arange(rows) <= tokens
    if window is not None:
        mask &= torch.arange(rows) > tokens - window
    mask[-1, :, count // 2] &= count == 1  # a token that sees nothing
    hidden = ~mask.any(2)[..., None]  # [B, 1, S, 1]
    large = torch.where(hidden, 60_000.0, 0.0).to(dtype)
    prepared = attention.spans(mask)
    found = attention.attend(query, key + large, value + large, *prepared, width**-0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), mask, scale=width**-0.5, enable_gqa=True
    ).nan_to_num(0)
    assert not prepared[-1].any(), "the counters are as they were"
    error = (found.double() - expected).abs().max()
    assert error < TOLERANCE[dtype], (batch, count, groups, width, rows, window, dtype, error)
    # What no token sees is not even read, except in the blocks at the edges.
    near = torch.nn.functional.max_pool1d((~hidden[..., 0]).float(), 127, 1, 63)[..., None] > 0
    far = torch.where(near, large, float("nan"))
    assert far.isnan().any() or window is None or rows - count < 127
    again = attention.attend(query, key + far, value + far, *prepared, width**-0.5)
    assert torch.equal(again, found)


def main(cases: str) -> None:
    """Check all cases; raises AssertionError."""
    every = (
        (count, groups, *widths, (300, 1040)[(index // 3) % 2])
        for index, (count, groups, widths) in enumerate(itertools.product(COUNTS, GROUPS, WIDTHS))
        if count * groups <= 512  # the interpreter is slow
    )
    for number, (count, groups, width, value_width, rows) in enumerate(
        SOME if cases == "some" else every
    ):
        dtype = (torch.float32, torch.float16)[number % 2]
        check(1 + number % 3, count, groups, width, value_width, rows, None, dtype)
        check(1 + number % 2, count, groups, width, value_width, rows, 7, dtype)


if __name__ == "__main__":
    main(sys.argv[1])
