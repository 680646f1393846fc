"""A run of each loop that goes on under another layout behind every step: gradients by name, in fp64, and losses are
those of transformers on one device, and files are the loop's own.

Each step is a program of its own, which reads what the one before has written. Labels are uneven, and the micro-batches
of a step are one or three. TRL's and verl's runs: test_cut_trl.py, test_cut_grpo.py, test_cut_verl.py.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

import isograd as ig
from isograd.hf.force_fp64 import ForceFP64
from tests.sizes import few

from .test_cut_sequences import Rows, model
from .toys import arguments
from .worlds import as_lightning_finds_it, as_torchrun_starts_it

pytest.importorskip("accelerate")
pytestmark = pytest.mark.medium
RATE, WHOLE = 1e-2, 6  # WHOLE: rows of a step, over all ranks and micro-batches
# The layouts of a run, and the micro-batches of their steps.
AXES = [
    ("dp2 zero2", 3), ("cp2 ulysses zero1", 1), ("tp2 sp zero3", 3), ("cp2 ring zero3", 3), ("tp2", 1),
    ("dp2 zero3", 1),
]  # fmt: skip
SHORT = [AXES[4], AXES[0], AXES[3]]  # what `make test` has of it
EXPERTS = [("dp2 ep2 zero1", 1), ("tp2 zero2", 3), ("dp2 zero1", 1), ("dp2 ep2 zero3", 3)]
STAGES = [("pp2 1f1b", 3), ("cp2 ring zero2", 1), ("pp2 zb zero1", 1), ("tp2 zero1", 3), ("pp2 1f1b zero3", 3)]


def kind_of(chain: list[tuple[str, int]]) -> str:
    return "qwen3_moe" if chain is EXPERTS else "llama"


def micro_size(layout: str, micros: int) -> int:
    """Rows of a micro-batch, on two ranks."""
    return WHOLE // (2 if "dp2" in layout else 1) // micros


def rows_of_step(step: int) -> Dataset[dict[str, Tensor]]:
    return Subset(Rows(10 * WHOLE), range(step * WHOLE, (step + 1) * WHOLE))


def held_out() -> dict[str, Tensor]:
    return default_collate([Rows(WHOLE)[row] for row in range(3)])


@lru_cache
def one_device(kind: str, steps: int) -> tuple[list[dict[str, Tensor]], Any]:
    """transformers alone: gradients and loss of each step, and what the model says behind the last one."""
    whole = model(kind)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=RATE, weight_decay=0.0)
    found: list[dict[str, Tensor]] = []
    with ForceFP64():
        for step in range(steps):
            batch = default_collate([*rows_of_step(step)])  # type: ignore[misc]
            loss = whole(**batch, num_items_in_batch=(batch["labels"][:, 1:] != -100).sum(), use_cache=False).loss
            loss.backward()
            found.append({n: p.grad.clone() for n, p in whole.named_parameters()} | {"loss": loss.detach()})
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            return found, whole(**held_out())


def run(by: Any, chain: list[tuple[str, int]], *given: Any) -> list[dict[str, Any]]:
    return [by(step, layout, micros, *given) for step, (layout, micros) in enumerate(chain)]


def compare(worlds: Any, by: Any, chain: list[tuple[str, int]], folder: Path, *given: Any) -> None:
    """Under pp each rank has the gradients of its stage."""
    kind = kind_of(chain)
    truth, output = one_device(kind, len(chain))
    every = worlds(2).run(run, by, chain, kind, str(folder), *given)
    for step, (ranks, true) in enumerate(zip(zip(*every, strict=True), truth, strict=True)):
        whole = {name: value for found in ranks for name, value in found.items()}
        for found in ranks:
            for name, value in true.items():
                error = ((whole | found)[name].double() - value).abs().max() / value.abs().max()
                assert float(error) < 1e-9, (step, name, float(error))
    tokens = held_out()["attention_mask"].bool()
    for found in every:
        last = found[-1]
        assert "evaluated" not in last or float(last["evaluated"]) == pytest.approx(float(output.loss), rel=1e-9)
        if last.get("logits") is not None:  # of a pipeline the last stage alone has them
            assert torch.allclose(last["logits"][tokens], output.logits[tokens], rtol=1e-9, atol=1e-9)


def by_the_trainer(step: int, layout: str, micros: int, kind: str, folder: str) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback

    with as_torchrun_starts_it():
        given = {"lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": 0.0}
        given |= {"save_strategy": "steps", "save_steps": 1, "train_sampling_strategy": "sequential"}
        given |= {"learning_rate": RATE, "gradient_accumulation_steps": micros, "max_steps": step + 1}
        seen: dict[str, Any] = {}

        class Looks(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                seen.update({name: g.clone() for name, g in found.engine.grads().items()})

        found = ig.integrations.trainer(Trainer, layout)(
            model(kind), arguments(folder, micro_size(layout, micros), 1, **given), train_dataset=Rows(10 * WHOLE),
            callbacks=[Looks()],
        )  # fmt: skip
        with ForceFP64():
            found.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}" if step else None)
        logged = [row["loss"] for row in found.state.log_history if "loss" in row]
        truth = [float(each["loss"]) for each in one_device(kind, step + 1)[0]]
        assert logged == pytest.approx(truth, rel=1e-4)  # the Trainer logs fp32
        return seen | {"loss": torch.tensor(truth[-1], dtype=torch.float64)}


def by_accelerate(step: int, layout: str, micros: int, kind: str, folder: str) -> dict[str, Any]:
    with as_torchrun_starts_it():
        accelerator = ig.integrations.Accelerator(cpu=True, gradient_accumulation_steps=micros, layout=layout)
        whole = model(kind)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=RATE, weight_decay=0.0)
        loader = DataLoader(rows_of_step(step), batch_size=micro_size(layout, micros))
        prepared, optimizer, loader = accelerator.prepare(whole, optimizer, loader)
        teacher = torch.nn.Linear(2, 2).requires_grad_(False)  # a second model, which no engine trains
        accelerator.prepare(teacher.apply(lambda layer: layer.weight.fill_(step)))
        if step:
            accelerator.load_state(f"{folder}/{step - 1}")
        assert not teacher.weight.any()  # as it was in the first step
        with ForceFP64():
            for batch in loader:
                with accelerator.accumulate(prepared):
                    accelerator.backward(prepared(**batch).loss)
                    if accelerator.sync_gradients:
                        seen = {name: g.clone() for name, g in accelerator.engine.grads().items()}
                    optimizer.step()
                    optimizer.zero_grad()
        accelerator.save_state(f"{folder}/{step}")
        return seen | {"loss": torch.tensor(optimizer.optimizer.stats.loss, dtype=torch.float64)}


def by_deepspeed(step: int, layout: str, micros: int, kind: str, folder: str) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": micro_size(layout, micros), "gradient_accumulation_steps": micros,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}},
    }  # fmt: skip
    engine, _, loader, _ = ig.integrations.deepspeed.initialize(
        model=model(kind), config=config, training_data=rows_of_step(step), layout=layout
    )
    if step:
        assert engine.load_checkpoint(folder)[1] == {"step": step - 1}
    with ForceFP64():
        for batch in loader:
            engine.backward(engine(**batch).loss)
            if engine.is_gradient_accumulation_boundary():
                seen = {name: g.clone() for name, g in engine.engine.grads().items()}
            engine.step()
    engine.save_checkpoint(folder, client_state={"step": step})
    weights = engine.module_state_dict()
    other = ig.integrations.deepspeed.initialize(model=model(kind), config=config, layout="tp2")[0]
    other.load_checkpoint(folder, load_module_only=True)
    assert all(torch.equal(value, weights[name]) for name, value in other.module_state_dict().items())
    return seen | {"loss": torch.tensor(engine.optimizer.stats.loss, dtype=torch.float64)}


def by_fabric(step: int, layout: str, micros: int, kind: str, folder: str) -> dict[str, Any]:
    from lightning.fabric import Fabric

    with as_lightning_finds_it() as (_, ranks):
        fabric = Fabric(accelerator="cpu", devices=ranks, strategy=ig.integrations.FabricStrategy(layout))
        fabric.launch()
        whole = model(kind)
        net, optimizer = fabric.setup(whole, torch.optim.AdamW(whole.parameters(), lr=RATE, weight_decay=0.0))
        loader = fabric.setup_dataloaders(DataLoader(rows_of_step(step), batch_size=micro_size(layout, micros)))
        if step:
            fabric.load(f"{folder}/{step - 1}.ckpt", {"model": net, "optimizer": optimizer})
        with ForceFP64():
            for number, batch in enumerate(loader):
                with fabric.no_backward_sync(net, enabled=number + 1 < micros):
                    fabric.backward(net(**batch).loss)
            seen = {name: g.clone() for name, g in fabric.strategy.engine.grads().items()}
            optimizer.step()
            with torch.no_grad():
                output = net(**held_out())
        fabric.save(f"{folder}/{step}.ckpt", {"model": net, "optimizer": optimizer})
        said = {"evaluated": output.loss, "logits": output.logits}
        return seen | said | {"loss": torch.tensor(optimizer.optimizer.stats.loss, dtype=torch.float64)}


def by_lightning(step: int, layout: str, micros: int, kind: str, folder: str, manual: bool) -> dict[str, Any]:
    """Each step is an epoch."""
    from .test_cut_lightning import Net, trainer

    class Module(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=RATE, weight_decay=0.0)

    with as_lightning_finds_it():
        module = Module(kind, micros if manual else 0)
        runs = trainer(layout, folder, 1 if manual else micros, max_steps=-1, max_epochs=step + 1)
        loader = DataLoader(rows_of_step(step), batch_size=micro_size(layout, micros))
        with ForceFP64():
            runs.fit(
                module, loader, DataLoader([held_out()], batch_size=None),
                ckpt_path=f"{folder}/{step - 1}.ckpt" if step else None,
            )  # fmt: skip
        runs.save_checkpoint(f"{folder}/{step}.ckpt")
        return module.seen | {"loss": torch.tensor(runs.strategy.optimizers[0].stats.loss, dtype=torch.float64)}


def has_whole_parameters(folder: Path, chain: list[tuple[str, int]], fabric: bool) -> None:
    """The library's own file of each step is for a model on one device."""
    for step in range(len(chain)):
        file = torch.load(folder / f"{step}.ckpt", weights_only=False)
        state, prefix = (file["model"], "") if fabric else (file["state_dict"], "model.")
        shapes = {name.removeprefix(prefix): value.shape for name, value in state.items()}
        assert shapes == {name: value.shape for name, value in model(kind_of(chain)).state_dict().items()}


IDS = {"ids": lambda chain: chain[0][0]}


@pytest.mark.parametrize("chain", few([SHORT, AXES, EXPERTS, STAGES], slow=[AXES, EXPERTS]), **IDS)
def test_the_trainers_run_goes_on(worlds, tmp_path: Path, chain: Any) -> None:
    compare(worlds, by_the_trainer, chain, tmp_path)


@pytest.mark.parametrize("chain", few([SHORT, AXES, EXPERTS], slow=[AXES]), **IDS)
def test_accelerates_run_goes_on(worlds, tmp_path: Path, chain: Any) -> None:
    compare(worlds, by_accelerate, chain, tmp_path)


@pytest.mark.parametrize("chain", few([SHORT, AXES, EXPERTS], slow=[AXES, EXPERTS]), **IDS)
def test_deepspeeds_run_goes_on(worlds, tmp_path: Path, chain: Any) -> None:
    compare(worlds, by_deepspeed, chain, tmp_path)


@pytest.mark.parametrize("chain", few([SHORT, AXES, EXPERTS], slow=[AXES, EXPERTS]), **IDS)
def test_fabrics_run_goes_on(worlds, tmp_path: Path, chain: Any) -> None:
    pytest.importorskip("lightning.fabric")
    compare(worlds, by_fabric, chain, tmp_path)
    has_whole_parameters(tmp_path, chain, True)


@pytest.mark.parametrize(
    ("chain", "manual"),
    [
        (SHORT, False),
        *(
            pytest.param(chain, manual, marks=pytest.mark.slow)
            for chain, manual in ((AXES, False), (EXPERTS, False), (STAGES, False), (AXES, True), (EXPERTS, True))
        ),
    ],
    ids=lambda value: value[0][0] if isinstance(value, list) else "manual" if value else "automatic",
)  # fmt: skip
def test_lightnings_run_goes_on(worlds, tmp_path: Path, chain: Any, manual: bool) -> None:
    pytest.importorskip("lightning.pytorch")
    compare(worlds, by_lightning, chain, tmp_path, manual)
    has_whole_parameters(tmp_path, chain, False)
