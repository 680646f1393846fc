"""The verifier is a distribution of its own: it imports nothing of isograd, and works where isograd is not."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
SOURCE = HOME / "src" / "isograd_verify"
FILES = sorted(SOURCE.rglob("*.py"))
NEEDED = {"isograd_verify", "torch", "rich", "safetensors", "tomli"}  # of pyproject.toml
ASKED_FOR = {"transformers", "lightning", "pytorch_lightning", "deepspeed", "pytest", "typing_extensions"}
WITHOUT_IT = """
import sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "isograd":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Nowhere())
"""


def imported(path: Path) -> set[str]:
    """The packages that a file imports anywhere, in functions and under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 10))):
        if isinstance(node, ast.ImportFrom):
            found.add("relative" if node.level else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.partition(".")[0] for name in found}


def test_the_verifier_imports_nothing_of_isograd_and_little_of_others() -> None:
    known = NEEDED | ASKED_FOR | set(sys.stdlib_module_names)
    assert {path.name: extra for path in FILES if (extra := imported(path) - known)} == {}


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python in which isograd cannot be imported."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent), "COLUMNS": "80"}
    command = [sys.executable, "-c", WITHOUT_IT + code, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.medium
def test_every_module_can_be_imported_without_isograd() -> None:
    names = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in FILES]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith(("__main__", "sitecustomize"))]
    done = run("".join(f"import {name}\n" for name in names) + "assert 'isograd' not in sys.modules")
    assert done.returncode == 0, done.stderr


MAIN = "from isograd_verify.command import main\nsys.exit(main(sys.argv[1:]))"


@pytest.mark.medium
def test_a_bug_is_planted_and_named_without_isograd() -> None:
    code = "if __name__ == '__main__':\n    " + MAIN.replace("\n", "\n    ")
    done = run(code, "bugs", "mean-of-means")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean-of-means" in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["compare", "--help"]])
def test_help_imports_no_torch(words: list[str]) -> None:
    code = MAIN.replace("sys.exit", "assert not {'torch', 'rich'} & set(sys.modules)\nsys.exit")
    done = run(code, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: isograd-verify")
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("case", ["run.yaml", "my_case.py:case"])
def test_what_isograd_proves_is_refused_by_the_verifier_alone_with_what_to_install(case: str) -> None:
    done = run(MAIN, case)
    assert done.returncode == 2
    assert "IG625" in done.stderr and "install isograd beside" in done.stderr


@pytest.mark.medium
def test_an_engine_registers_what_it_proves(tmp_path: Path) -> None:
    """By an entry point: here of a package of which there is only the metadata that an installation leaves."""
    (tmp_path / "engine.py").write_text(
        "from isograd_verify.tell.findings import Subject\n"
        "from isograd_verify.tell.report import Report\n"
        "ABOUT = 'Prove it.'\n"
        "def options(parser): parser.add_argument('case')\n"
        "def prove(options): return Report(options.case, [Subject('dp2', 2, compared=True, errors={'w': 0.0})])\n"
    )
    about = tmp_path / "engine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: engine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[isograd_verify.proof]\nengine = engine\n")
    done = run(f"sys.path.insert(0, {str(tmp_path)!r})\n{MAIN}", "run.yaml")
    assert done.returncode == 0, done.stderr
    assert "run.yaml" in done.stdout and "PASS" in done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as an installation builds it, of a copy: nothing is left in the tree."""
    sources = tmp_path_factory.mktemp("sources")
    files = [HOME / name for name in ("pyproject.toml", "setup.py", "isograd_verify.pth", "MANIFEST.in", "README.md")]
    for path in (*files, *SOURCE.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            to = sources / path.relative_to(HOME)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes())
    build = "from setuptools import build_meta as b; b.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=sources, check=True, capture_output=True)
    (found,) = (sources / "dist").glob("isograd_verify-*.whl")
    return found


def test_the_wheel_is_small_and_has_all_that_watching_needs(wheel: Path) -> None:
    assert wheel.stat().st_size < 500_000
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        about = opened.read(next(n for n in names if n.endswith("METADATA"))).decode()
        points = opened.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert {"isograd_verify.pth", *(f"isograd_verify/{path.relative_to(SOURCE)}" for path in FILES)} <= names
    assert not [name for name in names if name.startswith(("tests", "survey"))]
    needs = set(re.findall(r"^Requires-Dist: ([\w-]+)", about, re.MULTILINE))
    assert needs - {"transformers"} == NEEDED - {"isograd_verify"}
    assert "isograd-verify = isograd_verify.command:main" in points and "[pytest11]" in points


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python in whose environment the wheel is; what it needs, torch among it, is that of this environment."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    library = next((home / "lib").glob("python*")) / "site-packages"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(library)
    (library / "shared.pth").write_text(sysconfig.get_path("purelib"))
    return home / "bin" / "python"


PROGRAM = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

def train(rank=None, world=None, divide="mean"):
    if rank is not None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 7))
    model, rows = DDP(net), 3 + 2 * rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(rows, 5, generator=draw), torch.randint(7, (rows,), generator=draw)
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction=divide)
        if divide == "sum":
            everyone = torch.tensor(float(rows))
            dist.all_reduce(everyone)
            loss = loss * dist.get_world_size() / everyone
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

if __name__ == "__main__":
    if "spawn" in sys.argv:
        mp.spawn(train, (2, sys.argv[-1]), nprocs=2)
    else:
        train(divide=sys.argv[-1])
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "PORT")
SHELL = 'for RANK in 0 1; do export RANK WORLD_SIZE=2 MASTER_ADDR=127.0.0.1; "$0" program.py $1 & done; wait'


@pytest.mark.medium
@pytest.mark.parametrize("launcher", ["torchrun", "spawn", "shell"])
@pytest.mark.parametrize(("divide", "verdict"), [("mean", "BUG"), ("sum", "PASS")])
def test_one_environment_variable_watches_whatever_starts_ranks(  # V3
    python: Path, tmp_path: Path, launcher: str, divide: str, verdict: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"ISOGRAD_VERIFY": "report.json", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = {
        "torchrun": [python, *(port if word == "PORT" else word for word in TORCHRUN), "program.py", divide],
        "spawn": [python, "program.py", "spawn", divide],
        "shell": ["bash", "-c", SHELL, python, divide],
    }[launcher]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == verdict, done.stderr
    found = [f["bug"] for s in report["subjects"] for f in s["findings"] if f["verdict"] == "BUG"]
    assert found == (["mean-of-means"] if divide == "mean" else [])
    assert "isograd-verify: " in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"program.py", "report.json", "__pycache__"}


def test_without_the_variable_nothing_of_the_verifier_is_loaded(python: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ISOGRAD", "PYTHONPATH"))}
    code = "import sys; print([name for name in sys.modules if name.startswith('isograd')])"
    for more, expected in (({}, "[]"), ({"ISOGRAD_VERIFY": "folder"}, "[]")):
        done = subprocess.run([python, "-c", code], env=environment | more, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
