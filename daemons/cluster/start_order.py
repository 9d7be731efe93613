"""The order in which services start: whoever is waited for comes first."""

from collections.abc import Mapping

from radixmesh.daemons.cluster.compose.compose import Service
from radixmesh.daemons.cluster.errors import DependencyCycleError


def start_levels(services: Mapping[str, Service]) -> tuple[tuple[str, ...], ...]:
    """Groups services into levels: each depends only on services of earlier levels (Kahn's algorithm, by level).

    Within a level the order of the file is kept. Stopping goes through the levels backwards. Raises
    DependencyCycleError, naming the circle.
    """
    waits_for = {name: {dependency.service for dependency in service.depends_on} for name, service in services.items()}
    levels: list[tuple[str, ...]] = []
    placed: set[str] = set()
    while len(placed) < len(waits_for):
        level = tuple(name for name in waits_for if name not in placed and waits_for[name] <= placed)
        if not level:
            circle = " -> ".join(
                _find_circle({name: waits_for[name] - placed for name in waits_for if name not in placed})
            )
            raise DependencyCycleError(
                "services", f"the services wait for one another: {circle}; remove one depends_on"
            )
        levels.append(level)
        placed.update(level)
    return tuple(levels)


def _find_circle(waits_for: Mapping[str, set[str]]) -> list[str]:
    # Every name left waits for another one left, so walking on must come back to a name already seen.
    walk = [min(waits_for)]
    while walk.count(walk[-1]) == 1:
        walk.append(min(waits_for[walk[-1]]))
    return walk[walk.index(walk[-1]) :]
