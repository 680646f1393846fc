"""Lightning on the engine: `Trainer(strategy=ig.integrations.LightningStrategy("dp4 zero3"))`, or strategy="isograd".

The engine is made when fit sets up, from the one optimizer of configure_optimizers. In manual optimization each of
several optimizers, as of a GAN, has an engine of its own. docs/integrations/lightning.md.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isograd.comm.consensus import raise_on_all_ranks
from isograd.core.attributes import set_attributes
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import IntegrationError, IsogradError
from isograd.integrations.optimizer import (
    EngineOptimizer,
    TrainedModule,
    full_parameters,
    load_state,
    on_shards,
    save_state,
)
from isograd.integrations.shared_rows import CutStrategy, part_of_state, whole_state
from isograd.integrations.weights import LabelCounter, rows_in
from isograd.integrations.world import FailureReport, name_failed_rank_in_forward, refuse

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    import pytorch_lightning as lightning
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
    from pytorch_lightning.trainer import call
else:
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer import call

NAME = "isograd"


class LightningStrategy(CutStrategy, DDPStrategy):  # type: ignore[misc]
    """Takes the place of "ddp", "fsdp" and "deepspeed" in a Lightning Trainer: docs/integrations/lightning.md."""

    strategy_name, loop = NAME, "Lightning"
    model_axes = "dp cp tp ep pp"
    optimizers: list[Any]
    model: Any

    def __init__(self, layout: str | None = None, *, elementwise: bool = False, **kwargs: Any) -> None:
        """layout: "dp4 zero3" and the like; left out, dp over all ranks. kwargs: those of Lightning's DDPStrategy that
        say where ranks run, such as process_group_backend and timeout. elementwise: as ig.Engine takes it."""
        super().__init__(**kwargs)
        self.layout, self._elementwise = layout, elementwise
        self._weight: float | Tensor | None = None  # of the batch under way, as training_step has said
        self._rows: int | None = None  # of that batch
        self._syncing = True
        self._loaded_from: Path | None = None
        self._loop: FailureReport | None = None  # the fit under way

    @property
    def engine(self) -> Engine | None:
        """The engine, from the moment that fit has set up."""
        return next(iter(self._engines), None)

    @property
    def _engines(self) -> list[Engine]:
        return [one.engine for one in self.optimizers if isinstance(one, EngineOptimizer)]

    @property
    def engines(self) -> dict[str, Engine]:
        """By the member of the module that each trains; "" where one trains all of it."""
        own = {engine.model: engine for engine in self._engines}
        return {n: own[member] for n, member in self.lightning_module.named_modules() if member in own} if own else {}

    def _full_parameters(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for engine in self._engines:
            stack.enter_context(full_parameters(engine))
        return stack

    def model_to_device(self) -> None:
        """Lightning's. At zero3 the engine fills a model of `ig.hf.load`, which has no values before."""
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            super().model_to_device()

    def configure_ddp(self) -> None:
        """Nothing is wrapped."""

    def setup_environment(self) -> None:
        """Lightning's, which joins the world. From here on a rank that fails is named."""
        super().setup_environment()
        self._loop = FailureReport(self.mesh)

    def setup(self, trainer: Any) -> None:
        """Lightning's. Behind a fit at ZeRO 3 a module that is looked at or validated is whole for it."""
        with nullcontext() if trainer.training else self._full_parameters():
            super().setup(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        """Lightning's, and an engine of each optimizer. Under cp, tp, ep and pp the model of transformers in the
        module, or each of several, is attached or cut in place."""
        mesh, module = self.mesh, self.lightning_module
        super().setup_optimizers(trainer)
        algorithm = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)
        plain = lightning.LightningModule.configure_gradient_clipping
        refuse(
            {
                f"{len(self.optimizers)} optimizers": len(self.optimizers) != 1
                and (module.automatic_optimization or not self.optimizers),
                "several optimizers of fp16": len(self.optimizers) > 1
                and any(parameter.dtype == torch.float16 for parameter in module.parameters()),
                f"options of DDP: {self._ddp_kwargs}": self._ddp_kwargs,
                "manual optimization with pp": mesh.size("pp") > 1 and not module.automatic_optimization,
                "a communication hook": self._ddp_comm_hook or self._model_averaging_period,
                "a precision with a loss scale ('bf16-mixed' has none)": getattr(self.precision_plugin, "scaler", None),
                f"gradient_clip_algorithm={algorithm!r}": trainer.gradient_clip_val and algorithm not in (None, "norm"),
                "BaseFinetuning: it trains other parameters from epoch to epoch": _has(trainer, "BaseFinetuning"),
                "averages of weights at zero3": mesh.layout.zero == 3
                and _has(trainer, "WeightAveraging", "StochasticWeightAveraging"),
                "configure_gradient_clipping": type(module).configure_gradient_clipping is not plain,
            },
            "this fit reduces, scales or clips gradients by itself",
            "one optimizer of what trains in the whole fit, or in manual optimization one for each member; "
            "gradient_clip_val=... clips by the norm; averages: zero2",
            mesh,
        )
        several = len(self.optimizers) > 1  # such as a GAN's
        models = self._cut_models.cut_each(module) if several else [self._cut_models.cut(module)]
        heard = models or [module]
        self._label_counter = LabelCounter(heard[0], "training_step", mesh, *heard[1:])
        if mesh.size("pp") > 1:  # the module's forward is not called in a step: the engine finds the stages here
            module.chunks, module.refuse_micro = models[0].chunks, models[0].refuse_micro
        clip, made = trainer.gradient_clip_val or None, dict[Engine, TrainedModule]()
        for given in self.optimizers:
            self._cut_models.follow(given)
            part = _member_of(module, given, mesh) if several else module
            engine = Engine(part, mesh, on_shards(given, part, mesh), clip=clip, elementwise=self._elementwise)
            name_failed_rank_in_forward(engine)
            made[engine] = TrainedModule(part, self._label_counter, engine)
        self.optimizers = [EngineOptimizer(engine) for engine in made]
        if not module.automatic_optimization:  # module.clip_gradients asks before each step
            self.optimizers = [EngineOptimizer(engine, one.stepped, one.zeroed) for engine, one in made.items()]
            self.precision_plugin.clip_grad_by_norm = lambda asked, clip_val: made[asked.engine].clips(clip_val)

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's, of any exception that ends the fit. One of a lost connection names the rank that has ended."""
        super().on_exception(exception)
        alike = isinstance(exception, IsogradError) and not self._engines  # refused on all ranks
        if self._loop is not None:
            self._loop.fail(exception, alike or any(engine.step_state.already_discarded for engine in self._engines))

    def teardown(self) -> None:
        """Lightning's, when the fit is over; what an engine holds stays on its device, as FSDP's does."""
        if self._loop is not None:
            self._loop.end()
        if self.engine is None:
            super().teardown()
            return
        if self._layer_sync:
            self.model = self._layer_sync.revert(self.lightning_module)
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's; notes the weight of the loss."""
        self._weight, self._rows = None, rows_in((args, kwargs))
        module = self.lightning_module
        if len(self.optimizers) > 1:
            module.toggle_optimizer, module.untoggle_optimizer = self._toggle, lambda _: self._toggle(None)
        try:
            output = super().training_step(*args, **kwargs)
        finally:
            if len(self.optimizers) > 1:  # its class's own again
                del module.toggle_optimizer, module.untoggle_optimizer
        said = output if isinstance(output, Mapping) else {"loss": output}
        if self.lightning_module.automatic_optimization and said.get("loss") is not None:
            line = "training_step: return self.model(**batch).loss"
            self._weight = self._labels_of(said["loss"], said.get("weight"), line)
        return output

    def _labels_of(self, loss: Tensor, given: float | Tensor | None, line: str) -> float | Tensor | None:
        """given; else how many labels a model of transformers has made the loss of. line: as `weight_of` takes it."""
        if self._cut_models.shares_rows and len(self.optimizers) == 1:
            return self._cut_models.weight_of(loss, given, line)
        return self._label_counter.labels_of(loss) if given is None else given

    def backward(
        self,
        closure_loss: Tensor,
        optimizer: Any,
        *args: Any,
        weight: float | Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Lightning's hooks around the engine's backward. weight: of `self.manual_backward(loss, weight=...)`."""
        if args or kwargs:
            fix = "a forward for each loss, and toggle_optimizer"
            self._refuse(
                f"backward with {', '.join(kwargs) or 'positions'}", "self.manual_backward(loss, weight=count)", fix
            )
        module, precision = self.lightning_module, self.precision_plugin
        closure_loss = precision.pre_backward(closure_loss, module)
        divided = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
        engine = self._engine_of("backward")
        with ExitStack() as stack:
            if not self._syncing:
                stack.enter_context(engine.no_sync())
            loss = closure_loss * divided if divided > 1 else closure_loss
            if module.automatic_optimization:
                weight = self._weight
            else:  # manual_backward comes before training_step returns
                weight = self._labels_of(closure_loss, weight, "self.manual_backward(self.model(**batch).loss)")
            weighs = self._label_counter.weight_of(closure_loss, weight, engine, self._rows or 0)
            if len(self.optimizers) > 1:
                loss = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
                engine = self._enter_others(stack, loss, weighs)
            if self.mesh.size("pp") == 1:  # else at the step
                engine.backward(loss, weighs)
        return precision.post_backward(closure_loss, module)  # type: ignore[no-any-return]

    def _enter_others(self, stack: ExitStack, loss: Tensor, weight: float | Tensor) -> Engine:
        """The engine of what a loss reaches. Of each other such engine the backward is one, too: as in torch, gradients
        add up until `zero_grad`, unless `toggle_optimizer` has frozen the parameters."""
        reached = _reached_by(loss)
        engines = [e for e in self._engines if any(id(slot.parameter) in reached for slot in e.plan.slots)]
        for engine in engines if len(engines) > 1 else ():
            stack.enter_context(engine.no_sync())
        for engine in engines[1:]:
            step_state = stack.enter_context(engine.backward_context())
            stack.enter_context(step_state.join_backward(loss, weight))
        return engines[0] if engines else self._engine_of("backward")

    def _toggle(self, optimizer: Any) -> None:
        """Lightning's `toggle_optimizer` freezes what the others step, which here are rows of the parameters."""
        for engine in self._engines:
            for slot in engine.plan.slots:
                slot.parameter.requires_grad_(optimizer is None or engine is optimizer.engine)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Backwards in here add up on this rank."""
        return set_attributes(self, _syncing=False)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The closure (forward and backward), Lightning's hooks, and the engine's step, which clips."""
        trains = {e: any(slot.parameter.requires_grad for slot in e.plan.slots) for e in self._engines}
        if len(trains) > 1 and not trains[optimizer.engine]:
            names = {engine: repr(name) for name, engine in self.engines.items()}
            mine, other = names[optimizer.engine], next((names[e] for e in trains if trains[e]), "another")
            fix = f"self.untoggle_optimizer(optimizer), that of {other}, before the optimizer of {mine} steps"
            self._refuse(
                f"a step of {mine}, which toggle_optimizer of {other} has frozen", "a step of what trains", fix
            )
        result = closure()
        if self.mesh.size("pp") > 1:
            micros, self._cut_models.waiting[:] = self._cut_models.waiting[:], []
            self._engine_of("optimizer_step").accumulate(micros)
        trainer = self.lightning_module.trainer
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        optimizer.step(**kwargs)
        return result

    def _engine_of(self, asked: str) -> Engine:
        if self.engine is None:
            fix = "ig.integrations.FabricStrategy for Fabric"
            self._refuse(f"LightningStrategy.{asked} before fit has set up", "trainer.fit(module)", fix)
        return self.engine

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole parameters, at every stage; all ranks come here."""
        with self._full_parameters():
            return whole_state(super().lightning_module_state_dict(), self.lightning_module, self.mesh)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Lightning's, at every stage."""
        with self._full_parameters():
            state = part_of_state(checkpoint["state_dict"], self.lightning_module, self.mesh)
            super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the state is saved by all ranks, beside the file."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's file; and beside it, unless only weights are wanted, the engine's state."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        for name, engine in self.engines.items() if "optimizer_states" in checkpoint else ():
            if name and not engine.step_state.empty:  # a generator's loss has left gradients in its discriminator
                engine.discard()
            save_state(engine, state_folder(filepath, name), max(1, checkpoint["global_step"]))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's."""
        self._loaded_from = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[no-any-return]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """From the folder beside the file, under any layout."""
        self._engine_of("load_optimizer_state_dict")
        assert self._loaded_from is not None
        fix = "start a new fit from its weights: load_from_checkpoint, and fit without ckpt_path"
        for name, engine in self.engines.items():
            load_state(engine, state_folder(self._loaded_from, name), self._loaded_from.name, fix)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Lightning's, and the folder beside the file."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(state_folder(filepath), ignore_errors=True)


def _member_of(module: Any, optimizer: Any, mesh: Mesh) -> Any:
    """The member of the module whose parameters the optimizer has."""
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    members = (member for name, member in module.named_modules() if name)
    found = next((m for m in members if own == {p for p in m.parameters() if p.requires_grad}), None)
    named = [name for name, parameter in module.named_parameters() if parameter in own][:8]
    error = IntegrationError("IG851", seen=f"one of several optimizers, of {named}", where=mesh.describe_rank())
    raise_on_all_ranks(None if found is not None else error, mesh, IntegrationError)  # frozen on one rank, perhaps
    return found


def _reached_by(loss: Tensor) -> set[int]:
    """The ids of the parameters that a backward of this loss gives a gradient."""
    found, seen, nodes = set[int](), set[Any](), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            nodes += [following for following, _ in node.next_functions]
    return found


def _has(trainer: Any, *names: str) -> bool:
    """Whether a callback of one of these classes takes part."""
    return any(kind.__name__ in names for one in trainer.callbacks for kind in type(one).__mro__)


def state_folder(filepath: Any, name: str = "") -> Path:
    """The folder of an engine's state, of a checkpoint's file."""
    return Path(f"{filepath}.isograd", name)


if NAME not in StrategyRegistry:
    StrategyRegistry.register(
        NAME, LightningStrategy, description="isograd: the gradient of one device, zero0 to zero3"
    )
