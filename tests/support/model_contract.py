"""Contracts of the parts of a model on a device; a subclass gives the fixtures, for an implementation on one device.

Legend: T rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.backend import DeviceStep, StepAttention
from radixmesh.daemons.worker.cuda.attention.torch_attention import TorchAttention
from radixmesh.daemons.worker.cuda.linear import Residual
from radixmesh.daemons.worker.cuda.model.attention import Attention
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel, LoadedModel
from radixmesh.daemons.worker.cuda.model.mlp import Mlp
from radixmesh.kernels.rope_kv import KvTarget

LENGTH, PAGE_SIZE, NUM_PAGES, NUM_SLOTS = 7, 4, 9, 3
_TABLES = ((7, 2, 5), (1, 8, 3), (0, 4, 6))


@dataclass(frozen=True, slots=True)
class PartCase:
    """part: of one layer. expected: the residual [T, D] behind it, of all rows of one sequence from position 0."""

    part: Attention | Mlp
    expected: Callable[[torch.Tensor], torch.Tensor]
    hidden_size: int
    tolerance: float
    device: torch.device
    shape: AttentionShape
    planes: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelCase:
    """expected: logits [T, V] and final hidden states [T, D] of ids from position 0. Ids are below `num_ids`."""

    loaded: LoadedModel
    model: DeviceModel
    expected: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    num_ids: int
    tolerance: float
    device: torch.device


def step_of(
    slot: int, start: int, length: int, shape: AttentionShape, device: torch.device
) -> tuple[KvTarget, StepAttention]:
    """A step with one chunk."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tables = torch.tensor(_TABLES, dtype=torch.int32, device=device)
    positions, slots = ints(*range(start, start + length)), ints(*[slot] * length)
    step = DeviceStep(
        page_tables=tables,
        row_slots=slots,
        row_positions=positions,
        decode_slots=ints(),
        decode_kv_lens=ints(),
        chunk_slots=ints(slot),
        chunk_row_starts=ints(0, length),
        chunk_kv_lens=ints(start + length),
        max_chunk_len=length,
    )
    return KvTarget(positions, slots, tables, PAGE_SIZE), TorchAttention(shape, page_size=PAGE_SIZE).begin(step, "")


def indexes_of(slot: int, length: int) -> list[int]:
    """Tokens of the pool that a slot's first positions take."""
    return [_TABLES[slot][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE for position in range(length)]


class AttentionContract:
    """One test a promise of `Attention`."""

    def test_rows_get_what_they_attend_to_added_however_they_are_cut(self, case: PartCase) -> None:
        assert isinstance(case.part, Attention)
        x_TD = _rows(case)
        want = case.expected(x_TD.clone())
        for slot, lengths in enumerate(((LENGTH,), (4, 1, 2), (1,) * LENGTH)):
            parts, start = [], 0
            for length in lengths:
                residual = Residual(x_TD[start : start + length].clone())
                with torch.inference_mode():
                    case.part.run(residual, *step_of(slot, start, length, case.shape, case.device))
                parts.append(residual.rows())
                start += length
            assert _error(torch.cat(parts), want) < case.tolerance

    @torch.inference_mode()
    def test_kv_is_written_at_its_rows_alone(self, case: PartCase) -> None:
        assert isinstance(case.part, Attention) and case.planes
        for plane in case.planes:
            plane.fill_(3.0)
        case.part.run(Residual(_rows(case)), *step_of(1, 0, LENGTH, case.shape, case.device))
        for plane in case.planes:
            changed = (plane != 3.0).flatten(1).any(dim=1).nonzero()[:, 0].tolist()
            assert sorted(changed) == sorted(indexes_of(1, LENGTH))


class MlpContract:
    """One test a promise of `Mlp`."""

    def test_rows_get_what_it_makes_of_them_added(self, case: PartCase) -> None:
        assert isinstance(case.part, Mlp)
        x_TD = _rows(case)
        want = case.expected(x_TD.clone())
        for rows in (slice(0, LENGTH), slice(2, 3)):
            residual = Residual(x_TD[rows].clone())
            with torch.inference_mode():
                case.part.run(residual)
            assert _error(residual.rows(), want[rows]) < case.tolerance


class DeviceModelContract:
    """One test a promise of `LoadedModel` and `DeviceModel`."""

    def test_it_says_what_it_is(self, case: ModelCase) -> None:
        loaded, model = case.loaded, case.model
        assert (model.vocab_size, model.hidden_size) == (loaded.vocab_size, loaded.hidden_size)
        assert (model.num_layers, model.dtype, model.tasks) == (loaded.num_layers, loaded.dtype, loaded.tasks)
        assert len(loaded.windows) == loaded.kv_layout.num_layers == loaded.num_layers
        # Of a model that embeds by itself they are ids.
        assert model.embedding_VD.shape in ((loaded.vocab_size, loaded.hidden_size), (loaded.vocab_size, 1))
        # A row holds its hidden state at least.
        assert loaded.row_bytes() >= loaded.hidden_size * loaded.dtype.itemsize and loaded.position_bytes() >= 0

    def test_tunable_matrices_are_of_one_shape_each(self, case: ModelCase) -> None:
        groups = case.loaded.tunable_matrices()
        assert all(len({tuple(matrix.shape) for matrix in group.matrices}) == 1 for group in groups)

    def test_embeddings_are_new_rows_of_the_table(self, case: ModelCase) -> None:
        ids_T = self._ids(case)
        x_TD = case.model.embed(ids_T)
        assert torch.equal(x_TD, case.model.embedding_VD[ids_T.long()])
        x_TD.zero_()
        assert case.model.embedding_VD.abs().sum() > 0

    def test_logits_and_hidden_states_do_not_depend_on_how_rows_are_cut(self, case: ModelCase) -> None:
        ids_T, model = self._ids(case), case.model
        want_logits, want_hidden = case.expected(ids_T.long().cpu())
        for slot, lengths in enumerate(((LENGTH,), (3, 4), (5, 1, 1))):
            hidden, start = [], 0
            with torch.inference_mode():
                for length in lengths:
                    x_TD = model.embed(ids_T[start : start + length])
                    hidden.append(
                        model.layers(x_TD, *step_of(slot, start, length, case.loaded.attention_shape, case.device))
                    )
                    start += length
                logits = torch.cat([model.logits(rows) for rows in hidden])
                final = torch.cat([model.final_hidden(rows) for rows in hidden])
            assert logits.dtype == model.dtype and final.dtype == torch.float32
            assert _error(logits.cpu(), want_logits) < case.tolerance
            assert _error(final.cpu(), want_hidden) < case.tolerance

    @staticmethod
    def _ids(case: ModelCase) -> torch.Tensor:
        ids = np.random.default_rng(0).integers(0, case.num_ids, LENGTH).astype(np.int32)
        return torch.from_numpy(ids).to(case.device)


def _rows(case: PartCase) -> torch.Tensor:
    rows = torch.randn(LENGTH, case.hidden_size, generator=torch.Generator().manual_seed(0))
    return rows.to(case.device)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape, (got.shape, want.shape)
    return float((got.float() - want.float()).norm() / want.float().norm())
