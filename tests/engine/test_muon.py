"""Optimizers that need whole matrices: Muon beside AdamW steps as on one device at every stage, or is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from isograd.comm import world
from isograd.comm.group import Group
from isograd.comm.handle import Handle
from isograd.core.contract import assemble
from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.engine import ChainedOptimizer, Engine, Muon, Shards
from isograd.engine import muon as by_matrix
from isograd.engine.plan import make_plan
from isograd.errors import IsogradError
from isograd.models import Transformer, preset
from tests.parity import cases

from . import folded, toys

WHOLE = ["first.*", "twice.*", "last.*", "unused.*"]  # the head, out, is left to AdamW


def muon(matrices: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(matrices, lr=0.05, weight_decay=0.02)


class Apart:
    """What a user writes on one device: two optimizers, called one after the other."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        chosen = [p for p in parameters if p.dim() == 2 and len(p) != 5]
        self.both = muon(chosen), toys.adamw([p for p in parameters if not any(p is c for c in chosen)])

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()


def joined(shards: Shards) -> ChainedOptimizer:
    return ChainedOptimizer(muon(shards.matrices), toys.adamw(shards.rest))


def muon_at_every_stage() -> None:
    ranks = world.world()[1]
    truth = toys.one_device(12, 3, Apart, 0.5)  # type: ignore[arg-type]
    runs = [toys.engine_run(f"dp{ranks} zero{zero}", 12, 3, joined, matrices=WHOLE) for zero in range(4)]
    for run in runs:
        toys.assert_same_training(run, truth)
        toys.assert_same_bits(run.parameters, runs[0].parameters)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_muon_beside_adamw_steps_as_on_one_device_with_the_same_bits_at_every_stage(worlds, ranks: int) -> None:
    worlds(ranks).run(muon_at_every_stage)


def experts_by_muon() -> list[str]:
    """Matrices of blocks and of each expert by Muon, what is left by AdamW; the bits of zero0 at every stage."""
    wrong = []
    for layout in ("dp4 ep2", "dp2 tp2 ep4"):
        micro_batches, outcomes = Mesh(layout).size("dp cp") * 2, []
        truth = one_device_by_muon(micro_batches)
        for zero in range(4):
            outcomes.append(folded.train(f"{layout} zero{zero}", 2, stacks_joined, matrices=["blocks.*"]))
            wrong += [f"{layout} zero{zero}: {line}" for line in folded.differences(outcomes[-1], truth)]
            toys.assert_same_bits(outcomes[-1].parameters, outcomes[0].parameters)
    return wrong


def stacks_joined(shards: Shards) -> ChainedOptimizer:
    assert {shard.dim() for shard in shards.matrices} == {2, 3}
    return ChainedOptimizer(Muon(shards.matrices, lr=0.05, weight_decay=0.02), toys.adamw(shards.rest))


@functools.lru_cache
def one_device_by_muon(micro_batches: int) -> folded.Outcome:
    """Each expert's matrix is a parameter of torch's own Muon."""
    return folded.one_device(micro_batches, optimizer=ApartByExpert)


class ApartByExpert:
    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.stacks = [p for n, p in named.items() if n.startswith("blocks.") and p.dim() == 3]
        self.experts = [[nn.Parameter(matrix) for matrix in p.data] for p in self.stacks]
        whole = [p for n, p in named.items() if n.startswith("blocks.") and n.endswith("dense.weight")]
        by_muon = {id(p) for p in whole + self.stacks}
        rest = [p for p in named.values() if id(p) not in by_muon]
        self.all = list(named.values())
        self.both = muon([*whole, *(matrix for stack in self.experts for matrix in stack)]), toys.adamw(rest)

    def zero_grad(self) -> None:
        for parameter in self.all:
            parameter.grad = None

    def step(self) -> None:
        for stack, matrices_of_it in zip(self.stacks, self.experts, strict=True):
            for matrix, gradient in zip(matrices_of_it, stack.grad, strict=True):  # type: ignore[arg-type]
                matrix.grad = gradient
        for optimizer in self.both:
            optimizer.step()


def test_muon_steps_each_experts_matrix_as_on_one_device_with_the_same_bits_at_every_stage(worlds) -> None:
    assert worlds(4).run(experts_by_muon) == [[]] * 4


def bf16_with_muon() -> list[toys.Outcome]:
    return [
        toys.engine_run(f"dp2 zero{zero}", 8, 2, joined, matrices=WHOLE, dtype=torch.bfloat16, unsynced="ns")
        for zero in range(4)
    ]


def test_half_precision_matrices_have_whole_masters(worlds) -> None:
    first, *others = worlds(2).run(bf16_with_muon)[0]
    for other in others:
        toys.assert_same_bits(first.gradients, other.gradients)
        assert all(torch.equal(first.parameters[n], p) for n, p in other.parameters.items())


def muon_of_a_transformer(layout: str, accumulation: int, name: str = "deep-tied") -> dict[str, Tensor]:
    """Parameters of this rank's stages after two steps; every matrix by Muon, the one that two stages share too."""
    mesh, config = Mesh(layout), cases.CONFIGS[name]
    model = Transformer(config, mesh, dtype=torch.float64)
    engine = Engine(model, mesh, joined, matrices=["*"], clip=0.5)
    for step in range(2):
        micros = []
        for j in range(accumulation):
            index = mesh.index("dp") * accumulation + j
            tokens, labels, samples = cases.micro_batch(config, step, index, accumulation * mesh.size("dp"))
            micros.append({"tokens": tokens, "labels": labels, "key": cases.dropout_key(step), "samples": samples})
        engine.train_step(micros)
    with engine.full_parameters():
        return {r.name: assemble(r.parameter.detach(), r.contract, mesh).clone() for r in engine.table}


def apart(found: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    whole = float(torch.stack([p.norm() for p in truth.values()]).norm())  # key biases stay zero but for noise
    errors = {name: float((value - truth[name]).norm()) for name, value in found.items()}
    limits = {name: cases.TOLERANCE * max(float(truth[name].norm()), cases.FLOOR * whole) for name in found}
    return [f"{name}: {error:.1e}" for name, error in errors.items() if not error <= limits[name]]


TP_LAYOUTS = ("tp2 zero0", "tp2 sp zero1", "tp2 zero3")


def muon_under_tp(truth: dict[str, Tensor]) -> list[str]:
    """What differs from one device, with keys and values in two heads; and the bits of zero0 at every stage."""
    wrong, runs = [], []
    for layout in TP_LAYOUTS:
        runs.append(muon_of_a_transformer(layout, 2, "qwen"))
        wrong += [f"{layout}: {line}" for line in apart(runs[-1], truth)]
    return wrong + [f"{name}: other bits" for name, p in runs[2].items() if not torch.equal(p, runs[0][name])]


def test_muon_steps_whole_matrices_of_which_tp_ranks_have_parts(worlds) -> None:
    (truth,) = worlds(1).run(muon_of_a_transformer, "1", 2, "qwen")
    assert worlds(2).run(muon_under_tp, truth) == [[]] * 2


def muon_with_lost_parts(truth: dict[str, Tensor]) -> list[bool]:
    """Whether a run differs from one device whose matrices' parts do not arrive: at the home, and back from it."""
    seen, exchange = [], by_matrix.raw.exchange

    def losing(out: list[list[Tensor]], into: list[list[Tensor]], group: Group) -> Handle:
        return exchange(out, into, group).and_then(lambda: [t.zero_() for part in into for t in part])

    for method in ("collect", "spread"):
        original = getattr(by_matrix.TensorParallelMatrices, method)

        def lost(self: object, *given: object, original: Any = original) -> object:
            with mock.patch.object(by_matrix.raw, "exchange", losing):
                return original(self, *given)

        with mock.patch.object(by_matrix.TensorParallelMatrices, method, lost):
            seen.append(bool(apart(muon_of_a_transformer("tp2 zero1", 2, "qwen"), truth)))
    return seen


def test_parts_of_matrices_that_are_lost_on_their_way_are_seen(worlds) -> None:
    (truth,) = worlds(1).run(muon_of_a_transformer, "1", 2, "qwen")
    assert worlds(2).run(muon_with_lost_parts, truth) == [[True, True]] * 2


@pytest.mark.parametrize("layout", ["tp4 zero1", "dp2 tp2 zero0", "dp2 tp2 sp zero2", "dp2 tp2 zero3", "pp2 tp2 zero1"])
def test_muon_steps_them_under_four_ranks_with_replicas_of_key_heads(worlds, layout: str) -> None:
    name = "deep-tied" if layout.startswith("pp2") else "qwen"
    accumulation = 4 // Mesh.unbound(layout).size("dp")
    (truth,) = worlds(1).run(muon_of_a_transformer, "1", 4, name)
    for found in worlds(4).run(muon_of_a_transformer, layout, accumulation, name):
        assert not apart(found, truth)


def bf16_under_tp() -> list[dict[str, Tensor]]:
    """By stage; a parameter is edited between two steps."""
    runs = []
    for zero in (0, 1, 3):
        mesh, config = Mesh(f"tp2 zero{zero}"), cases.CONFIGS["qwen"]
        model = Transformer(config, mesh, dtype=torch.bfloat16)
        engine = Engine(model, mesh, joined, matrices=["*"])
        for step in range(2):
            tokens, labels, _ = cases.micro_batch(config, step, 0, 1)
            loss, count = model(tokens, labels)
            engine.backward(loss, weight=count)
            engine.step()
            if step == 0:
                with engine.full_parameters(), torch.no_grad():
                    for parameter in model.parameters():
                        parameter[0] *= 2
        masters = engine._sharded_optimizer.masters
        homes = {s.name for s in engine._sharded_optimizer.across.slots if engine._sharded_optimizer.across.is_home(s)}
        assert all(masters[name].shape == engine.table.records[name].contract.shape for name in homes)
        across = engine._sharded_optimizer.across.slots
        assert {True} == {len(masters[s.name]) == 0 for s in across if s.name not in homes}
        with engine.full_parameters():
            runs.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return runs


def test_half_precision_parts_have_one_whole_master_and_are_edited_in_their_parts(worlds) -> None:
    for first, *others in worlds(2).run(bf16_under_tp):
        for other in others:
            assert all(torch.equal(first[name], p) for name, p in other.items())


def test_muon_steps_alike_under_pipelines_and_cut_sequences(worlds) -> None:
    (truth,) = worlds(1).run(muon_of_a_transformer, "1", 4)
    for layout in ("dp2 pp2 zero1", "dp2 cp2 zero3"):
        for found in worlds(4).run(muon_of_a_transformer, layout, 2):
            assert not apart(found, truth), layout


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_matrix_has_one_owner_and_owners_have_about_as_much(ranks: int) -> None:
    model = nn.Sequential(*(nn.Linear(24, n) for n in (8, 40, 16, 24, 24, 33, 9, 17, 24, 24, 64)))
    loads, owners = [0] * ranks, set()
    for rank in range(ranks):
        mesh = Mesh.unbound(f"dp{ranks} zero1", rank)
        table = contracts(model, mesh)
        found = by_matrix.owners(table, mesh, ["*.weight"])
        owners.add(tuple(found.items()))
        for slot in make_plan(table, mesh, 1 << 20, owners=found).slots:
            assert slot.uncut_matrix == slot.name.endswith("weight")
            rows = slot.rows(slot.parameter).numel()
            assert not slot.uncut_matrix or rows == slot.parameter.numel() * (found[slot.name] == rank)
            loads[rank] += rows * slot.uncut_matrix
    assert len(owners) == 1, "ranks disagree about who owns what"
    total = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert sum(loads) == total
    assert max(loads) <= total / ranks + 64 * 24


# -- refusals


def muon_of_row_shards() -> None:
    model = nn.Linear(64, 128, bias=False)
    Engine(model, Mesh("dp2 zero1"), muon)


def muon_of_whole_parameters_at_stage_0() -> None:
    model = nn.Linear(64, 128, bias=False)
    Engine(model, Mesh("dp2 zero0"), muon)


def by_dims(shards: Shards) -> ChainedOptimizer:
    return ChainedOptimizer(muon([p for p in shards if p.dim() == 2]), toys.adamw([p for p in shards if p.dim() != 2]))


def muon_of_tensor_parallel_parts() -> None:
    mesh = Mesh("tp2")
    Engine(Transformer(preset("tiny-llama"), mesh), mesh, by_dims)


def no_such_matrix() -> None:
    Engine(toys.Toy(), Mesh("dp2"), joined, matrices=["twice.*", "gain", "third.*"])


def group_after_joining() -> None:
    joint = ChainedOptimizer(toys.sgd([nn.Parameter(torch.ones(2))]), toys.adamw([nn.Parameter(torch.ones(2))]))
    joint.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def unknown_way_to_accumulate() -> None:
    Engine(toys.Toy(), Mesh("dp2"), toys.sgd, accumulate="shard")  # type: ignore[arg-type]


def sharded_without_overlap() -> None:
    Engine(toys.Toy(), Mesh("dp2"), toys.sgd, accumulate="sharded", overlap=False)


def codes(*trials: object) -> list[str]:
    found = []
    for trial in trials:
        try:
            trial()  # type: ignore[operator]
            found.append("")
        except IsogradError as error:
            found.append(error.code)
    return found


REFUSED = {
    muon_of_row_shards: "IG531",
    muon_of_whole_parameters_at_stage_0: "",
    muon_of_tensor_parallel_parts: "IG531",
    no_such_matrix: "IG528",
    group_after_joining: "IG530",
    unknown_way_to_accumulate: "IG532",
    sharded_without_overlap: "IG532",
}


def test_pieces_of_matrices_are_refused_on_every_rank_and_whole_ones_are_not(worlds) -> None:
    for found in worlds(2).run(codes, *REFUSED):
        assert dict(zip(REFUSED, found, strict=True)) == REFUSED


# -- several optimizers as one


def steps(joint: ChainedOptimizer, parameters: list[nn.Parameter], count: int) -> None:
    for _ in range(count):
        joint.zero_grad()
        sum((p**2).sum() for p in parameters).backward()  # type: ignore[union-attr]
        joint.step()


def test_joined_optimizers_are_scheduled_saved_and_loaded_as_one() -> None:
    def fresh() -> tuple[list[nn.Parameter], ChainedOptimizer]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5))]
        return parameters, ChainedOptimizer(muon(parameters[:1]), toys.adamw(parameters[1:]))

    parameters, joint = fresh()
    schedule = torch.optim.lr_scheduler.LambdaLR(joint, lambda step: 0.5**step)
    steps(joint, parameters, 2)
    schedule.step()
    assert [group["lr"] for member in joint.optimizers for group in member.param_groups] == [0.025, 0.005]
    saved, values = copy.deepcopy(joint.state_dict()), [p.detach().clone() for p in parameters]
    steps(joint, parameters, 2)
    again, other = fresh()
    other.load_state_dict(saved)
    with torch.no_grad():
        for parameter, value in zip(again, values, strict=True):
            parameter.copy_(value)
    steps(other, again, 2)
    assert all(torch.equal(a, b) for a, b in zip(parameters, again, strict=True))
