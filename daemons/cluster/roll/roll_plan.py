"""The order in which a roll replaces processes, and how each of them leaves: a pure function of their specs."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from radixmesh.daemons.cluster.errors import UnknownServiceError
from radixmesh.daemons.cluster.plan import ClusterPlan, ProcessSpec

_OUR_CLI = "radixmesh.cli"
# A second process of these harms nothing: they hold no memory worth speaking of, and a second scheduler stands by.
_TRIED = ("tokenizer", "detokenizer", "scheduler", "router", "front")
# Their work goes on elsewhere, or in their next process.
_RESUMED = ("tokenizer", "detokenizer", "scheduler", "worker")
# Seconds that the only one of its kind gets to leave: while it drains it takes nothing new.
_ALONE_S = 1.0


class RollStep(NamedTuple):
    """Processes that are replaced together: they leave in this order, and start in the opposite one."""

    specs: tuple[ProcessSpec, ...]


def kind_of(spec: ProcessSpec) -> str:
    """The daemon that a process is (`router`); empty for a command that is none of ours."""
    words = spec.argv
    if _OUR_CLI not in words[:-1]:
        return ""
    return words[words.index(_OUR_CLI) + 1]


def plan_roll(plan: ClusterPlan, services: Collection[str]) -> list[RollStep]:
    """Steps for the processes of `services` (empty: all), dependencies first, one replica after the other.

    A worker and its scheduler are one step where another scheduler can take the outputs: they leave it as soon as it
    is asked to end, and nothing computes on the worker when it does. Raises UnknownServiceError.
    """
    known = [name for level in plan.levels for name in level]
    if unknown := sorted(set(services) - set(known)):
        raise UnknownServiceError(f"there is no service {', '.join(unknown)}: the file has {', '.join(known)}")
    chosen = [
        spec for name in known if not services or name in services for spec in plan.processes if spec.service == name
    ]
    steps: list[RollStep] = []
    placed: set[str] = set()
    for spec in chosen:
        if spec.name in placed:
            continue
        members = _step_of(spec, chosen, plan.processes)
        placed.update(member.name for member in members)
        steps.append(RollStep(members))
    return steps


def is_alone(spec: ProcessSpec, others: Sequence[ProcessSpec]) -> bool:
    """True if none of `others` does the same work."""
    kind = kind_of(spec)
    return not any(
        other.name != spec.name and (kind_of(other) == kind if kind else other.service == spec.service)
        for other in others
    )


def hurry_s_of(spec: ProcessSpec, others: Sequence[ProcessSpec]) -> float | None:
    """Seconds after which a process that leaves is told to hurry; None = it has its whole grace period.

    A router or front finishes what its clients wait for, and plain HTTP clients cannot resume.
    """
    return _ALONE_S if kind_of(spec) in _RESUMED and is_alone(spec, others) else None


def is_tried(spec: ProcessSpec) -> bool:
    """True if a process of the new version is started beside the old one first, on spare ports, to see that it serves.

    Not a worker: a second one would need its memory, and its device's, once more. Not what listens on a Unix socket: a
    second process would take it from the first.
    """
    return kind_of(spec) in _TRIED and "unix:" not in " ".join((*spec.argv, *_listens(spec)))


def _listens(spec: ProcessSpec) -> list[str]:
    return [value for name, value in spec.environment.items() if "LISTEN" in name]


def _step_of(
    spec: ProcessSpec, chosen: Sequence[ProcessSpec], processes: Sequence[ProcessSpec]
) -> tuple[ProcessSpec, ...]:
    if kind_of(spec) != "worker":
        return (spec,)
    schedulers = [other for other in processes if kind_of(other) == "scheduler"]
    own = [scheduler for scheduler in schedulers if _names(scheduler, spec)]
    if not own or len(own) == len(schedulers):
        return (spec,)
    workers = [
        other for other in chosen if kind_of(other) == "worker" and any(_names(scheduler, other) for scheduler in own)
    ]
    return (*own, *workers)


def _names(spec: ProcessSpec, other: ProcessSpec) -> bool:
    """True if an address of `other` is in the settings of `spec`."""
    words = {word for text in (*spec.argv, *spec.environment.values()) for word in text.replace("=", ",").split(",")}
    return any(address in words for address in other.addresses.values())
