"""Lightning's own Trainer with our strategy, against its own in one process on all micro-batches of a step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import isograd as ig
from isograd.comm import world
from isograd.comm.device import device

from .worlds import as_lightning_finds_it

lightning = pytest.importorskip("lightning.pytorch")
assert ig.integrations.LightningStrategy.strategy_name == "isograd"  # registered by name
pytestmark = pytest.mark.medium
IGNORED, CLASSES, MICROS, STEPS = -100, 5, 4, 3


def micro(number: int) -> tuple[Tensor, Tensor]:
    """Rows and labels, uneven; every fourth has no label."""
    generator = torch.Generator().manual_seed(number)
    rows = 1 + number % 3
    labels = torch.randint(CLASSES, (rows, 3), generator=generator)
    labels[torch.rand(rows, 3, generator=generator) < 0.4] = IGNORED
    values = torch.randn(rows, 3, 6, generator=generator, dtype=torch.float64)
    return values, labels.fill_(IGNORED) if number % MICROS == 3 else labels


class Net(lightning.LightningModule):
    """weighed: its loss is the mean over labels, and says so; else over rows."""

    between: Any = None

    def __init__(self, weighed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()
        self.weighed = weighed

    def loss(self, values: Tensor, labels: Tensor) -> Tensor:
        if not self.weighed:
            return self.net(values).square().mean()
        return F.cross_entropy(self.net(values).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.loss(*batch)
        return {"loss": loss, "weight": (batch[1] != IGNORED).sum()} if self.weighed else loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("held_out", self.loss(*batch), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        plan = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plan, "interval": "step"}}


def fit(
    layout: str | None, weighed: bool, folder: str, resume: str | None = None, first: int = 0, module: Any = None,
    held_out: bool = False, **given: Any,
) -> Any:  # fmt: skip
    """first: the micro-batch to begin with, as a loader does that resumes where its run was cut."""
    rank, ranks = world.world()
    data = [micro((first + number) % (STEPS * MICROS)) for number in range(rank, STEPS * MICROS, ranks)]
    standard: dict[str, Any] = {"max_steps": STEPS, "gradient_clip_val": 0.1, "logger": False}
    standard |= {
        "accumulate_grad_batches": MICROS // ranks,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
    }
    standard |= {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": device().type,
        "devices": ranks,
    }
    with as_lightning_finds_it():
        strategy = ig.integrations.LightningStrategy(layout) if layout else "isograd"
        trainer = lightning.Trainer(default_root_dir=folder, strategy=strategy, **(standard | given))
        loaders = [DataLoader(data, batch_size=None)] + [DataLoader(data[:2], batch_size=None)] * held_out
        trainer.fit(module or Net(weighed), *loaders, ckpt_path=resume)
        found = {n: v.clone() for n, v in trainer.strategy.lightning_module_state_dict().items()}
    return trainer, found


def ours(weighed: bool, layouts: list[str | None]) -> list[dict[str, Tensor]]:
    with tempfile.TemporaryDirectory() as scratch:
        return [fit(layout, weighed, scratch)[1] for layout in layouts]


def one_device(weighed: bool) -> dict[str, Tensor]:
    model = Net(weighed)
    made = model.configure_optimizers()
    optimizer, plan = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for step in range(STEPS):
        micros = [micro(step * MICROS + number) for number in range(MICROS)]
        model.loss(torch.cat([m[0] for m in micros]), torch.cat([m[1] for m in micros])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        plan.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("ranks, layouts", [(1, ["zero1"]), (2, [None, "zero1", "dp2 zero3"]), (4, ["zero2"])])
def test_a_fit_trains_as_one_device_on_uneven_micro_batches(
    worlds, ranks: int, layouts: list[Any], weighed: bool
) -> None:
    expected = one_device(weighed)
    for each in [ours(weighed, layouts)] if ranks == 1 else worlds(ranks).run(ours, weighed, layouts):
        for found in each:
            for name, value in expected.items():
                assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


def saved(folder: str) -> list[Any]:
    """Cut after step 2 at zero1, resumed at zero3; and what is refused."""
    trainer, _ = fit("zero1", True, folder, max_steps=2)
    trainer.save_checkpoint(f"{folder}/cut.ckpt")
    _, found = fit("zero3", True, folder, resume=f"{folder}/cut.ckpt", first=2 * MICROS)
    seen: list[Any] = [found]

    class Two(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[0].parameters(), lr=0.1)

    class Clips(Net):
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None: ...

    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=False)
    if world.world()[0] == 0:
        shutil.rmtree(f"{folder}/weights.ckpt.isograd")
    trainer.strategy.barrier()
    for given in (
        {"module": Two(True)},
        {"module": Clips(True)},
        {"gradient_clip_algorithm": "value"},
        {"resume": f"{folder}/weights.ckpt"},
    ):
        try:
            fit("zero1", True, folder, **given)
        except ig.IsogradError as error:
            seen.append(error.code)
    return seen


def test_a_fit_that_is_resumed_at_another_stage_ends_as_one_without_a_cut(worlds, tmp_path: Path) -> None:
    expected = one_device(True)
    for found, *codes in worlds(2).run(saved, str(tmp_path)):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name
        assert codes == ["IG851", "IG856", "IG856", "IG867"]


class Thaws(lightning.callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, *_: Any) -> None: ...


def behind_a_fit(folder: str) -> list[Any]:
    """At ZeRO 3: a validation with the same Trainer, and the weights that it leaves; callbacks that are refused."""
    trainer, found = fit("zero3", True, folder)
    module = trainer.lightning_module
    with as_lightning_finds_it():
        said = trainer.validate(module, DataLoader([micro(1)], batch_size=None), verbose=False)
    own = Net(True)
    own.load_state_dict(found)
    seen: list[Any] = [said[0]["held_out"], float(own.loss(*micro(1)))]
    for layout, kind in (
        ("zero1", Thaws()),
        ("zero3", lightning.callbacks.StochasticWeightAveraging(1e-2)),
    ):
        try:
            fit(layout, True, folder, callbacks=[kind])
        except ig.IsogradError as error:
            seen.append(error.code)
    return seen


def test_behind_a_fit_at_zero3_a_module_is_validated_and_callbacks_that_change_it_are_refused(
    worlds, tmp_path: Path
) -> None:
    for held_out, expected, *codes in worlds(2).run(behind_a_fit, str(tmp_path)):
        assert held_out == pytest.approx(expected, rel=1e-6)
        assert codes == ["IG856", "IG856"]


class Manual(Net):
    """Two backwards of a batch, each with its weight."""

    def __init__(self, gives: bool) -> None:
        super().__init__(True)
        self.automatic_optimization, self.gives = False, gives

    def training_step(self, batch: Any, number: int) -> None:
        optimizer, (values, labels) = self.optimizers(), batch
        optimizer.zero_grad()
        for part in (slice(0, 1), slice(1, None)):
            loss, count = self.loss(values[part], labels[part]), (labels[part] != IGNORED).sum()
            if self.gives:
                self.manual_backward(loss, weight=count)
            elif count:
                self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class OfSome(Manual):
    def training_step(self, batch: Any, number: int) -> None:
        self.manual_backward(self.loss(*batch), inputs=list(self.parameters())[:1])


def test_a_manual_backward_to_some_parameters_is_refused(tmp_path: Path) -> None:
    given = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_steps": 2}
    with pytest.raises(Exception, match="IG866"):
        fit("zero1", True, str(tmp_path), module=OfSome(True), **given)


def test_manual_backwards_have_weights_of_their_own(tmp_path: Path) -> None:
    given = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_steps": 2}
    _, found = fit("zero1", True, str(tmp_path), module=Manual(True), **given)
    model = Net(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(2):
        model.loss(*micro(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


class Gan(lightning.LightningModule):
    """Lightning's own example of manual optimization. zeroes: when gradients are; "toggled": by toggle_optimizer."""

    def __init__(self, zeroes: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).double()
        self.discriminator = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.automatic_optimization, self.zeroes = False, zeroes
        self.between: Callable[[], None] = lambda: None  # the members' steps

    def losses(self, values: Tensor) -> Iterator[Tensor]:
        """Of the discriminator, then of the generator: each is asked for behind the step of the one before."""
        made = self.generator(values.flatten(0, 1))
        real, fake = self.discriminator(values.flatten(0, 1).sin()), self.discriminator(made.detach())
        yield F.softplus(-real).mean() + F.softplus(fake).mean()
        if self.zeroes == "toggled":  # it was frozen above
            made = self.generator(values.flatten(0, 1))
        yield F.softplus(-self.discriminator(made)).mean()

    def training_step(self, batch: Any, number: int) -> None:
        optimizers = dict(zip(("discriminator", "generator"), self.optimizers(), strict=True))
        values, losses = batch[0], self.losses(batch[0])
        for name, optimizer in optimizers.items():
            if self.zeroes == "toggled":
                self.toggle_optimizer(optimizer)
            loss = next(losses)
            if self.zeroes == "before each":
                optimizer.zero_grad()
            self.manual_backward(loss, weight=len(values))
            optimizer.step()
            self.between()
            if self.zeroes == "toggled":
                self.untoggle_optimizer(optimizer)
            if self.zeroes == "behind both" and name == "generator":
                for one in optimizers.values():
                    one.zero_grad()

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("held_out", next(self.losses(batch[0])), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=0.05) for part in (self.discriminator, self.generator)]


class Frozen(Gan):
    """untoggles: types the line that it is told to."""

    def __init__(self, untoggles: bool) -> None:
        super().__init__("toggled")
        self.untoggles = untoggles

    def training_step(self, batch: Any, number: int) -> None:
        of_discriminator, of_generator = self.optimizers()
        losses = self.losses(batch[0])
        for optimizer in (of_discriminator, of_generator):
            self.toggle_optimizer(optimizer)
            self.manual_backward(next(losses), weight=len(batch[0]))
        if self.untoggles:
            self.untoggle_optimizer(of_generator)
        of_discriminator.step()
        of_generator.step()


def test_a_step_of_a_member_that_is_frozen_is_refused_by_its_name_and_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(ig.IsogradError) as refused:
        fit("zero1", True, str(tmp_path), module=Frozen(False), **GAN)
    assert refused.value.code == "IG866" and refused.value.seen.startswith("a step of 'discriminator'")
    assert refused.value.fix.startswith("self.untoggle_optimizer(optimizer), that of 'generator'")
    fit("zero1", True, str(tmp_path), module=Frozen(True), **GAN)


GAN = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_steps": -1, "max_epochs": 1}


def gans(cases: list[tuple[str, str]], folder: str) -> list[dict[str, Tensor]]:
    found = []
    for zeroes, layout in cases:
        trainer, state = fit(layout, True, folder, module=Gan(zeroes), **GAN)
        trainer.save_checkpoint(f"{folder}/gan.ckpt")
        found += [state, fit(layout, True, folder, module=Gan(zeroes), resume=f"{folder}/gan.ckpt", **GAN)[1]]
    return found


def test_a_gan_of_two_optimizers_trains_as_one_device(worlds, tmp_path: Path) -> None:
    cases = [("before each", f"dp2 zero{z}") for z in range(4)]
    cases += [("behind both", "dp2 zero1"), ("toggled", "dp2 zero1"), ("toggled", "dp2 zero3")]
    expected = gan_of_one_device()
    for each in worlds(2).run(gans, cases, str(tmp_path)):
        for number, found in enumerate(each):
            for name, value in expected.items():
                assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), (cases[number // 2], name)


def frozen_on_rank_1(folder: str) -> str:
    module = Gan("before each")
    module.discriminator.requires_grad_(world.world()[0] == 0)
    try:
        fit("dp2 zero1", True, folder, module=module, **GAN)
    except ig.IsogradError as error:
        return f"{error.code} {error}"
    return ""


def test_a_member_that_is_frozen_on_one_rank_is_refused_on_all(worlds, tmp_path: Path) -> None:
    """As an exception leaves it that came between toggle_optimizer and untoggle_optimizer."""
    for said in worlds(2).run(frozen_on_rank_1, str(tmp_path), timeout=60):
        assert said.startswith("IG851") and "rank 1" in said, said


class Raises(lightning.Callback):
    """Once, in this hook, on these ranks."""

    def __init__(self, hook: str, ranks: tuple[int, ...]) -> None:
        self.raises = world.world()[0] in ranks
        setattr(self, hook, self.fault)

    def fault(self, *_: Any, **__: Any) -> None:
        if self.raises:
            self.raises = False
            raise ValueError("a bad row")


HOOKS = ["setup", "on_train_start", "on_train_batch_start", "on_train_batch_end"]
HOOKS += ["on_validation_batch_start", "on_validation_end", "on_train_epoch_end", "on_train_end"]
FAULTS = [(kind, hook, ranks) for kind in ("one", "gan") for hook in HOOKS for ranks in ((1,), (0, 1))]
FAULTS += [
    ("one", "on_before_optimizer_step", (0,)),
    ("one", "on_before_zero_grad", (1,)),
    ("gan", "between", (0,)),
    ("gan", "between", (0, 1)),
]


def behind_exceptions(layout: str, faults: list[tuple[str, str, tuple[int, ...]]], folder: str) -> list[Any]:
    """A fit that an exception ends, and another one of the same module from its first weights, or of a new one."""
    found: list[Any] = []
    for kind, hook, ranks in faults:
        raises, module = Raises(hook, ranks), Gan("before each") if kind == "gan" else Net(True)
        first = {name: value.clone() for name, value in module.state_dict().items()}
        module.between = raises.fault if hook == "between" else module.between
        given = {"callbacks": [raises], "held_out": True} | (GAN if kind == "gan" else {})
        said = []
        for again in range(3 if layout.endswith("zero3") else 2):
            try:
                state = fit(layout, True, folder, module=module, **given)[1]
            except Exception as error:
                said.append(str(error))
                module = type(module)("before each" if kind == "gan" else True) if again else module
            if not layout.endswith("zero3"):
                module.load_state_dict(first)
        found.append((said, state))
    return found


def gan_of_one_device() -> dict[str, Tensor]:
    model = Gan("before each")
    optimizers = model.configure_optimizers()
    for step in range(STEPS * MICROS // 2):
        values = torch.cat([micro(2 * step + rank)[0] for rank in range(2)])
        for optimizer, loss in zip(optimizers, model.losses(values), strict=False):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero3"])
def test_behind_an_exception_wherever_it_came_a_further_fit_begins_anew_on_all_ranks(
    worlds, tmp_path: Path, layout: str
) -> None:
    """At zero3, where each rank has rows alone, the same module is refused on all, and a new one is right."""
    faults = FAULTS if layout.endswith("zero1") else [f for f in FAULTS if f[1] in ("on_train_batch_start", "between")]
    expected = {"one": one_device(True), "gan": gan_of_one_device()}
    for rank, each in enumerate(worlds(2).run(behind_exceptions, layout, faults, str(tmp_path))):
        for (kind, hook, ranks), (said, state) in zip(faults, each, strict=True):
            what = (kind, hook, ranks, rank, said)
            if rank in ranks:
                assert said[0] == "a bad row", what
            elif said or hook not in HOOKS[-3:]:  # its own fit may be over
                assert said[0].startswith(("IG870", "IG213")) and "rank" in said[0], what
            if layout.endswith("zero3"):
                assert said[1].startswith("IG207") and "a bad row" in said[1], what
            assert len(said) <= (2 if layout.endswith("zero3") else 1), what
            for name, value in expected[kind].items():
                assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-12), (name, *what)


def test_manual_optimization_clips_in_the_step(tmp_path: Path) -> None:
    class Clips(Manual):
        def manual_backward(self, loss: Tensor, **given: Any) -> None:
            super().manual_backward(loss, **given)
            self.clip_gradients(self.optimizers(), gradient_clip_val=0.01, gradient_clip_algorithm="norm")

    given = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_steps": 1}
    _, found = fit("zero1", True, str(tmp_path), module=Clips(True), **given)
    before = Net(True).state_dict()
    moved = torch.cat([(found[name] - value).flatten() for name, value in before.items()]).norm()
    assert float(moved) == pytest.approx(0.01 * 0.05, rel=1e-3)  # the clipped norm, times the rate


def test_a_step_whose_losses_have_weights_here_and_none_there_is_refused(tmp_path: Path) -> None:
    class Mixed(Net):
        def training_step(self, batch: Any, number: int) -> Any:
            said = super().training_step(batch, number)
            return said if number % 2 else said["loss"]

    with pytest.raises(ig.IsogradError, match="IG535"):
        fit("zero1", True, str(tmp_path), module=Mixed(True))
