"""JSON schemas at random: every keyword that a grammar may follow, alone and beside others, and some that none can."""

from __future__ import annotations

import random

Schema = dict[str, object]

_NAMES = ("a", "b", "id", "name", "tags", "größe", 'say "hi"', "a/b", "x~y", "$ref", "type", "back\\slash", "tab\there")
_PATTERNS = (
    "^a+$", "^[a-z]{2,5}$", "[0-9]+", "^(foo|bar)$", "^\\d{3}-\\d{4}$", "^\\w+@\\w+\\.com$", "a|b", "^x", "y$", "^.+$",
    "^[^\\s]+$", "^\"q\"$", "^a\\/b$", "^[A-Za-z_][A-Za-z0-9_]*$", "^\\s*$", "^(?:ab)*c?$", "^[\\w.-]+$", "^\\\\$", ".",
    "^[^a]$", "^é+$", "^\\u0041$", "^a{2,}$", "^$", "^(a|b$)", "^a|b$",
    "^[\"\\\\]$", "\\bword\\b", "^\\S+$", "^[\\x20-\\x7e]*$",
    "^\\D\\W$", "(?i)abc", "^\\p{L}+$", "a.c", "^[\\]\\[]$", "^\\.$", "^a$|^b$", "^\\t$", "^\n$",
)  # fmt: skip
_FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "regex", "unknown")
_UNSUPPORTED: tuple[Schema, ...] = (
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 3}},
    {"contains": {"const": 1}},
    {"uniqueItems": True},
    {"dependentRequired": {"a": ["b"]}},
    {"unevaluatedProperties": False},
    {"dependencies": {"a": ["b"]}},
    {"additionalItems": False},
)


class SchemaGenerator:
    """Equal seeds give equal schemas. odd: the share of subschemas that get a keyword from any other kind's."""

    def __init__(self, seed: int, odd: float = 0.05) -> None:
        self._rng = random.Random(seed)
        self._odd = odd

    def schema(self) -> Schema:
        """A whole schema; one in four has definitions, some of which refer to themselves."""
        rng = self._rng
        if rng.random() < 0.75:
            return self._any(3)
        names = ["node", "leaf"]
        node: Schema = {
            "type": "object",
            "properties": {
                "value": {"$ref": "#/$defs/leaf"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": rng.sample(["value", "next"], rng.randint(0, 2)),
        }  # fmt: skip
        if rng.random() < 0.5:
            node["additionalProperties"] = False
        root = rng.choice(
            ({"$ref": "#/$defs/node"}, {"type": "array", "items": {"$ref": f"#/$defs/{rng.choice(names)}"}})
        )
        return {**root, "$defs": {"node": node, "leaf": self._any(1)}}

    def _any(self, depth: int) -> Schema:
        rng = self._rng
        kinds = [self._string, self._number, self._enum, self._simple]
        if depth:
            kinds += [self._object, self._object, self._object, self._array, self._array, self._choice]
        chosen = rng.choice(kinds)(depth)
        if rng.random() < self._odd:
            chosen = {**chosen, **rng.choice((*_UNSUPPORTED, self._string(0), self._number(0), self._enum(0)))}
        if rng.random() < 0.1:
            chosen = {**chosen, "title": "T", "description": "said", "default": None}
        return chosen

    def _simple(self, depth: int) -> Schema:
        names = ["string", "integer", "number", "boolean", "null", "object", "array"]
        if self._rng.random() < 0.3:
            return {"type": self._rng.sample(names, self._rng.randint(1, 3))}
        return self._rng.choice(({"type": self._rng.choice(names)}, {"type": self._rng.choice(names)}, {}))

    def _string(self, depth: int) -> Schema:
        rng, made = self._rng, Schema(type="string")
        kind = rng.random()
        if kind < 0.35:
            made["pattern"] = rng.choice(_PATTERNS)
        elif kind < 0.5:
            made["format"] = rng.choice(_FORMATS)
        elif kind < 0.9:
            least = rng.randint(0, 6)
            made |= rng.choice(
                (
                    {"minLength": least},
                    {"maxLength": least},
                    {"minLength": least, "maxLength": least + rng.randint(0, 9)},
                )
            )
        return made

    def _number(self, depth: int) -> Schema:
        rng, made = self._rng, Schema(type=self._rng.choice(("integer", "number")))
        bounds = [
            rng.choice((0, 1, -1, 7, -13, 100, 1000, 12345, 0.5, -2.75, 1e3, 99999999999, -0.001)) for _ in range(2)
        ]
        low, high = min(bounds), max(bounds)
        for name, value in (("minimum", low), ("maximum", high)):
            if rng.random() < 0.6:
                made[name if rng.random() < 0.7 else f"exclusive{name.capitalize()}"] = value
        if rng.random() < 0.15:
            made["multipleOf"] = rng.choice((2, 5, 10, 0.5, 0.01, 3))
        return made

    def _enum(self, depth: int) -> Schema:
        rng = self._rng
        values: list[object] = [
            "red",
            "green",
            "",
            'a"b',
            "ü",
            "line\nbreak",
            1,
            2.5,
            -3,
            True,
            False,
            None,
            [1, "x"],
            {"k": 1},
        ]
        chosen = rng.sample(values, rng.randint(1, 4))
        if rng.random() < 0.3:
            return {"const": chosen[0]}
        if rng.random() < 0.5:
            texts = [value for value in chosen if isinstance(value, str)] or ["only"]
            return {"type": "string", "enum": texts}
        return {"enum": chosen}

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randint(0, 4))
        made: Schema = {"type": "object"}
        if names:
            made["properties"] = {name: self._any(depth - 1) for name in names}
            if rng.random() < 0.8:
                made["required"] = rng.sample(names, rng.randint(0, len(names)))
        kind = rng.random()
        if kind < 0.45:
            made["additionalProperties"] = False
        elif kind < 0.6:
            made["additionalProperties"] = self._any(0)
        elif kind < 0.67:
            made["patternProperties"] = {rng.choice(("^x-", "^[a-z]+$", "_id$")): self._any(0)}
        elif kind < 0.72:
            made["propertyNames"] = {"pattern": "^[a-z]+$"}
        if rng.random() < 0.12:
            made |= rng.choice(({"minProperties": 1}, {"maxProperties": 2}, {"minProperties": 2, "maxProperties": 4}))
        if rng.random() < 0.05:
            made["required"] = [*(made.get("required") or []), "undescribed"]  # type: ignore[misc]
        return made

    def _array(self, depth: int) -> Schema:
        rng, made = self._rng, Schema(type="array")
        kind = rng.random()
        if kind < 0.7:
            made["items"] = self._any(depth - 1)
        if kind > 0.6:
            made["prefixItems"] = [self._any(0) for _ in range(rng.randint(1, 3))]
            if rng.random() < 0.4:
                made["items"] = False
        if rng.random() < 0.5:
            least = rng.randint(0, 3)
            made |= rng.choice(
                ({"minItems": least}, {"maxItems": least}, {"minItems": least, "maxItems": least + rng.randint(0, 3)})
            )
        return made

    def _choice(self, depth: int) -> Schema:
        name = self._rng.choice(("anyOf", "anyOf", "anyOf", "oneOf", "allOf"))
        num = self._rng.randint(1, 3) if name != "allOf" else 1
        return {name: [self._any(depth - 1) for _ in range(num)]}
