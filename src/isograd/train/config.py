"""What a run is, as typed data, of the parts in sections.py; and which of their values contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from isograd.io.store import Place, place_of
from isograd.train.sections import (
    Adapter,
    Data,
    Distil,
    Evaluating,
    Grpo,
    Logging,
    Model,
    Optimizer,
    PairsOf,
    Positive,
    Preference,
    Resilience,
    Safety,
    Saving,
    Section,
)

if TYPE_CHECKING:
    from isograd.core.layout import Layout


def _contradiction(text: str, *fields: str) -> PydanticCustomError:
    """Fields that contradict each other; reading.py says which of them the command line has set."""
    return PydanticCustomError("contradiction", text, {"fields": fields})


class Config(Section):
    """A whole run."""

    version: Literal[1] = Field(default=1, description="of this schema")
    run: str = Field(description="the folder of the run: checkpoints, metrics, pictures")
    task: Literal["language", "chat", "preference", "grpo"] = Field(
        default="language",
        description="chat: `data` are conversations, of which the assistant's tokens are labels; preference: pairs of "
        "answers, of which one is preferred; grpo: prompts, to which the model's own answers are rewarded",
    )
    layout: str = Field(default="dp1", description="for example 'dp2 tp2 sp zero1'")
    model: Model
    adapter: Adapter | None = Field(default=None, description="LoRA; null: all parameters are trained")
    data: Data | None = Field(default=None, description="tokens for a language model")
    pairs: PairsOf | None = Field(default=None, description="pairs of texts for an encoder, instead of data")
    preference: Preference | None = Field(default=None, description="the loss of task preference; null: dpo")
    grpo: Grpo | None = Field(default=None, description="answers and rewards of task grpo; null: another task")
    distil: Distil | None = Field(default=None, description="a teacher of tasks language and chat; null: none")
    optimizer: Optimizer
    steps: Positive = Field(description="optimizer steps of the whole run")
    batch: Positive = Field(description="sequences of a step, over all ranks")
    micro_batches: Positive = Field(default=1, description="parts that each data rank cuts its share of a step into")
    accumulate: Literal["local", "sharded"] = Field(
        default="local", description="sharded: gradients of each micro-batch are reduced to the owners of their rows"
    )
    checkpoint: Saving = Saving()
    evaluate: Evaluating = Evaluating()
    log: Logging = Logging()
    safety: Safety = Safety()
    resilience: Resilience = Resilience()
    reproducible: bool = Field(default=False, description="the same bits for every ZeRO stage and split; slower")
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="the decay of an average of the weights over steps, kept beside them; null: none"
    )
    threads: Positive = Field(default=1, description="of each local rank, on CPUs")
    device: Literal["cpu"] | None = Field(
        default=None, description="cpu: on the CPU on purpose; null: each rank on a GPU of its own, if there are any"
    )

    @field_validator("run")
    @classmethod
    def _run(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("give the path of a folder")
        return text

    @field_validator("layout", mode="before")
    @classmethod
    def _layout(cls, value: Any) -> Any:
        from isograd.core.layout import Layout
        from isograd.errors import LayoutError

        text = str(value) if type(value) is int else value  # '1' is a layout, which YAML reads as a number
        if not isinstance(text, str):
            return value
        if not text.strip():
            raise ValueError("give a layout; that of one rank is dp1")
        try:
            return str(Layout.parse(text))
        except LayoutError as error:
            raise ValueError(error.what) from error

    @model_validator(mode="after")
    def _fits(self) -> Config:
        from isograd.core.layout import Layout

        if (self.data is None) == (self.pairs is None):
            raise _contradiction("give data or pairs, one of them", "data", "pairs")
        self._fits_task()
        self._fits_code()
        if self.pairs is not None and self.micro_batches > 1:
            raise _contradiction(
                "pairs have no micro_batches: every row is every other's negative; set pairs.chunk", "micro_batches"
            )
        if self.pairs is not None and self.model.compile:
            raise _contradiction("model.compile is for isograd's decoder, not for pairs", "model.compile", "pairs")
        if self.model.float8 and (self.pairs is not None or self.adapter is not None):
            text = "model.float8 is for language models that are trained whole, not for pairs and adapters"
            raise _contradiction(text, "model.float8", "adapter", "pairs")
        if self.safety.replay_every and self.pairs is not None:
            raise _contradiction("safety.replay_every is for language models", "safety.replay_every", "pairs")
        layout = Layout.parse(self.layout)
        if self.optimizer.offload and not layout.zero:
            text = f"optimizer.offload needs row shards: zero1, zero2 or zero3, and the layout is {self.layout!r}"
            raise _contradiction(text, "optimizer.offload", "layout")
        rows, rest = divmod(self.batch, layout.dp)
        if rest or rows < self.micro_batches:
            raise _contradiction(
                f"batch {self.batch} over dp {layout.dp} is {self.batch / layout.dp:g} sequences per data rank, "
                f"to be cut into {self.micro_batches} micro-batches: make batch a multiple of dp, "
                f"at least dp x micro_batches = {layout.dp * self.micro_batches}",
                "batch", "layout", "micro_batches",
            )  # fmt: skip
        if self.evaluate.every is None and (self.evaluate.patience or self.checkpoint.keep_best):
            name = "evaluate.patience" if self.evaluate.patience else "checkpoint.keep_best"
            raise _contradiction(f"{name} needs evaluate.every", name, "evaluate.every")
        if self.evaluate.tasks and (layout.pp > 1 or self.data is None or self.pads_rows):
            raise _contradiction(
                "evaluate.tasks are for a language model without pp; isograd evaluate takes its checkpoints",
                "evaluate.tasks", "layout", "task",
            )  # fmt: skip
        self._survives(layout)
        low, high, warmup = self.optimizer.min_lr, self.optimizer.lr, self.optimizer.warmup
        for wrong, text, *fields in (
            (self.accumulate == "sharded" and (layout.pp > 1 or self.reproducible),
             "gradients are reduced once in a step under pp and with reproducible: take accumulate local",
             "accumulate", "layout", "reproducible"),
            (self.task == "grpo" and layout.pp > 1,
             "task grpo asks the model, and the model of a pipeline is not called: leave pp out of the layout",
             "layout", "task"),
            (low > high, f"optimizer.min_lr {low:g} is above optimizer.lr {high:g}",
             "optimizer.min_lr", "optimizer.lr"),
            (warmup > self.steps, f"optimizer.warmup {warmup} is longer than the run's {self.steps} steps",
             "optimizer.warmup", "steps"),
        ):  # fmt: skip
            if wrong:
                raise _contradiction(text, *fields)
        return self

    def _fits_task(self) -> None:
        """What the task is given belongs to it."""
        rendered, data = self.task != "language", self.data
        if self.task == "chat" and (data is None or self.packing == "stream"):
            raise _contradiction("task chat has data, of packing whole or documents", "task", "data.packing")
        if self.pads_rows and (data is None or data.packing is not None):
            raise _contradiction(f"task {self.task} has data, without packing: rows are padded", "task", "data.packing")
        if self.pads_rows and data is not None and len(data.sources) != 1:
            raise _contradiction(f"task {self.task} has one source", "task", "data.sources")
        if self.task != "preference" and self.preference is not None:
            raise _contradiction("preference belongs to task preference", "task", "preference")
        if (self.grpo is not None) != (self.task == "grpo"):
            raise _contradiction("task grpo has grpo, with the rewards of answers; no other task has", "task", "grpo")
        if self.grpo is not None and (rest := self.batch % self.grpo.answers):
            text = f"batch {self.batch} counts answers, {self.grpo.answers} to each prompt: {rest} are left over"
            raise _contradiction(text, "batch", "grpo.answers")
        if self.distil is not None and (data is None or self.pads_rows):
            raise _contradiction("distil belongs to tasks language and chat", "task", "distil")
        if not rendered and data is not None and data.tokenizer is not None:
            raise _contradiction("data.tokenizer belongs to tasks of conversations", "task", "data.tokenizer")
        builtin = {text.builtin for text in data.sources} if data is not None else set()
        if builtin & ({"stdlib"} if rendered else {"sums", "docstrings"}):
            raise _contradiction(
                "builtin stdlib is text; builtin sums and docstrings are conversations or pairs, not for task language",
                "task", "data.sources",
            )  # fmt: skip

    def _fits_code(self) -> None:
        """What transformers' own code does not have belongs to isograd's decoder."""
        attention, named = self.model.attn_implementation, "model.attn_implementation"
        if not self.by_transformers:
            if attention is not None:
                raise _contradiction(f"{named} belongs to transformers' code", named, "model.code")
            return
        # Its kernel keeps documents apart by their positions in batches of one row alone.
        if attention == "flash_attention_2" and (self.task != "language" or self.packing != "stream"):
            text = "flash_attention_2 takes task language with data.packing stream; sdpa takes every task and packing"
            raise _contradiction(text, named, "data.packing")
        from isograd.core.layout import Layout

        model, layout = self.model, Layout.parse(self.layout)
        named = "adapter" if self.adapter is not None else "model.code transformers"
        if self.adapter is not None and model.code == "isograd":
            raise _contradiction("adapter trains a model by transformers' code", "adapter", "model.code")
        if self.data is None:
            raise _contradiction(f"{named} has data, no pairs", "adapter", "model.code", "pairs")
        packed = self.adapter is not None and self.adapter.base_bits
        dora = self.adapter is not None and self.adapter.dora
        for wrong, what, field in (
            (model.path is None, "a Hugging Face folder (model.path)", "model.path"),
            (bool(model.options), "no model.options: edit a copy of the folder's config.json", "model.options"),
            (model.recompute in ("offload", "selective"), "model.recompute true or false", "model.recompute"),
            (model.recompute and layout.world_size > layout.dp, "model.recompute under dp and zero", "model.recompute"),
            (model.compile and layout.world_size > layout.dp, "model.compile under dp and zero", "model.compile"),
            (attention is not None and layout.cp > 1, "no model.attn_implementation under cp", "layout"),
            (self.optimizer.name == "muon", "any optimizer.name but muon", "optimizer.name"),
            (self.task == "preference" and layout.pp > 1, "task preference without pp", "layout"),
            (packed and (dora or layout.tp > 1), "adapter.base_bits without dora and tp", "adapter.base_bits"),
            (dora and layout.tp > 1, "dora without tp", "adapter.dora"),
            (self.scores, "no preference.loss reward", "preference.loss"),
            (self.grpo and self.grpo.kl and not self.adapter, "an adapter where grpo.kl is above 0", "grpo.kl"),
            (self.distil is not None, "no distil", "distil"),
        ):
            if wrong:
                raise _contradiction(f"{named} takes {what}", "adapter", "model.code", field)

    def _survives(self, layout: Layout) -> None:
        """What `resilience` says must have an effect."""
        from isograd.core.layout import Layout
        from isograd.errors import LayoutError

        after = self.resilience
        if after.copies == "partner" and after.after_death == "end":
            raise _contradiction(
                "resilience.copies are of no use when resilience.after_death is end", "resilience.copies"
            )
        if after.layouts and after.after_death != "shrink":
            raise _contradiction("resilience.layouts are for resilience.after_death shrink", "resilience.layouts")
        for text in after.layouts:
            try:
                smaller = Layout.parse(text)
            except LayoutError as error:
                raise _contradiction(f"resilience.layouts: {error.what}", "resilience.layouts") from error
            if smaller.world_size >= layout.world_size:
                raise _contradiction(
                    f"resilience.layouts: {text!r} has {smaller.world_size} ranks, and must have fewer than the "
                    f"{layout.world_size} of the layout", "resilience.layouts",
                )  # fmt: skip
            if self.batch % smaller.dp:
                raise _contradiction(
                    f"resilience.layouts: batch {self.batch} cannot be cut over dp {smaller.dp} of {text!r}",
                    "resilience.layouts", "batch",
                )  # fmt: skip

    @property
    def pads_rows(self) -> bool:
        """Whether each row is one answer behind its prompt, and nothing is packed."""
        return self.task in ("preference", "grpo")

    @property
    def scores(self) -> bool:
        """Whether a reward model is trained, which writes nothing."""
        return self.preference is not None and self.preference.loss == "reward"

    @property
    def by_transformers(self) -> bool:
        """Whether transformers' own code runs the model."""
        return self.model.code == "transformers" or self.adapter is not None

    @property
    def packing(self) -> Literal["documents", "whole", "stream"]:
        """How texts are packed into sequences."""
        return (self.data and self.data.packing) or ("whole" if self.task == "chat" else "documents")

    @property
    def folder(self) -> Path:
        """The run's folder as a path."""
        return Path(self.run)

    @property
    def checkpoints(self) -> Place:
        """The folder of the run's checkpoints, or its address in a store."""
        return self.folder / "checkpoints" if self.checkpoint.store is None else place_of(self.checkpoint.store)
