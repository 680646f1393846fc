"""accelerate with the integration: a loop with weights against one device, and accelerate's own scripts, unmodified.

Of accelerate's test_utils/scripts: all functions of test_sync.py but main and test_noop_sync (in one process, too,
backwards under no_sync are one window), and training_check of test_script.py. Only the name `Accelerator` in those
files is ours.
"""

from __future__ import annotations

import math
import tempfile
from collections import UserDict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isograd as ig
from isograd.comm import world

from . import toys
from .worlds import as_torchrun_starts_it

pytest.importorskip("accelerate")
IGNORED, STEPS, MICROS, CLASSES = -100, 3, 4, 5


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()


def micro(step: int, number: int) -> tuple[Tensor, Tensor]:
    """Rows and labels of a micro-batch: the same ones, however many ranks there are. One has no label."""
    generator = torch.Generator().manual_seed(10 * step + number)
    rows = 1 + (step + 2 * number) % 4
    labels = torch.randint(CLASSES, (rows, 3), generator=generator)
    labels[torch.rand(rows, 3, generator=generator) < 0.4] = IGNORED
    return torch.randn(rows, 3, 6, generator=generator, dtype=torch.float64), labels if number else labels.fill_(
        IGNORED
    )


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


Parts = tuple[Any, Any, Any]  # an accelerator, a model and its optimizer


def made(layout: str | None = None) -> Parts:
    accelerator = ig.integrations.Accelerator(
        gradient_accumulation_steps=MICROS // world.world()[1], **({} if layout is None else {"layout": layout})
    )
    accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
    model = net()
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))


def loop(parts: Parts, weighed: bool, first: int = 0) -> Iterator[Parts]:
    """The loop of accelerate's documentation; its data are dealt out by rank. Yields after each step."""
    rank, ranks = world.world()
    accelerator, model, optimizer = parts
    for step in range(first, STEPS):
        for number in range(rank, MICROS, ranks):
            rows, labels = (t.to(accelerator.device) for t in micro(step, number))
            with accelerator.accumulate(model):
                loss = mean(model(rows), labels) if weighed else model(rows).square().mean()
                if weighed:
                    accelerator.backward(loss, weight=(labels != IGNORED).sum())
                else:
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        yield accelerator, model, optimizer


def ours(weighed: bool, layout: str | None = None) -> dict[str, Tensor]:
    with as_torchrun_starts_it():
        *_, (accelerator, model, _) = loop(made(layout), weighed)
        return dict(accelerator.get_state_dict(model))


def one_device(weighed: bool) -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        micros = [micro(step, number) for number in range(MICROS)]
        rows, labels = torch.cat([m[0] for m in micros]), torch.cat([m[1] for m in micros])
        (mean(model(rows), labels) if weighed else model(rows).square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def moved(folder: str) -> list[str]:
    """Parameters that have other memory behind `prepare`, or in a Trainer."""
    from transformers import Trainer

    found = []
    with as_torchrun_starts_it():
        accelerator = ig.integrations.Accelerator(cpu=True)
        for model, takes in (
            (net(), lambda model: accelerator.prepare(model, torch.optim.AdamW(model.parameters()))),
            (toys.model(), lambda model: ig.integrations.trainer(Trainer)(model, toys.arguments(folder, 2, 2))),
        ):
            before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
            takes(model)
            found += [name for name, parameter in model.named_parameters() if parameter.data_ptr() != before[name]]
    return found


def test_a_model_on_the_cpu_is_not_copied_to_accelerates_cpu_0(worlds, tmp_path: Path) -> None:
    assert worlds(2).run(moved, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("weighed", [True, False])
def test_a_loop_of_accelerate_trains_as_one_device_on_uneven_micro_batches(worlds, ranks: int, weighed: bool) -> None:
    """Weighed: labels, of which one micro-batch has none. Not weighed: the mean over all rows. Clipped, AdamW."""
    expected = one_device(weighed)
    for found in [ours(weighed)] if ranks == 1 else worlds(ranks).run(ours, weighed):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("ranks, layout", [(1, "zero1"), (2, "zero1"), (2, "zero2"), (2, "zero3"), (4, "dp4 zero3")])
def test_the_same_loop_trains_as_one_device_under_a_zero_stage(worlds, ranks: int, layout: str) -> None:
    for weighed in (True, False):
        expected = one_device(weighed)
        for found in [ours(weighed, layout)] if ranks == 1 else worlds(ranks).run(ours, weighed, layout):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), (name, weighed)


def resumed_under(saved: str, loaded: str) -> dict[str, Any]:
    """A state that is saved after step 1 under one layout, and loaded by a new program under another; what clips."""
    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as scratch:
        folder = str(ig.comm.consensus.all_gather_object(scratch, ig.Mesh("dp2"))[0])
        accelerator, model, optimizer = next(loop(made(saved), True))
        accelerator.save_state(folder)
        accelerator.save_state(folder)  # over itself
        parts = made(loaded)
        parts[0].load_state(folder)
        *_, (other, resumed, _) = loop(parts, True, first=1)
        found = dict(other.get_state_dict(resumed))
        rows, labels = (t.to(accelerator.device) for t in micro(0, 1))
        accelerator.backward(mean(model(rows), labels), weight=1)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        before = norm.item()
        optimizer.step()
        other.wait_for_everyone()
        return {"found": found, "norm": (before, norm.item())}


@pytest.mark.parametrize("saved, loaded", [("zero1", "zero3"), ("zero3", "zero2")])
def test_a_state_of_one_zero_stage_is_loaded_under_another(worlds, saved: str, loaded: str) -> None:
    expected = one_device(True)
    for seen in worlds(2).run(resumed_under, saved, loaded):
        for name, value in expected.items():
            assert torch.allclose(seen["found"][name], value, rtol=1e-9, atol=1e-12), name
        before, norm = seen["norm"]
        assert math.isnan(before) and norm > 0


def refused_by_engine() -> dict[str, str]:
    """What an accelerator whose models engines train refuses: by what was called, the error and the line to change."""
    said = {}
    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as empty:
        accelerator, model, optimizer = made("zero1")
        loss = model(torch.ones(1, 3, 6, dtype=torch.float64)).square().mean()
        alone = ig.integrations.Accelerator(layout="zero1")
        lonely = alone.prepare(net())
        Path(empty, "model.safetensors").touch()
        for name, act in {
            "retain_graph": lambda: accelerator.backward(loss, retain_graph=True),
            "norm_type": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1),
            "value": lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
            "second": lambda: accelerator.prepare(torch.optim.SGD(model.parameters())),
            "of another": lambda: accelerator.prepare(torch.optim.SGD(net().parameters())),
            "no optimizer": lambda: alone.backward(lonely(torch.ones(1, 3, 6, dtype=torch.float64)).mean()),
            "state_dict": optimizer.state_dict,
            "no state": lambda: accelerator.load_state(empty),
            "pp": lambda: ig.integrations.Accelerator(layout="dp1 pp2"),
            "whole under tp": lambda: ig.integrations.Accelerator(layout="dp1 tp2").prepare(net()),
        }.items():
            try:
                act()
                said[name] = "accepted"
            except ig.IsogradError as error:
                said[name] = error.code
        accelerator.wait_for_everyone()
    return said


def test_what_an_engine_cannot_do_for_accelerate_is_refused(worlds) -> None:
    for said in worlds(2).run(refused_by_engine):
        assert said == {
            **dict.fromkeys(("retain_graph", "norm_type", "value", "second", "of another", "no optimizer"), "IG866"),
            "state_dict": "IG853", "no state": "IG867", "pp": "IG855", "whole under tp": "IG440",
        }  # fmt: skip


def saved_and_loaded() -> list[Any]:
    """A state that is saved after step 1, and loaded after step 3 and into a new program; refusals; two models."""
    seen: list[Any] = []
    with as_torchrun_starts_it() as (rank, _), tempfile.TemporaryDirectory() as scratch:
        folder = str(ig.comm.consensus.all_gather_object(scratch, ig.Mesh("dp2"))[0])
        steps = loop(made(), True)
        accelerator, model, optimizer = next(steps)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        accelerator.save_state(folder)
        *_, (_, _, _) = steps
        seen.append(any(not torch.equal(value, before[name]) for name, value in model.state_dict().items()))
        accelerator.load_state(folder)
        seen.append(all(torch.equal(value, before[name]) for name, value in model.state_dict().items()))
        seen.append(next(iter(optimizer.state.values()))["step"].item())
        *_, (other, resumed, _) = loop(_loaded(folder), True, first=1)  # a new program, from the saved state
        expected = one_device(True)
        found = other.unwrap_model(resumed).state_dict()
        seen.append(all(torch.allclose(found[name], value, rtol=1e-9, atol=1e-12) for name, value in expected.items()))
        seen.append(accelerator.prepare(model) is model)
        seen.append(accelerator.gather_for_metrics(torch.tensor([rank])).tolist())
        second = accelerator.prepare(nn.Linear(2, 2))
        for act in (
            lambda: accelerator.backward(second(torch.ones(1, 2)).sum(), weight=1),
            lambda: accelerator.join_uneven_inputs([model], even_batches=False).__enter__(),
            lambda: ig.integrations.Accelerator(kwargs_handlers=[hook()]),
            lambda: ig.integrations.Accelerator(layout="dp1 pp2"),
        ):
            try:
                act()
            except ig.IsogradError as error:
                seen.append(error.code)
        accelerator.wait_for_everyone()
    return seen


def _loaded(folder: str) -> Parts:
    parts = made()
    parts[0].load_state(folder)
    return parts


def hook() -> Any:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    return DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)


def test_a_state_is_saved_and_loaded_and_what_cannot_be_right_is_refused(worlds) -> None:
    for seen in worlds(2).run(saved_and_loaded):
        assert seen == [True, True, 1.0, True, True, [0, 1], "IG861", "IG862", "IG856", "IG855"]


def prepared_twice(way: str) -> Tensor:
    """The gradient of a model that another accelerator has prepared before, for evaluation or for a training that was
    left under no_sync; of the bare model, or of what the first one returned."""
    with as_torchrun_starts_it() as (rank, ranks):
        model, first, second = net(), ig.integrations.Accelerator(), ig.integrations.Accelerator()
        returned = first.prepare_model(model, evaluation_mode=way == "evaluation")
        if way == "left":
            with first.no_sync(returned):
                first.backward(returned(torch.ones(1, 3, 6, dtype=torch.float64)).square().mean())
        wrapped = second.prepare(returned if way == "returned" else model)
        for number in range(rank, MICROS, ranks):
            with second.no_sync(wrapped) if number + ranks < MICROS else nullcontext():
                rows, labels = micro(0, number)
                second.backward(mean(wrapped(rows), labels), weight=(labels != IGNORED).sum())
        return model[0].weight.grad


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", ["trained", "left", "evaluation", "returned"])
def test_a_model_that_is_prepared_again_reduces_its_gradients(worlds, ranks: int, way: str) -> None:
    model = net()
    micros = [micro(0, number) for number in range(MICROS)]
    mean(model(torch.cat([m[0] for m in micros])), torch.cat([m[1] for m in micros])).backward()
    for found in [prepared_twice(way)] if ranks == 1 else worlds(ranks).run(prepared_twice, way):
        assert torch.allclose(found, model[0].weight.grad, rtol=1e-9, atol=1e-12)


def scripts() -> list[str]:
    """The names of the functions of accelerate that ran to their end."""
    from accelerate.test_utils.scripts import test_script, test_sync

    done = []
    kind = ig.integrations.Accelerator
    with mock.patch.object(test_sync, "Accelerator", kind), mock.patch.object(test_script, "Accelerator", kind):
        calls: list[tuple[Any, tuple[Any, ...]]] = [(test_sync.test_dataloader_break, ())]
        if world.world()[1] > 1:
            calls += [(lambda: test_sync.test_distributed_sync(kind()), ())]
            calls += [(lambda: test_sync.test_distributed_sync_multiple_fwd(kind()), ())]
            for function in (
                test_sync.test_gradient_accumulation,
                test_sync.test_gradient_accumulation_with_opt_and_scheduler,
            ):
                settings = [(split, dispatch, each) for split in (0, 1) for dispatch in (0, 1) for each in (0, 1)]
                calls += [(function, tuple(map(bool, setting))) for setting in settings]
        for seedable in (False, True):
            calls.append((lambda seedable=seedable: (kind(), test_script.training_check(seedable)), ()))
        for function, given in calls:
            with as_torchrun_starts_it():
                function(*given)
                done.append(function.__name__)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerates_own_scripts_pass_through_the_door(worlds, ranks: int) -> None:
    for done in [scripts()] if ranks == 1 else worlds(ranks).run(scripts):
        assert len(done) == (3 if ranks == 1 else 21)


def gathered(layout: str) -> list[tuple[list[int], list[str], list[int]]]:
    """All rows of a loader, gathered for a metric as tensors, as objects and in a mapping of accelerate's kind, as the
    ranks of this layout see them."""
    with as_torchrun_starts_it():
        accelerator = ig.integrations.Accelerator(layout=layout)
        loader = accelerator.prepare(torch.utils.data.DataLoader(range(7), batch_size=2))
        gather = accelerator.gather_for_metrics
        return [
            (
                gather(batch).tolist(),
                gather([str(row) for row in batch.tolist()]),
                gather(UserDict(rows=batch))["rows"].tolist(),
            )
            for batch in loader
        ]


@pytest.mark.parametrize("layout", ["dp2", "tp2", "cp2 ring", "dp2 tp2"])
def test_each_row_is_gathered_once_for_a_metric(worlds, layout: str) -> None:
    """Under tp each row came twice, and the cut of the last batch then left rows out."""
    for batches in worlds(4 if layout == "dp2 tp2" else 2).run(gathered, layout):
        assert [row for rows, _, _ in batches for row in rows] == list(range(7))
        assert [row for _, rows, _ in batches for row in rows] == list("0123456")
        assert [row for _, _, rows in batches for row in rows] == list(range(7))
