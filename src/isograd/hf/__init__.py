"""Models of transformers, their classes as they are, under every layout that their own tensor plan allows.

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isograd import lazily

if TYPE_CHECKING:
    from isograd.hf.adapter_files import export_adapters as export_adapters
    from isograd.hf.configs import load_config as load_config
    from isograd.hf.export import export_hf as export_hf
    from isograd.hf.families import HuggingFace as HuggingFace
    from isograd.hf.loading import attach as attach
    from isograd.hf.loading import load as load
    from isograd.hf.losses import BatchPart as BatchPart
    from isograd.hf.losses import shard as shard
    from isograd.hf.proof import Proof as Proof
    from isograd.hf.proof import prove as prove

__all__ = ["BatchPart", "HuggingFace", "Proof", "attach", "load", "prove", "shard"]

__getattr__ = lazily(
    __name__,
    {
        "adapter_files": "export_adapters",
        "configs": "load_config",
        "export": "export_hf",
        "families": "HuggingFace",
        "loading": "attach load",
        "losses": "BatchPart shard",
        "proof": "Proof prove",
    },
)
