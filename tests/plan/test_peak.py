"""The peak that a rehearsal predicts is what torch's allocator counts in a running step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.models import Transformer, TransformerConfig
from isograd.plan.rehearse import rehearse, without_memory

CONFIG = TransformerConfig(vocab=500, hidden=128, layers=2, heads=4, kv_heads=2, mlp=344)


def build(mesh: Mesh, device: str | None = "meta") -> tuple[Engine, Any, int]:
    model = Transformer(CONFIG, mesh, device=device)
    if device == "meta":
        without_memory(model)
    engine = Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, fused=True), clip=1.0)
    tokens = torch.zeros(8, 64, dtype=torch.int64)
    return engine, (tokens, tokens), 2


@pytest.mark.medium
def test_a_predicted_peak_is_what_the_allocator_counts_within_one_percent() -> None:
    engine, batch, micro_batches = build(Mesh("dp1"), None)
    engine.train_step(batch, micro_batches)
    states = sum(t.nbytes for state in engine.optimizer.state.values() for t in state.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine.train_step(batch, micro_batches)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = top = sum(p.nbytes for p in engine.model.parameters()) + states
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        top = max(top, held)
    (rank,) = rehearse(build, Layout())
    assert rank.peak.bytes == pytest.approx(top, rel=0.01)
    assert rank.peak.kinds["parameters"] == pytest.approx(rank.parameters, rel=0.01)
    assert rank.peak.kinds["optimizer"] == pytest.approx(states, rel=0.01)
    assert rank.peak.when in ("forward 2 of 2", "backward 2 of 2")


def test_a_peak_names_its_owners() -> None:
    first, second = (rehearse(build, Layout.parse(layout))[0].peak for layout in ("dp2 zero1", "dp2 zero3"))
    assert first.kinds["optimizer"] == pytest.approx(second.kinds["optimizer"], rel=0.01)
    assert any(owner == "parameters: gathered (ZeRO 3)" for owner, _ in second.owners)
    assert not any("gathered" in owner for owner, _ in first.owners)
    assert len(first.owners) == 10
    for peak in (first, second):
        assert sum(peak.kinds.values()) == peak.bytes
