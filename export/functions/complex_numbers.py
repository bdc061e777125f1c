"""Complex numbers as pairs of real tensors: graphs have no complex tensors.

DeepSeek V2 rotates its queries and keys by multiplying them with complex numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Complex:
    """A complex tensor of any shape, with the methods that models call."""

    real: torch.Tensor
    imag: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.real.device

    def to(self, *arguments: Any) -> Complex:
        return Complex(self.real.to(*arguments), self.imag.to(*arguments))

    def unsqueeze(self, dim: int) -> Complex:
        return Complex(self.real.unsqueeze(dim), self.imag.unsqueeze(dim))

    def __mul__(self, other: Complex | torch.Tensor | float) -> Complex:
        if not isinstance(other, Complex):
            return Complex(self.real * other, self.imag * other)
        return Complex(
            self.real * other.real - self.imag * other.imag,
            self.real * other.imag + self.imag * other.real,
        )


def _polar(size: torch.Tensor, angle: torch.Tensor) -> Complex:
    return Complex(size * angle.cos(), size * angle.sin())


def _view_as_complex(pairs: torch.Tensor) -> Complex:  # [..., 2]
    return Complex(*pairs.unbind(-1))


def _view_as_real(numbers: Complex) -> torch.Tensor:
    return torch.stack([numbers.real, numbers.imag], -1)


# By the names of the functions of torch that they replace.
REPLACEMENTS = {
    "polar": _polar,
    "view_as_complex": _view_as_complex,
    "view_as_real": _view_as_real,
}
