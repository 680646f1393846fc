"""A plain loop of DeepSpeed's on our engine, against one device on all micro-batches of a step; and what it refuses."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isograd as ig
from isograd.comm import world
from isograd.integrations.deepspeed import settings

IGNORED, CLASSES, MICROS, STEPS = -100, 5, 4, 4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "betas": [0.8, 0.99], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3, "total_num_steps": 9}},
    "gradient_clipping": 0.1,
}


class Net(nn.Module):
    """Its forward is the mean loss over labels, or, without any, over rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()

    def forward(self, rows: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.net(rows)
        if labels is None:
            return logits.square().mean()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def micro(step: int, number: int) -> tuple[Tensor, Tensor]:
    """Rows and labels, uneven; the first micro-batch of a step has no label."""
    generator = torch.Generator().manual_seed(10 * step + number)
    rows = 1 + (step + 2 * number) % 4
    labels = torch.randint(CLASSES, (rows, 3), generator=generator)
    labels[torch.rand(rows, 3, generator=generator) < 0.4] = IGNORED
    values = torch.randn(rows, 3, 6, generator=generator, dtype=torch.float64)
    return values, labels if number else labels.fill_(IGNORED)


def train(engine: Any, weighed: bool, steps: range) -> list[Any]:
    """The loop of DeepSpeed's documentation; its data are dealt out by rank. What it saw in each step."""
    rank, ranks = world.world()
    seen = []
    for step in steps:
        for number in range(rank, MICROS, ranks):
            rows, labels = (t.to(engine.device) for t in micro(step, number))
            if weighed:
                engine.backward(engine(rows, labels), weight=(labels != IGNORED).sum())
            else:
                engine.backward(engine(rows))
            at_end = engine.is_gradient_accumulation_boundary()
            engine.step()
        seen.append([at_end, engine.global_steps, engine.get_global_grad_norm(), engine.get_lr()[0]])
    return seen


def made(stage: int, **more: Any) -> Any:
    config = CONFIG | {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": MICROS // world.world()[1]}
    return ig.integrations.deepspeed.initialize(model=Net(), config=config | more)


def ours(stages: list[int]) -> list[tuple[list[Any], dict[str, Tensor]]]:
    found = []
    for stage in stages:
        for weighed in (True, False):
            engine, *_ = made(stage)
            seen = train(engine, weighed, range(STEPS))
            found.append((seen, engine.module_state_dict()))
    return found


def one_device(weighed: bool) -> tuple[list[Any], dict[str, Tensor]]:
    model, seen = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.8, 0.99), weight_decay=0.1)
    plan = settings.read(CONFIG, 1).schedule
    assert plan is not None
    scheduler = plan(optimizer)
    for step in range(STEPS):
        micros = [micro(step, number) for number in range(MICROS)]
        rows, labels = torch.cat([m[0] for m in micros]), torch.cat([m[1] for m in micros])
        (model(rows, labels) if weighed else model(rows)).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        seen.append([True, step + 1, norm, scheduler.get_last_lr()[0]])
    return seen, dict(model.state_dict())


def is_equal(found: tuple[list[Any], dict[str, Tensor]], expected: tuple[list[Any], dict[str, Tensor]]) -> None:
    assert [row[:2] for row in found[0]] == [row[:2] for row in expected[0]]
    assert [row[2:] for row in found[0]] == [pytest.approx(row[2:], rel=1e-9) for row in expected[0]]
    for name, value in expected[1].items():
        assert torch.allclose(found[1][name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("ranks, stages", [(1, [0]), (2, [0, 1, 2, 3]), (4, [1, 3])])
def test_a_loop_of_deepspeed_trains_as_one_device_on_uneven_micro_batches(
    worlds, ranks: int, stages: list[int]
) -> None:
    """Weighed: labels, of which one micro-batch has none. Not weighed: rows. Clipped, AdamW, a schedule."""
    expected = [one_device(weighed) for weighed in (True, False)]
    assert any(not torch.equal(expected[0][1][name], value) for name, value in Net().state_dict().items())
    for each in [ours(stages)] if ranks == 1 else worlds(ranks).run(ours, stages):
        assert len(each) == 2 * len(stages)
        for place, found in enumerate(each):
            is_equal(found, expected[place % 2])


def with_own_optimizer(stage: int) -> Any:
    """An optimizer that is not one of torch's listed ones, without a word that it is elementwise."""
    model = Net()
    optimizer = type("Own", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    return ig.integrations.deepspeed.initialize(
        model=model, optimizer=optimizer, config={**CONFIG, "zero_optimization": {"stage": stage}}
    )


def saved(folder: str) -> list[Any]:
    """Cut after step 2 at stage 1, resumed at stage 3; weights alone; and what is refused."""
    engine, *_ = made(1)
    head = train(engine, True, range(2))
    engine.save_checkpoint(folder, client_state={"epoch": 7})
    middle = engine.module_state_dict()
    engine, *_ = made(3)
    nothing = engine.load_checkpoint(folder + "/empty")
    place, state = engine.load_checkpoint(folder)
    tail = train(engine, True, range(2, STEPS))
    seen: list[Any] = [(head + tail, engine.module_state_dict()), (Path(str(place)).name, state, nothing)]
    engine, *_ = made(2)
    engine.load_checkpoint(folder, tag="global_step2", load_module_only=True)
    weights = engine.module_state_dict()
    seen.append(engine.global_steps == 0 and all(torch.equal(weights[name], value) for name, value in middle.items()))
    rows, labels = (t.to(engine.device) for t in micro(0, 1))
    for act in (
        lambda: engine.load_checkpoint(folder, tag="../other"),
        lambda: engine.load_checkpoint(folder, tag="other"),
        lambda: engine.backward(engine(rows, labels), scale_wrt_gas=False),
        lambda: made(0, fp16={"enabled": True}),
        lambda: made(0, optimizer={"type": "Lamb"}),
        lambda: made(0, gradient_clipping="auto"),
        lambda: made(0, zero_optimization={"stage": 0, "offload_optimizer": {"device": "cpu"}}),
        lambda: made(0, train_batch_size=5),
        lambda: ig.integrations.deepspeed.initialize(model=Net()),
        lambda: ig.integrations.deepspeed.initialize(model=Net(), config=CONFIG, mpu=object()),
        lambda: with_own_optimizer(1),
    ):
        try:
            act()
        except ig.IsogradError as error:
            seen.append(error.code)
    with engine.no_sync():
        engine.backward(engine(rows, labels), weight=1)
        try:
            engine.step()
        except ig.IsogradError as error:
            seen.append(error.code)
    try:
        engine.zero_grad()
    except ig.IsogradError as error:
        seen.append(error.code)
    engine.engine.discard()
    engine.zero_grad()
    return seen


def test_a_checkpoint_of_one_stage_resumes_at_another_and_what_cannot_be_kept_is_refused(
    worlds, tmp_path: Path
) -> None:
    expected = one_device(True)
    for found, loaded, same, *codes in worlds(2).run(saved, str(tmp_path)):
        is_equal(found, expected)
        assert loaded == ("global_step2", {"epoch": 7}, (None, None))
        assert same
        refused = ["IG868", "IG860", "IG868", "IG865", "IG865", "IG865", "IG865", "IG864", "IG868", "IG868"]
        assert codes == [*refused, "IG542", "IG868", "IG868"]


def saves_alone() -> tuple[str, str]:
    """Rank 0 saves, the other one steps; the next step is right."""
    engine, *_ = made(1)
    rows, labels = micro(0, 1)
    said = ""
    try:
        if world.world()[0] == 0:
            engine.save_checkpoint(tempfile.mkdtemp())
        else:
            train(engine, True, range(1))
    except ig.IsogradError as error:
        said = error.code
    engine.backward(engine(rows, labels), weight=1)
    mixed = ""
    try:
        engine.backward(engine(rows))
    except ig.IsogradError as error:
        mixed = error.code
    engine.engine.step()
    return said, mixed


def test_a_rank_that_saves_alone_is_told_and_a_step_has_weights_or_rows(worlds) -> None:
    assert worlds(2).run(saves_alone) == [("IG555", "IG535")] * 2


def refused_alone(config: Any) -> list[str]:
    """On rank 1, which begins again; the next engine trains."""
    said = []
    for given in (config if world.world()[0] else CONFIG, CONFIG):
        try:
            engine, *_ = ig.integrations.deepspeed.initialize(model=Net(), config=given)
            said.append("made")
        except ig.IsogradError as error:
            said.append(error.code)
    rows, labels = micro(0, 0)
    engine.backward(engine(rows, labels), weight=1)
    engine.engine.step()
    return said


@pytest.mark.parametrize(
    ("config", "code"), [({"nonsense": 1}, "IG865"), ("nowhere.json", "IG660"), (3, "IG868"), ({1: {2: 3}}, "IG865")]
)
def test_what_one_rank_refuses_all_ranks_refuse(worlds, config: Any, code: str) -> None:
    """The others waited as long as its process lived."""
    assert worlds(2).run(refused_alone, config) == [[code, "made"]] * 2


def weighs_alone() -> str:
    """Rank 0 gives its losses weights, the other one none: rows and labels would be added. The next step is right."""
    engine, *_ = made(1)
    try:
        for number in range(2):
            rows, labels = micro(0, number)
            engine.backward(engine(rows, labels), weight=None if world.world()[0] else 1)
        engine.engine.step()
    except ig.IsogradError as error:
        engine.backward(engine(rows, labels), weight=1)
        engine.engine.step()
        return error.code
    return "trained"


def test_ranks_of_which_one_gives_weights_are_refused(worlds) -> None:
    assert worlds(2).run(weighs_alone) == ["IG535"] * 2


@pytest.mark.parametrize("call", ["engine", "optimizer"])
def test_gradients_that_are_zeroed_in_the_middle_of_a_step_are_refused(call: str) -> None:
    """DeepSpeed's own drops them at stage 0 alone, and counts on. A loop that zeroed at each micro-batch trained
    nothing here, and nobody was told."""
    engine, optimizer, *_ = made(0)
    zeroed = {"engine": engine, "optimizer": optimizer}[call]
    rows, labels = micro(0, 1)
    zeroed.zero_grad()
    engine.backward(engine(rows, labels), weight=1)
    with pytest.raises(ig.IsogradError, match=r"IG868(.|\n)*discard"):
        zeroed.zero_grad()
    engine.step()
    with pytest.raises(ig.IsogradError, match="IG868"):
        zeroed.zero_grad()
    engine.engine.discard()
    zeroed.zero_grad()
    train(engine, True, range(1))
    zeroed.zero_grad()
    assert engine.global_steps == 1


@pytest.mark.parametrize("act", ["list", "betas", "weight", "loss", "train_batch"])
def test_values_of_a_wrong_kind_are_named(act: str) -> None:
    rows, labels = micro(0, 1)
    with pytest.raises(ig.IsogradError) as refused:
        if act == "list":
            ig.integrations.deepspeed.initialize(model=Net(), config=[1])  # type: ignore[arg-type]
        elif act == "betas":
            made(0, optimizer={"type": "AdamW", "params": {"lr": 0.1, "betas": 0.9}})
        elif act == "weight":
            engine, *_ = made(0)
            engine.backward(engine(rows, labels), weight="3")
        elif act == "loss":
            engine, *_ = made(0)
            engine.backward([engine(rows, labels)], weight=3)
        else:
            made(0)[0].train_batch(iter([]))
    assert refused.value.code == {"weight": "IG515", "loss": "IG514"}.get(act, "IG868")


def test_a_loss_that_transformers_made_of_labels_weighs_its_labels_and_other_losses_their_rows() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": 11,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 8,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    engine, *_ = ig.integrations.deepspeed.initialize(model=model, config=CONFIG)
    ids = torch.arange(10).view(2, 5)
    labels = ids.masked_fill(ids < 3, IGNORED)
    weights = []
    for scaled in (False, True):
        loss = engine(input_ids=ids, labels=labels).loss
        engine.backward(loss * 2 if scaled else loss)
        engine.step()
        weights.append(engine.optimizer.stats.weight)
    assert weights == [6, 2]  # the first label of a row is not predicted
    assert engine.config is model.config


def test_the_loader_deals_out_all_rows_and_a_client_brings_its_own_optimizer_and_schedule() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    data = torch.utils.data.TensorDataset(torch.randn(7, 3, 6, dtype=torch.float64))
    engine, _, loader, plan = ig.integrations.deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, training_data=data,
        config={"train_batch_size": 4, "gradient_accumulation_steps": 2},
    )  # fmt: skip
    assert loader is not None and plan is scheduler
    rows = 0
    for (batch,) in loader:
        rows += len(batch)
        engine.backward(engine(batch))
        engine.step()
    assert (rows, engine.global_steps, engine.micro_steps, engine.global_samples) == (7, 2, 4, 8)
    assert engine.get_lr() == [0.25]


@pytest.mark.peers
@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("kind", ["log", "linear"])
def test_schedules_are_deepspeeds_own_where_it_is_installed(name: str, kind: str) -> None:
    theirs = pytest.importorskip("deepspeed.runtime.lr_schedules")
    for warmup, more in (
        (1, {}),
        (4, {}),
        (4, {"warmup_min_lr": 0.1} if name != "WarmupCosineLR" else {"cos_min_ratio": 0.2}),
    ):
        params = {"warmup_num_steps": warmup, "warmup_type": kind} | more
        params |= {} if name == "WarmupLR" else {"total_num_steps": 9}
        optimizers = [torch.optim.SGD(Net().parameters(), lr=0.7) for _ in range(2)]
        plan = settings.read({"train_batch_size": 1, "scheduler": {"type": name, "params": params}}, 1).schedule
        assert plan is not None
        pair = [plan(optimizers[0]), getattr(theirs, name)(optimizers[1], **params)]
        for _ in range(12):
            assert optimizers[0].param_groups[0]["lr"] == pytest.approx(optimizers[1].param_groups[0]["lr"], rel=1e-12)
            for each in pair:
                each.step()


def test_a_schedule_rises_in_logarithms_and_falls_to_the_end_that_its_config_says() -> None:
    params = {"warmup_num_steps": 4, "total_num_steps": 9, "cos_min_ratio": 0.25}
    config = {"train_batch_size": 1, "scheduler": {"type": "WarmupCosineLR", "params": params}}
    plan = settings.read(config, 1).schedule
    assert plan is not None
    optimizer = torch.optim.SGD(Net().parameters(), lr=1.0)
    scheduler, rates = plan(optimizer), []
    for _ in range(22):
        rates.append(round(optimizer.param_groups[0]["lr"], 4))
        optimizer.step()
        scheduler.step()
    assert [rates[step + 1] for step in (-1, 0, 1, 3, 8, 20)] == [0.0, 0.0, 0.5, 1.0, 0.25, 0.25]
