"""What a step costs beside computing: 2,000 parameters of 16 numbers each, at 1, 2 and 4 ranks.

    python -m benchmarks.bookkeeping            # milliseconds per step beyond plain torch's, medians

The same program runs on older versions of isograd: `PYTHONPATH=OTHER/src python -m benchmarks.bookkeeping`.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

import isograd as ig

PARAMETERS, SIZE, STEPS, WARM = 2000, 16, 40, 5


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(torch.randn(SIZE) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.stack(list(self.parts)) @ x).square().mean()


def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, foreach=True)


def plain() -> float:
    """Plain torch on this rank alone, with the norm of all gradients."""
    model, x, times = Many(), torch.randn(SIZE), []
    stepper = optimizer(list(model.parameters()))
    for _ in range(STEPS):
        began = time.process_time()
        model(x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
        times.append(time.process_time() - began)
    return median(times[WARM:])


def engine(layout: str) -> tuple[float, float]:
    """(clock, CPU) seconds of a step under a layout."""
    torch.set_num_threads(1)
    model, x = Many(), torch.randn(SIZE)
    made = ig.Engine(model, ig.Mesh(layout), optimizer, clip=1.0)  # type: ignore[arg-type]
    clock, work = [], []
    for _ in range(STEPS):
        began, worked = time.perf_counter(), time.process_time()
        made.backward(model(x), weight=1)
        made.step()
        clock.append(time.perf_counter() - began)
        work.append(time.process_time() - worked)
    return median(clock[WARM:]), median(work[WARM:])


def main() -> None:
    torch.set_num_threads(1)
    alone = plain()
    print(f"{PARAMETERS} parameters of {SIZE}: plain torch takes {alone * 1e3:.1f} ms of CPU time per step")
    for ranks in (1, 2, 4):
        with ig.World(ranks) as world:
            for zero in (0, 1):
                found = world.run(partial(engine, f"dp{ranks} zero{zero}"))
                clock, work = (median(column) for column in zip(*found, strict=True))
                more = (work - alone) * 1e3
                print(f"dp{ranks} zero{zero}: {clock * 1e3:6.1f} ms by the clock, {more:6.1f} ms of CPU beyond it")


if __name__ == "__main__":
    main()
