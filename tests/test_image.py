"""The Dockerfile: what it copies is there, and its commands run in a folder that holds nothing else."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHIM = """#!/bin/sh
# pip as it is, with nothing fetched: other packages are those of this environment
if [ "$1 $2 $3" = "-m pip install" ]; then shift 3; set -- -m pip install --no-index --no-deps \
--no-build-isolation --target "$SITE" "$@"; fi
exec "{python}" "$@"
"""


def steps() -> list[tuple[str, str]]:
    """(instruction, its words) of each line of the Dockerfile."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_image_is_made_of_files_that_are_here_and_extras_that_there_are() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    kinds = [kind for kind, _ in steps()]
    assert kinds[:2] == ["ARG", "FROM"] and set(kinds) <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD"}
    copied = [name for kind, words in steps() if kind == "COPY" for name in words.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert copied and all((ROOT / name).exists() and name not in ignored for name in copied)
    (named,) = re.findall(r"'\.\[(.+?)\]'", " ".join(words for kind, words in steps() if kind == "RUN"))
    assert set(named.split(",")) <= set(extras)
    assert [json.loads(words) for kind, words in steps() if kind == "ENTRYPOINT"] == [["isograd"]]


@pytest.mark.slow
def test_the_steps_of_the_image_run_without_docker(tmp_path: Path) -> None:
    site, tools = tmp_path / "site", tmp_path / "tools"
    tools.mkdir()
    (tools / "python").write_text(SHIM.format(python=sys.executable))
    (tools / "python").chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"SITE": str(site), "PYTHONPATH": str(site)}
    environment |= {"PATH": os.pathsep.join([str(tools), str(site / "bin"), environment["PATH"]])}
    here, said = tmp_path, ""
    for kind, words in steps():
        if kind == "WORKDIR":
            here = tmp_path / words.strip("/")
            here.mkdir(exist_ok=True)
        elif kind == "COPY":
            *names, to = words.split()
            for name in names:
                target = here / name if to == "./" else here / to
                if (ROOT / name).is_dir():
                    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
                    shutil.copytree(ROOT / name, target, symlinks=True, ignore=skip)
                else:
                    shutil.copy(ROOT / name, target)
        elif kind == "RUN":
            run = ["sh", "-c", words]
            done = subprocess.run(run, check=False, cwd=here, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
            said += done.stdout
    assert "dp2 tp2: 4 ranks" in said and "quickstart" in said
    assert (site / "isograd" / "recipes" / "quickstart.yaml").is_file() and (site / "isograd_verify").is_dir()
    (command,) = [words for kind, words in steps() if kind == "CMD"]
    last = shlex.join(["isograd", *json.loads(command)])
    done = subprocess.run(["sh", "-c", last], check=True, cwd=here, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("usage: isograd")
