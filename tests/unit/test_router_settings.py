"""Settings of the router that can never work are refused at its start."""

from __future__ import annotations

import pytest

from radixmesh.cli import move
from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.runtime.settings import load_settings


@pytest.mark.parametrize("flag", ["--schedulers", "--tokenizers", "--detokenizers"])
@pytest.mark.parametrize("address", [f"{'x' * 64}:50051", "host", "host:0x50"])
def test_an_address_that_can_never_be_dialled_ends_the_start_with_status_2(
    flag: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        load_settings(RouterSettings, [flag, f"good:50051,{address}"], "radixmesh-router", {})
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert flag in told and address in told


@pytest.mark.parametrize("count", ["-1", str(1 << 32), "some"])
def test_a_number_of_outputs_to_move_that_is_none_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        move.run(["--request", "r", "--max", count])
    assert left.value.code == 2
    assert "--max" in capsys.readouterr().err
