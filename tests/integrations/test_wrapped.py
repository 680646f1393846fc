"""A model that another library has wrapped to reduce its gradients is refused by every integration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isograd as ig

from . import toys
from .worlds import as_lightning_finds_it, as_torchrun_starts_it

pytest.importorskip("accelerate")
pytestmark = pytest.mark.medium


class DistributedDataParallel(nn.Module):
    """Known by its name, as torch's own is, which needs a group of ranks to be made."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def by_accelerate(_: str) -> None:
    ig.integrations.Accelerator().prepare(DistributedDataParallel(nn.Linear(2, 2)))


def by_deepspeed(_: str) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    ig.integrations.deepspeed.initialize(model=DistributedDataParallel(nn.Linear(2, 2)), config=config)


def by_the_trainer(folder: str) -> None:
    from transformers import Trainer

    model = DistributedDataParallel(toys.model())
    ig.integrations.trainer(Trainer)(model, toys.arguments(folder, 2, 1), train_dataset=toys.Rows()).train()


def by_fabric(_: str) -> None:
    fabrics = pytest.importorskip("lightning.fabric")
    with as_lightning_finds_it():
        fabric = fabrics.Fabric(accelerator="cpu", devices=1, strategy=ig.integrations.FabricStrategy())
        fabric.launch()
        model = DistributedDataParallel(nn.Linear(2, 2))
        fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("integration", [by_accelerate, by_deepspeed, by_the_trainer, by_fabric])
def test_a_wrapped_model_is_refused_at_every_integration(integration: Callable[[str], Any], tmp_path: Path) -> None:
    with as_torchrun_starts_it(), pytest.raises(ig.IsogradError, match="IG557"):
        integration(str(tmp_path))


def test_a_layer_that_parallelize_module_has_cut_is_refused() -> None:
    class DTensor(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    model.weight = DTensor(torch.ones(2, 2))
    with pytest.raises(ig.IsogradError, match="IG557"):
        ig.Engine(model, ig.Mesh("dp1"), torch.optim.SGD)
