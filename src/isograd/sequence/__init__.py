"""Long sequences cut over the cp axis: which rank holds which token and head, as data, and the exchanges."""

from isograd.sequence.attend import attend, gather_whole, heads_here, refuse_unlike, token_layout_for
from isograd.sequence.token_layout import TokenLayout, document_starts, lay_out_tokens

__all__ = [
    "TokenLayout",
    "attend",
    "document_starts",
    "gather_whole",
    "heads_here",
    "lay_out_tokens",
    "refuse_unlike",
    "token_layout_for",
]
