"""A request with every default filled in, so that any router can run it again exactly."""

from __future__ import annotations

from dataclasses import dataclass

from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.guided.source import GrammarSource
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """prompt_ids: i32 array. seeds: one for each output; `sampling` has none. stop: its max_tokens is set, but of a
    resumed embed or score task. trace_context: parent of the request's spans; empty = it is not traced."""

    request_id: str
    model: str
    model_identity: ServedIdentity
    prompt_ids: bytes
    seeds: tuple[int, ...]
    sampling: Sampling
    stop: Stop
    task: Task = Task.GENERATE
    grammar: GrammarSource | None = None
    ids_only: bool = False
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    session: str = ""
    trace_context: str = ""

    @property
    def is_pooled(self) -> bool:
        """True if the answer is one vector, and no tokens."""
        return self.task is not Task.GENERATE

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids) // 4
