"""Further names under which clients may ask for a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class ModelAliases:
    """Alias -> name of a served model. Every answer carries the model's own name."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    @staticmethod
    def parse(texts: Iterable[str]) -> ModelAliases:
        """From `ALIAS=NAME` texts. Raises ValueError for one that has not that form, or that names an alias twice."""
        names: dict[str, str] = {}
        for text in texts:
            alias, _, name = text.partition("=")
            if not alias or not name:
                raise ValueError(f"--model-aliases: {text!r} is not ALIAS=NAME, for instance default=llama-3.2-3b")
            if alias in names:
                raise ValueError(f"--model-aliases: {alias!r} is named twice")
            names[alias] = name
        return ModelAliases(names)

    def resolve(self, name: str) -> str:
        """The model's own name, or `name` itself where it is no alias."""
        return self._names.get(name, name)

    def of(self, name: str) -> list[str]:
        """The aliases of a model, in the order in which they were given."""
        return [alias for alias, own in self._names.items() if own == name]
