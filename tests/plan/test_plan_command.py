"""`isograd plan` and `isograd machine`: what they print, recommend, write and refuse."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from isograd.cli.main import main
from isograd.core.layout import Layout
from isograd.models import TransformerConfig
from isograd.plan import machine
from isograd.plan.step_time import predict
from isograd.plan.work import Work
from isograd.train import reading
from isograd.train.resources import work_of

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = TransformerConfig(vocab=32000, hidden=2048, layers=16, heads=16, kv_heads=8, mlp=5632)
H100 = machine.load("h100")


def work(**more: object) -> Work:
    return dataclasses.replace(Work(model=SMALL, length=4096, batch=64, micro_batches=8), **more)


def test_plan_prints_the_best_layouts_and_what_to_run(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", str(RECIPES / "llama-1b.yaml"), "--gpus", "4", "--top", "2", "--write", "best.yaml"]
    assert main([*words, "--failures-per-rank-hour", "2e-5"]) == 0
    said = capsys.readouterr().out
    for part in ("on 4 x h100", "candidates, of which", "isograd train", "a checkpoint every", "  2 "):
        assert part in said, said
    assert "  3 " not in said
    best = reading.load("best.yaml").config
    assert f'--layout "{best.layout}"' in said
    assert Layout.parse(best.layout).world_size == 4
    assert main([*words]) == 2  # the file exists
    assert "IG274" in capsys.readouterr().err
    assert main(["plan", words[1], "--layout", "dp4 tp2 sp zero1", "--machine", "a100"]) == 0
    assert "optimizer" in capsys.readouterr().out
    assert main(["plan", words[1], "--layout", "dp4", "--failures-per-rank-hour", "1e9"]) == 0
    assert "nothing is trained and saved" in capsys.readouterr().out


def test_a_layout_that_does_not_fit_gets_no_command_but_what_would_fit(capsys) -> None:
    assert main(["plan", str(RECIPES / "llama-8b.yaml"), "--layout", "tp2 sp", "--batch", "64"]) == 1
    said = capsys.readouterr().out
    assert "does not fit: needs " in said and "isograd train" not in said
    assert 'GB with --layout "tp' in said
    assert main(["plan", str(RECIPES / "llama-8b.yaml"), "--layout", "dp512 zero1", "--batch", "256"]) == 2
    said = capsys.readouterr().err
    assert "--layout, --batch: batch 256 over dp 512" in said and "at least dp x micro_batches = 8192" in said


def test_what_is_recommended_is_written_and_started_and_is_not_what_is_warned_of(tmp_path: Path, capsys) -> None:
    file = tmp_path / "best.yaml"
    words = ["--gpus", "4", "--data.length", "8192", "--batch", "512", "optimizer.lr=1e-4", "--write", str(file)]
    assert main(["plan", str(RECIPES / "llama-1b.yaml"), *words]) == 0
    said = capsys.readouterr().out
    assert "512 sequences x 8,192 tokens a step" in said
    warned = re.search(r"memory is tight: ([\d, ]+) would", said)
    number = re.search(r"to run number (\d+), the first whose memory is not tight:", said)
    assert warned is not None and number is not None, said
    before = {str(place) for place in range(1, int(number[1]))}
    assert before <= {*warned[1].split(", ")} and number[1] not in warned[1].split(", ")
    best = reading.load(file).config
    assert re.search(rf"^ +{number[1]} {best.layout} +{best.micro_batches} ", said, re.M)
    assert f'--layout "{best.layout}" --batch 512 --micro_batches {best.micro_batches} ' in said
    assert "--data.length 8192 optimizer.lr=1e-4 --emit slurm" in said
    assert (best.data.length, best.batch, best.optimizer.lr) == (8192, 512, 1e-4)
    step = predict(work_of(best), Layout.parse(best.layout), H100)
    assert f"{best.layout}: {512 * 8192 / 4 / step.seconds:,.0f} tokens a second per device" in said


def test_a_layout_on_the_command_line_stands_in_place_of_the_config_s(tmp_path: Path, capsys) -> None:
    """Batch 512 over the 16 data ranks of the config's layout are 32 sequences: not so under this layout."""
    file, layout = tmp_path / "run.yaml", ["--layout", "dp4 tp2 sp zero1"]
    text = (RECIPES / "llama-8b.yaml").read_text()
    file.write_text(text.replace("micro_batches: 16", "micro_batches: 128"))
    assert main(["plan", str(file)]) == 2
    assert "over dp 16 is 32 sequences" in capsys.readouterr().err
    assert main(["plan", str(file), *layout, "--model.recompute", "selective"]) == 0
    said = capsys.readouterr().out
    assert (
        main(["plan", str(RECIPES / "llama-8b.yaml"), *layout, "--micro_batches=128", "model.recompute=selective"]) == 0
    )
    assert capsys.readouterr().out == said.replace(str(file), str(RECIPES / "llama-8b.yaml"))
    assert "--micro_batches 128 --accumulate local --model.recompute selective --emit slurm" in said


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--gpus", "0"], "IG600"),
        (["--gpus", "9" * 20], "IG600"),
        (["--layout", "dp8 zero1", "--picture", "no/such/folder/step.svg"], "IG274"),
        (["--gpus", "8", "--batch", "1000000000", "--picture", "no-step.svg"], "IG275"),
        (["--gpus", "8", "--picture", "step.gif"], "IG274"),
        (["--layout", "dp8 zero1", "--failures-per-rank-hour", "1e-320"], "IG277"),
        (["--layout", "dp4", "--gpus", "8"], "IG275"),
        (["--layout", "dp3"], "IG630"),
        (["--layout", "tp64 sp"], "IG275"),
        (["--layout", " "], "IG630"),
        (["--machine", "h101"], "IG272"),
        (["--gpu", "8"], "IG630"),
        (["--gpus", "8", "--micro_batches", "64"], "IG600"),
        (["--gpus", "8", "layout=dp8 zero1"], "IG600"),
        (["--layout", "dp8 zero1", "--data.lengths", "64"], "IG630"),
    ],
)
def test_plan_refuses_what_makes_no_sense(words: list[str], code: str, capsys) -> None:
    assert main(["plan", str(RECIPES / "llama-1b.yaml"), *words]) == 2
    assert code in capsys.readouterr().err


def test_what_could_not_be_written_is_refused_before_anything_is_measured(tmp_path: Path, capsys) -> None:
    began = time.process_time()
    for file in (str(RECIPES / "llama-1b.yaml"), str(tmp_path), str(tmp_path / "none" / "here.yaml"), "a" * 400):
        assert main(["machine", "measure", file]) == 2
        assert capsys.readouterr().err.startswith("IG274")
    assert main(["plan", "a" * 400]) == 2
    assert capsys.readouterr().err.startswith("IG631")
    assert time.process_time() - began < 5


def test_plan_refuses_a_config_that_does_not_parse_and_a_machine_without_the_link_it_needs(
    tmp_path: Path, capsys
) -> None:
    broken, alone = tmp_path / "broken.yaml", tmp_path / "alone.yaml"
    broken.write_text("version: 1\nmodel: [unclosed\n")
    assert main(["plan", str(broken)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("IG6") and "broken.yaml" in said
    alone.write_text(machine.text(dataclasses.replace(H100, between=None, units=0)))
    words = ["plan", str(RECIPES / "llama-1b.yaml"), "--machine", str(alone), "--layout", "dp16 zero1"]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("IG273: h100 has no link between nodes")


def test_operators_without_a_cost_are_named_and_the_step_is_said_to_be_longer(capsys) -> None:
    from isograd.plan.costs import left_out

    plain = work()
    assert left_out(plain) == []
    muon = work(muon=True, model=dataclasses.replace(SMALL, qk_norm=True, dropout=0.1))
    assert left_out(muon) == ["dropout", "norms of queries and keys", "Muon's products"]
    assert (
        main(["plan", str(RECIPES / "qwen3-30b-a3b.yaml"), "--layout", "dp8 ep8 zero1", "--batch", "128"]) == 1
    )  # does not fit
    assert "at the least: nothing is counted for norms of queries" in capsys.readouterr().out


def test_planning_needs_no_torch_before_it_reads_a_config() -> None:
    code = "import sys; from isograd.cli.main import main; main(['machine']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_plan_says_that_it_works_before_torch_is_imported() -> None:
    """On a terminal; torch alone takes seconds, and a search of 64 devices ten."""
    code = (
        "import sys; sys.stderr.isatty = lambda: True\n"
        "import builtins; real = print\n"
        "def said(*words, **more):\n"
        "    real(*words, 'torch' in sys.modules, **more)\n"
        "    sys.exit(7)\n"
        "builtins.print = said\n"
        "from isograd.cli.main import main; main(['plan', 'run.yaml', '--gpus', '64'])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "planning run.yaml ... False\n")


HERE = {
    "name": "here", "about": "two cores", "memory_gb": 8, "reserved_gb": 0.3, "memory_gb_s": 10,
    "tflops": {"fp32": 0.1}, "devices": 2, "inside": {"gb_s": 1, "latency_us": 50},
    "crowded": {"slower": 1, "link": {"gb_s": 0.5, "latency_us": 100}},
    "rates": {"matmul": {"fp32": 1}, "attention": 0.5, "memory": 1, "links": 1, "operator_us": 5, "spread": 0.3},
}  # fmt: skip


def test_a_layout_of_more_ranks_than_devices_gets_a_part_of_each(tmp_path: Path, capsys) -> None:
    """Four ranks on two cores: each gets half of a core."""
    file = tmp_path / "here.yaml"
    file.write_text(yaml.safe_dump(HERE))
    assert main(["plan", str(RECIPES / "quickstart.yaml"), "--machine", str(file), "--layout", "dp2 tp2 sp zero1"]) == 0
    assert "dp2 tp2 sp zero1" in capsys.readouterr().out
    one, two = (machine.from_dict(HERE | {"devices": n}, "here").shared(4) for n in (4, 2))
    assert (two.peak("fp32"), two.inside.latency_us) == (one.peak("fp32") / 2, 100)
    assert "plan recipes/quickstart.yaml --machine runs/here.yaml --layout" in (RECIPES.parent / "Makefile").read_text()


@pytest.mark.slow
def test_this_computer_can_be_measured(tmp_path: Path, capsys) -> None:
    file = tmp_path / "here.yaml"
    assert main(["machine", "measure", str(file)]) == 0
    here = machine.load(str(file))
    assert 1e-3 < here.tflops["fp32"] < 100
    assert 0.05 < here.inside.gb_s < 1000
    described = work(model=dataclasses.replace(SMALL, hidden=256, layers=2, mlp=512), length=128, dtype="fp32")
    assert predict(described, Layout.parse("dp2 zero1"), here).seconds > 0


def test_layouts_that_nearly_fill_a_device_are_said_to_be_tight_and_are_not_recommended() -> None:
    from isograd.cli.plan import recommended, tight

    def needing(*gigabytes: float) -> list[Any]:
        return [SimpleNamespace(memory=SimpleNamespace(total=needed * 1e9)) for needed in gigabytes]

    def place(*gigabytes: float) -> tuple[int, str]:
        best = needing(*gigabytes)
        one, said = recommended(best, device)
        return best.index(one), said

    device = machine.load("h100")
    room = device.memory_gb - device.reserved_gb
    assert place(0.89 * room, 0.5 * room) == (0, "the first")
    assert place(0.99 * room, 0.91 * room, 0.89 * room, 0.5 * room) == (
        2,
        "number 3, the first whose memory is not tight",
    )
    assert place(0.99 * room, 0.91 * room, 0.95 * room) == (1, "number 2, the least tight: the memory of all is tight")
    assert tight(needing(0.5 * room, 0.89 * room, 1.1 * room), device) == ""
    assert tight(needing(0.5 * room, 0.91 * room, 0.99 * room), device).startswith("memory is tight: 2, 3 would take")
