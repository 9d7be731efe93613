"""The orders of the queue, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixmesh.daemons.scheduler.queue.sub_queue import AgedSubQueue, SortedSubQueue, SubQueue, first_come
from radixmesh.daemons.scheduler.sequence import Sequence

SubQueueFactory = Callable[[], SubQueue]
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The order of the queue."""

    policy: str = "fcfs"
    """A name in QUEUE_POLICIES."""
    max_overtake_factor: float = 1.0
    """See AgedLane; for the policies that let later requests pass earlier ones."""
    seed: int = 0
    """Seed of the random order."""
    priority_across_tenants: bool = False
    """See WaitingQueue."""

    @property
    def may_preempt(self) -> bool:
        return self.policy == "priority"


def _fcfs(settings: QueueSettings) -> SubQueue:
    return SortedSubQueue(first_come)


def _lcfs(settings: QueueSettings) -> SubQueue:
    return _aged(SortedSubQueue(_last_come), settings)


def _lpm(settings: QueueSettings) -> SubQueue:
    from radixmesh.daemons.scheduler.queue.probed_sub_queue import LongestPrefixSubQueue

    return _aged(LongestPrefixSubQueue(), settings)


def _dfs_weight(settings: QueueSettings) -> SubQueue:
    from radixmesh.daemons.scheduler.queue.probed_sub_queue import DepthFirstSubQueue

    return _aged(DepthFirstSubQueue(), settings)


def _lof(settings: QueueSettings) -> SubQueue:
    return _aged(SortedSubQueue(_longest_output), settings)


def _random(settings: QueueSettings) -> SubQueue:
    seed = _mixed(settings.seed)
    return _aged(SortedSubQueue(lambda sequence: _mixed(seed ^ sequence.arrival)), settings)


QUEUE_POLICIES: dict[str, Callable[[QueueSettings], SubQueue]] = {
    "fcfs": _fcfs,
    "lpm": _lpm,
    "dfs-weight": _dfs_weight,
    "lof": _lof,
    "random": _random,
    # First come, first served, and a higher priority takes the place of lower ones that run (preemption.py).
    "priority": _fcfs,
    "lcfs": _lcfs,
}


def make_sub_queue_factory(settings: QueueSettings) -> SubQueueFactory:
    """A creator of lanes. Raises ValueError naming the choices."""
    if settings.policy not in QUEUE_POLICIES:
        raise ValueError(f"queue policy {settings.policy!r} is unknown: choose one of {', '.join(QUEUE_POLICIES)}")
    create = QUEUE_POLICIES[settings.policy]
    return lambda: create(settings)


def _aged(sub_queue: SubQueue, settings: QueueSettings) -> SubQueue:
    return AgedSubQueue(sub_queue, max_overtake_factor=settings.max_overtake_factor)


def _last_come(sequence: Sequence) -> int:
    return -sequence.arrival


def _longest_output(sequence: Sequence) -> int:
    return sequence.total_len - sequence.max_total_len


def _mixed(value: int) -> int:
    """SplitMix64's finaliser: a number that depends on all bits of `value`."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
