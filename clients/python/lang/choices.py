"""Methods that choose among texts by their logprobs, as SGLang's `choices_method`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Scored(NamedTuple):
    """Logprobs of each choice's tokens as they follow the text; unconditional: as they stand alone, where asked for."""

    conditional: Sequence[Sequence[float]]
    unconditional: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicesMethod:
    """pick: the index of the chosen one. needs_unconditional: logprobs without the text are scored besides."""

    name: str
    pick: Picker
    needs_unconditional: bool = False


Picker: TypeAlias = Callable[[Scored], int]


def mean_logprobs(scored: Scored) -> list[float]:
    """Each choice's logprob a token."""
    return [sum(values) / len(values) for values in scored.conditional]


def _best_mean(scored: Scored) -> int:
    return _first_best(mean_logprobs(scored))


def _greedy(scored: Scored) -> int:
    """Token by token, those stay that are likeliest; a choice that has ended goes on with its mean."""
    means = mean_logprobs(scored)
    left = list(range(len(means)))
    for index in range(max(map(len, scored.conditional))):
        values = [_at(scored.conditional[choice], index, means[choice]) for choice in left]
        best = max(values)
        left = [choice for choice, value in zip(left, values, strict=True) if value == best]
        if len(left) == 1:
            break
    return left[0]


def _best_gain(scored: Scored) -> int:
    """By how much the text makes each choice likelier, a token."""
    gains = []
    for known, alone in zip(scored.conditional, scored.unconditional, strict=True):
        gains.append(sum(a - b for a, b in zip(known, alone, strict=True)) / len(known))
    return _first_best(gains)


def _at(values: Sequence[float], index: int, beyond: float) -> float:
    return values[index] if index < len(values) else beyond


def _first_best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


# SGLang's default: the highest mean logprob, so that long choices are not at a disadvantage.
token_length_normalized = ChoicesMethod(name="token_length_normalized", pick=_best_mean)
greedy_token_selection = ChoicesMethod(name="greedy_token_selection", pick=_greedy)
unconditional_likelihood_normalized = ChoicesMethod(
    name="unconditional_likelihood_normalized", pick=_best_gain, needs_unconditional=True
)
