"""Device time that a token adds to a step, learned from past steps: routers compare the speeds of replicas by it."""

from __future__ import annotations

# Of the steps before, with each step: the last hundred count most.
_KEPT = 0.99
# Before that there is no telling what a token takes: as many steps, and a spread of their tokens (standard deviation).
_LEAST_STEPS, _LEAST_SPREAD = 8.0, 16.0
# A step that takes so many times what is expected of it compiles something, or the machine was busy.
_OUTLIER = 4.0


class TokenTime:
    """Least squares over (tokens, device time) of steps, the older ones with less weight; constant in memory."""

    def __init__(self) -> None:
        self._num = self._tokens = self._us = self._tokens_tokens = self._tokens_us = 0.0
        self.us = 0.0
        """Microseconds a token; 0 = not known yet. Kept while all steps are of about one size, which tells nothing."""

    def expect_us(self, num_tokens: int) -> float:
        """Microseconds of a step of so many tokens, by the same line; 0 = not known."""
        if not self.us:
            return 0.0
        return max(0.0, (self._us + self.us * (self._num * num_tokens - self._tokens)) / self._num)

    def observe(self, num_tokens: int, device_us: float, expected_us: int) -> None:
        """A step of so many tokens took so long. expected_us: of a step of that size; 0 = not known."""
        if expected_us and device_us > _OUTLIER * expected_us:
            return
        self._num = _KEPT * self._num + 1
        self._tokens = _KEPT * self._tokens + num_tokens
        self._us = _KEPT * self._us + device_us
        self._tokens_tokens = _KEPT * self._tokens_tokens + num_tokens * num_tokens
        self._tokens_us = _KEPT * self._tokens_us + num_tokens * device_us
        variance = self._tokens_tokens / self._num - (self._tokens / self._num) ** 2
        if self._num >= _LEAST_STEPS and variance >= _LEAST_SPREAD**2:
            covariance = self._tokens_us / self._num - self._tokens * self._us / self._num**2
            self.us = max(0.0, covariance / variance)
