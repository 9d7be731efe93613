"""Outputs of the planner for the routers: token rows, ends, logprobs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray, as_ints, empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.steps.step import TokenLogprobs
from radixmesh.daemons.scheduler.results.stop_conditions import SequenceEnd
from radixmesh.daemons.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """New output tokens: int32 [rows] columns, ids [sum(counts)] row after row. `logprobs` by row.

    No two rows are of one output.
    """

    owners: IntArray
    handles: IntArray
    attempts: IntArray
    firsts: IntArray
    """Output index of each row's first token."""
    counts: IntArray
    ids: IntArray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.handles)

    def of_owner(self, owner: int) -> TokenRows:
        """The rows of one stream, in order; the same object if all are."""
        mine = self.owners == owner
        if mine.all():
            return self
        rows = np.flatnonzero(mine)
        position = {int(row): i for i, row in enumerate(rows)} if self.logprobs else {}
        return TokenRows(
            owners=self.owners[rows],
            handles=self.handles[rows],
            attempts=self.attempts[rows],
            firsts=self.firsts[rows],
            counts=self.counts[rows],
            ids=self.ids[np.repeat(mine, self.counts)],
            logprobs={position[row]: value for row, value in self.logprobs.items() if row in position},
        )


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row, where there is no array to take it from."""

    owner: int
    handle: int
    attempt: int
    first: int
    ids: IntArray
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """An output that ended. `error` is set with reason ERROR, and where an ABORT has a reason of its own."""

    owner: int
    handle: int
    attempt: int
    reason: FinishReason
    num_output: int
    stop_id: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    error: MeshError | None = None

    @classmethod
    def of(cls, sequence: Sequence, ending: SequenceEnd, error: MeshError | None, num_output: int | None) -> Finished:
        """The end of a request. num_output None: as many as it has."""
        return cls(
            owner=sequence.owner,
            handle=sequence.handle,
            attempt=sequence.submission.attempt,
            reason=ending.reason,
            num_output=len(sequence.output) if num_output is None else num_output,
            stop_id=ending.stop_id,
            prompt_tokens=sequence.prompt_len,
            cached_tokens=max(0, sequence.cached_tokens),
            drafted_tokens=sequence.drafted_tokens,
            accepted_tokens=sequence.accepted_tokens,
            error=error,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A submission that will not run."""

    owner: int
    handle: int
    attempt: int
    error: MeshError


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Logprobs of prompt tokens from `first_position` on."""

    owner: int
    handle: int
    first_position: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputVector:
    """Pooled output of an embed or score task, float32."""

    owner: int
    handle: int
    values: FloatArray


@dataclass(slots=True)
class Outputs:
    """Everything there is to say since the last time; rows of one handle are in order of their positions."""

    rows: list[TokenRows] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    vectors: list[OutputVector] = field(default_factory=list)

    def owners(self) -> set[int]:
        """Streams that something here is for."""
        owners: set[int] = set()
        for rows in self.rows:
            found = rows.owners
            if len(found) and np.count_nonzero(found == found[0]) == len(found):  # A sort costs ten times as much.
                owners.add(found.item(0))
            else:
                owners.update(np.unique(found).tolist())
        for events in (self.finished, self.rejected, self.prompt_logprobs, self.vectors):
            owners.update(event.owner for event in events)
        return owners


def rows_of(rows: Collection[TokenRow]) -> TokenRows:
    """Rows as columns."""
    return TokenRows(
        owners=as_ints([row.owner for row in rows]),
        handles=as_ints([row.handle for row in rows]),
        attempts=as_ints([row.attempt for row in rows]),
        firsts=as_ints([row.first for row in rows]),
        counts=as_ints([len(row.ids) for row in rows]),
        ids=np.concatenate([row.ids for row in rows]) if rows else empty_ints(),
        logprobs={i: row.logprobs for i, row in enumerate(rows) if row.logprobs is not None},
    )
