"""A program that watches itself is told what `verify run` would have told, by rank 0, at the end."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules.module import _global_forward_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode

import isograd_verify
from isograd_verify.errors import ConfigError, VerifyError
from isograd_verify.inside import watching
from isograd_verify.record.events import Backward
from isograd_verify.record.recording import Recording
from isograd_verify.run.ranks import LocalRanks
from isograd_verify.tell.findings import BUG, PASS
from isograd_verify.watch.life import Steps

from . import loops

Worlds = Callable[[int], LocalRanks]


def program(home: str) -> tuple[str, list[str]]:
    """Means of means, in a model and an optimizer that were made before the watching began."""
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(loops.network(0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(home, steps="first, every 3") as w:
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
    assert recording.steps == [1, 3]
    assert not recording.ranks[0].group(1, "final"), "sketches alone, unless whole=True"
    assert recording.ranks[1].about["finished"]
    assert (tmp_path / "rank-0000" / "step-0001.safetensors").stat().st_size < 80_000


def test_the_page_s_lines_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program without a name of a file in docs/verify.md: the three lines, and the one that counts labels."""
    page = (Path(__file__).parents[1] / "docs" / "verify.md").read_text()
    lines, weighed = re.findall(r"\n\n```python\n(.*?)\n```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model = loops.network(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(3):
            tokens, labels = loops.batch(0, step)
            logits, labels = model(tokens).flatten(0, 1), labels.flatten()
            names = {"isograd_verify": isograd_verify, "fused_cross_entropy": F.cross_entropy}
            names |= {"logits": logits, "labels": labels}
            exec(weighed, names)
            names["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

    exec(lines, {"train": train})
    assert "(1 PASS, 0 BUG, 0 INCONCLUSIVE)" in capsys.readouterr().out


def test_a_folder_that_holds_a_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank-0000").mkdir()
    with pytest.raises(VerifyError, match="IG702"), watching(tmp_path):
        pass


def test_steps_between_watched_ones_have_no_hooks(tmp_path: Path) -> None:
    model = loops.network(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked = []
    with watching(tmp_path / "here", steps="2,every 4") as w:
        for step in range(9):
            x, y = loops.batch(0, step)
            model.register_forward_hook(lambda *_: hooked.append(bool(_global_forward_hooks)))
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            model._forward_hooks.clear()
            assert (_get_current_dispatch_mode() is not None) == hooked[-1]
            optimizer.step()
            optimizer.zero_grad()
    assert [number for number, seen in enumerate(hooked, 1) if seen] == [1, 2, 4, 8]
    assert w.report is not None and w.report.verdict == PASS, w.report
    recording = Recording(tmp_path / "here")
    assert recording.steps == [1, 2, 4, 8]
    assert all(recording.ranks[0].group(8, "part")) and len(recording.ranks[0].of(Backward)) == 4


@pytest.mark.parametrize(
    ("text", "watched"), [("2", [1, 2]), ("first", [1]), ("first, every 3", [1, 3, 6]), (3, [1, 2, 3])]
)
def test_which_steps_are_watched_is_said_in_words(text: str | int, watched: list[int]) -> None:
    assert [step for step in range(1, 7) if Steps.of(text).watches(step)] == watched


@pytest.mark.parametrize("text", ["", "0", "-1", "every", "every 0", "last", "1.5", "first;every 3"])
def test_words_that_name_no_steps_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="IG622"):
        Steps.of(text)


def test_lightnings_callback_watches_between_fits_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a stand-in for Lightning's class, which is not installed here; notes/ has a run of the real one."""
    stand_in = types.ModuleType("lightning.pytorch.callbacks")
    stand_in.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", stand_in)
    callback = isograd_verify.lightning_callback(tmp_path / "here", steps="first")
    model = loops.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback.on_fit_start(None, model)
    x, y = torch.arange(6).view(2, 3), torch.arange(6)
    F.cross_entropy(model(x).flatten(0, 1), y).backward()
    optimizer.step()
    callback.on_fit_end(None, model)
    assert callback.watching.report.verdict == PASS


def test_a_callback_watches_between_its_trainers_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = isograd_verify.trainer_callback(tmp_path / "here", steps=1)
    model = loops.network()
    callback.on_train_begin(None, None, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.arange(6).view(2, 3), torch.arange(6)
    F.cross_entropy(model(x).flatten(0, 1), y).backward()
    optimizer.step()
    callback.on_train_end(None, None, None)
    assert callback.watching.report.verdict == PASS
    assert "steps: 1" in capsys.readouterr().out
