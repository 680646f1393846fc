"""How often a long run should save, and what share of its time makes progress.

Failures come at random, at a constant rate, on any rank; each ends the step of all ranks. After one the run restarts
(restart_s) and does again what it had done since its last checkpoint. Restarts can fail, too. With w seconds of work
between checkpoints, m seconds between failures, and e^x the exponential, a part of w + save seconds takes on average

    m e^(restart / m) (e^((w + save) / m) - 1)      (Daly 2006, equation 13)

and the best w is found by bisection on its derivative; sqrt(2 save m) (Young 1974) is its limit for rare failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isograd.errors import PlanError

LEAST, MOST = 1e-12, 1e12  # of what is given: beyond any run


@dataclass(frozen=True)
class Goodput:
    """The interval between checkpoints that loses least, and what is left of the time."""

    between_failures_s: float  # on average
    interval_s: float  # of work between two checkpoints
    share: float  # of the time that makes progress which is kept


def goodput(failures_per_rank_hour: float, ranks: int, save_s: float, restart_s: float) -> Goodput:
    """The best interval, and its share."""
    given = {
        "failures for each rank and hour": failures_per_rank_hour, "ranks": ranks, "seconds of a save": save_s,
        "seconds of a restart": restart_s,
    }  # fmt: skip
    wrong = [f"{name}: {value}" for name, value in given.items() if not LEAST < value < MOST]
    if wrong:
        expected = f"more than {LEAST:g}, less than {MOST:g}"
        what = "goodput is defined for positive numbers only"
        raise PlanError("IG277", what, seen="; ".join(wrong), expected=expected)
    mean = 3600 / (failures_per_rank_hour * ranks)
    interval = best_interval(mean, save_s)
    return Goodput(mean, interval, share(interval, mean, save_s, restart_s))


def share(interval_s: float, mean_s: float, save_s: float, restart_s: float) -> float:
    """Work that is kept, over the time that it takes on average."""
    if (interval_s + save_s + restart_s) / mean_s > 700:
        return 0.0  # beyond what a float can hold: no part ever gets done
    return interval_s / (mean_s * math.exp(restart_s / mean_s) * math.expm1((interval_s + save_s) / mean_s))


def best_interval(mean_s: float, save_s: float) -> float:
    """Where 1 - x = e^-(x + save / mean), x the interval over the mean: the derivative of the share is 0 there."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - middle > math.exp(-middle - save_s / mean_s) else (low, middle)
    return low * mean_s
