"""What a run evaluates, by content: a name or a path says what was meant, not what it held."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from eval.records import SampleResult

type Identity = Mapping[str, str]
"""Hashes by what they are of: "model (bfloat16)", "policy retention-global", "haystack prose"."""

HAYSTACK = "haystack_sha256"  # of a sample's metadata


def of_model(model: Any, tokenizer: Any) -> dict[str, str]:
    """Weights, in every dtype that they may be rounded to, and tokenizer."""
    from kvjax.learned import modules  # JAX, which a report does without

    found = {f"model ({dtype})": name for dtype, name in modules.fingerprints(model).items()}
    return {**found, "tokenizer": tokenizer.fingerprint}


def of_prompt(prompt: Mapping[str, Any]) -> dict[str, str]:
    """Template and end tokens, as a journal's header has them."""
    text = json.dumps([prompt.get("template"), prompt.get("end_tokens")], sort_keys=True)
    return {"prompt template": hashlib.sha256(text.encode()).hexdigest()[:16]}


def differing(one: Identity, other: Identity) -> list[str]:
    """What both have, and not alike; what one of them lacks, an absent file say, is no difference.

    A model has a hash for every dtype that its weights may be rounded to, so that a run may go on
    in another one.
    """
    return [name for name, content in one.items() if other.get(name, content) != content]


def check(
    where: object, header: Mapping[str, Any], now: Identity, samples: Iterable[SampleResult] = ()
) -> None:
    """Refuses to go on with results of other contents under the same names.

    Raises:
      ValueError: names what differs.
    """
    # The first journals of this format have no identity and are accepted: nothing can be said
    # against them but what their prompt and their samples' haystacks tell.
    prompt = of_prompt(header["prompt"]) if "prompt" in header else {}
    found = differing({**prompt, **(header.get("identity") or {})}, now)
    for sample in samples:
        if (content := sample.metadata.get(HAYSTACK)) is not None:
            found += differing({f"haystack {sample.haystack}": content}, now)
    if found:
        raise ValueError(
            f"{where} holds results of another {', '.join(dict.fromkeys(found))} than is there "
            "now; give --overwrite or another --output"
        )
