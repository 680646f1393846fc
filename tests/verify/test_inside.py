"""A program that watches itself is told what `verify run` would have told, by rank 0, at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import isograd
from isograd.comm.launch import World
from isograd.errors import VerifyError
from isograd.verify.inside import watching
from isograd.verify.record.recording import Recording
from isograd.verify.tell.findings import BUG, PASS
from tests.verify import loops

Worlds = Callable[[int], World]


def program(home: str) -> tuple[str, list[str]]:
    """Means of means, in a model and an optimizer that were made before the watching began."""
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(loops.network(0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(home, steps=2) as w:
        for step in range(4):
            x, y = loops.batch(rank, step)
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return ("", []) if w.report is None else (w.report.verdict, [f.bug for f in w.report.findings(BUG)])


def test_three_lines_tell_what_run_would_tell(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds(2).run(partial(program, str(tmp_path)))
    assert first == (BUG, ["mean-of-means"])
    assert second == ("", [])
    recording = Recording(tmp_path)
    assert recording.steps == [1, 2]
    assert not recording.ranks[0].group(1, "final"), "sketches alone, unless whole=True"
    assert recording.ranks[1].about["finished"]
    assert (tmp_path / "rank-0000" / "step-0001.safetensors").stat().st_size < 80_000


def test_a_folder_that_holds_a_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank-0000").mkdir()
    with pytest.raises(VerifyError, match="IG702"), watching(tmp_path):
        pass


def test_a_callback_watches_between_its_trainers_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = isograd.verify.trainer_callback(tmp_path / "here", steps=1)
    model = loops.network()
    callback.on_train_begin(None, None, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.arange(6).view(2, 3), torch.arange(6)
    F.cross_entropy(model(x).flatten(0, 1), y).backward()
    optimizer.step()
    callback.on_train_end(None, None, None)
    assert callback.watching.report.verdict == PASS
    assert "steps: 1" in capsys.readouterr().out
