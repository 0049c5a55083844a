"""The byte-level BPE tokenizer stored in GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvjax.models.tokenizer import Tokenizer, import_transformers

CONTROL, USER_DEFINED = 3, 4  # llama.cpp token types that are never split

CL100K_PATTERN = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{%s}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)

# `tokenizer.ggml.pre` -> (digits split one by one first, word pattern or None for that of GPT-2,
# NFC, whole words before merges)
PRE_TOKENIZERS: dict[str, tuple[bool, str | None, bool, bool]] = {
    "smollm": (True, None, False, False),
    "gpt-2": (False, None, False, False),
    "llama-bpe": (False, CL100K_PATTERN % "1,3", False, True),
    "qwen2": (False, CL100K_PATTERN % "1", True, False),
}


def read_tokenizer(field: Callable[[str], Any]) -> Tokenizer:
    """The tokenizer in GGUF metadata; `field` gives the value of a key or None.

    Raises a one-line `ValueError` for a tokenizer model other than gpt2 (byte-level BPE) or a
    pre-tokenizer that is not known here.
    """
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    model = field("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(
            f"GGUF tokenizer model {model!r}: allowed is gpt2 (byte-level BPE); load the "
            "Hugging Face directory of this model instead"
        )
    pre = field("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"GGUF pre-tokenizer {pre!r}: allowed are {', '.join(PRE_TOKENIZERS)}")
    split_digits, pattern, nfc, whole_words = PRE_TOKENIZERS[pre]
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    backend = Backend(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=whole_words,
        )
    )
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()

    kinds = list(zip(tokens, field("tokenizer.ggml.token_type") or [], strict=False))
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == CONTROL]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == USER_DEFINED]
    )

    names: dict[str, str] = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = field(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            names[f"{role}_token"] = tokens[index]
    if field("tokenizer.ggml.add_bos_token"):
        from tokenizers import processors

        bos = names["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A $B",
            special_tokens=[(bos, field("tokenizer.ggml.bos_token_id"))],
        )
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=field("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **names,
    )
    ends = [field("tokenizer.ggml.eos_token_id"), field("tokenizer.ggml.eot_token_id")]
    return Tokenizer(fast, [token for token in ends if token is not None])
