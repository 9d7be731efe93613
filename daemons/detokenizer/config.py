"""Settings of the detokenizer daemon."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from radixmesh.daemons.runtime.common_settings import CommonSettings
from radixmesh.daemons.runtime.settings import required, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizerSettings(CommonSettings):
    """Flags: the vocabulary, and bounds on the state that is held."""

    model: Path = field(metadata=required("folder of the model, in Hugging Face format"))
    max_entries: int = setting(65_536, "outputs that are open at once, all streams together")
    max_stops: int = setting(64, "stop strings of one output")
    max_stop_bytes: int = setting(1024, "UTF-8 bytes of one stop string")
    max_output_tokens: int = setting(1 << 20, "tokens of one output, where the model's config names no longest length")
    max_pending_bytes: int = setting(8 << 20, "bytes that wait for the reader of one stream before no more is read")

    def __post_init__(self) -> None:
        # A slotted dataclass is made anew: super() without arguments would look for the class before that.
        CommonSettings.__post_init__(self)
        for name in ("max_entries", "max_stops", "max_stop_bytes", "max_output_tokens", "max_pending_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
