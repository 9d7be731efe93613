"""A place in a parsed YAML tree that knows its path, so that every complaint names the line's key."""

from collections.abc import Iterator
from dataclasses import dataclass

from radixmesh.daemons.cluster.errors import ComposeError


@dataclass(frozen=True, slots=True)
class ComposeNode:
    """A value of the file and its dotted path. The readers raise ComposeError where the value has another shape."""

    value: object
    where: str = ""

    def fail(self, problem: str) -> ComposeError:
        """Builds, without raising it, the error that names this place."""
        return ComposeError(self.where, problem)

    def items(self) -> Iterator[tuple[str, "ComposeNode"]]:
        """Iterates a mapping's keys and values."""
        if not isinstance(self.value, dict):
            raise self.fail(f"a mapping is expected, not {self.value!r}")
        for key, value in self.value.items():
            yield str(key), ComposeNode(value, f"{self.where}.{key}".lstrip("."))

    def mapping(self) -> "dict[str, ComposeNode]":
        """Reads a mapping."""
        return dict(self.items())

    def sequence(self) -> "list[ComposeNode]":
        """Reads a list."""
        if not isinstance(self.value, list):
            raise self.fail(f"a list is expected, not {self.value!r}")
        return [ComposeNode(value, f"{self.where}[{index}]") for index, value in enumerate(self.value)]

    def text(self) -> str:
        """Reads a string or a number as a string; a YAML boolean is refused, as Docker does: quote it."""
        if isinstance(self.value, bool) or not isinstance(self.value, str | int | float):
            raise self.fail(f"a string is expected, not {self.value!r}; put it in quotes")
        return str(self.value)

    def integer(self, *, low: int, high: int) -> int:
        """Reads a whole number in [low, high], written as a number or as a string."""
        try:
            number = int(self.text())
        except ValueError:
            raise self.fail(f"a whole number is expected, not {self.value!r}") from None
        if not low <= number <= high:
            raise self.fail(f"{number} is outside {low}..{high}")
        return number

    @property
    def is_mapping(self) -> bool:
        """True if this is a mapping."""
        return isinstance(self.value, dict)

    @property
    def is_sequence(self) -> bool:
        """True if this is a list."""
        return isinstance(self.value, list)

    @property
    def is_null(self) -> bool:
        """True if nothing is written here."""
        return self.value is None
