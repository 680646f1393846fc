"""isograd ckpt on the command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from isograd.checkpoint import CheckpointManager, folder
from isograd.cli.main import main
from isograd.train.startup import _folder
from tests.checkpoint import toys
from tests.checkpoint.test_damage import flip, rewritten, shard
from tests.train.test_loop import config_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1, and step 2 in which two rows of one tensor, another tensor's all and the steps are different. Step 2 has
    NaN, as checkpoints of older versions may."""
    home = tmp_path_factory.mktemp("saved")
    engine = toys.engine_of("1", "gpt2", dtype=torch.float32)
    with CheckpointManager(home, engine) as keeper:
        toys.train(engine, 0, 1, gradients=False)
        keeper.save(1, {"data": 8})
        keeper.wait()
        with torch.no_grad():
            engine.model.embed.weight[[3, 4]] += 0.5
            engine.model.norm.bias.copy_(torch.full((24,), float("nan")))
        with patch.object(CheckpointManager, "_refuse_not_finite", lambda *_: None):
            keeper.save(2, {"data": 16})
    return home


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str]:
    code = main(["ckpt", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_inspect_shows_the_newest_and_lists_tensors(saved: Path, capsys) -> None:
    code, said = run(capsys, "inspect", saved, "--tensors", "*norm.bias")
    assert code == 0
    for part in (
        "step       2",
        "layout     1",
        "AdamW",
        "lr 0.01",
        "vocab 97",
        "data 16",
        "F32",
        "model      37 tensors",
    ):
        assert part in said, said
    listed = [line.split()[0] for line in said.splitlines() if line.startswith("  ") and "norm.bias" in line]
    assert listed == ["model/norm.bias", "optimizer/exp_avg/norm.bias", "optimizer/exp_avg_sq/norm.bias"]
    code, said = run(capsys, "inspect", saved / "step-00000001", "--json")
    assert json.loads(said)["step"] == 1


def test_inspect_fits_the_terminal(saved: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAILURES D: tables were wider than the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    code, said = run(capsys, "inspect", saved / "step-00000001", "--tensors")
    assert code == 0
    assert "optimizer/exp_avg_sq/blocks.0.attention.out.weight" in said
    lines = [line for line in said.splitlines() if str(saved) not in line]  # a path has no spaces to break it at
    assert max(map(len, lines)) <= 80


def test_a_run_s_own_folder_stands_for_its_checkpoints(saved: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "checkpoints").symlink_to(saved)
    assert "step       2" in run(capsys, "inspect", tmp_path)[1]


def test_verify_names_what_is_damaged(saved: Path, tmp_path: Path, capsys) -> None:
    code, said = run(capsys, "verify", saved)
    assert code == 0
    assert "whole: 112 pieces have their hashes" in said
    place = tmp_path / "broken"
    shutil.copytree(saved / "step-00000002", place)
    flip(shard(place), -1)
    code, said = run(capsys, "verify", place)
    assert code == 3
    assert "1 of 112 pieces are damaged" in said
    assert "in rank-00000.safetensors: its bytes do not have the hash" in said
    (place / "manifest.json").write_text("{}")
    code, said = run(capsys, "inspect", place)
    assert code == 2
    assert "IG936" in said


def test_diff_names_tensors_rows_and_how_far_they_are_apart(saved: Path, capsys) -> None:
    assert run(capsys, "diff", saved, saved / "step-00000002") == (0, "equal bit for bit: 112 tensors\n")
    code, said = run(capsys, "diff", saved / "step-00000001", saved / "step-00000002")
    assert code == 3
    lines = said.splitlines()
    assert lines[0].startswith("model/embed.weight: 2 of 97 rows differ (3-4), by at most 0.5, together ")
    assert lines[1].startswith("model/norm.bias: 24 of 24 rows differ (0-23), by at most nan")
    assert lines[2] == "2 differences"


def test_diff_of_a_damaged_file_says_which(saved: Path, tmp_path: Path, capsys) -> None:
    cut = Path(shutil.copytree(saved / "step-00000002", tmp_path / "step-00000002"))
    file = min(cut.glob("rank-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    code, said = run(capsys, "diff", cut, saved / "step-00000001")
    assert code == 2 and "IG936" in said and file.name in said


def test_diff_tells_models_and_steps_apart(saved: Path, tmp_path: Path, capsys) -> None:
    engine = toys.engine_of("1", "qwen", dtype=torch.float64)
    with CheckpointManager(tmp_path, engine) as keeper:
        toys.train(engine, 0, 2, gradients=False)
        keeper.save(2)
    code, said = run(capsys, "diff", saved, tmp_path)
    assert code == 3
    assert "model/positions.weight: only in the first" in said
    assert "model/blocks.2.norm1.weight: only in the second" in said
    assert "model/embed.weight: F32 [97, 24] and F64 [101, 24]" in said
    assert "optimizer/step: differs for 37 parameters" in said


def test_convert_writes_a_folder_that_transformers_loads(saved: Path, tmp_path: Path, capsys) -> None:
    from transformers import AutoModelForCausalLM

    words = ("convert", saved / "step-00000001", tmp_path / "out", "--dtype", "bf16")
    code, said = run(capsys, *words)
    assert code == 0
    assert "read again and compared" in said
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    code, said = run(capsys, *words)
    assert code == 2
    assert "IG943" in said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["inspect", "nowhere"], ["IG935", "no such folder"]),
        (["diff", "a"], ["IG600", "B"]),
        (["convert", "a", "b", "--max-shard-gb", "0"], ["IG600", "'0' is not a number"]),
        (["inspect", "a", "--tensor", "x", "--jsn"], ["IG600", "--tensors", "--json"]),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(words: list[str], parts: list[str], capsys) -> None:
    code, said = run(capsys, *words)
    assert code == 2
    assert all(part in said for part in parts), said


def test_help_needs_no_torch() -> None:
    script = (
        "import sys\nfrom isograd.cli.main import main\n"
        "try: main(['ckpt', '--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


# -- names of others: FAILURES E16 -----------------------------------------------------------------------------------

EVIL = "model/\x1b]0;owned\x07\x1b[2J\u202eweight\x9b31m"


def test_names_with_control_characters_reach_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They came out as they are: the terminal's title, the screen and the colour obeyed them."""
    with CheckpointManager(tmp_path, toys.engine_of("1", "gpt2")) as keeper:
        keeper.save(1)
    place = tmp_path / "step-00000001"

    def renamed(m: Any) -> None:
        m["tensors"][EVIL] = m["tensors"].pop("model/norm.bias")
        m["layout"] = "\x1b[31m1"
        m["extra"] = {"\x1b[5m": "\r\x1b[K"}

    rewritten(place, renamed)
    said = ""
    for words in (["inspect", "--tensors"], ["verify"], ["diff"], ["convert"]):
        more = [str(place)] * (words[0] == "diff") + [str(tmp_path / "out")] * (words[0] == "convert")
        main(["ckpt", words[0], str(place), *more, *words[1:]])
        found = capsys.readouterr()
        said += found.out + found.err
    assert all(c.isprintable() or c in "\n\t" for c in said)
    assert "\\x1b]0;owned" in said and "\\u202eweight" in said


def test_a_folder_with_another_scripts_digits_is_no_checkpoint(tmp_path: Path) -> None:
    """int('٠٠٠٠٠٠٠٩') is 9, and the run said that it resumes from there."""
    for name in ("step-٠٠٠٠٠٠٠٩", "step-0000000９", "step-00000003", "step-" + "9" * 40):
        (tmp_path / name).mkdir()
    assert folder.checkpoints(tmp_path) == [(3, tmp_path / "step-00000003")]
    folder.prune(tmp_path, 1, None)
    assert len(list(tmp_path.iterdir())) == 4


def test_what_a_run_says_it_resumes_from_is_what_it_resumes_from(tmp_path: Path) -> None:
    config = config_of(tmp_path, tmp_path)
    for name in ("step-00000003", "step-٠٠٠٠٠٠٠٩", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert _folder(config, "auto").endswith("resumes from checkpoints/step-00000003")
