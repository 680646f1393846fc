"""The house keeps its shape: import arrows, one file for torch.distributed, no unsafe reading, no averages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "isograd"
FILES = sorted(SOURCE.rglob("*.py"))

# A room may import what stands on the right of its arrow, and itself.
ARROWS = {
    "errors": set(),
    "layout": {"errors"},
    "comm": {"errors"},
    "mesh": {"comm", "errors", "layout"},
    "random": {"errors"},
    "contract": {"comm", "errors", "mesh", "explain"},
    "explain": {"contract"},
    "nn": {"comm", "contract", "errors", "mesh", "random"},
    "engine": {"comm", "contract", "errors", "mesh"},
    "models": {"contract", "errors", "mesh", "nn", "random"},
    "cli": {"contract", "errors", "layout", "mesh", "models"},
    "__init__": {"comm", "contract", "engine", "errors", "layout", "mesh", "models", "nn", "random"},
}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "isograd" else [f"isograd.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("isograd.")}
    return found - {room(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_room_knows_only_the_rooms_below_it(path: Path) -> None:
    assert imported_rooms(path) <= ARROWS[room(path)]


def without_strings(path: Path) -> str:
    """The code of a file, no comments and no docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value.value = ""
    return ast.unparse(tree)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_is_short_tells_why_it_exists_and_does_nothing_forbidden(path: Path) -> None:
    text, code, name = path.read_text(), without_strings(path), str(path.relative_to(SOURCE))
    assert len(text.splitlines()) <= 500
    assert ast.get_docstring(ast.parse(text)), "open with why the file exists"
    if name != "comm/raw.py":
        assert not re.search(r"torch\.distributed|\bdist\.", code), "torch.distributed is called in comm/raw.py only"
    if name not in ("comm/launch.py", "comm/worker.py"):
        assert not re.search(r"\bpickle\.|import pickle", code), "pickle crosses pipes to our own ranks, nothing else"
    assert not re.search(r"torch\.load|(?<!\.)\beval\(|\bexec\(|yaml\.load\(|__import__", code)
    assert not re.search(r"\.AVG\b|PREMUL|/ *world_size", code), "gradients are summed, never averaged"


def test_the_command_line_and_layouts_need_no_torch() -> None:
    script = (
        "import sys, isograd.cli, isograd; isograd.Layout.parse('dp2')\n"
        "try: isograd.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_importing_everything_loads_only_what_it_says() -> None:
    """No optional package, and none of torch's heavy corners, comes along with `import isograd`."""
    script = (
        "import sys, torch; before = set(sys.modules)\n"
        "import isograd; [getattr(isograd, n) for n in isograd.__all__]\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(new & {'transformers', 'matplotlib', 'pandas', 'safetensors', 'tyro'}))\n"
        "print(sorted(m for m in set(sys.modules) - before if m.startswith(('torch._inductor', 'torch._dynamo.'))))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_every_error_code_is_in_the_catalogue_and_used_once_per_meaning() -> None:
    used = {code for path in FILES for code in re.findall(r'"(IG\d{3})"', path.read_text())}
    listed = set(re.findall(r"^\| `(IG\d{3})`", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE))
    assert used == listed


def test_tracked_files_name_no_machine_path_and_no_registry() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    for name in listed:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".yaml", ".json", "") and path.is_file():
            text = path.read_text(errors="ignore")
            assert not re.search(r"/(work|root|home)/[a-z]+/|py" + r"pi\.org|python" + "hosted", text), name


def help_text() -> str:
    done = subprocess.run([sys.executable, "-m", "isograd.cli", "--help"], check=True, capture_output=True, text=True)
    return done.stdout


def test_help_names_every_command() -> None:
    from isograd.cli import COMMANDS

    assert all(command in help_text() for command in COMMANDS)
