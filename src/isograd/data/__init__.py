"""Text as token shards, read by number: built once, then every sample is a function of (seed, step, row).

Names are loaded when first used: `isograd data --help` needs neither numpy nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.data.mixture import Mixture as Mixture
    from isograd.data.mixture import Source as Source
    from isograd.data.tokens import Tokens as Tokens

__all__ = ["Mixture", "Source", "Tokens"]


def __getattr__(name: str) -> Any:
    if name in ("Mixture", "Source"):
        from isograd.data import mixture

        return getattr(mixture, name)
    if name == "Tokens":
        from isograd.data.tokens import Tokens

        return Tokens
    raise AttributeError(f"module 'isograd.data' has no attribute {name!r}")
