"""Configs: every mistake at once, with its file, line and nearest name; every value with its origin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from isograd.cli.main import main
from isograd.cli.train import config as config_command
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.errors import ConfigError
from isograd.models import Transformer
from isograd.train import reading
from isograd.train.config import Config
from isograd.train.language import model_config

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = """version: 1
run: runs/x
layout: dp2
model:
  preset: tiny-llama
data:
  sources:
    - builtin: stdlib
  length: 8
optimizer:
  lr: 1e-3
steps: 5
batch: 4
"""


def write(folder: Path, text: str = SMALL) -> Path:
    file = folder / "run.yaml"
    file.write_text(text)
    return file


def problems(file: Path, *options: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        reading.load(file, options, ["nproc", "resume"])
    return caught.value.what.splitlines()[1:]


def test_a_value_knows_where_it_comes_from(tmp_path: Path) -> None:
    file = write(tmp_path)
    loaded = reading.load(file, ["--optimizer.min_lr", "1e-4", "--data.sources.0.weight=2.0"])
    assert loaded.config.optimizer.lr == 1e-3  # YAML 1.1 alone reads 1e-3 as a word
    assert loaded.config.data.sources[0].weight == 2.0
    assert loaded.origin(("optimizer", "lr")) == f"{file}:11"
    assert loaded.origin(("optimizer", "min_lr")) == "command line"
    assert loaded.origin(("optimizer", "warmup")) == "default"


def test_all_mistakes_are_told_at_once_with_line_and_nearest_name(tmp_path: Path) -> None:
    text = (
        SMALL.replace("  lr: 1e-3", "  lrr: 1e-3").replace("steps: 5", "steps: five").replace("length: 8", "length: 0")
    )
    file = write(tmp_path, text)
    found = problems(file, "--optimizer.clpi", "2.0", "--nprocs", "3")
    assert len(found) == 6
    told = "\n".join(found)
    assert f"{file}:11: unknown key 'optimizer.lrr' (did you mean 'lr'?)" in told
    assert f"{file}:10: 'optimizer.lr' is missing: the highest learning rate" in told
    assert f"{file}:12: steps: Input should be a valid integer, not 'five'" in told
    assert f"{file}:9: data.length: Input should be greater than 0, not 0" in told
    assert "command line: --optimizer.clpi: unknown key 'optimizer.clpi' (did you mean 'clip'?)" in told
    assert "command line: --nprocs: unknown key 'nprocs' (did you mean 'nproc'?)" in told


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("layout: dp2", "layout: dq2", "layout"),
        ("batch: 4", "batch: 3", "make batch a multiple of dp"),
        ("  preset: tiny-llama", "  preset: tiny-llama\n  path: x", "preset or path, not both"),
        ("    - builtin: stdlib", "    - weight: 1.0", "path or builtin"),
        ("steps: 5", "steps: true", "valid integer"),
        ("  lr: 1e-3", "  lr: 1e-3\n  warmup: 6", "longer than the run's 5 steps"),
        ("  lr: 1e-3", "  lr: 1e-3\n  min_lr: 1.0", "min_lr 1 is above optimizer.lr 0.001"),
        ("steps:", "accumulate: sharded\nreproducible: true\nsteps:", "take accumulate local"),
        ("  lr: 1e-3", "  lr: 1e-3\n  betas: [0.9]", "optimizer.betas"),
        ("model:\n  preset: tiny-llama", "model: 3", "model"),
    ],
)
def test_what_cannot_be_is_refused_in_words(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in "\n".join(problems(write(tmp_path, SMALL.replace(old, new))))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("- 1\n", "IG632"), ("a: [", "IG632"), ("", "IG632"), (SMALL + "steps: 6\n", "IG633"),
        ("x: !!python/object/apply:os.system [ls]", "IG632"), (SMALL.replace("version: 1", "version: 9"), "IG630"),
        (SMALL + "# " + "x" * (1 << 20), "IG632"),
    ],
)  # fmt: skip
def test_files_that_are_no_config_are_refused(tmp_path: Path, text: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reading.load(write(tmp_path, text))
    assert caught.value.code == code


def test_a_missing_file_and_an_option_without_a_value_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="IG631"):
        reading.load(tmp_path / "none.yaml")
    assert "not an option with a value" in problems(write(tmp_path), "--steps")[0]
    assert "inside a plain value" in problems(write(tmp_path), "--steps.x", "1")[0]


def test_a_word_with_an_equals_sign_sets_a_field_before_and_behind_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path).rename("steps=2.yaml")
    assert config_command(["show", "steps=7", str(file), "optimizer.lr=2e-3", "layout=dp2 zero1"]) == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "7" in shown["steps"].split() and "0.002" in shown["optimizer.lr"] and "dp2 zero1" in shown["layout"]
    with pytest.raises(ConfigError, match=r"unknown key 'optimizer.lrr' \(did you mean 'lr'\?\)"):
        config_command(["show", str(file), "optimizer.lrr=1"])
    with pytest.raises(ConfigError, match="--steps is given twice"):
        config_command(["show", str(file), "steps=1", "--steps", "2"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--optimzer.lr", "1"], "command line: --optimzer.lr: unknown key 'optimzer' (did you mean 'optimizer'?)"),
        (["--steps", "6", "--batch", "1"], "command line: --batch: batch 1 over dp 2"),
        (["--optimizer.warmup", "9"], "command line: --optimizer.warmup: optimizer.warmup 9 is longer"),
        (["--model.path=x"], "command line: --model.path: model: give preset or path, not both"),
        (["--model", "3"], "command line: --model: Input should be"),
        (["--steps", "6", "--steps=7"], "command line: --steps is given twice"),
        (["--layout", " "], "command line: --layout: give a layout"),
        (["--run="], "command line: --run: give the path of a folder"),
        (["steps=two"], "command line: steps=: Input should be a valid integer, not 'two'"),
        (["steps=6", "--batch=1"], "command line: --batch: batch 1 over dp 2"),
        (["optimzer.lr=1"], "command line: optimzer.lr=: unknown key 'optimzer' (did you mean 'optimizer'?)"),
        (["steps=6", "steps=7"], "command line: steps= is given twice"),
        (["--optimizer.lr=1e-5", "optimizer.min_lr=1e-4"], "command line: --optimizer.lr, optimizer.min_lr=: optim"),
    ],
)
def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(tmp_path: Path, options: list[str], said: str) -> None:
    [found] = problems(write(tmp_path), *options)
    assert found.strip().startswith(said)


def test_fields_of_the_file_that_contradict_each_other_are_blamed_on_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, SMALL.replace("batch: 4", "batch: 3"))
    [found] = problems(file, "--steps", "6")
    line = file.read_text().splitlines().index("batch: 3") + 1  # of the first of the fields that is in the file
    assert found.strip().startswith(f"{file}:{line}: batch 3 over dp 2")


def test_the_layout_of_one_rank_may_be_the_number_that_yaml_reads(tmp_path: Path) -> None:
    assert reading.load(write(tmp_path), ["--layout", "1"]).config.layout == str(Layout.parse("1"))
    assert "Input should be a valid string" in problems(write(tmp_path), "--layout", "true")[0]
    assert "unknown token '2'" in problems(write(tmp_path), "--layout", "2")[0]


def test_a_written_config_reads_back_to_itself(tmp_path: Path) -> None:
    first = reading.load(write(tmp_path)).config
    again = reading.load(write(tmp_path, reading.written(first))).config
    assert again == first


def test_a_config_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        reading.load(write(tmp_path)).config.steps = 9  # type: ignore[misc]


def test_every_field_is_described_for_editors(capsys: pytest.CaptureFixture[str]) -> None:
    assert config_command(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    parts = [schema, *schema["$defs"].values()]
    bare = [f for part in parts for f, v in part["properties"].items() if "description" not in v and "$ref" not in v]
    assert not bare
    assert all(part["additionalProperties"] is False for part in parts)


def test_show_prints_every_value_with_its_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config_command(["show", str(write(tmp_path)), "--steps", "7"]) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith("steps"))
    assert line.split() == ["steps", "7", "command", "line"]
    assert all(reading.dotted(place) in shown for place, _ in reading.flat(reading.load(write(tmp_path)).config))


@pytest.mark.medium
@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_is_a_config_whose_model_fits_its_layout(recipe: Path) -> None:
    config: Config = reading.load(recipe).config
    layout = Layout.parse(config.layout)
    if config.model.path:
        return  # its model is the user's
    for rank in (0, layout.world_size - 1):
        Transformer(model_config(config), Mesh.unbound(layout, rank), device="meta")


def test_a_key_that_looks_like_a_branch_of_a_union_is_still_an_unknown_key(tmp_path: Path) -> None:
    """FAILURES B7, found by tests/fuzz.py: IndexError instead of an error."""
    path = tmp_path / "run.yaml"
    path.write_text("a[[b: 1\n")
    with pytest.raises(ConfigError, match=r"unknown key 'a\[\[b'"):
        reading.load(path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--lr=1e-3"], "--lr: unknown key 'lr' (did you mean 'optimizer.lr'?)"),
        (["--packing=whole"], "--packing: unknown key 'packing' (did you mean 'data.packing'?)"),
        (["--EVERY=3"], "(did you mean 'checkpoint.every' or 'evaluate.every' or 'log.every'?)"),
        (["--optimizer.betas=0.9,0.95"], "not '0.9,0.95' (a list is written [0.9,0.95])"),
        (["--data.sources=[{path: x, builtin: stdlib}]"], "command line: --data.sources: data.sources.0: give path or"),
        (["--data.length=4", "--data={length: 8}"], "command line: --data is given twice"),
        (["--data={length: 8, sources: [{builtin: stdlib}]}", "--data.length=4"], "--data.length is given twice"),
    ],
)
def test_an_option_is_told_what_was_meant(tmp_path: Path, options: list[str], says: str) -> None:
    (found,) = problems(write(tmp_path), *options)
    assert says in found


def test_what_an_option_replaces_comes_from_the_command_line(tmp_path: Path) -> None:
    loaded = reading.load(write(tmp_path), ["--data.sources=[{path: a, weight: 2.0}]"])
    assert {loaded.origin(("data", "sources", 0, name)) for name in ("path", "weight")} == {"command line"}
    assert loaded.origin(("data", "sources", 0, "builtin")) == "default"  # the file's line is gone


def test_a_value_of_any_length_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(write(tmp_path)), "steps=" + "[" * 5000]) == 2
    assert "IG630" in capsys.readouterr().err
