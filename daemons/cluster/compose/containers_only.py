"""Services that exist as images only, and what else in a file is about them.

`x-local: skip` on a service says that local processes do without it. What names it as `service:port` in the settings of
another service goes as well: an address that nobody resolves would only fail again and again.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from radixmesh.daemons.cluster.compose.node import ComposeNode

_MARK, _SKIP = "x-local", "skip"


class LocalServices(NamedTuple):
    """The services that local processes run, the names of the others, and what was left out for their sake."""

    services: dict[str, ComposeNode]
    containers_only: tuple[str, ...]
    left_out: tuple[str, ...]


def without_containers_only(services: Mapping[str, ComposeNode]) -> LocalServices:
    """Takes the marked services out, with the dependencies on them and the variables whose value names them.

    Raises ComposeError for a mark other than `skip`.
    """
    skipped = tuple(name for name, node in services.items() if _is_marked(node))
    if not skipped:
        return LocalServices(dict(services), (), ())
    reference = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, skipped))}):\d{{1,5}}(?!\d)")
    left_out: list[str] = []
    kept: dict[str, ComposeNode] = {}
    for name, node in services.items():
        if name in skipped:
            continue
        keys = dict(node.mapping())
        if "environment" in keys:
            keys["environment"] = _without_references(keys["environment"], reference, left_out)
        if "depends_on" in keys:
            keys["depends_on"] = _without_names(keys["depends_on"], skipped)
        kept[name] = ComposeNode({key: child.value for key, child in keys.items()}, node.where)
    return LocalServices(kept, skipped, tuple(left_out))


def _is_marked(node: ComposeNode) -> bool:
    mark = node.mapping().get(_MARK)
    if mark is None:
        return False
    if mark.value != _SKIP:
        raise mark.fail(f"the mark is {_SKIP}, for a service that exists as an image only, not {mark.value!r}")
    return True


def _without_references(node: ComposeNode, reference: re.Pattern[str], left_out: list[str]) -> ComposeNode:
    if node.is_sequence:
        entries = [(child.text().partition("=")[0], child) for child in node.sequence()]
    else:
        entries = list(node.items())
    named = {name for name, child in entries if reference.search(str(child.value))}
    left_out.extend(f"{node.where.removeprefix('services.')}.{name}" for name, _ in entries if name in named)
    if node.is_sequence:
        return ComposeNode([child.value for name, child in entries if name not in named], node.where)
    return ComposeNode({name: child.value for name, child in entries if name not in named}, node.where)


def _without_names(node: ComposeNode, names: tuple[str, ...]) -> ComposeNode:
    if node.is_sequence:
        return ComposeNode([child.value for child in node.sequence() if child.value not in names], node.where)
    return ComposeNode({name: child.value for name, child in node.items() if name not in names}, node.where)
