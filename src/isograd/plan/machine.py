"""A machine as data: what its devices compute, hold and send, and what share of that programs get.

machines/*.yaml describe devices that can be rented today. `isograd machine measure` writes the same for this computer
(plan/measure.py). Numbers that makers state and rates that were fitted or measured stand in different fields, so that a
reader sees which is which.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import yaml

from isograd.errors import PlanError, did_you_mean
from isograd.io import yaml_reader
from isograd.io.untrusted import CONFIG, FileError, read_text

CAN_BE_0 = ("reserved_gb", "latency_us", "operator_us", "spread", "units", "launch_us", "contention", "jitter")


@dataclass(frozen=True, kw_only=True)
class Link:
    """How fast one device sends to others on one level, in one direction."""

    gb_s: float
    latency_us: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What share of the stated numbers programs get; fitted on published runs, or measured."""

    matmul: Mapping[str, float]  # of the peak, by dtype, in the limit of large matrices
    attention: float  # of the peak of products, for fused attention
    memory: float  # of the memory's bandwidth, in operations on elements
    links: float  # of a link's bandwidth
    operator_us: float  # from the start of one operator to the next, where a device has almost nothing to do
    launch_us: float = 0  # of the host, to start one operator; 0: the host is the device
    contention: float = 0  # what compute loses to messages beside it, over their seconds
    jitter: float = 0  # the standard deviation of equal devices' speeds, over their mean
    spread: float  # half of the width of the interval that holds 90 of 100 runs: exp(+-spread) times the prediction


@dataclass(frozen=True, kw_only=True)
class Crowded:
    """Two ranks on each device of a node, as they were measured."""

    slower: float  # than at half of the device's rates
    link: Link  # between two of them, while all send


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal devices, `devices` of them in a node."""

    name: str
    about: str
    memory_gb: float  # of one device
    reserved_gb: float  # of those, what a program cannot use: driver, libraries, gaps
    memory_gb_s: float  # bandwidth of the memory
    tflops: Mapping[str, float]  # dense products of one device, by dtype
    devices: int  # of a node
    units: int = (
        0  # of a device: tiles of a matrix product that it computes at once; 0: products of all sizes are as fast
    )
    inside: Link  # between devices of a node
    between: Link | None = None  # between nodes; None: there is one node
    crowded: Crowded | None = None  # None: a rank needs a device of its own
    per_device: float = 1  # ranks that take turns on one; `shared` says how many
    rates: Rates

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
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise _refused(source, yaml_reader.why(error)) from error
    return from_dict(values, source)


def from_dict(values: Any, origin: str) -> Machine:
    """A machine from the fields of a file; unknown, missing and impossible ones are refused, all at once."""
    problems: list[str] = []
    made = _made(Machine, values, "", problems)
    if problems or made is None:
        raise _refused(origin, "; ".join(problems))
    return made


Kind = TypeVar("Kind")


def _made(kind: type[Kind], values: Any, place: str, problems: list[str]) -> Kind | None:
    if not isinstance(values, dict):
        problems.append(f"{place or 'the file'} is no mapping")
        return None
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    before = len(problems)
    problems += [f"unknown key {place}{key}{did_you_mean(str(key), fields)}" for key in values if key not in fields]
    needed = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    problems += [f"{place}{name} is missing" for name in needed if name not in values]
    read: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            continue
        inner: dict[str, type[Any]] = {
            "inside": Link,
            "between": Link,
            "link": Link,
            "rates": Rates,
            "crowded": Crowded,
        }
        if name in inner and value is not None:
            read[name] = _made(inner[name], value, f"{place}{name}.", problems)
        elif name in ("tflops", "matmul"):
            rates = value if isinstance(value, dict) else {}
            problems += [] if rates else [f"{place}{name} is no mapping of dtypes"]
            problems += [f"{place}{name}.{d} {n!r} is no positive number" for d, n in rates.items() if not _positive(n)]
            read[name] = rates
        elif name in ("name", "about"):
            read[name] = str(value)
        else:
            least = name in CAN_BE_0 and value == 0
            problems += [] if least or _positive(value) else [f"{place}{name} {value!r} is no positive number"]
            read[name] = value
    problems += _impossible(kind, read, place)
    problems += [f"{name} is a whole number" for name in ("devices", "units") if isinstance(read.get(name), float)]
    return kind(**read) if len(problems) == before else None


def _impossible(kind: type, read: Mapping[str, Any], place: str) -> list[str]:
    """Shares above 1, and a device of which a program can use nothing."""
    if kind is Machine:
        whole, reserved = (float(n) if _positive(n := read.get(name)) else 0.0 for name in ("memory_gb", "reserved_gb"))
        full = reserved >= whole > 0
        return [f"reserved_gb {reserved:g} leaves nothing of memory_gb {whole:g}"] if full else []
    if kind is not Rates:
        return []
    shares = {name: read.get(name) for name in ("attention", "memory", "links", "spread", "contention", "jitter")}
    shares |= {f"matmul.{dtype}": share for dtype, share in read.get("matmul", {}).items()}
    return [f"{place}{name} {share!r} is above 1" for name, share in shares.items() if _positive(share) and share > 1]


def _positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


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
