"""Fixtures that the tests of operators share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from operators import LOOPS
from samplers import instructions

from plugins.tools import cubins
from plugins.tools.build import BuildError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that uses `instruction_set` with every set in its module's SETS, or LOOPS."""
    if "instruction_set" in metafunc.fixturenames:
        sets = getattr(metafunc.module, "SETS", LOOPS)
        metafunc.parametrize("instruction_set", sets, indirect=True)


@pytest.fixture
def nvrtc() -> cubins.Nvrtc:
    try:
        return cubins.nvrtc()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with instructions(request.param) as available:
        if not available:
            pytest.skip(f"this processor has no {request.param}")
        yield request.param
