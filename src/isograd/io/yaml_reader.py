"""YAML as people mean it: mappings, lists and plain values, each with its line. Surprises of YAML 1.1 are refused.

An alias can make a file of 1 KB a value of gigabytes, a merge key hides where a value comes from, 010 is eight, 1:30 is
ninety, and a date is no string: none of them is worth a surprise in a config, so each is an error with file and line.
1e-3 is a number, and 2026-01-31 the text that it looks like.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Place = tuple[str | int, ...]  # ("optimizer", "lr"), ("data", "sources", 0, "path")

DEPTH = 32  # of mappings and lists inside each other
_CORE = "tag:yaml.org,2002:"
_READ = {_CORE + name for name in ("str", "int", "float", "bool", "null", "map", "seq")}
# Plain words that YAML 1.1 reads as numbers which few people mean.
_SURPRISES = {
    re.compile(
        r"^[-+]?0[0-9_]+$"
    ): "a number that begins with 0 is octal in YAML: write it without the 0, or in quotes",
    re.compile(r"^[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$"): (
        "digits with colons are a number of base 60 in YAML: write the number, or quotes around it"
    ),
    re.compile(r"^([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"): "a number must be finite",
}


ERRORS = (yaml.YAMLError, RecursionError, ValueError)  # of `parse` and `parse_with_lines`


class Refused(ValueError):
    """YAML that is not read, with its line."""

    def __init__(self, line: int, why: str) -> None:
        self.line, self.why = line, why
        super().__init__(f"line {line}: {why}")


class _Loader(yaml.SafeLoader):
    """YAML's plain values; every node is checked as it is composed, before anything is built from it."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            raise Refused(line, "aliases (*name) are not read: write the value out")
        if self.depth >= DEPTH:
            raise Refused(line, f"more than {DEPTH} mappings and lists inside each other")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if node is not None:
            _check(node, line)
        return node


def _check(node: yaml.Node, line: int) -> None:
    if node.tag == _CORE + "merge":
        raise Refused(line, "merge keys (<<) are not read: write the fields out")
    if node.tag not in _READ:
        raise Refused(line, f"the tag {node.tag.replace(_CORE, '!!')} is not read")
    plain = isinstance(node, yaml.ScalarNode) and node.style is None
    why = next((why for pattern, why in _SURPRISES.items() if plain and pattern.match(node.value)), None)
    if why:
        raise Refused(line, f"{node.value}: {why}")


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != _CORE + "timestamp"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_CORE + "float", re.compile(r"^[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def parse(text: str) -> Any:
    """The value of a YAML text. Raises one of ERRORS, with the line."""
    value, lines = _built(_Loader(text))
    seen = set[Place]()
    for place, line in lines:
        if place in seen:
            raise Refused(line, f"the key {place[-1]!r} is given twice")
        seen.add(place)
    return value


def parse_with_lines(text: str) -> tuple[Any, list[tuple[Place, int]]]:
    """The value, and the line of everything in it; a key that is given twice is there twice."""
    return _built(_Loader(text))


def _built(loader: _Loader) -> tuple[Any, list[tuple[Place, int]]]:
    node = loader.get_single_node()
    if node is None:
        return None, []
    try:
        return loader.construct_document(node), list(_lines(node, ()))
    except RecursionError as error:
        raise ValueError("too many mappings and lists inside each other") from error


def _lines(node: yaml.Node, place: Place) -> Iterator[tuple[Place, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*place, str(key.value))
            yield here, key.start_mark.line + 1
            yield from _lines(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*place, index), value.start_mark.line + 1
            yield from _lines(value, (*place, index))


def why(error: Exception) -> str:
    """An error of `parse` in one line, without its place."""
    return str(getattr(error, "why", None) or getattr(error, "problem", None) or error)


def read_error(path: str | Path, error: Exception) -> str:
    """'run.yaml:3: aliases are not read'."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark is not None else getattr(error, "line", None)
    return f"{path}:{line}: {why(error)}" if line else f"{path}: {why(error)}"
