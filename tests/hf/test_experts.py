"""Experts of transformers, dealt out over ep by their own plan, have the gradients of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isograd.comm import ops
from isograd.core.contract import Contract, Shard
from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.hf.build import build
from isograd.hf.proof import compare
from tests.hf.test_hugging import config_of, trained


@pytest.mark.medium
@pytest.mark.parametrize(("layout", "ranks"), [("dp2 ep2", 2), ("tp2 ep2", 2), ("dp2 tp2 ep2 zero3", 4)])
def test_gradients_and_parameters_are_one_devices(worlds, layout: str, ranks: int) -> None:
    assert worlds(ranks).run(trained, "qwen3_moe", layout) == [[]] * ranks


def proofs() -> dict[str, list[str]]:
    """What the proof finds wrong: with transformers' balance loss, with stages, and when scores lose their gradient."""
    found = {}
    balanced = config_of("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.3)
    found["balance"] = list(compare(balanced, Mesh("dp2 ep2")).wrong)
    exchange = ops.exchange_rows

    def without_scores(x: Tensor, *rest: Any) -> Tensor:
        return exchange(x.detach() if x.shape[1] == 1 else x, *rest)

    ops.exchange_rows = without_scores
    try:
        found["scores"] = list(compare(config_of("qwen3_moe"), Mesh("dp2 ep2")).wrong)
    finally:
        ops.exchange_rows = exchange
    return found


@pytest.mark.medium
def test_the_proof_covers_the_balance_loss_and_names_a_router_without_a_gradient(worlds) -> None:
    for found in worlds(2).run(proofs):
        assert found["balance"] == []
        assert {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)} <= set(found["scores"])


def test_experts_owe_edp_and_the_router_owes_nothing_more() -> None:
    mesh = Mesh.unbound("dp2 tp2 ep2 zero1")
    table = contracts(build(config_of("qwen3_moe"), mesh, torch.float32), mesh)
    layer = "model.layers.0.mlp."
    assert table[layer + "experts.gate_up_proj"] == Contract(
        (4, 24, 32), (Shard("ep", 0, ((0, 2), (2, 4))),), data="edp"
    )
    assert table[layer + "gate.weight"] == Contract((4, 32))


@pytest.mark.parametrize(("kind", "more", "code"), [("llama", {}, "IG472"), ("qwen3_moe", {"num_experts": 3}, "IG465")])
def test_what_cannot_be_dealt_out_is_refused_by_name(kind: str, more: dict[str, Any], code: str) -> None:
    with pytest.raises(ModelError) as caught:
        build(config_of(kind, **more), Mesh.unbound("dp2 ep2"), torch.float32)
    assert caught.value.code == code
