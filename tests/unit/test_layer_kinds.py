"""Layers that launch the same kernels, of which a start compiles those of one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("torch")

import torch

from radixmesh.daemons.worker.cuda.linear import PlainLinear
from radixmesh.daemons.worker.cuda.model.layer_kinds import each_kind


@dataclass(frozen=True)
class _Layer:
    linear: PlainLinear
    window: int | None = None
    other: object = None


_OPS = object()


def _layer(*, window: int | None = None, num_out: int = 4, start: int = 0, other: object = None) -> _Layer:
    numbers = torch.zeros(start + num_out * 8)[start:]
    return _Layer(PlainLinear(_OPS, numbers.view(num_out, 8)), window, other)  # type: ignore[arg-type]


def test_of_layers_that_are_alike_the_first_two_are_left() -> None:
    """The first has no layer ahead of it, which may leave something to the next."""
    layers = [_layer() for _ in range(28)]
    assert each_kind(layers) == layers[:2]
    assert each_kind(layers[:1]) == layers[:1] and each_kind([]) == []


def test_layers_in_turns_come_behind_each_kind_that_is_ahead_of_them() -> None:
    layers = [_layer(window=window) for window in (None, 64, 64, None, 64, 64, None)]
    assert each_kind(layers) == layers[:4]


@pytest.mark.parametrize("changes", [{"window": 8}, {"num_out": 5}, {"start": 1}])
def test_other_numbers_shapes_and_alignments_are_other_kinds(changes: dict[str, int]) -> None:
    layers = [_layer(), _layer(), _layer(**changes)]
    assert each_kind(layers) == layers


def test_a_layer_with_an_unknown_part_of_its_own_is_launched() -> None:
    layers = [_layer(other=object()) for _ in range(3)]
    assert each_kind(layers) == layers
    shared = object()
    assert len(each_kind([_layer(other=shared) for _ in range(3)])) == 2
