"""Sequences cut over cp, models cut over tp and ep, in the loops of Lightning and Fabric: gradients by name, in fp64,
those of transformers on one device; and refusals. Runs that go on under another layout: test_goes_on.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import isograd as ig
from isograd.comm import world
from isograd.errors import IsogradError
from isograd.hf.force_fp64 import ForceFP64
from isograd.integrations.shared_rows import CutModels

from .test_cut_sequences import VOCAB, Rows, model, one_device, same
from .worlds import as_lightning_finds_it

fabrics, lightning = pytest.importorskip("lightning.fabric"), pytest.importorskip("lightning.pytorch")
RATE = 0.1


def rows_of(layout: str, accumulation: int) -> int:
    """Rows of a step, of one row in each micro-batch."""
    return int(next((word[2:] for word in layout.split() if word.startswith("dp")), 1)) * accumulation


def by_fabric(layout: str, accumulation: int, kind: str = "llama") -> dict[str, Any]:
    """The loop of Fabric's documentation for one step: gradients by name, the loss, and one that is evaluated."""
    with as_lightning_finds_it() as (_, ranks):
        return loop_of_fabric(ranks, layout, accumulation, kind)


def set_up_fabric(ranks: int, layout: str, kind: str = "llama") -> tuple[Any, Any, Any]:
    fabric = fabrics.Fabric(accelerator="cpu", devices=ranks, strategy=ig.integrations.FabricStrategy(layout))
    fabric.launch()
    whole = model(kind)
    return fabric, *fabric.setup(whole, torch.optim.SGD(whole.parameters(), lr=RATE))


def loop_of_fabric(ranks: int, layout: str, accumulation: int, kind: str = "llama") -> dict[str, Any]:
    fabric, net, optimizer = set_up_fabric(ranks, layout, kind)
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


class Writer(torch.nn.Module):
    """A generator: a language model, and a map from its soft tokens to what a discriminator reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = model(kind)
        self.out = torch.nn.Linear(VOCAB, 24).double()

    def forward(self, **batch: Any) -> Any:
        return self.out(self.model(**batch).logits.softmax(-1))


class Gan(lightning.LightningModule):
    """Two members with an optimizer each. reads: whether the discriminator gives a number for each token, or row; or
    for each token by experts."""

    def __init__(self, reads: str, micros: int) -> None:
        super().__init__()
        from transformers import AutoModelForSequenceClassification

        kind = "qwen3_moe" if reads == "experts" else "llama"
        self.generator, self.discriminator = Writer(kind), model(kind)
        self.automatic_optimization, self.reads, self.micros, self.seen = False, reads, micros, dict[str, Any]()
        if reads == "rows":
            config = self.discriminator.config
            config.num_labels, config.pad_token_id = 1, 0
            self.discriminator = AutoModelForSequenceClassification.from_config(config).double()

    def mean(self, sign: int, mask: Any, **given: Any) -> Any:
        """Of softplus over the tokens, or rows, that count."""
        scores = torch.nn.functional.softplus(sign * self.discriminator(**given).logits[..., 0])
        return scores.mean() if self.reads == "rows" else (scores * mask).sum() / mask.sum()

    def losses(self, batch: Any) -> Iterator[tuple[str, Any, Any]]:
        """The member that steps, its losses, and what each is the mean of; None: labels, which the loop counts."""
        text, mask, rows = batch["input_ids"], batch["attention_mask"], self.reads == "rows"
        count = len(mask) if rows else mask.sum()
        masked = {} if rows else {"attention_mask": mask}  # the score of embeddings is that of the last of all
        made = self.generator(input_ids=text, **masked)
        real = self.mean(-1, mask, input_ids=text.masked_fill(mask == 0, 0), attention_mask=mask)
        fake = self.mean(1, mask, inputs_embeds=made.detach(), **masked)
        yield "discriminator", [real + fake], [count]
        if self.micros > 1:  # the generator was frozen above
            made = self.generator(input_ids=text, **masked)
        mislead = self.mean(-1, mask, inputs_embeds=made, **masked)
        yield "generator", [mislead, self.generator.model(**batch).loss], [count, None]

    def training_step(self, batch: Any, number: int) -> None:
        optimizers = dict(zip(("discriminator", "generator"), self.optimizers(), strict=True))
        toggles, losses = self.micros > 1, self.losses(batch)
        for name, optimizer in optimizers.items():
            if toggles:
                self.toggle_optimizer(optimizer)
            elif name == "generator":  # what its loss leaves in the discriminator is dropped below
                optimizer.zero_grad()
            _, means, counts = next(losses)
            for loss, count in zip(means, counts, strict=True):
                self.manual_backward(loss, **({} if count is None else {"weight": count}))
            if toggles:
                self.untoggle_optimizer(optimizer)
            if not toggles:
                self.step(name, optimizer)
        for name, optimizer in optimizers.items():
            if toggles and (number + 1) % self.micros == 0:  # the losses of both come before their steps
                self.step(name, optimizer)
            if not toggles:
                optimizer.zero_grad()

    def step(self, name: str, optimizer: Any) -> None:
        grads = self.trainer.strategy.engines[name].grads()
        self.seen |= {f"{name}.{parameter}": gradient.clone() for parameter, gradient in grads.items()}
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=RATE) for part in (self.discriminator, self.generator)]


def by_a_gan(reads: str, layout: str, accumulation: int, folder: str, resumed: str = "") -> dict[str, Any]:
    """One step of each optimizer, in a fit of its own; resumed: from the checkpoint of the step before."""
    with as_lightning_finds_it():
        module = Gan(reads, accumulation)
        steps = 1 + bool(resumed)
        runs = trainer(layout, folder, 1, max_steps=-1, max_epochs=steps)
        loader = DataLoader(Rows(rows_of(layout, accumulation) * 2), batch_size=2)
        with ForceFP64():
            runs.fit(module, loader, ckpt_path=resumed or None)
        runs.save_checkpoint(f"{folder}/{steps}.ckpt")
        losses = {f"loss of {n}": e.stats.loss for n, e in zip("DG", runs.strategy.optimizers, strict=True)}
        return module.seen | {name: torch.tensor(loss, dtype=torch.float64) for name, loss in losses.items()}


@lru_cache
def gan_of_one_device(reads: str, accumulation: int, rows: int, steps: int = 1) -> dict[str, Any]:
    """The same in plain torch, of all rows at once: what the last step has."""
    module, seen = Gan(reads, accumulation), dict[str, Any]()
    optimizers = module.configure_optimizers()
    batch = torch.utils.data.default_collate([Rows(rows)[row] for row in range(rows)])
    labels = (batch["labels"][:, 1:] != -100).sum()
    with ForceFP64():
        for _ in range(steps):
            for optimizer, (name, means, counts) in zip(optimizers, module.losses(batch), strict=False):
                weights = [labels if count is None else count for count in counts]
                loss = sum(mean * weight for mean, weight in zip(means, weights, strict=True)) / sum(weights)
                member = getattr(module, name)
                found = torch.autograd.grad(loss, list(member.parameters()), retain_graph=True, allow_unused=True)
                for (parameter, own), gradient in zip(member.named_parameters(), found, strict=True):
                    own.grad = torch.zeros_like(own) if gradient is None else gradient
                    seen[f"{name}.{parameter}"] = own.grad.clone()
                seen[f"loss of {name[0].upper()}"] = loss.detach()
                if accumulation == 1:
                    optimizer.step()
            if accumulation > 1:
                for optimizer in optimizers:
                    optimizer.step()
    return seen


def same_gan(found: dict[str, Any], true: dict[str, Any]) -> None:
    for name, value in true.items():
        error = (found[name].double() - value).abs().max() / value.abs().max()
        assert float(error) < 1e-9, (name, float(error))


GANS = [
    ("tokens", 2, "cp2 ulysses zero1", 1),
    ("tokens", 2, "cp2 ring zero3", 3),
    ("rows", 2, "cp2 ring", 1),
    ("rows", 2, "cp2 ulysses zero2", 3),
    ("tokens", 2, "tp2", 3),
    ("tokens", 2, "tp2 sp zero3", 1),
    ("rows", 2, "tp2 zero1", 3),
    ("experts", 2, "dp2 ep2 zero1", 3),
    ("experts", 2, "dp2 ep2", 1),
    pytest.param("tokens", 4, "dp2 cp2 ulysses zero3", 3, marks=pytest.mark.slow),
    pytest.param("rows", 4, "dp2 cp2 ring zero1", 1, marks=pytest.mark.slow),
    pytest.param("tokens", 4, "dp2 tp2 sp zero2", 3, marks=pytest.mark.slow),
    pytest.param("rows", 4, "dp2 tp2 zero3", 1, marks=pytest.mark.slow),
    pytest.param("tokens", 4, "cp2 ring tp2 zero1", 3, marks=pytest.mark.slow),
]


@pytest.mark.medium
@pytest.mark.parametrize("reads, ranks, layout, accumulation", GANS)
def test_a_gan_of_two_optimizers_has_the_gradients_of_one_device(
    worlds, tmp_path: Path, reads: str, ranks: int, layout: str, accumulation: int
) -> None:
    true = gan_of_one_device(reads, accumulation, 2 * rows_of(layout, accumulation))
    for found in worlds(ranks).run(by_a_gan, reads, layout, accumulation, str(tmp_path)):
        same_gan(found, true)


@pytest.mark.medium
def test_a_gan_goes_on_under_another_layout(worlds, tmp_path: Path) -> None:
    worlds(2).run(by_a_gan, "tokens", "cp2 ulysses zero1", 3, str(tmp_path))
    every = worlds(2).run(by_a_gan, "tokens", "tp2 zero3", 3, str(tmp_path), f"{tmp_path}/1.ckpt")
    for found in every:
        same_gan(found, gan_of_one_device("tokens", 3, 6, 2))


def with_noise(layout: str) -> list[str]:
    """What models are told that read noise which each rank draws by itself; and of outputs that are no whole rows."""
    mesh, said = ig.Mesh(layout), []
    (whole,) = CutModels(mesh).cut_each(model())
    drawn = torch.Generator().manual_seed(mesh.rank)
    noise = torch.randn(2, 11, 24, generator=drawn, dtype=torch.float64)
    rows = torch.utils.data.default_collate([Rows(2)[row] for row in range(2)])
    for given in (
        {"inputs_embeds": torch.zeros_like(noise)},
        {"inputs_embeds": noise},
        rows | {"output_hidden_states": True},
    ):
        try:
            whole(**given)
            said.append("nothing")
        except IsogradError as error:
            said.append(error.code)
    with pytest.raises(IsogradError) as bare:
        CutModels(mesh).cut_each(model().model)
    return [*said, bare.value.code]


@pytest.mark.medium
@pytest.mark.parametrize("layout, layers", [("cp2 ring", "nothing"), ("tp2", "nothing"), ("tp2 sp", "IG861")])
def test_noise_that_differs_between_ranks_that_share_rows_is_refused(worlds, layout: str, layers: str) -> None:
    for said in worlds(2).run(with_noise, layout):
        assert said == ["nothing", "IG414", layers, "IG856"]


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


class Fails(Net):
    """Once, on rank 1."""

    fails = True

    def training_step(self, batch: Any, number: int) -> Any:
        if self.fails and world.world()[0] == 1:
            raise ValueError("a bad row")
        return super().training_step(batch, number)


def behind_an_exception(layout: str, folder: str) -> tuple[list[str], dict[str, Any]]:
    """Further fits, of the same module and of a new one, until one ends well."""
    module, said = Fails(), list[str]()
    while True:
        with as_lightning_finds_it(), ForceFP64():
            try:
                trainer(layout, folder, 3).fit(module, DataLoader(Rows(3), batch_size=1))
                return said, module.seen
            except Exception as error:
                said.append(str(error))
        module = Fails() if len(said) > 1 else module
        module.fails = False


@pytest.mark.medium
@pytest.mark.parametrize("layout, refused", [("cp2 ring", False), ("tp2", True), ("pp2 1f1b", False)])
def test_behind_an_exception_a_further_fit_has_the_gradients_of_one_device(
    worlds, tmp_path: Path, layout: str, refused: bool
) -> None:
    """refused: the same module, whose layers hold the connections that were closed."""
    every = worlds(2).run(behind_an_exception, layout, str(tmp_path))
    whole = {name: value for _, seen in every for name, value in seen.items()}
    for rank, (said, seen) in enumerate(every):
        assert said[0] == "a bad row" if rank == 1 else said[0].startswith("IG870") and "a bad row" in said[0], said
        assert [text[:5] for text in said[1:]] == ["IG207"] * refused, said
        same(whole | seen | {"loss": one_device(3)["loss"]}, 3)


def fabric_behind_an_exception(layout: str) -> tuple[list[str], dict[str, Any]]:
    """Rank 1 fails where the other waits for it in a layer, which closes their connections; then another Fabric."""
    said: list[str] = []
    with as_lightning_finds_it() as (rank, ranks):
        fabric, net, _ = set_up_fabric(ranks, layout)
        try:
            if rank == 1:
                raise ValueError("a bad row")
            net(**torch.utils.data.default_collate([Rows(1)[0]]))
        except Exception as error:
            said.append(str(error))
        try:
            fabric.strategy.engine.discard()
        except IsogradError as error:
            said.append(error.code)
        return said, loop_of_fabric(ranks, layout, 3)


@pytest.mark.medium
@pytest.mark.parametrize("layout", ["cp2 ring", "tp2 sp"])
def test_behind_connections_that_are_closed_another_fabric_makes_new_ones(worlds, layout: str) -> None:
    """It waited for ranks on Lightning's port, on which the first one had met, or was refused there."""
    for rank, (said, seen) in enumerate(worlds(2).run(fabric_behind_an_exception, layout)):
        assert [text[:5] for text in said] == (["a bad", "IG215"] if rank else ["IG215", "IG207"]), said
        same(seen, 3)


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
