"""LongProc's countdown: reach a target from four numbers with the four operations, by search.

Source: LongProc longproc/countdown_evaluator.py.
"""

from __future__ import annotations

import itertools
import operator
from fractions import Fraction

_LIMIT = 2000  # intermediate results from here on are dropped
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": Fraction}


def worked_example(numbers: list[int], target: int) -> str:
    """The search for `target` as LongProc writes it out, and the solution it ends with.

    Depth first: pairs in order, of each pair the sum, difference, product and quotient of the
    larger and the smaller number, which replaces them at the front.

    Raises:
      ValueError: no three operations reach the target.
    """
    opening = f"Initial number set: {numbers}, target: {target}. {_options(numbers)}"
    lines = [opening]
    steps = _explore(numbers, target, 1, lines)
    if steps is None:
        raise ValueError(f"numbers {numbers}: do not reach {target}")
    first, second, last = steps
    search = "\n".join(lines)
    return (
        f"# Search Procedure\n{search}\n\nNow we have found the target, let's trace back the "
        f"solution:\nFinal step: {last}\nThe step before: {second}\nThe first step: {first}\n\n"
        f"Output the solution in the required format:\n<Solution>\n{first}\n{second}\n{last}\n"
        "</Solution>\n"
    )


def solved(solution: str, numbers: list[int], target: int) -> bool:
    """Whether three right equations, a line each, use every number once and reach the target.

    The official check evaluates the left sides as Python; this reads them as a number, an
    operation and a number, which is all that it accepts in the end.
    """
    lines = solution.split("\n")
    left = list(numbers)
    if len(lines) != 3:
        return False
    for line in lines:
        equation = _equation(line)
        if equation is None:
            return False
        a, b, result = equation
        for used in (a, b):
            if used not in left:
                return False
            left.remove(used)
        left.append(result)
    return left[0] == target


def _explore(numbers: list[int], target: int, depth: int, lines: list[str]) -> list[str] | None:
    """The steps that reach the target, what was tried on the way being added to `lines`."""
    for i, j in itertools.combinations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [x for k, x in enumerate(numbers) if k not in (i, j)]
        inner = depth
        if len(numbers) > 2:
            lines.append(
                f"{_indent(depth)}Pick two numbers ({a}, {b}) (numbers left: {rest}). "
                "Try possible operations."
            )
            inner = depth + 1
        a, b = max(a, b), min(a, b)
        for sign in _OPERATIONS:
            steps = _try(a, sign, b, rest, target, inner, lines)
            if steps is not None:
                return steps
    return None


def _try(
    a: int, sign: str, b: int, rest: list[int], target: int, depth: int, lines: list[str]
) -> list[str] | None:
    tried = f"{_indent(depth)}Try {a} {sign} {b}"
    if sign == "/" and b == 0:
        lines.append(f"{tried} (invalid operation). drop this branch.")
        return None
    exact = _OPERATIONS[sign](a, b)
    if exact != int(exact):
        lines.append(f"{tried} = {a / b:.1f}. {a / b:.1f} is a decimal, drop this branch.")
        return None
    value = int(exact)
    tried = f"{tried} = {value}."
    step = f"{a} {sign} {b} = {value}"
    if value >= _LIMIT:
        lines.append(f"{tried} {value} exceeds the maximum intermediate result, drop this branch.")
        return None
    if not rest:
        reached = value == target
        outcome = "== {}, target found!" if reached else "!= {}, drop this branch."
        lines.append(f"{tried} Evaluate {value} {outcome.format(target)}")
        return [step] if reached else None
    numbers = [value, *rest]
    line = f"{tried} Add {value} to the number set. Current number set: {numbers}, target: {target}"
    if len(numbers) == 2:
        lines.append(f"{line}, just two numbers left.")
    else:
        lines.append(f"{line}. {_options(numbers)}")
    steps = _explore(numbers, target, depth + 1, lines)
    return None if steps is None else [step, *steps]


def _options(numbers: list[int]) -> str:
    return f"Options for choosing two numbers: {list(itertools.combinations(numbers, 2))}."


def _indent(depth: int) -> str:
    return " " * depth + "|- "


def _equation(line: str) -> tuple[int, int, int] | None:
    """The numbers of a right equation "a + b = c"; None for any other text."""
    sides = line.strip().split("=")
    sign = next((s for s in _OPERATIONS if s in sides[0]), None)
    if len(sides) != 2 or sign is None:
        return None
    try:
        a, b = map(int, sides[0].split(sign))
        result = int(sides[1])
        right = _OPERATIONS[sign](a, b) == result
    except (ValueError, ZeroDivisionError):
        return None
    return (a, b, result) if right else None
