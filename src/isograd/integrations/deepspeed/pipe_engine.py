"""The engine that `initialize` returns for a `PipelineModule`: whole batches, of which each stage has its part.

    loss = engine.train_batch(iterator)      # gradient_accumulation_steps micro-batches of (inputs, labels)
    loss = engine.eval_batch(iterator)

Every rank of a pipeline passes an iterator of the same batches; those of other data ranks have their own. Before a
stage runs, all ranks know that every rank has its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as tree

from isograd.comm.consensus import all_gather_object
from isograd.integrations.deepspeed.loop import LoopEngine
from isograd.integrations.deepspeed.pipe import RepeatingLoader
from isograd.integrations.deepspeed.settings import refuse
from isograd.integrations.world import name_failed_rank


class PipelineEngine(LoopEngine):
    """DeepSpeed's, of the same name."""

    shuffles = False
    _data: Iterator[Any] | None = None
    _batch_fn: Callable[[Any], Any] | None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """A step on the next `gradient_accumulation_steps` micro-batches; their mean loss, on all ranks."""
        self.module.train()
        micros = self._micros(data_iter, self.settings.steps)
        with name_failed_rank(self.mesh):
            stats = self.optimizer.stats = self.engine.train_step(micros)
        self._stepped(stats)
        self.micro_steps += len(micros)
        if self.lr_scheduler is not None and not stats.skipped:
            self.lr_scheduler.step()
        return torch.tensor(stats.loss, dtype=torch.float64, device=self.device)

    def eval_batch(
        self, data_iter: Iterator[Any], return_logits: bool = False, compute_loss: bool = True,
        reduce_output: str = "avg", bcast_loss: bool = True, num_micro_batches: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The mean loss of the next micro-batches, on all ranks, in eval mode and without gradients."""
        if return_logits or not compute_loss or reduce_output != "avg":
            refuse("eval_batch of outputs", "eval_batch(data_iter), which returns the mean loss", self.mesh)
        was = self.module.training
        self.module.eval()
        micros = self._micros(data_iter, num_micro_batches or self.settings.steps)
        with name_failed_rank(self.mesh):
            loss = self.engine.evaluate(micros).loss
        self.module.train(was)
        return torch.tensor(loss, dtype=torch.float64, device=self.device)

    def _micros(self, given: Iterator[Any] | None, count: int) -> list[Any]:
        """The next micro-batches; where a rank has not as many, all ranks refuse, and nothing has begun."""
        micros, raised, said = list[Any](), None, ""
        try:
            source = self._data if given is None else given
            if source is None:
                refuse(
                    "no data_iter", "train_batch(data_iter) on every rank, or training_data in initialize", self.mesh
                )
            micros += [self._micro(batch) for batch in islice(source, count)]
        except Exception as error:
            raised, said = error, f"{type(error).__name__}: {error}"[:300]
        with name_failed_rank(self.mesh):
            of_ranks = all_gather_object([len(micros), said], self.mesh)
        if raised is not None:
            raise raised
        if failed := {rank: words for rank, (_, words) in enumerate(of_ranks) if words}:
            refuse(f"a data iterator that raised, by rank: {failed}", "batches on every rank", self.mesh)
        found = [number for number, _ in of_ranks]
        if not any(found):
            raise StopIteration
        if min(found) < count:
            seen = f"data iterators that ended: by rank, {found} of {count} micro-batches of a step"
            refuse(seen, f"{count} on every rank, as of RepeatingLoader(loader)", self.mesh)
        return micros

    def _micro(self, batch: Any) -> tuple[Any, Any]:
        """A batch of a loader as (inputs, labels) on this device."""
        pair = batch if self._batch_fn is None else self._batch_fn(batch)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            refuse(f"a batch that is a {type(pair).__name__}", "(inputs, labels), each a tensor or a tuple", self.mesh)
        inputs, labels = (tuple(part) if isinstance(part, list) else part for part in pair)
        moved: tuple[Any, Any] = tree.tree_map_only(Tensor, lambda t: t.to(self.device), (inputs, labels))
        return moved

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """`train_batch()` takes its batches, again and again."""
        self.training_dataloader = RepeatingLoader(loader)
        self._data = iter(self.training_dataloader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """`train_batch()` takes from it."""
        self._data = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """fn(batch) makes (inputs, labels) of what a loader returns."""
        self._batch_fn = fn

    def is_first_stage(self) -> bool:
        """Whether this rank holds the first layer."""
        return self.mesh.index("pp") == 0

    def is_last_stage(self) -> bool:
        """Whether this rank holds the last layer, and computes losses."""
        return self.mesh.index("pp") == self.mesh.layout.pp - 1

    def _by_parts(self, *_: Any, **__: Any) -> NoReturn:
        refuse("forward, backward, step or no_sync with a pipeline", "engine.train_batch(data_iter)", self.mesh)

    forward = backward = step = no_sync = set_gradient_accumulation_boundary = _by_parts
