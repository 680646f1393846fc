"""Long sequences cut over the cp axis: which rank holds which token and head, as data, and the exchanges."""

from isograd.sequence.attend import attend, heads_here, places_for
from isograd.sequence.hugging import Cut, Part, attach, shard
from isograd.sequence.places import Places, document_starts, spread, text_lengths
from isograd.sequence.same import gather_whole, refuse_unlike

__all__ = [
    "Cut",
    "Part",
    "Places",
    "attach",
    "attend",
    "document_starts",
    "gather_whole",
    "heads_here",
    "places_for",
    "refuse_unlike",
    "shard",
    "spread",
    "text_lengths",
]
