"""Several compose files as one, a later file over the earlier ones, by the rules of `docker compose -f a.yml -f b.yml`.

    mappings                            key by key
    environment, depends_on             likewise, whichever of their two forms they are written in
    volumes                             by path in the container
    command, entrypoint, a check's test the later one
    other lists                         the earlier one's entries, then what the later one has besides
    anything else                       the later one

A key whose value is null in the later file keeps the earlier value, as it does for Docker.
"""

from collections.abc import Sequence

_REPLACED = frozenset(["command", "entrypoint", "test"])
_KEYED = frozenset(["environment", "depends_on"])


def merge_trees(trees: Sequence[object]) -> object:
    """The one tree that parsed files stand for. What is no mapping is left for the reader to complain about."""
    merged = trees[0]
    for tree in trees[1:]:
        merged = _merge(merged, tree, key="")
    return merged


def _merge(base: object, over: object, *, key: str) -> object:
    if over is None:
        return base
    if base is None or key in _REPLACED:
        return over
    if key in _KEYED:
        base, over = _as_mapping(base, key), _as_mapping(over, key)
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {name: _merge(base.get(name), value, key=str(name)) for name, value in over.items()}
    if isinstance(base, list) and isinstance(over, list):
        if key == "volumes":
            replaced = {_target(volume) for volume in over}
            return [volume for volume in base if _target(volume) not in replaced] + over
        return base + [entry for entry in over if entry not in base]
    return over


def _as_mapping(value: object, key: str) -> object:
    """The list form as the mapping it stands for; anything else as it is."""
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        return value
    if key == "depends_on":
        return {name: {"condition": "service_started"} for name in value}
    # A name without a value means the shell's, in either form.
    return {name: text if equals else None for name, equals, text in (entry.partition("=") for entry in value)}


def _target(volume: object) -> str:
    if isinstance(volume, dict):
        return str(volume.get("target"))
    parts = str(volume).split(":")
    return parts[1] if len(parts) > 1 else parts[0]
