"""What a shell offers: commands, recipes, verbs, options and fields of a config."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isograd.cli.completion import SHELLS, candidates
from isograd.cli.main import COMMANDS, main


@pytest.mark.parametrize(
    ("words", "some"),
    [
        ([""], list(COMMANDS)),
        (["tr"], ["train"]),
        (["new", "c"], ["chat"]),
        (["config", ""], ["show", "schema", "from"]),
        (["data", "b"], ["build"]),
        (["train", "run.yaml", "optimizer.l"], ["optimizer.lr="]),
        (["train", "run.yaml", "--dry"], ["--dry-run"]),
        (["config", "show", "run.yaml", "steps"], ["steps="]),
        (["config", "from", "x", "--ra"], ["--ranks"]),
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
    script = f"""isograd() {{ {sys.executable} -m isograd.cli.main "$@"; }}
        {SHELLS["bash"]}
        compopt() {{ printf '%s ' compopt "$@"; }}
        for COMP_LINE in {lines}; do
            COMP_POINT=${{#COMP_LINE}}; COMPREPLY=(); _isograd; echo "${{COMPREPLY[@]:0:1}}"
        done"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["explain", "compopt -o nospace optimizer.lr=", "--help", "compopt -o default "]


def test_the_zsh_script_is_read_by_zsh_and_the_fish_script_by_fish() -> None:
    for shell, check in (("zsh", ["zsh", "-f", "-n"]), ("fish", ["fish", "--no-execute"]), ("bash", ["bash", "-n"])):
        if shutil.which(shell):
            done = subprocess.run(check, input=SHELLS[shell], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), shell
    assert shutil.which("bash")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_by_the_script(tmp_path: Path) -> None:
    lines = ["isograd exp", "isograd train run.yaml optimizer.lr", "isograd config show --h", "isograd new ch"]
    asked = "\n".join(f"complete -C '{line}'" for line in lines)
    script = f"function isograd; {sys.executable} -m isograd.cli.main $argv; end\n{SHELLS['fish']}\n{asked}\n"
    (tmp_path / "script.fish").write_text(script)
    done = subprocess.run(
        ["fish", "--no-config", "script.fish"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = [line for line in done.stdout.splitlines() if line != "script.fish"]
    assert found == ["explain", "optimizer.lr=", "--help", "chat"], done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize("way", ["sourced", "in fpath"])
def test_zsh_completes_at_a_tab(tmp_path: Path, way: str) -> None:
    """Typed into a terminal; a word alone is completed with a space, a field without."""
    (tmp_path / "_isograd").write_text(SHELLS["zsh"])
    read = "source ./_isograd" if way == "sourced" else "fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D"
    (tmp_path / ".zshrc").write_text(
        f'isograd() {{ {sys.executable} -m isograd.cli.main "$@" }}\n{read}\nPS1="READY "\n'
    )
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-d", "-i"], {**os.environ, "ZDOTDIR": str(tmp_path), "TERM": "dumb"})
    try:
        until(terminal, "READY")
        for typed, wanted in (("isograd exp", "isograd explain "), ("isograd train x optimizer.lr", "optimizer.lr=")):
            os.write(terminal, f"{typed}\t".encode())
            until(terminal, wanted)
            os.write(terminal, b"!\x15")
            until(terminal, "!")
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def until(terminal: int, wanted: str, seconds: float = 60) -> None:
    """Read what a terminal shows until it has shown this."""
    shown, end = b"", time.monotonic() + seconds
    while wanted.encode() not in shown:
        assert time.monotonic() < end, shown.decode(errors="replace")
        if select.select([terminal], [], [], 0.1)[0]:
            shown = (shown + os.read(terminal, 65536)).replace(b"\a", b"")
