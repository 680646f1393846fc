"""What a shell offers: commands, recipes, verbs, options and fields of a config."""

from __future__ import annotations

import subprocess
import sys

import pytest

from isograd.cli import COMMANDS, main
from isograd.completion import SHELLS, candidates


@pytest.mark.parametrize(
    ("words", "some"),
    [
        ([""], list(COMMANDS)),
        (["tr"], ["train"]),
        (["new", "c"], ["chat"]),
        (["config", ""], ["show", "schema", "from-deepspeed"]),
        (["data", "b"], ["build"]),
        (["train", "run.yaml", "optimizer.l"], ["optimizer.lr="]),
        (["train", "run.yaml", "--dry"], ["--dry-run"]),
        (["config", "show", "run.yaml", "steps"], ["steps="]),
        (["config", "from-deepspeed", "x", "--ra"], ["--ranks"]),
        (["train", ""], []),
        (["nothing", "x"], []),
    ],
)
def test_what_can_follow(words: list[str], some: list[str]) -> None:
    found = candidates(words, main)
    assert set(some) <= set(found)
    assert all(word.startswith(words[-1]) for word in found)


def test_bash_completes_by_the_script() -> None:
    """At the end of a line, as readline calls it; bash itself cuts words at an equals sign."""
    lines = "'isograd exp' 'isograd train run.yaml optimizer.lr' 'isograd config show --h' 'isograd train '"
    script = f"""isograd() {{ {sys.executable} -m isograd.cli "$@"; }}
        {SHELLS["bash"]}
        compopt() {{ printf '%s ' compopt "$@"; }}
        for COMP_LINE in {lines}; do
            COMP_POINT=${{#COMP_LINE}}; COMPREPLY=(); _isograd; echo "${{COMPREPLY[@]:0:1}}"
        done"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["explain", "compopt -o nospace optimizer.lr=", "--help", "compopt -o default "]
