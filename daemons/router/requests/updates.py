"""News of a request for its client, as the router's own types: service.py makes messages of them, http/ events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason


class Logprobs(NamedTuple):
    """Of consecutive tokens. token_logprobs: f32 array, one value a token. top_ids, top_logprobs: i32 and f32 arrays,
    num_top alternatives a token, most likely first."""

    token_logprobs: bytes
    num_top: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""


@dataclass(slots=True)
class Delta:
    """New output of one index. first_output_index: of the first id. text_offset: UTF-8 bytes of the output's text
    before this one. ids: i32 array. vector: f32 array of an embed or score task."""

    index: int
    first_output_index: int
    text_offset: int
    ids: bytes
    text: str
    weights_version: int = 0
    vector: bytes = b""
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class Finished:
    """An output that ended. num_output: its tokens that count. text_bytes: of its whole text, as UTF-8."""

    index: int
    reason: FinishReason
    num_output: int = 0
    text_bytes: int = 0
    stop_id: int | None = None
    stop: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    accepted_predictions: int = 0
    rejected_predictions: int = 0
    error: MeshError | None = None


@dataclass(slots=True, kw_only=True)
class Update:
    """Everything that is new since the last. resolved: only in the first, which has nothing else.

    prompt_logprobs: of the positions from prompt_logprobs_start on.
    """

    resolved: ResolvedRequest | None = None
    deltas: list[Delta] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    prompt_logprobs: Logprobs | None = None
    prompt_logprobs_start: int = 0
