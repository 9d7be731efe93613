"""Numbers of a checkpoint's config: of the right type and size, or an error that names file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader

FILE = Path("config.json")


@pytest.mark.parametrize("value", [True, False, 0, -1, 1.0, 2.5, "3", [4], {"a": 1}, 1 << 31, 10**30])
def test_a_count_is_a_whole_number_from_one_on(value: object) -> None:
    reader = ConfigReader(FILE, {"num_layers": value}, "text.")  # type: ignore[dict-item]
    with pytest.raises(MeshError, match=r"text\.num_layers") as caught:
        reader.integer("num_layers")
    assert caught.value.reason_name == "BAD_CHECKPOINT" and "config.json" in str(caught.value)


def test_bounds_and_defaults_are_the_callers() -> None:
    reader = ConfigReader(FILE, {"zero": 0, "one": 1, "null": None})
    assert reader.integer("one") == 1 and reader.integer("zero", low=0) == 0
    assert reader.integer("null", 7) == reader.integer("absent", 7) == 7
    with pytest.raises(MeshError, match="whole number >= 2"):
        reader.integer("one", low=2)
    with pytest.raises(MeshError):
        reader.integer("absent")


@pytest.mark.parametrize(
    "value", [True, "1", -0.5, float("nan"), float("inf"), [1.0], 1e39, pytest.param(10**400, id="10**400")]
)
def test_a_measure_is_a_number_above_zero(value: object) -> None:
    with pytest.raises(MeshError, match="eps"):
        ConfigReader(FILE, {"eps": value}).number("eps")  # type: ignore[dict-item]


def test_lists_have_the_same_bounds() -> None:
    reader = ConfigReader(FILE, {"ids": [1, 1 << 31], "factors": [1.0, 10**400]})
    with pytest.raises(MeshError, match="ids"):
        reader.integers("ids")
    with pytest.raises(MeshError, match="factors"):
        reader.numbers("factors", 2)
