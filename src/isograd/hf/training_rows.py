"""A model of transformers that takes the rows of a run: model(tokens, labels, ...) -> (loss, weight).

Documents that share a row are kept apart by positions that begin again, as transformers does it; `refuse_packing` first
tries, on a small copy, whether the class does. Dropout is a function of the step: each forward draws from a generator
that the run's key, its first sample and this rank's part of the sequences seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from isograd.core.mesh import Mesh
from isograd.core.rng import Key
from isograd.errors import ModelError, headline
from isograd.hf.dependency_probe import tiny_model
from isograd.hf.force_fp64 import ForceFP64
from isograd.hf.losses import CAUSAL, library_of, shard
from isograd.hf.stages import put_in_front
from isograd.hf.tensor_parallel import dropouts
from isograd.sequence import document_starts

SAME = 1e-9  # of logits in fp64, relative to the largest


class TrainingRows(nn.Module):
    """In front of the library's class. Without `tokens` its forward is the library's."""

    _isograd_mesh: Mesh
    _isograd_draws: bool  # whether it has dropout

    def forward(
        self,
        *args: Any,
        tokens: Tensor | None = None,
        labels: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
        key: Key | None = None,
        **more: Any,
    ) -> Any:
        """The mean loss over this rank's labels, and how many they are; of a stage, what the stage returns."""
        if tokens is None:
            return super().forward(*args, **({} if labels is None else {"labels": labels}), **more)
        assert labels is not None
        micro = library_rows(tokens, labels, documents)
        with running(self, key, samples):
            if "stage" in more:
                return super().forward(**micro, **more)
            part = shard(micro, self._isograd_mesh)
            return super().forward(**part.inputs).loss, part.weight

    def refuse_micro(self, micro: Any) -> None:
        """Of a model in stages, as its pipeline asks."""
        of_stages: Any = super()
        of_stages.refuse_micro(library_rows(micro["tokens"], micro["labels"], micro.get("documents")))


def takes_rows(model: Any, mesh: Mesh, kind: type[nn.Module] = TrainingRows) -> None:
    """Put `kind` in front of the class of a model of `ig.hf.load`."""
    put_in_front(model, kind)
    model._isograd_mesh, model._isograd_draws = mesh, any(map(dropouts, model.modules()))


def library_rows(tokens: Tensor, labels: Tensor, documents: Tensor | None = None) -> dict[str, Tensor]:
    """The same rows as `ig.hf.shard` takes them."""
    found = {"input_ids": tokens, "shift_labels": labels}
    return found if documents is None else found | {"position_ids": positions(documents)}


def positions(documents: Tensor) -> Tensor:
    """[b, s]: the place of each token in its document, from the numbers of documents."""
    return torch.arange(documents.shape[1], device=documents.device) - document_starts(documents)


@torch.no_grad()
def logits_of(model: Any, mesh: Mesh, tokens: Tensor) -> Tensor:
    """[b, s, vocab] of whole rows, on all ranks; not of a model in stages."""
    part = shard({"input_ids": tokens}, mesh)
    with running(model, None, None):
        return part.gather_sequence(model(**part.inputs).logits)[:, : tokens.shape[1]]


class LibraryFollowing:
    """The logits behind the tokens that it has been given so far, with the library's own cache of keys and values; of a
    class that has none, from all of them."""

    def __init__(self, model: Any) -> None:
        self.model, self.kept = model, dict[str, Any]()
        self.given: Tensor | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """[b, vocab], behind further tokens [b, s] of these rows."""
        self.given = tokens if self.given is None or self.kept else torch.cat((self.given, tokens), 1)
        with running(self.model, None, None):
            output = self.model(input_ids=self.given, use_cache=True, **self.kept)
        given = [name for name in ("cache", "past_key_values") if output.get(name) is not None]
        self.kept = {name: output[name] for name in given[:1]}  # newer ones give the cache both names
        return output.logits[:, -1]  # type: ignore[no-any-return]


@contextmanager
def running(model: Any, key: Key | None, samples: Tensor | None) -> Iterator[None]:
    """A forward of a micro-batch: its draws are its own, and torch's generators stay as they were. A model in fp64
    computes in fp64 where the library casts to fp32, so that runs in fp64 can be compared."""
    with ExitStack() as stack:
        if key is not None and samples is not None and model.training and model._isograd_draws:
            mesh: Mesh = model._isograd_mesh
            devices = [] if mesh.device.type == "cpu" else [mesh.device]
            stack.enter_context(torch.random.fork_rng(devices, device_type=mesh.device.type))
            first = int(samples.reshape(-1)[0])
            torch.manual_seed(key.fold("hugging", first, mesh.index("cp"), mesh.index("pp")).seed)
        if model.dtype == torch.float64:
            stack.enter_context(ForceFP64())
        yield


def refuse_other_losses(config: Any, mesh: Mesh) -> None:
    """Rows are for models that predict the next token."""
    library, loss = library_of(config, mesh.describe_rank())
    if loss != CAUSAL:
        raise ModelError(
            "IG460",
            f"{library.__name__} does not predict the next token of a text",
            seen=f"its loss is {loss}",
            expected="a causal language model",
            fix="ig.hf.load in a loop of your own trains it",
            where=mesh.describe_rank(),
        )


def refuse_packing(config: Any, mesh: Mesh) -> None:
    """Refuse a class in which the documents of a row see each other. A small copy tells, on each rank by itself."""
    library, _ = library_of(config, mesh.describe_rank())
    lengths = ((4, 7), (6, 5))  # of the documents of two rows
    documents = torch.stack([torch.arange(2).repeat_interleave(torch.tensor(each)) for each in lengths])
    tokens = torch.randint(3, 20, documents.shape, generator=torch.Generator().manual_seed(1))
    try:
        with tiny_model(library, config) as model, torch.no_grad(), ForceFP64():
            whole = shard(library_rows(tokens, tokens, documents), Mesh.unbound("1")).inputs
            together = model(**whole).logits
            apart = torch.zeros_like(together)
            for row, number in ((0, 0), (0, 1), (1, 0), (1, 1)):
                mine = documents[row] == number
                alone = shard({"input_ids": tokens[row, mine][None]}, Mesh.unbound("1")).inputs
                apart[row, mine] = model(**alone).logits[0]
        difference = float((together - apart).abs().max() / apart.abs().max())
        seen = f"logits of a small copy differ by {difference:.1e} of the largest"
    except Exception as error:
        difference, seen = 1.0, headline(error)
    if not difference <= SAME:
        raise ModelError("IG477", seen=seen, name=library.__name__, where=mesh.describe_rank())
