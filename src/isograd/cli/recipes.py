"""`isograd recipes` and `isograd new`: configs to start from, which come with the package.

A recipe is a commented YAML file in recipes/; its first line says what it trains.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from isograd.errors import ConfigError, did_you_mean
from isograd.io.atomic import write_new


def recipes() -> dict[str, str]:
    """The text of every recipe, by name."""
    found = (files("isograd") / "recipes").iterdir()
    files_of = {file.name.removesuffix(".yaml"): file for file in found if file.name.endswith(".yaml")}
    return {name: files_of[name].read_text(encoding="utf-8") for name in sorted(files_of)}


def about(text: str) -> str:
    """What a recipe trains: its first line, which is a comment."""
    return text.partition("\n")[0].removeprefix("# ")


def listing(width: int) -> str:
    """Every recipe with its one-line description, wrapped to `width` columns."""
    from textwrap import wrap

    texts = recipes()
    wide = max(map(len, texts)) + 2
    lines = []
    for name, text in texts.items():
        first, *rest = wrap(about(text), width - wide)
        lines += [f"{name:<{wide}}{first}", *(" " * wide + line for line in rest)]
    return "\n".join([*lines, "", "isograd new NAME writes NAME.yaml into this folder"])


def new(name: str, file: str | None) -> Path:
    """Copy a recipe to `file` (default: NAME.yaml in this folder); an existing file is never overwritten."""
    texts = recipes()
    name = name.removesuffix(".yaml")
    if name not in texts:
        raise ConfigError(
            "IG650", f"no recipe is called {name!r}{did_you_mean(name, texts)}", expected=", ".join(texts),
            fix="isograd recipes",
        )  # fmt: skip
    to = Path(file or f"{name}.yaml")
    return write_new(to, texts[name], f"isograd new {name} ANOTHER-NAME.yaml")
