"""Tokens used, and why outputs ended, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Iterable

from radixmesh.daemons.router.requests.updates import Finished
from radixmesh.daemons.runtime.finish_reason import FinishReason

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class UsageSum:
    """Sums over the outputs of one HTTP request: a prompt counts once, however many outputs it has."""

    def __init__(self) -> None:
        self._prompt: dict[int, tuple[int, int]] = {}
        self.num_completion = 0
        self._accepted = self._rejected = 0
        self._num_reasoning: int | None = None

    def add(self, index: int, finished: Finished, num_reasoning: int | None = None) -> None:
        """index: which prompt. num_reasoning: tokens of the thought; None where no parser reads thoughts."""
        cached = max(finished.cached_tokens, self._prompt.get(index, (0, 0))[1])
        self._prompt[index] = (finished.prompt_tokens, cached)
        self.num_completion += finished.num_output
        self._accepted += finished.accepted_predictions
        self._rejected += finished.rejected_predictions
        if num_reasoning is not None:
            self._num_reasoning = (self._num_reasoning or 0) + num_reasoning

    def to_json(self) -> dict[str, object]:
        num_prompt = sum(num for num, _ in self._prompt.values())
        usage: dict[str, object] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompt.values())},
        }
        details: dict[str, int] = {}
        if self._num_reasoning is not None:
            details["reasoning_tokens"] = self._num_reasoning
        if self._accepted or self._rejected:
            # Of a worker that drafts. Rejected ones are no completion tokens here: nobody asked for them.
            details["accepted_prediction_tokens"] = self._accepted
            details["rejected_prediction_tokens"] = self._rejected
        if details:
            usage["completion_tokens_details"] = details
        return usage


def usage_of(finished: Iterable[tuple[int, Finished]]) -> UsageSum:
    """The sum over (prompt's index, finished output)."""
    total = UsageSum()
    for index, one in finished:
        total.add(index, one)
    return total


def stop_reason(finished: Finished) -> str | int | None:
    """The stop string or id that ended an output; None for another reason."""
    if finished.stop:
        return finished.stop
    return finished.stop_id
