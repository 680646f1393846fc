"""Brings an engine to a saved state: every rank reads its own boxes, whatever layout wrote them.

First it is seen whether the checkpoint is of this model and optimizer at all; if not, that is an error which names the
tensors. Then everything is read and every hash checked. When any rank finds damage, all ranks go to the next older
checkpoint together, which overwrites what was read: so nothing but a whole checkpoint is ever returned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch

from isograd.checkpoint import folder as folders
from isograd.checkpoint.agree import raise_alike
from isograd.checkpoint.files import DTYPES, TORCH
from isograd.checkpoint.manifest import CheckpointManifest, Damage, Saved, describe_model
from isograd.checkpoint.read import Reader
from isograd.comm.consensus import all_gather_object
from isograd.core.rng import set_random_state
from isograd.engine import Engine, state
from isograd.engine.ema import average_of, switch
from isograd.engine.muon import members
from isograd.errors import CheckpointError, IsogradError, did_you_mean, listed
from isograd.io.store import Place, place_of

SHOWN = 8
NO_MODEL = ("optimizer/", "generator/", "ema/")
# Options of isograd's models that a run may change when it resumes. All others decide what the model computes.
FREE = {"dropout", "attention_dropout", "init_std", "max_positions"}
# What torch's optimizers keep for each parameter that they have stepped.
_ADAM = ("step", "exp_avg", "exp_avg_sq")
KEPT = {
    "Adam": _ADAM, "AdamW": _ADAM, "RAdam": _ADAM, "NAdam": _ADAM,
    "Adamax": ("step", "exp_avg", "exp_inf"), "Adagrad": ("step", "sum"), "RMSprop": ("step", "square_avg"),
    "Adadelta": ("step", "square_avg", "acc_delta"), "Rprop": ("step", "prev", "step_size"),
    "ASGD": ("step", "ax"), "Muon": ("momentum_buffer",), "SGD": (),
}  # fmt: skip
# And under an option.
KEPT_WITH = {
    "amsgrad": "max_exp_avg_sq",
    "centered": "grad_avg",
    "momentum": "momentum_buffer",  # of RMSprop; SGD does without
}
LATER = ("decoupled_weight_decay",)  # options that older versions of torch do not have
FREE_OF_EXPERTS = {"choice_bias_rate", "balance", "balance_weight", "z_weight"}


@dataclass(frozen=True)
class Loaded:
    """What was loaded, and what the saver said beside it."""

    step: int
    extra: dict[str, Any]
    path: Place
    layout: str  # that saved it
    skipped_damaged: tuple[str, ...] = ()  # newer checkpoints that are damaged or not finite, and why


def load(engine: Engine, folder: Place, source: str | Place, beat: Callable[[str], None]) -> Loaded | None:
    """Load the newest good checkpoint, or the given one; `beat` is called for each tensor that this rank reads.

    What a step under way has gathered is dropped: it belongs to the parameters that are replaced.
    """
    mesh = engine.mesh
    if not all(all_gather_object(engine.step_state.empty, mesh)):
        state.drop_step(engine)
    mine = _together(engine, lambda: _choices(folder, source))
    names = all_gather_object([str(place) for place in mine], mesh)[0]  # as rank 0 sees them
    damaged = []
    for place in map(place_of, names):
        try:
            found = _load(engine, place, beat)
        except Damage as damage:
            damaged.append(f"{place.name}: {damage}")
            continue
        if damaged and mesh.rank == 0:
            warnings.warn(f"loaded {place.name}, as what is newer is damaged: {'; '.join(damaged)}", stacklevel=3)
        return replace(found, skipped_damaged=tuple(damaged))
    if damaged:
        raise CheckpointError(
            "IG936", seen="; ".join(damaged), place=f"every checkpoint in {folder}" if source == "auto" else source
        )
    return None


def _choices(folder: Place, source: str | Place) -> list[Place]:
    """Newest first."""
    if source == "auto":
        return [place for _, place in reversed(folders.checkpoints(folder))]
    return [folders.one_of(place_of(source))]


def _load(engine: Engine, place: Place, beat: Callable[[str], None]) -> Loaded:
    """Raises Damage on all ranks when any finds some."""
    reader = _together(engine, lambda: Reader(place))
    assert reader is not None
    try:
        _refuse_other_model(engine, reader.manifest, place)
        _refuse_other_optimizer(engine, reader.manifest, place)
        _together(engine, lambda: _check_state(engine, reader.manifest))
        _refuse_other_switches(engine, reader.manifest, place)
        try:
            _together(engine, lambda: _read(engine, reader, beat))
        except BaseException:  # what was read until then is in the model
            engine.step_state.mark_inconsistent(f"a load of {place.name} that failed half way")
            raise
    finally:
        reader.close()
    state.take_numbers(engine, reader.manifest.numbers)
    state.refresh_masters(engine)
    average = average_of(engine)
    if average is not None and not _has_averages(reader.manifest):
        average.restart()
    switch(engine, "train")
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
    first = next((said for said in all_gather_object(damage, engine.mesh) if said), None)
    if first is not None:
        raise Damage(first)
    return result


@torch.no_grad()
def _read(engine: Engine, reader: Reader, beat: Callable[[str], None]) -> None:
    """Fill this rank's memory; raises Damage when the values are not finite, which older versions have saved."""
    states: dict[str, dict[str, state.Memory]] = {}
    for key, saved in reader.manifest.tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            what, _, name = rest.partition("/")
            states.setdefault(name, {})[what] = TORCH[saved.dtype], saved.shape
    held = state.make_room(engine, states)
    same = reader.manifest.layout == str(engine.mesh.layout)  # each rank is then the one that saved
    ours = [part for part in state.generators(engine.mesh) if same and part.key in reader.manifest.tensors]
    for part in ours:
        saved = reader.manifest.tensors[part.key]
        if (saved.shape, saved.dtype) != (part.shape, DTYPES[part.tensor.dtype]):
            raise Damage(f"{part.key}: {saved.dtype} {list(saved.shape)}, no state of a generator")
    averages = _has_averages(reader.manifest)
    parts = [part for part in state.parts(engine, held) if averages or not part.key.startswith("ema/")] + ours
    for part in parts:
        if part.tensor.numel():
            beat(f"reading {part.key}")
            reader.fill(part.key, part.box, part.tensor)
    wrong = state.not_finite(parts, reader.manifest.numbers["counts"])
    if wrong:
        raise Damage(f"NaN or Inf in {listed(wrong, SHOWN)}")
    if ours:
        set_random_state([part.tensor for part in ours], engine.mesh.device)


def _has_averages(manifest: CheckpointManifest) -> bool:
    """Without any a run that keeps averages begins them with the weights; with some it needs all."""
    return any(key.startswith("ema/") for key in manifest.tensors)


def _refuse_other_model(engine: Engine, manifest: CheckpointManifest, place: Place) -> None:
    """Parameters, masters and buffers are the same ones, with the same shapes and dtypes, on all stages together."""
    saved = {key: kept for key, kept in manifest.tensors.items() if not key.startswith(NO_MODEL)}
    held = {part.key: part for part in state.parts(engine) if not part.key.startswith(NO_MODEL)}
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
    unlike = _unlike(manifest.model, describe_model(engine.model))
    told = [*_cast(there, here), *unlike[: SHOWN // 2], *([listed(wrong, SHOWN, "; ")] if wrong else [])]
    seen = listed(told, SHOWN, "; ")
    error = CheckpointError("IG937", seen=seen, where=engine.mesh.describe_rank(), place=place.name)
    raise_alike(error if wrong or unlike else None, engine.mesh)


def _refuse_other_optimizer(engine: Engine, manifest: CheckpointManifest, place: Place) -> None:
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
        "IG938", seen=listed(wrong, SHOWN, "; "), where=engine.mesh.describe_rank(), name=place.name
    )
    raise_alike(error if wrong else None, engine.mesh)


def _refuse_other_switches(engine: Engine, manifest: CheckpointManifest, place: Place) -> None:
    """Numbers of the optimizer are the checkpoint's; what makes its step another one (`maximize`) is the run's."""
    here: dict[tuple[str, str], set[object]] = {}
    for member in members(engine.optimizer):
        ours = isinstance(member, getattr(torch.optim, type(member).__name__, ()))  # others keep modes there
        for key, value in [item for g in (member.defaults, *member.param_groups) for item in g.items() if ours]:
            here.setdefault((type(member).__name__, key), set()).add(value if isinstance(value, bool) else None)
    wrong = [
        f"{key} is {value} there and {not value} here"
        for group in manifest.numbers["groups"]
        if not state.kinds(engine).keys().isdisjoint(group["names"])
        for key, value in group["options"].items()
        if isinstance(value, bool) and value not in here.get((group["kind"], key), {value})
    ]
    error = CheckpointError(
        "IG938", seen=listed(wrong, SHOWN, "; "), where=engine.mesh.describe_rank(), name=place.name
    )
    raise_alike(error if wrong else None, engine.mesh)


def _check_state(engine: Engine, manifest: CheckpointManifest) -> None:
    """Raise Damage where torch's optimizers would not find what they keep of a parameter, or options that they take."""
    held: dict[str, dict[str, str]] = {}  # {parameter: {entry: dtype of a tensor, "" of a number}}
    for entry, values in manifest.numbers["counts"].items():
        for name, (_, dtype) in values.items():
            held.setdefault(name, {})[entry] = "" if dtype else "a plain number"
    for key, saved in manifest.tensors.items():
        entry, _, name = key.removeprefix("optimizer/").partition("/")
        if key.startswith("optimizer/"):
            held.setdefault(name, {})[entry] = saved.dtype
    for member in members(engine.optimizer):
        kind = type(member).__name__
        theirs: Any = getattr(torch.optim, kind, None) if kind in KEPT else None
        if theirs is not None and isinstance(member, theirs):
            for number, group in enumerate(manifest.numbers["groups"]):
                if group["kind"] == kind:
                    _check_options(f"numbers.groups.{number}.options", theirs, member.defaults, group["options"])
                    more = [KEPT_WITH[key] for key in KEPT_WITH if group["options"].get(key) and kind != "SGD"]
                    for name in group["names"]:
                        _check_kept(name, (*KEPT[kind], *more), held.get(name, {}), manifest.tensors)


def _check_kept(name: str, entries: Iterable[str], held: dict[str, str], tensors: dict[str, Saved]) -> None:
    """A parameter that was never stepped has no state; all others have all of it."""
    stepped = tensors.get(f"master/{name}") or tensors.get(f"model/{name}")
    for entry in entries if held and stepped is not None else ():
        assert stepped is not None
        expected = "" if entry == "step" else stepped.dtype
        kept = tensors.get(f"optimizer/{entry}/{name}")
        if kept is not None and kept.shape != stepped.shape:
            raise Damage(f"{entry} of {name} has the shape {list(kept.shape)} in place of {list(stepped.shape)}")
        if held.get(entry) != expected:
            seen = f"is {held[entry] or 'a number in a tensor'}" if entry in held else "is not in the checkpoint"
            raise Damage(f"{entry} of {name} {seen}, and has to be {expected or 'a number in a tensor'}")


def _check_options(place: str, kind: Any, here: dict[str, Any], options: dict[str, Any]) -> None:
    """By the types of the options that this run has, and by the optimizer's own constructor."""
    for key in here:
        if key not in options and key not in (*state.HOW, *LATER):
            raise Damage(f"{place}.{key} is not in the checkpoint")
    for key, value in options.items():
        if key in state.HOW:
            raise Damage(f"{place}.{key}: how an optimizer computes on a machine is not saved")
        if any(isinstance(n, float) and abs(n) > torch.finfo(torch.float32).max for n in _flat(value)):
            raise Damage(f"{place}.{key}: {value!r} is beyond fp32, in which optimizers step")
        own = here.get(key)
        own = own.tolist() if isinstance(own, torch.Tensor) else own
        if own is not None and _type(value) != _type(own):
            raise Damage(f"{place}.{key}: {repr(value)[:80]} in place of what is {own!r} here")
    taken = signature(kind).parameters
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items() if key in taken}
    try:
        kind([torch.nn.Parameter(torch.zeros(1, 1))], **given)
    except (ValueError, TypeError, RuntimeError) as error:
        raise Damage(f"{place}: {error}") from error


def _flat(value: Any) -> list[Any]:
    return [one for part in value for one in _flat(part)] if isinstance(value, list | tuple) else [value]


def _type(value: Any) -> object:
    if isinstance(value, list | tuple):
        return [_type(one) for one in value]
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


def _unlike(there: dict[str, Any] | None, here: dict[str, Any] | None) -> list[str]:
    """The options in which two models differ, and so compute different things, even with equal shapes."""
    if there is None or here is None or there["kind"] != here["kind"]:
        return []
    before, now = (_options(each["config"]) if each["kind"] == "isograd" else _adapted(each) for each in (there, here))
    names = [name for name in before if name in now and before[name] != now[name]]
    return [f"{name} is {before[name]!r} there and {now[name]!r} here" for name in names]


def _options(config: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in config.items() if name not in FREE and name != "experts"}
    experts = config.get("experts")
    experts = experts if isinstance(experts, dict) else {}
    return found | {f"experts.{name}": value for name, value in experts.items() if name not in FREE_OF_EXPERTS}


def _adapted(model: dict[str, Any]) -> dict[str, Any]:
    """Of a model of transformers: the positions that its config describes, and what its adapters are multiplied by."""
    found = {name: value for name, value in model["config"].items() if name.startswith("rope_")}
    scales = model.get("adapters", {}).get("scales", {})
    return found | {f"the scale of adapters of {name}": scale for name, scale in scales.items()}


def _cast(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """When parameters have another dtype: their masters are in the one and not in the other."""
    before, now = (
        ", ".join(sorted({str(dtype) for key, (dtype, _) in found.items() if key.startswith("model/")}))
        for found in (there, here)
    )
    return [f"parameters are {before} there and {now} here"] if before != now else []


def _of_all_stages(mine: Iterable[str], engine: Engine) -> set[str]:
    return {name for names in all_gather_object(sorted(mine), engine.mesh, "pp") for name in names}
