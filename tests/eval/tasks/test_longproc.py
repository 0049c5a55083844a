"""LongProc: prompts from the copy of its data, and rule-based scores."""

from __future__ import annotations

import fractions
import itertools
import random

import pytest

from eval.tasks import TASKS
from eval.tasks.base import Absent
from eval.tasks.files import Row
from eval.tasks.longproc import beliefs, countdown, tables, travel
from tests.eval.tasks import written

TASK = TASKS["longproc"]

# The search of LongProc's data for these numbers, with drops of every kind.
SEARCH = """\
Initial number set: [12, 48, 22, 27], target: 11. Options for choosing two numbers: [(12, 48), \
(12, 22), (12, 27), (48, 22), (48, 27), (22, 27)].
 |- Pick two numbers (12, 48) (numbers left: [22, 27]). Try possible operations.
  |- Try 48 + 12 = 60. Add 60 to the number set. Current number set: [60, 22, 27], target: 11. \
Options for choosing two numbers: [(60, 22), (60, 27), (22, 27)].
   |- Pick two numbers (60, 22) (numbers left: [27]). Try possible operations.
    |- Try 60 + 22 = 82. Add 82 to the number set. Current number set: [82, 27], target: 11, \
just two numbers left.
     |- Try 82 + 27 = 109. Evaluate 109 != 11, drop this branch.
     |- Try 82 - 27 = 55. Evaluate 55 != 11, drop this branch.
     |- Try 82 * 27 = 2214. 2214 exceeds the maximum intermediate result, drop this branch.
     |- Try 82 / 27 = 3.0. 3.0 is a decimal, drop this branch.
    |- Try 60 - 22 = 38. Add 38 to the number set. Current number set: [38, 27], target: 11, \
just two numbers left.
     |- Try 38 + 27 = 65. Evaluate 65 != 11, drop this branch.
     |- Try 38 - 27 = 11. Evaluate 11 == 11, target found!
"""
SOLUTION = "48 + 12 = 60\n60 - 22 = 38\n38 - 27 = 11"


def test_the_search_for_a_number_is_written_as_in_the_data():
    assert countdown.worked_example([12, 48, 22, 27], 11) == (
        f"# Search Procedure\n{SEARCH}\n"
        "Now we have found the target, let's trace back the solution:\n"
        "Final step: 38 - 27 = 11\nThe step before: 60 - 22 = 38\nThe first step: 48 + 12 = 60\n\n"
        f"Output the solution in the required format:\n<Solution>\n{SOLUTION}\n</Solution>\n"
    )


def reachable(numbers: tuple[fractions.Fraction, ...]) -> set[fractions.Fraction]:
    """All that the allowed operations make of the numbers, by brute force over pairs."""
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for i, j in itertools.combinations(range(len(numbers)), 2):
        rest = tuple(x for k, x in enumerate(numbers) if k not in (i, j))
        a, b = max(numbers[i], numbers[j]), min(numbers[i], numbers[j])
        results = {a + b, a - b, a * b} | ({a / b} if b else set())
        for x in results:
            if x.denominator == 1 and x < 2000:
                found |= reachable((x, *rest))
    return found


def test_the_search_finds_what_can_be_found():
    for seed in range(20):
        rng = random.Random(seed)
        numbers, target = rng.choices(range(1, 30), k=4), rng.randint(1, 60)
        possible = target in reachable(tuple(map(fractions.Fraction, numbers)))
        try:
            text = countdown.worked_example(numbers, target)
        except ValueError:
            assert not possible
            continue
        solution = text.split("<Solution>\n")[1].split("\n</Solution>")[0]
        assert possible and countdown.solved(solution, numbers, target)


@pytest.mark.parametrize(
    "solution",
    [
        "48 + 12 = 60\n60 - 22 = 38",  # too few
        "48 + 12 = 60\n60 - 22 = 38\n38 - 27 = 12",  # wrong
        "48 + 12 = 60\n60 - 22 = 38\n38 - 28 = 10",  # another number
        "48 + 12 = 60\n48 - 22 = 26\n38 - 27 = 11",  # a number twice
        "48 + 12 = 60\n22 + 27 = 49\n60 + 49 = 109",  # another target
        "48 + 12 = 60\n22 / 0 = 0\n38 - 27 = 11",
        "__import__('os') = 1\n2\n3",
        "48 + " + "9" * 5000 + " = 60\n60 - 22 = 38\n38 - 27 = 11",
        "",
    ],
)
def test_a_wrong_solution(solution):
    assert not countdown.solved(solution, [12, 48, 22, 27], 11)
    assert countdown.solved(SOLUTION, [12, 48, 22, 27], 11)


TRIP = {
    "id": "trip_0",
    "estimated_output_tokens": 900,
    "num_cities": 3,
    "constraints": [
        {"type": "duration", "city": "Florence", "num_days": 6},
        {"type": "fixed", "city": "Florence", "start_day": 9, "end_day": 14},
        {"type": "duration", "city": "Barcelona", "num_days": 5},
        {"type": "duration", "city": "Helsinki", "num_days": 5},
    ],
    "connected_cities": [["Barcelona", "Florence"], ["Helsinki", "Barcelona"]],
    "disambig_question_text": "You plan to visit 3 European cities for 14 days in total.",
    "ground_truth_cities": "Helsinki**Barcelona**Florence",
    "ground_truth_durations": "5**5**6",
    "ground_truth_plan": "Here is the trip plan.\n\n**Day 1-5:** Arriving in Helsinki",
}
PLAN = """\
**Day 1-5:** Arriving in Helsinki and visit Helsinki for 5 days.
**Day 5:** Fly from Helsinki to Barcelona.
**Day 5-9:** Visit Barcelona for 5 days.
**Day 9:** Fly from Barcelona to Florence.
**Day 9-14:** Visit Florence for 6 days."""


def test_the_search_for_a_plan_is_written_in_the_official_words():
    text = travel.worked_example(Row("x", 1, TRIP))
    assert text.startswith(
        "<Solving Procedure>\nRead the requirements and identify the cities that have fixed "
        "schedules and the cities that need to be arranged.\n"
        "* City: Florence, Duration: 6 days, Fixed Schedule: Day 9 - 14.\n"
        "* City: Barcelona, Duration: 5 days.\n* City: Helsinki, Duration: 5 days.\n\n"
        "Cities that have fixed schedules (sorted by their arrival days):\n"
        "* City: Florence, Fixed Schedule: Day 9 - 14.\n\n"
        "Cities needing arrangement:\n* City: Barcelona, Duration: 5 days.\n"
        "* City: Helsinki, Duration: 5 days.\n\n"
        "Current day: 1. Current plan: [].\n"
        "Check whether the city with an arrival day of Day 1 - is fixed.\n"
        "No. Consider possible options from cities needing arrangement: [Barcelona, Helsinki] and "
        "explore these options in order.\n"
        " |- Try arranging to visit Barcelona from Day 1. Duration: 5 days. Schedule: Day 1 - 5.\n"
        " |- Check for direct flight from the starting point to Barcelona.\n |- Yes.\n"
        " |- Check whether this arrangement is compatible with the next fixed schedule after Day "
        "1: Florence (Day 9 - 14).\n"
        " |- The departure day of Barcelona is Day 5. The arrival day of Florence is Day 9. Day 5 "
        "is not later than (<=) Day 9. This arrangement is compatible.\n"
        " |- This arrangement is feasible for now. Continue to arrange the rest of the plan.\n"
        "  |- Current day: 5. Current plan: [Barcelona].\n"
    )
    assert "   |- Check for direct flight from Barcelona to Helsinki.\n   |- No. Drop this" in text
    assert "    |- Yes. The city with an arrival day of Day 9 - is fixed: Florence.\n" in text
    assert text.endswith(
        "      |- All 3 cities are arranged. Complete plan is found!\n</Solving Procedure>\n\n"
        f"Output the plan in the required format:\n<Plan>\n{PLAN}\n</Plan>"
    )


def test_a_plan_is_right_where_cities_and_days_are():
    cities, durations = TRIP["ground_truth_cities"], TRIP["ground_truth_durations"]
    assert travel.same_plan(PLAN, cities, durations)
    assert not travel.same_plan(PLAN.replace("**Day 5:**", "**Day 6:**"), cities, durations)
    assert not travel.same_plan(PLAN.replace("to Florence", "to Rome"), cities, durations)
    assert not travel.same_plan("\n".join(PLAN.split("\n")[:3]), cities, durations)
    assert not travel.same_plan("", cities, durations)
    assert not travel.same_plan(PLAN + "\n1-" + "9" * 5000, cities, durations)
    announced = f"The plan for the 3 European cities for 14 days:\n{PLAN}\nOr: Day 1-3: Rome"
    assert travel.same_plan(announced, cities, durations)


TABLE = "name\tprice\nThe Book\t$5\nPen\t1.50\n"


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (f"Here:\n```tsv\n{TABLE}```", 1),
        (TABLE, 1),
        ("```tsv\nName\tcost\npen\t150\nbook\t5", 1),
        ("```tsv\nname\tprice\nPen\t1.50\nInk\t2\n```", 1 / 2),
        ("```tsv\nname\tprice\nPen\t1.50\nThat was all\n```", 2 / 3),
        ("```tsv\nname\tprice\nPen\t1.50\nbroken\nBook\t5\n```", 2 * (2 / 3) / (5 / 3)),
        ("```tsv\nname\nPen\nBook\n```", 0),
        ("```tsv\nname\tprice\n```", 0),
        ("", 0),
    ],
)
def test_row_f1(reply, score):
    assert tables.row_f1(reply, TABLE) == pytest.approx(score)


TRACE = """\
Leon's belief on the pen:
- Step 0: (initial state) {Leon location: pantry; Leon sees pen: False; belief on pen: None}
- Step 1: (Leon location changed) {Leon location: attic; Leon sees pen: True; belief: attic's rack}
Final Answer: the attic's rack"""


def test_beliefs_are_compared_step_by_step():
    assert beliefs.same_beliefs(TRACE, TRACE)
    assert beliefs.same_beliefs(TRACE.lower().replace("- step", "- Step").replace(";", ","), TRACE)
    assert not beliefs.same_beliefs(TRACE.replace("attic;", "pantry;"), TRACE)
    assert not beliefs.same_beliefs(TRACE.partition("- Step 1")[0], TRACE)
    assert not beliefs.same_beliefs("", TRACE)


def test_the_last_trace_of_a_reply_counts():
    wrong = TRACE.replace("attic", "cellar")
    assert beliefs.same_beliefs(f"{wrong}\nNo, again:\n{TRACE}", TRACE)
    assert not beliefs.same_beliefs(f"{TRACE}\nNo, again:\n{wrong}", TRACE)


@pytest.fixture
def data(tmp_path):
    """A copy of LongProc's folder `data`, one sample a task, with prompts of the same form."""
    prompts = {
        "html_to_tsv": "[TASK]\nRead.\n{html_str}\n\n[TARGET]\n{task_topic}: {task_description}"
        "{filtering_instruction}\n{tsv_header}",
        "path_traversal": "[PROBLEM]\n{city_context}\n\nNow find the route from {src_city} to "
        "{dst_city}.",
        "tom_tracking": "[EXAMPLE] {{braces}}\n[STORY]\n{story}\n\n[QUESTION]\n{question}\n\n"
        "[ANSWER]",
        "countdown": "[EXAMPLES]\n{demonstration}\n\n[Problem]\nNumbers: {nums}\nTarget: {target}",
        "travel_planning": "EXAMPLES:\n{demonstration}\n\nYOUR TASK:\n{problem}",
    }
    rows = {
        "html_to_tsv/html_to_tsv_0.5k": {
            "task_id": "W1", "website_id": "W", "html_path": "./data/html_to_tsv/webpage/W1.html",
            "task_topic": "Goods", "task_description": "(1) Name", "gt": TABLE,
            "tsv_header": "name\tprice", "filtering_instruction": "",
        },
        "path_traversal/path_traversal_2k": {
            "context_nl": "A leads to B by bus.", "question_repr": ["A", "B"],
            "answer_nl": "From A, take a bus to B.\n",
        },
        "tom_tracking/tom_tracking_8k": {
            "story_components": "", "story": "Step 0: Leon {came}.", "question": "Where?",
            "solution": TRACE,
        },
        "countdown/countdown_0.5k": {
            "nums": [12, 48, 22, 27], "target": 11, "solution": SOLUTION.split("\n"),
        },
        "travel_planning/travel_planning_all": TRIP,
        "travel_planning/travel_planning_icl_examples": TRIP,
    }  # fmt: skip
    for name, row in rows.items():
        written.array(tmp_path / f"{name}.json", [row])
    for task, prompt in prompts.items():
        indented = prompt.replace("\n", "\n  ")
        (tmp_path / task / "prompts.yaml").write_text(f"USER_PROMPT: |-\n  {indented}\n")
    page = tmp_path / "html_to_tsv" / "webpage" / "W1.html"
    page.parent.mkdir()
    page.write_text("<p>The {Book}</p>\n")
    return tmp_path


CASES = {
    "html_to_tsv_0.5k": (
        "[TASK]\nRead.\n<p>The {Book}</p>\n", "\n[TARGET]\nGoods: (1) Name\nname\tprice",
        f"```tsv\n{TABLE}```", 1024,
    ),
    "path_traversal_2k": (
        "[PROBLEM]\nA leads to B by bus.", "\nNow find the route from A to B.",
        "<Route>\nFrom A, take a bus to B.\n</Route>", 3072,
    ),
    "tom_tracking_8k": (
        "[EXAMPLE] {braces}\n[STORY]\nStep 0: Leon {came}.", "\n[QUESTION]\nWhere?\n\n[ANSWER]",
        TRACE, 10240,
    ),
    "countdown_0.5k": (
        None, "\n[Problem]\nNumbers: [12, 48, 22, 27]\nTarget: 11",
        f"So\n<Solution>\n{SOLUTION}\n</Solution>", 1024,
    ),
    "travel_planning_2k": (
        None, "\nYOUR TASK:\nYou plan to visit 3 European cities for 14 days in total.",
        f"<Plan>\n{PLAN}\n</Plan>", 3072,
    ),
}  # fmt: skip


@pytest.mark.parametrize("subset", CASES)
def test_prompt_length_and_score(data, subset):
    (sample,) = TASK.load(data, subset)
    context, question, right, length = CASES[subset]
    assert sample.question == question and sample.max_new_tokens == length
    assert sample.context == context or context is None
    assert TASK.score(sample, right) == 1
    assert TASK.score(sample, "") == TASK.score(sample, "<Plan> <Route> <Solution>") == 0


def test_worked_examples_stand_in_the_context(data):
    (sample,) = TASK.load(data, "countdown_0.5k")
    examples = sample.context.removeprefix("[EXAMPLES]\n").split("# Example\n")
    assert [e.partition("\n\n")[0] for e in examples[1:]] == [
        "Numbers: [40, 19, 23, 7]\nTarget: 29",
        "Numbers: [9, 16, 6, 18]\nTarget: 12",
    ]
    assert examples[1].startswith(
        "Numbers: [40, 19, 23, 7]\nTarget: 29\n\n# Search Procedure\nInitial number set: "
    )
    assert sample.context.endswith("</Solution>\n")
    (sample,) = TASK.load(data, "travel_planning_2k")
    assert sample.context == (
        f"EXAMPLES:\n# Example\n{TRIP['disambig_question_text']}\n\n"
        f"{travel.worked_example(Row('x', 1, TRIP))}"
    )


def test_travel_plans_are_those_of_the_size(data):
    rows = [TRIP | {"id": f"t{n}", "estimated_output_tokens": n} for n in (900, 2048, 4096, 8192)]
    written.array(data / "travel_planning" / "travel_planning_all.json", rows)
    assert [s.id for s in TASK.load(data, "travel_planning_2k")] == [
        "longproc/travel_planning_2k/t900"
    ]
    assert [s.id for s in TASK.load(data, "travel_planning_8k")] == [
        "longproc/travel_planning_8k/t4096"
    ]


def test_only_the_sizes_of_travel_planning_share_a_file(data):
    assert TASK.source(data, "travel_planning_2k") is None
    assert TASK.source(data, "countdown_0.5k") == data / "countdown" / "countdown_0.5k.json"


def test_the_path_may_be_the_file(data):
    file = data / "countdown" / "countdown_0.5k.json"
    assert TASK.load(file, "countdown_0.5k") == TASK.load(data, "countdown_0.5k")


def test_what_is_missing_is_absent(data):
    with pytest.raises(Absent, match="countdown_2k"):
        TASK.load(data, "countdown_2k")
    (data / "countdown" / "prompts.yaml").unlink()
    with pytest.raises(Absent, match=r"prompts\.yaml: no such file"):
        TASK.load(data, "countdown_0.5k")
    (data / "html_to_tsv" / "webpage" / "W1.html").unlink()
    with pytest.raises(Absent, match=r"html_to_tsv_0\.5k\.json entry 1: web page .*W1\.html"):
        TASK.load(data, "html_to_tsv_0.5k")


def test_wrong_files_are_refused(data):
    (data / "countdown" / "prompts.yaml").write_text("USER_PROMPT: 5")
    with pytest.raises(ValueError, match="has no USER_PROMPT"):
        TASK.load(data, "countdown_0.5k")
    (data / "countdown" / "prompts.yaml").write_text("USER_PROMPT: '{demonstration} {other}'")
    with pytest.raises(ValueError, match=r"USER_PROMPT does not fit .*nums, target, dem"):
        TASK.load(data, "countdown_0.5k")
    file = data / "path_traversal" / "path_traversal_2k.json"
    written.array(file, [{"context_nl": "A", "question_repr": ["A"], "answer_nl": "x"}])
    with pytest.raises(ValueError, match=r"entry 1: field 'question_repr' is \['A'\]; allowed: a"):
        TASK.load(data, "path_traversal_2k")
    with pytest.raises(ValueError, match="subset 'pseudo_to_code_2k'; allowed: html_to_tsv"):
        TASK.load(data, "pseudo_to_code_2k")
