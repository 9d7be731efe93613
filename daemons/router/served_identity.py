"""A model as a replica's hello tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedIdentity:
    """Domain form of `radixmesh.common.v1.ModelIdentity`, whose comments hold; eos_ids: i32 array.

    default_sampling: by name of SamplingDefaults' fields, those that are set.
    """

    name: str = ""
    model_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    grammar_format: str = ""
    sampler_version: int = 0
    vocab_size: int = 0
    max_total_len: int = 0
    eos_ids: bytes = b""
    default_sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def compared(self) -> tuple[str, str, int, int]:
        """All that is_same_model() looks at."""
        return self.model_fingerprint, self.tokenizer_fingerprint, self.sampler_version, self.vocab_size


def is_same_model(ours: ServedIdentity, theirs: ServedIdentity) -> bool:
    """True if outputs of one continue outputs of the other; what one side does not know is not compared."""
    return all(not one or not other or one == other for one, other in zip(ours.compared, theirs.compared, strict=True))
