"""Typed reading of a config.json, with errors that name the key, its value and what was expected."""

from __future__ import annotations

from pathlib import Path

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.fingerprint import Json, read_json_object

# Sizes and counts fit in int32, as kernels take them; other numbers in float32.
_MOST, _MOST_NUMBER = 2**31 - 1, 3e38


class ConfigReader:
    """One JSON object of a config file. A key whose value is null counts as absent, as everywhere in this format.

    Every method raises MeshError BAD_CHECKPOINT where a key without default is absent or a value has another type.
    """

    def __init__(self, file: Path, values: Json, prefix: str = "") -> None:
        self.file = file
        self._values = values
        self._prefix = prefix

    @classmethod
    def open(cls, folder: Path) -> ConfigReader:
        """Reads config.json of a model folder."""
        if not folder.is_dir():
            raise bad_checkpoint(folder, "is no folder: name a model folder in Hugging Face format")
        file = folder / "config.json"
        return cls(file, read_json_object(file))

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """True if the key is there with the value null, for the few keys where that is not the same as absent."""
        return key in self._values and self._values[key] is None

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """A whole number >= low that fits in int32."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _MOST:
            raise self.error(key, f"a whole number >= {low} and < 2^31")
        return value

    def number(self, key: str, default: float | None = None, *, can_be_zero: bool = False) -> float:
        """A number > 0, or >= 0, that fits in float32."""
        value = self._get(key, default)
        is_zero = can_be_zero and value == 0
        if not isinstance(value, int | float) or isinstance(value, bool) or not (0 < value < _MOST_NUMBER or is_zero):
            raise self.error(key, f"a number {'>=' if can_be_zero else '>'} 0 and < {_MOST_NUMBER:g}")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        value = self._get(key, None)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return tuple(value)

    def integers(self, key: str, *, low: int = 1) -> tuple[int, ...]:
        """A list of whole numbers >= low that fit in int32; empty if absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
            raise self.error(key, "a list of whole numbers")
        if not all(low <= n <= _MOST for n in value):
            raise self.error(key, f"a list of whole numbers >= {low} and < 2^31")
        return tuple(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of that many numbers > 0 that fit in float32."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != length or not all(_is_positive(n) for n in value):
            raise self.error(key, f"a list of {length} numbers > 0")
        return tuple(float(n) for n in value)

    def length(self, key: str) -> int:
        """Entries of a list; 0 if absent."""
        value = self._get(key, [])
        if not isinstance(value, list):
            raise self.error(key, "a list")
        return len(value)

    def keys(self, key: str) -> tuple[str, ...]:
        """The keys of the JSON object under `key`; empty if absent."""
        section = self.section(key)
        return () if section is None else tuple(section._values)

    def section(self, key: str) -> ConfigReader | None:
        """The JSON object under `key`, None if absent."""
        if not self.has(key):
            return None
        value = self._values[key]
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return ConfigReader(self.file, value, f"{self._prefix}{key}.")

    def error(self, key: str, expected: str) -> MeshError:
        """BAD_CHECKPOINT: the value of `key` is not what is expected."""
        given = repr(self._values[key]) if key in self._values else "absent"
        return MeshError(
            common_pb2.ERROR_REASON_BAD_CHECKPOINT,
            f"{self.file}: {self._prefix}{key} is {given}, expected {expected}",
            {"file": str(self.file), "key": self._prefix + key},
        )

    def unsupported(self, key: str, known: str) -> MeshError:
        """UNSUPPORTED: the value is a legal one that this engine does not implement."""
        return MeshError(
            common_pb2.ERROR_REASON_UNSUPPORTED,
            f"{self.file}: {self._prefix}{key} is {self._values.get(key)!r}; supported: {known}",
            {"file": str(self.file), "key": self._prefix + key},
        )

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        return default if value is None else value


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST_NUMBER


def bad_checkpoint(file: Path, what: str, tensor: str = "") -> MeshError:
    """BAD_CHECKPOINT about `file` and, where it is about one, a tensor; `what` continues the sentence."""
    metadata = {"file": str(file)}
    if tensor:
        metadata["tensor"] = tensor
    return MeshError(common_pb2.ERROR_REASON_BAD_CHECKPOINT, f"{file} {what}", metadata)
