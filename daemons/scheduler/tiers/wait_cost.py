"""The time that requests wait for a token of KV from a lower tier, measured against computing one."""

from __future__ import annotations

from radixmesh.daemons.scheduler.planning.timing.step_estimate import StepEstimate

# The share before anything came, and the weight of what came last.
_FIRST_SHARE, _WEIGHT = 0.25, 0.2
# A step of so many tokens is a prefill, whose time goes by its tokens.
_PREFILL_TOKENS = 1024


class WaitCost:
    """estimate: of the steps that compute."""

    def __init__(self, estimate: StepEstimate) -> None:
        self._estimate = estimate
        self._us_per_token = 0.0

    @property
    def share(self) -> float:
        """Of the time to compute a token; at most 1."""
        compute_us = self._estimate.expect_us(_PREFILL_TOKENS) / _PREFILL_TOKENS
        if not self._us_per_token or not compute_us:
            return _FIRST_SHARE
        return min(1.0, self._us_per_token / compute_us)

    def observe(self, seconds: float, num_tokens: int) -> None:
        """So many tokens came, at least one, for which a request has waited that long."""
        weight = _WEIGHT if self._us_per_token else 1.0
        self._us_per_token += weight * (seconds * 1e6 / num_tokens - self._us_per_token)
