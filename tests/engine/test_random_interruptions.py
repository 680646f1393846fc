"""An exception at a random call of a random rank's step: every later step is right on all ranks, or refused on all.

Ranks are threads. A profile function counts the calls of isograd's own functions that a rank makes in its second step,
and raises at one of them. What a rank believes to have taken is compared, loss by loss and norm by norm, with one
device that takes the same steps.

    python -m tests.engine.test_random_interruptions 2000      # by hand; prints where exceptions came
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import isograd as ig
from isograd.comm import threads
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.nn import ExpertOptions

SOURCE = str(Path(ig.__file__).parent)
STEPS, VICTIM_STEP = 5, 1
LAYOUTS = (
    "dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sp", "cp2 ring", "cp2 ulysses", "pp2", "pp2 zb",
    "dp2 ep2", "dp2 tp2 sp zero1", "dp2 pp2 zero1", "dp2 cp2 ring zero3",
)  # fmt: skip
KINDS = (KeyboardInterrupt, RuntimeError, TimeoutError, MemoryError, torch.OutOfMemoryError)
AFTER = ("discard", "nothing", "retry")
Taken = tuple[tuple[int, float, float], ...]  # step, loss, norm


class Raises:
    """A profile function: counts calls of isograd's functions, and raises at one of them."""

    def __init__(self, at: int | None, error: BaseException) -> None:
        self.at, self.error, self.calls, self.place = at, error, 0, ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCE) or code.co_filename.endswith("threads.py"):
            return
        self.calls += 1
        if self.calls == self.at:
            sys.setprofile(None)
            self.place = f"{Path(code.co_filename).name}:{code.co_name}"
            raise self.error


def batch(step: int, mesh: Mesh) -> dict[str, torch.Tensor]:
    tokens = torch.randint(17, (4, 6), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    labels[0, : 1 + step % 4] = -100  # uneven
    rows = 4 // mesh.size("dp")
    here = slice(mesh.index("dp") * rows, (mesh.index("dp") + 1) * rows)
    return {"tokens": tokens[here], "labels": labels[here]}


def trained(layout: str, steps: tuple[int, ...], victim: int | None, at: int | None, kind: type, after: str) -> Any:
    """(the steps that this rank has taken, calls in the victim's step, where it was hit, what was raised)."""
    mesh = Mesh(layout)
    routed = mesh.layout.ep > 1 or after == "ep"
    experts = ExpertOptions(number=4, per_token=2, width=8, balance="none") if routed else None
    config = ig.models.TransformerConfig(vocab=17, hidden=16, layers=2, heads=2, mlp=12, experts=experts)
    model = ig.models.Transformer(config, mesh, seed=1).double()
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1), bucket_mb=1e-3)
    taken: list[tuple[int, float, float]] = []
    said: list[str] = []
    hit = Raises(at, kind("injected"))
    micros = 2 if mesh.layout.pp > 1 or 4 // mesh.size("dp") > 1 else 1
    for step in steps:
        tries = 2 if step == VICTIM_STEP and after == "retry" else 1
        while tries:
            tries -= 1
            try:
                if mesh.rank == victim and step == VICTIM_STEP and not hit.place:
                    sys.setprofile(hit)
                try:
                    stats = engine.train_step(batch(step, mesh), micros)
                finally:
                    sys.setprofile(None)
                taken.append((step, stats.loss, stats.grad_norm))
                break
            except (*KINDS, ig.IsogradError) as error:
                said.append(f"step {step}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                if after == "nothing":  # the next call is refused, on all ranks together
                    tries += engine.step_state.failure is not None and not isinstance(error, ig.IsogradError)
                    continue
                try:
                    engine.discard()
                except (*KINDS, ig.IsogradError) as refusal:
                    said.append(f"discard: {type(refusal).__name__}: {refusal}"[:150])
    return tuple(taken), hit.calls, hit.place, said


@cache
def truth(steps: tuple[int, ...], experts: bool) -> Taken:
    """One device that takes these steps."""
    found: Taken = threads.run(trained, 1, "dp1", steps, None, None, RuntimeError, "ep" if experts else "discard")[0][0]
    return found


@cache
def calls_of(layout: str, victim: int) -> int:
    ranks = Layout.parse(layout).world_size
    found = threads.run(trained, ranks, layout, (0, 1), victim, None, RuntimeError, "discard", timeout=60)
    return int(found[victim][1])


def one(seed: int) -> tuple[str, str]:
    """(layout, where the exception came)."""
    draw = random.Random(seed)
    layout = LAYOUTS[seed % len(LAYOUTS)]
    ranks, experts = Layout.parse(layout).world_size, "ep" in layout.split()[-1]
    victim, kind, after = draw.randrange(ranks), draw.choice(KINDS), draw.choice(AFTER)
    at = draw.randint(1, calls_of(layout, victim))
    what = f"seed {seed}: {layout}, rank {victim}, {kind.__name__} at call {at}, then {after}"
    run = partial(threads.run, trained, ranks, layout, tuple(range(STEPS)), victim, at, kind, after, timeout=30)
    try:
        found = run()
    except ig.IsogradError as error:
        raise AssertionError(f"{what}: {error}") from error
    place = found[victim][2]
    told = "\n".join(f"rank {r}: took {[row[0] for row in found[r][0]]}; {found[r][3][:3]}" for r in range(ranks))
    orders = [tuple(step for step, _, _ in taken) for taken, *_ in found]
    longest = max(orders, key=len)
    for order in orders:  # ranks differ at most in the last step that any of them took
        assert order == longest or order == longest[:-1], f"{what} ({place})\n{told}"
    exact = truth(longest, experts)
    for taken, *_ in found:
        for (step, loss, norm), (_, true_loss, true_norm) in zip(taken, exact, strict=False):
            close = abs(loss - true_loss) <= 1e-9 * abs(true_loss) and abs(norm - true_norm) <= 1e-9 * true_norm
            numbers = f"step {step}: loss {loss} for {true_loss}, norm {norm} for {true_norm}"
            assert close, f"{what} ({place})\n{numbers}\n{told}"
    return layout, place


@pytest.mark.parametrize("first", range(0, 98, 14))
def test_a_step_is_right_or_refused_wherever_an_exception_comes(first: int) -> None:
    for seed in range(first, first + 14):
        one(seed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    places: Counter[tuple[str, str]] = Counter()
    wrong = 0
    for number in range(int(sys.argv[2]) if len(sys.argv) > 2 else 0, int(sys.argv[1])):
        try:
            places[one(number)] += 1
        except AssertionError as error:
            wrong += 1
            print(error, flush=True)
    for name in LAYOUTS:
        print(name, ", ".join(f"{p} {n}" for (at, p), n in places.most_common() if at == name)[:600])
    print(f"{wrong} wrong of {sum(places.values()) + wrong}")
