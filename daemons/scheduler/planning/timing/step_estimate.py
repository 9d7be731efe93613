"""Expected device time of a step, learned from past steps: for lookahead, and to tell a hang from a long step."""

from __future__ import annotations

_WEIGHT = 0.2


class StepEstimate:
    """Moving averages of device time, one per power of two of the step's tokens (chunks and decodes together)."""

    def __init__(self) -> None:
        self._us: dict[int, float] = {}

    def observe(self, num_tokens: int, device_us: float) -> None:
        """A step of so many tokens took so long."""
        bucket = num_tokens.bit_length()
        old = self._us.get(bucket)
        self._us[bucket] = device_us if old is None else old + _WEIGHT * (device_us - old)

    def knows(self, num_tokens: int) -> bool:
        """True if a step of about so many tokens was observed."""
        return num_tokens.bit_length() in self._us

    def expect_us(self, num_tokens: int) -> int:
        """Expected microseconds; 0 = nothing is known yet.

        From the nearest known size; a larger step than any known counts in proportion to its tokens, since taking it
        for a hang would cost an epoch, waiting longer costs only detection time.
        """
        if not self._us:
            return 0
        bucket = num_tokens.bit_length()
        nearest = min(self._us, key=lambda known: (abs(known - bucket), -known))
        scale = 2 ** max(0, bucket - nearest)
        return max(1, int(self._us[nearest] * scale))
