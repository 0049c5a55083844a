"""LongProc's tables from web pages: F1 of the rows.

Source: LongProc longproc/html_to_tsv_evaluator.py and longproc_data.py `eval_html_to_tsv`.
"""

from __future__ import annotations

import csv
import re

from eval.metrics.f1 import normalised

type Table = list[list[str]]


def row_f1(reply: str, answer: str) -> float:
    """F1 of the rows of the reply's table, in any order, cells without case, spaces, punctuation.

    The table is the block fenced as ```tsv, or the whole reply. Its first line is the heading,
    which is not compared. A last line with another number of cells is dropped; an earlier one
    becomes a row of N/A. A table with another number of columns than the answer's counts 0.
    """
    fenced = re.search(r"```tsv([\s\S]*)```", reply)
    text = fenced[1] if fenced else reply.split("```tsv")[1] if "```tsv" in reply else reply
    found, asked = _table(text), _table(answer)
    if not found or not asked or len(found[0]) != len(asked[0]):
        return 0.0
    precision = sum(row in asked for row in found) / len(found)
    recall = sum(row in found for row in asked) / len(asked)
    if precision + recall == 0:
        return 0.0
    return 2 * precision * recall / (precision + recall)


def _table(text: str) -> Table:
    """Rows of cells in normal form; none where the text is no table."""
    try:
        lines = list(csv.reader(text.strip().split("\n"), delimiter="\t"))
    except csv.Error:
        return []
    heading, body = lines[0], lines[1:]
    if body and len(body[-1]) != len(heading):
        del body[-1]
    missing = ["N/A"] * len(heading)
    rows = [row if len(row) == len(heading) else missing for row in body]
    return [[normalised(cell).replace(" ", "") for cell in row] for row in rows]
