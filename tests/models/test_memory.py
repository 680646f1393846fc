"""What only saves memory changes no gradient: recompute, its inputs in the host's memory, and the loss in chunks."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isograd.core import rng
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import ModelError
from isograd.models import Transformer, TransformerConfig, transformer
from tests.sizes import sized

UNTIED = TransformerConfig(vocab=53, hidden=24, layers=2, heads=8, kv_heads=2, head_dim=4, mlp=31, dropout=0.1)
CONFIGS = {"untied": UNTIED, "tied": dataclasses.replace(UNTIED, tied=True)}
LAYOUTS = [
    "cp2 ulysses",
    "cp2 ring",
    "cp4 ulysses2",
    "cp4 ring zero1",
    "tp2 sp",
    "cp2 ring tp2 sp",
    "dp2 cp2 ulysses",
    "dp2 zero3",
    "tp2",
]
WAYS: dict[str, tuple[bool | str, int | None]] = {  # (recompute, loss_chunk)
    "recompute, one token at a time": (True, 1),
    "selective, chunks that do not divide": ("selective", 5),
    "offload, chunks that do not divide": ("offload", 5),
    "no recompute, all at once": (False, None),
}
BATCH, LENGTH = 2, 11
TOKENS = torch.randint(53, (2 * BATCH, LENGTH), generator=torch.Generator().manual_seed(6))
LABELS = torch.where(torch.arange(LENGTH) < torch.tensor([[9], [4], [11], [2]]), TOKENS.roll(-1, 1), -100)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def gradients(layout: str, tied: str, how: str) -> dict[str, Tensor]:
    mesh = Mesh(layout)
    model = Transformer(CONFIGS[tied], mesh, dtype=torch.float64)
    model.recompute, model.loss_chunk = WAYS[how]
    engine = Engine(model, mesh, sgd)
    rows = torch.arange(2 * BATCH).chunk(mesh.size("dp"))[mesh.index("dp")]
    loss, count = model(TOKENS[rows], LABELS[rows], key=rng.key(3), samples=rows)
    engine.backward(loss, weight=count)
    found = {name: g.clone() for name, g in engine.grads().items()}
    return {**found, "loss": torch.tensor(engine.step().loss, dtype=torch.float64)}


@lru_cache
def plain(tied: str) -> dict[str, Tensor]:
    """torch's own cross-entropy of whole logits, on one device."""
    model = Transformer(CONFIGS[tied], Mesh.unbound("1"), dtype=torch.float64)
    logits = model(TOKENS, key=rng.key(3), samples=torch.arange(2 * BATCH))
    loss = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
    loss.backward()
    return {**{n: p.grad for n, p in model.named_parameters() if p.grad is not None}, "loss": loss.detach()}


@pytest.mark.parametrize(
    ("layout", "tied", "how"), sized([*product(LAYOUTS, CONFIGS, WAYS)], tuple, lambda case: False)
)
def test_gradients_are_those_of_whole_logits_on_one_device(threads, layout: str, tied: str, how: str) -> None:
    expected = plain(tied)
    for found in threads(Layout.parse(layout).world_size).run(gradients, layout, tied, how):
        assert found.keys() == expected.keys()
        for name, theirs in expected.items():
            assert float((found[name] - theirs).norm()) <= 1e-12 * max(float(theirs.norm()), 1.0), name


class Largest(TorchDispatchMode):
    """The most rows of logits that any matrix product made."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and out.shape[1] == UNTIED.vocab:
            self.rows = max(self.rows, len(out))
        return out


@pytest.mark.parametrize(("chunk", "rows"), [(5, 5), (None, BATCH * LENGTH)])
def test_logits_exist_for_one_chunk_at_a_time(chunk: int | None, rows: int) -> None:
    model = Transformer(dataclasses.replace(UNTIED, hidden=20, dropout=0.0), Mesh.unbound("1"))
    model.loss_chunk = chunk
    with Largest() as largest:
        model(TOKENS[:BATCH], LABELS[:BATCH])[0].backward()
    assert largest.rows == rows


def test_offload_sends_the_inputs_of_blocks_away_and_nothing_else(monkeypatch) -> None:
    sent: list[tuple[int, ...]] = []

    def watched(pin_memory: bool) -> Any:
        assert not pin_memory  # nothing to pin on the CPU
        return torch.autograd.graph.saved_tensors_hooks(lambda t: (sent.append(tuple(t.shape)), t)[1], lambda t: t)

    monkeypatch.setattr(transformer, "save_on_cpu", watched)
    model = Transformer(UNTIED, Mesh.unbound("1")).eval()
    with pytest.warns(UserWarning, match="no second memory"):
        model.recompute = "offload"
    model(TOKENS, LABELS)[0].backward()
    assert sent == [(TOKENS.numel(), UNTIED.hidden)] * UNTIED.layers


@pytest.mark.parametrize(("option", "value"), [("recompute", "offlaod"), ("loss_chunk", 0)])
def test_a_value_that_means_nothing_is_refused(option: str, value: object) -> None:
    model = Transformer(UNTIED, Mesh.unbound("1"))
    with pytest.raises(ModelError, match="IG416"):
        setattr(model, option, value)
