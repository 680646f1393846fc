"""action.yml runs what the command line understands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

from isograd_verify.command import parser_for

ROOT = Path(__file__).parents[2]


def test_the_action_s_command_is_one_of_the_command_line_and_its_reports_are_what_it_promises() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    install, run = action["runs"]["steps"]
    assert install["env"] == {"HERE": "${{ github.action_path }}", "INSTALL": "${{ inputs.install }}"}
    given = {name: one.get("default", "torchrun --nproc-per-node 2 train.py") for name, one in action["inputs"].items()}
    for name, value in {**install["env"], **run["env"]}.items():
        word = re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value)
        run["run"] = run["run"].replace(f"${name}", given[word[1]] if word else value)
    words = shlex.split(run["run"])
    assert words[:2] == ["isograd-verify", "run"]
    options = parser_for("run", "isograd-verify", None).parse_args(words[2:])
    assert options.beside_one
    assert options.command == ["--", "torchrun", "--nproc-per-node", "2", "train.py"]
    assert {options.junit, options.sarif} == {one["value"] for one in action["outputs"].values()}


def test_the_page_uses_inputs_that_the_action_has() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "verify" / "docs" / "verify-in-ci.md").read_text(), re.DOTALL)
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = yaml.safe_load(block)["jobs"]["gradients"]["steps"]
    (used,) = [s for s in steps if "isograd@" in s["uses"]]
    assert set(used["with"]) <= set(action["inputs"])
    assert steps[-1]["with"]["sarif_file"] == action["outputs"]["sarif"]["value"]
