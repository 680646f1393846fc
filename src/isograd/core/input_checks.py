"""What a model was given in the running step, as this rank saw it: wrong ids, and a digest of the inputs' contents.

Three mistakes would train silently, or with a NaN that names nobody, and only one rank may have made them:

- A label or token id outside the vocabulary. Layers count them (`IdCheck.find`) and make the loss NaN.
- Scores of experts that are NaN, in which no choice means anything. Layers count the tokens (`ScoreCheck.find`).
- Ranks of one tp group given different batches (data indexed by `mesh.rank`), or ranks of one cp group, where the model
  takes its part of the batch itself (`cuts_batches`). There, every call of the model adds the contents of its
  arguments (tensors, numbers, the key of dropout) and whether it is training to a digest, in order; the digests of a
  group must be equal at the step. Stages of a pipeline are compared, too: there it is what the engine was given.

All stay on the device, and nothing waits for it: `columns` travel in the step's one gather, and `check` is given what
all ranks sent. So all ranks refuse together, and the error names the ranks that had the wrong input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from isograd.comm.consensus import all_gather_object
from isograd.comm.fingerprint import fingerprint
from isograd.comm.ops import uncompiled
from isograd.core.attributes import set_attributes
from isograd.core.mesh import Mesh
from isograd.core.rng import Key
from isograd.errors import EngineError, ModelError

_EXACT = (1 << 52) - 1  # the bits of a digest that a float64 carries exactly
_NEXT = 6364136223846793005  # odd: each call of the model moves what the calls before it left in the digest


class IdCheck:
    """Counts the ids that one layer cannot look up. They are kept on the device until a step or evaluation reads them.

    A forward under no_grad belongs to no step and counts nothing, except in `Engine.evaluate`.
    """

    def __init__(self, kind: str, vocab: int, ignored: int | None = None) -> None:
        """`kind`: what the ids are, in the plural, for messages. `ignored`: an id that is right wherever it lies."""
        self.kind, self.vocab, self.ignored = kind, vocab, ignored
        self.evaluating = False
        self.seen: Tensor | None = None  # int64 [how many, the lowest, the highest]

    def find(self, ids: Tensor) -> Tensor:
        """A mask of the wrong ids, which are counted."""
        wrong = invalid_ids(ids, self.vocab, self.ignored)
        if ids.numel() and (self.evaluating or torch.is_grad_enabled()):
            self._count(ids, wrong)
        return wrong

    @uncompiled
    def _count(self, ids: Tensor, wrong: Tensor) -> None:
        low, high = torch.where(wrong, ids, 0).long().aminmax()
        many = wrong.sum()
        if self.seen is not None:
            before = self.seen
            many, low, high = many + before[0], torch.minimum(low, before[1]), torch.maximum(high, before[2])
        self.seen = torch.stack((many, low, high))

    def describe(self) -> str | None:
        """'3 labels between -1 and 60 (vocabulary 50, ignore_index -100)', or None. Waits for the device."""
        many, low, high = (0, 0, 0) if self.seen is None else map(int, self.seen.tolist())
        if not many:
            return None
        ends = f"between {low} and {high}" if low < 0 and high >= self.vocab else f"such as {low if low < 0 else high}"
        right = f"vocabulary {self.vocab}" + ("" if self.ignored is None else f", ignore_index {self.ignored}")
        return f"{many} {self.kind} {ends} ({right})"


class ScoreCheck:
    """Counts the tokens whose scores for the experts of one layer are NaN, as IdCheck counts ids."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.evaluating = False
        self.seen: Tensor | None = None  # int64 [how many]

    @uncompiled
    def find(self, scores: Tensor) -> None:
        """scores [T, experts]."""
        if scores.numel() and (self.evaluating or torch.is_grad_enabled()):
            many = scores.detach().isnan().any(-1).sum()[None]
            self.seen = many if self.seen is None else self.seen + many

    def describe(self) -> str | None:
        """'3 tokens in blocks.2.mlp', or None. Waits for the device."""
        many = 0 if self.seen is None else int(self.seen)
        return f"{many} tokens in {self.layer}" if many else None


def invalid_ids(ids: Tensor, vocab: int, ignored: int | None = None) -> Tensor:
    """Which ids are neither in the vocabulary nor the ignored one."""
    wrong = (ids < 0) | (ids >= vocab)
    return wrong if ignored is None else wrong & (ids != ignored)


class InputChecks:
    """What a model was given since the last `clear`, to be compared with the other ranks of the mesh."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.mesh = mesh
        kinds = IdCheck | ScoreCheck
        self._layers = [w for module in model.modules() for w in vars(module).values() if isinstance(w, kinds)]
        self._evaluating = False
        self._digest: Tensor | None = None
        for number, hook in list(model._forward_pre_hooks.items()):  # of the same model, or one that it is a copy of
            if isinstance(getattr(hook, "__self__", None), InputChecks):
                del model._forward_pre_hooks[number]
                model._forward_pre_hooks_with_kwargs.pop(number, None)
        # The ranks that must be given equal tensors.
        alike = ("pp", "cp", "tp") if getattr(model, "cuts_batches", False) else ("pp", "tp")
        self.peers = " ".join(axis for axis in alike if mesh.size(axis) > 1) or "tp"
        if mesh.size("pp") == 1 < mesh.size(self.peers):  # what a stage is called with, others passed on
            model.register_forward_pre_hook(self._called, with_kwargs=True)
        self.clear()

    @uncompiled
    @torch.no_grad()
    def add(self, model: nn.Module, *given: Any) -> None:
        """What the model is given, to the digest."""
        for place, value in enumerate(_leaves((given, model.training))):
            if isinstance(value, Tensor):
                content = fingerprint(value).to(self.mesh.device) + place
            else:  # written there: a copy would make the host wait
                content = torch.full((), crc32(repr(value).encode()) + place, device=self.mesh.device)
            self._digest = content if self._digest is None else self._digest * _NEXT + content

    def _called(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._evaluating or torch.is_grad_enabled():
            self.add(model, getattr(kwargs.get("isograd"), "given", (args, kwargs)))  # of a part, the whole batch

    def clear(self) -> None:
        """A new step begins."""
        self._digest = None
        for layer in self._layers:
            layer.seen = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Forwards in here, under no_grad, are counted by themselves; what the running step was given is kept."""
        layers = set_attributes(*self._layers, seen=None, evaluating=True)
        with set_attributes(self, _digest=None, _evaluating=True), layers:
            yield

    def columns(self) -> Tensor:
        """float64 [2] on the mesh's device: the digest, and how many ids and scores were wrong. Exact."""
        zero = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        digest = zero if self._digest is None else self._digest & _EXACT
        wrong = [layer.seen[0].to(zero.device) for layer in self._layers if layer.seen is not None]
        return torch.stack((digest, sum(wrong, zero))).double()

    def check(self, table: Tensor, *, late: bool = False) -> None:
        """`table`: row i holds the columns of rank i; on the CPU, and equal on all ranks, which all raise or none.
        late: of a step that has ended, of which layers know nothing any more."""
        if bool(table[:, 1].any()):
            if late:
                seen = f"wrong ids, or tokens whose scores for experts are NaN, by rank: {table[:, 1].long().tolist()}"
                raise ModelError("IG417", seen=seen, where=self.mesh.describe_rank())
            self._refuse_wrong()
        groups = self.mesh.all_groups(self.peers)
        digests = table[groups, 0]
        apart = groups[(digests != digests[:, :1]).any(1)].tolist()
        if apart:
            raise EngineError(
                "IG516",
                seen=f"ranks {apart[0]}: unlike arguments of the model, or unlike modes (train, eval)",
                where=self.mesh.describe_rank(),
                axes=self.peers.replace(" ", " and "),
                things="batches",
            )

    def _refuse_wrong(self) -> None:
        mine: tuple[list[str], list[str]] = ([], [])
        for layer in self._layers:
            words = layer.describe()
            mine[isinstance(layer, ScoreCheck)].extend([words] if words else [])
        notes = all_gather_object([self.mesh.describe_rank(), *mine], self.mesh)
        of_ids = [f"{where} was given {' and '.join(ids)}" for where, ids, _ in notes if ids]
        found = of_ids or [f"{where}: {', '.join(scores[:4])}" for where, _, scores in notes if scores]
        seen = "; ".join(found[:4]) + (f"; and {len(found) - 4} more ranks" if len(found) > 4 else "")
        raise ModelError("IG417" if of_ids else "IG455", seen=seen, where=self.mesh.describe_rank())


def _leaves(value: Any) -> Iterator[Tensor | Key | float | str]:
    """All tensors, numbers, words and random keys in nested arguments, in one order."""
    if isinstance(value, Tensor | Key | int | float | str):
        yield value
    elif isinstance(value, Mapping):
        for name in value:
            yield from _leaves(value[name])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif (parts := tree.tree_leaves(value)) and parts[0] is not value:
        yield from _leaves(parts)
