"""LongProc: procedures of 500, 2,000 and 8,000 tokens, written out step by step.

Ye et al., LongProc (arXiv 2501.05414); github.com/princeton-pli/LongProc (longproc/, data/). The
path is a copy of the repository's `data`: a folder for each task with its `prompts.yaml`, the
file `<task>_<size>.json`, the web pages (html_to_tsv) and the worked examples (travel_planning).
The prompts are read from there, so that they are those of the copy.

Replies are scored as officially: F1 of rows for html_to_tsv, all or nothing for the others. The
official partial accuracy, the share of a procedure before its first deviation, is left out, and so
is pseudo_to_code, whose score takes compiling and running what the model wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from eval.tasks import documents, files
from eval.tasks.base import Absent, Sample, Task
from eval.tasks.files import Row
from eval.tasks.longproc import beliefs, countdown, tables, travel

# The field of the prompt behind which it is cut: the last long one.
_LONG = {
    "html_to_tsv": "html_str",
    "path_traversal": "city_context",
    "tom_tracking": "story",
    "countdown": "demonstration",
    "travel_planning": "demonstration",
}
_REPLY_TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 10240}
_COUNTDOWN_EXAMPLES = (([40, 19, 23, 7], 29), ([9, 16, 6, 18], 12))
_TRAVEL_TOKENS = {"2k": (0, 2048), "8k": (4096, 8192)}  # of the written-out search
SUBSETS = tuple(
    f"{task}_{size}"
    for task in _LONG
    for size in _REPLY_TOKENS
    if (task, size) != ("travel_planning", "0.5k")
)


def load(path: Path, subset: str) -> list[Sample]:
    """Every sample of a LongProc file; `path` is the folder `data` or the file itself.

    The context ends with the web page, cities, story or worked examples; context, line break and
    question are the official prompt, except that white space at the seam may be one line break
    more.

    Raises:
      Absent: the file, its prompts.yaml, a web page or the worked examples are missing.
      ValueError: a field is wrong, or the prompt has other fields than the official one.
    """
    documents.check_subset("longproc", subset, SUBSETS)
    task, size = subset.rsplit("_", 1)
    file = _file(path, subset)
    template = _template(file.parent / "prompts.yaml")
    samples = []
    for row, fields in _rows(file, task, size):
        try:
            context, question = documents.prompt_parts(template, _LONG[task], **fields)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"{file.parent / 'prompts.yaml'}: USER_PROMPT does not fit ({error}); allowed "
                f"are the fields {', '.join(fields)}, and {_LONG[task]} once"
            ) from None
        answer, metadata = _answer(row, task)
        samples.append(
            documents.sample(
                task="longproc",
                subset=subset,
                key=row.text("task_id", row.text("id", str(row.number))),
                context=context,
                question=question,
                answers=(answer,),
                max_new_tokens=_REPLY_TOKENS[size],
                metadata=metadata,
            )
        )
    return documents.distinct(samples)


def score(sample: Sample, answer: str) -> float:
    """The official accuracy, or F1 of rows, of the sample's task."""
    task = sample.task.removeprefix("longproc/").rsplit("_", 1)[0]
    (right,) = sample.answers
    metadata = sample.metadata
    match task:
        case "html_to_tsv":
            return tables.row_f1(answer, right)
        case "tom_tracking":
            return float(beliefs.same_beliefs(answer, right))
        case "path_traversal":
            return float(_tagged(answer, "Route") == right.strip())
        case "countdown":
            solution = _tagged(answer, "Solution")
            numbers, target = metadata["numbers"], metadata["target"]
            return float(solution is not None and countdown.solved(solution, numbers, target))
    plan = _tagged(answer, "Plan")
    cities, durations = metadata["cities"], metadata["durations"]
    return float(plan is not None and travel.same_plan(plan, cities, durations))


def source(path: Path, subset: str) -> Path | None:
    """The file of a subset; none for travel_planning, whose sizes are parts of one file."""
    return None if subset.startswith("travel_planning") else _file(path, subset)


def _file(path: Path, subset: str) -> Path:
    task = subset.rsplit("_", 1)[0]
    stem = "travel_planning_all" if task == "travel_planning" else subset
    (file,) = files.found(path, [f"{task}/{stem}", stem], (".json", ".jsonl"))
    return file


def _rows(file: Path, task: str, size: str) -> Iterator[tuple[Row, dict[str, Any]]]:
    """The samples of a size, and the fields of their prompts."""
    examples = _examples(file.parent, task)
    for row in files.rows(file, []):
        match task:
            case "html_to_tsv":
                texts = ("task_topic", "task_description", "tsv_header", "filtering_instruction")
                fields = {name: row.text(name) for name in texts}
                yield row, fields | {"html_str": _page(file.parent, row)}
            case "path_traversal":
                ends = row.texts("question_repr")
                if len(ends) != 2:
                    raise row.refused("question_repr", "a list of 2 texts")
                cities = {"city_context": row.text("context_nl")}
                yield row, cities | {"src_city": ends[0], "dst_city": ends[1]}
            case "tom_tracking":
                names = ("story_components", "story", "question")
                yield row, {name: row.text(name) for name in names}
            case "countdown":
                numbers = list(row.integers("nums"))
                if len(numbers) != 4:
                    raise row.refused("nums", "a list of 4 whole numbers")
                asked = {"nums": numbers, "target": row.integer("target")}
                yield row, asked | {"demonstration": examples}
            case _:
                low, high = _TRAVEL_TOKENS[size]
                if low <= row.integer("estimated_output_tokens") < high:
                    problem = row.text("disambig_question_text")
                    yield row, {"demonstration": examples, "problem": problem}


def _answer(row: Row, task: str) -> tuple[str, dict[str, Any]]:
    """The answer, and what else the score needs."""
    match task:
        case "html_to_tsv":
            return row.text("gt"), {"website_id": row.text("website_id", "")}
        case "path_traversal":
            return row.text("answer_nl"), {}
        case "tom_tracking":
            return row.text("solution"), {}
        case "countdown":
            numbers, target = list(row.integers("nums")), row.integer("target")
            solution = "\n".join(row.texts("solution"))
            return solution, {"numbers": numbers, "target": target}
    cities, durations = row.text("ground_truth_cities"), row.text("ground_truth_durations")
    if len(cities.split("**")) != len(durations.split("**")):
        raise row.refused("ground_truth_durations", "a number for each of ground_truth_cities")
    return row.text("ground_truth_plan"), {"cities": cities, "durations": durations}


def _examples(folder: Path, task: str) -> str:
    if task == "countdown":
        return "\n\n".join(
            f"# Example\nNumbers: {numbers}\nTarget: {target}\n\n"
            f"{countdown.worked_example(numbers, target)}"
            for numbers, target in _COUNTDOWN_EXAMPLES
        )
    if task == "travel_planning":
        (file,) = files.found(folder, ["travel_planning_icl_examples"], (".json",))
        return "\n\n".join(
            f"# Example\n{row.text('disambig_question_text')}\n\n{travel.worked_example(row)}"
            for row in files.rows(file, [])
        )
    return ""


def _template(file: Path) -> str:
    if not file.is_file():
        raise Absent(f"{file}: no such file; LongProc's prompts are read from it")
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("USER_PROMPT"), str):
        raise ValueError(f"{file}: has no USER_PROMPT; allowed is a mapping with that text")
    return content["USER_PROMPT"]


def _page(folder: Path, row: Row) -> str:
    """The web page: at the path the file gives, or under its name in `webpage`."""
    given = Path(row.text("html_path"))
    for page in (folder / given, folder / "webpage" / given.name):
        if page.is_file():
            return page.read_text(encoding="utf-8")
    raise Absent(f"{row.place}: web page {given} is neither in {folder} nor in its webpage/")


def _tagged(reply: str, tag: str) -> str | None:
    start, end = reply.find(f"<{tag}>"), reply.find(f"</{tag}>")
    return None if -1 in (start, end) else reply[start + len(tag) + 2 : end].strip()


TASK = Task(
    name="longproc",
    summary="LongProc: long procedures written out step by step",
    load=load,
    source=source,
    score=score,
    subsets=SUBSETS,
    haystacks=lambda subset: (),
)
