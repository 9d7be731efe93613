"""Links of one runner to other ranks: the group that holds its model, and those that share its experts.

While a link is down nothing is launched, and what was launched is not believed: kernels that were told to leave have
computed with parts of this rank alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from radixmesh.daemons.worker.collectives.agreement import agree_on_steps
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DeviceDispatch
from radixmesh.daemons.worker.cuda.ranks.device_group import DeviceGroup

# Flags that decide to how many rows a step is padded.
_STEP_FLAGS = (
    "--num-slots, --max-tokens-per-step, --max-total-len, --page-size, --dtype, --deterministic, --no-cuda-graphs, "
    "--tp-collectives, --ep-transport and --two-batch-min-rows"
)

# Together longer than a rank may be silent.
_LOSS_POLLS, _LOSS_POLL_S = 120, 0.05


class RankLinks:
    """group: the ranks that hold the model together with this one. experts: those that share its experts. Either may be
    None. travels: carries rows to the experts of ranks with other rows; None: those of a step stay where they are."""

    def __init__(self, group: DeviceGroup | None, experts: DeviceDispatch | None) -> None:
        self.group, self.experts = group, experts
        self.travels = experts if experts is not None and experts.travels else None
        self._links = [link for link in (group, experts) if link is not None]
        self._num_formed = 0

    def __bool__(self) -> bool:
        return bool(self._links)

    @property
    def is_captured_anew(self) -> bool:
        """True if graphs hold connections: each generation of the group needs graphs of its own."""
        return any(link.is_captured_anew for link in self._links)

    def agree(self, *sizes: object) -> bool:
        """True if any rank was in a group before, on all ranks alike: requests may wait for this one. Raises
        CollectiveAborted unless `sizes`, by which steps are padded and captured, are equal on all ranks."""
        most = torch.tensor([self._num_formed])
        for link in self._links:
            agree_on_steps(link.ranks, (*sizes, link.kind), _STEP_FLAGS)
        for _ in range(self._num_rounds):
            for link in self._links:
                most = link.ranks.stack(most).amax(0)
        return bool(most > 0)

    @property
    def _num_rounds(self) -> int:
        """Exchanges with the ranks of all links until what one rank says has come to all that it is linked with: groups
        of both kinds are neighbours, and overlap in a chain where the size of neither divides the other's."""
        sizes = [link.ranks.size for link in self._links]
        return math.lcm(*sizes) // max(sizes, default=1)

    def form(self) -> None:
        """Connects anew. No graph is left that holds the generation before. Raises as `DeviceGroup.form`."""
        for link in self._links:
            link.leave()
            link.form()
        self._num_formed += 1

    @contextmanager
    def losses_told(self) -> Iterator[None]:
        """Raises CollectiveAborted or RankLost for what a library says of connections while a graph is captured, where
        another rank turns out to be lost: a heartbeat takes longer to notice."""
        try:
            yield
        except RuntimeError:
            for _ in range(_LOSS_POLLS):
                self.check()
                time.sleep(_LOSS_POLL_S)
            raise

    def check(self) -> None:
        """Raises CollectiveAborted or RankLost unless all ranks are there."""
        for link in self._links:
            link.check()

    def launched(self, device: Device) -> Callable[[], None]:
        """A check for when the step that was launched just now is over. Raises CollectiveAborted or RankLost unless
        all ranks computed it."""
        check_experts = None if self.experts is None else self.experts.launched(device)

        def check() -> None:
            if self.group is not None:
                self.group.check()
            if check_experts is not None:
                check_experts()

        return check
