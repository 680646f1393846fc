"""What a pickle says, without doing it: torch's checkpoints of other programs describe their files in pickles.

A pickle is a program for a small stack machine, of which two instructions call whatever function the file names. Here
the standard library's `pickletools` splits the file into instructions and this file follows them, over plain values. No
module is imported and no function is called: a class that the reader knows becomes a `PickledObject`, which says
what it was made of; any other name, and any instruction that torch's files do not need, is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

MOST = 30_000_000  # instructions: a file of this size takes minutes


class RefusedOpcode(Exception):
    """Not a pickle that this reader follows; the text says why."""


@dataclass(frozen=True)
class PickledName:
    """A class or function that a pickle names, and that the reader knows."""

    full: str


@dataclass(eq=False)
class PickledObject:
    """What a pickle makes of a class: its arguments, and the state that is set afterwards."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


EMPTY: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_LIST": list, "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}  # fmt: skip
GIVEN = (
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
)  # fmt: skip
IDLE = ("PROTO", "FRAME", "STOP")
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def value_in(data: bytes, known: Collection[str] | None) -> Any:
    """The value that a pickle describes. known: the full names of the classes and functions that it may name;
    None: any, of which nothing is made either, and what is added to them is dropped."""
    machine = _Machine(known)
    try:
        for number, (code, argument, _) in enumerate(pickletools.genops(data)):
            if number == MOST:
                raise RefusedOpcode(f"more than {MOST:,} instructions")
            machine.do(code.name, argument)
        (result,) = machine.stack
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise RefusedOpcode(f"no pickle: {str(error)[:200] or type(error).__name__}") from error
    return result


def brief(value: Any) -> str:
    """A value for a message: of a list or a table its type alone, as written out one could be a terabyte."""
    return repr(value)[:80] if isinstance(value, int | float | str | None) else type(value).__name__


class _Machine:
    def __init__(self, known: Collection[str] | None) -> None:
        self.known = None if known is None else frozenset(known)
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks under the marks
        self.memo: dict[int, Any] = {}

    def do(self, code: str, argument: Any) -> None:
        """One instruction."""
        if code in EMPTY:
            self.stack.append(EMPTY[code]())
        elif code in GIVEN:
            self.stack.append(argument)
        elif code in TUPLES:
            self.stack.append(tuple(self._popped(TUPLES[code])))
        elif code == "MARK":
            self.below.append(self.stack)
            self.stack = []
        elif code in ("TUPLE", "APPENDS", "SETITEMS"):
            above, self.stack = self.stack, self.below.pop()
            if code == "TUPLE":
                self.stack.append(tuple(above))
            else:
                self._set(self.stack[-1], above)
        elif code in ("APPEND", "SETITEM"):
            self._set(self.stack[-2 if code == "APPEND" else -3], self._popped(1 if code == "APPEND" else 2))
        elif code in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
        elif code in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif code in ("GLOBAL", "STACK_GLOBAL"):
            self.stack.append(self._named(argument.split(" ", 1) if code == "GLOBAL" else self._popped(2)))
        elif code not in IDLE:
            self._made(code)

    def _made(self, code: str) -> None:
        if code in ("REDUCE", "NEWOBJ"):
            name, args = self._popped(2)
            if not isinstance(name, PickledName) or not isinstance(args, tuple):
                raise RefusedOpcode("it calls something that is no class")
            self.stack.append(PickledObject(name.full, args))
        elif code == "BUILD":
            state = self.stack.pop()
            if not isinstance(self.stack[-1], PickledObject):
                raise RefusedOpcode("it sets the state of something that is no object")
            if self.stack[-1].name != "collections.OrderedDict":  # whose state is its items, not its attributes
                self.stack[-1].state = state
        elif code == "BINPERSID":
            self.stack.append(PickledObject("persistent", (self.stack.pop(),)))
        else:
            raise RefusedOpcode(f"the instruction {code}")

    def _named(self, parts: list[str]) -> PickledName:
        full = ".".join(parts)
        if self.known is not None and full not in self.known:
            raise RefusedOpcode(f"it names {full[:200]!r}, which no description of a checkpoint needs")
        return PickledName(full)

    def _popped(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise RefusedOpcode("too few values")
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def _set(self, into: Any, values: list[Any]) -> None:
        """Append to a list, or set the items of a dict. Its keys are plain: a tuple in a tuple would be hashed to any
        depth."""
        if isinstance(into, PickledObject) and into.name == "collections.OrderedDict":
            into.state = into.state or {}
            into = into.state
        if isinstance(into, list):
            into.extend(values)
            return
        if isinstance(into, PickledObject) and self.known is None:
            return
        if not isinstance(into, dict) or len(values) % 2:
            raise RefusedOpcode("it adds to something that is no list and no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if self.known is None and not isinstance(key, str | int | PickledObject):
                continue
            if not isinstance(key, str | int | PickledObject):
                raise RefusedOpcode(f"a dict with a {type(key).__name__} as a key")
            into[key] = value
