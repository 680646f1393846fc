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
    "outside": {"errors"},
    "inside": {"outside"},
    "stored": {"errors", "outside"},
    "yamls": set(),
    "scratch": set(),
    "once": {"errors"},
    "comm": {"errors", "once", "scratch"},
    "mesh": {"comm", "errors", "layout"},
    "random": {"errors"},
    "terms": {"errors"},
    "matmul": set(),
    "products": {"matmul", "once"},
    "inputs": {"comm", "errors", "mesh", "random"},
    "tallies": {"comm", "mesh"},
    "contract": {"comm", "errors", "mesh", "explain"},
    "explain": {"contract"},
    "pipeline": {"comm", "contract", "errors", "mesh", "products", "terms"},
    "sequence": {"comm", "contract", "errors", "layout", "mesh", "once", "random"},
    "nn": {
        "comm",
        "contract",
        "errors",
        "inputs",
        "matmul",
        "mesh",
        "once",
        "products",
        "random",
        "sequence",
        "tallies",
    },
    # pipeline: engine.train_step runs every layout; the pipeline knows no engine
    "engine": {"comm", "contract", "errors", "inputs", "matmul", "mesh", "pipeline", "stored", "tallies", "terms"},
    # stored: Hugging Face weights by rows
    "models": {
        "contract",
        "errors",
        "layout",
        "mesh",
        "nn",
        "outside",
        "pipeline",
        "random",
        "sequence",
        "stored",
        "terms",
        "yamls",
    },
    # engine: the proof at start trains one step; its parameters on the meta device are the Engine's
    "hugging": {
        "comm",
        "contract",
        "engine",
        "errors",
        "inputs",
        "mesh",
        "nn",
        "outside",
        "pipeline",
        "random",
        "sequence",
        "stored",
    },
    # engine: what trains a case that brings no step of its own
    "verify": {
        "comm",
        "contract",
        "corpus",
        "engine",
        "errors",
        "layout",
        "mesh",
        "outside",
        "pipeline",
        "tallies",
        "terms",
        "scratch",
        "screen",
    },
    "corpus": set(),  # programs as their users write them
    "verbs": set(),
    "screen": set(),
    "new": {"errors"},
    "completion": {"new", "train"},
    "__main__": {"cli"},
    "data": {"errors", "inside", "outside", "verbs"},
    # comm: snapshots of ranks are compared and counted; models: Hugging Face in and out; data: what ends an answer
    "checkpoint": {
        "data",
        "screen",
        "verbs",
        "comm",
        "inside",
        "contract",
        "engine",
        "errors",
        "mesh",
        "models",
        "outside",
        "stored",
    },
    # checkpoint: copies of ranks become one
    "resilience": {"checkpoint", "comm", "engine", "errors", "layout", "mesh", "scratch"},
    # nn: encoders with experts
    "contrastive": {
        "comm",
        "contract",
        "engine",
        "errors",
        "matmul",
        "mesh",
        "nn",
        "once",
        "random",
        "tallies",
        "terms",
    },
    "network": {"__version__", "comm", "errors", "verbs"},
    "losses": {"comm", "errors", "mesh", "once"},
    "train": {
        "__version__",
        "screen",
        "nn",
        "checkpoint",
        "comm",
        "contract",
        "contrastive",
        "data",
        "engine",
        "errors",
        "hugging",
        "inside",
        "layout",
        "losses",
        "mesh",
        "models",
        "outside",
        "pipeline",
        "plan",
        "random",
        "resilience",
        "scratch",
        "sequence",
        "stored",
        "terms",
        "yamls",
    },
    "doors": {"checkpoint", "comm", "engine", "errors", "inside", "layout", "mesh", "new", "outside", "terms"},
    "plan": {
        "comm",
        "contract",
        "engine",
        "errors",
        "inside",
        "layout",
        "mesh",
        "models",
        "nn",
        "outside",
        "pipeline",
        "sequence",
        "yamls",
    },
    "cases": {"errors", "layout", "train", "mesh", "models", "nn", "random", "verify"},
    "cli": {
        "__version__",
        "completion",
        "new",
        "screen",
        "cases",
        "checkpoint",
        "contract",
        "data",
        "doors",
        "train",
        "network",
        "errors",
        "layout",
        "mesh",
        "models",
        "pipeline",
        "verify",
    },
    "__init__": {
        "checkpoint",
        "comm",
        "contract",
        "contrastive",
        "data",
        "doors",
        "engine",
        "errors",
        "hugging",
        "layout",
        "losses",
        "mesh",
        "models",
        "nn",
        "pipeline",
        "random",
        "sequence",
        "terms",
        "train",
        "verify",
    },
}


# The verifier's own rooms: what each may import of the others. Files beside them (prove.py, command.py) may import all.
VERIFY = {
    "tolerances": set(),
    "record": {"tolerances"},
    "watch": {"record", "tolerances"},
    "tell": {"record", "tolerances"},
    "judge": {"record", "tell", "tolerances"},
    "compare": {"judge", "record", "tell", "tolerances"},
    "run": {"compare", "judge", "record", "tell", "watch"},
}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(source: str, here: str) -> set[str]:
    """The rooms a file imports; what its text does not spell out ('relative', 'by name') counts as one more room."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.module != "isograd" else [f"isograd.{a.name}" for a in node.names]
            found |= {"relative"} if node.level else set()
            found |= {"by name"} if node.module == "importlib" else set()
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {"everything"} if "isograd" in names else set()
            found |= {"by name"} if "importlib" in names else set()
        found |= {name.split(".")[1] for name in names if name.startswith("isograd.")}
    return found - {here}


def spelled(node: ast.AST) -> str:
    """'torch.distributed.all_reduce' for a chain of attributes, '' for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{spelled(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


PICKLERS = ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
UNSAFE_YAML = ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load")
UNSAFE = ("torch.load", "eval", "exec", "__import__", *UNSAFE_YAML)
# Programs and objects of others, and the one file of ours that talks to other ranks.
SPEAKS_DISTRIBUTED = ("comm/raw.py", "verify/watch/foreign.py", "verify/watch/watched.py", "verify/run/corpus.py")
CORPUS = "corpus/"  # programs as their users write them
LOADS_BY_NAME = ("__init__.py", "pipeline/__init__.py", "verify/__init__.py", "verify/run/corpus.py")
CARRIES_RANKS = ("comm/launch.py", "comm/worker.py")


def forbidden(source: str, name: str) -> set[str]:
    """The rules of the house that a file breaks. Imports are followed through `as` and `from`."""
    found = set()
    speaks = name in SPEAKS_DISTRIBUTED or name.startswith(CORPUS)
    tree = ast.parse(source)
    called: dict[str, str] = {}  # a name in this file -> what it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            called |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names if alias.asname}
            reached = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            called |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            reached = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        if any(f"{r}.".startswith("torch.distributed.") for r in reached) and not speaks:
            found.add("torch.distributed")
        if any(r.split(".")[0] in PICKLERS for r in reached) and name not in CARRIES_RANKS:
            found.add("pickle")
    for node in ast.walk(tree):
        first, dot, rest = spelled(node).partition(".")
        full = called.get(first, first) + dot + rest
        if f"{full}.".startswith("torch.distributed.") and not speaks:
            found.add("torch.distributed")
        if full in UNSAFE or (isinstance(node, ast.keyword) and node.arg == "allow_pickle"):
            found.add("unsafe reading")
        if full.endswith(".AVG") or "PREMUL" in full:
            found.add("average")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and "world_size" in spelled(node.right):
            found.add("average")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_room_knows_only_the_rooms_below_it(path: Path) -> None:
    loads_by_name = {"by name"} if str(path.relative_to(SOURCE)) in LOADS_BY_NAME else set()
    assert imported_rooms(path.read_text(), room(path)) <= ARROWS[room(path)] | loads_by_name


def test_arrows_point_downwards_only() -> None:
    """Contract and explain, its printing half, are one room in two files; nothing else stands in a circle."""
    arrows = {here: below - {"explain"} for here, below in ARROWS.items()}
    while leaves := {here for here, below in arrows.items() if not below & set(arrows)}:
        arrows = {here: below for here, below in arrows.items() if here not in leaves}
    assert not arrows, f"a circle among {sorted(arrows)}"


@pytest.mark.parametrize("here", VERIFY)
def test_a_room_of_the_verifier_knows_only_the_rooms_below_it(here: str) -> None:
    for path in (f for f in FILES if f.relative_to(SOURCE).parts[:2] in (("verify", here), ("verify", f"{here}.py"))):
        known = {name.split(".")[2] for name in imported_modules(path) if name.startswith("isograd.verify.")}
        assert known <= VERIFY[here] | {here}, path


@pytest.mark.parametrize("here", ["watch", "judge", "compare"])
def test_a_limit_between_rounding_and_an_error_is_in_tolerances_py(here: str) -> None:
    """Not looked at: numbers that keep a division from one by zero, and the steps of the Taylor test (numerics.py)."""
    for path in (SOURCE / "verify" / here).rglob("*.py"):
        constants = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        limits = [value for value in constants if isinstance(value, float) and 1e-30 < value < 0.2]
        assert not limits or path.name == "numerics.py", f"{path}: {limits}"


def test_no_two_files_of_the_verifier_import_one_another() -> None:
    files = {".".join(p.relative_to(SOURCE.parent).with_suffix("").parts): p for p in FILES if room(p) == "verify"}
    below = {name: imported_modules(path) & set(files) for name, path in files.items()}
    while leaves := {name for name, known in below.items() if not known & set(below)}:
        below = {name: known for name, known in below.items() if name not in leaves}
    assert not below, f"a circle among {sorted(below)}"


def imported_modules(path: Path) -> set[str]:
    """'isograd.verify.record.sketch' and the like, wherever in a file they are imported but for the sake of types."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and spelled(node.test) == "TYPE_CHECKING":
            node.body = []
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {n.module for n in imports} | {f"{n.module}.{alias.name}" for n in imports for alias in n.names}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_is_short_tells_why_it_exists_and_does_nothing_forbidden(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    assert ast.get_docstring(ast.parse(text)), "open with why the file exists"
    assert not forbidden(text, str(path.relative_to(SOURCE)))


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
        ("raw.ReduceOp.AVG", "average"),
        ("gradient / mesh.layout.world_size", "average"),
    ],
)
def test_a_planted_breach_of_a_rule_is_seen(source: str, rule: str) -> None:
    assert forbidden(source, "engine/planted.py") == {rule}


@pytest.mark.parametrize("source", ["model.eval()", "yaml.safe_load(f)", "self.load(f)", "total / weight"])
def test_honest_code_breaks_no_rule(source: str) -> None:
    assert not forbidden(source, "engine/planted.py")


@pytest.mark.parametrize(
    "source",
    [
        "from isograd.engine import Engine",
        "from isograd import engine",
        "import isograd.engine",
        "from ..engine import Engine",
        "from .. import engine",
        "import isograd\nisograd.engine",
        "import importlib\nimportlib.import_module('isograd.engine')",
        "from importlib import import_module as load\nload('isograd.engine')",
    ],
)
def test_a_planted_import_against_the_arrows_is_seen(source: str) -> None:
    assert not imported_rooms(source, "nn") <= ARROWS["nn"]


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


IMAGINES = (
    "comm/",
    "plan/",
    "train/rehearse.py",
    "cli.py",
    "verify/watch/",
)  # the verifier's watchers imagine nothing: a word of their comments


def test_no_program_knows_whether_its_world_is_imagined() -> None:
    """Engine, models, pipelines and all else run unchanged: only comm, mesh.py and the plans made of it know."""
    for path in FILES:
        name = str(path.relative_to(SOURCE))
        if name != "mesh.py" and not name.startswith(IMAGINES):
            assert not re.search(r"imagin|FakeTensor|\b_member\b", path.read_text()), name


def help_text() -> str:
    done = subprocess.run([sys.executable, "-m", "isograd.cli", "--help"], check=True, capture_output=True, text=True)
    return done.stdout


def test_help_names_every_command() -> None:
    from isograd.cli import COMMANDS

    assert all(command in help_text() for command in COMMANDS)


def test_the_tree_names_every_file_once() -> None:
    """docs/tree.md; the corpus is one folder there."""
    text = (ROOT / "docs" / "tree.md").read_text().split("```")[1]
    named = re.findall(r"^([\w/]+\.py) ", text, re.MULTILINE)
    files = [str(path.relative_to(SOURCE)) for path in FILES if path.name not in ("__init__.py", "__main__.py")]
    assert sorted(named) == sorted(name for name in files if not name.startswith(CORPUS))
