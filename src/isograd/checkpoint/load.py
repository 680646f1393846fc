"""Brings an engine to a saved state: every rank reads its own boxes, whatever layout wrote them.

First it is seen whether the checkpoint is of this model and optimizer at all; if not, that is an error which names the
tensors. Then everything is read and every hash checked. When any rank finds damage, all ranks go to the next older
checkpoint together, which overwrites what was read: so nothing but a whole checkpoint is ever returned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isograd.checkpoint import folder as folders
from isograd.checkpoint.agree import raise_alike
from isograd.checkpoint.files import DTYPES, TORCH
from isograd.checkpoint.hugging import describe
from isograd.checkpoint.manifest import Damage, Manifest
from isograd.checkpoint.read import Reader
from isograd.comm.agree import told
from isograd.comm.notes import gather_notes
from isograd.engine import Engine, state
from isograd.errors import CheckpointError, IsogradError, did_you_mean

SHOWN = 8
# Options of isograd's models that a run may change when it resumes. All others decide what the model computes.
FREE = {"dropout", "attention_dropout", "init_std", "max_positions"}
FREE_OF_EXPERTS = {"choice_bias_rate", "balance", "balance_weight", "z_weight"}


@dataclass(frozen=True)
class Loaded:
    """What was loaded, and what the saver said beside it."""

    step: int
    extra: dict[str, Any]
    path: Path
    layout: str  # that saved it
    passed_over: tuple[str, ...] = ()  # newer checkpoints that are damaged or not finite, and why


def load(engine: Engine, folder: Path, source: str | Path, beat: Callable[[str], None]) -> Loaded | None:
    """Load the newest good checkpoint, or the given one; `beat` is called for each tensor that this rank reads.

    What a step under way has gathered is dropped: it belongs to the parameters that are replaced.
    """
    mesh = engine.mesh
    if not all(told(engine.ledger.empty, mesh)):
        state.drop_step(engine)
    mine = _together(engine, lambda: _choices(folder, source))
    choices = [Path(name) for name in told([str(place) for place in mine], mesh)[0]]  # as rank 0 sees them
    damaged = []
    for place in choices:
        try:
            found = _load(engine, place, beat)
        except Damage as damage:
            damaged.append(f"{place.name}: {damage}")
            continue
        if damaged and mesh.rank == 0:
            warnings.warn(f"loaded {place.name}, as what is newer is damaged: {'; '.join(damaged)}", stacklevel=3)
        return replace(found, passed_over=tuple(damaged))
    if damaged:
        raise CheckpointError(
            "IG936",
            "no whole checkpoint" if source == "auto" else f"the checkpoint {source} is damaged",
            seen="; ".join(damaged),
            expected="files with the sizes and hashes that manifest.json lists, and finite values in them",
            fix="'isograd ckpt verify' lists every damaged tensor; load another checkpoint, or start anew elsewhere",
        )
    return None


def _choices(folder: Path, source: str | Path) -> list[Path]:
    """Newest first."""
    if source == "auto":
        return [place for _, place in reversed(folders.checkpoints(folder))]
    path = Path(source)
    return [folders.one_of(path)]


def _load(engine: Engine, place: Path, beat: Callable[[str], None]) -> Loaded:
    """Raises Damage on all ranks when any finds some."""
    reader = _together(engine, lambda: Reader(place))
    assert reader is not None
    try:
        _refuse_other_model(engine, reader.manifest, place)
        _refuse_other_optimizer(engine, reader.manifest, place)
        _together(engine, lambda: _read(engine, reader, beat))
    finally:
        reader.close()
    state.take_numbers(engine, reader.manifest.numbers)
    state.settle(engine)
    return Loaded(reader.manifest.step, reader.manifest.extra, place, reader.manifest.layout)


def _together(engine: Engine, run: Any) -> Any:
    """Damage that one rank finds is raised by all; so is an error."""
    result, damage, error = None, None, None
    try:
        result = run()
    except Damage as found:
        damage = str(found)
    except IsogradError as found:
        error = found
    raise_alike(error, engine.mesh)
    first = next((said for said in told(damage, engine.mesh) if said), None)
    if first is not None:
        raise Damage(first)
    return result


@torch.no_grad()
def _read(engine: Engine, reader: Reader, beat: Callable[[str], None]) -> None:
    """Fill this rank's memory; raises Damage when the values are not finite, which older versions have saved."""
    states: dict[str, dict[str, torch.dtype]] = {}
    for key, saved in reader.manifest.tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            what, _, name = rest.partition("/")
            states.setdefault(name, {})[what] = TORCH[saved.dtype]
    held = state.make_room(engine, states)
    same = reader.manifest.layout == str(engine.mesh.layout)  # each rank is then the one that saved
    ours = [part for part in state.generators(engine.mesh) if same and part.key in reader.manifest.tensors]
    parts = [*state.parts(engine, held), *ours]
    for part in parts:
        if part.tensor.numel():
            beat(f"reading {part.key}")
            reader.fill(part.key, part.box, part.tensor)
    wrong = state.not_finite(parts, reader.manifest.numbers["counts"])
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise Damage(f"NaN or Inf in {', '.join(wrong[:SHOWN])}{more}")
    state.take_generators(ours, engine.mesh)


# -- what does not fit -----------------------------------------------------------------------------------------------


def _refuse_other_model(engine: Engine, manifest: Manifest, place: Path) -> None:
    """Parameters, masters and buffers are the same ones, with the same shapes and dtypes, on all stages together."""
    saved = {key: kept for key, kept in manifest.tensors.items() if not key.startswith(("optimizer/", "generator/"))}
    held = {part.key: part for part in state.parts(engine)}
    here = {key: (DTYPES.get(part.tensor.dtype), list(part.shape)) for key, part in held.items()}
    there = {key: (kept.dtype, list(kept.shape)) for key, kept in saved.items()}
    everywhere = _of_all_stages(here, engine)
    wrong = [f"{key} is not in the checkpoint{did_you_mean(key, saved)}" for key in here if key not in saved]
    wrong += [
        f"{key} is {there[key][0]} {there[key][1]} there and {dtype} {shape} here"
        for key, (dtype, shape) in here.items()
        if there.get(key, (dtype, shape)) != (dtype, shape)
    ]
    wrong += [f"{key} is not in this model{did_you_mean(key, everywhere)}" for key in saved if key not in everywhere]
    unlike = _unlike(manifest.model, describe(engine.model))
    error = CheckpointError(
        "IG937",
        f"{place.name} is a checkpoint of another model",
        seen=_listed([*_cast(there, here), *unlike[: SHOWN // 2], *([_listed(wrong)] if wrong else [])]),
        expected="the same options, and the same names, global shapes and dtypes",
        fix="build the model with the config that was saved: 'isograd ckpt inspect' shows what it is of",
        where=engine.mesh.where(),
    )
    raise_alike(error if wrong or unlike else None, engine.mesh)


def _refuse_other_optimizer(engine: Engine, manifest: Manifest, place: Path) -> None:
    """The same parameters are trained, each by the same kind of optimizer."""
    there = {name: group["kind"] for group in manifest.numbers["groups"] for name in group["names"]}
    here = state.kinds(engine)
    everywhere = _of_all_stages(here, engine)
    wrong = [
        f"{n} was stepped by {there[n]} and is by {here[n]} here" for n in here if there.get(n, here[n]) != here[n]
    ]
    wrong += [f"{name} was frozen there and is trained here" for name in here if name not in there]
    wrong += [f"{name} was trained there and is frozen here" for name in there if name not in everywhere]
    error = CheckpointError(
        "IG938",
        f"{place.name} has the state of another optimizer",
        seen=_listed(wrong),
        expected="the optimizer that saved it, for the same trainable parameters",
        fix="use that optimizer again; or take the weights alone: weights=ig.checkpoint.SavedWeights(path), or "
        "'isograd ckpt convert' and model.path in a config",
        where=engine.mesh.where(),
    )
    raise_alike(error if wrong else None, engine.mesh)


def _unlike(there: dict[str, Any] | None, here: dict[str, Any] | None) -> list[str]:
    """The options in which two models of isograd differ, and so compute different things, even with equal shapes."""
    if there is None or here is None or not there["kind"] == here["kind"] == "isograd":
        return []
    before, now = _options(there["config"]), _options(here["config"])
    names = [name for name in before if name in now and before[name] != now[name]]
    return [f"{name} is {before[name]!r} there and {now[name]!r} here" for name in names]


def _options(config: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in config.items() if name not in FREE and name != "experts"}
    experts = config.get("experts") or {}
    return found | {f"experts.{name}": value for name, value in experts.items() if name not in FREE_OF_EXPERTS}


def _cast(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """When parameters have another dtype: their masters are in the one and not in the other."""
    before, now = (
        ", ".join(sorted({str(dtype) for key, (dtype, _) in found.items() if key.startswith("model/")}))
        for found in (there, here)
    )
    return [f"parameters are {before} there and {now} here"] if before != now else []


def _of_all_stages(mine: Iterable[str], engine: Engine) -> set[str]:
    return {name for names in gather_notes(sorted(mine), engine.mesh.group("pp"), engine.mesh.device) for name in names}


def _listed(wrong: list[str]) -> str:
    return "; ".join(wrong[:SHOWN]) + (f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
