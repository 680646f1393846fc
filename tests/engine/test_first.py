"""Models on the meta device get each rank's part only: the values they would have had, and never a whole copy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isograd.core.contract import assemble
from isograd.core.mesh import Mesh
from isograd.engine import Engine, empty_parameters
from isograd.errors import IsogradError
from isograd.models import Transformer, preset

from . import toys


def whole(engine: Engine) -> dict[str, Tensor]:
    with engine.full_parameters(), torch.no_grad():
        return {r.name: assemble(r.parameter, r.contract, engine.mesh).clone() for r in engine.table}


def made(layout: str, dtype: torch.dtype, device: str | None) -> dict[str, Tensor]:
    mesh = Mesh(layout)
    engine = Engine(Transformer(preset("tiny-qwen3"), mesh, dtype=dtype, device=device), mesh, toys.sgd)
    return {name: value.float() for name, value in whole(engine).items()}


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero3", "tp2 sp zero3"])
def test_a_model_on_the_meta_device_gets_the_same_values_as_without(worlds, layout: str, dtype: torch.dtype) -> None:
    for found, expected in zip(
        worlds(2).run(made, layout, dtype, "meta"), worlds(2).run(made, layout, dtype, None), strict=True
    ):
        toys.assert_same_bits(found, expected)


class Deep(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.arange(3.0), persistent=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x * self.scale  # type: ignore[no-any-return]


def save(folder: Path, width: int, layers: int) -> None:
    """Two files, written a tensor at a time, as published weights come in several."""
    from safetensors.torch import save_file

    model = Deep(width, layers)
    with torch.no_grad():
        model.scale.fill_(0.5)
        model.count.fill_(7)
    state = model.state_dict()
    names = sorted(state)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({n: state[n] for n in part}, str(folder / f"model-{number}.safetensors"))


def read(folder: str, layout: str, meta: bool) -> tuple[dict[str, Tensor], float, list[float]]:
    mesh = Mesh(layout)
    if meta:
        with empty_parameters():
            model = Deep(37, 3)
        assert all(p.is_meta for p in model.parameters())
    else:
        model = Deep(37, 3)
    engine = Engine(model, mesh, toys.sgd, weights=folder)
    return whole(engine), float(model.count), model.shift.tolist()


@pytest.mark.parametrize("layout", ["dp2 zero0", "dp2 zero3"])
def test_stored_weights_are_read_by_rows(worlds, tmp_path: Path, layout: str) -> None:
    from safetensors.torch import load_file

    save(tmp_path, 37, 3)
    stored = {n: t for file in tmp_path.glob("*") for n, t in load_file(str(file)).items() if n != "count"}
    for meta in (True, False):
        for found, count, shift in worlds(2).run(read, str(tmp_path), layout, meta):
            toys.assert_same_bits(found, stored)
            assert count == 7
            assert shift == [0, 1, 2]


def peak() -> int:
    """The most memory this process has ever held, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def grown(folder: str | None) -> tuple[int, int, int]:
    """(how far the peak rose when a model was made, and when it had taken a step; bytes of the model)."""
    mesh, width = Mesh("dp4 zero3"), 512
    x = torch.ones(2, width)
    small = Deep(8, 2)
    engine = Engine(small, mesh, toys.sgd)  # what the first of anything loads
    engine.backward(small(x[:, :8]).square().mean(), weight=2)
    engine.step()
    before = peak()
    with empty_parameters():
        model: Any = Deep(width, 48)
    engine = Engine(model, mesh, toys.sgd, weights=folder)
    made = peak() - before
    engine.backward(model(x * 1e-3).square().mean(), weight=2)
    assert not engine.step().skipped
    return made, peak() - before, sum(p.numel() * p.itemsize for p in model.parameters())


PROGRAM = """
import json, sys
sys.path.insert(0, {root!r})
from isograd.launcher.launch import launch
from tests.engine.test_first import grown
if __name__ == "__main__":
    print(json.dumps(launch(grown, 4, {folder!r}, timeout=250)))
"""


def test_no_rank_ever_holds_a_whole_copy(tmp_path: Path) -> None:
    """50 MB on 4 ranks. Made: a quarter, its rows. After a step: their gradients too, and a few blocks at a time, each
    beside its packed copy (0.78 of the model measured; 0.62 when rows travelled without being packed).
    glibc is told to return each tensor's memory: what is measured is the program, not the holes of a heap."""
    save(tmp_path, 512, 48)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path)))
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # read when a process starts
    said = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=True).stdout
    for made, stepped, size in json.loads(said):
        assert size > 47e6
        assert made < 0.4 * size
        assert stepped < 0.85 * size


def nobody_knows() -> None:
    with empty_parameters():
        model = toys.Toy()
    Engine(model, Mesh("dp2 zero3"), toys.sgd)


def bare_buffer(folder: str) -> None:
    with torch.device("meta"):
        model = Deep(37, 3)
    Engine(model, Mesh("dp2 zero3"), toys.sgd, weights=folder)


def other_shape(folder: str) -> None:
    Engine(Deep(36, 3), Mesh("dp2 zero3"), toys.sgd, weights=folder)


def nothing_stored(folder: str) -> None:
    Engine(Deep(37, 3), Mesh("dp2 zero3"), toys.sgd, weights=f"{folder}/none")


def offloaded_at_stage_0() -> None:
    Engine(toys.Toy(), Mesh("dp2 zero0"), toys.sgd, offload=True)


def code_of(action: Any) -> str:
    try:
        action()
    except IsogradError as error:
        return error.code
    return "nothing"


def test_what_nobody_knows_the_values_of_is_refused(worlds, tmp_path: Path) -> None:
    save(tmp_path, 37, 3)
    folder = str(tmp_path)
    for action, code in (
        (nobody_knows, "IG503"),
        (partial(bare_buffer, folder), "IG526"),
        (partial(other_shape, folder), "IG422"),
        (partial(nothing_stored, folder), "IG421"),
        (offloaded_at_stage_0, "IG527"),
    ):
        assert worlds(2).run(code_of, action) == [code, code]


def test_stored_integers_are_no_weights(worlds, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(tmp_path, 36, 3)
    for file in tmp_path.glob("*"):
        save_file({n: t.to(torch.int8) if t.dim() == 2 else t for n, t in load_file(str(file)).items()}, str(file))
    assert worlds(2).run(code_of, partial(other_shape, str(tmp_path))) == ["IG420", "IG420"]


def offloaded(layout: str, offload: bool) -> tuple[dict[str, Tensor], list[str]]:
    import warnings

    mesh, model = Mesh(layout), toys.Toy(torch.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = Engine(model, mesh, toys.adamw, offload=offload)
    x, y = toys.micro_batch(0, mesh.rank)
    engine.backward(toys.loss_of(model, x, y), weight=len(x))
    engine.step()
    return whole(engine), [str(w.message) for w in said if "offload" in str(w.message)]


@pytest.mark.parametrize("zero", [1, 3])
def test_offload_is_accepted_without_effect_on_the_cpu_and_said_once(worlds, zero: int) -> None:
    plain = worlds(2).run(offloaded, f"dp2 zero{zero}", False)
    for rank, (found, said) in enumerate(worlds(2).run(offloaded, f"dp2 zero{zero}", True)):
        toys.assert_same_bits(found, plain[rank][0])
        assert len(said) == (rank == 0)
