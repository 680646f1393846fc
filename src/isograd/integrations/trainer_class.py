"""`ig.integrations.trainer`: a subclass of a Trainer class of transformers or TRL that trains on the engine."""

from __future__ import annotations

from typing import TypeVar

from transformers.trainer import Trainer

from isograd.errors import IntegrationError
from isograd.integrations.grpo import EngineGRPOTrainerMixin, has_grpo_loss
from isograd.integrations.trainers import EngineTrainerMixin
from isograd.integrations.world import layout_option

T = TypeVar("T")


def trainer(kind: type[T], layout: str | None = None) -> type[T]:
    """A subclass of a Trainer class of transformers or TRL whose training runs on the engine.

    layout: "dp2 zero1" and the like; left out, plain data parallelism over all ranks. `--isograd LAYOUT` on the command
    line comes first; it is taken out of sys.argv here, before the script reads its own options.
    """
    if not (isinstance(kind, type) and issubclass(kind, Trainer)) or issubclass(kind, EngineTrainerMixin):
        raise IntegrationError("IG857", seen=kind)
    names = {"isograd_layout": layout_option(layout), "__module__": kind.__module__, "__doc__": kind.__doc__}
    integration = EngineGRPOTrainerMixin if has_grpo_loss(kind) else EngineTrainerMixin
    made: type[T] = type(kind.__name__, (integration, kind), names)
    return made
