"""Damage is found by hashes, named, and an older checkpoint is taken by all ranks; nothing damaged is ever returned."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isograd.checkpoint import CheckpointManager, NotFinite, folder, manifest
from isograd.checkpoint.manifest import Damage
from isograd.checkpoint.read import Reader
from isograd.engine import state
from isograd.errors import CheckpointError, EngineError
from tests import fuzz as mutations
from tests.checkpoint import toys


def saved_twice(home: Path, layout: str = "1") -> None:
    engine = toys.engine_of(layout, "gpt2")
    with CheckpointManager(home, engine) as keeper:
        for step in (1, 2):
            toys.train(engine, step - 1, step, gradients=False)
            keeper.save(step)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def shard(place: Path) -> Path:
    return sorted(place.glob("*.safetensors"))[-1]


def largest_number_in_header(place: Path) -> None:
    content = bytearray(shard(place).read_bytes())
    content[0:8] = (2**60).to_bytes(8, "little")
    shard(place).write_bytes(content)


def swapped(place: Path) -> None:
    """Two tensors of one shape change places: every byte is there, and every size."""
    found = json.loads((place / manifest.NAME).read_text())
    a, b = (found["tensors"][f"model/blocks.{i}.mlp.up.weight"] for i in (0, 1))
    a["xxh3_128"], b["xxh3_128"] = b["xxh3_128"], a["xxh3_128"]
    text = json.dumps(found).encode()
    (place / manifest.NAME).write_bytes(text)
    (place / manifest.HASH).write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit at the end": (lambda p: flip(shard(p), -1), "do not have the hash"),
    "a flipped bit in the middle": (lambda p: flip(shard(p), shard(p).stat().st_size // 2), "do not have the hash"),
    "a header that lies": (largest_number_in_header, "header"),
    "a truncated shard": (lambda p: shard(p).write_bytes(shard(p).read_bytes()[:-8]), "bytes instead of"),
    "an empty shard": (lambda p: shard(p).write_bytes(b""), "0 bytes instead of"),
    "a missing shard": (lambda p: shard(p).unlink(), "is missing"),
    "a flipped bit in the manifest": (lambda p: flip(p / manifest.NAME, 300), "manifest.json does not have the hash"),
    "an empty manifest": (lambda p: (p / manifest.NAME).write_bytes(b""), "manifest.json does not have the hash"),
    "no manifest": (lambda p: (p / manifest.NAME).unlink(), "cannot be read"),
    "no hash of the manifest": (lambda p: (p / manifest.HASH).unlink(), "cannot be read"),
    "tensors that changed places": (swapped, "model/blocks."),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("two")
    saved_twice(home)
    return home


@pytest.mark.medium
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_said_once_with_the_place_and_the_older_checkpoint_is_taken(
    two: Path, tmp_path: Path, kind: str
) -> None:
    home = tmp_path / "home"
    shutil.copytree(two, home)
    break_it, said = DAMAGES[kind]
    break_it(home / folder.name_of(2))
    engine = toys.engine_of("1", "gpt2", seed=3)
    with CheckpointManager(home, engine) as keeper:
        with pytest.warns(UserWarning, match="loaded step-00000001") as warned:
            found = keeper.load()
        assert found is not None
        assert found.step == 1
        assert len(warned) == 1
        assert "step-00000002: " in str(warned[0].message)
        assert said in str(warned[0].message)
        reader = Reader(home / folder.name_of(1))
        for name, parameter in engine.model.named_parameters():
            assert torch.equal(parameter, reader.read(f"model/{name}"))
        with pytest.raises(CheckpointError, match="IG936"):
            keeper.load(home / folder.name_of(2))
        break_it(home / folder.name_of(1))
        with pytest.raises(CheckpointError, match=r"IG936: every checkpoint in .* is damaged"):
            keeper.load()


def test_a_load_that_failed_half_way_leaves_nothing_to_train_on(two: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(two, home)
    flip(shard(home / folder.name_of(2)), -1)
    engine = toys.engine_of("1", "gpt2", seed=3)
    with CheckpointManager(home, engine) as keeper:
        with pytest.raises(CheckpointError, match="IG936"):
            keeper.load(home / folder.name_of(2))
        for _ in range(2):
            with pytest.raises(EngineError, match=r"IG559(.|\n)*a load of step-00000002 that failed half way"):
                toys.train(engine, 2, 3, gradients=False)
        assert keeper.load(home / folder.name_of(1)) is not None
        toys.train(engine, 1, 2, gradients=False)


def test_damage_names_the_tensor(two: Path, tmp_path: Path) -> None:
    place = tmp_path / "one"
    shutil.copytree(two / folder.name_of(2), place)
    reader = Reader(place)
    sizes = [t.shape[0] * 8 for k, t in reader.manifest.tensors.items() if k == "model/norm.bias"]
    content = bytearray(shard(place).read_bytes())
    at = content.find(bytes(memoryview(reader.read("model/norm.bias").numpy()).cast("B")))
    assert sizes and at > 0
    flip(shard(place), at + 5)
    with pytest.raises(Damage, match=r"model/norm.bias \[0:24\] in rank-00000.safetensors"):
        Reader(place).read("model/norm.bias")


def fall_back(home: Path) -> tuple[int, list[str], bool]:
    """Only what one rank reads is damaged."""
    engine = toys.engine_of("dp2 zero3", "gpt2", seed=3)
    with warnings.catch_warnings(record=True) as warned, CheckpointManager(home, engine) as keeper:
        warnings.simplefilter("always")
        found = keeper.load()
        assert found is not None
        truth = Reader(found.path).read("model/embed.weight")
        with engine.full_parameters() as model:
            same = torch.equal(model.embed.weight, truth)
    return found.step, [str(w.message) for w in warned if "loaded" in str(w.message)], same


def test_damage_that_one_rank_meets_sends_all_ranks_to_the_older_checkpoint(worlds, tmp_path: Path) -> None:
    worlds(2).run(saved_twice, tmp_path, "dp2 zero3")
    flip(shard(tmp_path / folder.name_of(2)), -1)
    answers = worlds(2).run(fall_back, tmp_path)
    assert [(step, same) for step, _, same in answers] == [(1, True), (1, True)]
    assert [len(said) for _, said, _ in answers] == [1, 0]
    assert "rank-00001.safetensors" in answers[0][1][0]


@pytest.mark.parametrize("version", [manifest.VERSION - 1, manifest.VERSION + 1], ids=["older", "newer"])
def test_a_checkpoint_of_another_format_is_refused(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path / "other", toys.engine_of("1", "gpt2")) as keeper:
        with monkeypatch.context() as patched:
            patched.setattr(manifest, "VERSION", version)
            keeper.save(1)
            keeper.wait()
        with pytest.raises(CheckpointError, match=rf"(?s)IG939.*version {version}, written by.*isograd"):
            keeper.load()


def test_no_checkpoint_is_no_error_but_a_wrong_path_is(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, toys.engine_of("1")) as keeper:
        assert keeper.load() is None
        with pytest.raises(CheckpointError, match="IG935"):
            keeper.load(tmp_path / "step-00000007")


# -- a manifest that lies, with a right hash: FAILURES E9 --------------------------------------------------------------


def rewritten(place: Path, change: Callable[[Any], object]) -> None:
    """Change the JSON of a manifest, and make its hash right."""
    found = json.loads((place / manifest.NAME).read_text())
    change(found)
    text = json.dumps(found).encode()
    (place / manifest.NAME).write_bytes(text)
    (place / manifest.HASH).write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")


NORM = "norm.bias"


def count(value: Any) -> Callable[[Any], object]:
    return lambda m: m["numbers"]["counts"]["step"].update({NORM: value})


def option(**values: Any) -> Callable[[Any], object]:
    return lambda m: m["numbers"]["groups"][0]["options"].update(values)


LIES: dict[str, tuple[Callable[[Any], object], str]] = {
    "no count": (lambda m: m["numbers"]["counts"]["step"].pop(NORM), f"step of {NORM} is not in the checkpoint"),
    "no counts": (lambda m: m["numbers"]["counts"].clear(), "step of .* is not in the checkpoint"),
    "a count of -1": (count([-1.0, "float32"]), f"counts.step.{NORM}"),
    "a count of 2^70": (count([2**70, "int64"]), f"step.{NORM}"),
    "a count of 0.999": (count([0.999, "float32"]), f"counts.step.{NORM}"),
    "2^70 as a float": (count([2.0**70, "float32"]), f"step.{NORM}"),
    "a count of a word": (count(["x", "float32"]), f"step.{NORM}"),
    "a dtype that is a function": (count([1.0, "load"]), f"step.{NORM}"),
    "a count alone": (count(1), f"counts.step.{NORM}"),
    "a stranger's count": (lambda m: m["numbers"]["counts"]["step"].update(x=[1.0, "float32"]), "counts.step.x"),
    "no moment": (lambda m: m["tensors"].pop(f"optimizer/exp_avg/{NORM}"), f"exp_avg of {NORM} is not in the"),
    "a moment of integers": (lambda m: m["tensors"][f"optimizer/exp_avg/{NORM}"].update(dtype="I64"), "exp_avg of"),
    "a rate that is a word": (option(lr="x"), "groups.0.options.lr"),
    "a negative rate": (option(lr=-1.0), "groups.0.options.*-1"),
    "betas of three": (option(betas=[0.1] * 3), "options.betas"),
    "beta of 2": (option(betas=[2.0, 0.9]), "groups.0.options.*beta"),
    "an endless option": (option(lr=float("inf")), "options.lr"),
    "a rate of 1e308": (option(lr=1e308), "groups.0.options.lr: 1e\\+308 is beyond fp32"),
    "no rate": (lambda m: m["numbers"]["groups"][0]["options"].pop("lr"), "groups.0.options.lr is not in the"),
    "amsgrad of a state without it": (option(amsgrad=True), "max_exp_avg_sq of .* is not in the checkpoint"),
    "capturable": (option(capturable=True), "groups.0.options.capturable"),
    "a count of no dtype": (count([1.0, None]), f"step of {NORM} is a plain number"),
    "a loss scale of -1": (
        lambda m: m["numbers"].update(loss_scale={"value": -1.0, "good_steps": 0}), "numbers.loss_scale.value",
    ),
    "no loss scale": (lambda m: m["numbers"].pop("loss_scale"), "numbers.loss_scale"),
    "another step": (lambda m: m.update(step=7), "step: manifest.json says 7, and the folder's name 2"),
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_of_the_optimizer_is_refused_by_name(two: Path, tmp_path: Path, lie: str) -> None:
    change, said = LIES[lie]
    home = tmp_path / "two"
    shutil.copytree(two, home)
    rewritten(home / folder.name_of(2), change)
    with CheckpointManager(home, toys.engine_of("1", "gpt2", seed=3)) as keeper:
        with pytest.raises(CheckpointError, match=rf"IG936(.|\n)*{said}"):
            keeper.load(home / folder.name_of(2))
        with pytest.warns(UserWarning, match="loaded step-00000001"):
            found = keeper.load("auto")
        assert found is not None and found.step == 1


def test_an_optimizer_that_steps_the_other_way_is_refused_by_name(two: Path, tmp_path: Path) -> None:
    """A run that resumed from such a manifest climbed its loss."""
    home = tmp_path / "two"
    shutil.copytree(two, home)
    rewritten(home / folder.name_of(2), option(maximize=True))
    with (
        CheckpointManager(home, toys.engine_of("1", "gpt2", seed=3)) as keeper,
        pytest.raises(CheckpointError, match=r"IG938(.|\n)*maximize is True there and False here"),
    ):
        keeper.load(home / folder.name_of(2))


@pytest.mark.medium
def test_a_mutated_manifest_loads_right_or_is_refused_with_the_field(two: Path, tmp_path: Path) -> None:
    """26 of 100 ended in a TypeError, a ValueError or the like."""
    home = tmp_path / "two"
    shutil.copytree(two, home)
    place = home / folder.name_of(2)
    whole = (place / manifest.NAME).read_text()
    engine = toys.engine_of("1", "gpt2")
    wrong, refused = list[str](), 0
    with CheckpointManager(tmp_path / "other", engine) as keeper:
        for seed in range(100):
            (place / manifest.NAME).write_text(whole)
            what, spot = mutations.structure(place / manifest.NAME, random.Random(seed))
            rewritten(place, lambda _: None)
            try:
                found = keeper.load(place)
                assert found is not None
                toys.train(engine, 1, 2, gradients=False)
                keeper.save(found.step)
                keeper.wait()
            except CheckpointError as error:
                refused += 1
                text = str(error)
                named = any(str(part) in text for part in spot)
                if not named or error.code not in ("IG936", "IG937", "IG938", "IG939"):
                    wrong.append(f"seed {seed}: {what}: {text[:400]}")
            except Exception as error:
                wrong.append(f"seed {seed}: {what}: {error!r}")
    assert not wrong, "\n".join(wrong)
    assert refused > 50


# -- not finite ------------------------------------------------------------------------------------------------------


def past_nan(home: Path) -> tuple[str, int, tuple[str, ...], str]:
    """Step 2 is saved as older versions did, with NaN in the rows of rank 1."""
    engine = toys.engine_of("dp2 zero1")
    with CheckpointManager(home, engine) as keeper:
        toys.train(engine, 0, 1, gradients=False)
        for kept in engine.optimizer.state.values():  # finite, though its square is not
            kept["exp_avg_sq"].view(-1)[-1:] = torch.finfo(kept["exp_avg_sq"].dtype).max / 2
        keeper.save(1)
        toys.train(engine, 1, 2, gradients=False)
        if engine.mesh.rank == 1:
            next(kept for kept in engine.optimizer.state.values() if kept)["exp_avg_sq"].view(-1)[0] = torch.inf
        with pytest.raises(NotFinite, match="IG946") as refused:
            keeper.save(2)
        looks, state.not_finite = state.not_finite, lambda *_: []
        keeper.save(2)
        state.not_finite = looks
        with pytest.raises(CheckpointError, match="IG936") as asked_for:
            keeper.load(home / "step-00000002")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = keeper.load("auto")
        assert found is not None
        assert len(said) == (1 if engine.mesh.rank == 0 else 0)
    return str(refused.value), found.step, found.skipped_damaged, str(asked_for.value)


def test_a_state_that_is_not_finite_is_not_saved_and_such_a_checkpoint_is_passed_over(worlds, tmp_path: Path) -> None:
    """FAILURES B3, alike on all ranks."""
    ours, theirs = worlds(2).run(past_nan, tmp_path)
    assert ours == theirs
    refused, step, skipped_damaged, asked_for = ours
    assert "seen:     rank 1: optimizer/exp_avg_sq/" in refused
    assert step == 1
    assert len(skipped_damaged) == 1
    assert skipped_damaged[0].startswith("step-00000002: NaN or Inf in optimizer/exp_avg_sq/")
    assert "NaN or Inf in optimizer/exp_avg_sq/" in asked_for
