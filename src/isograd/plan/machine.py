"""A machine as data: what its devices compute, hold and send, and what share of that programs get.

Numbers that makers state and rates that were fitted or measured stand in different fields, so that a reader sees which
is which.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from isograd.errors import PlanError, did_you_mean
from isograd.io import yaml_reader
from isograd.io.untrusted import CONFIG, FileError, Strict, read_text

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FromZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
ShareOrNone = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class Link(Strict):
    """How fast one device sends to others on one level, in one direction."""

    gb_s: Positive
    latency_us: FromZero


@dataclass(frozen=True, kw_only=True)
class Rates(Strict):
    """What share of the stated numbers programs get; fitted on published runs, or measured."""

    matmul: Annotated[dict[str, Share], Field(min_length=1)]  # of the peak, by dtype, in the limit of large matrices
    attention: Share  # of the peak of products, for fused attention
    memory: Share  # of the memory's bandwidth, in operations on elements
    links: Share  # of a link's bandwidth
    operator_us: FromZero  # from the start of one operator to the next, where a device has almost nothing to do
    launch_us: FromZero = 0  # of the host, to start one operator; 0: the host is the device
    contention: ShareOrNone = 0  # what compute loses to messages beside it, over their seconds
    jitter: ShareOrNone = 0  # the standard deviation of equal devices' speeds, over their mean
    spread: (
        ShareOrNone  # half of the width of the interval that holds 90 of 100 runs: exp(+-spread) times the prediction
    )


@dataclass(frozen=True, kw_only=True)
class Crowded(Strict):
    """Two ranks on each device of a node, as they were measured."""

    slower: Positive  # than at half of the device's rates
    link: Link  # between two of them, while all send


@dataclass(frozen=True, kw_only=True)
class Machine(Strict):
    """Equal devices, `devices` of them in a node."""

    name: str
    about: str
    memory_gb: Positive  # of one device
    reserved_gb: FromZero  # of those, what a program cannot use: driver, libraries, gaps
    memory_gb_s: Positive  # bandwidth of the memory
    tflops: Annotated[dict[str, Positive], Field(min_length=1)]  # dense products of one device, by dtype
    devices: Annotated[int, Field(gt=0)]  # of a node
    units: int = (
        0  # of a device: tiles of a matrix product that it computes at once; 0: products of all sizes are as fast
    )
    inside: Link  # between devices of a node
    between: Link | None = None  # between nodes; None: there is one node
    crowded: Crowded | None = None  # None: a rank needs a device of its own
    per_device: Positive = 1  # ranks that take turns on one; `shared` says how many
    rates: Rates

    @property
    def room(self) -> float:
        """Bytes of a device that a program may have."""
        return (self.memory_gb - self.reserved_gb) * 1e9

    def peak(self, dtype: str) -> float:
        """Products and additions of one device per second, by its maker."""
        if dtype not in self.tflops:
            raise PlanError(
                "IG273", f"{self.name} is not described for products in {dtype}", seen=", ".join(self.tflops),
                expected=f"`tflops: {{{dtype}: ...}}` in its description",
            )  # fmt: skip
        return self.tflops[dtype] * 1e12

    def shared(self, ranks: int) -> Machine:
        """With a device for each of so many ranks: each is a part of one, where that was measured."""
        if self.crowded is None or self.between is not None or ranks <= self.devices:
            return self
        part = self.devices / ranks
        rate, link, there = part / self.crowded.slower, self.crowded.link, 2 * part
        return dataclasses.replace(
            self,
            devices=ranks,
            per_device=1 / part,
            memory_gb=self.memory_gb * part,
            memory_gb_s=self.memory_gb_s * rate,
            tflops={dtype: speed * rate for dtype, speed in self.tflops.items()},
            inside=Link(gb_s=link.gb_s * there, latency_us=link.latency_us / there),
            rates=dataclasses.replace(self.rates, operator_us=self.rates.operator_us / rate),
        )

    def slowest_of(self, devices: int) -> float:
        """How much longer the slowest of so many devices computes than the average one, as a share: the expected
        largest of as many draws of a normal distribution."""
        return self.rates.jitter * math.sqrt(2 * math.log(devices))

    def link(self, members: int, stride: int) -> tuple[Link, int]:
        """The slowest link that a group uses whose `members` are `stride` ranks apart, and how many of its members
        share a node."""
        here = max(1, min(members, self.devices // stride))
        if here == members:
            return self.inside, here
        if self.between is None:
            raise PlanError(
                "IG273", f"{self.name} has no link between nodes, and a group of this layout needs one",
                seen=f"{members} ranks, {stride} apart, on nodes of {self.devices}",
                expected=f"at most {self.devices} ranks, or `between: {{gb_s: ..., latency_us: ...}}`",
            )  # fmt: skip
        return self.between, here


INNER: dict[str, type[Any]] = {"inside": Link, "between": Link, "link": Link, "rates": Rates, "crowded": Crowded}


def names() -> list[str]:
    """The machines that come with isograd."""
    found = (files("isograd") / "plan" / "machines").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in found if file.name.endswith(".yaml"))


def load(source: str) -> Machine:
    """A machine of machines/ by its name, or a file of the same fields."""
    if source in names():
        text = (files("isograd") / "plan" / "machines" / f"{source}.yaml").read_text(encoding="utf-8")
    elif source.endswith((".yaml", ".yml")):
        try:
            text = read_text(Path(source), CONFIG, follow=True)
        except FileError as error:
            raise _refused(source, error.brief) from error
    else:
        raise PlanError(
            "IG272", f"no machine is called {source!r}{did_you_mean(source, names())}",
            expected=f"{', '.join(names())}, or a YAML file",
            fix="isograd machine measure FILE.yaml writes one for this computer",
        )  # fmt: skip
    try:
        values = yaml_reader.parse(text)
    except yaml_reader.ERRORS as error:
        raise _refused(source, yaml_reader.why(error)) from error
    return from_dict(values, source)


def from_dict(values: Any, origin: str) -> Machine:
    """A machine from the fields of a file; unknown, missing and impossible ones are refused, all at once."""
    try:
        made = TypeAdapter(Machine).validate_json(json.dumps(values))
    except ValidationError as error:
        raise _refused(origin, "; ".join(map(_spelled, error.errors()))) from error
    if made.reserved_gb >= made.memory_gb:
        raise _refused(origin, f"reserved_gb {made.reserved_gb:g} leaves nothing of memory_gb {made.memory_gb:g}")
    return made


def _spelled(found: Any) -> str:
    """One of pydantic's findings: 'rates.matmul.bf16: Input should be less than or equal to 1, not 2.0'."""
    place = ".".join(map(str, found["loc"])) or "the file"
    if found["type"] == "unexpected_keyword_argument":
        kind = reduce(lambda kind, name: INNER.get(name, kind), found["loc"][:-1], Machine)
        return f"unknown key {place}{did_you_mean(str(found['loc'][-1]), [f.name for f in dataclasses.fields(kind)])}"
    return (
        f"{place} is missing" if found["type"] == "missing" else f"{place}: {found['msg']}, not {found['input']!r:.60}"
    )


def _refused(source: str, seen: str) -> PlanError:
    return PlanError(
        "IG272", f"{source} does not describe a machine", seen=seen,
        expected="the fields of isograd's own: isograd machine show h100",
    )  # fmt: skip


def text(machine: Machine) -> str:
    """The file that `load` reads back as this machine."""
    defaults = {field.name: field.default for field in dataclasses.fields(Machine)}
    values = {name: value for name, value in dataclasses.asdict(machine).items() if value != defaults[name]}
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100))
