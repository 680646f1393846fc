"""DeepSpeed's integrations: its configs, and a loop that was written for its engine. docs/integrations/deepspeed.md.

    from isograd.integrations import deepspeed                 # in the place of: import deepspeed
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json", ...)

keys.py        what each key of a config asks for
config.py      a config as the config of `isograd train`
settings.py    a config as the settings of a loop, with its three schedules with a warmup
loop.py        the engine that `initialize` returns

Names are loaded when first used: `isograd config from` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.integrations.deepspeed.loop import LoopEngine as LoopEngine
    from isograd.integrations.deepspeed.loop import add_config_arguments as add_config_arguments
    from isograd.integrations.deepspeed.loop import init_distributed as init_distributed
    from isograd.integrations.deepspeed.loop import initialize as initialize

__all__ = ["LoopEngine", "add_config_arguments", "init_distributed", "initialize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'isograd.integrations.deepspeed' has no attribute {name!r}")
    from isograd.integrations.deepspeed import loop

    return getattr(loop, name)
