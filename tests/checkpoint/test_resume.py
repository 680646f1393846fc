"""A run goes on from a checkpoint of any other layout as if it had never stopped: fp64, 1e-9, gradients by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isograd.checkpoint import CheckpointManager, SavedWeights
from isograd.checkpoint.read import Reader
from isograd.core.mesh import Mesh
from isograd.engine import ChainedOptimizer, Engine, LossScale
from isograd.errors import CheckpointError
from isograd.models import Transformer
from tests.checkpoint import toys
from tests.checkpoint.toys import Run
from tests.engine.toys import Toy, assert_same_bits, loss_of, micro_batch

PAIRS = (
    ("dp4 zero0", "dp2 tp2 sp zero3"),
    ("dp2 tp2 zero3", "dp4 zero0"),
    ("dp4 zero3", "tp4"),  # more tp ranks than key heads
    ("tp2 sp dp2 zero2", "cp2 ulysses dp2"),
    ("cp2 ring tp2 sp zero1", "pp2 dp2 zero1"),
    ("pp2 dp2 zero2", "dp4 zero2"),
    ("dp4 zero1", "pp2 tp2"),
    ("pp2 tp2", "1"),
    ("1", "dp4 zero1"),
    ("dp2 zero1", "dp4 zero3"),
)


def world_of(layout: str) -> int:
    return Mesh.unbound(layout).layout.world_size


def assert_same_run(found: Run, truth: Run, tolerance: float = 1e-9) -> None:
    assert len(found.gradients) == len(truth.gradients) == len(truth.losses) > 0
    for step, (mine, theirs) in enumerate(zip(found.gradients, truth.gradients, strict=True)):
        assert mine.keys() == theirs.keys()
        for name, gradient in theirs.items():
            error = float((mine[name] - gradient).norm())
            assert error <= tolerance * float(gradient.norm()), f"step {step}, {name}: error {error:.2e}"
    for ours, theirs in zip(found.losses + found.norms, truth.losses + truth.norms, strict=True):
        assert abs(ours - theirs) <= tolerance * abs(theirs)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_goes_on_under_another_layout(worlds, tmp_path: Path, before: str, after: str) -> None:
    truth = worlds(world_of(before)).run(toys.save_then_go_on, tmp_path, before)[0]
    for found in worlds(world_of(after)).run(toys.resume, tmp_path, after):
        assert (found.start, found.extra) == (2, {"position": 16})
        assert_same_run(found, truth)


def resume_both(folder: Path, layout: str, **options: Any) -> tuple[Run, Run]:
    return toys.save_then_go_on(folder, layout, **options), toys.resume(folder, layout, **options)


EXACT = (
    ("dp2 tp2 sp zero1", {"dtype": torch.float32}),
    ("dp2 tp2 zero3", {"dtype": torch.bfloat16}),
    ("dp4 zero0", {"dtype": torch.bfloat16}),
    ("dp2 pp2 zero2", {"dtype": torch.float16, "model": "gpt2"}),
    ("dp4 zero1", {"dtype": torch.float32, "offload": True, "optimizer": toys.sgd}),
)


def resume_exactly(folder: Path) -> list[tuple[Run, Run]]:
    return [resume_both(folder / str(i), layout, **options) for i, (layout, options) in enumerate(EXACT)]


def test_the_same_layout_goes_on_with_the_same_bits(worlds, tmp_path: Path) -> None:
    """Masters of half precision, the loss scale of fp16 and the state of the optimizer among them."""
    for runs in worlds(4).run(resume_exactly, tmp_path):
        for truth, found in runs:
            assert (found.losses, found.norms) == (truth.losses, truth.norms)
            for mine, theirs in zip(found.gradients, truth.gradients, strict=True):
                assert_same_bits(mine, theirs)


def half_to_half(folder: Path, layout: str, saves: bool) -> dict[str, torch.Tensor]:
    """bf16 under a layout: what a checkpoint keeps of it, or what is kept after reading that."""
    engine = toys.engine_of(layout, dtype=torch.bfloat16, seed=0 if saves else 5)
    with CheckpointManager(folder / ("first" if saves else "second"), engine) as keeper:
        if saves:
            toys.train(engine, 0, 2, gradients=False)
        else:
            assert keeper.load(folder / "first" / "step-00000002") is not None
        keeper.save(2)
        keeper.wait()
        reader = Reader(keeper.folder / "step-00000002")
        return {key: reader.read(key) for key in reader.manifest.tensors}


def test_masters_and_moments_survive_another_layout_bit_for_bit(worlds, tmp_path: Path) -> None:
    first = worlds(4).run(half_to_half, tmp_path, "dp2 tp2 zero1", True)[0]
    second = worlds(4).run(half_to_half, tmp_path, "pp2 dp2 zero0", False)[0]
    assert {key.partition("/")[0] for key in first} == {"model", "master", "optimizer", "generator"}
    assert_same_bits({k: v.float() for k, v in first.items()}, {k: v.float() for k, v in second.items()})


# -- any module ------------------------------------------------------------------------------------------------------


class Counting(Toy):
    """With buffers: one saved, one not, one a number, one empty."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(dtype)
        self.register_buffer("seen", torch.zeros(3, dtype=dtype))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def by_name(shards: Any) -> torch.optim.Optimizer:
    groups = shards.groups({"*bias": {"weight_decay": 0.0}, "*": {"lr": 3e-3}})
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


def toy_steps(engine: Engine, start: int, stop: int) -> list[float]:
    share, losses = 4 // engine.mesh.size("dp"), []
    for step in range(start, stop):
        for j in range(share):
            x, y = micro_batch(step, engine.mesh.index("dp") * share + j)
            engine.backward(loss_of(engine.model, x, y), weight=len(x))
        losses.append(engine.step().loss)
    return losses


def toy_run(folder: Path, before: str, after: str) -> tuple[list[float], list[float], Any]:
    saver = Engine(Counting(), Mesh(before), by_name, clip=0.5, loss_scale=LossScale(value=64.0))
    with CheckpointManager(folder, saver) as keeper:
        toy_steps(saver, 0, 2)
        saver.model.seen.fill_(7)
        saver.model.calls.fill_(2)
        for group in saver.optimizer.param_groups:
            group["lr"] *= 0.5
        assert saver.loss_scale is not None
        saver.step_state.change(loss_scale=replace(saver.loss_scale, good_steps=11))
        keeper.save(2)
    truth = toy_steps(saver, 2, 4)
    model = Counting()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    loader = Engine(model, Mesh(after), by_name, clip=0.5, loss_scale=LossScale())
    with CheckpointManager(folder, loader) as keeper:
        keeper.load()
    assert loader.loss_scale is not None
    scale = (loader.loss_scale.value, loader.loss_scale.good_steps)
    rates = [group["lr"] for group in loader.optimizer.param_groups]
    states = sum(len(state) > 0 for state in loader.optimizer.state.values())
    masters = loader._sharded_optimizer.masters
    owned = sum(master.numel() > 0 for name, master in masters.items() if "unused" not in name)
    with loader.full_parameters():
        frozen = float(model.frozen.weight.sum()), float(Counting().frozen.weight.sum())
    return (
        truth,
        toy_steps(loader, 2, 4),
        (scale, rates, model.seen.tolist(), int(model.calls), (states == owned, owned), frozen),
    )


@pytest.mark.parametrize(("before", "after"), [("dp4 zero0", "dp4 zero3"), ("dp4 zero3", "dp4 zero1")])
def test_any_module_goes_on_with_groups_buffers_frozen_and_unused_parameters(
    worlds, tmp_path: Path, before: str, after: str
) -> None:
    results = worlds(4).run(toy_run, tmp_path, before, after)
    assert any(owned for _, _, (_, _, _, _, (_, owned), _) in results)
    for truth, found, (scale, rates, seen, calls, (states, _), frozen) in results:
        assert found == pytest.approx(truth, rel=1e-9)
        assert scale == (64.0, 11)
        assert rates == [5e-3, 1.5e-3]
        assert (seen, calls) == ([7.0, 7.0, 7.0], 2)
        assert states  # where this rank owns rows, but of the two parameters that were never used
        assert frozen[0] == pytest.approx(frozen[1], rel=1e-12)


# -- Muon ------------------------------------------------------------------------------------------------------------


def muon(shards: Any) -> torch.optim.Optimizer:
    return ChainedOptimizer(torch.optim.Muon(shards.matrices, lr=2e-2), torch.optim.AdamW(shards.rest, lr=1e-2))


def test_joined_optimizers_go_on_with_whole_matrices_on_other_owners(worlds, tmp_path: Path) -> None:
    options = {"optimizer": muon, "matrices": ["blocks.*.mlp.*.weight"]}
    truth = worlds(4).run(partial(toys.save_then_go_on, tmp_path, "dp4 zero1", **options))[0]
    found = worlds(2).run(partial(toys.resume, tmp_path, "dp2 zero3", **options))[0]
    assert_same_run(found, truth)


# -- weights alone ---------------------------------------------------------------------------------------------------


def from_weights(folder: Path, layout: str) -> dict[str, torch.Tensor]:
    mesh = Mesh(layout)
    model = Transformer(toys.CONFIGS["qwen"], mesh, dtype=torch.float64, device="meta")
    engine = Engine(model, mesh, toys.sgd, weights=SavedWeights(folder))
    with engine.full_parameters():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_new_run_starts_from_the_weights_alone_with_another_optimizer(worlds, tmp_path: Path) -> None:
    worlds(4).run(toys.save_then_go_on, tmp_path, "pp2 dp2 zero1", 1, 1)
    reader = Reader(tmp_path / "step-00000001")
    for name, value in worlds(4).run(from_weights, tmp_path, "dp4 zero3")[0].items():
        assert torch.equal(value, reader.read(f"model/{name}"))
    weights = SavedWeights(tmp_path)
    assert not weights.has("extra.weight", (2,))
    with pytest.raises(CheckpointError, match="IG937"):
        weights.has("norm.weight", (25,))


# -- how much is read ------------------------------------------------------------------------------------------------


def what_is_read(folder: Path, layout: str) -> int:
    """Bytes of the pieces that this rank opens."""
    read: list[int] = []
    original = Reader.piece

    def counted(self: Reader, key: str, piece: Any, into: torch.Tensor | None = None) -> torch.Tensor:
        tensor = original(self, key, piece, into)
        read.append(tensor.numel() * tensor.itemsize)
        return tensor

    Reader.piece = counted  # type: ignore[method-assign]
    try:
        toys.resume(folder, layout, stop=2)
    finally:
        Reader.piece = original  # type: ignore[method-assign]
    return sum(read)


def test_a_rank_reads_the_pieces_that_hold_its_own_rows_and_no_others(worlds, tmp_path: Path) -> None:
    worlds(4).run(toys.save_then_go_on, tmp_path, "dp4 zero1", 1, 1)
    files = tmp_path.glob("step-*/*.safetensors")
    kept = [tensor for file in files for name, tensor in load_file(file).items() if "generator" not in name]
    everything = sum(tensor.numel() * tensor.itemsize for tensor in kept)
    # Small tensors have one owner, the first: shares are uneven here, and together they are everything, once.
    assert 0.9 * everything < sum(worlds(4).run(what_is_read, tmp_path, "dp4 zero3")) < 1.2 * everything
    # At ZeRO 1 each rank reads the full parameters, a third of everything, and its own rows of two moments.
    assert 1.8 * everything < sum(worlds(4).run(what_is_read, tmp_path, "dp4 zero1")) < 2.2 * everything


# -- what does not fit -----------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "model": (
        {"model": "gpt2"},
        ("IG937", "qkv_bias is False there and True here", "model/blocks.0.norm1.bias is not in the"),
    ),
    "dtype": (
        {"dtype": torch.float32},
        ("IG937", "parameters are F64 there and F32 here", "model/embed.weight is F64 [101, 24] there and F32"),
    ),
    "optimizer": ({"optimizer": toys.sgd}, ("IG938", "embed.weight was stepped by AdamW and is by SGD here")),
}


def refused(folder: Path, layout: str) -> dict[str, str]:
    found = {}
    for what, (options, _) in WRONG.items():
        engine = toys.engine_of(layout, **options)
        with CheckpointManager(folder, engine) as keeper, pytest.raises(CheckpointError) as error:
            keeper.load()
        found[what] = str(error.value)
    return found


def test_another_model_or_optimizer_is_refused_by_name_on_all_ranks_alike(worlds, tmp_path: Path) -> None:
    worlds(4).run(toys.save_then_go_on, tmp_path, "pp2 dp2 zero1", 1, 1)
    answers = worlds(4).run(refused, tmp_path, "dp2 pp2")
    assert all(answer == answers[0] for answer in answers)
    for what, (_, said) in WRONG.items():
        assert all(part in answers[0][what] for part in said), answers[0][what]
