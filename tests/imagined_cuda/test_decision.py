"""A step that the card decides: launched before the host waits, with the bits of one that the host decides; refused and
skipped on all ranks together, with everything left as it was."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.parity import cases

from . import device, right, run

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda shards: torch.optim.AdamW(shards, lr=0.01, fused=True),
    "sgd": lambda shards: torch.optim.SGD(shards, lr=0.1, momentum=0.9, fused=True),
}
GOOD, BAD_WEIGHT, BAD_LOSS, TINY = "good", "bad weight", "bad loss", "tiny weight"
STEPS = (GOOD, GOOD, BAD_WEIGHT, GOOD, BAD_LOSS, TINY, GOOD)


def launched() -> int:
    return sum(count for name, count in device.lib.launches().items() if "_fused_" in name)


def trained(layout: str, kind: str, by_card: bool, pipelined: bool) -> tuple[list[Any], dict[str, Any]]:
    """(of each step: what it said, whether the optimizer was launched before the host waited, and whether anything
    changed; the bits of parameters and state)."""
    from isograd import Engine, Mesh
    from isograd.comm import raw
    from isograd.engine.zero import ShardedOptimizer
    from isograd.models import Transformer

    mesh, config = Mesh(layout), cases.CONFIGS["deep" if pipelined else "llama"]
    model = Transformer(config, mesh).to(mesh.device)
    engine = Engine(model, mesh, OPTIMIZERS[kind], bucket_mb=0.01)
    engine.clip = cases.CLIP  # as an integration's clip_grad_norm_ does
    told, early, to_host = [], Counter[str](), raw.copy_to_host

    def bits() -> dict[str, Any]:
        states = {n: engine.optimizer.state.get(p, {}) for n, p in engine._sharded_optimizer.masters.items()}
        kept = {f"{n}/{k}": v for n, state in states.items() for k, v in state.items()}
        kept |= {name: engine.local_shard(name) for name in engine._sharded_optimizer.masters}
        return {name: value.detach().cpu().clone() for name, value in kept.items()}

    def waits(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        read = to_host(x)

        def wait() -> torch.Tensor:
            early["launches"] += launched() - early["seen"]
            early["seen"] = launched()
            return read()

        return wait

    can = ShardedOptimizer.takes_verdicts if by_card else lambda _: False
    with patch.object(raw, "copy_to_host", waits), patch.object(ShardedOptimizer, "takes_verdicts", can):
        for step, how in enumerate(STEPS):
            tokens, labels, _ = (t.to(mesh.device) for t in cases.micro_batch(config, step, mesh.index("dp"), 4))
            before = bits()
            early.update(launches=-early["launches"], seen=launched() - early["seen"])
            if pipelined:
                engine.accumulate([{"tokens": tokens, "labels": labels}] * 2)
            else:
                loss, count = model(tokens=tokens, labels=labels)
                its = mesh.rank == 1 or mesh.size("tp") > 1
                loss = loss * (math.nan if how == BAD_LOSS and its else 1.0)
                factor = {BAD_WEIGHT: math.nan if its else 1.0, TINY: 1e-33}.get(how, 1.0)
                engine.backward(loss, weight=count.double() * factor)
            try:
                stats = engine.step()
                said = "skipped" if stats.skipped else f"{stats.loss:.15g} {stats.grad_norm:.15g}"
                said += f" {stats.nonfinite}" if stats.skipped else ""
            except Exception as error:
                said = str(error).split()[0]
            after = bits()
            changed = before.keys() != after.keys() or not all(torch.equal(before[n], v) for n, v in after.items())
            told.append((how, said, early["launches"] > 0, changed))
    return told, bits()


def both(layout: str, kind: str) -> list[Any]:
    from isograd import Layout

    pipelined = Layout.parse(layout).pp > 1
    return [trained(layout, kind, by_card, pipelined) for by_card in (True, False)]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("dp2", "sgd"), ("dp2 zero1", "adamw"), ("dp2 zero3", "adamw"), ("tp2 sp", "adamw"), ("pp2", "sgd")],
)
def test_the_card_decides_as_the_host_does(layout: str, kind: str) -> None:
    results = run(both, 2, layout, kind, join=False, seconds=20, limit=60)
    for (by_card, card_bits), (by_host, host_bits) in right(results):
        for step, ((how, said, early, changed), (_, host_said, host_early, _)) in enumerate(
            zip(by_card, by_host, strict=True)
        ):
            assert said == host_said, (how, by_card, by_host)
            assert early == (step > 0)
            assert not host_early
            refused = "pp" not in layout and how in (BAD_WEIGHT, BAD_LOSS)
            assert changed is not refused, (how, said)
            if refused:
                assert said.startswith("IG515" if how == BAD_WEIGHT else "skipped"), said
        assert card_bits.keys() == host_bits.keys()
        assert all(torch.equal(card_bits[name], bits) for name, bits in host_bits.items())


def read_late(layout: str, late: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What each step said, read a step late or at once, and the model. Behind a refused step another one is dropped."""
    from isograd import Engine, Mesh
    from isograd.models import Transformer

    mesh, config = Mesh(layout), cases.CONFIGS["llama"]
    model = Transformer(config, mesh).to(mesh.device)
    engine = Engine(model, mesh, OPTIMIZERS["adamw"], clip=cases.CLIP, bucket_mb=0.01)
    told: list[str] = []
    for step, how in enumerate((GOOD, GOOD, BAD_WEIGHT, GOOD, GOOD, BAD_LOSS, GOOD)):
        tokens, labels, _ = (t.to(mesh.device) for t in cases.micro_batch(config, step, mesh.index("dp"), 4))
        loss, count = model(tokens=tokens, labels=labels)
        its = mesh.rank == 1 or mesh.size("tp") > 1
        factor = math.nan if how == BAD_WEIGHT and its else 1.0
        engine.backward(loss * (math.nan if how == BAD_LOSS and its else 1.0), weight=count.double() * factor)
        try:
            if not late and told and told[-1] == "IG515":
                engine.discard()
                told.append("IG586")
                continue
            pending = engine.step_async() if late else None
            stats = engine.step() if pending is None else pending.wait() if step % 2 else None
            told.append(
                "skipped" if stats and stats.skipped else f"{stats.loss:.15g} {stats.grad_norm:.15g}" if stats else ""
            )
        except Exception as error:
            told.append(str(error).split(":")[0])
    if late:
        told[-1] = f"{(last := pending.wait()).loss:.15g} {last.grad_norm:.15g}"
    return told, {name: engine.local_shard(name).detach().cpu().clone() for name in engine.table.records}


def late_and_at_once(layout: str) -> Any:
    return read_late(layout, True), read_late(layout, False)


@pytest.mark.parametrize("layout", ["dp2", "dp2 zero1", "dp2 zero3", "tp2 sp"])
def test_a_step_that_is_read_late_is_the_one_that_is_read_at_once(layout: str) -> None:
    for (late, late_bits), (at_once, bits) in right(run(late_and_at_once, 2, layout, join=False, seconds=20, limit=60)):
        assert at_once[2:4] == ["IG515", "IG586"]
        assert at_once[5] == "skipped"
        assert [said or at_once[step] for step, said in enumerate(late)] == at_once, late
        assert all(torch.equal(late_bits[name], value) for name, value in bits.items())


def refused_late(folder: str, meets: str) -> list[str]:
    """What is said behind a step that was refused, by what all ranks call next, and then by steps."""
    from isograd import Engine, Mesh
    from isograd.checkpoint import CheckpointManager
    from isograd.models import Transformer

    mesh, config, told = Mesh("dp2 zero1"), cases.CONFIGS["llama"], []
    model = Transformer(config, mesh).to(mesh.device)
    engine = Engine(model, mesh, OPTIMIZERS["adamw"], bucket_mb=0.01)

    def begins(step: int, factor: float = 1.0) -> dict[str, torch.Tensor]:
        tokens, labels, _ = (t.to(mesh.device) for t in cases.micro_batch(config, step, mesh.index("dp"), 4))
        loss, count = model(tokens=tokens, labels=labels)
        engine.backward(loss, weight=count.double() * factor)
        return {"tokens": tokens, "labels": labels}

    begins(0)
    engine.step()
    keeper = CheckpointManager(folder, engine)
    keeper.save(1)
    batch = begins(1, math.nan if mesh.rank == 0 else 1.0)
    pending = engine.step_async()
    if meets == "wait" or (meets == "wait on one rank" and mesh.rank == 0):
        with pytest.raises(Exception, match="IG515"):
            pending.wait()
    meet: dict[str, Callable[[], Any]] = {
        "evaluate": lambda: engine.evaluate(batch),
        "save": lambda: keeper.save(2),
        "load": keeper.load,
        "discard": engine.discard,
    }
    for call in [*([meet[meets]] if meets in meet else []), engine.step, engine.step]:
        if call == engine.step:
            begins(2)
        try:
            call()
            told.append("right")
        except Exception as error:
            told.append(str(error).split(":")[0])
    return told


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
    first, second = right(run(refused_late, 2, str(tmp_path), meets, join=False, seconds=20, limit=60))
    assert second == told
    assert first == (["IG550", "right"] if meets == "wait on one rank" else told)


def in_doubt(name: str) -> list[str]:
    """What each of three steps says that a card could not take, or that ranks have not run alike."""
    from isograd import Engine, Mesh

    mesh, told = Mesh("dp2"), []
    model = torch.nn.Linear(4, 1).to(mesh.device)
    engine = Engine(model, mesh, OPTIMIZERS["adamw"], clip=0.0 if name == "clip of 0" else None)
    for step in range(3):
        weight = 1e-32 if name == "weights of nearly 0" else 3.0
        try:
            if name != "a backward less" or step != 1 or mesh.rank == 0:
                engine.backward(model(torch.ones(3, 4, device=mesh.device)).square().mean(), weight=weight)
            if name == "clip set to -1" and step == 1:
                engine.clip = -1.0
            told.append("skipped" if engine.step_async().wait().skipped else "taken")
        except Exception as error:
            told.append(str(error).split(":")[0])
            engine.clip = None
    return told


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
    assert list(right(run(in_doubt, 2, name, join=False, seconds=20, limit=60))) == [told] * 2
