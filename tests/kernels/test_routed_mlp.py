"""Routed experts of a layer, with the shared expert beside the routing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("triton")

import support.triton_interpreter  # noqa: F401
import torch

from radixmesh.daemons.worker.cuda.experts import PlainExperts
from radixmesh.daemons.worker.cuda.linear import PlainLinear, Residual
from radixmesh.daemons.worker.cuda.model.routed_mlp import RoutedMlp, SharedExpert
from radixmesh.daemons.worker.cuda.ops import Ops, TorchOps, TritonOps
from radixmesh.daemons.worker.cuda.side_stream import SideStream
from radixmesh.kernels.moe.route import RouterRule

_HIDDEN, _MLP, _EXPERTS = 32, 16, 4


class _LateStream(SideStream):
    """What a fork does to the residual is seen at the join alone."""

    def __init__(self, residual_TD: torch.Tensor) -> None:
        self._residual_TD = residual_TD
        self._is_open = False
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    @contextmanager
    def fork(self) -> Iterator[None]:
        self.calls.append("fork")
        before_TD = self._residual_TD.clone()
        yield
        self._after_TD = self._residual_TD.clone()
        self._residual_TD.copy_(before_TD)
        self._is_open = True

    def join(self) -> bool:
        was_open, self._is_open = self._is_open, False
        if was_open:
            self._residual_TD.copy_(self._after_TD)
            self.calls.append("join")
        return was_open


def _mlp(ops: Ops) -> RoutedMlp:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    return RoutedMlp(
        norm_D=random(_HIDDEN).abs(),
        eps=1e-6,
        w_router_ED=random(_EXPERTS, _HIDDEN),
        rule=RouterRule(num_picks=2),
        experts=PlainExperts(ops, random(_EXPERTS, 2 * _MLP, _HIDDEN), random(_EXPERTS, _HIDDEN, _MLP)),
        shared=SharedExpert(
            gate_up=PlainLinear(ops, random(2 * _MLP, _HIDDEN)), down=PlainLinear(ops, random(_HIDDEN, _MLP)),
            w_gate_1D=None,
        ),
        ops=ops,
    )  # fmt: skip


def test_experts_add_to_what_the_shared_expert_left() -> None:
    """Whatever comes late of what was computed beside the routing is there when the residual is read."""
    rows_TD = torch.randn(9, _HIDDEN, generator=torch.Generator().manual_seed(1))
    expected_TD, found_TD = rows_TD.clone(), rows_TD.clone()
    _mlp(TorchOps()).run(Residual(expected_TD))
    side = _LateStream(found_TD)
    _mlp(TritonOps(side=side)).run(Residual(found_TD))
    torch.testing.assert_close(found_TD, expected_TD, rtol=1e-4, atol=1e-5)
    assert side.calls == ["start", "fork", "join"]
