"""The contract of every attention backend of the CPU worker, against attention written out in float64.

Attention of a device has a seam of its own (cuda/attention/backend.py): tests/kernels holds its kernels against their
definition, and test_device_contract.py there and under tests/gpu holds it in a runner against the same promises.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.rounding import attention_tolerance

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cpu.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlacement,
    AttentionSegment,
    AttentionShape,
)
from radixmesh.daemons.worker.cpu.attention.registry import attention_backends

_TOKENS = 700
_SHAPES = {
    "multi_head": AttentionShape(num_heads=3, num_kv_heads=3, head_dim=16, scale=0.25),
    "grouped": AttentionShape(num_heads=6, num_kv_heads=2, head_dim=10, scale=0.3),
    "one_kv_head": AttentionShape(num_heads=12, num_kv_heads=1, head_dim=8, scale=0.35),
    "softcap": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=12, scale=0.35, softcap=2.0),
}
# Wider than a key tile, narrower, and of the row alone.
_WINDOWS = [None, 70, 20, 1]
# (start, length): decodes, a fresh prefill, chunks that begin and end at odd places, one crossing many key tiles.
_SEGMENTS = [(0, 1), (129, 1), (0, 40), (63, 2), (5, 130), (64, 64), (100, 3)]


@pytest.fixture(params=attention_backends().names)
def backend_name(request: pytest.FixtureRequest) -> str:
    torch.set_num_threads(1)
    return str(request.param)


def _backend(name: str, shape: AttentionShape, *, is_deterministic: bool = True) -> AttentionBackend:
    placement = AttentionPlacement(device=torch.device("cpu"), dtype=torch.float32, is_deterministic=is_deterministic)
    return attention_backends().create(name)(shape, placement)


class _Case:
    """A pool of NaN with the keys and values of some sequences scattered in it."""

    def __init__(self, shape: AttentionShape, segments: list[tuple[int, int]], padding: int = 0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = (shape.num_kv_heads, shape.head_dim)
        self.keys = torch.full((_TOKENS + 1, *size), torch.nan)
        self.values = torch.full((_TOKENS + 1, *size), torch.nan)
        self.keys[_TOKENS] = self.values[_TOKENS] = 0
        order = np.random.default_rng(seed).permutation(_TOKENS).astype(np.int64)
        parts, at = [], 0
        for start, length in segments:
            slots = order[at : at + start + length]
            parts.append(AttentionSegment(start=start, length=length, kv_slots=slots))
            self.keys[slots] = torch.randn(len(slots), *size, generator=generator) * 2
            self.values[slots] = torch.randn(len(slots), *size, generator=generator)
            at += len(slots)
        num_rows = sum(length for _, length in segments) + padding
        self.query = torch.randn(num_rows, shape.num_heads, shape.head_dim, generator=generator)
        self.batch = AttentionBatch(segments=parts, num_rows=num_rows, zero_slot=_TOKENS)

    def tolerance(self, shape: AttentionShape) -> float:
        """Of float32 against `expected`."""
        most = max(segment.start + segment.length for segment in self.batch.segments)
        return attention_tolerance(self.query, self.keys, self.values, scale=shape.scale, num_keys=most)

    def expected(
        self,
        shape: AttentionShape,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        chunk: int | None = None,
    ) -> torch.Tensor:
        rows = []
        for segment in self.batch.segments:
            for offset in range(segment.length):
                last = segment.start + offset
                first = 0 if window is None else max(0, last - window + 1)
                first = first if chunk is None else max(first, last // chunk * chunk)
                seen = segment.kv_slots[first : last + 1]
                for head in range(shape.num_heads):
                    kv_head = head // shape.group_size
                    scores = self.keys[seen, kv_head].double() @ self.query[len(rows) // shape.num_heads, head].double()
                    scores = scores * shape.scale
                    if shape.softcap is not None:
                        scores = torch.tanh(scores / shape.softcap) * shape.softcap
                    if sinks is not None:
                        scores = torch.cat((scores, sinks[head : head + 1].double()))
                    weights = torch.softmax(scores, 0)[: len(seen)]
                    rows.append(weights @ self.values[seen, kv_head].double())
        return torch.stack(rows).view(-1, shape.num_heads, shape.head_dim)


@pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES)
@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize("window", _WINDOWS)
def test_every_row_attends_to_its_own_past_only(
    backend_name: str, shape: AttentionShape, is_deterministic: bool, window: int | None
) -> None:
    case = _Case(shape, _SEGMENTS, padding=5)
    step = _backend(backend_name, shape, is_deterministic=is_deterministic).begin(case.batch)
    out = step.attend(case.query, case.keys, case.values, window)
    assert out.shape == case.query.shape
    expected = case.expected(shape, window)
    assert (out[: len(expected)] - expected).abs().max() <= case.tolerance(shape)
    assert torch.isfinite(out).all(), "padding rows are finite too"


@pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES)
@pytest.mark.parametrize("window", [None, 20])
# Above and below every score, and among them.
@pytest.mark.parametrize("level", [60.0, -60.0, 0.0])
def test_sinks_join_each_softmax_and_have_no_value(
    backend_name: str, shape: AttentionShape, window: int | None, level: float
) -> None:
    backend = _backend(backend_name, shape)
    case = _Case(shape, _SEGMENTS, padding=5)
    sinks = torch.randn(shape.num_heads, generator=torch.Generator().manual_seed(1)) * 3 + level
    out = backend.begin(case.batch).attend(case.query, case.keys, case.values, window, sinks)
    expected = case.expected(shape, window, sinks)
    assert (out[: len(expected)] - expected).abs().max() <= case.tolerance(shape)
    if not backend.is_batch_invariant:
        return
    last = case.batch.segments[-1]
    alone = replace(last, start=last.start + last.length - 1, length=1)
    step = backend.begin(replace(case.batch, segments=[alone], num_rows=1))
    row = len(expected) - 1
    one = step.attend(case.query[row : row + 1].clone(), case.keys, case.values, window, sinks)
    assert torch.equal(one[0].view(torch.int32), out[row].view(torch.int32))


@pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES)
# Within a key tile, and across its border.
@pytest.mark.parametrize("chunk", [10, 70])
def test_chunks_are_seen_from_their_own_start_on(backend_name: str, shape: AttentionShape, chunk: int) -> None:
    backend = _backend(backend_name, shape)
    case = _Case(shape, _SEGMENTS, padding=5)
    out = backend.begin(case.batch).attend(case.query, case.keys, case.values, chunk=chunk)
    expected = case.expected(shape, chunk=chunk)
    assert (out[: len(expected)] - expected).abs().max() <= case.tolerance(shape)
    if not backend.is_batch_invariant:
        return
    row = 0
    for segment in case.batch.segments:
        for end in range(segment.start + 1, segment.start + segment.length + 1):
            alone = replace(segment, start=end - 1, length=1, kv_slots=segment.kv_slots[:end])
            step = backend.begin(replace(case.batch, segments=[alone], num_rows=1))
            one = step.attend(case.query[row : row + 1].clone(), case.keys, case.values, chunk=chunk)
            assert torch.equal(one[0].view(torch.int32), out[row].view(torch.int32)), (segment.start, end)
            row += 1


def test_a_step_serves_all_layers_and_modifies_nothing(backend_name: str) -> None:
    shape = _SHAPES["grouped"]
    one, other = _Case(shape, _SEGMENTS), _Case(shape, _SEGMENTS)
    other.keys, other.values = one.keys * 0.5, one.values * 3
    copies = [x.clone() for x in (one.query, one.keys, one.values)]
    step = _backend(backend_name, shape).begin(one.batch)
    for case, window in ((one, None), (other, 30), (one, 30), (other, None)):
        out = step.attend(case.query, case.keys, case.values, window)
        assert (out - case.expected(shape, window)).abs().max() <= case.tolerance(shape)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(copies, (one.query, one.keys, one.values), strict=True)
    )


def test_large_scores_do_not_overflow(backend_name: str) -> None:
    shape = _SHAPES["multi_head"]
    case = _Case(shape, _SEGMENTS)
    case.keys *= 500
    out = _backend(backend_name, shape).begin(case.batch).attend(case.query, case.keys, case.values)
    assert (out - case.expected(shape)).abs().max() <= case.tolerance(shape)


@pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES)
@pytest.mark.parametrize("window", _WINDOWS)
def test_batch_invariance_is_as_declared(backend_name: str, shape: AttentionShape, window: int | None) -> None:
    """A backend that declares it gives every row the same bits alone, row by row, as in the whole batch."""
    backend = _backend(backend_name, shape)
    if not backend.is_batch_invariant:
        assert backend_name == "naive", f"{backend_name} lost its batch invariance"
        return
    case = _Case(shape, _SEGMENTS, padding=3)
    whole = backend.begin(case.batch).attend(case.query, case.keys, case.values, window)
    row = 0
    for segment in case.batch.segments:
        for offset in range(segment.length):
            end = segment.start + offset + 1
            alone = replace(segment, start=end - 1, length=1, kv_slots=segment.kv_slots[:end])
            step = backend.begin(replace(case.batch, segments=[alone], num_rows=1))
            out = step.attend(case.query[row : row + 1].clone(), case.keys, case.values, window)
            assert torch.equal(out[0].view(torch.int32), whole[row].view(torch.int32)), (segment.start, offset)
            row += 1


def test_keys_that_a_row_does_not_see_change_none_of_its_bits(backend_name: str) -> None:
    shape = _SHAPES["grouped"]
    backend = _backend(backend_name, shape)
    case = _Case(shape, [(10, 1), (200, 3)])
    before = backend.begin(case.batch).attend(case.query, case.keys, case.values)
    later = case.batch.segments[1].kv_slots[202:]
    case.keys[later], case.values[later] = 1e3, -1e3
    after = backend.begin(case.batch).attend(case.query, case.keys, case.values)
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3], after[3])


def test_unknown_backends_are_refused_with_the_known_ones() -> None:
    with pytest.raises(MeshError, match="naive, paged_torch") as caught:
        attention_backends().create("magic")
    assert caught.value.reason_name == "UNSUPPORTED"
