"""examined.md: each row of the examination has tests, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_row_has_tests_that_are_there() -> None:
    text = (ROOT / "tests" / "examined.md").read_text()
    rows = dict(re.findall(r"^\| ([\d, ]+) \| (.*) \|$", text, re.M))
    numbers = [int(number) for row in rows for number in row.split(",")]
    assert numbers == list(range(1, 20))
    for line in [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]:
        named = re.findall(r"`((?:verify/)?tests/[\w/]+\.py)::(\w+)`", line)
        assert named or line.endswith("| tests |"), line
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), f"{file}::{name}"
