"""scripts/full.py runs every test in pieces, goes on where it stopped, and writes what came out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "full.py"
FILES = {
    "tests/a/test_one.py": "def test_right():\n    pass\n",
    "tests/b/test_two.py": "def test_wrong():\n    assert 1 == 2\n\ndef test_right():\n    pass\n",
    "verify/tests/test_three.py": "import pytest\n\n@pytest.mark.skip\ndef test_left_out():\n    pass\n",
    ".gitignore": "runs/\n__pycache__/\nnotes/\n",
}


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)


def git(folder: Path, *words: str) -> None:
    own = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
    subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.medium
def test_pieces_are_run_one_after_another_and_a_new_commit_begins_anew(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    refused = call(tmp_path)
    assert refused.returncode == 2 and "commit first" in refused.stderr
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "x")
    first = call(tmp_path, "--minutes", "0")
    assert first.returncode == 3 and "2 of 3 pieces are left" in first.stdout
    last = call(tmp_path)
    assert last.returncode == 1 and "[2 of 3] tests/b" in last.stdout
    page = (tmp_path / "notes" / "full.md").read_text()
    assert ": 2 passed, 1 failed, 1 skipped in" in page and "failed: `tests.b.test_two::test_wrong`" in page
    (tmp_path / "tests/b/test_two.py").write_text("def test_right():\n    pass\n")
    git(tmp_path, "commit", "-qam", "y")
    again = call(tmp_path)
    assert again.returncode == 0 and "[1 of 3] tests/a" in again.stdout
