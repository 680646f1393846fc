"""Reads configs: YAML with the line of every value, dotted options over it, and all mistakes at once.

A value's origin is a line of the file, the command line, or the default: `isograd config show` prints it beside each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from isograd.errors import ConfigError, did_you_mean
from isograd.io import hub, yaml_reader
from isograd.io.untrusted import CONFIG, FileError, read_text
from isograd.io.yaml_reader import Place
from isograd.train.config import Config

COMMAND_LINE = "command line"  # the origin of a value that an option sets


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and which line of the file or which option each value comes from."""

    config: Config
    origins: dict[Place, str]  # of the values that are not defaults

    def origin(self, place: Place) -> str:
        """Where the value at a place comes from: 'run.yaml:9', 'command line' or 'default'."""
        return self.origins.get(place, "default")


def load(path: str | Path, options: Sequence[str] = (), others: Sequence[str] = ()) -> LoadedConfig:
    """The config in a file, with what the command line sets over it, as `--a.b 1`, `--a.b=1` or `a.b=1`; `others`:
    further options a user may mean."""
    values, origins = _read(Path(path))
    typed: dict[str, str] = {}
    problems = _put(values, origins, options, typed)
    config = checked(values, str(path), origins, problems, others, typed)
    return LoadedConfig(config, origins)


def checked(
    values: dict[str, Any],
    path: str,
    origins: dict[Place, str] | None = None,
    problems: Sequence[str] = (),
    others: Sequence[str] = (),
    typed: Mapping[str, str] | None = None,
) -> Config:
    """The config that these values are, or all mistakes at once. path: where they come from; problems: known ones;
    typed: how the names of fields stand on the command line, `--steps` or `steps=`."""
    problems = list(problems)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        spelled = [_spell(found, origins or {}, path, others, typed or {}) for found in error.errors()]
        problems += [each if len(each) <= 500 else f"{each[:500]}..." for each in spelled]  # values of any length
    if problems:
        many = "one mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        raise ConfigError(
            "IG630",
            f"{many} in the config\n    " + "\n    ".join(problems),
            expected="the fields that 'isograd config schema' lists",
            fix="fix every line above; nothing was started",
        )
    return config


def fetched(config: Config, *, weights: bool = True) -> Config:
    """The same with places of this machine for what is named hf://..., downloaded where it is not there yet."""
    update: dict[str, Any] = {}
    if config.model.path is not None:
        update["model"] = config.model.model_copy(update={"path": hub.local(config.model.path, weights=weights)})
    if config.data is not None and weights:
        sources = [s.model_copy(update={"path": hub.local(s.path)}) if s.path else s for s in config.data.sources]
        named = config.data.tokenizer
        tokenizer = None if named is None else hub.local(named, weights=False)
        update["data"] = config.data.model_copy(update={"sources": sources, "tokenizer": tokenizer})
    return config.model_copy(update=update)


def _read(path: Path) -> tuple[dict[str, Any], dict[Place, str]]:
    if not os.path.exists(path):  # False for a name that is too long, where Path.exists raises
        name = path.name.removesuffix(".yaml")
        recipe = any(file.name == f"{name}.yaml" for file in (files("isograd") / "recipes").iterdir())
        seen = "the name of a recipe" if recipe else None
        raise ConfigError("IG631", seen=seen, fix=f"isograd new {name if recipe else 'quickstart'}", path=path)
    try:
        values, lines = yaml_reader.parse_with_lines(read_text(path, CONFIG, follow=True))
    except FileError as error:
        raise ConfigError("IG632", f"{path} is not a config", seen=error.brief, expected="a file of YAML") from error
    except yaml_reader.ERRORS as error:
        raise ConfigError(
            "IG632", f"{path} cannot be read as YAML", seen=yaml_reader.read_error(path, error),
            expected="a mapping of fields", fix="change that line",
        ) from error  # fmt: skip
    origins: dict[Place, str] = {}
    for place, line in lines:
        if place in origins:
            raise ConfigError(
                "IG633", f"{path}:{line}: the key {dotted(place)!r} is given twice",
                seen=f"first in {origins[place]}", expected="each key once",
            )  # fmt: skip
        origins[place] = f"{path}:{line}"
    if not isinstance(values, dict):
        raise ConfigError("IG632", f"{path} holds no mapping", expected="fields such as 'steps: 100'")
    return values, origins


def _put(values: dict[str, Any], origins: dict[Place, str], options: Sequence[str], typed: dict[str, str]) -> list[str]:
    """Write '--a.b value', '--a.b=value' and 'a.b=value' into the mapping, and into `typed` how each name was spelled;
    returns what could not be written."""
    problems = []
    words = list(options)
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        if not (name.startswith("--") or equals) or (not equals and not words):
            problems.append(f"command line: {word!r} is not an option with a value, such as --optimizer.lr 1e-3")
            continue
        text = text if equals else words.pop(0)
        spelled = name if name.startswith("--") else f"{name}="  # on the command line, without its value
        try:
            field = name.removeprefix("--")
            place: Place = tuple(int(part) if part.isdecimal() else part for part in field.split("."))
            inside = [known for known in origins if known[: len(place)] == place]
            if any(origins.get(known) == COMMAND_LINE for known in (*_above(place), *inside)):
                problems.append(f"{COMMAND_LINE}: {spelled[:80]} is given twice")
                continue
            value = yaml_reader.parse(text)
            _set(values, place, text if value is None and text != "null" else value)
        except (*yaml_reader.ERRORS, TypeError, IndexError) as error:
            problems.append(f"command line: {word[:80]!r} cannot be set: {yaml_reader.why(error)}")
            continue
        typed[dotted(place)] = spelled
        for known in inside:  # what the file has there is gone
            del origins[known]
        origins |= dict.fromkeys((place, *_places(value, place)), COMMAND_LINE)
    return problems


def _above(place: Place) -> list[Place]:
    return [place[:n] for n in range(1, len(place) + 1)]


def _places(value: Any, place: Place) -> Iterator[Place]:
    """Where the parts of a value stand."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*place, key)
        yield from _places(part, (*place, key))


def _set(values: Any, place: Place, value: Any) -> None:
    for part in place[:-1]:
        if isinstance(values, dict):
            values = values.setdefault(part, {})
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part]
        else:
            raise ValueError(f"{part!r} is inside a plain value")
        if values is None:
            raise ValueError(f"{part!r} is null")
    if isinstance(values, dict | list):
        values[place[-1]] = value  # type: ignore[index]
    else:
        raise ValueError(f"{place[-1]!r} is inside a plain value")


def dotted(place: Place) -> str:
    """('optimizer', 'lr') -> 'optimizer.lr'."""
    return ".".join(map(str, place))


def _spell(found: Any, origins: dict[Place, str], path: str, others: Sequence[str], typed: Mapping[str, str]) -> str:
    """One of pydantic's findings as 'file:line: name: what is wrong'."""
    loc: Place = tuple(found["loc"])
    # Pydantic names the members of a union in its places: 'bool', "literal['offload']".
    plain = ("bool", "int", "float", "str")
    place: Place = tuple(part for part in loc if isinstance(part, int) or not (part in plain or "[" in part))
    if found["type"] == "extra_forbidden":
        place = loc  # the name of an unknown key may look like the name of a branch
    where, option = _blamed(place, tuple(found.get("ctx", {}).get("fields", ())), origins, path, typed)
    if found["type"] == "extra_forbidden":
        around = _model_at(place[:-1])
        names = [*(around.model_fields if around else ()), *(others if option and len(place) == 1 else ())]
        same = [field for field in fields() if field.rpartition(".")[2] == str(place[-1]).lower()]  # in a part of it
        meant = f" (did you mean {' or '.join(map(repr, same))}?)" if same and len(place) == 1 else ""
        return f"{where}: unknown key {dotted(place)!r}{meant or did_you_mean(str(place[-1]), names)}"
    if found["type"] == "missing" and isinstance(place[-1], int):
        return (
            f"{where}: {dotted(place[:-1])}: a value is missing, {len(found['input'])} given: {description(place[:-1])}"
        )
    if found["type"] == "missing":
        return f"{where}: {dotted(place)!r} is missing: {description(place)}"
    text = str(found["msg"]).removeprefix("Value error, ")
    given = "" if isinstance(found["input"], dict | BaseModel) else f", not {found['input']!r}"
    if option and found["type"] in ("list_type", "tuple_type"):
        given += f" (a list is written [{found['input']}])"
    name = "" if option == dotted(place) else dotted(place)
    return f"{where}: {name}: {text}{given}".replace(": : ", ": ")


def _blamed(
    place: Place, fields: Sequence[str], origins: dict[Place, str], path: str, typed: Mapping[str, str]
) -> tuple[str, str]:
    """(where the mistake at a place stands, the option that made it; empty: none did).

    fields: those that contradict each other, of a mistake at no single place. Values inside the place that come from
    the command line are blamed before the line of the file at which the place begins.
    """
    places: list[Place] = [tuple(field.split(".")) for field in fields] or [place]
    inside = [known for known in origins if any(known[: len(one)] == one for one in places if one)]
    of_options = [known for known in inside if origins[known] == COMMAND_LINE]
    tops = [next(top for top in _above(known) if origins.get(top) == COMMAND_LINE) for known in of_options]
    options = [dotted(top) for top in dict.fromkeys(tops)]
    given = [one for one in places if one in origins] or places
    above = next((one[:n] for one in given for n in range(len(one), 0, -1) if one[:n] in origins), ())
    if not options and origins.get(above) == COMMAND_LINE:
        options = [dotted(next(top for top in _above(above) if origins.get(top) == COMMAND_LINE))]
    if options:
        return f"{COMMAND_LINE}: " + ", ".join(typed.get(option, f"--{option}") for option in options), options[0]
    return origins.get(above, path), ""


def _model_at(place: Place) -> type[BaseModel] | None:
    model: Any = Config
    for part in place:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if model is not None else None
        model = _inner(field.annotation) if field else None
    return model  # type: ignore[no-any-return]


def _inner(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in getattr(annotation, "__args__", ()) if (m := _inner(a)) is not None), None)


def fields(model: type[BaseModel] = Config, place: str = "") -> Iterator[str]:
    """Every field of a run's config that holds a plain value, dotted."""
    for name, field in model.model_fields.items():
        part = _inner(field.annotation) if name != "sources" else None
        yield from [place + name] if part is None else fields(part, f"{place}{name}.")


def description(place: Place) -> str:
    """What the field at a place means."""
    model = _model_at(place[:-1])
    field = model.model_fields.get(str(place[-1])) if model else None
    return (field.description if field else None) or "a mapping"


def flat(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every value of a config with its place."""
    value = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not inside or (isinstance(value, list) and not any(isinstance(v, dict) for v in value)):
        yield place, value
        return
    for key, part in inside:
        yield from flat(part, (*place, key))


def written(config: BaseModel) -> str:
    """The config as YAML that reads back to itself."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def changed(before: object, now: Config) -> list[str]:
    """Which options decide a run's samples, and differ from those of the run that was saved."""
    if not isinstance(before, dict):
        return []
    found = differing(before, now, ("data", "pairs", "preference", "grpo", "batch"))
    return found or ["the options are the same: what the files hold has changed"]


def differing(before: object, now: Config, names: Iterable[str]) -> list[str]:
    """Which of these parts of a config differ from those of the run that was saved, option by option."""
    ours, found = now.model_dump(mode="json"), list[str]()
    if not isinstance(before, dict):
        return found
    for name in names:
        old, new = before.get(name), ours[name]
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in new if old.get(key) != new[key]]
            found += [f"{name}.{key} was {old.get(key)!r} and is {new[key]!r}" for key in keys]
        elif old != new:
            found.append(f"{name} was {old!r} and is {new!r}")
    return found
