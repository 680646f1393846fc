"""Optimizers that a config names: each steps as on one device, at every ZeRO stage and under tp, and resumes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd.checkpoint.read import open_whole
from isograd.comm import world
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import ConfigError, EngineError, TrainError
from isograd.train import loop, reading
from isograd.train.optimizers import ELEMENTWISE, MATRICES, PACKAGES, class_of, factory
from isograd.train.run.signals import STOPPED
from isograd.train.sections import Optimizer

from ..engine import toys
from .test_loop import QUIET, close, config_of, losses

OPTIONS: dict[str, dict[str, Any]] = {
    "adafactor": {"lr": 0.05}, "lion": {"lr": 0.01}, "adamw_8bit": {"lr": 0.01},
    "schedule_free": {"lr": 0.01, "schedule": "constant"},
}  # fmt: skip
NAMES = [pytest.param(name, marks=[pytest.mark.peers] * (name in PACKAGES)) for name in OPTIONS]


def need(name: str) -> None:
    if name in PACKAGES:
        pytest.importorskip({"lion-pytorch": "lion_pytorch"}.get(PACKAGES[name], PACKAGES[name]))


class Plain:
    """What a user of plain torch writes: the optimizer for the matrices, or for all, and AdamW for the rest."""

    def __init__(self, name: str, parameters: Sequence[Tensor]) -> None:
        lr, kind = OPTIONS[name]["lr"], class_of(name)
        matrices, others = ([p for p in parameters if (p.dim() == 2) == wanted] for wanted in (True, False))
        more: Any = {"betas": (0.9, 0.95), "eps": 1e-8}
        rest = torch.optim.AdamW(others, lr=lr, weight_decay=0.0, **more)
        if name == "adafactor":
            self.members: list[Any] = [kind(matrices, lr=lr, weight_decay=0.1), rest]
        elif name == "adamw_8bit":
            self.members = [kind(matrices, lr=lr, weight_decay=0.1, **more), rest]
        else:
            more = {"betas": (0.9, 0.95)} if name == "lion" else more
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
            self.members = [kind(groups, lr=lr, **more)]
        for member in self.members if name == "schedule_free" else ():
            member.train()

    def zero_grad(self) -> None:
        for member in self.members:
            member.zero_grad()

    def step(self) -> None:
        for member in self.members:
            member.step()


def at_every_stage(name: str) -> None:
    ranks = world.world()[1]
    truth = toys.one_device(12, 3, lambda ps: Plain(name, ps), 0.5)  # type: ignore[arg-type, return-value]
    make = factory(Optimizer(name=name, **OPTIONS[name]))
    options: Any = {"matrices": MATRICES.get(name, ()), "elementwise": name in ELEMENTWISE}
    for zero in range(4):
        toys.assert_same_training(toys.engine_run(f"dp{ranks} zero{zero}", 12, 3, make, **options), truth)


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES)
def test_each_steps_as_on_one_device_at_every_stage(worlds, name: str) -> None:
    need(name)
    worlds(2).run(at_every_stage, name)


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_under_tp_and_zero_as_on_one_device(worlds, text: Path, tmp_path: Path, name: str) -> None:
    """Evaluations and checkpoints between the steps change nothing but the last digits."""
    need(name)
    model = {"preset": "tiny-llama", "options": {"vocab": 257, "hidden": 32, "mlp": 128}, "dtype": "fp64"}
    more: dict[str, Any] = {
        "optimizer": {"name": name, **OPTIONS[name]}, "model": model, "steps": 4,
        "evaluate": {"every": 2, "batches": 1}, "checkpoint": {"every": 2},
    }  # fmt: skip
    worlds(1).run(loop.run, config_of(tmp_path / "one", text, **more), QUIET)
    for step, layout in ((1, "dp2 zero2"), (3, "tp2 sp"), (None, "dp2 zero3")):
        config = config_of(tmp_path / "cut", text, layout=layout, **more)
        outcome = worlds(Layout.parse(layout).world_size).run(loop.run, config, replace(QUIET, until=step))[0]
        assert outcome.code == (STOPPED if step else 0)
    assert close(losses(tmp_path / "cut"), losses(tmp_path / "one"))
    one, cut = (open_whole(tmp_path / run / "checkpoints" / "step-00000004") for run in ("one", "cut"))
    kept = [key for key in one.manifest.tensors if key.startswith(("model/", "optimizer/"))]
    assert {key for key in cut.manifest.tensors if not key.startswith("generator/")} == set(kept)
    entries = {key.split("/")[1] for key in kept if key.startswith("optimizer/")}
    assert {"adafactor": "row_var", "lion": "exp_avg", "adamw_8bit": "absmax1", "schedule_free": "z"}[name] in entries
    for key in kept:
        a, b = one.read(key).double(), cut.read(key).double()
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-12), key
    one.close()
    cut.close()


def averages(layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Of two bf16 models: what is evaluated; what a gradient is then taken at, and was before."""
    from isograd.engine.ema import averaged

    mesh = Mesh(layout)
    model = toys.Toy(torch.bfloat16)
    engine = Engine(model, mesh, factory(Optimizer(name="schedule_free", **OPTIONS["schedule_free"])), elementwise=True)
    seen: list[dict[str, Tensor]] = []

    def note() -> None:
        with engine.full_parameters():
            seen.append({n: p.detach().clone() for n, p in model.named_parameters()})

    for step in range(3):
        loss = toys.loss_of(model, *toys.micro_batch(step, 2))
        engine.backward(loss, weight=7)
        engine.step()
    note()
    with averaged(engine):
        note()
    note()
    return seen[1], seen[2], seen[0]


@pytest.mark.peers
def test_schedule_free_is_evaluated_at_its_average_also_where_masters_have_memory_of_their_own(worlds) -> None:
    need("schedule_free")
    runs = [worlds(2).run(averages, f"dp2 zero{zero}")[0] for zero in (0, 1, 3)]
    for average, after, before in runs:
        assert not torch.equal(average["first.weight"], before["first.weight"])
        toys.assert_same_bits({n: p.float() for n, p in after.items()}, {n: p.float() for n, p in before.items()})
        assert all(torch.equal(average[name], runs[0][0][name]) for name in average)


class Averaging(torch.optim.SGD):
    """A stand-in for a schedule-free optimizer: it notes what it is told."""

    mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def train(self) -> None:
        self.mode = "train"


def interrupted_evaluation(raises: type[Exception]) -> tuple[str, str]:
    """(the optimizer's mode, what the next step says) after an exception inside `averaged`."""
    from isograd.engine.ema import averaged

    mesh, model = Mesh(f"dp{world.world()[1]} zero1"), toys.Toy()
    engine = Engine(model, mesh, lambda ps: Averaging(ps, lr=0.1), elementwise=True)
    with pytest.raises(raises), averaged(engine):
        raise EngineError("IG555", does="evaluate", found=[0]) if raises is EngineError else raises
    engine.backward(toys.loss_of(model, *toys.micro_batch(0, 2)), weight=7)
    try:
        engine.step()
    except EngineError as error:
        return engine.optimizer.mode, error.code  # type: ignore[attr-defined]
    return engine.optimizer.mode, "stepped"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("ranks", "raises", "said"), [
    (1, ValueError, "stepped"), (2, EngineError, "stepped"), (2, ValueError, "IG559"),
])  # fmt: skip
def test_an_exception_in_an_evaluation_leaves_no_averaged_weights(
    worlds, ranks: int, raises: type[Exception], said: str
) -> None:
    assert worlds(ranks).run(interrupted_evaluation, raises) == [("train", said)] * ranks


def experts_by_adafactor() -> str:
    from ..engine import folded

    with pytest.raises(EngineError) as caught:
        make = factory(Optimizer(name="adafactor", lr=0.1))
        folded.train("dp2 ep2", 1, make, matrices=["*"])
    return str(caught.value)


def test_a_stack_of_experts_is_no_matrix_and_is_refused_by_name(worlds) -> None:
    text = worlds(2).run(experts_by_adafactor)[0]
    assert "IG542" in text and "Adafactor" in text and "experts.weight" in text


def test_a_package_that_is_missing_is_named_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in {"lion": "lion_pytorch", "schedule_free": "schedulefree", "adamw_8bit": "bitsandbytes"}.items():
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setitem(sys.modules, f"{module}.optim", None)
        with pytest.raises(TrainError, match=f"pip install {PACKAGES[name]}"):
            class_of(name)


def test_options_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    rest = "run: x\nsteps: 2\nbatch: 2\nmodel: {preset: quickstart}\ndata: {sources: [{builtin: stdlib}], length: 8}\n"
    for line, said in (
        ("{lr: 0.1, name: schedule_free}", "schedule_free has schedule constant"),
        ("{lr: 0.1, name: lion, muon_lr: 0.1}", "muon_lr belongs to muon"),
    ):
        (tmp_path / "run.yaml").write_text(f"{rest}optimizer: {line}\n")
        with pytest.raises(ConfigError, match=said):
            reading.load(tmp_path / "run.yaml")
