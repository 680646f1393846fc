"""`isograd plan CONFIG --brief`: memory and time of a config's own layout in one line, as predicted and as measured.

    isograd plan quickstart.yaml --machine here.yaml --brief --measured runs/quickstart

Memory is what `isograd train` says before it starts: of the rank that needs most, a bound, with Python and torch. Time
is that of isograd/plan; ranks that share the devices of a machine get a part of one each.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from isograd.errors import PlanError
from isograd.layout import Layout

if TYPE_CHECKING:
    from isograd.plan.machine import Machine
    from isograd.train.config import Config


def brief(config: Config, device: Machine, folder: str | None) -> str:
    """The line. `folder`: of a run with this config, which was measured."""
    from isograd.plan.step_time import predict
    from isograd.train.needs import needs, work_of

    layout = Layout.parse(config.layout)
    bytes_needed = max(stage.total for stage in needs(config))
    step = predict(work_of(config), layout, device.shared(layout.world_size))
    between = f"{_seconds(step.low)} to {_seconds(step.high)}"
    expected = f"{bytes_needed / 1e9:.2f} GB a rank, {_seconds(step.seconds)} a step ({between})"
    line = f"plan: {layout} on {device.name}: {expected}"
    if folder is None:
        return line
    memory, seconds = measured(folder)
    return f"{line}; measured: {memory / 1e9:.2f} GB, {_seconds(seconds)}"


def measured(folder: str) -> tuple[float, float]:
    """(bytes of the rank that had most, median seconds of a step) of a run, without the first line of its journal."""
    from isograd.train import journal

    file = Path(folder) / "metrics.jsonl"
    lines = [line for line in journal.read(file) if "seconds_per_step" in line] if file.exists() else []
    if not lines:
        raise PlanError(
            "IG275", f"{folder} has no step that was measured", seen="no metrics.jsonl, or no step in it",
            expected="the folder of a run of 'isograd train'",
        )  # fmt: skip
    seconds = median(line["seconds_per_step"] for line in lines[1:] or lines)
    return max(line["memory_gb"] for line in lines) * 2**30, seconds


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"
