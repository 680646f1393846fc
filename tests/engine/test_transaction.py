"""What goes wrong in a step leaves nothing behind: the next number is right, or the next call is refused on all ranks.

Each test names the row of the list of failures (A1 ... A19) that it closes.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from isograd.checkpoint import CheckpointManager
from isograd.comm import world
from isograd.core.mesh import DATA, Mesh
from isograd.engine import DataParallel, Engine, validation
from isograd.errors import EngineError, IsogradError

from . import toys


def refusal(run: Callable[[], object]) -> str:
    """The code and the words of an error; "" when there is none."""
    try:
        run()
    except IsogradError as error:
        return str(error)
    return ""


def engine_of(zero: int, **options: object) -> tuple[nn.Module, Engine]:
    model = toys.Toy()
    mesh = Mesh(f"dp{world.world()[1]} zero{zero}")
    return model, Engine(model, mesh, toys.sgd, bucket_mb=1e-4, **options)  # type: ignore[arg-type]


def one_backward(model: nn.Module, engine: Engine, index: int = 2) -> None:
    x, y = toys.micro_batch(engine.mesh.index(DATA), index)
    engine.backward(toys.loss_of(model, x, y), weight=len(x))


def truth(ranks: int, index: int = 2) -> dict[str, Tensor]:
    model, total, rows = toys.Toy(), torch.zeros((), dtype=torch.float64), 0
    for rank in range(ranks):
        x, y = toys.micro_batch(rank, index)
        total, rows = total + toys.loss_of(model, x, y) * len(x), rows + len(x)
    (total / rows).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def assert_right(found: Iterator[tuple[str, Tensor]], ranks: int, what: str) -> None:
    expected = truth(ranks)
    for name, gradient in found:
        error = float((gradient - expected[name]).norm())
        assert error <= 1e-9 * float(expected[name].norm()), f"{what}: gradient of {name}: error {error:.1e}"


# -- a backward that raises


def failures(zero: int, who: str) -> None:
    rank, ranks = world.world()
    model, engine = engine_of(zero)
    fails = who == "all" or rank == 0
    for place in range(toys.Failing.PLACES):
        what = f"zero{zero}, {who} at {toys.Failing.NAMES[place]}"
        one_backward(model, engine, 0)  # what this step had gathered is dropped, too
        if fails:
            with pytest.raises(ZeroDivisionError), toys.Failing(model, place):
                one_backward(model, engine)
            if zero < 3:
                assert refusal(lambda: one_backward(model, engine)).startswith("IG550"), what
        else:
            one_backward(model, engine)
        how = place % 3
        if how == 0 or (how == 2 and rank == 0):
            engine.discard()
        else:
            said = refusal(engine.step if place % 2 else lambda: list(engine.grads()))
            assert said.startswith("IG550") and "rank 0" in said and "ZeroDivisionError" in said, f"{what}: {said}"
        one_backward(model, engine)
        assert_right(engine.grads().items(), ranks, what)
        engine.discard()


@pytest.mark.parametrize(("zero", "who"), [(0, "all"), (0, "one"), (1, "one"), (2, "all"), (3, "all")])
def test_a_backward_that_raises_at_any_parameter_is_dropped_or_refused_on_all_ranks(worlds, zero, who) -> None:
    """A1: partial gradients stayed, x 2.0 and 2002 for 2."""
    worlds(2).run(partial(failures, zero, who))


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.toy = toys.Toy()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return toys.loss_of(self.toy, x, y), len(x)


def whole_steps(zero: int) -> None:
    """`train_step` is a whole transaction: where it fails on one rank it fails on all, and nothing is left."""
    rank, ranks = world.world()
    model = Loss()
    engine = Engine(model, Mesh(f"dp{ranks} zero{zero}"), toys.sgd)
    batch = [toys.micro_batch(rank, 2), toys.micro_batch(rank, 4)]

    def fail(where: str) -> str:
        if rank == 1:
            return refusal(lambda: engine.train_step(batch))
        with pytest.raises(ZeroDivisionError):
            if where == "backward":
                with toys.Failing(model.toy, 3):
                    engine.train_step(batch)
            else:
                hook = model.toy.out.register_forward_hook(lambda *_: 1 / 0)
                try:
                    engine.train_step(batch)
                finally:
                    hook.remove()
        return "IG550 rank 0"

    for where in ("backward", "forward") if zero < 3 else ("backward",):
        said = fail(where)
        assert said[:5] in ("IG550", "IG571") and "rank 0" in said, said
        assert engine.step_state.empty
        engine.accumulate(batch[:1])
        assert_right(((n.removeprefix("toy."), g) for n, g in engine.grads().items()), ranks, where)
        engine.discard()
    if zero == 3:
        return
    # A backward outside of it that failed, then train_step: refused once, on both ranks.
    if rank == 0:
        with pytest.raises(ZeroDivisionError), toys.Failing(model.toy, 3):
            engine.backward(*model(*batch[0]))
    else:
        engine.backward(*model(*batch[0]))
    assert refusal(lambda: engine.train_step(batch)).startswith("IG550")
    assert engine.train_step(batch).weight > 0


@pytest.mark.parametrize("zero", [1, 3])
def test_a_train_step_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(worlds, zero: int) -> None:
    """A1, by train_step; found again by attack: the failed rank waited for ever in its next train_step."""
    worlds(2).run(partial(whole_steps, zero))


def further_backwards() -> None:
    """One rank's backward fails, and all go on with further backwards before they step."""
    rank, ranks = world.world()
    model, engine = engine_of(1)
    if rank == 1:
        with pytest.raises(ZeroDivisionError), toys.Failing(model, 5):
            one_backward(model, engine)
        said = [refusal(lambda: one_backward(model, engine)) for _ in range(4)]
        assert all(words.startswith("IG550") for words in said), said
        assert refusal(engine.step).startswith("IG550")
    else:
        assert [refusal(lambda: one_backward(model, engine)) for _ in range(3)] == [""] * 3
        assert refusal(engine.step).startswith("IG550")
    one_backward(model, engine)
    assert_right(engine.grads().items(), ranks, "after further backwards")


def test_backwards_after_a_failure_on_another_rank_do_not_wait_for_ever(worlds) -> None:
    """Found by attack: rank 0 waited in its third backward for buckets of rank 1, which waited in its step."""
    worlds(2).run(further_backwards, timeout=60)


def raised_between() -> None:
    """ZeRO 3: one rank raises after its forward and before its backward; all discard."""
    rank, ranks = world.world()
    model, engine = engine_of(3)
    for _ in range(2):
        x, y = toys.micro_batch(rank, 2)
        loss = toys.loss_of(model, x, y)
        if rank == 0:
            refusal(lambda: engine.backward(loss, len(x)))
        engine.discard()
        one_backward(model, engine)
        assert_right(engine.grads().items(), ranks, "after an exception in the loss")
        engine.discard()


def test_an_exception_between_forward_and_backward_at_zero_3_is_left_by_discard(worlds) -> None:
    """Found by attack: the ranks stayed one call apart."""
    worlds(2).run(raised_between, timeout=60)


# -- gradients by hand


def by_hand() -> None:
    _, ranks = world.world()
    for zero in (0, 1):
        model, engine = engine_of(zero)
        x, y = toys.micro_batch(engine.mesh.index(DATA), 2)
        assert refusal(lambda: toys.loss_of(model, x, y).backward()).startswith("IG510")
        one_backward(model, engine)  # A2: as the message says
        assert_right(engine.grads().items(), ranks, f"zero{zero} after loss.backward()")
        assert refusal(lambda: toys.loss_of(model, x, y).backward()).startswith("IG551")
        assert_right(engine.grads().items(), ranks, f"zero{zero} after loss.backward() in a step")
        assert refusal(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)).startswith("IG551")
        assert refusal(engine.optimizer.step).startswith("IG556")
        assert refusal(lambda: model.zero_grad(set_to_none=False)).startswith("IG551")
        assert_right(engine.grads().items(), ranks, f"zero{zero} after hands")
        engine.step()
        assert refusal(engine.optimizer.step).startswith("IG556")
        for clear in (model.zero_grad, engine.optimizer.zero_grad):
            for accumulate in (False, True):
                with engine.no_sync() if accumulate else torch.enable_grad():
                    one_backward(model, engine, 3)
                clear()
                assert refusal(lambda: one_backward(model, engine)).startswith("IG553")
                assert refusal(engine.step).startswith("IG553")
        engine.step() if not refusal(lambda: one_backward(model, engine)) else None


def test_gradients_by_hand_are_refused_and_leave_nothing_behind(worlds) -> None:
    """A2: the last parameters x 1.2. A3: a dropped micro-batch stayed in, or its weight did. A4: 0.0, and nothing."""
    worlds(2).run(by_hand)


SEEDED = threading.Lock()  # ranks that are threads share torch's generator
HANDS: dict[str, Callable[[nn.Module, Engine], object]] = {
    "model.zero_grad()": lambda toy, engine: toy.zero_grad(),
    "optimizer.zero_grad()": lambda toy, engine: engine.optimizer.zero_grad(),
    "p.grad = None": lambda toy, engine: setattr(toy.out.bias, "grad", None),
    "p.grad = tensor": lambda toy, engine: setattr(toy.out.bias, "grad", torch.ones_like(toy.out.bias)),
    "unused.grad = tensor": lambda toy, engine: setattr(toy.unused.bias, "grad", torch.ones(4).double()),
}


def between_backward_and_step(layout: str, who: str) -> None:
    """What hands do to `.grad` after the last backward, and what each way out of the step says to it."""
    rank, ranks = world.world()
    with SEEDED:
        model, expected = Loss(), truth(ranks)
    engine = Engine(model, Mesh(layout), toys.sgd, bucket_mb=1e-4)
    micro = toys.micro_batch(rank, 2)
    ways: dict[str, Callable[[], object]] = {
        "step": engine.step,
        "grads": lambda: list(engine.grads()),
        "backward": lambda: engine.backward(*model(*micro)),
        "train_step": lambda: engine.train_step([micro]),
        "discard": engine.discard,
    }
    for hand, act in HANDS.items():
        for name, way in ways.items():
            what = f"{layout}, {hand} on {who}, then {name}"
            engine.backward(*model(*micro))
            if mine := who == "all" or rank == 1:
                act(model.toy, engine)
            said = refusal(way)
            if name == "discard" or (name == "backward" and not mine):  # the other rank's backward may be over
                assert said[:5] in ("", "IG571"), f"{what}: {said}"
            else:
                codes = ("IG553",) if mine or name != "train_step" else ("IG553", "IG571")
                assert said[:5] in codes and (who == "all" or "rank 1" in said), f"{what}: {said}"
            if name == "backward":
                engine.discard()
            assert engine.step_state.empty and all(p.grad is None for p in model.parameters()), what
            engine.backward(*model(*micro))
            for key, gradient in engine.grads().items():
                right = expected[key.removeprefix("toy.")]
                assert float((gradient - right).norm()) <= 1e-9 * float(right.norm()), f"{what}: {key}"
            engine.discard()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layout", "who"),
    [("", "all"), *((f"dp2 zero{zero}", who) for zero in (0, 1, 3) for who in ("all", "one"))],
)
def test_gradients_changed_by_hand_after_the_last_backward_are_refused_on_all_ranks(threads, layout, who) -> None:
    """Issue 40, row 4: silently ignored, 15 of 15."""
    threads(2 if layout else 1).run(between_backward_and_step, layout, who)


def wrapped() -> list[str]:
    mesh = Mesh(f"dp{world.world()[1]} zero1")
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    said = [refusal(lambda: Engine(ddp, mesh, toys.sgd)), refusal(lambda: DataParallel(nn.Sequential(ddp)))]
    return [*said, refusal(lambda: Engine(DataParallel(nn.Linear(3, 1)), mesh, toys.sgd))]


def test_a_wrapped_model_is_refused_by_name(worlds) -> None:
    """A7: the bias was counted twice."""
    for said in worlds(2).run(wrapped)[0]:
        assert said.startswith("IG557") and "DataParallel" in said and "model.module" in said


# -- losses and weights


def half_losses(dtype: torch.dtype) -> list[float]:
    """The gradient and the weight of a sum over 1,003 and 57 rows, as means in half precision."""
    model = nn.Linear(1, 1, bias=False)
    engine = Engine(model, Mesh(""), toys.sgd)
    for rows in (1003, 57):
        engine.backward(model(torch.ones(1, 1)).to(dtype).mean(), weight=rows)
    with engine.backward_context() as step_state:  # as a replay looks at gradients; the step keeps none
        step_state.backward_discarded(model(torch.ones(1, 1)).to(dtype).mean(), 3)
    ((_, gradient),) = engine.grads().items()
    return [float(gradient), engine.step().weight]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_loss_counts_every_row(worlds, dtype: torch.dtype) -> None:
    """A13: a bf16 loss of 1,003 rows was seeded with 1,000."""
    gradient, weight = worlds(1).run(partial(half_losses, dtype))[0]
    assert abs(gradient - 1.0) < 1e-6
    assert weight == 1060


@pytest.mark.parametrize(
    ("layout", "in_one_run", "refused"),
    [("dp2 tp2", True, ""), ("dp2 tp2", False, "runs of autograd"), ("dp2 pp2", True, "pp2"), ("cp2 ring", True, "cp2"),
     ("dp4 ep2", True, "ep2")],
)  # fmt: skip
def test_a_half_precision_loss_whose_gradient_goes_elsewhere_is_refused(
    layout: str, in_one_run: bool, refused: str
) -> None:
    """Of 1,003 rows, another rank's or a replay's gradients would get 512."""
    loss = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(EngineError, match=refused) if refused else nullcontext() as error:
        validation.refuse_half_loss(loss, Mesh.unbound(layout), in_one_run=in_one_run)
    assert not refused or error.value.code == "IG567"


def odd_losses() -> None:
    rank, ranks = world.world()
    model, engine = engine_of(1)
    x, y = toys.micro_batch(rank, 2)
    engine.backward(toys.loss_of(model, x, y).reshape(1), weight=torch.tensor([len(x)]))  # A17: shape (1,)
    assert_right(engine.grads().items(), ranks, "a loss of shape (1,)")
    engine.discard()
    for weight in (torch.nan, -1.0):
        said = refusal(lambda: engine.backward(toys.loss_of(model, x, y), torch.tensor(weight)))
        assert said.startswith("IG515")
    other = Engine(toys.Toy(), engine.mesh, toys.sgd)  # A17: a generator's loss goes through a discriminator
    through = other.model(torch.cat([model(x), x[:, :8]], 1)).mean()
    said = refusal(lambda: engine.backward(through, 1.0))
    assert said.startswith("IG510") and "requires_grad_(False)" in said
    engine.discard()
    other.model.requires_grad_(False)
    engine.backward(other.model(torch.cat([model(x), x[:, :8]], 1)).mean(), 1.0)
    engine.step()
    other.model.requires_grad_(True)
    for name, parameter in other.model.named_parameters():
        parameter.requires_grad_("frozen" not in name)
    one_backward(other.model, other)
    assert_right(other.grads().items(), ranks, "the discriminator's own step")


def test_losses_of_other_shapes_wrong_weights_and_two_engines(worlds) -> None:
    """A17: shape error; accepted; IG510 without a way out."""
    worlds(2).run(odd_losses)


def unequal() -> None:
    rank, ranks = world.world()
    model, engine = engine_of(1)
    for _ in range(1 + rank):
        one_backward(model, engine)
    said = refusal(engine.step)
    assert said.startswith("IG554") and "rank 0: 1, rank 1: 2" in said, said
    one_backward(model, engine)
    assert_right(engine.grads().items(), ranks, "after unequal numbers")


def test_unequal_numbers_of_synced_backwards_are_refused_by_name(worlds) -> None:
    """A19: gloo aborted."""
    worlds(2).run(unequal)


def changed_on_one_rank() -> str:
    rank, _ = world.world()
    model, engine = engine_of(1)
    one_backward(model, engine)
    if rank == 1:
        model.first.bias.requires_grad_(False)
    return refusal(engine.step)


def test_what_one_rank_alone_can_see_is_refused_on_all(worlds) -> None:
    said = worlds(2).run(changed_on_one_rank)
    assert said[0].startswith("IG550") and "rank 1: IG517" in said[0]
    assert said[1].startswith("IG517")


# -- DataParallel


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


def two_optimizers() -> None:
    """Each clears its own parameters, in turn."""
    rank, ranks = world.world()
    model = DataParallel(Two())
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in (model.module.a, model.module.b)]
    inputs = [torch.randn(2 + r, 3, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(2)]
    plain = Two()
    plain(torch.cat(inputs[:ranks])).mean().backward()
    for weighed in (False, True):
        for step in range(4):
            loss = model(inputs[rank]).mean()
            (model.weigh(loss, len(inputs[rank])) if weighed else loss).backward()
            for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
                assert float((ours.grad - theirs.grad).norm()) <= 1e-9 * float(theirs.grad.norm()), (weighed, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_two_optimizers_that_each_clear_their_own(worlds) -> None:
    """A14: 1, .5, .33, .25 ... Uneven rows, with and without `weigh`: the gradient of one device."""
    worlds(2).run(two_optimizers)


def behind_a_gather() -> None:
    """A loss of this rank's rows against the features of all ranks, gathered with their gradient."""
    rank, ranks = world.world()
    rows = (3, 5)
    inputs = [torch.randn(5, 3, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(ranks)]

    def loss_of(features: Tensor, everyone: Tensor, mine: int) -> Tensor:
        return torch.logsumexp(features[: rows[mine]] @ everyone.t(), 1).mean()

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.map = nn.Linear(3, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.map(x))

    model, plain = DataParallel(Features()), Features()
    mine = model(inputs[rank])
    model.weigh(loss_of(mine, torch.cat(all_gather(mine)), rank), rows[rank]).backward()
    all_features = [plain(x) for x in inputs]
    losses = [loss_of(all_features[r], torch.cat(all_features), r) * rows[r] for r in range(ranks)]
    (sum(losses) / sum(rows[:ranks])).backward()  # type: ignore[union-attr]
    for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).norm()) <= 1e-9 * float(theirs.grad.norm())


def test_weigh_scales_the_loss_also_behind_a_gather(worlds) -> None:
    """A14: 3 to 8 % off, because what arrived at parameters was scaled."""
    worlds(2).run(behind_a_gather)


def weights_of_one_backward() -> None:
    model = DataParallel(Two())
    x = torch.ones(2, 3, dtype=torch.float64)

    def twice() -> None:
        model.weigh(model.weigh(model(x).mean(), 2), 3).backward()

    def two() -> None:
        (model.weigh(model(x).mean(), 2) + model.weigh(model(x).sum(), 3)).backward()

    assert refusal(twice).startswith("IG538") and refusal(two).startswith("IG538")
    model.weigh(model(x).mean(), 5)  # a loss that is dropped has no say
    model.weigh(model(x).mean(), 2).backward()
    plain = Two()
    plain(x).mean().backward()
    for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).norm()) <= 1e-9 * float(theirs.grad.norm())


def test_a_backward_has_one_weight(worlds) -> None:
    """Found by attack: weighed twice, a gradient was multiplied by the inner count."""
    worlds(2).run(weights_of_one_backward)


def accumulated_rows() -> None:
    """Uneven micro-batches under no_sync, each loss divided by their number, as loops do."""
    rank, ranks = world.world()
    model, plain = DataParallel(Two()), Two()
    sizes = [[2, 5, 1], [4, 3, 6]]
    source = torch.Generator().manual_seed(7)
    data = [[torch.randn(n, 3, generator=source, dtype=torch.float64) for n in row] for row in sizes]
    for number, x in enumerate(data[rank]):
        with model.no_sync() if number < 2 else torch.enable_grad():
            (model(x).mean() / 3).backward()
    plain(torch.cat([x for row in data[:ranks] for x in row])).mean().backward()
    for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).norm()) <= 1e-9 * float(theirs.grad.norm())


def test_accumulation_without_weights_is_the_mean_over_all_rows(worlds) -> None:
    worlds(2).run(accumulated_rows)


def many_half_gradients() -> float:
    model = DataParallel(nn.Linear(1, 1, bias=False).bfloat16())
    for number in range(512):
        with model.no_sync() if number < 511 else torch.enable_grad():
            (model(torch.ones(1, 1, dtype=torch.bfloat16)).sum() / 512).backward()
    assert model.module.weight.grad is not None
    return float(model.module.weight.grad)


def test_half_precision_accumulates_in_single(worlds) -> None:
    """A14: 512 micro-batches of 1/512 gave 0.5."""
    assert worlds(2).run(many_half_gradients) == [1.0, 1.0]


def failed_on_one_rank() -> str:
    rank, ranks = world.world()
    model = DataParallel(toys.Toy(), bucket_cap_mb=1e-4)
    assert model.require_backward_grad_sync  # accelerate reads it
    with model.no_sync():
        assert not model.require_backward_grad_sync
    x, y = toys.micro_batch(rank, 2)
    said = ""
    if rank == 0:
        with pytest.raises(ZeroDivisionError), toys.Failing(model.module, 4):
            toys.loss_of(model, x, y).backward()
    else:
        said = refusal(lambda: toys.loss_of(model, x, y).backward())
    toys.loss_of(model, x, y).backward()
    found = ((n, p.grad) for n, p in model.module.named_parameters() if p.grad is not None)
    assert_right(found, ranks, "DataParallel")
    return said


def test_a_failed_backward_of_one_rank_is_named_on_the_others(worlds) -> None:
    """A14: 1001."""
    said = worlds(2).run(failed_on_one_rank)[1]
    assert said.startswith("IG550") and "rank 0" in said


# -- on a GPU, as far as a CPU shows it


def nothing_on_a_device() -> None:
    """What a weight on a GPU does, which is not looked at: gradients of a mean over nothing are left out one by one."""
    model = nn.Linear(2, 1).double()
    engine = Engine(model, Mesh(""), toys.sgd)
    engine.backward(model(torch.ones(3, 2, dtype=torch.float64)).mean(), weight=3)
    with engine.backward_context() as step_state:
        count = torch.zeros((), dtype=torch.float64)
        empty = (model(torch.ones(3, 2, dtype=torch.float64)) * 0).sum() / count  # over no token of three
        no_loss = (count == 0) & ~empty.detach().isfinite()  # as `_seeded` finds it on a GPU
        step_state.run_backward([empty], [count], no_loss=no_loss)
    for name, gradient in engine.grads().items():
        assert torch.equal(gradient, torch.ones_like(gradient)), name
    assert not engine.step().skipped


def test_a_mean_over_nothing_whose_weight_is_not_looked_at_adds_nothing(worlds) -> None:
    """A18: on a GPU such a loss made the step be skipped."""
    worlds(1).run(nothing_on_a_device)


def handlers_that_discard(zero: int | None, way: str) -> tuple[list[str], list[str]]:
    """A step fails on rank 1; every rank's handler discards, twice. (errors, names of gradients that are wrong)"""
    rank, errors, wrong = world.world()[0], [], []
    if zero is None:
        model: nn.Module = DataParallel(toys.Toy())
        engine = None
    else:
        model, engine = engine_of(zero)
    for step in range(4):
        x, y = toys.micro_batch(rank, 2)
        try:
            if step == 1 and rank == 1 and way == "data":
                raise ZeroDivisionError
            loss = toys.loss_of(model, x, y)
            if step == 1 and rank == 1:
                loss.register_hook(fails)
            if engine is not None:
                engine.backward(loss, weight=len(x))
                found = {name: gradient.clone() for name, gradient in engine.grads().items()}
                engine.discard()
            else:
                assert isinstance(model, DataParallel)
                model.weigh(loss, len(x)).backward()
                found = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
                model.zero_grad()
            expected = truth(2)
            wrong += [f"{step} {name}" for name, g in found.items() if (g - expected[name]).norm() > 1e-9]
        except Exception as error:
            errors.append(f"{step} {type(error).__name__}")
            front = engine if engine is not None else model
            assert isinstance(front, Engine | DataParallel)
            front.discard()
            front.discard()
    return errors, wrong


def fails(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.medium
@pytest.mark.parametrize("zero, way", [(1, "data"), (1, "backward"), (3, "data"), (3, "backward"), (None, "backward")])
def test_a_handler_that_discards_on_every_rank_loses_one_step(worlds, zero: int | None, way: str) -> None:
    """A refusal has dropped the step already: a second gather would meet the next step of the rank that failed."""
    first, second = worlds(2).run(handlers_that_discard, zero, way)
    assert second == (["1 ZeroDivisionError"], [])
    assert first == (["1 EngineError"], [])


# -- what an optimizer, a half step or a window leaves behind ------------------------------------------------------


class Breaks(torch.optim.SGD):
    """Raises once, on one rank, after it has changed its first tensor."""

    armed = False

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if self.armed:
            self.armed = False
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise MemoryError("half way")
        super().step()


def optimizer_that_raises(zero: int, folder: str) -> list[str]:
    model = toys.Toy()
    mesh = Mesh(f"dp2 zero{zero}")
    engine = Engine(model, mesh, lambda ps: Breaks(ps, lr=0.1), bucket_mb=1e-4, elementwise=True)
    said = []
    with CheckpointManager(folder, engine) as keeper:
        one_backward(model, engine)
        engine.step()
        keeper.save(1)
        keeper.wait()
        one_backward(model, engine)
        right = {name: gradient.clone() for name, gradient in engine.grads().items()}
        engine.optimizer.armed = mesh.rank == 1  # type: ignore[attr-defined]
        try:
            engine.step()
        except (MemoryError, EngineError) as error:
            said.append(f"{type(error).__name__}: {error}"[:19])
            engine.discard()  # nothing is left to discard
        for _ in range(2):
            one_backward(model, engine)
            said.append(refusal(engine.step)[:26])
            engine.discard()
        said.append(refusal(lambda: keeper.save(2))[:5])
        keeper.load()
        one_backward(model, engine)
        errors = [float((gradient - right[name]).norm()) for name, gradient in engine.grads().items()]
        said.append(f"{max(errors) <= 1e-12} {engine.step().skipped}")
    return said


@pytest.mark.medium
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_an_optimizer_that_raises_is_refused_on_all_ranks_until_a_checkpoint_is_loaded(
    worlds, zero: int, tmp_path: Path
) -> None:
    """It may have changed half of the parameters, while the other rank has stepped: no copy is right."""
    first, second = worlds(2).run(optimizer_that_raises, zero, str(tmp_path))
    refused = ["IG559: an optimizer raised"] * 2
    assert first == ["EngineError: IG559:", *refused, "IG559", "True False"]
    assert second == ["MemoryError: half w", *refused, "IG559", "True False"]


class Scored(nn.Linear):
    """Returns what `train_step` and `evaluate` take."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return super().forward(x).square().mean(), len(x)


def evaluation_behind_an_optimizer_that_raised() -> list[str]:
    mesh = Mesh("dp2 zero1")
    engine = Engine(Scored(3, 2), mesh, lambda ps: Breaks(ps, lr=0.1), elementwise=True)
    batch = (torch.ones(2, 3),)
    engine.optimizer.armed = mesh.rank == 1  # type: ignore[attr-defined]
    with pytest.raises((MemoryError, EngineError)):
        engine.train_step(batch)
    return [refusal(lambda: engine.evaluate(batch))[:26], refusal(lambda: engine.train_step(batch))[:26]]


def test_behind_an_optimizer_that_raised_nothing_is_evaluated(worlds) -> None:
    """Ranks have different weights: it was the mean of two models."""
    assert worlds(2).run(evaluation_behind_an_optimizer_that_raised) == [["IG559: an optimizer raised"] * 2] * 2


class Halts(Scored):
    """Raises once."""

    armed = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        if self.armed:
            self.armed = False
            raise ZeroDivisionError("in a forward")
        return super().forward(x)


def evaluation_that_fails(layout: str, everywhere: bool) -> tuple[str, float, float]:
    mesh, model = Mesh(layout), Halts(3, 2)
    engine = Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    batch = (torch.ones(2, 3),)
    before = engine.evaluate(batch).loss
    model.armed = everywhere or mesh.rank == 1
    try:
        engine.evaluate(batch)
        said = "evaluated"
    except (ZeroDivisionError, EngineError) as error:
        said = str(error)
    return said, before, engine.train_step(batch).loss


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("layout", "code"), [("dp2 zero1", "IG550"), ("dp2 zero3", "IG571")])
def test_an_evaluation_that_fails_on_a_rank_ends_on_all_and_training_goes_on(
    worlds, layout: str, code: str, everywhere: bool
) -> None:
    """Its connections were closed, though no other rank of dp stays inside a forward: the run was over."""
    for rank, (said, before, after) in enumerate(worlds(2).run(evaluation_that_fails, layout, everywhere)):
        mine = everywhere or rank == 1
        assert said == "in a forward" if mine else code in said and "ZeroDivisionError" in said
        assert after == before


def half_a_step_before_a_load(zero: int, folder: str) -> list[bool]:
    model, engine = engine_of(zero)
    with CheckpointManager(folder, engine) as keeper:
        keeper.save(0)
        keeper.wait()
        one_backward(model, engine, 0)
        keeper.load()
        one_backward(model, engine)
        expected = truth(2)
        return [float((g - expected[name]).norm()) <= 1e-9 for name, g in engine.grads().items()]


@pytest.mark.medium
@pytest.mark.parametrize("zero", [1, 3])
def test_a_load_drops_what_a_step_under_way_has_gathered(worlds, zero: int, tmp_path: Path) -> None:
    assert all(all(right) for right in worlds(2).run(half_a_step_before_a_load, zero, str(tmp_path)))


def cleared_before_the_others_hear(to_none: bool) -> list[str]:
    """Micro-batch 1 is reduced; the backward of micro-batch 2 raises on rank 1; both ranks clear, and train on."""
    model = DataParallel(toys.Toy())
    optimizer = toys.sgd(list(model.parameters()))
    rank = world.world()[0]

    def backward(index: int, fail: bool = False) -> None:
        x, y = toys.micro_batch(rank, index)
        loss = toys.loss_of(model, x, y)
        if fail and rank:
            model.module.out.weight.register_hook(fails)  # type: ignore[union-attr]
        model.weigh(loss, len(x)).backward()

    backward(0)
    with pytest.raises((ZeroDivisionError, IsogradError)):
        backward(1, fail=True)
    if rank:
        model.module.out.weight._backward_hooks.clear()  # type: ignore[union-attr]
    optimizer.zero_grad(set_to_none=to_none)
    backward(2)
    expected = truth(2)
    return [
        name
        for name, p in model.module.named_parameters()
        if float(((0 if p.grad is None else p.grad) - expected[name]).norm()) > 1e-9
    ]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_cleared_after_a_failed_backward_do_not_come_back(worlds, to_none: bool) -> None:
    """The rank that failed clears before it hears of the others, which clear afterwards: one rank kept the old sum."""
    assert worlds(2).run(cleared_before_the_others_hear, to_none) == [[], []]


def one_rank_with_its_own_rate(layout: str) -> tuple[str, str]:
    model = toys.Toy()
    engine = Engine(model, Mesh(layout), lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1)))
    said = []
    for step in range(2):
        if step and engine.mesh.rank == 1:
            engine.optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
        one_backward(model, engine)
        said.append(refusal(engine.step)[:5])
    return said[0], said[1]


@pytest.mark.parametrize("layout", ["dp2 zero0", "dp2 zero1"])
def test_unlike_learning_rates_are_refused_before_they_part_the_copies(worlds, layout: str) -> None:
    assert worlds(2).run(one_rank_with_its_own_rate, layout) == [("", "IG548")] * 2


def hook_before_the_step(zero: int) -> str:
    model, engine = engine_of(zero)
    engine.optimizer.register_step_pre_hook(lambda *_: None)
    one_backward(model, engine)
    return refusal(engine.step)[:5]


def test_hooks_before_the_step_are_refused_where_they_would_see_rows(worlds) -> None:
    assert worlds(2).run(hook_before_the_step, 1) == ["IG546"] * 2
    assert worlds(2).run(hook_before_the_step, 0) == [""] * 2


def test_a_refusal_holds_no_model() -> None:
    """It says which step was dropped by numbers, and crosses processes as any error does."""
    engine = Engine(torch.nn.Linear(64, 64), Mesh("1"), toys.sgd)
    with pytest.raises(IsogradError) as caught:
        engine.step()
    assert len(pickle.dumps(caught.value)) < 4000
    engine.discard()


def group_of_another_parameter(layout: str) -> list[str]:
    """On rank 1 alone; its optimizer stepped with that rank's gradient, which nobody reduced or cleared."""
    engine = Engine(model := toys.Toy(), Mesh(layout), toys.sgd)
    if engine.mesh.rank == 1:
        engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    said = []
    for _ in range(2):
        one_backward(model, engine)
        said.append(refusal(engine.step)[:5])
    return said


@pytest.mark.parametrize("layout", ["dp2", "dp2 zero1", "dp2 zero3"])
def test_a_parameter_group_that_is_added_later_is_refused_on_all_ranks(worlds, layout: str) -> None:
    assert worlds(2).run(group_of_another_parameter, layout) == [["IG550"] * 2, ["IG504"] * 2]
