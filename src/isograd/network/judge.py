"""What is wrong with a network, its machines or their code, and with which ranks; and the tables that people read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from isograd.errors import NetworkError
from isograd.network.facts import Facts
from isograd.network.line import Line
from isograd.network.survey import Survey

CLOCK_S = 1.0  # clocks further apart than this make logs of two machines unreadable
SHOWN = 6


def judge(found: Survey) -> list[NetworkError]:
    """Everything that is wrong, the causes first."""
    facts = found.facts
    return [
        *_interfaces(facts), *_connections(found), *_joins(found), *_differ(facts, "versions", "IG295"),
        *_differ(facts, "code", "IG296"), *_clocks(found),
    ]  # fmt: skip


def _interfaces(facts: Sequence[Facts]) -> list[NetworkError]:
    hosts = {one.host for one in facts}
    none = [one for one in facts if not one.address]
    looped = [one for one in facts if one.address.startswith("127.") and len(hosts) > 1]
    errors = []
    for wrong, seen in ((none, "no such interface, or none with an IPv4 address"), (looped, "the loopback address")):
        if wrong:
            said = [f"{one.variable or 'no variable set'}: {one.address or 'no address'}" for one in wrong]
            errors.append(NetworkError(
                "IG293", "the interface at which ranks would listen cannot be reached from other machines",
                seen=f"{seen} on {_ranks(wrong)} ({', '.join(sorted(set(said)))})",
                expected="the interface that connects the machines",
                fix=f"set {wrong[0].backend.upper()}_SOCKET_IFNAME to its name on every machine; "
                "'ip -brief address' lists them",
            ))  # fmt: skip
    return errors


def _connections(found: Survey) -> list[NetworkError]:
    broken = [line for line in found.lines if line.error]
    if not broken:
        return []
    facts = found.facts

    def spell(line: Line) -> str:
        a, b = facts[line.source], facts[line.target]
        return f"rank {a.rank} on {a.host} to rank {b.rank} on {b.host} ({b.address}:{b.port}): {line.error}"

    return [
        NetworkError(
            "IG292", f"{len(broken)} of {len(found.lines)} connections between ranks cannot be made",
            seen="; ".join(map(spell, broken[:SHOWN])) + ("; ..." if len(broken) > SHOWN else ""),
            expected="TCP between all machines, in both directions, at any port above 1023",
            fix="open these ports between the machines; ranks listen at ports that the system chooses "
            "('sysctl net.ipv4.ip_local_port_range')",
        )
    ]  # fmt: skip


def _joins(found: Survey) -> list[NetworkError]:
    if not found.joined:
        return []
    backend = found.facts[0].backend
    return [
        NetworkError(
            "IG297", f"a world of these ranks over {backend} does not work, although their connections do",
            seen="; ".join(f"rank {rank}: {why}" for rank, why in list(found.joined.items())[:SHOWN]),
            expected="a world that sums a number", fix="set NCCL_DEBUG=INFO for NCCL; read the first rank's error",
        )
    ]  # fmt: skip


def _differ(facts: Sequence[Facts], part: str, code: str) -> list[NetworkError]:
    """Of versions or code: which ranks are not as most are, and in what."""
    values: list[dict[str, str]] = [getattr(one, part) for one in facts]
    usual = Counter(json.dumps(value, sort_keys=True) for value in values).most_common(1)[0][0]
    most: dict[str, str] = json.loads(usual)
    other = [one for one, value in zip(facts, values, strict=True) if value != most]
    if not other:
        return []
    theirs: dict[str, str] = getattr(other[0], part)
    differ = "differs" if part == "code" else "differ"
    names = [name for name in sorted({*most, *theirs}) if most.get(name) != theirs.get(name)]
    seen = [f"{name} {theirs.get(name, 'is missing')} on {_ranks(other)}, {most.get(name, 'missing')} on the others"
            for name in names[:SHOWN]]  # fmt: skip
    return [
        NetworkError(
            code, f"{part} {differ} between ranks", seen="; ".join(seen) + ("; ..." if len(names) > SHOWN else ""),
            expected=f"the same {part} on every machine",
            fix="install the same versions" if part == "versions" else "copy the same files to every machine",
        )
    ]  # fmt: skip


def _clocks(found: Survey) -> list[NetworkError]:
    apart = [line for line in found.lines if line.clock_s is not None and abs(line.clock_s) > CLOCK_S]
    if not apart:
        return []
    worst = max(apart, key=lambda line: abs(line.clock_s or 0.0))
    a, b = found.facts[worst.source], found.facts[worst.target]
    return [
        NetworkError(
            "IG294", "clocks of machines differ",
            seen=f"the clock of {b.host} is {worst.clock_s:+.1f} s from that of {a.host}",
            expected=f"at most {CLOCK_S:g} s: logs, and the times of files, are compared between machines",
            fix="start a time service (chrony, systemd-timesyncd) on every machine",
        )
    ]  # fmt: skip


def _ranks(facts: Sequence[Facts]) -> str:
    hosts = sorted({one.host for one in facts})
    numbers = ", ".join(str(one.rank) for one in facts[:SHOWN]) + (", ..." if len(facts) > SHOWN else "")
    return f"rank{'s' if len(facts) > 1 else ''} {numbers} ({', '.join(hosts[:SHOWN])})"


def text(found: Survey, errors: Sequence[NetworkError]) -> str:
    """The tables, then what is wrong."""
    by_host: dict[str, list[Facts]] = {}
    for one in found.facts:
        by_host.setdefault(one.host, []).append(one)
    ranks: list[tuple[str, ...]] = [("machine", "ranks", "interface", "address", "python", "torch", "isograd")]
    for host, ours in by_host.items():
        first = ours[0]
        numbers = ",".join(str(one.rank) for one in ours[:SHOWN]) + (",..." if len(ours) > SHOWN else "")
        ranks.append((host, numbers, first.interface or "-", first.address or "-", *first.versions.values()))
    lines: list[tuple[str, ...]] = [("between", "and", "pairs", "latency", "worst", "Gbit/s", "worst", "clock")]
    pairs: dict[tuple[str, str], list[Line]] = {}
    for line in found.lines:
        ends = sorted((found.facts[line.source].host, found.facts[line.target].host))
        pairs.setdefault((ends[0], ends[1]), []).append(line)
    for (a, b), of_pair in sorted(pairs.items()):
        late = [line.latency_us for line in of_pair if line.latency_us is not None]
        fast = [speed * 8e-9 for line in of_pair for speed in (line.there, line.back) if speed is not None]
        clocks = [line.clock_s for line in of_pair if line.clock_s is not None]
        lines.append((
            a, b, str(len(of_pair) // 2), _or_none(late, median, "{:.0f} us"), _or_none(late, max, "{:.0f} us"),
            _or_none(fast, median, "{:.2f}"), _or_none(fast, min, "{:.2f}"),
            _or_none([abs(clock) * 1e3 for clock in clocks], max, "{:.1f} ms"),
        ))  # fmt: skip
    verdict = [str(error) for error in errors] or ["nothing is wrong"]
    return "\n\n".join(["\n".join(_columns(ranks)), "\n".join(_columns(lines)), *verdict])


def _or_none(values: Sequence[float], of: Callable[[Sequence[float]], float], form: str) -> str:
    return form.format(of(values)) if values else "none"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def as_json(found: Survey, errors: Sequence[NetworkError]) -> dict[str, Any]:
    """The same for programs; the code of ranks is left out."""
    said = [{"code": e.code, "what": e.what, "seen": e.seen, "expected": e.expected, "fix": e.fix} for e in errors]
    ranks = [{name: value for name, value in asdict(one).items() if name != "code"} for one in found.facts]
    return {"ranks": ranks, "lines": [asdict(line) for line in found.lines], "findings": said}
