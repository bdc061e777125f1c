"""What the tests of operators share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from samplers import instructions


@pytest.fixture(params=["plain", "avx2", "avx512"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with instructions(request.param) as there:
        if not there:
            pytest.skip(f"this processor has no {request.param}")
        yield request.param
