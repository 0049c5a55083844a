"""Command-line values that several commands share."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax import Budget, Decoder, Policy
    from kvjax.models.tokenizer import Tokenizer


def policy_of(name: str, settings: Iterable[str] = (), **options: Any) -> Policy:
    """The named policy with settings given as NAME=VALUE."""
    import kvjax

    return kvjax.policy(name, **options, **settings_of(settings, "policy"))


def settings_of(settings: Iterable[str], what: str) -> dict[str, Any]:
    """Settings given as NAME=VALUE, with Python's literals and text for what is none."""
    found: dict[str, Any] = {}
    for setting in settings:
        option, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{what} option {setting!r}: allowed is NAME=VALUE")
        try:
            found[option.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[option.strip()] = value
    return found


PAGES = (
    "slots of a page, 16 to 64; 0 for a padded cache, in which every head has the slots of the "
    "largest; default: 16 where heads get uneven shares, else 0"
)


def pages_of(given: int | None, policy: Policy) -> int | None:
    """The page size of `--pages`, or what suits the policy; None for a padded cache."""
    from kvjax.sizing import default_page_size

    if given is None:
        return default_page_size(policy)
    if given < 0:
        raise ValueError(f"--pages {given}: allowed are integers >= 0 (0 for a padded cache)")
    return given or None


def params_of(model: Decoder, policy: Policy, tokenizer: Tokenizer) -> Any:
    """What the policy brings along: learned arrays, and what the model's weights give once."""
    import kvjax

    def calibration() -> list[int]:
        from eval.engine import calibration_tokens

        return calibration_tokens(tokenizer)

    return kvjax.policy_params(model, policy, calibration)


def budget_of(text: str | None, policies: Iterable[Policy]) -> Budget:
    """The budget; it may be left out where every policy keeps everything."""
    import kvjax

    needing = [policy.name for policy in policies if policy.scorer is not None]
    if text is None and needing:
        raise ValueError(f"--policy {needing[0]} needs a --budget, such as 25%, 256 or 64MiB")
    return kvjax.Budget.parse("100%" if text is None else text)


def text_of(given: str | None, file: str | None) -> str:
    """The prompt, as it is given or from a UTF-8 file; `-` is standard input."""
    if file is None:
        text, origin = given or "", "--prompt"
    elif file == "-":
        text, origin = sys.stdin.read(), "standard input"
    else:
        origin = file
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 text ({error.reason})") from error
    if not text.strip():
        raise ValueError(f"{origin}: the prompt is empty; allowed is any text")
    return text


def tokens_of(
    tokenizer: Tokenizer, text: str, question: str | None, raw: bool
) -> tuple[list[int], list[int]]:
    """What is prefilled and compressed, and the rest of the user's turn that asks about it."""
    if raw:
        asked = [] if question is None else tokenizer.encode(f"\n{question}")
        return tokenizer.encode(text, add_special_tokens=True), asked
    if tokenizer.chat_template is None:
        raise ValueError("this model has no chat template: add --raw to give it plain text")
    from kvjax.turns import TurnTemplate

    template = TurnTemplate.of(tokenizer)
    asked = []
    if question is not None:
        asked = tokenizer.encode(f"\n{template.said(question)}{template.tail}")
    prompt = template.preface + template.first_opening + template.said(text)
    return tokenizer.encode(prompt), asked
