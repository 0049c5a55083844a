"""Varied sentences from templates and word lists: text that repeats nothing and says nothing."""

from __future__ import annotations

import importlib.metadata
import random
import re

from eval.words import words

NUMBER = 24_000

# "the" before every noun and the simple past keep a sentence grammatical whether the noun drawn
# is singular, plural or uncountable.
_TEMPLATES = (
    "the {adjective} {noun} {did} the {noun}.",
    "{when}, {name} {did} the {noun} {where}.",
    "{name} and {friend} {did} the {adjective} {noun} because the {noun} {went}.",
    "{where}, the {adjective} {noun} {did} the {adjective} {noun}.",
    "the {noun} {went}, but {name} {did} the {adjective} {noun}.",
    "{name}, who {did} the {noun}, never {did} the {adjective} {noun} again.",
    "nobody {where} {did} the {noun} while the {adjective} {noun} {went}.",
    "when the {noun} {went}, {name} quietly {did} the {noun}.",
    "{when} the {noun} {went}, and the {adjective} {noun} {went} too.",
    "the {noun} that {name} {did} {when} {went} {where}.",
    "{name} {said} that the {adjective} {noun} {went} {where}.",
    "{name} {said} that somebody {did} the {noun} {when}.",
    "although the {noun} {went}, the {adjective} {noun} {did} the {noun}.",
    "everyone {where} {said} that {name} {did} the {adjective} {noun}.",
    "after {name} {did} the {noun}, the {noun} slowly {went}.",
    "with the {adjective} {noun} in mind, {name} {did} the {noun}.",
    "between the {noun} and the {adjective} {noun}, something {went}.",
    "the {adjective}, {adjective} {noun} {went} {when}.",
    "neither {name} nor {friend} {did} the {noun} {where}.",
    "{when}, instead of the {noun}, {name} {did} the {adjective} {noun}.",
    "some people {where} {did} the {adjective} {noun}; others only {did} the {noun}.",
    "{name} {did} the {noun} first and the {adjective} {noun} afterwards.",
    "as far as {name} knew, the {noun} {went} {when}.",
    "the {noun} {where} {did} everything except the {adjective} {noun}.",
)
_SLOTS = {
    "name": (
        "Ada", "Bruno", "Carla", "Dmitri", "Elena", "Farid", "Greta", "Hiro", "Ines", "Jonas",
        "Keiko", "Luca", "Marta", "Nadia", "Oskar", "Priya",
    ),
    "friend": (
        "Quentin", "Rosa", "Samir", "Tilda", "Ulrich", "Vera", "Wanda", "Yusuf",
    ),
    "did": (
        "admired", "avoided", "borrowed", "carried", "chose", "compared", "counted", "described",
        "discovered", "drew", "examined", "followed", "forgot", "found", "guarded", "ignored",
        "imagined", "inspected", "liked", "lost", "mentioned", "moved", "needed", "noticed",
        "photographed", "praised", "recognised", "remembered", "replaced", "saw", "studied",
        "touched", "trusted", "understood", "wanted", "watched",
    ),
    "went": (
        "appeared", "arrived", "changed", "disappeared", "failed", "fell apart", "grew",
        "happened", "improved", "made no sense", "mattered", "moved away", "remained",
        "seemed different", "stood still", "surprised everyone", "took longer than expected",
        "vanished", "went unnoticed", "worked",
    ),
    "said": ("believed", "claimed", "denied", "explained", "guessed", "insisted", "said", "wrote"),
    "when": (
        "yesterday", "last spring", "one evening", "before lunch", "at dawn", "during the storm",
        "on Monday", "a week later", "that winter", "after the meeting", "long ago", "at noon",
        "in early autumn", "the next morning", "on the last day", "during the holidays",
    ),
    "where": (
        "in the harbour", "near the bridge", "behind the library", "on the second floor",
        "at the market", "in the old town", "across the river", "outside the station",
        "under the stairs", "by the window", "in the valley", "next to the bakery",
        "along the coast", "at the edge of the forest", "inside the museum", "on the hill",
    ),
}  # fmt: skip
NAMES = _SLOTS["name"]
# Words that cannot stand between "the" and a noun, or after "the".
_NO_ADJECTIVES = frozenset((
    "aback", "abaft", "ablaze", "aboard", "abounding", "afraid", "ahead", "alike", "alive",
    "amuck", "ashamed", "aware", "better", "few", "half", "handsomely", "kaput", "late",
    "lacking", "madly", "magically", "many", "mere", "numberless", "quack", "used", "upset",
    "wanting", "various",
))  # fmt: skip
_NO_NOUNS = frozenset((
    "anybody", "anyone", "anything", "everybody", "everyone", "everything", "many", "nobody",
    "none", "nothing", "other", "self", "somebody", "someone", "something", "today", "tomorrow",
    "tonight", "yesterday",
))  # fmt: skip
_PARAGRAPH = (4, 8)


def sentences() -> tuple[str, ...]:
    """`NUMBER` sentences, all different, always the same for one version of wonderwords.

    Each ends in the white space that follows it: a line break after a paragraph of four to eight.
    """
    rng = random.Random("sentences")
    slots = {
        **_SLOTS,
        "noun": tuple(w for w in words("noun") if len(w) > 3 and w not in _NO_NOUNS),
        "adjective": tuple(w for w in words("adjective") if w not in _NO_ADJECTIVES),
    }
    made: dict[str, None] = {}
    while len(made) < NUMBER:
        template = rng.choice(_TEMPLATES)
        text = re.sub(r"\{(\w+)\}", lambda slot: rng.choice(slots[slot[1]]), template)
        made[text[0].upper() + text[1:]] = None
    result, left = [], rng.randint(*_PARAGRAPH)
    for i, sentence in enumerate(made, 1):
        left -= 1
        result.append(f"{sentence}\n" if left == 0 or i == NUMBER else f"{sentence} ")
        left = left or rng.randint(*_PARAGRAPH)
    return tuple(result)


def source() -> str:
    """Where the sentences come from, for whoever wants the same ones."""
    return f"eval/sentences.py with wonderwords {importlib.metadata.version('wonderwords')}"
