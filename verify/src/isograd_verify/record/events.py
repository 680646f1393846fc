"""What a rank saw, event by event: one class per kind. A recorder makes them, a line of events.jsonl holds one, and a
judge reads them back: this file is all that the two have in common.

A line is the event's fields as a JSON object, with its class under "k". `read` checks every field against its type and
makes the event, or raises a ValueError: a judge never meets a wrong type.
"""

from __future__ import annotations

import json
import math
import types
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

Key = tuple[int, int]  # (rank, micro-batch), where the second number is `key(micro, use)`
_USES = 10_000  # more backwards than a recording holds (capture.MOST_MICROS)
_LARGEST = 1 << 53
REDUCING = ("all_reduce", "reduce_scatter", "reduce")  # collectives that sum
CUT, KEPT, OTHERS = "cut", "kept", "others"  # flows.py tells what each means; the first of several counts


def key(micro: int, use: int = 0) -> int:
    """The number of a contribution. `use`: 1 for the second gradient of a module that a backward comes to twice."""
    return micro + use * _USES


def micro_of(number: int) -> int:
    """The micro-batch of a contribution's number."""
    return number % _USES


def use_of(number: int) -> int:
    """Which of its arrivals in one backward a contribution is, from 0."""
    return number // _USES


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What a rank holds of one parameter, told at an optimizer step."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]  # the shape before it was cut, as far as it says so itself
    # [start, stop] along each dimension of the whole; a single one of a whole with more: of its elements in a row.
    box: tuple[tuple[int, int], ...] | None  # None: nothing says so
    declared: bool  # by torch: a DTensor, or a piece of FSDP1's flat parameters
    dtype: str
    trainable: bool
    owned: bool  # by an optimizer
    gradient: bool  # there was one
    finite: bool
    hash: str  # after the step
    part_shape: tuple[int, ...]  # of what a backward added on this rank
    part_box: tuple[tuple[int, int], ...] | None = None  # of that, where it is more than the rank holds, but not all
    gradient_hash: str = ""
    gradient_dtype: str = ""
    before: str = ""  # the hash before the step; '' when it was not seen
    constant: bool = False  # every element was one value before the step
    squares: float | None = None  # the sum of the squares of its gradient here
    rate: float | None = None  # the learning rate with which its optimizer stepped; None: not known

    @property
    def in_a_row(self) -> bool:
        """Whether the box tells elements of the flat tensor."""
        return self.box is not None and len(self.box) == 1 != len(self.whole)


@dataclass(frozen=True, kw_only=True)
class GivenTensor:
    """One tensor that a model was given. Hashes are 64-bit numbers, in words: JSON's numbers are shorter."""

    hash: str
    shape: tuple[int, ...]
    dtype: str
    fillers: tuple[str, ...]  # hashes of what may be its padding


@dataclass(frozen=True)
class Event:
    """Anything that was seen, in the optimizer step and micro-batch in which it was seen."""

    step: int = 0
    micro: int = 0


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """The watching began."""


@dataclass(frozen=True, kw_only=True)
class Backward(Event):
    """A call of autograd.backward: one micro-batch."""

    site: str = ""
    loss: str = ""  # the line before it where many numbers with a graph last became one
    summed: bool = False  # it begins with a sum that nothing has divided
    scaled: int = 0  # by a gradient scaler: 1; by none: -1; not known: 0


@dataclass(frozen=True, kw_only=True)
class Collective(Event):
    """A collective was called (collectives.py)."""

    n: int
    op: str
    group: tuple[int, ...]
    peer: int = -1  # of a send
    dtype: str = ""
    numel: int = 0
    bytes: int = 0
    start: float = 0.0
    phase: str = "other"
    module: str = ""
    site: str = ""
    covers: tuple[str, ...] = ()  # parameters whose gradients share memory with its tensor
    passed: int = 0  # backwards before it
    inside: bool = False  # the forward of an autograd Function
    narrow: bool = False  # every number of an fp32 tensor is one of bf16
    seconds: float | None = None  # from its End; None: it did not end

    def __str__(self) -> str:
        return f"{self.op} of {self.numel} x {self.dtype} at {self.site}"


@dataclass(frozen=True, kw_only=True)
class End(Event):
    """Collective number n is over."""

    n: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Loss(Event):
    """A cross-entropy was computed, over so many labels of so many classes."""

    reduction: str
    count: float
    classes: int = 0
    value: float = math.nan  # mean over its labels


@dataclass(frozen=True, kw_only=True)
class LabelWeight(Event):
    """A cross-entropy's backward ran: the lowest and highest weight that a label's gradient got."""

    count: float
    low: float
    high: float
    labels: str = ""  # their hash
    site: str = ""
    average: bool = False  # an operator took the mean over them

    def times(self, factor: float) -> LabelWeight:
        """The same labels in a loss that counts so many times."""
        return replace(self, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True, kw_only=True)
class MeanWeight(Event):
    """A mean or sum of so many numbers is a part of the loss, and each of them got this weight in backward."""

    term: str
    site: str
    count: float
    weight: float
    nonzero: float = 0.0  # so many of them are not zero, where that may be the count; 0: it is not
    divided: bool = False  # a sum that a whole number divides: what comes of it is told as a mean, too
    average: bool = False  # an operator took the mean: the count was not a divisor of the program's own
    elements: float = 0.0  # not 0: it is the quotient of a sum of so many and of another number

    def times(self, factor: float) -> MeanWeight:
        """The same numbers in a loss that counts so many times."""
        return replace(self, weight=self.weight * factor)


@dataclass(frozen=True, kw_only=True)
class Uncounted(Event):
    """A backward came to a Function of the program's own that makes one number of many: nothing tells of how many."""

    site: str
    weight: float = 0.0  # with which it counts in what backward began with


@dataclass(frozen=True, kw_only=True)
class Function(Event):
    """An autograd Function in whose forward or backward collectives ran, told when its backward is over: what it made
    times what came back to it, what it was given times what it sent back, and hashes of contents. Sketches of all four
    stand in the step's file under `function/NUMBER/`."""

    site: str
    name: str
    number: int  # of its calls in this step
    group: tuple[int, ...]
    dtype: str
    made: float
    given: float
    size: float  # of the products' factors, for rounding
    contents: tuple[str, str]  # hashes of what it was given and of what it made


@dataclass(frozen=True, kw_only=True)
class LossTerm(Event):
    """A term of the loss (terms.py): its value, and the weights of numbers from it up to the loss, its own first."""

    site: str
    value: float
    weights: tuple[float, ...]
    joined: int = -1  # which of them is the sum in which it meets other terms; -1: it is the only one
    injected: bool = False  # by a Function that was given it, and sends it a gradient of its own

    @property
    def share(self) -> float:
        """What it adds to the loss that is optimised."""
        return self.value * self.weights[0]


@dataclass(frozen=True, kw_only=True)
class Coefficient(Event):
    """A coefficient of the loss that a model's config tells, by its name there."""

    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Changed(Event):
    """Buffers are other than when they were last looked at: `during` says what changed them."""

    during: str  # "forward", "backward", "between" two micro-batches
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Carried(Event):
    """What a backward begins with was made, first at `site`, from what changes from step to step, or of own rows."""

    name: str  # `carried/NAME` is its sketch
    began: str  # its hash when it was first seen; '' where that was in a later step
    own: str  # before a wrapper made it that of rank 0
    site: str = ""


@dataclass(frozen=True, kw_only=True)
class Rewritten(Event):
    """Between the last backward and the step the program wrote into gradients, first at `site`."""

    site: str
    factor: float = 0.0  # not 0: they are all gradients, and what it did last was to multiply them by this number


@dataclass(frozen=True, kw_only=True)
class Choice(Event):
    """The largest few of each row were chosen (experts of tokens): the hash of which, rows in order, numbers sorted."""

    site: str
    hash: str
    again: bool  # inside a backward: a forward that is computed once more


@dataclass(frozen=True, kw_only=True)
class Logits(Event):
    """Under torch's loss_parallel: this rank's part of a sum that must be zero over all ranks, and of its size."""

    shift: float
    size: float


@dataclass(frozen=True, kw_only=True)
class RowSums(Event):
    """An embedding's backward that has lost what it added: its error, the id that is furthest off, how often it is."""

    module: str
    dtype: str
    error: float
    token: int
    times: int


@dataclass(frozen=True, kw_only=True)
class Reached(Event):
    """Collectives without a backward that have a say in what a backward began with: (number, how) of each."""

    calls: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Input(Event):
    """The outermost module was called; the backward that follows has number `forward`."""

    forward: int


@dataclass(frozen=True, kw_only=True)
class ForwardInputs(Event):
    """What the outermost module was given, told when a backward reaches what it returned, else at the step's end."""

    forward: int
    tensors: dict[str, GivenTensor]
    reached: bool = True


@dataclass(frozen=True, kw_only=True)
class Staged(Event):
    """A gradient came back to what a call of the outermost module made: digests of what it was given and made. What its
    backward gives on one device stands in the step's file, or `why` it does not (watch/stages.py)."""

    call: int  # in this step
    site: str
    given: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # of its parameters
    still: tuple[int, ...] = ()  # which of `given` take no gradient
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Draw(Event):
    """A module drew random numbers: hashes of what went in and came out, and whether a graph was made."""

    module: str
    into: str
    out: str
    forward: int
    shape: tuple[int, ...] = ()
    graph: bool = True
    mask: str = ""  # the hash of which elements became zero; '' when none or all did, or some were before


@dataclass(frozen=True, kw_only=True)
class Norm(Event):
    """What clip_grad_norm_ returned."""

    value: float


@dataclass(frozen=True, kw_only=True)
class ScaledClip(Event):
    """A clip by `bound` came before a gradient scaler took its factor from the gradients."""

    site: str
    bound: float
    scale: float


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """An optimizer step, or (with a note) what stood there when the program ended without one."""

    parameters: dict[str, Parameter]
    backwards: int
    note: str = ""
    left_out: dict[str, int] = field(default_factory=dict)  # tensors beyond the limit, by kind; and the limit
    by_hand: bool = False  # the program has no optimizer, and changed its parameters itself
    nameless: int = 0  # parameters with a gradient that optimizers stepped, and no module that was called has
    issued: dict[str, int] = field(default_factory=dict)  # members of a group -> collectives so far, by its own count


@dataclass(frozen=True, kw_only=True)
class Average(Event):
    """torch's AveragedModel was updated: the hash of each average, by the name of its parameter in the model."""

    hashes: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class OtherWorld(Event):
    """The program joined a world of another size: the watching ended."""

    world: int


@dataclass(frozen=True, kw_only=True)
class Lost(Event):
    """Something is no longer watched, because watching it raised an error."""

    sense: str
    why: str


@dataclass(frozen=True, kw_only=True)
class PipelineActions(Event):
    """What a pipeline's stage did in a step: (kind, stage, micro-batch, start, end) of each action."""

    actions: tuple[tuple[str, int, int, float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Result(Event):
    """The loss that a program says it optimised, and its weight."""

    loss: float
    weight: float


KINDS: dict[str, type[Event]] = {one.__name__: one for one in Event.__subclasses__()}


def line(event: Event) -> str:
    """An event as one line of JSON."""
    return json.dumps({"k": type(event).__name__, **vars(event)}, separators=(",", ":"), default=vars) + "\n"


def read(data: Any) -> Event:
    """The event that a line's JSON stands for; a ValueError says what is wrong with it."""
    kind = KINDS.get(str(data.get("k"))) if isinstance(data, dict) else None
    if kind is None:
        raise ValueError("no event of a known kind")
    return _made(kind, {name: value for name, value in data.items() if name != "k"})  # type: ignore[no-any-return]


def _made(kind: type[Any], data: dict[str, Any]) -> Any:
    hints, needed = _fields(kind)  # type: ignore[arg-type]
    unknown, lacking = data.keys() - hints.keys(), needed - data.keys()
    if unknown or lacking:
        raise ValueError(f"{kind.__name__}: unknown {sorted(unknown)!r:.80}, lacking {sorted(lacking)!r:.80}")
    return kind(**{name: _checked(hints[name], value, name) for name, value in data.items()})


@cache
def _fields(kind: type[Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """(annotations by name, names that must be there)."""
    hints = get_type_hints(kind)
    listed = fields(kind)
    needed = frozenset(f.name for f in listed if f.default is MISSING and f.default_factory is MISSING)
    return {f.name: hints[f.name] for f in listed}, needed


def _checked(hint: Any, value: Any, name: str) -> Any:
    """A value of JSON as the annotation says; lists become tuples."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return None if value is None else _checked(inside[0], value, name)
    if type(value) is int and abs(value) >= _LARGEST:
        raise ValueError(f"{name} is {value!r:.80}")
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    if origin is tuple and isinstance(value, list):
        each = [inside[0]] * len(value) if inside[-1] is ... else inside
        if len(each) == len(value):
            return tuple(_checked(one, v, name) for one, v in zip(each, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {str(k): _checked(inside[1], v, name) for k, v in value.items()}
    if is_dataclass(hint) and isinstance(value, dict):
        return _made(hint, value)  # type: ignore[arg-type]
    raise ValueError(f"{name} is {value!r:.80}")
