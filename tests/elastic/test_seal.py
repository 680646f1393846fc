"""Bits that flip in what a rank keeps between two steps: found whatever the bit, named, and brought back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isograd.elastic import Copies
from isograd.engine import MemoryChecksum
from isograd.engine.engine import Engine
from isograd.engine.sdc.memory import tensors
from isograd.errors import EngineError
from tests.checkpoint import toys
from tests.engine.test_corruption import EXCHANGED, SIGNS, flip

NAME = "blocks.1.mlp.up.weight"


def step(engine: Engine, number: int, seals: list[MemoryChecksum], copies: Copies) -> str:
    """A checked step, as train/run/corruption.py does it: "" or what was said; then it is done again."""
    said = ""
    for _ in range(2):
        try:
            engine.accumulate(toys.batch(number, engine.mesh), 2)
            seals[-1].check()
            copies.finish()
            engine.step()
            break
        except EngineError as error:
            said = f"{error.code}: {error.seen}"
            engine.discard()
            left = seals[-1].restore(copies.restore)
            if left:
                return f"{said}; lost: {left}"
    seals.append(MemoryChecksum(engine))
    copies.start(number)
    return said


def flips(layout: str, keys: list[str], partner: bool, dtype: torch.dtype, bits: list[int]) -> dict[str, Any]:
    """After each of some steps one bit of one tensor flips on rank 1; a run beside it has none."""
    engine, twin = (toys.engine_of(layout, dtype=dtype) for _ in range(2))
    ones = [(one, [MemoryChecksum(one)], Copies(one, "flips", {}, partner=partner)) for one in (engine, twin)]
    said = {}
    for number, key in enumerate(["", *(f"{key} {bit}" for key in keys for bit in bits)]):
        name, _, bit = key.rpartition(" ")
        if name and engine.mesh.rank == 1:
            flip(tensors(engine)[name], int(bit))
        said[key] = step(ones[0][0], number, *ones[0][1:])
        assert step(ones[1][0], number, *ones[1][1:]) == "", "a false alarm"
        if "lost" in said[key]:
            break
    same = all(torch.equal(a, b) for a, b in zip(*(tensors(one).values() for one in (engine, twin)), strict=True))
    return {"said": said, "same": same}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layout", "partner"), [("dp2 zero1", True), ("dp2 zero3", True), ("dp2 zero0", False), ("tp2 sp", True)]
)
def test_any_bit_is_found_in_its_step_and_the_step_has_the_bits_of_the_undisturbed_run(worlds, layout, partner) -> None:
    """Of Adam's moments and of parameters; two elements that are exchanged, and two signs, too. At ZeRO 0 no copy is
    needed: another rank holds the same tensor."""
    keys = [f"optimizer/exp_avg/{NAME}", f"optimizer/exp_avg_sq/{NAME}", f"model/{NAME}"]
    ours, theirs = worlds(2).run(flips, layout, keys, partner, torch.float32, [0, 30, EXCHANGED, SIGNS])
    assert ours == theirs
    assert ours["same"]
    assert ours["said"].pop("") == ""
    for case, said in ours["said"].items():
        assert said == f"IG583: {case.rpartition(' ')[0]} on rank 1", case


@pytest.mark.medium
def test_rows_that_nobody_has_a_copy_of_are_named_and_lost_and_fp32_masters_are_sealed(worlds) -> None:
    key = f"optimizer/exp_avg/{NAME}"
    found = worlds(2).run(flips, "dp2 zero1", [key], False, torch.float32, [16])[0]
    assert found["said"][f"{key} 16"] == f"IG583: {key} on rank 1; lost: {key} on rank 1"
    master = f"master/{NAME}"
    found = worlds(2).run(flips, "dp2 zero1", [master], True, torch.bfloat16, [16])[0]
    assert found["said"][f"{master} 16"] == f"IG583: {master} on rank 1"
    assert found["same"]
