"""Options that are whole numbers take no others."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from kvjax.whole import check_whole
from tests import tiny


@pytest.mark.parametrize("value", [1, 7, np.int32(3)])
def test_integers_pass(value):
    check_whole("window", value, 1)


@pytest.mark.parametrize("value", [0, -1, 2.5, 2.0, True, "3", None, float("nan")])
def test_others_are_named_with_what_is_allowed(value):
    with pytest.raises(ValueError, match=f"^window={value}: allowed are integers >= 1$"):
        check_whole("window", value, 1)


@pytest.mark.parametrize(
    ("policy", "option"),
    [
        ("retention-global", "lookahead"),
        ("indexmem-no-memory", "stride"),
        ("snapkv", "window"),
        ("chunkkv", "chunk_size"),
        ("streaming", "sinks"),
        ("snapkv", "decode_interval"),
        ("leverage", "sketch"),
    ],
)
def test_options_of_policies_are_such(policy, option):
    with tiny.as_installed(), pytest.raises(ValueError, match=f"{option}=2.5: allowed are"):
        kvjax.policy(policy, **{option: 2.5})
