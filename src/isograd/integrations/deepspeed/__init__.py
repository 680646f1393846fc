"""DeepSpeed's integrations: its configs, and a loop that was written for its engine. docs/integrations/deepspeed.md.

    from isograd.integrations import deepspeed                 # in the place of: import deepspeed
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json", ...)

keys.py        what each key of a config asks for
config.py      a config as the config of `isograd train`
settings.py    a config as the settings of a loop, with its three schedules with a warmup
loop.py        the engine that `initialize` returns
ulysses.py     DistributedAttention, UlyssesSPAttentionHF and UlyssesSPDataLoaderAdapter

Names are loaded when first used: `isograd config from` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.integrations.deepspeed.loop import LoopEngine as LoopEngine
    from isograd.integrations.deepspeed.loop import add_config_arguments as add_config_arguments
    from isograd.integrations.deepspeed.loop import init_distributed as init_distributed
    from isograd.integrations.deepspeed.loop import initialize as initialize
    from isograd.integrations.deepspeed.ulysses import DistributedAttention as DistributedAttention
    from isograd.integrations.deepspeed.ulysses import UlyssesSPAttentionHF as UlyssesSPAttentionHF
    from isograd.integrations.deepspeed.ulysses import UlyssesSPDataLoaderAdapter as UlyssesSPDataLoaderAdapter

_OF_ULYSSES = ["DistributedAttention", "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]
__all__ = [
    "DistributedAttention", "LoopEngine", "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter", "add_config_arguments",
    "init_distributed", "initialize",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'isograd.integrations.deepspeed' has no attribute {name!r}")
    from isograd.integrations.deepspeed import loop, ulysses

    return getattr(ulysses if name in _OF_ULYSSES else loop, name)
