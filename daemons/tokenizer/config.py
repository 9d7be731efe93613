"""Settings of the tokenizer daemon."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from radixmesh.daemons.runtime.common_settings import CommonSettings
from radixmesh.daemons.runtime.guided.backend import BACKENDS
from radixmesh.daemons.runtime.settings import required, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings(CommonSettings):
    """Flags: vocabulary, chat template, and how much is worked on at once."""

    model: Path = field(metadata=required("folder of the model, in Hugging Face format"))
    max_items: int = setting(4096, "items of one batch")
    max_text_bytes: int = setting(4 << 20, "UTF-8 bytes of one text or rendered chat")
    max_messages: int = setting(4096, "messages of one chat")
    num_threads: int = setting(2, "batches that are worked on at once")
    max_queued: int = setting(1024, "calls that wait or run at once before others are refused")
    max_queued_bytes: int = setting(
        32 << 20,
        "bytes of calls that wait, run or are answered at once before others are refused; at least one is taken",
    )

    grammar_backend: str = setting("xgrammar", "library that compiles grammars; the workers follow the same")
    grammar_processes: int = setting(1, "grammars that are compiled at once, each in a process of its own")
    grammar_timeout_s: float = setting(5.0, "seconds that one grammar's compilation may take")
    grammar_memory_bytes: int = setting(1 << 30, "bytes of memory that one grammar's compilation may take")

    def __post_init__(self) -> None:
        # A slotted dataclass is made anew: super() without arguments would look for the class before that.
        CommonSettings.__post_init__(self)
        for name in (
            "max_items",
            "max_text_bytes",
            "max_messages",
            "num_threads",
            "max_queued",
            "max_queued_bytes",
            "grammar_processes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.grammar_backend not in BACKENDS:
            raise ValueError(f"grammar_backend is {self.grammar_backend!r}: choose one of {', '.join(BACKENDS)}")
        if self.grammar_timeout_s <= 0:
            raise ValueError(f"grammar_timeout_s must be > 0, not {self.grammar_timeout_s}")
        if self.grammar_memory_bytes < 1 << 20:
            raise ValueError(f"grammar_memory_bytes must be at least 1 MiB, not {self.grammar_memory_bytes}")
