"""DeepSpeed's integrations: its configs, and a loop that was written for its engine. docs/integrations/deepspeed.md.

    from isograd.integrations import deepspeed                 # in the place of: import deepspeed
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json", ...)

keys.py        what each key of a config asks for
config.py      a config as the config of `isograd train`
settings.py    a config as the settings of a loop, with its three schedules with a warmup
start.py       `initialize`, and what else a script calls before its loop
loop.py        the engine that `initialize` returns
pipe.py        PipelineModule, LayerSpec and TiedLayerSpec
pipe_engine.py the engine that `initialize` returns for a PipelineModule
ulysses.py     DistributedAttention, UlyssesSPAttentionHF and UlyssesSPDataLoaderAdapter

Names are loaded when first used: `isograd config from` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from isograd import lazily

if TYPE_CHECKING:
    from isograd.integrations.deepspeed import pipe as pipe
    from isograd.integrations.deepspeed.loop import LoopEngine as LoopEngine
    from isograd.integrations.deepspeed.start import add_config_arguments as add_config_arguments
    from isograd.integrations.deepspeed.start import init_distributed as init_distributed
    from isograd.integrations.deepspeed.start import initialize as initialize
    from isograd.integrations.deepspeed.ulysses import DistributedAttention as DistributedAttention
    from isograd.integrations.deepspeed.ulysses import UlyssesSPAttentionHF as UlyssesSPAttentionHF
    from isograd.integrations.deepspeed.ulysses import UlyssesSPDataLoaderAdapter as UlyssesSPDataLoaderAdapter

_START, _ULYSSES = ("add_config_arguments", "init_distributed", "initialize"), (
    "DistributedAttention", "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter",
)  # fmt: skip
__all__ = ["LoopEngine", *_START, *_ULYSSES, "pipe"]  # noqa: PLE0604

_loaded = lazily(__name__, {"LoopEngine": "loop"} | dict.fromkeys(_START, "start") | dict.fromkeys(_ULYSSES, "ulysses"))


def __getattr__(name: str) -> Any:
    return import_module(f"{__name__}.pipe") if name == "pipe" else _loaded(name)
