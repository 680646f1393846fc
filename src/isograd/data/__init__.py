"""Text as token shards, read by number: built once, then every sample is a function of (seed, step, row).

Names are loaded when first used: `isograd data --help` needs neither numpy nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isograd import lazily

if TYPE_CHECKING:
    from isograd.data.building import build as build
    from isograd.data.mixture import Mixture as Mixture
    from isograd.data.mixture import Source as Source
    from isograd.data.mixture import read_tokenizer as read_tokenizer
    from isograd.data.show import verify as verify
    from isograd.data.tokens import Tokens as Tokens

__all__ = ["Mixture", "Source", "Tokens", "build", "read_tokenizer", "verify"]

__getattr__ = lazily(
    __name__, {"building": "build", "mixture": "Mixture Source read_tokenizer", "show": "verify", "tokens": "Tokens"}
)
