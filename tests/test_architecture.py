"""The rules of the house (scripts/house.py) see what breaks them; and what importing isograd costs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "isograd"
FILES = sorted(SOURCE.rglob("*.py"))

_spec = spec_from_file_location("house", ROOT / "scripts" / "house.py")
assert _spec and _spec.loader
house = module_from_spec(_spec)
_spec.loader.exec_module(house)


@pytest.mark.medium
def test_no_rule_of_the_house_is_broken() -> None:
    run = subprocess.run([sys.executable, "scripts/house.py"], cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.medium
def test_the_page_of_files_is_up_to_date() -> None:
    """python scripts/house.py --tree > docs/tree.md"""
    assert (ROOT / "docs" / "tree.md").read_text() == house.tree_page()


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("from torch import distributed", "torch.distributed"),
        ("from torch import distributed as d", "torch.distributed"),
        ("import torch.distributed as dist", "torch.distributed"),
        ("from torch.distributed import all_reduce", "torch.distributed"),
        ("from torch.distributed.tensor import DTensor", "torch.distributed"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed"),
        ("import torch as t\nt.distributed.barrier()", "torch.distributed"),
        ("import pickle as p", "pickle"),
        ("from pickle import load", "pickle"),
        ("import dill", "pickle"),
        ("import torch\ntorch.load(f)", "unsafe reading"),
        ("from torch import load as read\nread(f)", "unsafe reading"),
        ("from yaml import load\nload(f)", "unsafe reading"),
        ("import yaml\nyaml.unsafe_load(f)", "unsafe reading"),
        ("import numpy\nnumpy.load(f, allow_pickle=True)", "unsafe reading"),
        ("eval('1')", "unsafe reading"),
        ("raw.ReduceOp.AVG", "an average"),
        ("gradient / mesh.layout.world_size", "an average"),
    ],
)
def test_a_planted_breach_of_a_rule_is_seen(source: str, rule: str) -> None:
    assert house.forbidden(source, "isograd/engine/planted.py") == {rule}


@pytest.mark.parametrize("source", ["model.eval()", "yaml.safe_load(f)", "self.load(f)", "total / weight"])
def test_honest_code_breaks_no_rule(source: str) -> None:
    assert not house.forbidden(source, "isograd/engine/planted.py")


LATE = "PROGRAM = '''\n    from isograd.engine.engine import Engine, Nobody\n'''"


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        ("from isograd.engine import Nobody", 1),
        ("def late():\n    from isograd.nowhere import Engine", 1),
        (LATE, 1),
        ("from isograd.engine import Engine, step\nfrom torch import nothing", 0),
        ("TEXT = 'import Engine from isograd, or: from isograd'", 0),
    ],
)
def test_an_import_of_a_name_that_is_nowhere_is_seen(source: str, lost: int) -> None:
    assert len(house.imports_of_nothing(source)) == lost


@pytest.mark.parametrize(
    "source",
    [
        "from isograd.engine import Engine",
        "from isograd import engine",
        "import isograd.engine",
        "def late():\n    from isograd.engine.engine import Engine",
        "if TYPE_CHECKING:\n    from isograd.engine import Engine",
    ],
)
def test_a_planted_import_against_the_arrows_is_seen(source: str) -> None:
    known = {house.module_of(name): name for name in house.files()}
    found = house.imports(source, known)
    assert [name for name in found if not house.allowed("nn", house.package_of(name))]


@pytest.mark.parametrize("source", ["from ..engine import Engine", "from importlib import import_module as load"])
def test_an_import_that_the_text_does_not_spell_out_is_refused(source: str) -> None:
    assert house.forbidden(source, "isograd/nn/planted.py")


def test_circles_are_found() -> None:
    assert house.circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [["a", "b", "c"]]


def test_fields_that_are_set_after_construction_are_counted() -> None:
    source = """
class A:
    def __init__(self): self.a = 1; self.b = {}
    def go(self, other):
        self.a += 1
        self.b["x"] = 1
        other.seen = 1
        other.state["x"]["y"] = 1
        setattr(other, MARK, 1)
        with set_attributes(self, c=1), set_attributes(*others, **numbers): pass
"""
    found = {"A.a", "A.b", "A.c", "?.seen", "?.state", "?.MARK", "?.numbers"}
    assert house.reassigned(house.ast.parse(source)) == found


def test_the_command_line_and_layouts_need_no_torch() -> None:
    script = (
        "import sys, isograd.cli.main, isograd; isograd.Layout.parse('dp2')\n"
        "try: isograd.cli.main.main(['--help'])\n"
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
        "print(sorted(new & {'transformers', 'matplotlib', 'pandas', 'pyarrow', 'tyro'}))\n"
        "print(sorted(m for m in set(sys.modules) - before if m.startswith(('torch._inductor', 'torch._dynamo.'))))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_every_error_code_is_in_the_catalogue_and_used_once_per_meaning() -> None:
    used = {code for path in house.files().values() for code in re.findall(r'"(IG\d{3})"', path.read_text())}
    listed = set(re.findall(r"^\| `(IG\d{3})`", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE))
    assert used == listed


IMAGINES = ("comm/", "plan/", "cli/rehearse.py", "cli/main.py", "verify/watch/")  # verify/watch: a word of its comments


def test_no_program_knows_whether_its_world_is_imagined() -> None:
    """Engine, models, pipelines and all else run unchanged: only comm, mesh.py and the plans made of it know."""
    for path in FILES:
        name = str(path.relative_to(SOURCE))
        if name != "core/mesh.py" and not name.startswith(IMAGINES):
            assert not re.search(r"imagin|FakeTensor|\b_member\b", path.read_text()), name


def help_text() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "isograd.cli.main", "--help"], check=True, capture_output=True, text=True
    )
    return done.stdout


def test_help_names_every_command() -> None:
    from isograd.cli.main import COMMANDS

    assert all(command in help_text() for command in COMMANDS)
