"""The head and the loss under tp: each rank has the logits of its part of the vocabulary, and no rank those of all.

transformers' models end in the same way: a head gives logits, the model may scale or cap each of them, and its loss
function is their cross entropy. So the head's outputs can stay cut, the library's own code scales and caps this rank's
part, and the loss function here gathers three numbers per token in the place of the logits.

Whether a class ends so is tried on a small copy (`may_join`), not read from its name. Others gather their logits, as
does every forward without labels or without autograd: generation, and evaluation by other measures than the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.core.input_checks import IdCheck
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.hf.dependency_probe import tiny_model
from isograd.hf.losses import CAUSAL, IGNORE, shard
from isograd.hf.styles import GatherHook
from isograd.nn.loss import cross_entropy_of_logits


def may_join(library: Any, config: Any, loss: str) -> bool:
    """Whether the loss of a class is the standard one, of logits that are made of the head's outputs one by one.

    A small copy runs with the whole head, and with its first and its second half: what arrives at the loss function
    must be the same numbers, with no other use of the vocabulary's size on the way.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    given: list[tuple[Tensor, int]] = []

    def record(logits: Tensor, labels: Tensor, vocab_size: int, *_: Any, **__: Any) -> Tensor:
        given.append((logits, vocab_size))
        return logits.sum()

    try:
        with tiny_model(library, config) as model, torch.no_grad():
            head, expected = model.get_output_embeddings(), ForCausalLMLoss if loss == CAUSAL else ForMaskedLMLoss
            if not isinstance(head, nn.Linear) or model.loss_function is not expected:
                return False
            model.loss_function = record
            tokens = torch.arange(14).view(2, 7) + 3
            inputs = shard({"input_ids": tokens, "labels": tokens}, Mesh.unbound("1"), loss).inputs
            half = head.out_features // 2
            for columns in (slice(None), slice(half), slice(half, None)):
                handle = head.register_forward_hook(lambda _, __, logits, mine=columns: logits[..., mine])
                model(**inputs)
                handle.remove()
            (whole, vocab), *parts = given
            joined = torch.cat([logits for logits, _ in parts], -1)
            return whole.shape[-1] == vocab == head.out_features and torch.equal(joined, whole)
    except Exception:  # it does something else with its logits, and fails on a part of them
        return False


@dataclass(eq=False)
class FusedHeadLoss:
    """Hooks of a model and of its head, and the model's loss function."""

    mesh: Mesh
    library: Callable[..., Tensor]  # the loss function of whole logits
    shifts: bool  # whether labels are those of the tokens themselves, and are to be shifted
    sizes: tuple[int, ...] = ()  # of the vocabulary, on each tp rank
    wrong: IdCheck | None = None
    on: bool = False  # whether the logits of the running forward stay cut

    def register(self, model: Any, head: Any, sizes: tuple[int, ...]) -> None:
        """Make this the loss function of a model whose head is cut."""
        self.sizes = sizes
        self.wrong = model.wrong_labels = IdCheck("labels", sum(self.sizes), IGNORE)  # an Engine finds it there
        model.loss_function = self.loss
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        head.register_forward_hook(self.gather)

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Of the model: decide for one forward."""
        learns = torch.is_grad_enabled() and kwargs.get("labels") is not None and kwargs.get("return_dict") is not False
        self.on = learns and model.loss_function == self.loss

    def gather(self, head: nn.Module, args: tuple[Any, ...], logits: Tensor) -> Tensor:
        """Of the head: [..., mine] -> [..., all], or as they are."""
        return logits if self.on else GatherHook(self.mesh, self.sizes).after(head, args, logits)

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The library's loss, of the logits [b, s, mine] of this rank's part of the vocabulary."""
        if not self.on:
            options |= {"shift_labels": shift_labels} if self.shifts else {}
            return self.library(logits, labels, vocab_size, num_items_in_batch, ignore_index, **options)
        if self.shifts and shift_labels is not None:
            labels = shift_labels
        elif self.shifts:
            labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        assert self.wrong is not None
        flat = labels.flatten()
        self.wrong.find(flat)
        group = self.mesh.group("tp")
        first, vocab = sum(self.sizes[: group.index]), sum(self.sizes)
        total = cross_entropy_of_logits(logits.flatten(0, -2), flat, group, first, vocab, ignore_index)
        return total / ((flat != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


def refuse_logits(model: Any, joined: FusedHeadLoss) -> None:
    """Put a refusal in the place of the cut logits of a forward. Registered last: a trial of attention reads them."""

    def after(_: Any, args: tuple[Any, ...], output: Any) -> None:
        has_logits: bool = isinstance(output, dict) and "logits" in output
        if joined.on and has_logits:
            output.logits = CutLogits(joined.mesh)
        joined.on = False

    model.register_forward_hook(after, always_call=True)


class CutLogits:
    """In the place of logits of which no rank has all."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def _refuse(self, *_: Any) -> Any:
        raise _refusal(self._mesh)

    __getitem__ = __len__ = __iter__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refusal(self._mesh)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch where one is an argument of a function of torch."""
        raise _refusal(None)


def _refusal(mesh: Mesh | None) -> ModelError:
    seen = "output.logits of a forward with labels" + (f", under {str(mesh.layout)!r}" if mesh else "")
    return ModelError("IG476", seen=seen, where=mesh.describe_rank() if mesh else None)
