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
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9a-z]*)\[([0-9,]*)\]")
_CALLEES = re.compile(r"\b(?:body|to_apply|calls|condition)=([^,\s]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}|\b(?:true|false)_computation=([^,\s]+)")
# Fusions of a TPU's program that carry on, or end, a collective that another one has started.
_REPEATS = re.compile(r"^\s+%?async-collective-done\b|\bcalls=%?async_collective_fusion\b")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_OPERANDS = re.compile(r" while\(([^)]*)\)")
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
    """Reads the text of a compiled program (`compiled.as_text()`).

    A TPU's compiler writes a collective that overlaps with other work several times, into the
    fusions that start, carry on and end it: the start counts. Channels do not tell collectives
    apart: those of a `shard_map` share one.
    """
    program = _Program(text)
    found, unknown = program.of(program.entry)
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for exchanged in found.values():
        count[exchanged.kind] += exchanged.times
        size[exchanged.kind] += exchanged.times * exchanged.bytes
    return Traffic(count, size, unknown)


@dataclasses.dataclass(frozen=True)
class _Exchanged:
    """What one instruction exchanges."""

    kind: str
    bytes: int  # each time
    times: int


class _Program:
    """A program's computations, and what each of them exchanges by instruction."""

    def __init__(self, text: str):
        self.bodies, self.entry = _computations(text)
        self._known: dict[str, tuple[dict[str, _Exchanged], int]] = {}

    def of(self, name: str) -> tuple[dict[str, _Exchanged], int]:
        """What a run of the computation exchanges, and how many loops of unknown length do."""
        if name not in self._known:
            self._known[name] = self._total(name)
        return self._known[name]

    def _total(self, name: str) -> tuple[dict[str, _Exchanged], int]:
        found: dict[str, _Exchanged] = {}
        unknown = 0
        for line in self.bodies.get(name, []):
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            label, shape, opcode = match.groups()
            kind = opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                own = _Exchanged(kind=kind, bytes=_result_bytes(shape, opcode), times=1)
                _add(found, {f"{name}/{label}": own})
                continue
            if _REPEATS.search(line):
                continue
            called = [self.of(callee.lstrip("%")) for callee in _CALLEES.findall(line)]
            if branches := _branches(line):
                called.append(max(map(self.of, branches), key=lambda branch: _bytes(branch[0])))
            trips = self._trips(name, line) if opcode == "while" else 1
            for inner, loops in called:
                unknown += loops + (trips is None and bool(inner))
                _add(found, inner, 1 if trips is None else trips)
        return found, unknown

    def _trips(self, name: str, line: str) -> int | None:
        """How often a loop runs: as the compiler says, or as its counter and condition do."""
        if known := _TRIPS.search(line):
            return int(known[1])
        condition, body = _CONDITION.search(line), _BODY.search(line)
        given = _OPERANDS.search(line)
        if condition is None or body is None or given is None:
            return None
        test = self._root(condition[1])
        if test is None or "direction=LT" not in test or len(_operands(test)) != 2:
            return None
        left, right = _operands(test)
        end, counter = self._constant(condition[1], right), self._index(condition[1], left)
        if end is None or counter is None:
            return None
        start = self._element(name, given[1].split(",")[0].strip(), counter)
        step = self._step(body[1], counter)
        if start is None or step is None or step < 1:
            return None
        return max(0, -(-(end - start) // step))

    def _line(self, name: str, label: str) -> str | None:
        label = label.strip().split(" ")[-1].lstrip("%")
        start = re.compile(rf"^\s+(?:ROOT )?%?{re.escape(label)} = ")
        return next((line for line in self.bodies.get(name, []) if start.match(line)), None)

    def _root(self, name: str) -> str | None:
        return next((line for line in self.bodies.get(name, []) if "ROOT " in line), None)

    def _constant(self, name: str, label: str) -> int | None:
        """The integer an instruction is, looked for behind copies."""
        line = self._line(name, label)
        while line is not None and (match := _INSTRUCTION.match(line)):
            if match[3] == "constant":
                value = re.search(r" constant\((-?\d+)\)", line)
                return int(value[1]) if value else None
            if match[3] not in ("copy", "bitcast"):
                return None
            line = self._line(name, _operands(line)[0])
        return None

    def _index(self, name: str, label: str) -> int | None:
        """Which element of a computation's argument an instruction is, looked for behind copies."""
        line = self._line(name, label)
        while line is not None and (match := _INSTRUCTION.match(line)):
            if match[3] == "get-tuple-element":
                index = re.search(r"index=(\d+)", line)
                return int(index[1]) if index else None
            if match[3] not in ("copy", "bitcast"):
                return None
            line = self._line(name, _operands(line)[0])
        return None

    def _element(self, name: str, label: str, index: int) -> int | None:
        """The integer that is an element of a tuple."""
        line = self._line(name, label)
        if line is None or " tuple(" not in line:
            return None
        parts = _operands(line)
        return self._constant(name, parts[index]) if index < len(parts) else None

    def _step(self, body: str, counter: int) -> int | None:
        """What a loop's body adds to its counter."""
        root = self._root(body)
        if root is None or " tuple(" not in root:
            return None
        results = _operands(root)
        line = self._line(body, results[counter]) if counter < len(results) else None
        while line is not None and " copy(" in line:
            line = self._line(body, _operands(line)[0])
        if line is None or " add(" not in line or len(_operands(line)) != 2:
            return None
        left, right = _operands(line)
        if self._index(body, left) == counter:
            return self._constant(body, right)
        return self._constant(body, left) if self._index(body, right) == counter else None


def _add(found: dict[str, _Exchanged], more: dict[str, _Exchanged], times: int = 1) -> None:
    for label, exchanged in more.items():
        before = found[label].times if label in found else 0
        found[label] = dataclasses.replace(exchanged, times=before + times * exchanged.times)


def _bytes(found: dict[str, _Exchanged]) -> int:
    return sum(exchanged.times * exchanged.bytes for exchanged in found.values())


def _operands(line: str) -> list[str]:
    """The operands of an instruction, types left out."""
    match = _INSTRUCTION.match(line)
    assert match is not None
    inner = line[match.end() :].partition(")")[0]
    return [re.sub(r"/\*.*?\*/", "", part).strip() for part in inner.split(", ")]


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
        elif line.rstrip() == "}":  # a kernel's settings have lines that only begin so
            current = None
        elif current is not None:
            bodies[current].append(line)
    if not entry:
        raise ValueError("no ENTRY computation in the program's text")
    return bodies, entry


def _result_bytes(shape: str, opcode: str) -> int:
    arrays = [
        _BYTES[dtype] * math.prod(int(n) for n in sizes.split(",") if n)
        for dtype, sizes in _ARRAY.findall(shape)
        if sizes or not opcode.endswith("-start")  # what starts one gives counters beside
    ]
    # What starts one of these gives its operands and then its results, as many of each.
    both = opcode.endswith("-start") and opcode != "all-reduce-start"
    return sum(arrays[len(arrays) // 2 :]) if both and len(arrays) > 1 else sum(arrays)
