"""Limits of name look-ups in processes of ranks, whose store asks for names while other ranks wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixmesh.daemons.worker import __main__ as worker

MODEL = str(Path(__file__).parents[2] / "compose" / "models" / "tiny-llama")


class Left(Exception):
    pass


@pytest.mark.parametrize(
    ("flags", "own", "wanted"),
    [
        (["--tp-size", "2"], None, "timeout:1 attempts:3"),
        (["--dp-size", "2"], None, "timeout:1 attempts:3"),
        (["--tp-size", "2"], "timeout:4", "timeout:4"),
        ([], None, None),
    ],
)
def test_they_are_set_before_anything_is_resolved(
    flags: list[str], own: str | None, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def run(*rest: object) -> int:
        seen.append(worker.os.environ.get("RES_OPTIONS"))
        raise Left

    monkeypatch.setattr(worker, "run_daemon", run)
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    if own is not None:
        monkeypatch.setenv("RES_OPTIONS", own)
    with pytest.raises(Left):
        worker.main(["--model", MODEL, "--backend", "cpu", *flags])
    assert seen == [wanted]
