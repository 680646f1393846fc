"""Half precision: fp32 masters and sums; an overflow on one rank is everybody's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from isograd.core.mesh import DATA, Mesh
from isograd.engine import Engine, LossScale

from . import toys


def masters_of_one_device(dtype: torch.dtype, steps: int) -> dict[str, Tensor]:
    """The definition: half-precision forward and backward, fp32 sum of micro-batch gradients, fp32 master step."""
    model = toys.Toy(dtype)
    masters = {n: p.detach().float() for n, p in model.named_parameters() if p.requires_grad}
    optimizer = toys.adamw(list(masters.values()))
    for step in range(steps):
        sums = {n: torch.zeros_like(m) for n, m in masters.items()}
        rows = 0
        for index in range(4):
            x, y = toys.micro_batch(step, index)
            if len(x):
                model.zero_grad()
                toys.loss_of(model, x, y).backward()  # the weight is applied in fp32: bf16 cannot hold 1,003
                for n, p in model.named_parameters():
                    if p.grad is not None:
                        sums[n] += p.grad.float() * len(x)
            rows += len(x)
        for n, master in masters.items():
            master.grad = None if n.startswith("unused") else sums[n] / rows
        optimizer.step()
        with torch.no_grad():
            for n, p in model.named_parameters():
                if n in masters:
                    p.copy_(masters[n])
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.medium
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bf16_keeps_fp32_masters_and_sums_in_fp32(worlds, ranks: int, zero: int) -> None:
    truth = masters_of_one_device(torch.bfloat16, 3)
    run = partial(toys.engine_run, f"dp{ranks} zero{zero}", steps=3, dtype=torch.bfloat16, clip=None)
    for result in worlds(ranks).run(run):
        for name, expected in truth.items():
            # Only the last bit of a rounding may differ: the fp32 sums are taken in another order.
            off = (result.parameters[name].float() - expected.float()).abs()
            assert (off <= expected.float().abs() * 2**-7 + 1e-6).all(), name
            assert (off > 0).float().mean() < 0.02, name


def fp16_with_a_planted_overflow(zero: int) -> list[tuple[bool, float, float]]:
    """Rank 1's loss overflows in step 1 only."""
    mesh, model = Mesh(f"dp2 zero{zero}"), toys.Toy(torch.float16)
    engine = Engine(model, mesh, toys.sgd, loss_scale=LossScale(value=64.0, growth_interval=2))
    seen = []
    for step in range(4):
        x, y = toys.micro_batch(step, 2)
        loss = toys.loss_of(model, x, y).float()
        if step == 1 and mesh.index(DATA) == 1:
            loss = loss * 1e8
        engine.backward(loss, weight=len(x))
        with engine.full_parameters():
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
        stats = engine.step()
        with engine.full_parameters():
            moved = any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
            checksum = sum(float(p.detach().double().sum()) for p in model.parameters())
        assert moved != stats.skipped
        seen.append((stats.skipped, engine.loss_scale.value if engine.loss_scale else 0.0, checksum))
    return seen


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_overflow_on_one_rank_makes_all_ranks_skip_and_halve_the_scale(worlds, zero: int) -> None:
    first, second = worlds(2).run(fp16_with_a_planted_overflow, zero)
    assert first == second
    assert [skipped for skipped, _, _ in first] == [False, True, False, False]
    assert [scale for _, scale, _ in first] == [64.0, 32.0, 32.0, 64.0]


def fp16_gradients() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    mesh = Mesh("dp2 zero1")
    found = []
    for scale in (1.0, 1024.0):
        model = toys.Toy(torch.float16)
        engine = Engine(model, mesh, toys.sgd, loss_scale=LossScale(value=scale))
        x, y = toys.micro_batch(0, 2 * mesh.rank)
        engine.backward(toys.loss_of(model, x, y), weight=len(x))
        found.append({n: g.clone() for n, g in engine.grads().items()})
    return found[0], found[1]


def test_the_loss_scale_is_taken_out_of_gradients_again(worlds) -> None:
    plain, scaled = worlds(2).run(fp16_gradients)[0]
    for name, expected in plain.items():
        # fp16's own rounding (2**-11 a step of the chain, more for values near its smallest) is all that may differ.
        assert float((scaled[name] - expected).norm()) <= 2**-6 * float(expected.norm()) + 1e-5, name


def edit(model: toys.Toy) -> None:
    """As users do it: some edits move a tensor's version counter, and those of `.data` do not."""
    with torch.no_grad():
        model.first.weight.clamp_(-0.1, 0.1)
    model.twice.weight.data[3:5].mul_(2)
    model.out.bias.data.copy_(torch.arange(5.0))
    state = model.state_dict()
    state["gain"] = torch.tensor(0.25, dtype=torch.bfloat16)
    model.load_state_dict(state)


def edited_between_steps(layout: str, inside: bool) -> dict[str, Tensor]:
    """Three steps; the second finds edited parameters, made inside `full_parameters` or outside."""
    mesh, model = Mesh(layout), toys.Toy(torch.bfloat16)
    engine = Engine(model, mesh, toys.adamw)
    for step in range(3):
        if step == 1 and inside:
            with engine.full_parameters():
                edit(model)
        elif step == 1:
            edit(model)
        x, y = toys.micro_batch(step, 2 * mesh.index(DATA))
        engine.backward(toys.loss_of(model, x, y), weight=len(x))
        engine.step()
    assert abs(float(model.gain.detach()) - 0.25) < 0.05
    kept = engine._sharded_optimizer.masters
    masters = {f"master of {name}": master.detach().clone() for name, master in kept.items()}
    return {name: p.detach().view(torch.int16).clone() for name, p in model.named_parameters()} | masters


@pytest.mark.medium
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_half_precision_parameters_edited_anywhere_are_kept(worlds, zero: int) -> None:
    """FAILURES A10: `load_state_dict`, clamp_ and edits of `.data` were undone by the next step, silently."""
    for rank in (0, 1):
        outside = worlds(2).run(edited_between_steps, f"dp2 zero{zero}", False)[rank]
        toys.assert_same_bits(outside, worlds(2).run(edited_between_steps, f"dp2 zero{zero}", True)[rank])
