"""The proof at start: a small copy of the class trains one step under the layout and on one device, in fp64.

On one device the same batches run one after another through the whole model, plain torch. Parameters get noise on top
of their initial values, so that no norm is 1 and no bias 0. The library's casts to fp32 are casts to fp64 here
(force_fp64.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isograd.comm.consensus import all_gather_object, run_or_raise_on_all_ranks
from isograd.core import rng
from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import IsogradError, ModelError, headline
from isograd.hf.adapters import smaller
from isograd.hf.build import build
from isograd.hf.force_fp64 import ForceFP64, in_fp64, undisturbed
from isograd.hf.losses import IGNORE, MASKED, SEQ2SEQ, BatchPart, library_of, mean_of_labels, shard
from isograd.hf.small_config import VOCAB, small
from isograd.hf.stages import refuse_shared_keys
from isograd.hf.sub_configs import parts_of, text_of

LIMIT = 1e-9  # of the norm of a gradient
FLOOR = 1e-6  # of the norm of all: a gradient that is truly zero is judged on this
ROWS, LENGTH, MICROS = 2, 11, 2
NOISE = 0.05


@dataclass(frozen=True)
class Proof:
    """What was compared, and how far the gradients of the layout are from one device's."""

    model: str
    layout: str
    errors: dict[str, float]  # by the name of the parameter, relative
    held: float  # the share of the small copy's parameters that a tp rank holds
    seconds: float

    @property
    def wrong(self) -> dict[str, float]:
        """Those above the limit, the worst first."""
        found = {name: error for name, error in self.errors.items() if not error <= LIMIT}
        return dict(sorted(found.items(), key=lambda item: -_rank(item[1])))

    def __str__(self) -> str:
        worst = max(self.errors.values(), default=0.0)
        return (
            f"{self.model} under {self.layout!r}: {len(self.errors)} gradients of a small copy are one device's "
            f"(largest difference {worst:.0e}, {self.seconds:.1f} s)"
        )


def prove(config: Any, mesh: Mesh, adapter: Any = None, base_bits: int | None = None) -> Proof:
    """Prove the class of a config under this layout; all ranks call it, and all refuse a model that fails.

    adapter: a peft.LoraConfig; then the gradients are those of the adapters, over weights of so many bits.
    """
    proof = compare(config, mesh, adapter, base_bits)
    if proof.wrong:
        listed = [f"{name} ({error:.1e})" for name, error in list(proof.wrong.items())[:8]]
        seen = f"{len(proof.wrong)} of {len(proof.errors)} parameters, relative: {', '.join(listed)}"
        raise ModelError(
            "IG468", seen=seen, where=mesh.describe_rank(), model=proof.model, layout=proof.layout, limit=LIMIT
        )
    return proof


def compare(config: Any, mesh: Mesh, adapter: Any = None, base_bits: int | None = None) -> Proof:
    """The errors of every gradient, whatever they are."""
    refuse_shared_keys(config, mesh)
    began = time.perf_counter()
    tiny = _tried(
        "cannot be made",
        lambda: small(config, mesh.size("tp"), mesh.layout.pp * mesh.layout.vpp, mesh.size("ep")),
        mesh,
    )
    for part in (tiny, *parts_of(tiny).values()):
        part._experts_implementation = "eager"  # the class's own; grouped products of matrices have no fp64
    _, loss = library_of(config, mesh.describe_rank())
    built = partial(_built, tiny, adapter=smaller(adapter), base_bits=base_bits)
    with undisturbed():
        model = _tried("cannot be cut", lambda: built(mesh), mesh)
        table = contracts(model, mesh)
        here = sum(math.prod(stop - start for start, stop in record.contract.local(mesh)) for record in table)
        held = here / sum(math.prod(record.contract.shape) for record in table)  # 1 / tp where every parameter is cut
        truth = _tried("does not run on one device", lambda: _one_device(built, mesh, loss), mesh)
        found = _tried("does not run under the layout", lambda: _under_layout(model, mesh, loss), mesh, steps=True)
    floor = FLOOR * float(torch.stack([g.norm() for g in truth.values()]).norm())
    errors = {name: _error(gradient, truth.get(name), floor) for name, gradient in found.items()}
    everywhere = all_gather_object(errors, mesh)
    absent = truth.keys() - {name for errors in everywhere for name in errors}
    worst = {name: _error(None, truth[name], floor) for name in absent}
    worst |= {name: max((e[name] for e in everywhere if name in e), key=_rank) for e in everywhere for name in e}
    return Proof(type(model).__name__, str(mesh.layout), worst, held, time.perf_counter() - began)


def _rank(error: float) -> float:
    """NaN is the worst of all."""
    return float("inf") if math.isnan(error) else error


def _error(found: Tensor | None, true: Tensor | None, floor: float) -> float:
    """A parameter that gets no gradient on one side has none, or zeros, on the other."""
    if true is None or found is None:
        other = found if true is None else true
        return 0.0 if other is None or not bool(other.any()) else float("inf")
    return float((found - true).norm()) / max(float(true.norm()), floor)


def _batch(data_rank: int, number: int, loss: str, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * data_rank + number)
    tokens = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(3, VOCAB, (ROWS, LENGTH - 2), generator=generator) if loss == SEQ2SEQ else tokens.clone()
    labels[0, : 2 + (3 * data_rank + 2 * number) % 7] = IGNORE
    if loss == MASKED:
        labels[1, ::2] = IGNORE
    return {"input_ids": tokens.to(device), "labels": labels.to(device)}


def _built(config: Any, mesh: Mesh, adapter: Any, base_bits: int | None) -> Any:
    """Also in fp64 where a class makes a parameter in fp32."""
    with ForceFP64():
        return build(config, mesh, torch.float64, adapter=adapter, noise=NOISE, base_bits=base_bits)


def _one_device(built: Callable[[Mesh], Any], mesh: Mesh, loss: str) -> dict[str, Tensor]:
    alone = Mesh.unbound("1")
    alone.device = mesh.device
    model = built(alone)
    batches = [_batch(rank, n, loss, mesh.device) for rank in range(mesh.size("dp")) for n in range(MICROS)]
    parts = [shard(batch, alone, loss) for batch in batches]
    total = sum(int(part.weight) for part in parts)
    before = rng.random_state(mesh.device)
    for part in parts:
        with ForceFP64():
            mean = model(**part.inputs).loss
        (mean * part.weight / total).backward()
    _refuse_other_mean(model, batches[0], parts[0], loss, mesh)
    if rng.has_drawn(before, mesh.device):
        raise ModelError(
            "IG466",
            f"{type(model).__name__} draws random numbers in its forward: two runs of a step differ",
            seen="the state of torch's random numbers changed, with every dropout at 0",
            expected="a forward that is a function of its input",
            fix="turn the noise off in the config; under dp and zero, load(..., prove=False) leaves the proof out",
            where=mesh.describe_rank(),
        )
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def _refuse_other_mean(model: Any, batch: dict[str, Tensor], part: BatchPart, loss: str, mesh: Mesh) -> None:
    """Refuse a loss that is not the mean of the labels that are counted, to which balance losses may be added."""
    with ForceFP64():
        means = [model(**part.inputs).loss]
        output = model(**{**batch, **({} if loss == SEQ2SEQ else {"use_cache": False})})
    means.append(output.loss)
    if not getattr(text_of(model.config), "output_router_logits", False):
        means.append(mean_of_labels(output.logits.double(), batch["labels"], loss))
    if any(abs(float(mean - means[0])) > LIMIT * abs(float(means[0])) for mean in means):
        found = ", ".join(f"{float(mean):.9g}" for mean in means)
        raise ModelError("IG474", where=mesh.describe_rank(), model=type(model).__name__, found=found)


def _under_layout(model: Any, mesh: Mesh, loss: str) -> dict[str, Tensor]:
    engine = Engine(model, mesh, lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    batches = [_batch(mesh.index("dp"), number, loss, mesh.device) for number in range(MICROS)]
    if engine.pipeline is not None:
        engine.pipeline.chunks = {stage: in_fp64(chunk) for stage, chunk in engine.pipeline.chunks.items()}
        engine.accumulate(batches)
    for batch in batches if engine.pipeline is None else ():
        part = shard(batch, mesh, loss)
        with ForceFP64():
            mean = model(**part.inputs).loss
        engine.backward(mean, weight=part.weight)
    return {name: gradient.clone() for name, gradient in engine.grads().items()}


def _tried(what: str, do: Any, mesh: Mesh, steps: bool = False) -> Any:
    """A small copy that fails is refused with what the library said. `steps`: it runs a step of the layout."""

    def spelled(error: Exception) -> ModelError:
        return ModelError(
            "IG469",
            f"the small copy for the proof {what}",
            seen=headline(error),
            expected="a forward with input_ids, position_ids and labels, and its backward",
            fix="load(..., prove=False) leaves the proof out; ig.verify proves a model of your own making",
            where=mesh.describe_rank(),
        )

    if mesh.size("pp") == 1 or not steps:
        return run_or_raise_on_all_ranks(do, mesh, ModelError, spelled)
    try:  # a stage that fails closes its connections: the others have heard of it, and nobody can ask them
        return do()
    except IsogradError:
        raise
    except Exception as error:
        raise spelled(error) from error
