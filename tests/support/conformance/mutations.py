"""JSON texts near one that fits a schema: most of them break it, and no grammar of the schema may take those."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator

_VALUES: tuple[object, ...] = (
    None, True, 0, 1, -1, 7, 100, 1e3, 0.5, -2.75, 123456789012, "", "a", "ab", "foo", "aaaaaaaaaaaaaaaaaaaa",
    'a"b', "ü", "x-y", [], [1], {}, {"a": 1}, "2020-01-01",
)  # fmt: skip


def mutations(value: object, names: list[str], rng: random.Random, num: int) -> Iterator[str]:
    """Texts of values with one to three changes; of some, a name stands twice in an object. names: of the schema."""
    for _ in range(num):
        changed = [copy.deepcopy(value)]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _change(changed, names, rng)
        text = json.dumps(changed[0], ensure_ascii=rng.random() < 0.3)
        if isinstance(changed[0], dict) and changed[0] and rng.random() < 0.3:
            name = rng.choice(list(changed[0]))
            text = f"{text[:-1]}, {json.dumps(name)}: {json.dumps(copy.deepcopy(rng.choice(_VALUES)))}}}"
        yield text


def _change(root: list[object], names: list[str], rng: random.Random) -> None:
    holders: list[dict[str, object] | list[object]] = []
    _holders(root, holders)
    holder = rng.choice(holders)
    if isinstance(holder, list):
        kind = rng.random()
        if holder is not root and kind < 0.3:
            holder.insert(rng.randint(0, len(holder)), copy.deepcopy(rng.choice(_VALUES)))
        elif holder is not root and kind < 0.5 and holder:
            holder.pop(rng.randrange(len(holder)))
        elif holder:
            where = rng.randrange(len(holder))
            holder[where] = _other(holder[where], rng)
        return
    kind = rng.random()
    if holder and kind < 0.3:
        del holder[rng.choice(list(holder))]
    elif kind < 0.6:
        holder[rng.choice([*names, "zz", "x-1", "a_id"])] = copy.deepcopy(rng.choice(_VALUES))
    elif holder and kind < 0.7:
        items = list(holder.items())
        rng.shuffle(items)
        holder.clear()
        holder.update(items)
    elif holder:
        name = rng.choice(list(holder))
        holder[name] = _other(holder[name], rng)


def _other(value: object, rng: random.Random) -> object:
    """A value of the same type nearby, or any."""
    if rng.random() < 0.3:
        return copy.deepcopy(rng.choice(_VALUES))
    if isinstance(value, bool) or value is None:
        return rng.choice((True, False, None))
    if isinstance(value, int):
        return value + rng.choice((1, -1, 10, -1000, 10**12))
    if isinstance(value, float):
        return rng.choice((value + 0.25, -value, value * 1000, int(value) if abs(value) < 1e15 else 0))
    if isinstance(value, str):
        cut = rng.randint(0, len(value))
        return rng.choice(
            (value[:cut], value + rng.choice('aZ9 -é\n"'), value + value, value[:cut] + "é" + value[cut:])
        )
    return copy.deepcopy(rng.choice(_VALUES))


def _holders(value: object, found: list[dict[str, object] | list[object]]) -> None:
    if isinstance(value, list):
        found.append(value)
        for inner in value:
            _holders(inner, found)
    elif isinstance(value, dict):
        found.append(value)
        for inner in value.values():
            _holders(inner, found)


def names_of(schema: object) -> list[str]:
    """Property names anywhere in a schema."""
    found: list[str] = []
    waiting = [schema]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            named = item.get("properties")
            if isinstance(named, dict):
                found += named
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return found or ["a"]
