"""Expressions that a program appends to its state: texts, generations, selections and roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from radixmesh.client.errors import InvalidRequestError
from radixmesh.client.lang.choices import ChoicesMethod, token_length_normalized
from radixmesh.client.options import Options

if TYPE_CHECKING:
    from typing import Unpack

# Each is a request of its own.
MAX_CHOICES = 256
Role: TypeAlias = Literal["system", "user", "assistant"]


class Expression:
    """Anything that can be appended; `+` joins expressions and texts."""

    def __add__(self, other: Expression | str) -> Expression:
        return Parts((*flat(self), *flat(other)))

    def __radd__(self, other: str) -> Expression:
        return Parts((*flat(other), *flat(self)))


@dataclass(frozen=True, slots=True)
class Parts(Expression):
    """Several expressions, in order."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Gen(Expression):
    """Text that the model generates, kept under a name unless that is empty."""

    name: str
    options: Options


@dataclass(frozen=True, slots=True)
class Select(Expression):
    """The choice that the model finds likeliest, kept under a name unless that is empty."""

    name: str
    choices: tuple[str, ...]
    method: ChoicesMethod


@dataclass(frozen=True, slots=True)
class RoleBegin(Expression):
    """Begins a message of a chat."""

    role: Role


@dataclass(frozen=True, slots=True)
class RoleEnd(Expression):
    """Ends the message of that role."""

    role: Role


Part: TypeAlias = "str | Gen | Select | RoleBegin | RoleEnd"


def flat(expression: Expression | str) -> Iterator[Part]:
    """The parts of an expression in order. Raises TypeError for what is none."""
    if isinstance(expression, Parts):
        yield from expression.parts
    elif isinstance(expression, str | Gen | Select | RoleBegin | RoleEnd):
        yield expression
    else:
        raise TypeError(f"append a text or an expression such as gen(...), not {type(expression).__name__}")


def gen(
    name: str = "",
    *,
    choices_method: ChoicesMethod = token_length_normalized,
    json: str | Mapping[str, object] | type | None = None,
    **options: Unpack[Options],
) -> Expression:
    """Lets the model continue the text. options: of AsyncClient.generate (max_tokens, stop, temperature, regex, ...).

    choices: the same as select(name, choices, choices_method): they are scored, and nothing is sampled.
    json: schema of the text, as a mapping, as JSON, or as a class with model_json_schema() (pydantic's models).
    Raises InvalidRequestError for options that do not go together.
    """
    if (choices := options.pop("choices", None)) is not None:
        if options or json is not None:
            raise _invalid("choices", "gen with choices scores them and samples nothing: leave the other options out")
        return select(name, choices, choices_method)
    if options.get("n") not in (None, 1):
        raise _invalid("n", "gen makes one text: fork the state for several")
    if json is not None:
        options["json_schema"] = _schema_of(json)
    return Gen(name, options)


def select(name: str, choices: Sequence[str], method: ChoicesMethod = token_length_normalized) -> Expression:
    """Appends the choice that scores best by its logprobs as a continuation of the text.

    Raises InvalidRequestError unless there are 1 to MAX_CHOICES different texts, none of them empty.
    """
    if isinstance(choices, str) or not 1 <= len(choices) <= MAX_CHOICES:
        raise _invalid("choices", f"choices is a list of 1 to {MAX_CHOICES} texts")
    if not all(choices) or len(set(choices)) != len(choices):
        raise _invalid("choices", "a choice is empty or occurs twice: give each text once")
    return Select(name, tuple(choices), method)


def system(*parts: Expression | str) -> Expression:
    """A system message of these parts."""
    return in_role("system", parts)


def user(*parts: Expression | str) -> Expression:
    """A message of the user."""
    return in_role("user", parts)


def assistant(*parts: Expression | str) -> Expression:
    """A message of the assistant: the one in which models generate."""
    return in_role("assistant", parts)


def in_role(role: Role, parts: Sequence[Expression | str]) -> Expression:
    inner = [part for expression in parts for part in flat(expression)]
    return Parts((RoleBegin(role), *inner, RoleEnd(role)))


def _schema_of(schema: str | Mapping[str, object] | type) -> str | Mapping[str, object]:
    if isinstance(schema, str | Mapping):
        return schema
    make = getattr(schema, "model_json_schema", None)
    if make is None:
        raise _invalid("json", "json is a schema: a mapping, JSON, or a class with model_json_schema()")
    made = make()
    assert isinstance(made, Mapping)
    return made


def _invalid(field: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, "INVALID_ARGUMENT", {"field": field})
