"""LongProc's travel planning: cities in an order that flights and fixed dates allow, by search.

Source: LongProc longproc/travel_planning_evaluator.py; the plan's check is that of NATURAL PLAN
(arXiv 2406.04520).
"""

from __future__ import annotations

import dataclasses
import re

from eval.tasks.files import Row

_START = "the starting point"


@dataclasses.dataclass(frozen=True)
class _Stay:
    city: str
    start: int
    end: int

    @property
    def days(self) -> int:
        return self.end - self.start + 1


def worked_example(problem: Row) -> str:
    """The search for a plan as LongProc writes it out, and the plan.

    Raises:
      ValueError: a field is wrong, or there is no plan.
    """
    constraints = problem.rows("constraints")
    fixed = [
        _Stay(c.text("city"), c.integer("start_day"), c.integer("end_day"))
        for c in constraints
        if c.text("type") == "fixed"
    ]
    durations = [
        (c.text("city"), c.integer("num_days")) for c in constraints if c.text("type") != "fixed"
    ]
    dates = {stay.city: stay for stay in fixed}
    free = [(city, days) for city, days in durations if city not in dates]
    lines = [
        "Read the requirements and identify the cities that have fixed schedules and the cities "
        "that need to be arranged."
    ]
    for city, days in durations:
        stay = dates.get(city)
        schedule = f", Fixed Schedule: Day {stay.start} - {stay.end}" if stay else ""
        lines.append(f"* City: {city}, Duration: {days} days{schedule}.")
    fixed.sort(key=lambda stay: stay.start)
    lines += _listed(
        "Cities that have fixed schedules (sorted by their arrival days):",
        [f"* City: {s.city}, Fixed Schedule: Day {s.start} - {s.end}." for s in fixed],
        "Cities that have fixed schedules: None.",
    )
    lines += _listed(
        "Cities needing arrangement:",
        [f"* City: {city}, Duration: {days} days." for city, days in free],
        "Cities needing arrangement: None.",
    )
    lines.append("")
    flights = _flights(problem)
    plan = _arrange(1, problem.integer("num_cities"), [], free, fixed, flights, lines)
    if plan is None:
        raise problem.refused("constraints", "constraints that some plan meets")
    search = "\n".join(lines)
    return (
        f"<Solving Procedure>\n{search}\n</Solving Procedure>\n\n"
        f"Output the plan in the required format:\n<Plan>\n{_written(plan)}\n</Plan>"
    )


def same_plan(plan: str, cities: str, durations: str) -> bool:
    """Whether the flights of `plan` visit the cities in order, each for its number of days.

    `cities` and `durations` are separated by two asterisks. As in the official check, names of
    cities are single words, and cities after the last right one do not matter.
    """
    if re.search(r"\d{10}", plan):  # no day, and maybe more digits than Python reads as a number
        return False
    visits: list[str] = []
    departures, last, total = [], None, None
    for line in plan.split("\n"):
        announced = re.search(r"European cities for (\d+) days", line)
        if announced:
            total = int(announced[1])
        visit = re.search(r"\d+-(\d+)", line)
        if visit:
            last = int(visit[1])
            if last == total:  # another plan may follow
                break
        flight = re.search(r".*Day (\d+).*from (\w+) to (\w+)", line)
        if flight:
            departures.append(int(flight[1]))
            visits += [flight[3]] if visits else [flight[2], flight[3]]
    if last is None or not visits:
        return False
    days = [1, *departures, last]
    made = [(city, days[i + 1] - days[i] + 1) for i, city in enumerate(visits)]
    asked = list(
        zip(
            [city for city in cities.split("**") if city],
            [int(n) for n in durations.split("**") if n],
            strict=True,
        )
    )
    return made[: len(asked)] == asked


def _arrange(
    day: int,
    number: int,
    plan: list[_Stay],
    free: list[tuple[str, int]],
    fixed: list[_Stay],
    flights: set[tuple[str, str]],
    lines: list[str],
) -> list[_Stay] | None:
    """A plan that begins with `plan`, what was tried on the way being added to `lines`."""
    indent = _indent(len(plan) * 2)
    lines.append(f"{indent}Current day: {day}. Current plan: {_names(s.city for s in plan)}.")
    if len(plan) == number:
        lines.append(f"{indent}All {number} cities are arranged. Complete plan is found!")
        return plan
    arrival = f"the city with an arrival day of Day {day} - is fixed"
    lines.append(f"{indent}Check whether {arrival}.")
    due = next((stay for stay in fixed if stay.start == day), None)
    if due is not None:
        lines.append(f"{indent}Yes. T{arrival[1:]}: {due.city}.")
        options = [due]
    else:
        lines.append(
            f"{indent}No. Consider possible options from cities needing arrangement: "
            f"{_names(city for city, _ in free)} and explore these options in order."
        )
        options = [_Stay(city, day, day + days - 1) for city, days in free]
    last = plan[-1].city if plan else _START
    following = next((stay for stay in fixed if stay.start > day), None)
    indent = _indent(len(plan) * 2 + 1)
    for stay in options:
        if not _feasible(stay, day, last, following, flights, indent, lines):
            continue
        lines.append(
            f"{indent}This arrangement is feasible for now. Continue to arrange the rest of the "
            "plan."
        )
        rest = [option for option in free if option[0] != stay.city]
        found = _arrange(stay.end, number, [*plan, stay], rest, fixed, flights, lines)
        if found is not None:
            return found
    lines.append(
        f"{indent}Fail to arrange any option on day {day} in the current arrangement. Drop this "
        "branch."
    )
    return None


def _feasible(
    stay: _Stay,
    day: int,
    last: str,
    following: _Stay | None,
    flights: set[tuple[str, str]],
    indent: str,
    lines: list[str],
) -> bool:
    """Whether a flight leads there and the next fixed date is met."""
    lines.append(
        f"{indent}Try arranging to visit {stay.city} from Day {day}. Duration: {stay.days} days. "
        f"Schedule: Day {day} - {day + stay.days - 1}."
    )
    lines.append(f"{indent}Check for direct flight from {last} to {stay.city}.")
    if last != _START and (last, stay.city) not in flights:
        lines.append(f"{indent}No. Drop this branch.")
        return False
    lines.append(f"{indent}Yes.")
    check = (
        f"{indent}Check whether this arrangement is compatible with the next fixed schedule after "
        f"Day {day}: "
    )
    if following is None:
        lines.append(f"{check}None.")
        lines.append(f"{indent}No following fixed schedules. This arrangement is compatible.")
        return True
    lines.append(f"{check}{following.city} (Day {following.start} - {following.end}).")
    late = following.start < stay.end
    verdict = "later than (>)" if late else "not later than (<=)"
    outcome = "incompatible. Drop this branch." if late else "compatible."
    lines.append(
        f"{indent}The departure day of {stay.city} is Day {stay.end}. The arrival day of "
        f"{following.city} is Day {following.start}. Day {stay.end} is {verdict} Day "
        f"{following.start}. This arrangement is {outcome}"
    )
    return not late


def _written(plan: list[_Stay]) -> str:
    lines = []
    for i, stay in enumerate(plan):
        visit = f"Arriving in {stay.city} and visit" if i == 0 else "Visit"
        lines.append(f"**Day {stay.start}-{stay.end}:** {visit} {stay.city} for {stay.days} days.")
        if i + 1 < len(plan):
            lines.append(f"**Day {stay.end}:** Fly from {stay.city} to {plan[i + 1].city}.")
    return "\n".join(lines)


def _flights(problem: Row) -> set[tuple[str, str]]:
    pairs = problem.values.get("connected_cities")
    if not isinstance(pairs, list) or any(
        not isinstance(p, list) or [type(c) for c in p] != [str, str] for p in pairs
    ):
        raise problem.refused("connected_cities", "a list of pairs of texts")
    return {(a, b) for a, b in pairs}


def _listed(heading: str, items: list[str], none: str) -> list[str]:
    return ["", heading, *items] if items else ["", none]


def _names(cities) -> str:
    return f"[{', '.join(cities)}]"


def _indent(depth: int) -> str:
    return " " * depth + "|- " if depth else ""
