"""Weights that are cut over ep owe edp only: two groups of owners in one step, and the gradient of one device."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from isograd.core.contract import Shard, declare
from isograd.core.contract_table import contracts, describe_sum
from isograd.core.layout import Layout
from isograd.core.mesh import DATA, Mesh
from isograd.engine.plan import make_plan, slot_of
from isograd.errors import IsogradError

from . import folded

LAYOUTS = ("dp2 ep2", "cp2 ep2", "dp4 ep2", "dp2 tp2 ep4", "dp2 tp2 ep2", "dp2 cp2 ep4", "dp2 cp2 ep2", "tp2")
WAYS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (3, {"accumulate": "sharded"}),
    (3, {}),
    (1, {"overlap": False}),
    (3, {"reproducible": True}),
)


def wrong_in(cases: list[tuple[str, int, dict[str, Any]]]) -> list[str]:
    """On this rank of a world: all that is not one device's; and stages whose bits are not those of stage 0."""
    found = []
    for layout, accumulation, options in cases:
        truth = folded.one_device(accumulation * Mesh(layout).size(DATA))
        outcomes = [folded.train(f"{layout} zero{zero}", accumulation, **options) for zero in range(4)]
        for zero, outcome in enumerate(outcomes):
            wrong = folded.differences(outcome, truth)
            wrong += [n for n, p in outcomes[0].parameters.items() if not torch.equal(p, outcome.parameters[n])]
            found += [f"{layout} zero{zero}, {accumulation}, {options}: {line}" for line in wrong]
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_train_as_on_one_device_with_the_same_bits_at_every_stage(worlds, ranks: int) -> None:
    layouts = [layout for layout in LAYOUTS if Layout.parse(layout).world_size == ranks]
    cases = [(layout, *WAYS[(place + ranks) % len(WAYS)]) for place, layout in enumerate(layouts)]
    assert worlds(ranks).run(partial(wrong_in, cases)) == [[]] * ranks


def failures(layout: str) -> None:
    """Ranks fail at different parameters, between two exchanges; and one alone, after the last exchange."""
    model, engine = folded.engine_of(layout, bucket_mb=1e-4)
    rank, micros = engine.mesh.rank, 2
    truth = folded.one_device(micros * engine.mesh.size(DATA)).gradients[0]
    first, last = folded.batches_of(engine.mesh, 0, micros)
    own = ("weight", "bias")[rank % 2]
    places = [f"blocks.1.experts.{own}", f"blocks.0.experts.{own}", "out.bias", "first.weight" if rank == 0 else ""]
    for number, place in enumerate(places if engine.mesh.layout.zero < 3 else places[:3]):
        engine.backward(*model(*first))
        hook = model.get_parameter(place).register_hook(lambda _: 1 / 0) if place else None
        if hook is None:
            engine.backward(*model(*last))
        else:
            with pytest.raises(ZeroDivisionError):
                engine.backward(*model(*last))
            hook.remove()
        if number % 2 or rank == 1:
            engine.discard()
        else:
            with pytest.raises(IsogradError, match="IG550"):
                engine.step()
        engine.accumulate([first, last])
        for name, gradient in engine.grads().items():
            expected = truth.get(name, torch.zeros_like(gradient))
            assert float((gradient - expected).norm()) <= 1e-9 * float(expected.norm()), f"after {place}: {name}"
        engine.discard()


@pytest.mark.parametrize("layout", ["dp4 ep2 zero1", "dp2 tp2 ep2", "dp2 tp2 ep4 zero3", "dp4 ep2 zero3"])
def test_a_failed_step_leaves_nothing_behind_in_either_group_of_owners(worlds, layout: str) -> None:
    worlds(4).run(partial(failures, layout))


# -- what follows from the contract


class Parts(nn.Module):
    """A parameter of each kind: whole, cut over tp unevenly, in copies over tp, experts, experts' biases."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        tp, ep = mesh.size("tp"), mesh.size("ep")
        halves = tuple((i * 2 // tp * 30, (i * 2 // tp + 1) * 30) for i in range(tp))
        kinds: dict[str, tuple[tuple[int, ...], tuple[Shard, ...], str]] = {
            "whole": ((70, 3), (), DATA),
            "rows": ((101, 64), (Shard.even("tp", 0, 101, tp),), DATA),
            "columns": ((9, 101), (Shard.even("tp", 1, 101, tp),), DATA),
            "copies": ((60, 5), (Shard("tp", 0, halves if tp > 1 else ((0, 60),)),), DATA),
            "experts": ((8, 16, 4), (Shard.even("ep", 0, 8, ep),), "edp"),
            "biases": ((8, 5), (Shard.even("ep", 0, 8, ep),), "edp"),
        }
        for name, (shape, shards, data) in kinds.items():
            box = [(0, size) for size in shape]
            for shard in shards:
                box[shard.dim] = shard.ranges[mesh.index(shard.axis)]
            parameter = nn.Parameter(torch.zeros([stop - start for start, stop in box]))
            self.register_parameter(name, declare(parameter, mesh, shape=shape, shards=shards, data=data))


MANY = ("dp4 ep4", "dp4 tp2 ep8", "dp4 tp2 ep4", "dp2 tp4 ep2", "dp2 cp2 tp2 ep2", "tp4", "dp2 tp2 pp2 ep2", "1")


@pytest.mark.parametrize("text", MANY)
def test_each_element_is_owned_once_by_a_rank_that_counts_it(text: str) -> None:
    """Of what norms add up and checkpoints write, on one stage."""
    layout = Layout.parse(text)
    seen = {name: torch.zeros(p.shape, dtype=torch.int64) for name, p in Parts(Mesh.unbound("1")).named_parameters()}
    for rank in layout.ranks("dp cp tp", layout.world_size - 1):
        mesh = Mesh.unbound(layout, rank)
        for record in contracts(Parts(mesh), mesh):
            slot = slot_of(record, mesh)
            if slot.contract.is_primary_replica(mesh):
                box = tuple(slice(start, stop) for start, stop in slot.contract.local(mesh))
                slot.rows(seen[record.name][box]).add_(1)
    assert all(bool((count == 1).all()) for count in seen.values()), seen


@pytest.mark.parametrize("text", MANY)
def test_owners_of_a_bucket_have_the_same_buckets_under_the_same_numbers(text: str) -> None:
    """Though the parts of other parameters have different sizes on them: an edp group has ranks of all tp."""
    layout, found = Layout.parse(text), {}
    for rank in range(layout.world_size):
        mesh = Mesh.unbound(layout, rank)
        plan = make_plan(contracts(Parts(mesh), mesh), mesh, 14_000)
        assert sorted(s.name for b in plan.buckets for s in b.slots) == sorted(
            seen for seen, _ in Parts(mesh).named_parameters()
        )
        for bucket in plan.buckets:
            assert {slot.owners.ranks for slot in bucket.slots} == {bucket.owners.ranks}
            assert bucket.owners.ranks in [group.ranks for group in plan.owners]
            key = bucket.owners.ranks, bucket.number
            assert rank in bucket.owners.ranks
            names = [slot.name for slot in bucket.slots]
            assert found.setdefault(key, names) == names
        assert max(Counter((b.owners.ranks, b.number) for b in plan.buckets).values()) == 1


def test_the_table_says_who_sums_an_experts_gradient() -> None:
    mesh = Mesh.unbound("dp4 tp2 ep4", rank=5)
    table = contracts(Parts(mesh), mesh)
    assert describe_sum(table["experts"], mesh) == "edp: 1, 5"
    assert describe_sum(table["whole"], mesh) == "dp: 1, 3, 5, 7"
    alone = Mesh.unbound("dp2 tp2 ep4")
    assert describe_sum(contracts(Parts(alone), alone)["experts"], alone) == "nothing to sum"
    assert "dim 0 over ep" in str(table)


def test_layers_that_take_turns_are_not_told_as_all_layers() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2, bias=i in (0, 2, 4, 5)) for i in range(6))})
    text = str(contracts(model, Mesh.unbound("dp2")))
    assert "blocks.{0-5}.weight" in text
    assert "blocks.{0,2,4-5}.bias" in text
