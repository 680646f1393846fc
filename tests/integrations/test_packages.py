"""The libraries of the integrations: which versions were tested, and what is said where one is not installed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TESTED = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
INTEGRATIONS = ("accelerate", "deepspeed", "lightning", "peft", "transformers", "trl", "verl")


@pytest.mark.parametrize("package", INTEGRATIONS)
def test_the_tested_version_is_pinned_shown_and_offered_by_an_extra(package: str) -> None:
    offered = [name for needs in EXTRAS.values() for name in needs if re.split(r"\W", name)[0] == package]
    assert offered
    page = (ROOT / "docs" / "integrations.md").read_text()
    assert re.search(rf"^\| {package} \| {re.escape(TESTED[package])} \|", page, re.MULTILINE)


@pytest.mark.peers
@pytest.mark.parametrize("package", INTEGRATIONS)
def test_tests_of_doors_run_with_the_pinned_version_where_it_is_installed(package: str) -> None:
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert found.partition("+")[0] == TESTED[package]


WITHOUT = """
import importlib.abc, sys

class Without(importlib.abc.MetaPathFinder):
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in sys.argv[1].split(","):
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import isograd as ig
for integration in ("trainer", "Accelerator", "LightningStrategy", "FabricStrategy", "verl"):
    try:
        getattr(ig.integrations, integration)
    except ig.IsogradError as error:
        print(integration, error.code, *str(error).rpartition("pip install ")[2].split()[0:2])
print(ig.integrations.deepspeed.initialize.__name__)
"""


@pytest.mark.medium
def test_without_any_of_the_libraries_isograd_imports_and_each_door_says_what_to_install() -> None:
    """In a process that finds none of them. DeepSpeed's loop needs no package of DeepSpeed."""
    missing = ",".join((*INTEGRATIONS, "lightning_fabric", "pytorch_lightning", "tokenizers"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, missing], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    assert said == [
        ["trainer", "IG850", "transformers", "accelerate"],
        ["Accelerator", "IG850", "accelerate"],
        ["LightningStrategy", "IG850", "lightning"],
        ["FabricStrategy", "IG850", "lightning"],
        ["verl", "IG850", "verl"],
        ["initialize"],
    ]
