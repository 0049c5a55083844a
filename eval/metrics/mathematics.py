"""Final answers of worked mathematics: found in a reply, and compared.

The comparison is a rule for short answers, not algebra: two expressions that are equal but written
with another order of terms or factors count as different. It follows `is_equiv` of the MATH data
set (github.com/hendrycks/math, math_equivalence.py) and adds numeric equality. A checker with a
computer algebra system accepts more.
"""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_BOXED = re.compile(r"\\f?box(?:ed)?\s*\{|\\boxed\s")
_DROPPED = (r"\left", r"\right", r"\!", r"\,", r"\;", r"\:", r"\ ", r"\$", "$", r"\%", "%")
_WORDS = re.compile(r"\\(?:text(?:bf|it|rm)?|mbox|math(?:rm|bf)|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\d}])\s*(?:\\(?:text(?:rm)?|mbox|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?"
    r"|\s[A-Za-z]{2,}[A-Za-z. ]*)$"
)


def final_answer(reply: str) -> str | None:
    r"""The last \boxed{...} or \fbox{...}; else the text after the last ####; else the last number.

    Of a reply that thinks between <think> and </think>, only what follows the thought counts,
    where anything does.
    """
    after = reply.rpartition("</think>")[2]
    reply = after if after.strip() else reply
    boxed = _last_boxed(reply)
    if boxed is not None:
        return boxed.strip()
    if "####" in reply:
        lines = reply.rpartition("####")[2].strip().splitlines()
        return lines[0].strip() if lines else None
    numbers = _NUMBER.findall(reply)
    return numbers[-1].rstrip(",") if numbers else None


def same_answer(found: str | None, answer: str) -> bool:
    """Whether two answers are the same number, or the same text in normal form.

    Tuples, sets and intervals are compared part by part, brackets included.
    """
    if found is None:
        return False
    a, b = normal_form(found), normal_form(answer)
    if a == b:
        return True
    x, y = _value(a), _value(b)
    if x is not None and y is not None:
        return x == y
    parts, others = _parts(a), _parts(b)
    return (
        len(parts) == len(others) > 1
        and (a[0], a[-1]) == (b[0], b[-1])
        and all(map(same_answer, parts, others))
    )


def normal_form(latex: str) -> str:
    r"""An answer without units, spacing and variants of notation.

    Dropped: dollar and per cent signs, \left, \right, thin spaces, degrees, thousands commas, a
    full stop at the end, words after a number, "x =" before a value, brackets around one letter.
    Unified: \dfrac and \tfrac to \frac, \frac12 to \frac{1}{2}, a/b of whole numbers to
    \frac{a}{b}, \sqrt3 to \sqrt{3}, .5 to 0.5, \text{A} to A.
    """
    text = latex.strip().rstrip(".").replace("\n", " ")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree|°", "", text)
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    text = _WORDS.sub(r"\1", _UNIT.sub("", text))
    text = re.sub(r"^\s*\\?[A-Za-z]\s*(?:\([A-Za-z]\))?\s*=\s*", "", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\s+", "", text)
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    text = re.sub(r"^\(([A-Z])\)$", r"\1", text)
    return re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)


def _last_boxed(text: str) -> str | None:
    """What the last closed box holds; one without braces ends with its line."""
    for match in reversed(list(_BOXED.finditer(text))):
        rest = text[match.end() :]
        if not match[0].endswith("{"):
            return re.split(r"[$\n]", rest)[0]
        depth = 1
        for i, c in enumerate(rest):
            depth += (c == "{") - (c == "}")
            if depth == 0:
                return rest[:i]
    return None


def _value(text: str) -> Fraction | None:
    """The rational number that a normal form is, None where it is none."""
    # Replies may repeat a digit for thousands of tokens, which Python refuses to read as a number.
    if len(text) > 1000:
        return None
    match = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}", text)
    if match and int(match[3]):
        return Fraction(int(match[2]), int(match[3])) * (-1 if match[1] else 1)
    return Fraction(text) if re.fullmatch(r"[+-]?\d+(?:\.\d*)?", text) else None


def _parts(text: str) -> list[str]:
    """Parts of a tuple, set or interval at its outermost commas."""
    text = text.replace(r"\{", "(").replace(r"\}", ")")
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return [text]
    parts, depth = [""], 0
    for c in text[1:-1]:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts
