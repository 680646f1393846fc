"""The decoder on sequences cut over cp: whole logits on every rank, documents, recompute, ranks without labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.core import rng
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import ModelError
from isograd.models import Transformer, TransformerConfig, preset
from tests.sizes import few, sized

LAYOUTS = ["cp2 ulysses", "cp2 ring", "cp3 ring", "cp4 ulysses2", "cp2 ulysses tp2 sp", "dp2 cp2 ring zero1"]
CONFIG = TransformerConfig(vocab=53, hidden=24, layers=2, heads=8, kv_heads=2, head_dim=4, mlp=31, dropout=0.1)
TOKENS = torch.randint(53, (2, 11), generator=torch.Generator().manual_seed(6))
DOCUMENTS = torch.tensor([[3] * 4 + [1] * 7, [0] * 10 + [2]])


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def model_and_engine(layout: str, config: TransformerConfig = CONFIG) -> tuple[Transformer, Engine]:
    mesh = Mesh(layout)
    model = Transformer(config, mesh, dtype=torch.float64)
    return model, Engine(model, mesh, sgd)


def close(found: dict[str, Tensor], expected: dict[str, Tensor], slack: float = 1e-12) -> None:
    for name, theirs in expected.items():
        assert float((found[name] - theirs).norm()) <= slack * max(float(theirs.norm()), 1.0), name


def gradients(layout: str, how: str) -> dict[str, Tensor]:
    model, engine = model_and_engine(layout)
    model.recompute = how == "recompute"
    if how == "compile":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if how == "logits":
        model.eval()
        logits = model(TOKENS, documents=DOCUMENTS)
        engine.backward(F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten().roll(3)), weight=TOKENS.numel())
        return {"logits": logits.detach(), **{n: g.clone() for n, g in engine.grads().items()}}
    labels = TOKENS.roll(-1, 1)
    if how == "first labels only":  # most ranks have none
        labels = torch.where(torch.arange(11) < 2, labels, -100)
    documents = DOCUMENTS if how != "compile" else None
    loss, count = model(TOKENS, labels, key=rng.key(3), samples=torch.tensor([4, 9]), documents=documents)
    engine.backward(loss, weight=count)
    found = {n: g.clone() for n, g in engine.grads().items()}
    return {**found, "loss": torch.tensor(engine.step().loss)}


def settings(case: tuple[str, str]) -> tuple[Hashable, ...]:
    """The values of a case of which any two meet in `make test`."""
    sizes = Layout.parse(case[0])
    return (sizes.ring > 1, sizes.ulysses > 1, sizes.tp, sizes.dp, case[1])


WAYS = ("plain", "recompute", "logits", "first labels only")


@pytest.mark.parametrize(("layout", "how"), sized([*product(LAYOUTS, WAYS)], settings, lambda case: False))
def test_gradients_are_one_devices(threads, layout: str, how: str) -> None:
    """Also of a loss computed from the gathered logits: each cp rank weighs it once, so its adjoint is the sum."""
    expected = threads(1).run(gradients, "1", how)[0]
    for found in threads(Layout.parse(layout).world_size).run(gradients, layout, how):
        close(found, expected)


@pytest.mark.parametrize("layout", few(["cp2 ulysses", "cp2 ring"], slow=["cp2 ulysses"]))
def test_compiled_blocks_have_the_gradients_of_one_device(threads, layout: str) -> None:
    expected = threads(1).run(gradients, "1", "compile")[0]
    for found in threads(2).run(gradients, layout, "compile"):
        close(found, expected)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_documents_in_one_sequence_are_as_sequences_of_their_own(name: str) -> None:
    model = Transformer(preset(name), Mesh.unbound("1"), dtype=torch.float64).eval()
    with torch.no_grad():
        packed = model(TOKENS, documents=DOCUMENTS)
        for row, (start, stop) in ((0, (0, 4)), (0, (4, 11)), (1, (0, 10)), (1, (10, 11))):
            alone = model(TOKENS[row : row + 1, start:stop])[0]
            assert float((packed[row, start:stop] - alone).abs().max()) < 1e-12


def other_rows_on_cp_ranks() -> str:
    model, _ = model_and_engine("cp2 ulysses")
    tokens = TOKENS.roll(Mesh("cp2 ulysses").rank, 0)
    try:
        model.eval()(tokens, tokens)
    except ModelError as error:
        return str(error)
    return "not refused"


def test_different_sequences_in_a_cp_group_are_refused(threads) -> None:
    for text in threads(2).run(other_rows_on_cp_ranks):
        assert "IG414" in text
        assert "mesh.index('dp')" in text


def test_models_that_a_cp_cannot_run_are_refused_at_start() -> None:
    dropping = dataclasses.replace(CONFIG, attention_dropout=0.1)
    for config, layout, code in (
        (dropping, "cp2 ring", "IG408"),
        (dropping, "cp4 ulysses2", "IG408"),
        (CONFIG, "cp16 ulysses", "IG407"),
        (CONFIG, "cp8 ulysses4 tp4", "IG407"),
        (CONFIG, "cp2 ulysses ep2", "IG400"),
    ):
        with pytest.raises(ModelError, match=code):
            Transformer(config, Mesh.unbound(layout))
    Transformer(dropping, Mesh.unbound("cp4 ulysses"))


def test_documents_of_another_shape_are_refused() -> None:
    model = Transformer(CONFIG, Mesh.unbound("1"))
    with pytest.raises(ModelError, match="IG410"):
        model(TOKENS, documents=DOCUMENTS[:1])
