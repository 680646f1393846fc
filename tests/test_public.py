"""The public names and their signatures are those of tests/public.txt: whoever changes one sees what others lose.

python -m tests.test_public > tests/public.txt    # after a change on purpose; CHANGELOG.md says what changed
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import isograd
from tests.test_docs import ROOMS, exported

LIST = Path(__file__).with_name("public.txt")
SKIPPED = {"cli", "train"}  # commands and configs: their words are held by their own tests


def signature(value: Any) -> str:
    """(x, *, y=1): names, kinds and defaults; nothing for what is not called."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    plain = [
        p.replace(annotation=p.empty, default=... if inspect.isroutine(p.default) else p.default)  # it has an address
        for p in found.parameters.values()
    ]
    return str(found.replace(parameters=plain, return_annotation=found.empty))


def methods(value: Any) -> Iterator[tuple[str, Any]]:
    """A class's own public methods and properties, those of its bases in isograd too."""
    for name, member in inspect.getmembers_static(value):
        home = next(base for base in value.__mro__ if name in vars(base))
        if not name.startswith("_") and home.__module__.startswith("isograd"):
            yield name, member.fget if isinstance(member, property) else getattr(value, name)


def listed() -> Iterator[str]:
    """One line for each public name of the package and of its rooms."""
    homes = {"isograd": list(isograd.__all__)} | {
        f"isograd.{room}": exported(room) for room in ROOMS if room not in SKIPPED
    }
    for home, names in sorted(homes.items()):
        for name in sorted(names):
            if home == "isograd.integrations":  # each needs the library that it is for
                yield f"{home}.{name}"
                continue
            value = getattr(importlib.import_module(home), name)
            yield f"{home}.{name}{'' if inspect.ismodule(value) else signature(value)}"
            if inspect.isclass(value) and home != "isograd":
                yield from (f"{home}.{name}.{at}{signature(member)}" for at, member in methods(value))


def test_public_names_and_signatures_are_those_of_the_list() -> None:
    now, before = set(listed()), set(LIST.read_text().splitlines())
    assert now == before, f"new: {sorted(now - before)}; gone: {sorted(before - now)}"


if __name__ == "__main__":
    print("\n".join(dict.fromkeys(listed())))
