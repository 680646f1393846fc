"""Random steps against their definition (engine/naive.py): whatever a step goes through, its gradient is right, or the
step is refused on every rank and the next one starts from nothing.

    python -m tests.engine.test_step 2000     # as many sequences, by hand
"""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isograd.core.contract import Shard, assemble, declare
from isograd.core.mesh import DATA, Mesh
from isograd.engine import Engine, LossScale, naive
from isograd.errors import EngineError
from isograd.launcher.launch import World

from .step_terms import step_of_terms


class Net(nn.Module):
    """Odd sizes, a scalar, a module used twice, branches that a rank may leave out, one that nobody uses; and rows that
    are cut over ep, of which a rank uses its own: their owners are other ranks than those of everything else."""

    BRANCHES = 3
    OWN = (12, 16)

    def __init__(self, mesh: Mesh, whole: bool = False) -> None:
        """`whole`: all rows, for the definition."""
        super().__init__()
        shard = Shard.even("ep", 0, self.OWN[0], mesh.size("ep"))
        start, stop = shard.ranges[mesh.index("ep")]
        rows = torch.randn(self.OWN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.own = nn.Parameter(rows if whole else rows[start:stop].clone())
        self.rows = slice(start, stop) if whole else slice(None)
        self.nan_over_none = mesh.size("ep") == 1  # under ep such a loss is refused: IG524
        self.at_zero_3 = mesh.layout.zero == 3
        if not whole:
            declare(self.own, mesh, shape=self.OWN, shards=(shard,), data="edp")
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.twice = nn.Linear(7, 7)
        for i in range(self.BRANCHES):  # no list of modules: at ZeRO 3 they are gathered with the rest
            self.add_module(f"branch{i}", nn.Linear(7, 7))
        self.unused = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(7, 3, bias=False)
        self.double()

    def forward(self, x: Tensor, branches: list[int]) -> Tensor:
        x = torch.tanh(self.twice(torch.tanh(self.twice(self.first(x)))))
        for i in branches:
            x = x + torch.tanh(self.get_submodule(f"branch{i}")(x)) * self.gain
        if branches:
            x = x * torch.tanh(self.own[self.rows, :7]).mean(0)
        return self.out(x).square()


def loss_of(model: nn.Module, rows: int, branches: list[int], seed: int) -> Tensor:
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = model(x, branches)
    return y.mean() if model.nan_over_none else y.sum() / max(1, y.numel())  # type: ignore[no-any-return]


class Stop(Exception):
    """What a user's hook raises."""


class Steps:
    """One random sequence on this rank; `self.random` draws the same on all ranks."""

    def __init__(self, seed: int, terms: bool = True) -> None:
        """terms: some steps, drawn by themselves, have several terms."""
        self.random = random.Random(seed)
        self.terms = random.Random(-1 - seed) if terms else None
        self.seed = seed
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.zero = self.random.randrange(4)
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        self.mesh = Mesh(f"dp{ranks} ep{divisors[seed % len(divisors)]} zero{self.zero}")
        self.options: dict[str, Any] = {
            "overlap": self.random.random() < 0.8,
            "reproducible": self.random.random() < 0.2,
            "bucket_mb": self.random.choice([1e-4, 5e-4, 16.0]),
        }
        if self.terms and self.terms.random() < 0.3:
            self.options["loss_scale"] = LossScale(4.0)
        self.model, self.twin = Net(self.mesh), Net(self.mesh, whole=True)
        self.engine = Engine(self.model, self.mesh, lambda ps: torch.optim.SGD(ps, lr=0.01), **self.options)
        self.losses: list[tuple[Tensor, float]] = []
        self.number = 0
        self.log: list[str] = []

    @property
    def mine(self) -> int:
        return self.mesh.index(DATA)

    def draw(self) -> tuple[int, list[int], int]:
        """(rows, branches, seed) of this rank's next backward. At ZeRO 3 every rank calls the same modules."""
        self.number += 1
        rows = [self.random.choice([0, 1, 3, 4]) for _ in range(self.mesh.size(DATA))]
        branches = [[i for i in range(Net.BRANCHES) if self.random.random() < 0.7] for _ in rows]
        if self.zero == 3:
            branches = [branches[0] for _ in rows]
        seed = 1000 * self.seed + 10 * self.number + self.mine
        return rows[self.mine], branches[self.mine], seed

    def add(self, rows: int, branches: list[int], seed: int) -> None:
        self.losses.append((loss_of(self.twin, rows, branches, seed), rows))

    def backward(self) -> None:
        rows, branches, seed = self.draw()
        with self.engine.no_sync() if self.random.random() < 0.4 else nullcontext():
            self.engine.backward(loss_of(self.model, rows, branches, seed), weight=rows)
        self.add(rows, branches, seed)

    def backward_of_some(self) -> None:
        """Ranks run different numbers of backwards that do not reduce."""
        rows, branches, seed = self.draw()
        runs = [self.random.random() < 0.5 for _ in range(self.mesh.size(DATA))]
        if self.zero == 3 or not runs[self.mine]:
            return
        with self.engine.no_sync():
            self.engine.backward(loss_of(self.model, rows, branches, seed), weight=rows)
        self.add(rows, branches, seed)

    def several_in_one(self) -> None:
        """Two losses, and a gradient of a weight by itself, as one backward."""
        drawn = [self.draw(), self.draw()]
        alone, scale = self.model.out.weight, self.engine.loss_scale.value if self.engine.loss_scale else 1.0
        with self.engine.backward_context() as step_state:
            for number, (rows, branches, seed) in enumerate(drawn):
                step_state.backward_loss(loss_of(self.model, rows, branches, seed), rows, last=number == 1)
            if self.zero < 3:
                step_state.run_backward([alone], [torch.full_like(alone, 0.25 * scale)], last=False)
        for item in drawn:
            self.add(*item)
        if self.zero < 3:
            weight = self.twin.out.weight
            self.losses.append(((weight * 0.25).sum(), 1.0))
            self.losses.append((weight.sum() * 0, -1.0))  # it brought no weight of its own

    def fail(self) -> None:
        """A hook raises on some ranks, which then discard or learn that the step is refused."""
        rows, branches, seed = self.draw()
        failing = [self.random.random() < 0.6 for _ in range(self.mesh.size(DATA))]
        names = ["out.weight", "twice.weight", "first.bias", "first.weight"]
        name, synced = self.random.choice(names), self.random.random() < 0.6

        def stop(_: Tensor) -> None:
            raise Stop("out of memory, say")

        with self.engine.no_sync() if not synced else nullcontext():
            loss = loss_of(self.model, max(rows, 1), branches, seed)
            hook = self.model.get_parameter(name).register_hook(stop) if failing[self.mine] else None
            try:
                self.engine.backward(loss, weight=max(rows, 1))
                assert not failing[self.mine] and not (self.zero == 3 and any(failing))
            except Stop:
                assert failing[self.mine]
            except EngineError as error:  # at ZeRO 3 ranks meet at the end of a backward, and hear of it there
                assert self.zero == 3 and any(failing) and error.code == "IG571"
            if hook is not None:
                hook.remove()
        again = self.random.random() < 0.5
        if any(failing) and failing[self.mine] and again and self.zero < 3:
            with pytest.raises(EngineError, match="IG550"):
                self.engine.backward(loss_of(self.model, 1, [], seed), weight=1)
        if any(failing):
            self.leave(refused=True)
        else:
            self.add(max(rows, 1), branches, seed)

    def leave(self, refused: bool) -> None:
        """The step ends without a number; on ranks that step it is refused."""
        discards = [self.random.random() < 0.5 for _ in range(self.mesh.size(DATA))]
        if not refused and not any(discards):
            discards = [True for _ in discards]
        if discards[self.mine]:
            self.engine.discard()
        else:
            with pytest.raises(EngineError, match=r"IG550|IG558"):
                self.engine.step() if self.random.random() < 0.5 else self.engine.grads()
            if any(discards):  # behind its handler, as a program does that is the same on all ranks: dropped already
                self.engine.discard()
        self.random.seed(self.number)  # ranks have drawn differently
        self.losses = []
        assert self.engine.step_state.empty

    def discard(self) -> None:
        self.leave(refused=False)

    def evaluate(self) -> None:
        rows, branches, seed = self.draw()
        with torch.no_grad():
            loss_of(self.model, max(1, rows), branches if self.zero < 3 else [], seed)

    def check(self) -> None:
        """The gradient so far is the definition's."""
        weight = sum(w for _, w in self.losses)
        total = torch.tensor(float(weight), dtype=torch.float64)
        from isograd.comm import raw

        if not float(sum(raw.gather_list(total, self.mesh.group(DATA)))) > 0:
            with pytest.raises(EngineError, match="IG512"):
                self.engine.grads()
            self.losses = []
            return
        self.compare(naive.gradients(dict(self.twin.named_parameters()), self.losses, self.mesh))

    def compare(self, truth: dict[str, Tensor]) -> None:
        scale = max(float(g.norm()) for g in truth.values())
        for name, found in self.engine.grads().items():
            error = float((found - truth[name]).norm())
            assert error <= 1e-12 * max(scale, 1e-3), f"seed {self.seed} {self.log}: {name}: error {error:.1e}"

    def step(self) -> None:
        self.check()
        if self.engine.step_state.empty:
            return
        assert not self.engine.step().skipped
        self.copy_to_twin()
        self.losses = []

    def copy_to_twin(self) -> None:
        with self.engine.full_parameters(), torch.no_grad():
            for record in self.engine.table:
                whole = assemble(record.parameter, record.contract, self.mesh)
                self.twin.get_parameter(record.name).copy_(whole)

    def run(self) -> None:
        acts = [self.backward] * 5 + [self.backward_of_some, self.several_in_one, self.fail, self.fail, self.discard]
        acts += [self.evaluate, self.check, self.step, self.step]
        for _ in range(8):
            if self.terms and self.terms.random() < 0.15:
                self.log.append("step_of_terms")
                step_of_terms(self, self.terms)
            act = self.random.choice(acts)
            self.log.append(act.__name__)
            act()
        self.backward()
        self.log.append("step")
        self.step()


def sequences(first: int, count: int, terms: bool = True) -> None:
    for seed in range(first, first + count):
        try:
            steps = Steps(seed, terms)
            steps.run()
        except BaseException as error:
            raise AssertionError(f"seed {seed}, zero{steps.zero} {steps.options}, {steps.log}: {error!r}") from error


MORE = [pytest.param(ranks, count, marks=pytest.mark.slow) for ranks, count in ((2, 35), (3, 35), (4, 24))]


@pytest.mark.parametrize(("ranks", "count"), [(1, 35), (2, 14), (3, 14), *MORE])
def test_a_random_sequence_gives_the_gradient_of_its_definition_or_is_refused(worlds, ranks: int, count: int) -> None:
    worlds(ranks).run(partial(sequences, 100 * ranks, count))


@pytest.mark.medium
def test_a_rank_that_has_settled_settles_again_when_another_rank_has_more(worlds) -> None:
    """Found by hand among 2,100: `grads`, then a backward under no_sync on some ranks; those landed for ever."""
    worlds(3).run(partial(sequences, 30_658, 1, terms=False))


if __name__ == "__main__":
    for ranks in (1, 2, 3, 4):
        with World(ranks) as world:
            for first in range(0, int(sys.argv[1]) // 4, 50):
                world.run(partial(sequences, 10_000 * ranks + first, 50), timeout=600)
                print(f"{ranks} ranks: {first + 50} sequences", flush=True)
