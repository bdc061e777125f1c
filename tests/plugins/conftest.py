"""What the tests of operators share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from operators import LOOPS
from samplers import instructions


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of loops runs with each of the instruction sets that its module names."""
    if "instruction_set" in metafunc.fixturenames:
        sets = getattr(metafunc.module, "SETS", LOOPS)
        metafunc.parametrize("instruction_set", sets, indirect=True)


@pytest.fixture
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with instructions(request.param) as available:
        if not available:
            pytest.skip(f"this processor has no {request.param}")
        yield request.param
