"""Duration of a simulated step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Costs of the parts of a step.

    prefill_tokens: uncached tokens of chunks. prefill_context: sum over chunks of tokens x mean context (token pairs).
    decode_rows: rows that decode. decode_context: sum of their lengths in tokens, the KV that is read.
    """

    prefill_tokens: int = 0
    prefill_context: int = 0
    decode_rows: int = 0
    decode_context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """Microseconds; the defaults resemble a model of 3 billion bf16 weights on one H200.

    base: of any step with tokens (weights are read once). per_decode_row: slope over the batch. per_decode_context: KV
    read, a token. per_prefill_token: compute, an uncached token. per_prefill_context: attention, a pair of tokens.
    per_loaded_token: KV that comes from the host, a token, beside the steps.
    """

    base: float = 2000.0
    per_decode_row: float = 10.0
    per_decode_context: float = 0.027
    per_prefill_token: float = 9.0
    per_prefill_context: float = 0.0005
    per_loaded_token: float = 2.3

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise ValueError(f"the latency {name} is in microseconds and >= 0, not {getattr(self, name)}")

    def step_us(self, shape: StepShape) -> float:
        """Duration of a step; 0 without tokens."""
        if shape.prefill_tokens == 0 and shape.decode_rows == 0:
            return 0.0
        return (
            self.base
            + self.per_decode_row * shape.decode_rows
            + self.per_decode_context * shape.decode_context
            + self.per_prefill_token * shape.prefill_tokens
            + self.per_prefill_context * shape.prefill_context
        )
