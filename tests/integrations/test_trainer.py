"""transformers' Trainer with the integration: its own loop, unmodified, on 1, 2 and 4 ranks and at every ZeRO stage.

Against the stock Trainer in one process, whose step has the same rows; a model of experts against plain torch, as the
Trainer's own balance loss depends on ranks and accumulation.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import isograd as ig
from isograd.comm import world
from isograd.integrations.world import ENDED

from . import toys
from .worlds import as_torchrun_starts_it, free_port

pytest.importorskip("accelerate")


def through_the_door(
    layout: str | None, folder: str, given: dict[str, Any], kind: str = "dense", **options: Any
) -> Any:
    """A Trainer of `ig.integrations.trainer`, in a rank."""
    from transformers import Trainer

    ranks = world.world()[1]
    made_class = ig.integrations.trainer(Trainer, layout)
    return made_class(toys.model(kind), toys.arguments(folder, 2, ranks, **given), train_dataset=toys.Rows(), **options)


def run(layout: str | None, folder: str | None = None, resume: str | None = None, **given: Any) -> dict[str, Any]:
    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as scratch:
        found = through_the_door(
            layout, folder or scratch, given, compute_loss_func=toys.exact, eval_dataset=toys.Rows(8)
        )
        found.train(resume_from_checkpoint=resume)
        evaluated = found.evaluate()["eval_loss"] if resume is None else None
        with found.engine.full_parameters():
            return toys.trained(found) | {"evaluated": evaluated}


def stock(**given: Any) -> dict[str, Any]:
    from transformers import Trainer

    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as scratch:
        found = Trainer(
            toys.model(), toys.arguments(scratch, 2, 1, **given), train_dataset=toys.Rows(),
            eval_dataset=toys.Rows(8), compute_loss_func=toys.exact,
        )  # fmt: skip
        found.train()
        return toys.trained(found) | {"evaluated": found.evaluate()["eval_loss"]}


def on(ranks: int, worlds: Any, function: Any, *args: Any) -> list[Any]:
    return [function(*args)] if ranks == 1 else worlds(ranks).run(function, *args)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected["parameters"].items():
        assert torch.allclose(found["parameters"][name], value, rtol=1e-9, atol=1e-11), name
    for mine, theirs in zip(found["log"], expected["log"], strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-9)
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)  # the Trainer adds them up in fp32
        assert mine["learning_rate"] == theirs["learning_rate"]


@pytest.fixture(scope="module")
def one_device() -> dict[str, Any]:
    """The stock Trainer, three steps of four micro-batches."""
    return stock()


@pytest.mark.parametrize(
    "ranks, layouts",
    [(1, [None]), (2, [None, "zero1", "dp2 zero3"]), pytest.param(4, ["dp4 zero2"], marks=pytest.mark.slow)],
)
def test_the_trainer_trains_as_the_stock_one_does_in_one_process(
    worlds, one_device: dict[str, Any], ranks: int, layouts: list[str | None]
) -> None:
    """Parameters after three clipped steps of AdamW under a schedule; losses, norms and rates logged; evaluation."""
    for layout in layouts:
        for found in on(ranks, worlds, run, layout):
            same(found, one_device)
            assert found["evaluated"] == pytest.approx(one_device["evaluated"], rel=1e-6)


def resumed(folder: str) -> list[dict[str, Any]]:
    """Cut after step 1, resumed at zero3 until step 2, once more at zero0: the last one, and a run without cuts."""
    options = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant_with_warmup"}
    run("zero1", folder, **options, max_steps=1)
    run("zero3", folder, resume=f"{folder}/checkpoint-1", **options, max_steps=2)
    twice = run(None, folder, resume=f"{folder}/checkpoint-2", **options)
    return [twice, run("zero1", lr_scheduler_type="constant_with_warmup")]


def test_a_run_that_is_resumed_twice_under_other_layouts_ends_as_one_without_cuts(worlds, tmp_path: Path) -> None:
    for twice, uncut in worlds(2).run(resumed, str(tmp_path)):
        for name, value in uncut["parameters"].items():
            assert torch.allclose(twice["parameters"][name], value, rtol=1e-9, atol=1e-11), name
        assert [row["learning_rate"] for row in twice["log"]] == [row["learning_rate"] for row in uncut["log"]]
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3", dtype=torch.float64)
    assert all(torch.equal(p, twice["parameters"][n]) for n, p in saved.named_parameters())


def adapter(layout: str | None, folder: str) -> list[dict[str, Any]]:
    """An adapter of PEFT: trained, and resumed at step 2 at another stage; None: by the stock Trainer."""
    from transformers import Trainer

    if layout is None:
        with as_torchrun_starts_it():
            given = {"train_dataset": toys.Rows(), "compute_loss_func": toys.exact}
            found = Trainer(toys.model("lora"), toys.arguments(folder, 2, 1), **given)
            found.train()
            return [toys.trained(found)]
    trained = []
    for stage, resume in ((layout, None), ("zero1", f"{folder}/checkpoint-2")):
        with as_torchrun_starts_it():
            options = {"save_strategy": "steps", "save_steps": 1}
            found = through_the_door(stage, folder, options, "lora", compute_loss_func=toys.exact)
            found.train(resume_from_checkpoint=resume)
            with found.engine.full_parameters():
                trained.append(toys.trained(found))
    return trained


def test_an_adapter_trains_and_resumes(worlds, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    [expected] = adapter(None, str(tmp_path / "stock"))
    for found in worlds(2).run(adapter, "zero3", str(tmp_path / "ours")):
        for one in found:
            for name, value in expected["parameters"].items():
                assert torch.allclose(one["parameters"][name], value, rtol=1e-9, atol=1e-11), name
    assert (tmp_path / "ours" / "checkpoint-3" / "adapter_model.safetensors").exists()


def gradients_of_experts(layout: str | None) -> dict[str, torch.Tensor]:
    """Of the first step, before clipping."""
    from transformers import TrainerCallback

    seen: dict[str, torch.Tensor] = {}

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            seen.update({name: gradient.clone() for name, gradient in found.engine.grads().items()})

    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as scratch:
        found = through_the_door(layout, scratch, {"max_steps": 1, "weight_decay": 0.0}, "experts", callbacks=[Looks()])
        found.train()
    return seen


def by_hand() -> dict[str, torch.Tensor]:
    """One device: the mean loss of the step's labels, and the mean over its tokens of each micro-batch's balance."""
    from transformers import Trainer

    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as scratch:
        found = Trainer(toys.model("experts"), toys.arguments(scratch, 2, 1), train_dataset=toys.Rows())
        loader = iter(found.get_train_dataloader())
        micros = [next(loader) for _ in range(toys.STEP // 2)]
    model = toys.model("experts").train()
    labels = sum(int((m["labels"][:, 1:] != -100).sum()) for m in micros)
    tokens = sum(int(m["attention_mask"].sum()) for m in micros)
    for micro in micros:
        output = model(**micro, num_items_in_batch=torch.tensor(labels))
        share = micro["attention_mask"].sum() / tokens - 1  # the model has added 0.5 * balance already
        (output.loss + 0.5 * share.double() * output.aux_loss).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks, layout", [(1, None), (2, "zero1")])
def test_the_balance_loss_is_a_mean_over_tokens_of_all_ranks_and_micro_batches(
    worlds, ranks: int, layout: str | None
) -> None:
    """Mixtral computes norms and its router in fp32, so gradients agree to fp32 rounding."""
    expected = by_hand()
    for found in on(ranks, worlds, gradients_of_experts, layout):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 2e-6 * value.norm(), name


def failing() -> list[Any]:
    """Rank 1 fails in a forward of the second step; then a NaN; then all is well: what each rank saw."""
    from transformers import Trainer, TrainerCallback

    seen: list[Any] = []
    fault: dict[str, Any] = {"raises": False, "nan": False}

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        here = world.world()[0] == 1 and found.state.global_step == 1
        if here and fault["raises"]:
            raise ValueError("a bad row")
        return toys.exact(outputs, labels, num_items_in_batch) * (float("nan") if here and fault["nan"] else 1.0)

    class Notes(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            rates.append((found.optimizer.step_was_skipped, found.lr_scheduler.last_epoch))

    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as scratch:
        found = through_the_door("zero1", scratch, {}, compute_loss_func=loss, callbacks=[Notes()])
        rates: list[Any] = []
        fault["raises"] = True
        try:
            found.train()
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
        fault |= {"raises": False, "nan": True}
        rates.clear()
        found.train()
        seen.append(list(rates))
        other = ig.integrations.trainer(Trainer)(found.model, found.args, train_dataset=toys.Rows())
        other.train()
        try:
            found.train()
        except ig.IsogradError as error:
            seen.append(error.code)
        third = through_the_door("zero1", scratch, {}, compute_loss_func=toys.exact)
        third.train()  # beside two others in this process
        seen.append(toys.trained(third))
    return seen


def test_failures_end_or_skip_a_step_on_all_ranks_and_leave_nothing_behind(worlds, one_device: dict[str, Any]) -> None:
    first, second = worlds(2).run(failing)
    assert second[0].startswith("ValueError: a bad row")
    assert first[0].startswith("EngineError: IG550") and "a bad row" in first[0]
    for seen in (first, second):
        assert seen[1] == [(False, 1), (True, 1), (False, 2)]  # the schedule waits for a skipped step
        assert seen[2] == "IG858"
        same(seen[3], one_device)


def subclass(base: Any, overridden: str) -> Any:
    """What scripts write below their import of a Trainer: an override of one method."""

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        counted = kwargs.get("num_items_in_batch") if overridden == "compute_loss with its count" else None
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        count = (labels[:, 1:] != -100).sum() if counted is None else counted
        loss = toys.exact(outputs, labels, count)
        return (loss, outputs) if return_outputs else loss

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return base.training_step(self, model, {**inputs}, num_items_in_batch)

    def get_train_dataloader(self: Any) -> Any:
        return base.get_train_dataloader(self)

    functions = {f.__name__: f for f in (compute_loss, training_step, get_train_dataloader)}
    name = overridden.split(maxsplit=1)[0]
    return type("Mine", (base,), {name: functions[name]})


OVERRIDDEN = ["compute_loss", "compute_loss with its count", "training_step", "get_train_dataloader"]


def of_subclass(layout: str | None, overridden: str, integration: bool) -> dict[str, Any]:
    from transformers import Trainer

    with as_torchrun_starts_it() as (_, ranks), tempfile.TemporaryDirectory() as scratch:
        kind = subclass(ig.integrations.trainer(Trainer, layout) if integration else Trainer, overridden)
        given = {} if overridden.startswith("compute_loss") else {"compute_loss_func": toys.exact}
        model = toys.model()
        if overridden.endswith("count"):  # without it the Trainer counts each row's first label, too
            model.loss_type = "ForCausalLM"
        found = kind(model, toys.arguments(scratch, 8 // ranks, ranks), train_dataset=toys.Rows(), **given)
        found.train()
        return toys.trained(found)


@pytest.mark.parametrize("overridden", OVERRIDDEN)
def test_a_subclass_of_the_doors_trainer_trains_as_the_stock_subclass(worlds, overridden: str) -> None:
    """In one process and on two ranks; a step is one micro-batch, as the stock one divides a mean by nothing."""
    expected = of_subclass(None, overridden, integration=False)
    for ranks in (1, 2):
        for found in on(ranks, worlds, of_subclass, None, overridden, True):
            same(found, expected)


def test_a_training_step_that_goes_backward_by_itself_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer

    class Own(ig.integrations.trainer(Trainer)):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    with as_torchrun_starts_it(), pytest.raises(ig.IsogradError, match="IG871"):
        Own(toys.model(), toys.arguments(str(tmp_path), 2, 1), train_dataset=toys.Rows()).train()


def test_state_belongs_to_one_trainer(tmp_path: Path) -> None:
    from transformers import Trainer

    with as_torchrun_starts_it():
        args = toys.arguments(str(tmp_path), 2, 1)
        made = ig.integrations.trainer(Trainer)(toys.model(), args, train_dataset=toys.Rows())
        stock = Trainer(toys.model(), args, train_dataset=toys.Rows())
    assert (made.args.average_tokens_across_devices, stock.args.average_tokens_across_devices) == (False, True)


@pytest.mark.parametrize("name", ["fsdp", "deepspeed", "fp16", "optim"])
def test_arguments_by_which_a_trainer_reduces_or_steps_by_itself_are_refused(name: str, tmp_path: Path) -> None:
    from transformers import Trainer

    with as_torchrun_starts_it():
        made = ig.integrations.trainer(Trainer)(
            toys.model(), toys.arguments(str(tmp_path), 2, 1), train_dataset=toys.Rows()
        )
        if name == "deepspeed":
            made.is_deepspeed_enabled = True
        elif name == "fp16":
            made.args.mixed_precision = "fp16"
        else:
            setattr(made.args, name, {"fsdp": True, "optim": "lomo"}[name])
        with pytest.raises(ig.IsogradError, match=f"IG856[\\s\\S]*{name}"):
            made._refuse_arguments()


def test_a_second_loss_of_experts_is_refused(tmp_path: Path) -> None:
    with as_torchrun_starts_it():
        made = through_the_door(None, str(tmp_path), {}, "experts")
        loss = torch.ones((), requires_grad=True)
        made._router_losses = [{"aux_loss": loss * 2, "z_loss": loss * 3}]
        with pytest.raises(ig.IsogradError, match="IG859"):
            made._with_balance(sum(made._router_losses[0].values()))


def test_an_optimizer_that_cannot_step_rows_is_refused_in_the_words_of_a_script(worlds) -> None:
    for text in worlds(2).run(adafactor):
        assert all(word in text for word in ("IG542", "optim='adafactor'", "--isograd zero0"))


def adafactor() -> str:
    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as scratch:
        try:
            through_the_door("zero1", scratch, {"optim": "adafactor"}, compute_loss_func=toys.exact).train()
        except ig.IsogradError as error:
            return str(error)
    return ""


def with_adafactor(integration: bool) -> dict[str, Any]:
    """Adafactor with rates of its own, and transformers' schedule that shows them."""
    from transformers import Trainer
    from transformers.optimization import Adafactor, AdafactorSchedule

    with as_torchrun_starts_it() as (_, ranks), tempfile.TemporaryDirectory() as scratch:
        model, kind = toys.model(), ig.integrations.trainer(Trainer) if integration else Trainer
        optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
        found = kind(
            model, toys.arguments(scratch, 2, ranks), train_dataset=toys.Rows(), compute_loss_func=toys.exact,
            optimizers=(optimizer, AdafactorSchedule(optimizer)),
        )  # fmt: skip
        found.train()
        schedule = json.dumps(found.lr_scheduler.state_dict()) if integration else ""  # as a checkpoint keeps it
        return toys.trained(found) | {"schedule": schedule}


def test_adafactor_with_rates_of_its_own_steps_and_logs_them_as_stock(worlds) -> None:
    expected = with_adafactor(False)
    assert expected["log"][1]["learning_rate"] > 0
    for found in [with_adafactor(True), *worlds(2).run(with_adafactor, True)]:
        same(found, expected)
        assert json.loads(found["schedule"])["_last_lr"][0] > 0


ENDS = """
import sys
from transformers import Trainer, TrainerCallback
import isograd as ig
from isograd.comm import world
from tests.integrations import toys

class Fails(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if world.world()[0] == 1 and state.global_step == 1:
            raise ValueError("a bad callback")

made_class = ig.integrations.trainer(Trainer)
made_class(toys.model(), toys.arguments(sys.argv[1], 2, 2), train_dataset=toys.Rows(), callbacks=[Fails()]).train()
"""


@pytest.mark.slow
def test_a_rank_that_loses_another_one_names_it_and_its_error(tmp_path: Path) -> None:
    import subprocess

    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    places = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    said = {"PYTHONPATH": places, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env={**os.environ, **said, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    error = ranks[0].communicate(timeout=140)[1]
    ranks[1].communicate(timeout=20)
    assert "IG550" in error and "rank 1: ValueError: a bad callback" in error, error[-3000:]  # at its step


def refused() -> list[str]:
    from transformers import Trainer

    codes = []
    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as scratch:

        def code(layout: str | None, given: dict[str, Any], act: Any = lambda made: None, **options: Any) -> None:
            try:
                act(through_the_door(layout, scratch, given, **options))
            except ig.IsogradError as error:
                codes.append(error.code)

        code(None, {"auto_find_batch_size": True})
        Path(scratch, "checkpoint-1").mkdir(exist_ok=True)
        Path(scratch, "checkpoint-1", "optimizer.pt").touch()
        code(
            None,
            {},
            lambda made: (made.create_optimizer(), made._load_optimizer_and_scheduler(f"{scratch}/checkpoint-1")),
        )
        half = torch.nn.Linear(2, 2)
        code(None, {}, lambda made: made.train(), optimizers=(torch.optim.SGD(half.parameters()), None))
        code("zero1", {}, lambda made: made.create_optimizer().state_dict())
        code("zero1", {}, lambda made: made.create_optimizer().step(lambda: 0.0))

        class Counts(Trainer):
            loss_is_scaled_for_ga = True

        try:
            ig.integrations.trainer(Counts)(toys.model(), toys.arguments(scratch, 2, 2), train_dataset=toys.Rows())
        except ig.IsogradError as error:
            codes.append(error.code)
    codes += [world.store_get(f"{ENDED}{rank}") for rank in range(2)]  # a later loop would take it for its own
    return codes


def test_what_cannot_be_right_is_refused_by_name(worlds) -> None:
    for codes in worlds(2).run(refused):
        assert codes == ["IG856", "IG860", "IG851", "IG853", "IG853", "IG856", "", ""]


def test_the_layout_of_the_command_line_comes_first_and_is_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer

    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    assert ig.integrations.trainer(Trainer, "dp4").isograd_layout == "dp4"
    monkeypatch.setattr(sys, "argv", ["train.py", "--isograd", "dp2 zero1", "--lr", "1"])
    assert ig.integrations.trainer(Trainer, "dp4").isograd_layout == "dp2 zero1"
    assert sys.argv == ["train.py", "--lr", "1"]
    assert ig.integrations.trainer(Trainer, "dp4").isograd_layout == "dp2 zero1"  # a second Trainer of the same script
    monkeypatch.setattr(sys, "argv", ["train.py", "--isograd=zero3"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--isograd=zero3"])
    assert ig.integrations.trainer(Trainer).isograd_layout == "zero3"
    monkeypatch.setattr(sys, "argv", ["train.py", "--isograd"])
    with pytest.raises(ig.IsogradError, match="IG854"):
        ig.integrations.trainer(Trainer)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for wrong in (dict, ig.integrations.trainer(Trainer)):
        with pytest.raises(ig.IsogradError, match="IG857"):
            ig.integrations.trainer(wrong)


@pytest.mark.parametrize(
    "name, package",
    [("Accelerator", "accelerate"), ("trainer", "transformers accelerate"), ("FabricStrategy", "lightning"),
     ("LightningStrategy", "lightning"), ("verl", "verl")],
)  # fmt: skip
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    for place in ("isograd.integrations", "isograd.integrations.world"):
        monkeypatch.setattr(f"{place}.find_spec", lambda _: None)
    with pytest.raises(ig.IsogradError, match=rf"IG850[\s\S]*pip install {package}"):
        ig.integrations.__getattr__(name)
