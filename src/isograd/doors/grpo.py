"""TRL's GRPOTrainer on the engine: `GRPOTrainer = ig.doors.trainer(GRPOTrainer)`.

Its own loss divides by counts of a micro-batch and by accumulation steps, or by the tokens of a whole generation. Here
it is asked, micro-batch by micro-batch, for the mean over that one's own tokens or completions, which is its weight;
the engine divides once. So a step's gradient is the one that GRPOTrainer has on one device where one micro-batch is the
whole step, however completions fall onto ranks and micro-batches.

Completions are generated with whole parameters: at ZeRO 3 all ranks gather the model for it, and shard it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from isograd.doors.trainers import OnEngine

OF_TOKENS = ("bnpo", "dapo", "cispo", "vespo")  # the mean over all completions' tokens
OF_COMPLETIONS = ("grpo", "sapo", "dr_grpo", "luspo")  # of a mean or a sum of each completion


def has_its_loss(kind: type) -> bool:
    """Whether the loss of a Trainer class is the one of TRL's GRPOTrainer, and no subclass changes it."""
    classes = [one for one in kind.__mro__ if one is not GrpoOnEngine]
    own = [next((one for one in classes if name in vars(one)), object) for name in ("_compute_loss", "compute_loss")]
    return all((one.__module__, one.__name__) == ("trl.trainer.grpo_trainer", "GRPOTrainer") for one in own)


class GrpoOnEngine(OnEngine):
    """What `trainer` puts before GRPOTrainer."""

    divides_by_step = False  # its division by counts of the whole step is taken out below

    def _reasons(self) -> dict[str, Any]:
        args, kind = self.args, self.loss_type
        return super()._reasons() | {
            f"loss_type={kind!r}, whose mean is not known here": kind not in OF_TOKENS + OF_COMPLETIONS,
            "top_entropy_quantile: a threshold of each micro-batch": args.top_entropy_quantile < 1.0,
            "use_adaptive_entropy": args.use_adaptive_entropy,
            f"entropy_coef with loss_type={kind!r}: two means in one loss": args.entropy_coef and kind not in OF_TOKENS,
            "router_aux_loss_coef: the mean of micro-batches' balance losses": self.aux_loss_enabled,
            "a compute_loss of its own": not has_its_loss(type(self)),
            "use_vllm with zero3, which has no whole weights to send": args.use_vllm and self.mesh.layout.zero == 3,
        }

    def loss_weight(self, inputs: Mapping[str, Any]) -> float | Tensor:
        """How many tokens that count, or completions, the loss of a micro-batch is the mean of."""
        if not isinstance(inputs, Mapping):
            return 0  # rows of a generation, not of a micro-batch yet
        return counted(inputs).sum() if self.loss_type in OF_TOKENS else len(inputs["completion_mask"])

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's, of this micro-batch alone."""
        if self._weighs:
            self._weight = self.loss_weight(inputs)
            # TRL multiplies this count by steps of accumulation (1 here) and divides it by ranks and these steps.
            times = self.accelerator.num_processes * self.args.steps_per_generation
            inputs = {**inputs, "num_items_in_batch": counted(inputs).sum() * times}
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self._whole():
            return super()._generate_and_score_completions(inputs)


def counted(inputs: Mapping[str, Any]) -> Tensor:
    """The tokens of completions that count."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
