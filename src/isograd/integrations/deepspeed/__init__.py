"""DeepSpeed's integrations: its configs, and a loop that was written for its engine. docs/integrations/deepspeed.md.

Names are loaded when first used: `isograd config from` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isograd import lazily

if TYPE_CHECKING:
    from isograd.integrations.deepspeed import pipe as pipe
    from isograd.integrations.deepspeed.loop import LoopEngine as LoopEngine
    from isograd.integrations.deepspeed.loop import add_config_arguments as add_config_arguments
    from isograd.integrations.deepspeed.loop import init_distributed as init_distributed
    from isograd.integrations.deepspeed.loop import initialize as initialize
    from isograd.integrations.deepspeed.ulysses import DistributedAttention as DistributedAttention
    from isograd.integrations.deepspeed.ulysses import UlyssesSPAttentionHF as UlyssesSPAttentionHF
    from isograd.integrations.deepspeed.ulysses import UlyssesSPDataLoaderAdapter as UlyssesSPDataLoaderAdapter

_HOMES = {
    "loop": "LoopEngine add_config_arguments init_distributed initialize",
    "pipe": "pipe",
    "ulysses": "DistributedAttention UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
}
__all__ = " ".join(_HOMES.values()).split()  # noqa: PLE0605

__getattr__ = lazily(__name__, _HOMES)
