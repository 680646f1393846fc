"""The mesh of a script that another library started: from a layout given in code, or by `--isograd` beside its options.

A door needs whole models that its library has built, so it knows the axis dp and the ZeRO stages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from isograd.comm import raw
from isograd.errors import DoorError
from isograd.layout import Layout
from isograd.mesh import Mesh

OPTION = "--isograd"
_said: str | None = None  # by the command line of this process, from which the option was taken out


def need(packages: Iterable[str], door: str, extra: str) -> None:
    """Raise IG850 when a package that a door stands on is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise DoorError(
            "IG850",
            f"{door} needs {' and '.join(missing)}",
            seen="no such package in this environment",
            fix=f"pip install 'isograd[{extra}]'",
        )


def layout_said(given: str | None) -> str | None:
    """The layout of `--isograd LAYOUT` or `--isograd=LAYOUT`, which is taken out of the command line and holds for
    every door of this process; else the one given."""
    global _said  # noqa: PLW0603
    words = sys.argv
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if place and name == OPTION:
            if not equals and place + 1 == len(words):
                raise DoorError("IG854", f"{OPTION} stands without a layout", expected=f"{OPTION} 'dp2 zero1'")
            _said = value if equals else words[place + 1]
            del words[place : place + (1 if equals else 2)]
            break
    return given if _said is None else _said


def mesh_of(layout: str | None) -> Mesh:
    """The mesh of the running world. A layout without dp, or none, gives dp all ranks."""
    ranks = raw.world()[1]
    words = layout or ""
    parsed = Layout.parse(words if re.search(r"\bdp\d", words) else f"dp{ranks} {words}")
    mesh = Mesh(parsed)
    if mesh.size("dp") != ranks:
        raise DoorError(
            "IG855",
            "a model that another library has built is whole, and cannot be cut by this layout",
            seen=str(parsed),
            expected=f"dp{ranks} with zero0 to zero3",
            fix="tp and cp: ig.hugging.load(folder, mesh) and ig.Engine, or 'isograd train'",
            where=mesh.where(),
        )
    return mesh


def refuse(reasons: dict[str, Any], what: str, fix: str, mesh: Mesh) -> None:
    """Raise IG856 for each of these that is set."""
    found = [name for name, is_set in reasons.items() if is_set]
    if found:
        raise DoorError(
            "IG856", what, seen=", ".join(found), expected="none of these", fix=fix, where=mesh.where()
        )  # fmt: skip
