"""A run with a teacher: losses and gradients of plain torch on one device under every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd import verify
from isograd.core.mesh import Mesh
from isograd.errors import IsogradError
from isograd.hf import export_hf
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.models import Transformer, TransformerConfig
from isograd.prove import Case
from isograd.train import journal, loop, resources, startup
from isograd.train.config import Config
from isograd.train.distillation import DistilTransformer
from isograd.train.loop import RunOptions
from isograd.train.sections import Distil
from tests.train.test_preference import assert_trains_as_plain_torch

QUIET = RunOptions(show="none", signals=())
MODEL = {"hidden": 24, "layers": 2, "heads": 4, "kv_heads": 4, "mlp": 40}
SMALL = TransformerConfig(vocab=31, **MODEL)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Folders of other models than the student, by their vocabulary."""
    folder, found = tmp_path_factory.mktemp("teachers"), {}
    for vocab in (31, 257):
        config = replace(SMALL, vocab=vocab, hidden=32, layers=1, tied=True)
        found[vocab] = str(folder / str(vocab))
        export_hf(Transformer(config, Mesh("dp1"), seed=5, dtype=torch.float64), found[vocab])
    return found


def packed() -> dict[str, Tensor]:
    """Rows of two texts each, with unevenly many labels; the last row has none."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(31, (4, 10), generator=draw)
    labels = torch.randint(31, (4, 10), generator=draw)
    for row in range(4):
        labels[row, : 3 * row + 1] = -100
    documents = (torch.arange(10) >= torch.tensor([[4], [6], [1], [9]])).long()
    return {"tokens": tokens, "labels": labels, "documents": documents}


def student(mesh: Mesh, options: Distil) -> DistilTransformer:
    return DistilTransformer(SMALL, mesh, options, dtype=torch.float64)


def expected(made: DistilTransformer, batch: dict[str, Tensor]) -> Tensor:
    """Of all labels, in plain torch: each text by itself."""
    options, (taught_by,) = made.options, made.taught_by
    found = []
    for row, labels in enumerate(batch["labels"]):
        for number in (0, 1):
            mine = batch["documents"][row] == number
            tokens, there = batch["tokens"][row, mine][None], labels[mine] != -100
            logits, theirs = made(tokens)[0, there], taught_by(tokens)[0, there].detach()
            label = -torch.log_softmax(logits, -1).gather(1, labels[mine][there][:, None])[:, 0]
            t = options.temperature
            p, q = (torch.softmax(each / t, -1) for each in (theirs, logits))
            p, q = (q, p) if options.kind == "reverse" else (p, q)
            apart = (p * (p.log() - q.log())).sum(-1) * t**2
            found.append((1 - options.weight) * label + options.weight * apart)
    return torch.cat(found).mean()


@pytest.mark.parametrize(("kind", "weight"), [("forward", 0.3), ("reverse", 1.0)])
def test_gradients_are_those_of_plain_torch(teachers: dict[int, str], kind: Any, weight: float) -> None:
    options, batch = Distil(teacher=teachers[31], kind=kind, weight=weight, temperature=2.0), packed()
    made = student(Mesh("dp1"), options)
    assert_trains_as_plain_torch(made, Mesh("dp1"), batch, expected(made, batch))


def case(mesh: Mesh, options: Distil) -> Case:
    return Case(student(mesh, options), packed())


@pytest.mark.slow
@pytest.mark.usefixtures("lent")
def test_layouts_have_the_gradients_of_one_device(teachers: dict[int, str]) -> None:
    options = Distil(teacher=teachers[31], kind="between", temperature=1.5)
    report = verify(partial(case, options=options), ["dp2 zero3", "tp2 sp", "cp2 ring", "cp2 ulysses", "pp2"])
    assert report.ok, str(report)


def config_of(folder: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "run": str(folder),
        "model": {"options": {"vocab": 257, **MODEL}, "dtype": "fp64"},
        "data": {"sources": [{"path": str(folder.parent / "built")}], "length": 24},
        "optimizer": {"lr": 1e-2, "warmup": 1},
        "steps": 3, "batch": 4, "micro_batches": 2, "log": {"sample": 0}, "evaluate": {"batches": 1},
    }  # fmt: skip
    return Config.model_validate({**values, **changes})


def numbers(folder: Path) -> list[float]:
    lines = journal.read(folder / "metrics.jsonl")
    return [line["loss"] for line in lines if line.get("event") in (None, "evaluation") and "loss" in line]


def built(folder: Path) -> None:
    """Texts, as shards of tokens."""
    from isograd.data import build

    texts = folder / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"text {number} " * (1 + number % 5))
    build(folder / "built", sorted(texts.iterdir()), validation=0.2)


@pytest.mark.medium
def test_a_run_has_the_same_losses_under_every_layout_and_resumes(
    worlds, teachers: dict[int, str], tmp_path: Path
) -> None:
    built(tmp_path)
    distil = {"distil": {"teacher": teachers[257], "weight": 0.4}}
    one = config_of(tmp_path / "one", **distil)
    assert loop.run(one, QUIET).code == 0
    truth = numbers(one.folder)
    assert len(truth) == 4 and truth[2] < truth[0]
    for layout in ("dp2 zero2", "tp2 sp", "cp2 ring", "pp2"):
        there = config_of(tmp_path / layout.replace(" ", "-"), layout=layout, **distil)
        assert worlds(2).run(loop.run, there, QUIET)[0].code == 0
        assert numbers(there.folder) == pytest.approx(truth, rel=1e-9), layout
    cut = config_of(tmp_path / "cut", layout="dp2 zero1", **distil)
    assert worlds(2).run(loop.run, cut, RunOptions(show="none", signals=(), until=2))[0].code == 75
    assert worlds(2).run(loop.run, cut.model_copy(update={"layout": "tp2"}), QUIET)[0].code == 0
    assert numbers(cut.folder) == pytest.approx(truth, rel=1e-9)


def test_a_resume_with_another_teacher_is_refused(teachers: dict[int, str], tmp_path: Path) -> None:
    built(tmp_path)
    other = str(tmp_path / "other")
    export_hf(Transformer(replace(SMALL, vocab=257), Mesh("dp1"), seed=6, dtype=torch.float64), other)
    config = config_of(tmp_path / "run", distil={"teacher": teachers[257]})
    assert loop.run(config, RunOptions(show="none", signals=(), until=1)).code == 75
    with pytest.raises(IsogradError, match=r"IG986[\s\S]*began from another model"):
        loop.run(config.model_copy(update={"distil": Distil(teacher=other)}), QUIET)
    assert loop.run(config, QUIET).code == 0


def test_a_teacher_of_another_vocabulary_or_none_is_refused_before_a_rank_starts(
    teachers: dict[int, str], tmp_path: Path
) -> None:
    with pytest.raises(IsogradError, match=r"IG635[\s\S]*257 ids"):
        student(Mesh("dp1"), Distil(teacher=teachers[257]))
    for teacher, error in ((teachers[31], r"IG635[\s\S]*31 ids"), (str(tmp_path / "none"), "none")):
        with pytest.raises(IsogradError, match=error):
            startup.refuse_early(config_of(tmp_path / "run", distil={"teacher": teacher}), "auto")


def test_the_memory_before_a_start_has_the_teacher_in_the_last_stage(teachers: dict[int, str], tmp_path: Path) -> None:
    weights = 8 * sum(math.prod(shape) for shape in SafetensorsReader(teachers[257]).shapes.values())
    for layout, more in (("dp2 zero1", [weights]), ("pp2", [0, weights])):
        options: tuple[dict[str, Any], ...] = ({}, {"distil": {"teacher": teachers[257]}})
        plain, taught = (resources.forecast(config_of(tmp_path / "run", layout=layout, **each)) for each in options)
        both = list(zip(plain.stages, taught.stages, strict=True))
        assert [b.parameters - a.parameters for a, b in both] == more
        assert [b.activations > a.activations for a, b in both] == [each > 0 for each in more]


def test_a_teacher_of_task_preference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="distil belongs to"):
        config_of(tmp_path, task="preference", distil={"teacher": "somewhere"})
