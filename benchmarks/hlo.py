"""What a compiled program exchanges between devices, loops counted as often as they run.

Of branches the one counts that exchanges most.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2,
    "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8,
}  # fmt: skip
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9a-z]*)\[([0-9,]*)\]")
_CALLEES = re.compile(r"\b(?:body|to_apply|calls|condition)=([^,\s]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}|\b(?:true|false)_computation=([^,\s]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one run of a program on one device: how many, and bytes of their results."""

    count: Counter[str]
    bytes: Counter[str]
    unknown_loops: int  # that exchange something and do not say how often they run; counted once

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


def traffic(text: str) -> Traffic:
    """Reads the text of a compiled program (`compiled.as_text()`)."""
    bodies, entry = _computations(text)
    known: dict[str, Traffic] = {}

    def of(name: str) -> Traffic:
        if name not in known:
            known[name] = total(bodies.get(name, []))
        return known[name]

    def total(lines: list[str]) -> Traffic:
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        unknown = 0
        for line in lines:
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            shape, opcode = match.groups()
            kind = opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                count[kind] += 1
                size[kind] += _result_bytes(shape, opcode.endswith("-start"))
                continue
            trips = _TRIPS.search(line)
            called = [of(callee.lstrip("%")) for callee in _CALLEES.findall(line)]
            if branches := _branches(line):
                called.append(max(map(of, branches), key=lambda branch: branch.total_bytes))
            for inner in called:
                times = int(trips[1]) if trips and opcode == "while" else 1
                unknown += inner.unknown_loops
                if opcode == "while" and trips is None and inner.count:
                    unknown += 1
                for name in inner.count:
                    count[name] += times * inner.count[name]
                    size[name] += times * inner.bytes[name]
        return Traffic(count, size, unknown)

    return of(entry)


def _branches(line: str) -> list[str]:
    names = ",".join(several or one for several, one in _BRANCHES.findall(line))
    return [name.strip().lstrip("%") for name in names.split(",") if name]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head is not None:
            current = head[2]
            bodies[current] = []
            entry = current if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            bodies[current].append(line)
    if not entry:
        raise ValueError("no ENTRY computation in the program's text")
    return bodies, entry


def _result_bytes(shape: str, started: bool) -> int:
    arrays = [
        _BYTES.get(dtype, 0) * math.prod(int(n) for n in sizes.split(",") if n)
        for dtype, sizes in _ARRAY.findall(shape)
    ]
    # What starts a collective gives its operands and its results, half and half at least.
    return sum(arrays[len(arrays) // 2 :]) if started and len(arrays) > 1 else sum(arrays)
