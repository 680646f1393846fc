"""The options of sentence-transformers' ranking losses beyond InfoNCE: similarity functions, directions, hardness.

The definition is that of MultipleNegativesRankingLoss of sentence-transformers 6.2. Each rank computes the losses of
its own rows against the rows of all ranks: the vectors are gathered once, and their gradients return to their owners in
one reduce-scatter each. Scores exist for `chunk` rows at a time, [chunk, columns], and are computed again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isograd.comm import ops
from isograd.errors import ContrastiveError, did_you_mean
from isograd.losses.contrastive.losses import NegativesScope

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
PARTITIONS = ("joint", "per_direction")
HARDNESS = (None, "in_batch_negatives", "hard_negatives", "all_negatives")


@dataclass(frozen=True)
class Scoring:
    """How pairs of vectors become logits; the fields are the options of the same names."""

    scale: float
    similarity_fct: Callable[[Tensor, Tensor], Tensor] | None
    directions: tuple[str, ...]
    partition_mode: str
    hardness_mode: str | None
    hardness_strength: float

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise option("scale", self.scale, "a positive number")
        for name in self.directions:
            _one_of("directions", name, DIRECTIONS)
        _one_of("partition_mode", self.partition_mode, PARTITIONS)
        _one_of("hardness_mode", self.hardness_mode, HARDNESS)
        if "query_to_doc" not in self.directions:
            raise option("directions", self.directions, "query_to_doc among them: it has the positive pair")
        if self.partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & {*self.directions}:
            raise option(
                "partition_mode",
                f"per_direction with {self.directions}",
                "directions that have the positive pair: query_to_doc and doc_to_query",
                "partition_mode='joint'",
            )
        if self.hardness_strength < 0:
            raise option("hardness_strength", self.hardness_strength, "0 or more")
        if (self.hardness_mode is None) != (self.hardness_strength == 0):
            raise option(
                "hardness_mode" if self.hardness_mode else "hardness_strength",
                f"hardness_mode={self.hardness_mode!r}, hardness_strength={self.hardness_strength}",
                "both or neither: one alone has no effect",
                "hardness_strength=5.0 with hardness_mode='hard_negatives', or leave both out",
            )

    @property
    def plain(self) -> bool:
        """Whether it is InfoNCE of cosines, which tiles.py computes in less memory."""
        return self.similarity_fct is None and self.hardness_mode is None and {*self.directions} == {"query_to_doc"}

    def losses(self, vectors: Sequence[Tensor], across: NegativesScope, chunk: int) -> Tensor:
        """One loss for each of my queries. All towers have equally many rows on a rank."""
        every = [ops.all_gather(v, across.group, 0, n) for v, n in zip(vectors, across.counts, strict=True)]
        first = sum(across.counts[0][: across.group.index])
        own = torch.arange(first, first + len(vectors[0]), device=vectors[0].device)
        parts = [checkpoint(self._of_rows, rows, *every, use_reentrant=False) for rows in own.split(chunk)]
        return torch.cat(parts)

    def _of_rows(self, own: Tensor, queries: Tensor, *documents: Tensor) -> Tensor:
        """The losses of the queries with the numbers `own`, of all ranks' queries."""
        score = self.similarity_fct or (lambda a, b: F.normalize(a, dim=1) @ F.normalize(b, dim=1).T)
        every = torch.cat(documents)
        is_own = own[:, None] == torch.arange(len(queries), device=own.device)
        of_query = is_own.repeat(1, len(documents))  # the positive and the query's own hard negatives
        scores = {"query_to_doc": score(queries[own], every)}
        if "query_to_query" in self.directions:
            scores["query_to_query"] = score(queries[own], queries).masked_fill(is_own, -torch.inf)
        if "doc_to_query" in self.directions:
            scores["doc_to_query"] = score(queries, documents[0][own]).T
        if "doc_to_doc" in self.directions:
            scores["doc_to_doc"] = score(every, documents[0][own]).T.masked_fill(of_query, -torch.inf)
        logits = {name: self.scale * s for name, s in scores.items()}
        if self.hardness_mode is not None:
            positive = F.pad(is_own, (0, of_query.shape[1] - is_own.shape[1]))
            harder = {
                "in_batch_negatives": ~of_query,
                "hard_negatives": of_query & ~positive,
                "all_negatives": ~positive,
            }[self.hardness_mode]
            penalty = self.hardness_strength * scores["query_to_doc"].detach() * harder
            logits["query_to_doc"] = logits["query_to_doc"] + penalty
        positives = logits["query_to_doc"].gather(1, own[:, None]).squeeze(1)
        if self.partition_mode == "joint":
            return torch.cat([*logits.values()], 1).logsumexp(1) - positives
        return torch.stack([s.logsumexp(1) for s in logits.values()]).mean(0) - positives


def option(name: str, seen: object, expected: str, fix: str | None = None) -> ContrastiveError:
    """IG970, to be raised: a value of an option of sentence-transformers that CachedInfoNCE does not support."""
    return ContrastiveError("IG970", seen=seen, expected=expected, fix=fix, name=name)


def _one_of(name: str, value: str | None, known: Sequence[str | None]) -> None:
    if value not in known:
        hint = did_you_mean(str(value), [k for k in known if k])
        raise option(name, f"{value!r}{hint}", f"one of {', '.join(map(repr, known))}")
