"""Sequences cut over cp, models cut over tp and ep, in the loops of Lightning and Fabric: gradients by name, in fp64,
those of transformers on one device; and refusals. Runs that go on under another layout: test_goes_on.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import isograd as ig
from isograd.comm import world
from isograd.errors import IsogradError
from isograd.hf.force_fp64 import ForceFP64

from .test_cut_sequences import Rows, model, same
from .worlds import as_lightning_finds_it

fabrics, lightning = pytest.importorskip("lightning.fabric"), pytest.importorskip("lightning.pytorch")
RATE = 0.1


def rows_of(layout: str, accumulation: int) -> int:
    """Rows of a step, of one row in each micro-batch."""
    return int(next((word[2:] for word in layout.split() if word.startswith("dp")), 1)) * accumulation


def by_fabric(layout: str, accumulation: int, kind: str = "llama") -> dict[str, Any]:
    """The loop of Fabric's documentation for one step: gradients by name, the loss, and one that is evaluated."""
    with as_lightning_finds_it() as (_, ranks):
        fabric = fabrics.Fabric(accelerator="cpu", devices=ranks, strategy=ig.integrations.FabricStrategy(layout))
        fabric.launch()
        whole = model(kind)
        net, optimizer = fabric.setup(whole, torch.optim.SGD(whole.parameters(), lr=RATE))
        loader = fabric.setup_dataloaders(DataLoader(Rows(rows_of(layout, accumulation)), batch_size=1))
        seen: dict[str, Any] = {}
        for number, batch in enumerate(loader):
            with ForceFP64(), fabric.no_backward_sync(net, enabled=number + 1 < accumulation):
                fabric.backward(net(**batch).loss)
        seen |= {name: g.clone() for name, g in fabric.strategy.engine.grads().items()}
        optimizer.step()
        optimizer.zero_grad()
        seen["loss"] = torch.tensor(optimizer.optimizer.stats.loss, dtype=torch.float64)
        return seen


class Net(lightning.LightningModule):
    """A model of transformers in a module, as Lightning's documentation has it."""

    def __init__(self, kind: str = "llama", manual: int = 0) -> None:
        """manual: micro-batches of a step in manual optimization."""
        super().__init__()
        self.model, self.automatic_optimization, self.manual = model(kind), not manual, manual
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.model(**batch).loss
        if not self.manual:
            return loss
        self.manual_backward(loss)
        if (number + 1) % self.manual == 0:
            self.on_before_optimizer_step()
            self.optimizers().step()
        return None

    def validation_step(self, batch: Any, _: int) -> None:
        output = self.model(**batch)
        self.seen |= {"evaluated": output.loss, "logits": output.logits}

    def on_before_optimizer_step(self, *_: Any) -> None:
        grads = self.trainer.strategy.engine.grads().items()
        self.seen |= {name.removeprefix("model."): gradient.clone() for name, gradient in grads}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def trainer(layout: str, folder: str, accumulation: int, **given: Any) -> Any:
    standard: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    standard |= {"enable_model_summary": False, "accelerator": "cpu", "devices": world.world()[1], "max_steps": 1}
    standard |= {"accumulate_grad_batches": accumulation, "num_sanity_val_steps": 0, "default_root_dir": folder}
    return lightning.Trainer(strategy=ig.integrations.LightningStrategy(layout), **(standard | given))


def by_lightning(layout: str, accumulation: int, folder: str, manual: bool, kind: str = "llama") -> dict[str, Any]:
    """One step of a fit, and a validation behind it."""
    with as_lightning_finds_it():
        module = Net(kind, accumulation if manual else 0)
        runs = trainer(layout, folder, 1 if manual else accumulation, max_steps=1)
        loader = DataLoader(Rows(rows_of(layout, accumulation)), batch_size=1)
        with ForceFP64():  # the model is built outside, as the one of one device: its rotary angles are of fp32
            runs.fit(module, loader, DataLoader(Rows(rows_of(layout, 4)), batch_size=4))
        return module.seen | {"loss": torch.tensor(runs.strategy.optimizers[0].stats.loss, dtype=torch.float64)}


CASES = [
    (2, "cp2 ulysses zero1", 1, "llama"),
    (2, "cp2 ring zero3", 3, "llama"),
    (2, "tp2", 3, "llama"),
    (2, "tp2 sp zero3", 1, "llama"),
    (2, "dp2 ep2 zero2", 3, "qwen3_moe"),
    pytest.param(4, "dp2 cp2 ulysses zero2", 3, "llama", marks=pytest.mark.slow),
    pytest.param(4, "dp2 tp2 sp zero2", 3, "llama", marks=pytest.mark.slow),
]


@pytest.mark.medium
@pytest.mark.parametrize("ranks, layout, accumulation, kind", CASES)
def test_a_loop_of_fabric_has_the_gradients_of_one_device(
    worlds, ranks: int, layout: str, accumulation: int, kind: str
) -> None:
    for found in worlds(ranks).run(by_fabric, layout, accumulation, kind):
        same(found, rows_of(layout, accumulation), kind)


STAGES = [
    (2, "pp2 1f1b", 3, "llama"),
    (2, "pp2 zb zero3", 1, "llama"),
    pytest.param(4, "dp2 pp2 1f1b zero2", 3, "llama", marks=pytest.mark.slow),
    pytest.param(4, "tp2 sp pp2 1f1b", 3, "llama", marks=pytest.mark.slow),
    pytest.param(4, "cp2 ulysses pp2 1f1b zero1", 3, "llama", marks=pytest.mark.slow),
    pytest.param(4, "dp2 ep2 pp2 1f1b", 3, "qwen3_moe", marks=pytest.mark.slow),
]


@pytest.mark.medium
@pytest.mark.parametrize("ranks, layout, accumulation, kind", STAGES)
def test_a_fit_of_lightning_has_them_under_pp(
    worlds, tmp_path: Path, ranks: int, layout: str, accumulation: int, kind: str
) -> None:
    every = worlds(ranks).run(by_lightning, layout, accumulation, str(tmp_path), False, kind)
    whole = {name: value for found in every for name, value in found.items()}  # each has those of its stage
    for found in every:
        same(whole | found, rows_of(layout, accumulation), kind)


@pytest.mark.medium
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("ranks, layout, accumulation, kind", CASES)
def test_a_fit_of_lightning_has_the_gradients_of_one_device(
    worlds, tmp_path: Path, ranks: int, layout: str, accumulation: int, kind: str, manual: bool
) -> None:
    for found in worlds(ranks).run(by_lightning, layout, accumulation, str(tmp_path), manual, kind):
        same(found, rows_of(layout, accumulation), kind)


def refused() -> dict[str, Any]:
    """What a loop under cp is told of wrong lines, and that the line which it is told to write is right."""
    said: dict[str, Any] = {}
    with as_lightning_finds_it() as (_, ranks):
        fabric = fabrics.Fabric(accelerator="cpu", devices=ranks, strategy=ig.integrations.FabricStrategy("cp2 ring"))
        fabric.launch()
        whole = model()
        net, optimizer = fabric.setup(whole, torch.optim.SGD(whole.parameters(), lr=RATE))
        batch = torch.utils.data.default_collate([Rows(1)[0]])
        fabric.backward(net(**batch).loss)
        optimizer.step()
        headed = torch.nn.ModuleDict({"model": model(), "head": torch.nn.Linear(24, 2)})
        lines = {
            "weight": lambda: fabric.backward(net(**batch).loss, weight=3),
            "divided": lambda: fabric.backward(net(**batch).loss / 2),
            "head": lambda: fabric.setup(headed, torch.optim.SGD(headed.parameters(), lr=RATE)),
            "stages": lambda: by_fabric("pp2", 1),
            "foreign": lambda: fabric.strategy.setup_module(torch.nn.Linear(2, 2)),
        }
        for what, line in lines.items():
            try:
                line()
            except IsogradError as error:
                said[what] = f"{error.code} {error.seen}"
                if error.code == "IG861":
                    eval(error.fix, {"fabric": fabric, "model": net, "batch": batch})  # the line that it says to write
                    optimizer.step()
                    said[what] += " stepped"
    return said


@pytest.mark.medium
def test_what_cannot_be_right_is_refused_with_the_line_that_is(worlds) -> None:
    for said in worlds(2).run(refused):
        assert said["weight"] == "IG861 weight=3 stepped"
        assert said["divided"] == "IG861 a loss that no prepared model has returned last stepped"
        assert said["head"].startswith(
            "IG856 trained parameters outside of LlamaForCausalLM: ['head.weight', 'head.bias']"
        )
        assert said["stages"].startswith("IG855 ") and said["foreign"].startswith("IG441 ")


class Logits(Net):
    def training_step(self, batch: Any, number: int) -> Any:
        return torch.nn.functional.cross_entropy(self.model(**batch).logits.flatten(0, 1), batch["labels"].flatten())


class Doubled(Net):
    def training_step(self, batch: Any, number: int) -> Any:
        return 2 * self.model(**batch).loss


def refused_under_pp(folder: str) -> list[str]:
    said = []
    for module in (Net(manual=1), Logits(), Doubled()):
        with as_lightning_finds_it():
            try:
                trainer("pp2", folder, 1).fit(module, DataLoader(Rows(1), batch_size=1))
            except IsogradError as error:
                said.append(f"{error.code} {error.seen}")
    return said


@pytest.mark.medium
def test_under_pp_what_needs_a_loss_before_the_step_is_refused(worlds, tmp_path: Path) -> None:
    for manual, logits, doubled in worlds(2).run(refused_under_pp, str(tmp_path)):
        assert manual == "IG856 manual optimization with pp"
        assert logits.startswith("IG861 output.logits, ")
        assert doubled == "IG861 a loss that no prepared model has returned last"
