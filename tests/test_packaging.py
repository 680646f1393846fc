"""What a person gets who installs isograd: recipes, a version, extras that exist, help without waiting (FAILURES D)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import isograd
from isograd.cli.main import COMMANDS, main
from isograd.cli.recipes import about, recipes
from isograd.train import reading

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_recipes_are_listed_in_one_line_each_that_fits_80_columns(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(recipes())]] == sorted(recipes())
    assert {"quickstart", "pretrain", "pairs", "finetune"} <= set(recipes())
    assert all(len(line) <= 80 for line in lines)


def test_new_writes_a_config_that_can_be_read_and_never_overwrites(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in recipes().items():
        assert main(["new", name]) == 0
        assert Path(f"{name}.yaml").read_text() == text
        assert reading.load(f"{name}.yaml").config.steps > 0
        assert about(text).endswith(".")
    assert main(["new", "quickstart"]) == 2
    assert "IG651: quickstart.yaml exists already" in capsys.readouterr().err
    assert main(["new", "quickstart", "another.yaml"]) == 0
    assert main(["new", "quickstart", "no/such/folder.yaml"]) == 2
    assert main(["new", "quikstart"]) == 2
    assert "IG650: no recipe is called 'quikstart' (did you mean 'quickstart'?)" in capsys.readouterr().err


def test_the_version_is_stated_once(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"isograd {isograd.__version__}\n"
    assert PROJECT["project"]["dynamic"] == ["version"]
    said = subprocess.run([sys.executable, "-m", "isograd", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"isograd {isograd.__version__}\n"


def test_every_extra_that_a_message_or_page_names_exists() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "Makefile"]
    named = {
        extra.strip()
        for file in files
        for group in re.findall(r"(?:isograd|'\.)\[([a-z, ]+)\]", file.read_text())
        for extra in group.split(",")
    }
    assert named
    assert named <= extras


def test_metadata_says_what_a_package_page_needs() -> None:
    project = PROJECT["project"]
    assert any("Python :: 3.11" in line for line in project["classifiers"])
    assert project["keywords"]


VERBS = {
    "data": ("build", "show", "tokenizer", "verify"),
    "ckpt": ("inspect", "verify", "diff", "convert"),
    "config": ("show", "schema"),
    "verify": ("run", "compare", "bisect", "merge", "bugs"),
}
HELPED = [["--help"], *([c, "--help"] for c in COMMANDS), *([c, v, "--help"] for c, vs in VERBS.items() for v in vs)]


@pytest.mark.medium
@pytest.mark.parametrize("words", HELPED, ids=" ".join)
def test_help_answers_at_once_within_80_columns_and_without_torch(words: list[str]) -> None:
    script = (
        "import sys; from isograd.cli.main import main\n"
        f"try: main({words!r})\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = os.environ | {"COLUMNS": "80"}
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=env).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert said.startswith("usage: isograd")
    assert max(map(len, said.splitlines())) <= 80
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.33


@pytest.mark.slow
@pytest.mark.timeout(1800)  # builds, trains on four ranks, proves layouts, watches a program
def test_from_an_empty_folder_with_only_the_wheel_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    """The first hour of issue 15: build, install, new, train, verify. Other packages are those of this environment."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    sources = tmp_path / "sources"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        to = sources / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            to.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).is_file():
            to.write_bytes((ROOT / name).read_bytes())
    build = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    for folder in (sources, sources / "verify"):
        subprocess.run([sys.executable, "-c", build], cwd=folder, env=env, check=True, capture_output=True)
    (wheel,) = (sources / "dist").glob("*.whl")
    (packed,) = (sources / "dist").glob("*.tar.gz")
    (verifier,) = (sources / "verify" / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        assert {f"isograd/recipes/{name}.yaml" for name in recipes()} <= set(opened.namelist())
    with tarfile.open(packed) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    wanted = ("recipes/pairs.yaml", "examples/quickstart.py", "docs/train.md", "src/isograd/recipes/pairs.yaml")
    assert set(wanted) <= inside

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], env=env, check=True)
    python = tmp_path / "venv/bin/python"
    library = next((tmp_path / "venv/lib").glob("python*")) / "site-packages"
    (library / "shared.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--ignore-installed", wheel, verifier], env=env, check=True, capture_output=True)

    empty = tmp_path / "empty"
    empty.mkdir()

    home = subprocess.run(
        [python, "-c", "import isograd; print(isograd.__file__)"],
        cwd=empty,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path / "venv") in home.stdout
    proof = "from isograd_verify.command import registered; print(registered().ABOUT)"
    found = subprocess.run([python, "-c", proof], cwd=empty, env=env, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("Prove")
    (empty / "train.py").write_text(RIGHT)  # stands for a program of the reader's
    (empty / "my_case.py").write_text(block("docs/prove-your-own.md", "my_case.py"))
    (python.parent / "torchrun").write_text(f"#!{python}\nfrom torch.distributed.run import main\nmain()\n")
    (python.parent / "torchrun").chmod(0o755)
    env |= {"PATH": f"{python.parent}{os.pathsep}{env['PATH']}", "OMP_NUM_THREADS": "1"}
    said = {}
    for command in readme_commands():
        done = subprocess.run(
            shlex.split(command), cwd=empty, env=env, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        said[command] = done.stdout
    assert "step    60/60" in said["isograd train quickstart.yaml"]
    assert "PASS" in said["isograd verify quickstart.yaml"]
    assert len(said) >= 10


RIGHT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 10)))
optimizer = torch.optim.AdamW(model.parameters())
own = torch.Generator().manual_seed(dist.get_rank())
for _ in range(3):
    rows, labels = torch.randn(6, 8, generator=own), torch.randint(10, (6,), generator=own)
    nn.functional.cross_entropy(model(rows), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def readme_commands() -> list[str]:
    """The commands of isograd that README.md shows, in its order, each once."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [re.split(r"\s+#", line.removeprefix("$ "))[0] for text in blocks for line in text.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith(("isograd ", "isograd-verify "))))


def block(page: str, name: str) -> str:
    (found,) = re.findall(rf"<!-- file: {name} -->\n```\w+\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return str(found)


def test_the_readme_shows_commands_of_both_distributions() -> None:
    found = readme_commands()
    assert found[:3] == ["isograd new quickstart", "isograd train quickstart.yaml", "isograd verify quickstart.yaml"]
    assert {"isograd", "isograd-verify"} == {command.split()[0] for command in found}


# -- where isograd comes from: FAILURES E13 --------------------------------------------------------------------------

BARE = re.compile(r"pip3? install (?:-\S+ )*[\"']?isograd(?![\w.\[-])|install: *[\"']?isograd\b")


def test_nothing_of_ours_installs_a_name_that_nobody_has_registered() -> None:
    """The action and the README did: whoever registered the name would have run code in others' CI."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    wrong = []
    for name in listed:
        path = ROOT / name
        read = path.suffix in (".py", ".md", ".yml", ".yaml", ".toml", ".cfg", "") and path.is_file()
        if read and name != "tests/test_packaging.py" and BARE.search(path.read_text(errors="ignore")):
            wrong.append(name)
    assert not wrong
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert "isograd" not in action["inputs"]["install"]["default"]
    first = action["runs"]["steps"][0]
    assert first["env"]["HERE"] == "${{ github.action_path }}" and 'pip install "$HERE/verify"' in first["run"]
    whole = re.compile(r"pip install (?!\./verify)[^\n`]*(?<= )['\"]?\.(?:\[|['\"]?(?:[\s`]|$))")
    apart = [name for name in listed if name.endswith(".md") and whole.search((ROOT / name).read_text())]
    assert not apart, "isograd needs isograd-verify, which no index has: ./verify is installed in the same command"
    assert whole.search("pip install .\n") and whole.search("pip install '.[hf]'")
    assert not whole.search("pip install ./verify .")
    assert BARE.search("pip install isograd") and not BARE.search("pip install 'isograd[hf]'")


def test_the_bill_of_materials_lists_what_is_installed_and_the_hash_of_a_file(tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    wheel.write_bytes(b"abc")
    command = [sys.executable, str(ROOT / "scripts" / "sbom.py"), str(tmp_path / "sbom.json"), str(wheel)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads((tmp_path / "sbom.json").read_text())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    versions = {part["name"]: part.get("version") for part in found["components"]}
    assert {"isograd", "torch", "numpy", "safetensors", "pydantic"} <= versions.keys()
    assert versions["torch"] == metadata.version("torch")
    digest = hashlib.sha256(b"abc").hexdigest()
    assert found["components"][-1]["hashes"] == [{"alg": "SHA-256", "content": digest}] and digest in said


def test_the_threat_model_is_short_and_names_readers_and_limits() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert len(text.splitlines()) <= 60
    assert all(word in text for word in ("safetensors", "parquet", "256 MiB", "scripts/sbom.py", "IG666", "masks"))


def test_the_versions_that_the_page_calls_tested_are_those_that_are_installed() -> None:
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for names in (("torch",), ("transformers", "peft", "accelerate"), ("trl", "lightning")):
        assert f"| {', '.join(pinned[name] for name in names)} |" in page
    assert PROJECT["project"]["requires-python"] == ">=3.11" and "torch>=2.11" in PROJECT["project"]["dependencies"]
    assert isograd.__version__ in page
