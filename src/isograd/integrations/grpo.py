"""TRL's GRPOTrainer on the engine: `GRPOTrainer = ig.integrations.trainer(GRPOTrainer)`.

Its own loss divides by counts of a micro-batch and by accumulation steps, or by the tokens of a whole generation. Here
it is asked, micro-batch by micro-batch, for the mean over that one's own tokens or completions, which is its weight;
the engine divides once. Completions are generated with whole parameters, by vLLM too: at ZeRO 3 all ranks gather the
model for it, and shard it again. Under tp the ranks of a group have the completions and the rewards of the first of
them. A run resumes between two generations, since a checkpoint has no completions, with the order of prompts that the
epoch would have had: TRL's own resume takes the first epoch's again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import lcm
from typing import Any

import torch
from torch import Tensor

from isograd.comm.consensus import all_gather_object
from isograd.core.attributes import set_attributes
from isograd.integrations.shared_rows import cuts_model
from isograd.integrations.trainers import EngineTrainerMixin

OF_TOKENS = ("bnpo", "dapo", "cispo", "vespo")  # the mean over all completions' tokens
OF_COMPLETIONS = ("grpo", "sapo", "dr_grpo", "luspo")  # of a mean or a sum of each completion


def has_grpo_loss(kind: type) -> bool:
    """Whether the loss of a Trainer class is the one of TRL's GRPOTrainer, and no subclass changes it."""
    classes = [one for one in kind.__mro__ if one is not EngineGRPOTrainerMixin]
    own = [next((one for one in classes if name in vars(one)), object) for name in ("_compute_loss", "compute_loss")]
    return all((one.__module__, one.__name__) == ("trl.trainer.grpo_trainer", "GRPOTrainer") for one in own)


class EngineGRPOTrainerMixin(EngineTrainerMixin):
    """What `trainer` puts before GRPOTrainer."""

    model_axes = "dp tp ep"
    divides_by_step = False  # its division by counts of the whole step is taken out below
    _sampler: Iterable[int] = ()  # of prompts
    _logs: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rows = self.args.generation_batch_size // self.mesh.size("tp")  # TRL has counted copies, too
        self.args.generation_batch_size = rows
        kept: Any = partial(deque, maxlen=rows)
        self._logs = {n: defaultdict(kept) if isinstance(of, dict) else kept() for n, of in self._logs.items()}
        if self.mesh.size("ep") > 1:  # a rank whose completions have ended has experts for the others'
            self.model.generate = partial(self.model.generate, synced_gpus=True)

    def _reasons(self) -> dict[str, Any]:
        args, kind, n, of_eval = self.args, self.loss_type, self.num_generations, self.num_generations_eval
        evaluated = 0 if self.eval_dataset is None else args.per_device_eval_batch_size * self.mesh.size("dp")
        whole = args.use_vllm or args.use_transformers_continuous_batching
        made = args.generation_batch_size // self.mesh.size("tp")
        return super()._reasons() | {
            f"num_generations={n} of {made} on the data ranks: set steps_per_generation": made % n,
            f"num_generations_eval={of_eval} of {evaluated}: set per_device_eval_batch_size": evaluated % of_eval,
            "use_vllm or continuous batching with tp or ep: set it to False": whole and cuts_model(self.mesh),
            "tools or environments with tp: leave tp out": self.mesh.size("tp") > 1 and bool(self.tools),
            f"loss_type={kind!r}, whose mean is not known here": kind not in OF_TOKENS + OF_COMPLETIONS,
            "top_entropy_quantile: a threshold of each micro-batch": args.top_entropy_quantile < 1.0,
            "use_adaptive_entropy": args.use_adaptive_entropy,
            f"entropy_coef with loss_type={kind!r}: two means in one loss": args.entropy_coef and kind not in OF_TOKENS,
            "router_aux_loss_coef: the mean of micro-batches' balance losses": self.aux_loss_enabled,
            "a compute_loss of its own": not has_grpo_loss(type(self)),
        }

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        self._step, self._buffered_inputs = 0, None  # completions of an earlier train() are not of this one
        epochs, micros = super()._init_training_state(*args, **kwargs)
        for _ in range(epochs):  # TRL's sampler draws one order of prompts after the other
            next(iter(self._sampler), None)
        return epochs, micros

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Iterable[int]:
        self._sampler = super()._get_train_sampler(*args, **kwargs)
        return self._sampler

    def _not_saved(self, micros: int) -> dict[str, str]:
        generation, step = self.args.steps_per_generation * self.num_iterations, self.args.gradient_accumulation_steps
        if micros % generation == 0:
            return super()._not_saved(micros)
        steps = lcm(generation, step) // step
        fix = f"resume from a checkpoint between two generations: save_steps={steps}, or a multiple of it"
        return {f"training goes on with the completions of a generation, which feeds {steps} steps": fix}

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
        with self._full_parameters(), self._as_data_ranks():
            return super()._generate_and_score_completions(inputs)

    def _generate(self, prompts: Any) -> Any:
        made = super()._generate(prompts)
        return *all_gather_object(made[:5], self.mesh, "tp")[0], *made[5:]  # a rollout_func may have drawn by itself

    def _calculate_rewards(self, *args: Any) -> Any:
        rewards = super()._calculate_rewards(*args).tolist() if self.mesh.index("tp") == 0 else []
        metrics = {name: [float(value) for value in values] for name, values in self._pending_metrics.items()}
        rewards, metrics = all_gather_object((rewards, metrics), self.mesh, "tp")[0]
        self._pending_metrics.update(metrics)
        return torch.tensor(rewards, dtype=torch.float32, device=self.accelerator.device)

    @contextmanager
    def _as_data_ranks(self) -> Iterator[None]:
        """The ranks of a tp group generate, and then shuffle, from one state of random numbers each, whatever a reward
        function has drawn on the first of them; what TRL gathers of rewards, and for its log, is of data ranks."""
        from trl.trainer import grpo_trainer as module

        if self.mesh.size("tp") == 1:
            yield
            return
        gather, ranks = module.gather_object, self.mesh.layout.ranks("dp", 0)
        first, second = all_gather_object(torch.randint(1 << 62, (2,)).tolist(), self.mesh, "tp")[0]
        of_data = lambda own: [v for all_ in [gather([own])] for rank in ranks for v in all_[rank]]  # noqa: E731
        torch.manual_seed(first)
        with set_attributes(module, gather=self.accelerator.gather, gather_object=of_data):
            yield
        torch.manual_seed(second)


def counted(inputs: Mapping[str, Any]) -> Tensor:
    """The tokens of completions that count."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
