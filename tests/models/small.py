"""Small models and a small byte-level tokenizer that the tests of this folder share."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from kvjax.models.config import ModelConfig, RopeConfig
from kvjax.models.decoder import Decoder
from kvjax.models.layout import layout
from kvjax.models.tokenizer import Tokenizer, import_transformers

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

BASE = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
CONFIGS = {
    "llama": BASE,
    "tied": dataclasses.replace(BASE, tie_embeddings=True, rope=RopeConfig(theta=1e5)),
    "biased": dataclasses.replace(BASE, qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama3": dataclasses.replace(
        BASE, rope=RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_max_length=8192)
    ),
    "mistral": dataclasses.replace(BASE, family="mistral", windows=(5, 5, 5)),
    "qwen2": dataclasses.replace(BASE, family="qwen2", qkv_bias=True, windows=(None, 7, 7)),
    "qwen3": dataclasses.replace(BASE, family="qwen3", qk_norm=True, head_dim=16),
}


@functools.cache
def random_model(name: str = "llama", dtype: str = "float32") -> Decoder:
    """A random decoder whose norms and biases are not the trivial ones."""
    rng = np.random.default_rng(len(name))
    values = {}
    for row in layout(CONFIGS[name]):
        noise = rng.normal(size=row.shape)
        if row.init == "normal":
            noise = noise * row.layer_shape[0] ** -0.5
        else:
            noise = 0.1 * noise + (row.init == "ones")
        values[row.name] = jnp.asarray(noise, dtype)
    return Decoder(CONFIGS[name], values)


def small_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """Byte-level BPE with a few merges and the special tokens of ChatML."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocab, merges = small_vocabulary()
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template
    )
    return Tokenizer(fast)


def small_vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens in id order and merges."""
    from tokenizers import pre_tokenizers

    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *("".join(merge) for merge in merges)], merges
