"""Objects whose names a grammar tells apart: described ones, those of patterns, and all others.

The library knows a name by its letters alone, so `"\\u0061"` would be another name than `"a"` and take another schema's
value. It also lets further names match a pattern of patternProperties, and names that a pattern has be described too.
"""

from __future__ import annotations

import re

from radixmesh.daemons.runtime.guided.json_patterns import is_quickly_matched, json_pattern, other_names

# Of patterns that are tried on described names: characters of the patterns times those of each name squared.
_MAX_MATCH_STEPS = 1 << 22


def closed_object(schema: dict[str, object]) -> None:
    """Spells out in place which further names an object may have; they are written without escapes then.

    Beside patternProperties there are no others, whatever additionalProperties says: what follows the grammar still
    fits the schema. Raises ValueError, "KEYWORD why", for what no grammar of the library's can hold.
    """
    properties, patterns = schema.get("properties") or {}, schema.get("patternProperties") or {}
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        raise ValueError(f"{'patternProperties' if isinstance(properties, dict) else 'properties'} that is no object")
    if "propertyNames" in schema and (properties or patterns):
        raise ValueError("propertyNames beside described names")
    _check_least(schema, bool(patterns))
    if patterns:
        _check_patterns(properties, patterns)
        schema["patternProperties"] = {_whole(pattern): inner for pattern, inner in patterns.items()}
        schema["additionalProperties"] = False
    elif properties and schema.get("additionalProperties", True) is not False:
        others = schema.pop("additionalProperties", True)
        schema["patternProperties"] = {other_names([str(name) for name in properties]): others}
        schema["additionalProperties"] = False


def _check_least(schema: dict[str, object], has_patterns: bool) -> None:
    """A name that stands twice counts once; the library counts it twice."""
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if not isinstance(least, int) or not isinstance(required, list):
        return
    if least <= len(set(map(str, required))):
        schema.pop("minProperties", None)
    elif least > len(required) + 1 and (has_patterns or schema.get("additionalProperties", True) is not False):
        raise ValueError("minProperties above 1 beside names that are not described, which may repeat")


def _check_patterns(properties: dict[str, object], patterns: dict[str, object]) -> None:
    if len(patterns) > 1 and any(inner != next(iter(patterns.values())) for inner in patterns.values()):
        raise ValueError("patternProperties of several patterns, which one name may match")
    inner = next(iter(patterns.values()))
    others = [name for name, own in properties.items() if own != inner]
    steps = sum(map(len, patterns)) * sum(len(name) ** 2 for name in others)
    for pattern in patterns if others else ():
        if steps > _MAX_MATCH_STEPS or not is_quickly_matched(pattern):
            raise ValueError(f"patternProperties with {pattern[:40]!r}, which is too much to try on described names")
        try:
            both = [name for name in others if re.search(pattern, name)]
        except (re.error, OverflowError) as error:
            raise ValueError(f"patternProperties with {pattern[:40]!r} ({error})") from error
        if both:
            raise ValueError(
                f"patternProperties with {pattern[:40]!r}, which the described {both[0][:40]!r} matches too"
            )


def _whole(pattern: str) -> str:
    try:
        return f"^({json_pattern(pattern)})$"
    except ValueError as error:
        raise ValueError(f"patternProperties with {error}") from error
