"""A pytest plugin, registered by installing isograd: the fixture `layouts`, for other projects' test suites."""

from __future__ import annotations

import pytest

DEFAULT = "dp2; dp2 zero2"  # what every nn.Module can do


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --layouts to pytest."""
    group = parser.getgroup("isograd")
    group.addoption("--layouts", default=DEFAULT, help=f"layouts to prove (default {DEFAULT!r})")


@pytest.fixture
def layouts(request: pytest.FixtureRequest) -> list[str]:
    """The layouts of --layouts, each checked and spelled in its usual order."""
    from isograd.core.layout import Layout

    return [str(Layout.parse(text)) for text in str(request.config.getoption("--layouts")).split(";") if text.strip()]
