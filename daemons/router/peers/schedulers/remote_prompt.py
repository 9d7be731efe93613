"""A prompt that a scheduler computes for an output elsewhere, and the first token that comes of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from radixmesh.daemons.router.requests.journal import Output
from radixmesh.daemons.router.requests.updates import Logprobs


@dataclass(slots=True, eq=False, kw_only=True)
class RemotePrompt:
    """ids: what has come of the output, sampled as the output's own scheduler would; logprobs: of these, where asked
    for. num_before: ids that the output had."""

    transfer_id: str
    output: Output
    attempt: int
    num_before: int = 0
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[Logprobs] = field(default_factory=list)
    weights_version: int = 0
    cached_tokens: int = 0
    """Of the prompt, where it was computed."""
    is_given: bool = False

    @property
    def is_ending(self) -> bool:
        """True if the output ends with the ids that have come."""
        request = self.output.request
        is_end = bool(self.ids) and self.ids[-1] in request.end_ids
        return is_end or self.num_before + len(self.ids) >= request.max_tokens

    def give(self) -> bool:
        """Appends the ids to the journal's; False: there are none, or their logprobs did not come."""
        output = self.output
        if not self.ids or len(output.ids) != self.num_before:
            return False
        if output.logprobs is not None:
            for logprobs in self.logprobs:
                output.logprobs.append(logprobs)
            if output.logprobs.end != self.num_before + len(self.ids):
                output.level_logprobs()
                return False
        output.ids.extend(self.ids)
        output.weights_version = self.weights_version
        self.is_given = True
        return True
