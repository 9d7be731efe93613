"""Record of one request, as the load generator saw it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from radixmesh.cli.bench.workloads import IntArray


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Moments are of time.perf_counter, in seconds. Tokens are the server's own count where it gave one.

    error: why it failed, "" if it did not. is_exact: the server counted output tokens. output_ids: None if the server
    told only text.
    """

    index: int
    due: float
    sent: float = 0.0
    ended: float = 0.0
    deliveries: list[float] = field(default_factory=list)
    num_delivered: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    is_exact: bool = False
    num_resumptions: int = 0
    error: str = ""
    output_ids: IntArray | None = None
    output_text: str = ""

    def deliver(self, num_tokens: int) -> None:
        """Output has come; num_tokens: how much, 1 where only the server knows."""
        self.deliveries.append(time.perf_counter())
        self.num_delivered += num_tokens

    def count(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> None:
        """Takes the server's own count."""
        self.prompt_tokens, self.output_tokens, self.cached_tokens = prompt_tokens, output_tokens, cached_tokens
        self.is_exact = True

    def end(self, error: str = "") -> None:
        """The request is over."""
        self.ended = time.perf_counter()
        self.error = error
        if not self.is_exact:
            self.output_tokens = self.num_delivered

    @property
    def is_done(self) -> bool:
        """True if it ended well."""
        return self.ended > 0 and not self.error

    @property
    def ttft_s(self) -> float | None:
        """Sending to the first output."""
        return self.deliveries[0] - self.sent if self.deliveries else None

    @property
    def e2e_s(self) -> float:
        """Sending to the end."""
        return self.ended - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.output_tokens < 2 or len(self.deliveries) < 2:
            return None
        return (self.deliveries[-1] - self.deliveries[0]) / (self.output_tokens - 1)

    def gaps_s(self) -> list[float]:
        """Times between deliveries."""
        gaps: list[float] = np.diff(self.deliveries).tolist()
        return gaps
