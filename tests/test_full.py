"""scripts/full.py runs every test in pieces, the oldest first, and writes what came out; what is left to it exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import not_skipped

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "full.py"
FILES = {
    "tests/a/test_one.py": "def test_right():\n    pass\n",
    "tests/b/test_two.py": "def test_wrong():\n    assert 1 == 2\n\ndef test_right():\n    pass\n",
    "verify/tests/test_three.py": "import pytest\n\n@pytest.mark.skip\ndef test_left_out():\n    pass\n",
    ".gitignore": "__pycache__/\n",
}


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    told = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "WORKERS": ""}  # plugins import torch
    return subprocess.run(command, cwd=folder, env=told, check=False, capture_output=True, text=True)


def git(folder: Path, *words: str) -> None:
    own = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
    subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.medium
def test_pieces_run_one_after_another_and_those_that_have_not_for_longest_come_first(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    refused = call(tmp_path)
    assert refused.returncode == 2 and "commit first" in refused.stderr
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "x")
    first = call(tmp_path, "--minutes", "0")
    assert first.returncode == 3 and "2 of 3 folders" in first.stdout
    (tmp_path / "other").write_text("")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "y")
    last = call(tmp_path)  # tests/a has run, one commit ago
    order = [line.split("] ")[1] for line in last.stdout.splitlines() if " of 3] " in line]
    assert last.returncode == 1 and order == ["tests/b", "verify/tests", "tests/a"]
    page = (tmp_path / "notes" / "full.md").read_text()
    assert "\n2 passed, 1 failed, 1 skipped in" in page and "failed: `tests.b.test_two::test_wrong`" in page
    assert not call(tmp_path, "--stale").stdout
    (tmp_path / "tests/b/test_two.py").write_text("def test_right():\n    pass\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "z")
    assert call(tmp_path).returncode == 0
    known = tmp_path / "notes" / "full.json"
    known.write_text(re.sub(r'"commit": "\w+"', '"commit": "0123"', known.read_text()))  # of no history
    assert "3 of 3 folders of tests have not run within 200 commits" in call(tmp_path, "--stale").stdout


@pytest.mark.medium
def test_what_needs_peers_runs_in_the_environment_that_has_them(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("__pycache__/\n.venv-peers\n")
    (tmp_path / "tests").mkdir()
    mark = "mark." + "peers"  # else `make test-peers` would read this file, too
    test = f"import os, pytest\n\n@pytest.{mark}\ndef test_right():\n    assert 'BESIDE' in os.environ\n"
    (tmp_path / "tests" / "test_one.py").write_text(test)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "x")
    refused = call(tmp_path)
    assert refused.returncode == 2 and "no .venv-peers/bin/python: `make full` makes it" in refused.stderr
    python = tmp_path / ".venv-peers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nBESIDE=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert call(tmp_path).returncode == 1
    page = (tmp_path / "notes" / "full.md").read_text()
    assert "\n| peers | 1 | 0 | 0 |" in page and "\n| tests | 0 | 1 | 0 |" in page


def test_what_is_skipped_where_nothing_may_be_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> pytest.CollectReport:
        return not_skipped(pytest.CollectReport("a", "skipped", ("test_a.py", 1, "could not import 'verl'"), []))

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert found().skipped
    (tmp_path / "peers").touch()
    assert found().failed and "could not import 'verl'" in str(found().longrepr)


@pytest.mark.parametrize("tree", ["tests", "verify/tests"])
@pytest.mark.parametrize("size", ["medium", "slow"])
def test_what_a_list_names_is_a_test(tree: str, size: str) -> None:
    """Else a file that moves takes its tests out of the list, and `make test-fast` runs them again."""
    lost = []
    for line in (ROOT / tree / f"{size}.txt").read_text().splitlines():
        file, _, name = line.partition("::")
        source = ROOT / tree / f"{file}.py"
        text = source.read_text() if source.is_file() else ""
        name, brackets, _ = name.partition("[")
        if not (source.parent.is_dir() if not name else f"def {name}{'(' if brackets else ''}" in text):
            lost.append(line)
    assert not lost
