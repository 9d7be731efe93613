"""A value of every field of `Sampling` that is not its default, for tests that each place which reads them reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from radixmesh.daemons.runtime.sampling import Sampling

CHANGED: Mapping[str, object] = {
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.75,
    "presence_penalty": -1.5,
    "logit_bias": ((3, 5.0),),
    "temperature": 0.5,
    "top_k": 2,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": 77,
    "num_top_logprobs": 3,
    "prompt_logprobs": True,
    "prompt_logprobs_start": 5,
}
LOGPROBS = frozenset(("num_top_logprobs", "prompt_logprobs", "prompt_logprobs_start"))
"""Fields that ask for numbers beside a token, and change none."""


def changed(field: str) -> Sampling:
    """The defaults but for one field."""
    assert field in CHANGED, f"a sampling parameter without a value here: {field}"
    sampling = Sampling(**{field: CHANGED[field]})  # type: ignore[arg-type]
    assert sampling != Sampling(), "the value is to differ from the default"
    return sampling


ALL = tuple(field.name for field in fields(Sampling))
