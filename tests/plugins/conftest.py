"""What the tests of operators share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from samplers import cpu_library


@pytest.fixture(params=["plain", "avx2", "avx512"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    library = cpu_library()
    best = library.outrider_instruction_set()
    if not library.outrider_use(request.param.encode()):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    library.outrider_use(best)
