"""The parts of a run's config, as typed data: config.py has the whole, and what contradicts what.

Every field has a meaning in one line; `isograd config schema` prints them for editors.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(gt=0, le=1 << 40)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
LISTED = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)  # a pair, in YAML a list


class Section(BaseModel):
    """A mapping of a config: unknown keys, numbers that are not finite and wrong types are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_written(cls, value: Any) -> Any:
        """Text that neither a path nor a file of UTF-8 can hold is refused here, not at its first use."""
        if isinstance(value, str) and ("\0" in value or any("\ud800" <= c <= "\udfff" for c in value)):
            raise ValueError("no text: it holds a null character or half of a surrogate pair")
        return value


class Model(Section):
    """`model`: which model is trained, from which weights, in which dtype."""

    preset: str | None = Field(default=None, description="a model by name, for example quickstart or tiny-llama")
    path: str | None = Field(default=None, description="a Hugging Face folder to start from, or hf://OWNER/NAME")
    weights: bool = Field(default=True, description="whether the weights in `path` are read; false: new ones are made")
    code: Literal["isograd", "transformers"] | None = Field(
        default=None,
        description="whose code runs `path`: isograd's own decoder, for the families that it knows, or the folder's "
        "class of transformers, any causal one; null: transformers with `adapter`, else isograd",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="fields of TransformerConfig; alone they are the whole model, else changes"
    )
    seed: Seed = Field(default=0, description="of the first values, which are the same under every layout")
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default="fp32", description="of the parameters; masters are fp32 or wider; fp16 has a dynamic loss scale"
    )
    recompute: bool | Literal["selective", "offload"] = Field(
        default=False,
        description="compute blocks again in backward to save memory; selective: all but products and attention; "
        "offload: true, with the blocks' inputs in the host's memory",
    )

    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] | None = Field(
        default=None,
        description="of transformers' code, by its own word; null: the class's choice, sdpa for most; not under cp; "
        "flash_attention_2 for task language with data.packing stream, on CUDA",
    )
    compile: bool = Field(
        default=False, description="torch.compile of each block; the first step takes the minutes that compiling takes"
    )

    float8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = Field(
        default=None,
        description="the products of the blocks' linear layers in 8 bits, by a recipe of torchao; rowwise_with_gw_hp "
        "alone has the same gradient however a batch is cut; null: in dtype",
    )
    float8_emulate: bool = Field(default=False, description="float8 on devices without its kernels: slow, for tests")

    @model_validator(mode="after")
    def _one_model(self) -> Model:
        if self.float8_emulate and self.float8 is None:
            raise ValueError("float8_emulate belongs to float8, which is null")
        if self.compile and self.recompute == "selective":
            raise ValueError("compile goes with recompute true or false: a compiled block chooses what it keeps itself")
        if self.preset and self.path:
            raise ValueError("give preset or path, not both")
        if not self.preset and not self.path and not self.options:
            raise ValueError("give a preset, a path or options")
        return self


class Adapter(Section):
    """`adapter`: LoRA. Small matrices beside linear layers are trained, and the model of `model.path` is frozen."""

    rank: Positive = Field(default=8, description="of the matrices")
    alpha: Rate | None = Field(default=None, description="what they give is multiplied by alpha / rank; null: 2 * rank")
    dropout: Share = Field(default=0.0, description="of what enters them; it draws per rank, and is refused under tp")
    rslora: bool = Field(default=False, description="alpha / sqrt(rank) in place of alpha / rank, for high ranks")
    dora: bool = Field(default=False, description="the length of each row is trained by itself (DoRA); not under tp")
    base_bits: Literal[4, 8] | None = Field(
        default=None, description="of the frozen weights under the adapters (QLoRA); null: model.dtype; not under tp"
    )
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description="names of the layers, for example [q_proj, v_proj]; all-linear: all but the head",
    )

    @field_validator("targets")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if value != "all-linear" and (not value or not all(name.strip() for name in value)):
            raise ValueError("name at least one layer")
        return value


class Text(Section):
    """One of `data.sources`: a folder of token shards, or a built-in text."""

    path: str | None = Field(
        default=None,
        description="a folder made by `isograd data build`; of task chat, also a file of conversations; of task "
        "preference, a file of pairs of answers; of task grpo, a file of prompts with their right answers",
    )
    builtin: Literal["stdlib", "sums", "docstrings"] | None = Field(
        default=None,
        description="stdlib: the source text of Python's own modules; docstrings: conversations, or pairs, about what "
        "they do; sums: the same about sums",
    )
    weight: Rate = Field(default=1.0, description="share of the samples, relative to the other sources")

    @model_validator(mode="after")
    def _one_place(self) -> Text:
        if (self.path is None) == (self.builtin is None):
            raise ValueError("give path or builtin, one of them")
        return self


class Data(Section):
    """`data`: tokens for a language model."""

    sources: list[Text] = Field(min_length=1, description="where tokens come from, blended by weight")
    length: Positive = Field(description="tokens of a sequence")
    packing: Literal["documents", "whole", "stream"] | None = Field(
        default=None,
        description="documents: texts packed into a sequence do not see each other; whole: nor is one cut; stream: "
        "they see each other; null: whole for task chat, else documents",
    )
    tokenizer: str | None = Field(
        default=None,
        description="of tasks chat, preference and grpo: a folder with a tokenizer and chat template; null: model.path",
    )
    held_out: Share = Field(default=0.05, description="share of the conversations, or built-in texts, held out")
    seed: Seed = Field(default=0, description="of the order, which is a function of seed and step alone")


class PairsOf(Section):
    """`pairs`: pairs of texts for an encoder."""

    path: str = Field(description="JSON lines, one pair of texts in each")
    keys: Annotated[tuple[str, str], LISTED] = Field(description="under which the two texts of a line stand")
    length: Positive = Field(default=64, description="tokens of a text at most")
    chunk: Positive = Field(default=64, description="texts encoded at once: memory, not results, depends on it")
    keep_mb: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="MiB of activations kept in place of a second forward"
    )
    scale: Rate = Field(default=20.0, description="1 / temperature")
    learn_scale: bool = Field(default=False, description="whether the scale is trained too")
    both: bool = Field(default=True, description="whether answers find their queries, too")
    pooling: Literal["mean", "first"] = Field(default="mean", description="how hidden states become one vector")
    dropout: bool = Field(default=False, description="keep the model's dropout; it draws per rank")
    held_out: Share = Field(default=0.1, description="share of the pairs that are held out")
    evaluate: Positive = Field(default=2000, description="held-out pairs of an evaluation at most")
    seed: Seed = Field(default=0, description="of the order, which is a function of seed and step alone")


class Preference(Section):
    """`preference`: which loss of pairs of answers task preference minimises."""

    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto", "reward"] = Field(
        default="dpo", description="dpo, ipo and kto compare with the model as it is before the first step; reward: a "
        "reward model, whose new head scores an answer at the token that ends it",
    )  # fmt: skip
    beta: Rate | None = Field(
        default=None, description="how strongly answers are compared (orpo: weight of the odds); null: 0.1, simpo: 2"
    )
    smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.0, description="of dpo: the share of pairs that are taken to be the wrong way round"
    )
    margin: float = Field(default=1.0, description="of simpo: by how much the chosen answer should be ahead")
    weights: Annotated[tuple[Rate, Rate], LISTED] = Field(
        default=(1.0, 1.0), description="of kto: of chosen and of rejected answers"
    )
    answers: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="weight of the chosen answers' own loss per token; null: 1 of orpo, else 0"
    )

    @model_validator(mode="after")
    def _belongs(self) -> Preference:
        for name, loss, default in (
            ("smoothing", "dpo", 0.0),
            ("margin", "simpo", 1.0),
            ("weights", "kto", (1.0, 1.0)),
        ):
            if self.loss != loss and getattr(self, name) != default:
                raise ValueError(f"{name} belongs to the loss {loss}, and the loss is {self.loss}")
        if self.loss == "reward" and (self.beta is not None or self.answers is not None):
            raise ValueError("beta and answers: each belongs to the losses of a language model, and the loss is reward")
        return self

    @property
    def strength(self) -> float:
        """beta, or what stands for null."""
        return self.beta or {"simpo": 2.0, "reward": 1.0}.get(self.loss, 0.1)


class Reward(Section):
    """One of `grpo.rewards`: a number for each answer. Those of an answer are added up."""

    kind: Literal["equal", "contains", "number", "pattern", "length", "model"] = Field(
        description="1 if the answer is the right one, contains it, or has its last number as its own; pattern: 1 if "
        "`pattern` is found in it; length: the share of `grpo.tokens` that is left; model: the score of `path`"
    )
    weight: float = Field(default=1.0, description="by which the number is multiplied")
    pattern: str | None = Field(default=None, description="of kind pattern: a regular expression")
    path: str | None = Field(default=None, description="of kind model: a folder with a reward model of transformers")

    @model_validator(mode="after")
    def _belongs(self) -> Reward:
        for name, kind in (("pattern", "pattern"), ("path", "model")):
            if (getattr(self, name) is None) == (self.kind == kind):
                raise ValueError(f"{name} belongs to the kind {kind}, and the kind is {self.kind}")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from error
        return self


class Grpo(Section):
    """`grpo`: how many answers task grpo draws from the model, and what each of them is worth."""

    rewards: list[Reward] = Field(min_length=1, description="what an answer is worth, added up")
    answers: Annotated[int, Field(ge=2)] = Field(
        default=8, description="to a prompt; `batch` counts answers, so a step has batch / answers prompts"
    )
    tokens: Positive = Field(default=256, description="of an answer at most")
    column: str = Field(
        default="answer",
        description="under which a line has the right answer; where it is not, the last message of the line is that",
    )
    mean: Literal["answers", "tokens", "length"] = Field(
        default="answers",
        description="of the loss: over answers, of the mean over the tokens of each; over all tokens (DAPO); over "
        "answers, of the sum over tokens / `tokens` (Dr. GRPO)",
    )
    scale: bool = Field(default=True, description="rewards of a prompt are divided by their standard deviation")
    kl: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="weight of the divergence from the model as it is before the first step (k3)"
    )


class Distil(Section):
    """`distil`: a teacher, to whose distribution the model's is drawn at each label."""

    teacher: str = Field(description="a Hugging Face folder of the same vocabulary; each rank holds a copy, cut by tp")
    weight: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5, description="of the divergence from the teacher; the loss of the labels has the rest"
    )
    kind: Literal["forward", "reverse", "between"] = Field(
        default="forward",
        description="KL(teacher, model), KL(model, teacher), or of both to their mixture",
    )
    temperature: Rate = Field(default=1.0, description="by which the logits of both are divided")


class Optimizer(Section):
    """`optimizer`: the optimizer, and the learning rate over the run."""

    name: Literal["adamw", "muon", "adafactor", "lion", "schedule_free", "adamw_8bit"] = Field(
        default="adamw",
        description="muon: matrices of blocks by Muon, the rest by AdamW; adafactor, adamw_8bit (states of 8 bits, by "
        "bitsandbytes): all matrices so, the rest by AdamW; lion: by lion-pytorch; schedule_free: AdamW by "
        "schedulefree, with schedule constant",
    )
    lr: Rate = Field(description="the highest learning rate")
    min_lr: Annotated[float, Field(ge=0)] = Field(default=0.0, description="what the learning rate falls to at the end")
    warmup: Annotated[int, Field(ge=0)] = Field(default=0, description="steps of linear rise to lr")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine", description="the way from lr to min_lr; wsd: lr is constant, then falls linearly over `decay`"
    )
    decay: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2, description="of schedule wsd: the last share of the run, in which the learning rate falls"
    )
    betas: Annotated[tuple[Share, Share], LISTED] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates, and Lion's"
    )
    eps: Rate = Field(default=1e-8, description="AdamW's epsilon")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="of matrices; norms and biases have none"
    )
    clip: Rate | None = Field(default=1.0, description="the largest norm of a gradient; null: no clipping")
    offload: bool = Field(
        default=False, description="masters and states lie, and step, in the host's memory; for zero1 to zero3"
    )
    muon_lr: Rate | None = Field(default=None, description="the learning rate of Muon's matrices; null: lr")

    @model_validator(mode="after")
    def _belongs(self) -> Optimizer:
        if self.name == "schedule_free" and self.schedule != "constant":
            raise ValueError(f"schedule_free has schedule constant, and warmup if you like; not {self.schedule}")
        if self.muon_lr and self.name != "muon":
            raise ValueError(f"muon_lr belongs to muon, and the optimizer is {self.name}")
        return self


class Saving(Section):
    """`checkpoint`: when checkpoints are written, and which are kept."""

    every: Positive | None = Field(default=None, description="steps between checkpoints; null: at the end only")
    store: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+]*://[^@]+$")] | None = Field(
        default=None,
        description="the address of this run's checkpoints in an object store, as s3://bucket/run; null: in its folder",
    )
    keep_last: Positive = Field(default=2, description="how many of the newest are kept")
    keep_every: Positive | None = Field(
        default=None, description="checkpoints at multiples of this step are kept for good"
    )
    keep_best: Literal["eval_loss"] | None = Field(
        default=None, description="eval_loss: the checkpoint of the lowest held-out loss is written and kept, too"
    )
    on_error: Literal["retry", "go_on", "stop"] = Field(
        default="retry",
        description="what a checkpoint does that cannot be written: retry: its state is written again, and the third "
        "failure ends the run; go_on: it is left out, unless it is the last; stop: the run ends",
    )


class Evaluating(Section):
    """`evaluate`: when held-out data is evaluated, and how much of it."""

    every: Positive | None = Field(default=None, description="steps between evaluations; null: at the end only")
    first: bool = Field(default=False, description="also before the first step")
    patience: Positive | None = Field(
        default=None, description="the run ends after so many evaluations without a lower held-out loss; null: never"
    )
    batches: Positive = Field(
        default=4, description="batches of held-out text in one evaluation; all of it, once, where there is less"
    )
    tasks: list[str] = Field(
        default=[], description="of lm-eval-harness (pip install lm_eval), asked at each evaluation; not under pp"
    )
    task_folder: str | None = Field(
        default=None, description="of tasks as YAML, in place of lm-eval-harness's own; its code is run"
    )
    task_limit: Positive | None = Field(default=None, description="documents of a task; null: all")


class Logging(Section):
    """`log`: what is printed, and which trackers get the numbers."""

    every: Positive = Field(default=1, description="steps between progress lines")
    tensorboard: bool = Field(default=False, description="also write TensorBoard's files (extra `track`)")
    trackio: str | None = Field(default=None, description="also log to this trackio project (extra `track`)")
    wandb: str | None = Field(default=None, description="also log to this Weights & Biases project (extra `wandb`)")
    mlflow: str | None = Field(default=None, description="also log to this MLflow experiment (extra `mlflow`)")
    metrics_port: Annotated[int, Field(gt=0, lt=1 << 16)] | None = Field(
        default=None, description="rank 0 serves the newest numbers to Prometheus here, at /metrics; null: nowhere"
    )
    metrics_host: str = Field(default="127.0.0.1", description="the address of metrics_port; 0.0.0.0: all of them")
    peak_tflops: Rate | None = Field(
        default=None, description="of one device in the model's dtype; known for common GPUs"
    )
    sample: Annotated[int, Field(ge=0)] = Field(
        default=120, description="tokens of text to generate at the end; 0: none"
    )


class Safety(Section):
    """`safety`: what a run does about NaN, silent ranks and flipped bits."""

    not_finite: Literal["stop", "skip"] = Field(default="stop", description="what a NaN or Inf gradient does")
    stall_s: Rate = Field(
        default=600.0,
        description="without progress for this long the run ends and names the rank; ten times that for the first step",
    )
    replicas_every: Annotated[int, Field(ge=0)] = Field(
        default=100, description="steps between checks of copies; 0: never"
    )
    sums_every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="steps between checks of what a reduction adds up, by checksums; 0: never"
    )
    state_every: Annotated[int, Field(ge=0)] = Field(
        default=1,
        description="steps between checks that nothing a rank keeps has changed since the step before; 0: never",
    )
    state: Literal["weights", "all"] = Field(default="weights", description="what state_every looks at")
    replay_every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="steps between checks in which another data rank computes a micro-batch again; 0: never"
    )


class Resilience(Section):
    """`resilience`: what a run does when ranks or machines are lost."""

    after_death: Literal["end", "replace", "shrink"] = Field(
        default="end", description="replace: start a new rank; shrink: go on with those that are left; end: neither"
    )
    copies: Literal["none", "partner"] = Field(
        default="none", description="partner: after each step every rank keeps a copy of another one's state in memory"
    )
    layouts: list[str] = Field(
        default=[],
        description="for shrink: layouts of fewer ranks, the first that fits is taken; none: found by itself",
    )
    tries: Positive = Field(
        default=3, description="deaths in a row without a new step, after which the run ends; of a launcher: all deaths"
    )
    wait_s: Rate = Field(default=20.0, description="a rank that has not noticed a death for this long is ended")
    network_s: Rate = Field(
        default=20.0, description="a run on several machines that no longer reach each other ends within this time"
    )
