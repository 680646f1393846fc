"""What became slower between two runs of benchmarks.all, or of one race.

    python -m benchmarks.diff OLD.json NEW.json      # ends with 1 when something became slower

A contestant's time is taken by that of one process in the same round (a contrastive step's by the peer's), so that two
days of one machine can be compared. It became slower when its median lies above every round of the old run, and the old
median below every new round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Rounds = dict[tuple[str, str], list[float]]  # (race, contestant) -> its time by one process's, round by round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    chosen = parser.parse_args()
    old, new = (rounds(json.loads(path.read_text()), path.stem) for path in (chosen.old, chosen.new))
    both = [key for key in old if key in new]
    if not both:
        raise SystemExit("the two files have no contestant in common")
    table = Table("race", "contestant", "old", "new", "new / old", "")
    for key in both:
        medians = statistics.median(old[key]), statistics.median(new[key])
        cells = [*key, *(f"{m:.3f}" for m in medians), f"{medians[1] / medians[0]:.3f}", verdict(old[key], new[key])]
        table.add_row(*cells)
    Console(width=max(110, Console().width)).print(table)
    sys.exit(any(verdict(old[key], new[key]) == "slower" for key in both))


def rounds(document: Mapping[str, Any], stem: str) -> Rounds:
    """Of a file with many races, or with one."""
    races = document.get("races", {stem: document})
    return {
        (race, r["name"]): r["of_one_rounds"]
        for race, found in races.items()
        for r in found["rows"]
        if r.get("of_one_rounds") and r["name"] != "one process"
    }


def verdict(old: list[float], new: list[float]) -> str:
    """Nothing is said where the ranges overlap too far to tell."""
    before, now = statistics.median(old), statistics.median(new)
    if now > max(old) and before < min(new):
        return "slower"
    return "faster" if now < min(old) and before > max(new) else ""


if __name__ == "__main__":
    main()
