"""A step that the card decides: launched before the host waits, with the bits of one that the host decides; refused and
skipped on all ranks together, with everything left as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from isograd.checkpoint import CheckpointManager
from isograd.comm import raw
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.engine.evaluation import Stats
from isograd.engine.zero import ShardedOptimizer
from tests.parity import cases

from . import device
from .on_cards import engine_of, micro_batch, values

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda shards: torch.optim.AdamW(shards, lr=0.01, fused=True),
    "sgd": lambda shards: torch.optim.SGD(shards, lr=0.1, momentum=0.9, fused=True),
}
GOOD, BAD_WEIGHT, BAD_LOSS, TINY = "good", "bad weight", "bad loss", "tiny weight"


def backward(engine: Engine, step: int, how: str) -> None:
    """Where it is not good: on rank 1, or on both of a tp group."""
    loss, count = engine.model(**micro_batch(engine, step))
    its = engine.mesh.rank == 1 or engine.mesh.size("tp") > 1
    factor = {BAD_WEIGHT: math.nan if its else 1.0, TINY: 1e-33}.get(how, 1.0)
    engine.backward(loss * (math.nan if how == BAD_LOSS and its else 1.0), weight=count.double() * factor)


def said(call: Callable[[], Any]) -> str:
    """A step's numbers, or the code of a refusal."""
    try:
        done = call()
    except Exception as error:
        return str(error)[:5]
    if not isinstance(done, Stats):
        return ""
    return f"skipped {done.nonfinite}" if done.skipped else f"{done.loss:.15g} {done.grad_norm:.15g}"


def bits(engine: Engine) -> dict[str, torch.Tensor]:
    """Of this rank's parameters and optimizer state."""
    masters = engine._sharded_optimizer.masters
    kept = {f"{n}/{k}": v for n, p in masters.items() for k, v in engine.optimizer.state.get(p, {}).items()}
    kept |= {name: engine.local_shard(name) for name in masters}
    return {name: value.detach().cpu().clone() for name, value in kept.items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())


def launched() -> int:
    return sum(count for name, count in device.lib.launches().items() if "_fused_" in name)


def trained(layout: str, kind: str, by_card: bool) -> tuple[list[Any], dict[str, Any]]:
    """(of each step: what it said, whether the optimizer was launched before the host waited, and whether anything
    changed; the bits of parameters and state)."""
    engine = engine_of(layout, OPTIMIZERS[kind])
    engine.clip = cases.CLIP  # as an integration's clip_grad_norm_ does
    told, waited, to_host = [], list[int](), raw.copy_to_host

    def waits(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        read = to_host(x)
        return lambda: (waited.append(launched()), read())[1]

    can = ShardedOptimizer.takes_verdicts if by_card else lambda _: False
    with patch.object(raw, "copy_to_host", waits), patch.object(ShardedOptimizer, "takes_verdicts", can):
        for step, how in enumerate((GOOD, GOOD, BAD_WEIGHT, GOOD, BAD_LOSS, TINY, GOOD)):
            before, so_far = bits(engine), launched()
            if engine.mesh.size("pp") > 1:
                engine.accumulate([micro_batch(engine, step)] * 2)
            else:
                backward(engine, step, how)
            words = said(engine.step)
            told.append((how, words, waited[-1] > so_far, not same_bits(before, bits(engine))))
    return told, bits(engine)


def both(program: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    return program(*args, True), program(*args, False)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("dp2", "sgd"), ("dp2 zero1", "adamw"), ("dp2 zero3", "adamw"), ("tp2 sp", "adamw"), ("pp2", "sgd")],
)
def test_the_card_decides_as_the_host_does(layout: str, kind: str) -> None:
    for (by_card, card_bits), (by_host, host_bits) in values(2, "default", both, trained, layout, kind):
        for step, ((how, words, early, changed), (_, host_words, host_early, _)) in enumerate(
            zip(by_card, by_host, strict=True)
        ):
            assert words == host_words, (how, by_card, by_host)
            assert early == (step > 0)
            assert not host_early
            refused = "pp" not in layout and how in (BAD_WEIGHT, BAD_LOSS)
            assert changed is not refused, (how, words)
            if refused:
                assert words.startswith("IG515" if how == BAD_WEIGHT else "skipped"), words
        assert same_bits(card_bits, host_bits)


def read_late(layout: str, late: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What each step said, read a step late or at once, and the model. Behind a refused step another one is dropped."""
    engine, told = engine_of(layout, OPTIMIZERS["adamw"], clip=cases.CLIP), list[str]()
    for step, how in enumerate((GOOD, GOOD, BAD_WEIGHT, GOOD, GOOD, BAD_LOSS, GOOD)):
        backward(engine, step, how)
        if late:
            pending: list[Any] = []
            words = said(lambda pending=pending: pending.append(engine.step_async()))
            told.append(said(pending[0].wait) if pending and (step % 2 or step == 6) else words)
        elif told and told[-1] == "IG515":
            engine.discard()
            told.append("IG586")
        else:
            told.append(said(engine.step))
    return ["skipped" if words.startswith("skipped") else words for words in told], bits(engine)  # late: not by whom


@pytest.mark.parametrize("layout", ["dp2", "dp2 zero1", "dp2 zero3", "tp2 sp"])
def test_a_step_that_is_read_late_is_the_one_that_is_read_at_once(layout: str) -> None:
    for (late, late_bits), (at_once, its_bits) in values(2, "default", both, read_late, layout):
        assert at_once[2:4] == ["IG515", "IG586"]
        assert at_once[5] == "skipped"
        assert [words or at_once[step] for step, words in enumerate(late)] == at_once, late
        assert same_bits(late_bits, its_bits)


def refused_late(folder: str, meets: str) -> list[str]:
    """Which refusal is met behind a step that was refused: by what all ranks call next, and then by steps."""
    engine = engine_of("dp2 zero1", OPTIMIZERS["adamw"])
    backward(engine, 0, GOOD)
    engine.step()
    keeper = CheckpointManager(folder, engine)
    keeper.save(1)
    backward(engine, 1, BAD_WEIGHT)
    pending = engine.step_async()
    if meets == "wait" or (meets == "wait on one rank" and engine.mesh.rank == 0):
        with pytest.raises(Exception, match="IG515"):
            pending.wait()
    meet: dict[str, Callable[[], Any]] = {
        "evaluate": lambda: engine.evaluate(micro_batch(engine, 1)),
        "save": lambda: keeper.save(2),
        "load": keeper.load,
        "discard": engine.discard,
    }
    told = [said(meet[meets])] if meets in meet else []
    for _ in range(2):
        backward(engine, 2, GOOD)
        told.append(said(engine.step))
    return [words if words.startswith("IG") else "right" for words in told]


@pytest.mark.parametrize(
    ("meets", "told"),
    [
        ("wait on one rank", ["IG586", "right"]),
        ("wait", ["right", "right"]),
        ("evaluate", ["IG586", "right", "right"]),
        ("save", ["IG586", "right", "right"]),
        ("load", ["right", "right", "right"]),
        ("discard", ["right", "IG586", "right"]),
    ],
)
def test_a_step_that_is_refused_late_is_refused_by_what_comes_next(tmp_path: Path, meets: str, told: list[str]) -> None:
    first, second = values(2, "default", refused_late, str(tmp_path), meets)
    assert second == told
    assert first == (["IG550", "right"] if meets == "wait on one rank" else told)


def in_doubt(name: str) -> list[str]:
    """What each of three steps says that a card could not take, or that ranks have not run alike."""
    mesh, told = Mesh("dp2"), []
    model = torch.nn.Linear(4, 1).to(mesh.device)
    engine = Engine(model, mesh, OPTIMIZERS["adamw"], clip=0.0 if name == "clip of 0" else None)
    for step in range(3):
        weight = 1e-32 if name == "weights of nearly 0" else 3.0
        if name != "a backward less" or step != 1 or mesh.rank == 0:
            engine.backward(model(torch.ones(3, 4, device=mesh.device)).square().mean(), weight=weight)
        if name == "clip set to -1":
            engine.clip = -1.0 if step == 1 else None
        told.append(said(lambda: engine.step_async().wait()))
    return [words if words.startswith(("IG", "skipped")) else "taken" for words in told]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("clip of 0", ["taken", "taken", "taken"]),
        ("weights of nearly 0", ["taken", "IG587", "IG587"]),
        ("clip set to -1", ["taken", "IG522", "taken"]),
        ("a backward less", ["taken", "IG554", "taken"]),
    ],
)
def test_what_a_card_cannot_take_is_taken_by_the_host_or_refused(name: str, told: list[str]) -> None:
    assert values(2, "default", in_doubt, name) == [told] * 2
