"""One rank makes its Engine otherwise than the others, or calls another Engine: all are told, and none waits.

FAILURES E: a tester found each of these silently wrong, or a hang.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isograd as ig
from isograd.comm import threads
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh

CONFIG = {"vocab": 17, "hidden": 16, "layers": 4, "heads": 2, "mlp": 12}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def decoder(mesh: Mesh, odd: str) -> ig.models.Transformer:
    """Of this rank, which is the odd one where `odd` says something."""
    settings = CONFIG | ({"rope_theta": 5000.0} if odd == "another base of its positions" else {})
    split = ((1, 3) if odd == "another split" else (2, 2)) if mesh.size("pp") > 1 else None
    model = ig.models.Transformer(ig.models.TransformerConfig(**settings), mesh, split=split)
    if odd == "a parameter frozen":
        model.blocks[0].norm1.weight.requires_grad_(False)
    if odd == "a gradient left":
        model.blocks[0].norm1.weight.grad = torch.ones(16)
    if odd == "all frozen":
        model.requires_grad_(False)
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "patterns that match nothing": {"matrices": ["nothing"]},
    "weights that are not there": {"weights": "nowhere"},
    "an unknown way to accumulate": {"accumulate": "somehow"},
    "reproducible": {"reproducible": True},
}


def made(layout: str, what: str, odd_rank: int) -> str:
    mesh = Mesh(layout)
    odd = what if mesh.rank == odd_rank else ""
    try:
        ig.Engine(decoder(mesh, odd), mesh, sgd, **(OPTIONS.get(odd) or {}))
    except ig.IsogradError as error:
        return str(error)
    return "made"


@pytest.mark.parametrize(
    ("layout", "what", "code"),
    [
        ("tp2", "a parameter frozen", "IG502"),  # one copy trained, the other did not
        ("tp2 sp", "a parameter frozen", "IG502"),
        ("dp2 tp2 zero1", "a parameter frozen", "IG502"),  # two ranks raised it, and two waited
        ("dp2 tp2 zero3", "a parameter frozen", "IG502"),
        ("tp2", "another base of its positions", "IG502"),
        ("cp2 ring", "another base of its positions", "IG502"),
        ("pp2", "another split", "IG502"),  # a layer was on no stage
        ("dp2 zero1", "a gradient left", "IG507"),
        ("dp2 zero3", "all frozen", "IG501"),
        ("tp2", "patterns that match nothing", "IG528"),
        ("dp2", "weights that are not there", "IG421"),
        ("pp2", "an unknown way to accumulate", "IG532"),
        ("pp2", "reproducible", "IG520"),
    ],
)
@pytest.mark.parametrize("odd_rank", [0, 1])
def test_an_engine_that_one_rank_makes_otherwise_is_refused_on_all(
    layout: str, what: str, code: str, odd_rank: int
) -> None:
    said = threads.run(made, Layout.parse(layout).world_size, layout, what, odd_rank, timeout=30)
    assert all(text.startswith(code) for text in said), said


def saves(folder: str) -> str:
    """A model of transformers that rank 0 alone has saved, which writes into the config that it has there."""
    transformers, mesh = pytest.importorskip("transformers"), Mesh("dp2")
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, **sizes))
    if mesh.rank == 0:
        model.save_pretrained(folder)
    ig.Engine(model, mesh, sgd)
    return str(model.config.architectures)


def test_a_model_that_one_rank_has_saved_is_no_other_model(tmp_path: Path) -> None:
    """A second Trainer of a model was refused once the first one had written a checkpoint."""
    assert threads.run(saves, 2, str(tmp_path), timeout=30) == ["['LlamaForCausalLM']", "None"]


def two_engines(layout: str, how: str) -> list[str]:
    """Three rounds of steps of two engines; in the second one rank 1 does something else."""
    mesh, said = Mesh(layout), list[str]()
    models = [nn.Linear(3, 1).double() for _ in range(2)]
    for number, model in enumerate(models):
        nn.init.constant_(model.weight, number + 1.0)
        nn.init.constant_(model.bias, 0.0)
    engines = [ig.Engine(model, mesh, sgd) for model in models]
    for turn in range(3):
        odd = turn == 1 and mesh.rank == 1
        order = [1, 0] if odd and how == "in another order" else [1] if odd and how == "one left out" else [0, 1]
        for place in order:
            number = 1 - place if how == "looked at" and odd else place
            x = torch.full((2, 3), 1.0 + turn + mesh.rank, dtype=torch.float64)
            try:
                engines[number].backward(models[number](x).mean(), weight=2)
                if how == "looked at":
                    engines[number].grads()
                said.append(f"{engines[number].step().loss:.6f}")
            except ig.IsogradError as error:
                said.append(error.code)
                for engine in engines:
                    engine.discard()
                break
    return said


@pytest.mark.parametrize("layout", ["dp2", "dp2 zero1", "dp2 zero2"])
@pytest.mark.parametrize("how", ["in another order", "one left out", "looked at"])
def test_ranks_that_step_different_engines_are_refused_and_the_next_steps_are_right(layout: str, how: str) -> None:
    """Rows of one model were added to those of the other; the numbers of the step were equal on all ranks."""
    one, other = threads.run(two_engines, 2, layout, how, timeout=30)
    undisturbed = threads.run(two_engines, 2, layout, "alike", timeout=30)[0]
    assert one == other
    assert one[:2] == undisturbed[:2] and one[2] == "IG555"


class Mean(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return super().forward(x).mean(), len(x)


def evaluates(layout: str) -> str:
    mesh = Mesh(layout)
    model = Mean(3, 1)
    engine = ig.Engine(model, mesh, sgd)
    batch: list[Any] = [] if mesh.rank == 1 else [torch.ones(2, 3)]
    try:
        engine.evaluate(batch)
    except (ig.IsogradError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "evaluated"


def test_an_evaluation_that_one_rank_cannot_begin_is_refused_on_all() -> None:
    one, other = threads.run(evaluates, 2, "dp2 zero1", timeout=30)
    assert "IG518" in other and "rank 1" in one and "IG5" in one, (one, other)


def opens(folder: str, interrupted: bool) -> str:
    """One rank opens a folder of checkpoints with another word, or is interrupted while it loads one."""
    mesh = Mesh("dp2")
    engine = ig.Engine(nn.Linear(2, 1), mesh, sgd)
    try:
        word: Any = "nonsense" if mesh.rank and not interrupted else "stop"
        keeper = ig.checkpoint.CheckpointManager(folder, engine, on_error=word)
        keeper.save(1)
        if mesh.rank and interrupted:
            keeper.wait = interrupt  # type: ignore[method-assign]
        keeper.load()
    except (KeyboardInterrupt, ig.IsogradError) as error:
        return f"{type(error).__name__} {error}"
    return "loaded"


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_manager_that_one_rank_opens_or_loads_otherwise_is_refused_on_all(tmp_path: Path) -> None:
    for said in threads.run(opens, 2, str(tmp_path / "word"), False, timeout=30):
        assert "IG930" in said and "on_error='nonsense'" in said
    one, other = threads.run(opens, 2, str(tmp_path / "load"), True, timeout=30)
    assert other.startswith("KeyboardInterrupt") and "IG213" in one and "rank 1: KeyboardInterrupt" in one, one
