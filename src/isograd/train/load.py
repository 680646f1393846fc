"""What a log says of experts: how evenly tokens were spread over them in a step. 1 is an even share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from isograd import inside
from isograd.comm.notes import gather_notes
from isograd.mesh import Mesh
from isograd.nn import MoE
from isograd.train import journal

Load = Mapping[str, Sequence[float]]


def load_of(model: nn.Module, mesh: Mesh) -> Load:
    """The load of each expert by layer, of all pipeline stages; all ranks call this. Empty without experts."""
    if not any(isinstance(module, MoE) for module in model.modules()) and mesh.size("pp") == 1:
        return {}
    mine = {
        name: [round(share, 3) for share in found.tolist()]
        for name, module in model.named_modules()
        if isinstance(module, MoE) and (found := module.relative_load()) is not None
    }
    return {name: load for note in gather_notes(mine, mesh.group("pp"), mesh.device) for name, load in note.items()}


def draw(metrics: Path, to: Path) -> bool:
    """A heat map of each layer's experts (down) over steps (across). False without experts or matplotlib."""
    rows = [(line["step"], line["load"]) for line in journal.read(metrics) if line.get("load")]
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not rows:
        return False
    layers = list(rows[-1][1])
    figure = Figure(figsize=(8, 1 + 1.5 * len(layers)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
    for axis, layer in zip(axes, layers, strict=True):
        shares = [[load[layer][expert] for _, load in rows] for expert in range(len(rows[-1][1][layer]))]
        logs = [[math.log2(max(share, 1 / 16)) for share in line] for line in shares]
        shown = axis.imshow(logs, aspect="auto", cmap="coolwarm", vmin=-2, vmax=2, interpolation="nearest")
        axis.set(ylabel=layer, yticks=[])
    axes[-1].set_xticks(range(len(rows)), [str(step) for step, _ in rows], fontsize="x-small", rotation=90)
    axes[-1].set_xlabel("step")
    figure.colorbar(shown, ax=list(axes), label="load, log2 of an even share")
    partial = to.with_suffix(".partial.png")
    with inside.opened(partial, "wb") as picture:
        figure.savefig(picture, dpi=120, format="png")
    partial.replace(to)
    return True
