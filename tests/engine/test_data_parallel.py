"""DataParallel: torch's DDP to the last name where ranks weigh alike, the gradient of one device where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from isograd.comm import ops, raw, world
from isograd.core.mesh import Mesh
from isograd.engine import DataParallel, Engine
from isograd.errors import IsogradError
from tests.parity import mutants

from . import toys


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], truth: dict[str, Tensor], what: str = "") -> None:
    assert found.keys() == truth.keys(), what
    for name, expected in truth.items():
        error = float((found[name].double() - expected.double()).norm())
        assert error <= 1e-9 * float(expected.double().norm()), f"{what} {name}: error {error:.2e}"


# -- a loss over other ranks' features


def of_pairs(features: Tensor, own: range) -> Tensor:
    """The mean over one's own rows of a loss that looks at everybody's features."""
    return (features[own.start : own.stop] @ features.T).logsumexp(1).sum() / max(1, len(own))


def gathered(rows: list[int]) -> dict[str, Tensor]:
    """`rows`: of which each rank's loss is the mean; a rank may have none, and still gives features to the others."""
    rank, ranks = world.world()
    torch.manual_seed(0)
    model = DataParallel(nn.Linear(3, 2, dtype=torch.float64))
    x = torch.randn(4 * ranks, 3, dtype=torch.float64)[4 * rank : 4 * rank + 4]
    features = ops.all_gather(model(x), model._group)
    loss = of_pairs(features, range(4 * rank, 4 * rank + rows[rank]))
    model.weigh(loss, rows[rank]).backward()
    return gradients(model.module)


@pytest.mark.parametrize("rows", [[3, 0], [0, 4], [2, 1]])
def test_a_rank_that_weighs_nothing_brings_what_others_made_of_its_features(worlds, rows: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    features = model(torch.randn(8, 3, dtype=torch.float64))
    losses = [of_pairs(features, range(4 * rank, 4 * rank + count)) * count for rank, count in enumerate(rows)]
    (sum(losses) / sum(rows)).backward()  # type: ignore[union-attr]
    for found in worlds(2).run(gathered, rows):
        assert_close(found, gradients(model))


# -- weighed: one device


def weighed(pattern: str, total: int, steps: int = 2) -> toys.Outcome:
    """Uneven micro-batches, one of them empty with a NaN loss; a torch optimizer, and clipping by hand."""
    rank, ranks = world.world()
    model, outcome = DataParallel(toys.Toy(), bucket_cap_mb=0.02), toys.Outcome()
    optimizer = toys.adamw([p for p in model.parameters() if p.requires_grad])
    share = total // ranks
    for step in range(steps):
        rows, losses = 0, 0.0
        for j in range(share):
            x, y = toys.micro_batch(step, rank * share + j)
            with model.no_sync() if pattern[j : j + 1] == "n" else nullcontext():
                loss = toys.loss_of(model, x, y)
                model.weigh(loss, len(x)).backward()
            rows, losses = rows + len(x), losses + (float(loss.detach()) * len(x) if len(x) else 0.0)
        if step == 0:
            outcome.gradients = gradients(model.module)
        sums = sum(raw.gather_list(torch.tensor([rows, losses], dtype=torch.float64), model._group))
        outcome.losses.append(float(sums[1] / sums[0]))  # type: ignore[index]
        outcome.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 1)
    outcome.parameters = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    return outcome


def weighed_in_every_order(total: int) -> None:
    share = total // world.world()[1]
    truth = toys.one_device(total, 2, toys.adamw, 0.5)
    for pattern in product("sn", repeat=share - 1):
        outcome = weighed("".join(pattern), total)
        assert "unused.weight" not in outcome.gradients
        toys.assert_same_training(outcome, truth)


@pytest.mark.medium
@pytest.mark.parametrize(("ranks", "total"), [(1, 2), (2, 6), (4, 4)])
def test_weighed_backwards_give_the_gradient_of_one_device_whichever_sync(worlds, ranks: int, total: int) -> None:
    worlds(ranks).run(partial(weighed_in_every_order, total))


# -- not weighed: torch's DDP


class Shared(nn.Module):
    """Tied weights, a frozen one, one that only odd ranks use, one that nobody does, a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 7)
        self.norm = nn.BatchNorm1d(7)
        self.body = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.odd = nn.Linear(7, 7)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: Tensor, odd: bool) -> dict[str, list[Tensor]]:
        x = self.frozen(torch.tanh(self.body(self.norm(self.embed(tokens)))))
        return {"logits": [self.head(self.odd(x) if odd else x)]}


Wrap = Callable[[nn.Module], nn.Module]


def seen_in_a_loop(wrap: Wrap, pattern: str, to_none: bool) -> Iterator[dict[str, Tensor]]:
    """Gradients and buffers after each reduction. 's' syncs, 'n' does not, 'z' clears, '*' changes what is there."""
    rank, _ = world.world()
    module = Shared()
    model = wrap(module)
    for number, what in enumerate(pattern):
        if what == "z":
            model.zero_grad(set_to_none=to_none)
            continue
        if what == "*":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            continue
        source = torch.Generator().manual_seed(100 * rank + number)
        tokens = torch.randint(11, (5,), generator=source)
        with model.no_sync() if what == "n" else nullcontext():  # type: ignore[operator]
            (logits,) = model(tokens, odd=bool(rank % 2))["logits"]
            torch.nn.functional.cross_entropy(logits, tokens.roll(1)).backward()
        if what == "s":
            yield gradients(module)
    yield {name: buffer.clone().double() for name, buffer in module.named_buffers()} if rank == 0 else {}


def as_ddp(patterns: list[str]) -> None:
    ddp = partial(DistributedDataParallel, find_unused_parameters=True)
    for pattern, to_none in product(patterns, (True, False)):
        pairs = zip(seen_in_a_loop(DataParallel, pattern, to_none), seen_in_a_loop(ddp, pattern, to_none), strict=True)
        for ours, theirs in pairs:
            assert_close(ours, theirs, f"{pattern} to_none={to_none}:")


@pytest.mark.parametrize("ranks", [2, 3])
def test_without_weights_gradients_are_those_of_torchs_ddp(worlds, ranks: int) -> None:
    """Also where gradients are not cleared, cleared within a window, or clipped and added to."""
    worlds(ranks).run(as_ddp, ["szs", "nnszns", "ssnns", "nzszss", "s*s", "nns*nszs"])


# -- ranks without a batch


def ranks_run_out_of_batches() -> None:
    """Rank r has 3 - r batches. With SGD: what one device does with the union of each round."""
    rank, ranks = world.world()
    model = DataParallel(toys.Toy())
    optimizer = toys.sgd(list(model.parameters()))
    rounds = 0
    for batch in model.until_all_exhausted(toys.micro_batch(9 + rank, 2 * j) for j in range(3 - rank)):
        if batch is None:
            with model.no_sync():
                model.skip()  # nothing to take part in
            model.skip()
        else:
            toys.loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        rounds += 1
    assert rounds == 3
    truth = toys.Toy()
    optimizer = toys.sgd(list(truth.parameters()))
    for j in range(3):
        batches = [toys.micro_batch(9 + r, 2 * j) for r in range(ranks) if j < 3 - r]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        toys.loss_of(truth, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(dict(model.module.named_parameters()), dict(truth.named_parameters()))


# -- names


def parameters_of_the_loss_alone() -> None:
    """Their gradients come before those of any output, from which the rows of a batch are known."""
    rank, ranks = world.world()
    batches = [torch.randn(1 + 4 * r, 3, dtype=torch.float64, generator=seeded(r)) for r in range(ranks)]

    def loss_of(model: nn.Module, module: nn.Module, x: Tensor) -> Tensor:
        return (model(x).square().sum(1) * torch.exp(-module.noise) + module.noise).mean()

    one, module = (linear().double() for _ in range(2))
    for each in (one, module):
        each.weight.data.fill_(0.5)
        each.bias.data.fill_(0.25)
        each.register_parameter("noise", nn.Parameter(torch.tensor(0.3, dtype=torch.float64)))
    loss_of(one, one, torch.cat(batches)).backward()
    model = DataParallel(module)
    for sync in (nullcontext, model.no_sync):
        model.zero_grad()
        with sync():
            loss_of(model, module, batches[rank]).backward()
        if sync is not nullcontext:
            loss_of(model, module, batches[rank]).backward()
            for parameter in module.parameters():
                parameter.grad /= 2
        assert_close(gradients(module), gradients(one), sync.__name__)


def past_the_model_on_one_rank() -> None:
    """The other one is told why; the next step is right."""
    rank, ranks = world.world()
    model, one = DataParallel(linear()), linear()
    one.load_state_dict(model.state_dict())
    with pytest.raises(IsogradError, match="IG550(.|\n)*IG549" if rank else "IG549"):
        (model if rank else model.module)(torch.ones(2 + rank, 3)).mean().backward()
    model.zero_grad()
    batches = [torch.randn(1 + 4 * r, 3, generator=seeded(r)) for r in range(ranks)]
    model(batches[rank]).square().mean().backward()
    one(torch.cat(batches)).square().mean().backward()
    for name, expected in gradients(one).items():
        error = (gradients(model.module)[name] - expected).norm()
        assert float(error) <= 1e-6 * float(expected.norm()), name


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def names_of_a_state_dict() -> None:
    torch.manual_seed(world.world()[0])  # unlike, until the first rank's values are broadcast
    plain, model = Shared(), DataParallel(Shared())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.state_dict()._metadata == plain.state_dict()._metadata
    plain.load_state_dict(model.state_dict())
    for prefix in ("", "module."):  # DDP's files have the latter
        other = DataParallel(Shared())
        nn.init.zeros_(other.module.body.weight)
        other.load_state_dict({prefix + name: value for name, value in plain.state_dict().items()})
        assert torch.equal(other.module.body.weight, plain.body.weight)
    outer = nn.ModuleDict({"inner": DataParallel(nn.ModuleDict({"module": nn.Linear(2, 2)}))})
    assert list(outer.state_dict()) == ["inner.module.weight", "inner.module.bias"]
    outer.load_state_dict(outer.state_dict())
    with pytest.raises(RuntimeError, match=r"body\.weight"):
        model.load_state_dict({n: v for n, v in plain.state_dict().items() if n != "body.weight"})


# -- what else people do


class Recomputed(nn.Module):
    """One layer in two recomputed pieces: reentrant recompute brings its gradient in two parts."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.layer = nn.Linear(13, 13).double(), nn.Linear(13, 13).double()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return x


def mean_of_rows(module: nn.Module, loss: Callable[[nn.Module, int], Tensor], ranks: int) -> dict[str, Tensor]:
    """One device's gradient: each rank's loss is a mean over the rows of its micro-batch."""
    rows = [len(toys.micro_batch(rank, 2)[0]) for rank in range(ranks)]
    module.zero_grad()
    sum(loss(module, rank) * rows[rank] for rank in range(ranks)).backward()  # type: ignore[union-attr]
    return {name: gradient / sum(rows) for name, gradient in gradients(module).items()}


def recomputed() -> None:
    rank, ranks = world.world()

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(toys.micro_batch(rank, 2)[0]).square().sum()  # type: ignore[no-any-return]

    for reentrant in (False, True):
        model = DataParallel(Recomputed(reentrant), bucket_cap_mb=1e-4)
        truth = mean_of_rows(Recomputed(False), loss, ranks)
        for _ in range(2):
            loss(model, rank).backward()
            assert_close(gradients(model.module), truth, f"reentrant={reentrant}")
            model.zero_grad()


def several_forwards_and_losses_and_gradients_of_inputs() -> None:
    rank, ranks = world.world()
    model = DataParallel(toys.Toy())

    def loss(model: nn.Module, rank: int) -> Tensor:
        x, y = toys.micro_batch(rank, 2)
        return toys.loss_of(model, x, y) + toys.loss_of(model, x.flip(0) * 2, y) * 3

    x, y = toys.micro_batch(rank, 2)
    x.requires_grad_()
    penalty = toys.loss_of(model, x, y)
    (slope,) = torch.autograd.grad(penalty, x, create_graph=True)  # reaches no parameter: nobody waits for anybody
    assert slope.abs().sum() > 0 and not gradients(model)
    total = loss(model, rank)
    total.backward(retain_graph=True)
    truth = mean_of_rows(toys.Toy(), loss, ranks)
    assert_close(gradients(model.module), truth)
    total.backward()
    assert_close(gradients(model.module), {name: 2 * gradient for name, gradient in truth.items()})


def gradients_that_are_zero_still_weigh() -> None:
    """A margin that all samples keep: the first backward's weight counts although its gradient is zero everywhere.
    And a loss over no sample, NaN with its gradient, counts nothing."""
    rank, _ = world.world()
    model = DataParallel(nn.Linear(3, 1, dtype=torch.float64))
    for count, slope in ((5, 0.0), (0, torch.nan), (2, 1.0 + rank)):
        with model.no_sync() if count != 2 else nullcontext():
            loss = (model(torch.ones(4, 3, dtype=torch.float64)) * slope).mean()
            model.weigh(loss, count).backward()
    assert torch.allclose(model.module.bias.grad, torch.tensor([(2 + 4) / 14], dtype=torch.float64), rtol=1e-12)


def failed_backward_then_another() -> None:
    """An exception in a backward leaves nothing behind that would spoil the next."""
    rank, ranks = world.world()
    model = DataParallel(toys.Toy(), bucket_cap_mb=1e-4)
    truth = mean_of_rows(toys.Toy(), lambda m, r: toys.loss_of(m, *toys.micro_batch(r, 2)), ranks)
    x, y = toys.micro_batch(rank, 2)
    for place in range(toys.Failing.PLACES):  # every parameter in turn has its gradient, the next one has not
        broken = toys.Failing(model.module, place)
        with pytest.raises(ZeroDivisionError), broken:
            toys.loss_of(model, x, y).backward()
        if place % 2:
            model.zero_grad()
        toys.loss_of(model, x, y).backward()
        assert_close(gradients(model.module), truth, f"after a failure at {place}:")
        model.zero_grad()


def half_precision_is_summed_in_single() -> None:
    rank, ranks = world.world()
    for unsynced in (False, True):
        model = DataParallel(toys.Toy(torch.bfloat16))
        expected: dict[str, Tensor] = {}
        for r in range(ranks):
            alone = toys.Toy(torch.bfloat16)
            for j in (0, 2) if unsynced else (0,):
                x, y = toys.micro_batch(r, j)
                toys.loss_of(alone, x, y).backward()
                for name, gradient in gradients(alone).items():
                    expected[name] = expected.get(name, 0) + gradient.float() * len(x)
                alone.zero_grad()
        for j in (0, 2) if unsynced else (0,):
            with model.no_sync() if unsynced and j == 0 else nullcontext():
                toys.loss_of(model, *toys.micro_batch(rank, j)).backward()
        indices = (0, 2) if unsynced else (0,)
        rows = sum(len(toys.micro_batch(r, j)[0]) for r in range(ranks) for j in indices)
        for name, gradient in gradients(model.module).items():
            error = (gradient.double() - expected[name].double() * len(indices) / rows).norm()
            assert error <= 2**-8 * expected[name].double().norm() * len(indices) / rows, name


def buffers_follow_the_first_rank() -> None:
    rank, _ = world.world()
    for follow in (True, False):
        model = DataParallel(Shared(), broadcast_buffers=follow)
        source = torch.Generator().manual_seed(rank)
        model(torch.randint(11, (6,), generator=source), odd=True)["logits"][0].sum().backward()
        means = raw.gather_list(model.module.norm.running_mean, model._group)
        assert torch.equal(means[0], means[1]) == follow


def an_engine_takes_over() -> None:
    rank, ranks = world.world()
    module = DataParallel(toys.Toy()).module
    engine = Engine(module, Mesh(f"dp{ranks} zero1"), toys.sgd)
    x, y = toys.micro_batch(rank, 2)
    engine.backward(toys.loss_of(module, x, y), len(x))
    found = {name: gradient.clone() for name, gradient in engine.grads().items() if "unused" not in name}
    truth = mean_of_rows(toys.Toy(), lambda m, r: toys.loss_of(m, *toys.micro_batch(r, 2)), ranks)
    assert_close(found, truth)


@pytest.mark.medium
@pytest.mark.parametrize(
    "act",
    [
        ranks_run_out_of_batches,
        parameters_of_the_loss_alone,
        past_the_model_on_one_rank,
        names_of_a_state_dict,
        recomputed,
        several_forwards_and_losses_and_gradients_of_inputs,
        gradients_that_are_zero_still_weigh,
        failed_backward_then_another,
        half_precision_is_summed_in_single,
        buffers_follow_the_first_rank,
        an_engine_takes_over,
    ],
    ids=lambda act: act.__name__,
)
def test_what_else_people_do_with_ddp(worlds, act: Callable[[], None]) -> None:
    worlds(2).run(act)


# -- refusals


def linear() -> nn.Linear:
    return nn.Linear(3, 2)


def some_weighed() -> None:
    rank, _ = world.world()
    model = DataParallel(linear())
    loss = model(torch.ones(2, 3)).sum()
    (model.weigh(loss, 3) if rank == 1 else loss).backward()


def past_the_model() -> None:
    DataParallel(linear()).module(torch.ones(2, 3)).mean().backward()


def past_the_model_in_a_window() -> None:
    model = DataParallel(linear())
    with model.no_sync():
        model.module(torch.ones(2, 3)).mean().backward()
    model(torch.ones(2, 3)).mean().backward()


def weighed_in_part() -> None:
    inside = linear()
    inside.register_parameter("noise", nn.Parameter(torch.ones(())))
    model = DataParallel(inside)
    (model.weigh(model(torch.ones(2, 3)).mean(), 2) + inside.noise.square()).backward()


def weighed_below_zero() -> None:
    model = DataParallel(linear())
    model.weigh(model(torch.ones(2, 3)).sum(), -1)


def unfrozen_later() -> None:
    model = DataParallel(nn.Sequential(linear().requires_grad_(False), nn.Linear(2, 2)))
    model.module[0].requires_grad_(True)
    model(torch.ones(2, 3)).sum().backward()


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: DataParallel(linear(), find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True), ""),
    (lambda: DataParallel(linear(), process_group=None, dim=0, init_sync=True, bucket_cap_mb=1), ""),
    (lambda: DataParallel(linear(), init_sync=False), "IG533"),
    (lambda: DataParallel(linear(), bucket_cap=3), "IG533"),
    (lambda: DataParallel(linear(), ["cpu"], "cpu"), ""),
    (lambda: DataParallel(linear(), [0]), "IG534"),
    (lambda: DataParallel(linear(), output_device="meta"), "IG534"),
    (some_weighed, "IG535"),
    (weighed_below_zero, "IG515"),
    (past_the_model, "IG549"),
    (past_the_model_in_a_window, "IG549"),
    (weighed_in_part, "IG538"),
    (unfrozen_later, "IG517"),
    (lambda: DataParallel(linear().requires_grad_(False)), "IG501"),
]


def code(index: int) -> str:
    try:
        REFUSED[index][0]()
    except IsogradError as error:
        return error.code
    return ""


def all_codes() -> list[str]:
    return [code(index) for index in range(len(REFUSED))]


def test_what_would_be_silently_wrong_is_refused_on_every_rank_and_the_rest_is_not(worlds) -> None:
    assert worlds(2).run(all_codes) == [[expected for _, expected in REFUSED]] * 2


# -- broken on purpose


def broken() -> list[str]:
    """The ways to break what ranks tell each other that none of the above would notice."""
    survivors = []
    for site in mutants.sites():
        if str(site) == "engine/step_status.py:gather:raw.gather":
            ways, trial = ["removed", "doubled", "averaged", "one member only"], partial(weighed_in_every_order, 6)
        elif str(site) == "engine/data_parallel.py:_equal_buffers:raw.broadcast_":
            ways, trial = ["removed"], partial(buffers_follow_the_first_rank)
        else:
            continue
        for way in ways:
            try:
                with mutants.broken_site(site, way):
                    trial()
                survivors.append(f"{site}: {way}")
            except AssertionError:
                pass
    return survivors


def test_without_what_ranks_tell_each_other_gradients_are_wrong(worlds) -> None:
    assert worlds(2).run(broken) == [[], []]
