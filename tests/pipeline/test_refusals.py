"""What cannot run is refused on every rank with a code, and a stage that fails takes nobody along into a hang."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isograd.comm import raw
from isograd.comm import world as comm_world
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import IsogradError
from isograd.models import Transformer, TransformerConfig
from isograd.pipeline import Stages
from tests.sizes import few

from . import toys

LIMIT = 100.0  # seconds, on a machine that is busy: a rank that waits for one that has gone would wait ten minutes
CONFIG = TransformerConfig(vocab=11, hidden=8, layers=2, heads=2, mlp=12)


def told(what: Callable[..., Any], *args: Any) -> str:
    """What this rank's error says; '' when it ends well."""
    try:
        what(*args)
    except Exception as error:
        last = traceback.format_exception_only(error)[-1].strip() if not isinstance(error, IsogradError) else str(error)
        return f"{type(error).__name__} {last}"
    return ""


def engine_of(
    layout: str,
    modules: list[Any] | None = None,
    split: tuple[int, ...] | None = None,
    loss: Callable[..., Any] = toys.loss_of,
    optimizer: Callable[..., Any] = lambda ps: torch.optim.SGD(ps, lr=0.1),
    **options: Any,
) -> Engine:
    mesh = Mesh(layout)
    model = Stages(modules or toys.plain(), mesh, loss=loss, split=split).double()
    return Engine(model, mesh, optimizer, **options)


def batch(rows: int = 6, seed: int = 0) -> toys.Micro:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (5, 3))  # type: ignore


# -- at start, and at the call that goes wrong: every rank says the same ---------------------------------------------


def transformer_called() -> None:
    tokens = torch.zeros(1, 3, dtype=torch.long)
    Transformer(CONFIG, Mesh("pp2"))(tokens, tokens)


def more_micro_batches_than_rows() -> None:
    engine_of("pp2").train_step(batch(3), micro_batches=4)


def no_micro_batch() -> None:
    engine_of("pp2").train_step([])


def another_count_than_the_list() -> None:
    engine_of("pp2").train_step([batch(), batch()], micro_batches=3)


def tensors_of_different_rows() -> None:
    engine_of("pp2").train_step((torch.zeros(3, 5), torch.zeros(4, 3)))


def foreign_model() -> None:
    Engine(nn.Linear(5, 3), Mesh("pp2"), lambda ps: torch.optim.SGD(ps, lr=0.1))


def foreign_model_on_rank_1() -> None:
    mesh = Mesh("pp2")
    model = Stages(toys.plain(), mesh, loss=toys.loss_of).double() if mesh.rank == 0 else nn.Linear(5, 3)
    Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))


def reproducible_pipeline() -> None:
    engine_of("pp2", reproducible=True)


def plain_backward() -> None:
    engine = engine_of("pp2")
    engine.backward(torch.zeros((), requires_grad=True))


def nothing_to_train() -> None:
    modules = toys.plain()
    for module in modules[:3]:
        module.requires_grad_(False)
    engine_of("pp2", modules)


def more_stages_than_layers() -> None:
    engine_of("pp2", [nn.Linear(5, 3)])


def more_stages_than_blocks() -> None:
    Transformer(CONFIG, Mesh("pp2 vpp2"))


def split_of_other_layers() -> None:
    Transformer(CONFIG, Mesh("pp2"), split=(1, 2))


def stages_called() -> None:
    Stages(toys.plain(), Mesh("pp2"), loss=toys.loss_of)(*batch())


def other_values_on_rank_1() -> None:
    engine_of("pp2").train_step(batch(seed=Mesh("pp2").rank))


def other_rows_on_rank_1() -> None:
    engine_of("pp2").train_step(batch(6 + Mesh("pp2").rank), micro_batches=2)


def more_micro_batches_on_rank_1() -> None:
    engine_of("pp2").train_step(batch(), micro_batches=2 + Mesh("pp2").rank)


def other_shapes_in_a_later_step() -> None:
    engine = engine_of("pp2")
    engine.train_step(batch(), micro_batches=2)
    engine.train_step(batch(6 + engine.mesh.rank), micro_batches=2)


def other_values_in_a_later_step() -> None:
    engine = engine_of("pp2")
    engine.train_step(batch(), micro_batches=2)
    x, y = batch(seed=1)
    engine.train_step((x, y.flip(0) if engine.mesh.rank else y), micro_batches=2)


def other_values_evaluated() -> None:
    engine = engine_of("pp2")
    engine.evaluate(batch())
    engine.evaluate(batch(seed=engine.mesh.rank))


def other_words_beside_the_tensors() -> None:
    engine = engine_of("pp2")
    engine.train_step((*batch(), f"labels of rank {engine.mesh.rank}"), micro_batches=2)


def other_mode_on_rank_1() -> None:
    engine = engine_of("pp2")
    engine.model.train(engine.mesh.rank == 0)
    engine.train_step(batch(), micro_batches=2)


def set_apart(engine: Engine, name: str, value: float, group: int = -1) -> None:
    """A good step; then another number in a group of rank 1, or in its engine, and another step."""
    engine.train_step(batch(), micro_batches=2)
    if engine.mesh.rank and hasattr(engine, name):
        setattr(engine, name, value)
    elif engine.mesh.rank:
        engine.optimizer.param_groups[group][name] = value
    engine.train_step(batch(), micro_batches=2)


def other_rate_on_rank_1() -> None:
    set_apart(engine_of("pp2"), "lr", 0.05)


def other_clip_on_rank_1() -> None:
    set_apart(engine_of("pp2", clip=1.0), "clip", 2.0)


def other_rate_where_stages_have_other_groups() -> None:
    """The first stage has a group more, in front of the common one."""
    set_apart(engine_of("pp2", optimizer=toys.with_groups), "lr", 0.05)


def evaluates_on_rank_1() -> None:
    engine = engine_of("pp2")
    (engine.evaluate if engine.mesh.rank else engine.train_step)(batch())


def unlike_copies_of_a_tie() -> None:
    torch.manual_seed(Mesh("pp2").rank)
    shared = nn.Parameter(torch.randn(8, 8))
    engine_of("pp2", [nn.Linear(5, 8), toys.Use(shared), toys.Use(shared), nn.Linear(8, 3)])


def ties_of_other_shapes() -> None:
    shared = nn.Parameter(torch.ones(8 + 8 * Mesh("pp2").rank, 8))
    engine_of("pp2", [nn.Linear(5, 8), toys.Use(shared), toys.Use(shared), nn.Linear(8, 3)])


REFUSED = {
    transformer_called: "IG415",
    other_values_on_rank_1: "IG516",
    other_values_in_a_later_step: "IG516",
    other_values_evaluated: "IG516",
    other_words_beside_the_tensors: "IG516",
    other_mode_on_rank_1: "IG516",
    other_rate_on_rank_1: "IG548",
    other_clip_on_rank_1: "IG548",
    other_rate_where_stages_have_other_groups: "IG548",
    other_rows_on_rank_1: "IG804",
    more_micro_batches_on_rank_1: "IG804",
    other_shapes_in_a_later_step: "IG804",
    evaluates_on_rank_1: "IG804",
    more_micro_batches_than_rows: "IG518",
    no_micro_batch: "IG518",
    another_count_than_the_list: "IG518",
    tensors_of_different_rows: "IG518",
    foreign_model: "IG519",
    foreign_model_on_rank_1: "IG519",
    reproducible_pipeline: "IG520",
    plain_backward: "IG521",
    nothing_to_train: "IG523",
    more_stages_than_layers: "IG806",
    more_stages_than_blocks: "IG806",
    split_of_other_layers: "IG807",
    stages_called: "IG808",
    unlike_copies_of_a_tie: "IG506",
    ties_of_other_shapes: "IG502",
}


@pytest.mark.parametrize(("what", "code"), REFUSED.items(), ids=lambda x: getattr(x, "__name__", x))
def test_a_refusal_reaches_every_rank(worlds, what: Callable[[], None], code: str) -> None:
    for text in worlds(2).run(told, what, timeout=LIMIT):
        assert f" {code}: " in text, text
        assert "seen:" in text
        assert "expected:" in text


def test_other_batches_are_told_with_the_ranks_that_have_them(worlds) -> None:
    first, second = worlds(2).run(told, more_micro_batches_on_rank_1, timeout=LIMIT)
    assert "2 micro-batches to train on here, unlike those of ranks [1]" in first
    assert "3 micro-batches to train on here, unlike those of ranks [0]" in second
    assert "rank 1 (pp1)" in second


# -- in the middle of a step: one stage fails, and all others say that they only waited ------------------------------


class Failing(nn.Module):
    """Fails at the `at`-th forward (or backward) of a step, on whichever rank holds it."""

    def __init__(self, at: int, backward: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.at, self.backward, self.seen = at, backward, 0

    def count(self, gradient: Any = None) -> None:
        self.seen += 1
        if self.seen > self.at:
            raise ValueError("this stage has had enough")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.backward:
            y.register_hook(self.count)
        else:
            self.count()
        return y  # type: ignore[no-any-return]


def chain(middle: nn.Module) -> list[Any]:
    return [nn.Linear(5, 8), nn.Linear(8, 8), middle, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)]


class Wide(nn.Module):
    """Passes on more columns than the next stage takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Words(Wide):
    def forward(self, x: torch.Tensor) -> Any:
        return {"not": self.linear(x)}


class Moody(Wide):
    """Another shape at the second micro-batch."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.cat([self.linear(x)[:, :8]] * self.calls)


class Complex(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).to(torch.complex128)


def half_loss_of(output: torch.Tensor, micro: toys.Micro) -> tuple[torch.Tensor, int]:
    """Its value has three digits, and so would the weight that it is seeded with."""
    loss, rows = toys.loss_of(output, micro)
    return loss.to(torch.bfloat16), rows


HALF = "is well, and the loss is in half precision"
MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "raises at once": lambda: Failing(0),
    "raises in the third micro-batch": lambda: Failing(2),
    "raises in backward": lambda: Failing(1, backward=True),
    "gives a wrong shape": Wide,
    "gives no tensor": Words,
    "changes its shape": Moody,
    "gives what no header describes": Complex,
    HALF: lambda: nn.Linear(8, 8),
}
# what the stage at fault says; a wrong shape is found by the layer after it, in torch's own words
FAULT = {
    "raises at once": "had enough",
    "raises in the third micro-batch": "had enough",
    "raises in backward": "had enough",
    "gives a wrong shape": "shapes cannot be multiplied",
    "gives no tensor": "IG801",
    "changes its shape": "IG803",
    "gives what no header describes": "IG802",
    HALF: "IG567",
}
FAILURES = [
    *((layout, middle) for middle, layout in zip(MIDDLES, cycle(["pp4", "pp4 gpipe", "pp4 zb"]), strict=False)),
    ("pp4 zb", "raises in backward"),
    ("pp4 evaluated", "raises in the third micro-batch"),
    ("dp2 pp2", "raises in the third micro-batch"),
]


def step_with(layout: str, middle: str) -> None:
    layout, _, evaluated = layout.partition(" evaluated")
    modules = chain(MIDDLES[middle]())
    if Mesh(layout).index("dp"):  # one data rank fails, the other would go on
        modules[2].at = 10**9
    split = {2: (3, 3), 3: (1, 2, 3), 4: (1, 2, 1, 2)}[Mesh(layout).size("pp")]  # the middle ends a stage
    engine = engine_of(layout, modules, split, half_loss_of if middle == HALF else toys.loss_of)
    micros = [batch(seed=n) for n in range(4)]
    if evaluated:
        engine.evaluate(micros)
    else:
        engine.train_step(micros)


def fail_in_turn(directory: str) -> list[str]:
    """Each failure in a world of its own, in the same processes: who leaves must have left."""
    rank, said = int(os.environ["RANK"]), []

    def join_anew(number: int) -> None:
        comm_world.leave()
        place = os.path.join(directory, str(number))
        os.makedirs(place, exist_ok=True)
        comm_world.join(rank, 4, place)

    for number, (layout, middle) in enumerate(FAILURES):
        join_anew(number)
        said.append(told(step_with, layout, middle))
    join_anew(len(FAILURES))
    group = Mesh("dp4").group("dp")
    comm_world.leave()
    said.append(told(raw.all_reduce, torch.ones(1), group))
    return said


AFTERWARDS = "afterwards"


@pytest.fixture(scope="module")
def failures(worlds, tmp_path_factory) -> dict[tuple[str, str], list[str]]:
    """What each of four ranks says of each failure."""
    world = worlds(4)
    said = world.run(fail_in_turn, str(tmp_path_factory.mktemp("failures")), timeout=LIMIT)
    world.close(kill=True)  # the next test gets a world that nobody has left
    return {case: [rank[number] for rank in said] for number, case in enumerate([*FAILURES, ("dp4", AFTERWARDS)])}


CONSEQUENCE = re.compile("IG805|IG213|IG207")


@pytest.mark.parametrize(("layout", "middle"), [case for case in FAILURES if "dp" not in case[0]])
def test_a_failing_stage_is_told_by_all_and_hangs_nobody(failures, layout: str, middle: str) -> None:
    texts = failures[layout, middle]
    at_fault = [rank for rank, text in enumerate(texts) if FAULT[middle] in text and not CONSEQUENCE.search(text)]
    assert len(at_fault) == 1, texts
    for rank, text in enumerate(texts):
        if rank not in at_fault:
            waited = "IG805: another stage of the pipeline ended in the middle of a step" in text
            done = "IG213" in text  # it had done its part, and waited in engine.step
            assert waited or (done and rank > at_fault[0]), (rank, text)
            assert done or f"rank {rank} (pp{rank})" in text
            assert f"rank {at_fault[0]}: " in text or "its pipeline failed" in text, (rank, text)


@pytest.mark.medium
def test_a_collective_after_the_connections_were_closed_says_that_the_run_is_over(failures) -> None:
    assert all("IG207" in text and "resume" in text for text in failures["dp4", AFTERWARDS])


@pytest.mark.medium
def test_the_other_data_ranks_of_a_failing_pipeline_do_not_hang(failures) -> None:
    texts = failures["dp2 pp2", "raises in the third micro-batch"]
    assert any("had enough" in text for text in texts)
    assert all(texts)


def fewer_micro_batches_than_stages() -> tuple[float, float]:
    engine = engine_of("pp3")
    stats = engine.train_step(batch(), micro_batches=1)
    return stats.loss, stats.weight


def test_fewer_micro_batches_than_stages_only_leave_ranks_idle(worlds) -> None:
    results = worlds(3).run(fewer_micro_batches_than_stages, timeout=LIMIT)
    assert len(set(results)) == 1
    assert results[0][1] == 6


# -- real processes, as a launcher starts them -----------------------------------------------------------------------

PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from tests.pipeline.test_refusals import step_with
step_with({layout!r}, {middle!r})
"""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


ENDED = [("pp3 zb", "changes its shape"), ("pp3", "gives a wrong shape")]


@pytest.mark.parametrize("case", few(ENDED, slow=ENDED[1:]), ids=" ".join)
def test_real_processes_end_with_an_error_each(tmp_path: Path, case: tuple[str, str]) -> None:
    layout, middle = case
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(root=str(Path(__file__).parents[2]), layout=layout, middle=middle))
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(3):
        seat = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        env = os.environ | where | seat | {"OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen([sys.executable, str(script)], env=env, stderr=subprocess.PIPE, text=True))
    try:
        said = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(rank.returncode for rank in ranks)
    at_fault = [rank for rank in range(3) if FAULT[middle] in said[rank] and "IG805" not in said[rank]]
    assert len(at_fault) == 1, said
    assert all("IG805" in said[rank] for rank in range(3) if rank not in at_fault), said
