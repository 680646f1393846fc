"""Layout: how many ranks each axis has and what runs on them, as frozen data. No torch, no world.

    dp   data parallel          cp   context parallel: `ulysses`, `ring`, both    zero0..3   what is sharded over dp cp
    tp   tensor parallel        sp   sequence parallel on the tp axis             vpp        model chunks per pp rank
    pp   pipeline ranks         ep   experts, cut from dp x cp x tp               1f1b gpipe zb   order of a pipeline

Ranks are numbered with pp outermost, then dp, cp, and tp innermost, so that tp neighbours share a machine:

    rank = ((pp_index * dp + dp_index) * cp + cp_index) * tp + tp_index

The ranks of a pipeline stage are folded in two ways. Everything but routed experts sees dp, cp and tp. Routed experts
see ep and edp = dp cp tp / ep: neighbours hold different experts (an ep group), and the edp groups hold copies of them:

    rank within a stage = edp_index * ep + ep_index

tp divides ep or ep divides tp: an ep group is then made of whole tp groups, or lies within one.

'cp8 ulysses2' is both methods together: blocks of 2 neighbours by Ulysses, and a ring over the 4 blocks.

Invariant: `Layout.parse(str(layout)) == layout`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from isograd.errors import LayoutError, did_you_mean

DATA = "dp cp"  # the axes over which every parameter's gradient is a sum, but for routed experts
AXES = ("pp", "dp", "cp", "tp")  # outermost first
FOLDED = ("ep", "edp")  # of experts: the other folding of a stage's ranks
METHODS = ("ulysses", "ring")
SCHEDULES = ("1f1b", "gpipe", "zb")  # what a pipeline does when; with vpp, interleaved
# What axes are called elsewhere, without _parallel, _size and _degree, and what they are here.
ELSEWHERE = {
    "sp sequence ulysses_sequence": "cp{n} ulysses",
    "cp context": "cp{n} ring",
    "tp tensor tensor_model autotp": "tp{n}",
    "pp pipeline pipeline_model": "pp{n}",
    "ep expert expert_model": "ep{n}",
    "dp data dp_replicate ddp": "dp{n}",
    "dp_shard fsdp": "dp{n} zero3",
}
_COUNTS = ("dp", "cp", "tp", "pp", "vpp", "ep")
_EXAMPLE = "dp2 cp2 ulysses tp2 sp pp2 vpp2 ep2 zero1"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of all axes and the methods that run on them. A layout that contradicts itself cannot be made."""

    pp: int = 1
    vpp: int = 1
    schedule: str = "1f1b"
    dp: int = 1
    cp: int = 1
    cp_method: str = "ulysses"  # or "ring"; or both: "ulysses2", Ulysses within 2 neighbours and a ring over the rest
    tp: int = 1
    sp: bool = False
    ep: int = 1
    zero: int = 0

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise _refusal(problems, str(self))
        self._settle_method()

    def _settle_method(self) -> None:
        """One layout has one name: Ulysses within all cp ranks is 'ulysses', within one is 'ring'."""
        names = {self.cp: "ulysses", 1: "ring"} if self.cp > 1 else {}
        block = _ulysses_block(self.cp_method)
        if block is not None:
            object.__setattr__(self, "cp_method", names.get(block, f"ulysses{block}"))

    def _problems(self) -> list[str]:
        mistyped = [
            f"{name} must be a whole number, not {getattr(self, name)!r}"
            for name in (*_COUNTS, "zero")
            if type(getattr(self, name)) is not int  # True is an int to isinstance, and no size
        ]
        mistyped += [] if isinstance(self.sp, bool) else [f"sp is True or False, not {self.sp!r}"]
        mistyped += [
            f"{name} is a word, not {getattr(self, name)!r}"
            for name in ("cp_method", "schedule")
            if not isinstance(getattr(self, name), str)
        ]
        if mistyped:
            return mistyped  # nothing further can be judged
        found = [f"{name} must be at least 1, not {getattr(self, name)}" for name in _COUNTS if getattr(self, name) < 1]
        if self.zero not in (0, 1, 2, 3):
            found.append(f"zero is a stage from 0 to 3, not {self.zero}")
        block = _ulysses_block(self.cp_method)
        if block is None and self.cp_method not in METHODS:
            found.append(f"unknown cp method {self.cp_method!r}{did_you_mean(self.cp_method, METHODS)}")
        if block is not None and self.cp > 1 and (block < 1 or self.cp % block):
            found.append(f"{self.cp_method} does not divide cp{self.cp}: Ulysses works in blocks of cp neighbours")
        if self.cp == 1 and self.cp_method != "ulysses":
            found.append(f"{self.cp_method!r} without cp: give cp2 or more, or leave it out")
        if self.sp and self.tp == 1:
            found.append(
                "sp without tp: sequence parallelism cuts over the tp ranks; give tp2 or more, or leave sp out"
            )
        if self.schedule not in SCHEDULES:
            found.append(f"unknown schedule {self.schedule!r}{did_you_mean(self.schedule, SCHEDULES)}")
        if self.schedule != "1f1b" and self.pp == 1:
            found.append(f"{self.schedule!r} without pp: a schedule orders pipeline stages; give pp2 or more")
        if self.vpp > 1 and self.pp == 1:
            found.append(f"vpp{self.vpp} without pp: virtual stages need pp2 or more")
        if self.ep > 1 and min(self.dp, self.cp, self.tp) >= 1:
            ranks = self.dp * self.cp * self.tp
            fits = f"the nearest that fits is ep{_nearest_ep(self.ep, ranks, self.tp)}"
            if ranks % self.ep:
                found.append(
                    f"ep{self.ep} does not divide dp x cp x tp = {ranks}, the ranks that share experts: {fits}"
                )
            elif not _ep_fits(self.ep, ranks, self.tp):
                found.append(f"ep{self.ep} with tp{self.tp}: neither divides the other; {fits}")
        return found

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read 'dp2 tp2 sp zero1'. Axes left out have one rank; '' and '1' are a world of one."""
        values: dict[str, int | str | bool] = {}
        problems: list[str] = []
        names = [*_COUNTS, "zero", "sp", *METHODS, *SCHEDULES]

        def put(key: str, value: int | str | bool, token: str) -> None:
            if key in values:
                label = {"cp_method": "the cp method", "schedule": "the schedule"}.get(key, repr(key))
                problems.append(f"{label} is given twice ({token!r})")
            values[key] = value

        for token in text.split():
            counted = re.fullmatch(r"([a-z]+)([0-9]{1,9})", token)
            if token == "sp":
                put("sp", True, token)
            elif token in METHODS or _ulysses_block(token) is not None:
                put("cp_method", token, token)
            elif token in SCHEDULES:
                put("schedule", token, token)
            elif counted and counted[1] in (*_COUNTS, "zero"):
                put(counted[1], int(counted[2]), token)
            elif token in (*_COUNTS, "zero"):
                problems.append(f"{token!r} needs a number, as in {token}2")
            elif (meant := _meant(token)) is not None:
                problems.append(f"{token!r} {meant}")
            elif token != "1" or len(text.split()) > 1:
                letters = re.match(r"[a-z]*", token.lower())
                hint = did_you_mean(letters[0] if letters else token, names)
                problems.append(f"unknown token {token!r}{hint}")
        if "cp_method" in values and values.get("cp", 1) == 1:
            problems.append(f"{values.pop('cp_method')!r} without cp: give cp2 or more, or leave it out")
        unchecked = object.__new__(cls)
        for field, default in cls.__dataclass_fields__.items():
            object.__setattr__(unchecked, field, values.get(field, default.default))
        problems += unchecked._problems()
        if problems:
            raise _refusal(problems, text)
        unchecked._settle_method()
        return unchecked

    def __str__(self) -> str:
        words = [f"dp{self.dp}"] if self.dp != 1 else []
        words += [f"cp{self.cp}", self.cp_method] if self.cp != 1 else []
        words += [f"tp{self.tp}"] if self.tp != 1 else []
        words += ["sp"] if self.sp else []
        words += [f"{name}{getattr(self, name)}" for name in ("pp", "vpp") if getattr(self, name) != 1]
        words += [self.schedule] if self.schedule != "1f1b" else []
        words += [f"ep{self.ep}"] if self.ep != 1 else []
        words += [f"zero{self.zero}"] if self.zero else []
        return " ".join(words) or "1"

    @property
    def world_size(self) -> int:
        """The number of ranks that the layout needs."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """The number of ranks that hold copies of the same experts."""
        return self.dp * self.cp * self.tp // self.ep

    @property
    def ulysses(self) -> int:
        """How many cp neighbours exchange heads for sequence: groups 'cp/N'. The others form rings: groups 'cp%N'."""
        return {"ulysses": self.cp, "ring": 1}.get(self.cp_method) or int(self.cp_method.removeprefix("ulysses"))

    @property
    def ring(self) -> int:
        """How many such blocks pass keys and values around."""
        return self.cp // self.ulysses

    def size(self, axis: str) -> int:
        """The number of ranks along one of pp, dp, cp, tp, ep and edp."""
        if axis not in (*AXES, *FOLDED):
            raise _unknown_axes(axis)
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank on each of pp, dp, cp and tp."""
        if not 0 <= rank < self.world_size:
            raise LayoutError("IG103", seen=rank, expected=f"0 to {self.world_size - 1}", layout=str(self))
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.size(axis))
        return {axis: found[axis] for axis in AXES}

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at one index on each of pp, dp, cp, tp."""
        outside = [axis for axis in AXES if not 0 <= coordinates.get(axis, -1) < self.size(axis)]
        if outside or len(coordinates) != len(AXES):
            raise LayoutError(
                "IG103",
                seen=coordinates,
                expected=", ".join(f"{axis} 0 to {self.size(axis) - 1}" for axis in AXES),
                layout=str(self),
            )
        return self._rank(coordinates)

    def _rank(self, spot: dict[str, int]) -> int:
        rank = 0
        for axis in AXES:
            rank = rank * int(getattr(self, axis)) + spot[axis]
        return rank

    def groups(self, axes: str, ranks: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
        """The groups along `axes` (see `ranks`) through these ranks, or all of the world, in the order of their first
        ranks."""
        return _groups(self, axes, range(self.world_size) if ranks is None else tuple(ranks))

    def ranks(self, axes: str, rank: int) -> tuple[int, ...]:
        """The global ranks, in order, of the group through `rank` along `axes`.

        'tp': one axis. 'dp cp': several, flattened. 'tp/2': blocks of 2 neighbours along tp. 'cp%2': the members of cp
        whose index has my remainder modulo 2, one from each such block. 'pp:0+3': the members of pp with index 0 and 3
        (I must be one of them). 'ep' and 'edp': experts' folding of my stage. 'world': everybody.
        """
        if axes == "world":
            self.coordinates(rank)  # refuses a rank that is not there
            return tuple(range(self.world_size))
        part = re.fullmatch(r"([a-z]+)([/%])(\d{1,9})", axes)
        if part:
            return self._block(part[1], part[2], int(part[3]), rank)
        chosen = re.fullmatch(r"([a-z]+):(\d{1,9}(?:\+\d{1,9})+)", axes)
        if chosen:
            along = self.ranks(chosen[1], rank)
            picked = tuple(along[int(i)] for i in chosen[2].split("+") if int(i) < len(along))
            if rank in picked and len(picked) == chosen[2].count("+") + 1:
                return picked
        if axes in FOLDED:
            ranks = self.dp * self.cp * self.tp
            first = self.coordinates(rank)["pp"] * ranks  # of my stage
            stage = range(first, first + ranks)
            block = rank - rank % self.ep  # stages begin at multiples of ep
            return tuple(range(block, block + self.ep)) if axes == "ep" else tuple(stage[rank % self.ep :: self.ep])
        free = axes.split()
        if not free or any(axis not in AXES for axis in free):
            raise _unknown_axes(axes)
        here = self.coordinates(rank)
        spots = [here]
        for axis in AXES:
            if axis in free:
                spots = [{**spot, axis: i} for spot in spots for i in range(self.size(axis))]
        return tuple(self._rank(spot) for spot in spots)

    def _block(self, axis: str, kind: str, length: int, rank: int) -> tuple[int, ...]:
        if length < 1 or self.size(axis) % length:
            raise LayoutError("IG104", seen=f"{axis}{kind}{length}", length=length, axis=axis, size=self.size(axis))
        along = self.ranks(axis, rank)
        if kind == "%":
            return along[along.index(rank) % length :: length]
        start = along.index(rank) // length * length
        return along[start : start + length]

    def picture(self) -> str:
        """Which rank sits where, for each pipeline stage: a grid of dp x cp (down) and tp (across), and, where experts
        are spread, one of edp (down) and ep (across)."""
        lines = [f"{self}: {self.world_size} ranks" + (f", zero stage {self.zero}" if self.zero else "")]
        for pp in range(self.pp):
            lines += ["", f"pp{pp}" if self.pp > 1 else ""]
            lines.append(" " * 12 + "".join(f"{f'tp{tp}':>6}" for tp in range(self.tp)))
            for dp in range(self.dp):
                for cp in range(self.cp):
                    name = f"dp{dp}" + (f" cp{cp}" if self.cp > 1 else "")
                    spots = ({"pp": pp, "dp": dp, "cp": cp, "tp": tp} for tp in range(self.tp))
                    lines.append(f"{name:>12}" + "".join(f"{self._rank(spot):>6}" for spot in spots))
            if self.ep > 1:
                first = self._rank({"pp": pp, "dp": 0, "cp": 0, "tp": 0})
                lines += ["", f"{'experts':>12}" + "".join(f"{f'ep{ep}':>6}" for ep in range(self.ep))]
                for edp, rank in enumerate(self.ranks("edp", first)):
                    lines.append(f"{f'edp{edp}':>12}" + "".join(f"{r:>6}" for r in self.ranks("ep", rank)))
        lines += ["", "groups of rank 0:"]
        named = {"tp": "tp", "data (dp cp)": "dp cp", "pp": "pp"}
        named |= {"ulysses": f"cp/{self.ulysses}"} if self.ulysses > 1 else {}
        named |= {"ring": f"cp%{self.ulysses}"} if self.ring > 1 else {}
        named |= {"ep": "ep", "edp": "edp"} if self.ep > 1 else {}
        lines += [f"  {label:<14}{list(self.ranks(axes, 0))}" for label, axes in named.items()]
        return "\n".join(line.rstrip() for line in lines)

    def fits(self, world_size: int) -> list[Layout]:
        """Layouts near this one that need exactly `world_size` ranks, nearest first."""
        if world_size < 1:
            return []
        found = []
        others = self.world_size // self.dp
        if world_size % others == 0:
            found.append(self._resized(dp=world_size // others))
        for tp in (t for t in range(self.tp, 0, -1) if world_size % (self.pp * self.cp * t) == 0):
            found.append(self._resized(tp=tp, dp=world_size // (self.pp * self.cp * tp)))
        found.append(
            self._resized(pp=1, cp=1, tp=math.gcd(self.tp, world_size), dp=world_size // math.gcd(self.tp, world_size))
        )
        return list(dict.fromkeys(found))[:3]

    def _resized(self, **sizes: int) -> Layout:
        merged = {**{name: getattr(self, name) for name in _COUNTS}, **sizes}
        merged["vpp"] = self.vpp if merged["pp"] > 1 else 1
        merged["ep"] = _nearest_ep(self.ep, merged["dp"] * merged["cp"] * merged["tp"], merged["tp"])
        method = self.cp_method if merged["cp"] > 1 else "ulysses"
        schedule = self.schedule if merged["pp"] > 1 else "1f1b"
        return Layout(**merged, cp_method=method, schedule=schedule, sp=self.sp and merged["tp"] > 1, zero=self.zero)


def _refusal(problems: list[str], text: str) -> LayoutError:
    return LayoutError("IG101", seen=repr(text), problems="; ".join(problems), example=_EXAMPLE)


def _meant(token: str) -> str | None:
    """What a word of another library, such as sp2, sp_size=2 or fsdp8, is here."""
    found = re.fullmatch(r"([a-z_]+?)(?:_parallel)?(?:_size|_degree)?[=:]?(-1|\d{1,9})?", token)
    here = next((here for names, here in ELSEWHERE.items() if found and found[1] in names.split()), None)
    if found is None or here is None:
        return None
    if (found[2] or "").startswith("-"):
        return "has no number: write that of the ranks which the other axes leave"
    alone = "; sp, without a number, is Megatron's, on the tp ranks" if found[1] == "sp" else ""
    return f"is {here.format(n=found[2] or 'N')!r} here{alone}"


def _ulysses_block(method: str) -> int | None:
    """2 for 'ulysses2'; None for any word without its number."""
    counted = re.fullmatch(r"ulysses(\d{1,9})", method)
    return int(counted[1]) if counted else None


def _ep_fits(ep: int, ranks: int, tp: int) -> bool:
    return ep >= 1 and ranks % ep == 0 and (tp % ep == 0 or ep % tp == 0)


def _nearest_ep(ep: int, ranks: int, tp: int) -> int:
    """The ep nearest to the one asked for that a stage of `ranks` can have, the smaller of two; tp if none is near."""
    asked = min(ep, ranks)
    near = (n for step in range(1 << 12) for n in (asked - step, asked + step))
    return next((n for n in near if _ep_fits(n, ranks, tp)), tp)


def _unknown_axes(axes: str) -> LayoutError:
    return LayoutError("IG102", seen=axes, axes=f"{axes!r}{did_you_mean(axes, (*AXES, *FOLDED))}")


@cache
def _groups(layout: Layout, axes: str, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Each group is made once: at 16,384 ranks, steps cannot afford one for each rank."""
    found: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for rank in ranks:
        if rank not in seen:
            found.append(layout.ranks(axes, rank))
            seen.update(found[-1])
    return tuple(found)
