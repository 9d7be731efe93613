"""A kernel of FlashInfer with the memory that its plans take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixmesh.daemons.worker.cuda.attention.paged_rows import PagedRows
from radixmesh.daemons.worker.cuda.flashinfer.kernels import create_kernel
from radixmesh.daemons.worker.cuda.flashinfer.modules import KernelConfig, KernelKind, PlanLayout
from radixmesh.daemons.worker.cuda.flashinfer.workspace import allocate_workspace, workspace_bytes
from radixmesh.daemons.worker.cuda.step.inputs.pinned_ring import PinnedRing


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec:
    """A FlashInfer kernel and the largest step it is planned for. longest: as `allocate_workspace` takes it."""

    kind: KernelKind
    config: KernelConfig
    max_rows: int
    max_queries: int
    longest: int = 1

    def num_bytes(self, num_sms: int) -> int:
        """Device memory that the plan takes."""
        return sum(
            workspace_bytes(
                self.kind,
                self.config,
                num_sms,
                max_rows=self.max_rows,
                max_queries=self.max_queries,
                longest=self.longest,
            )
        )


class FlashInferPlan:
    """A FlashInfer kernel and its current plan."""

    def __init__(self, spec: PlanSpec, device: torch.device) -> None:
        config = spec.config
        self._kernel = create_kernel(spec.kind, config)
        self._workspace = allocate_workspace(
            spec.kind,
            config,
            device,
            max_rows=spec.max_rows,
            max_queries=spec.max_queries,
            longest=spec.longest,
        )
        self._staging = PinnedRing(len(self._workspace.ints))
        self._layout: PlanLayout = ()
        # Layouts captured in graphs, by numbers of rows and queries: a graph would read another layout as this one.
        self._captured: dict[tuple[int, int], tuple[int, ...]] | None = {} if config.in_graphs else None

    def update(self, rows: PagedRows) -> None:
        """Plans for `rows` and sends the plan to the device on the current stream."""
        self._layout = self._kernel.plan(rows, self._workspace, self._staging.take())
        self._staging.fence()
        if self._captured is not None:
            layout = tuple(self._layout)
            first = self._captured.setdefault((len(rows), rows.num_queries), layout)
            assert layout == first, (len(rows), layout, first)

    def run(
        self,
        rows: PagedRows,
        query_THd: torch.Tensor,
        keys_PSKd: torch.Tensor,
        values_PSKd: torch.Tensor,
        out_THd: torch.Tensor,
        lse_TH: torch.Tensor | None = None,
    ) -> None:
        """As `PlannedKernel.run`, for the rows last planned."""
        self._kernel.run(self._layout, rows, self._workspace, query_THd, keys_PSKd, values_PSKd, out_THd, lse_TH)
