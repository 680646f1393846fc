"""A little text, as token shards, for every test that trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from isograd.data import build


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of several lengths, some of them held out."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(f"{number} of {i * i}" for i in range(20 + 9 * number)))
    build(folder / "tokens", sorted(folder.glob("*.txt")), validation=0.3)
    return folder / "tokens"
