"""Settings from flags and variables."""

import json
import logging
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest

from radixmesh.daemons.runtime.common_settings import CommonSettings, LogLevel
from radixmesh.daemons.runtime.settings import load_settings, required, setting


class Backend(StrEnum):
    CPU = "cpu"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(CommonSettings):
    """A worker."""

    model: Path = field(metadata=required("folder of the model"))
    backend: Backend = setting(Backend.CPU, "what computes")
    decode_depth: int = setting(1, "plans in flight")
    share: float = setting(0.9, "share of memory, in % of 1")
    peers: tuple[str, ...] = setting((), "addresses")
    name: str | None = setting(None, "a name")
    limit: int | None = setting(7, "a limit")
    is_eager: bool = setting(True, "be eager")
    step_timeout_s: float = setting(5.0, "a timeout", deprecated=("hang-s", "silence-s"))
    is_strict: bool = setting(False, "be strict", deprecated=("strict",))

    def __post_init__(self) -> None:
        CommonSettings.__post_init__(self)
        if self.decode_depth < 0:
            raise ValueError("--decode-depth must be >= 0")


def _load(argv: list[str], environ: dict[str, str] | None = None) -> WorkerSettings:
    return load_settings(WorkerSettings, argv, "worker", environ or {})


def _refusal(capsys: pytest.CaptureFixture[str], argv: list[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SystemExit) as left:
        _load(argv, environ)
    assert left.value.code == 2
    return capsys.readouterr().err


def test_defaults_apply() -> None:
    assert _load(["--model", "m"]) == WorkerSettings(model=Path("m"))


def test_every_type_from_flags() -> None:
    argv = (
        "--model /m --backend simulated --decode-depth 2 --share 0.5 --peers a:1,b:2 --name n --limit none "
        "--no-is-eager --listen unix:/s,0.0.0.0:1 --log-level debug --drain-s 1.5 --address-file /f"
    )
    assert _load(argv.split()) == WorkerSettings(
        model=Path("/m"),
        backend=Backend.SIMULATED,
        decode_depth=2,
        share=0.5,
        peers=("a:1", "b:2"),
        name="n",
        limit=None,
        is_eager=False,
        listen=("unix:/s", "0.0.0.0:1"),
        log_level=LogLevel.DEBUG,
        drain_s=1.5,
        address_file=Path("/f"),
    )


def test_every_type_from_variables() -> None:
    loaded = _load(
        [],
        {
            "RADIXMESH_MODEL": "/m",
            "RADIXMESH_BACKEND": "simulated",
            "RADIXMESH_DECODE_DEPTH": "2",
            "RADIXMESH_SHARE": "0.5",
            "RADIXMESH_PEERS": "a:1, b:2,",
            "RADIXMESH_NAME": "",
            "RADIXMESH_LIMIT": "3",
            "RADIXMESH_IS_EAGER": "off",
        },
    )
    assert loaded == WorkerSettings(
        model=Path("/m"),
        backend=Backend.SIMULATED,
        decode_depth=2,
        share=0.5,
        peers=("a:1", "b:2"),
        limit=3,
        is_eager=False,
    )


def test_a_flag_wins_over_its_variable() -> None:
    assert _load(["--model", "m", "--decode-depth", "0"], {"RADIXMESH_DECODE_DEPTH": "2"}).decode_depth == 0
    assert _load(["--model", "m", "--is-eager"], {"RADIXMESH_IS_EAGER": "false"}).is_eager is True


def test_an_empty_list_is_none_at_all() -> None:
    assert _load(["--model", "m", "--peers", ""], {"RADIXMESH_PEERS": "a:1"}).peers == ()


def test_a_missing_value_names_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    text = _refusal(capsys, [])
    assert "--model" in text and "RADIXMESH_MODEL" in text


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--decode-depth", "two"], {}, ("--decode-depth", "RADIXMESH_DECODE_DEPTH", "'two'")),
        ([], {"RADIXMESH_DECODE_DEPTH": "1.5"}, ("--decode-depth", "RADIXMESH_DECODE_DEPTH", "'1.5'")),
        ([], {"RADIXMESH_IS_EAGER": "maybe"}, ("RADIXMESH_IS_EAGER", "true")),
        (["--backend", "gpu"], {}, ("--backend", "simulated")),
        (["--decode-depth", "-1"], {}, ("--decode-depth", ">= 0")),
        (["--stall-s", "0"], {}, ("--stall-s", "RADIXMESH_STALL_S")),
        (["--listen", ","], {}, ("--listen", "RADIXMESH_LISTEN")),
        (["--decode-dept", "1"], {}, ("--decode-dept",)),
    ],
)
def test_a_wrong_value_is_refused_with_what_to_write(
    capsys: pytest.CaptureFixture[str], argv: list[str], environ: dict[str, str], words: tuple[str, ...]
) -> None:
    text = _refusal(capsys, ["--model", "m", *argv], environ)
    assert all(word in text for word in words), text


def test_unknown_variables_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _load(["--model", "m"], {"RADIXMESH_DECODE_DEPHT": "1", "OTHER": "x", "RADIXMESH_NAME": "n"})
    fields = [record.__dict__["radixmesh_fields"] for record in caplog.records]
    assert fields == [{"variable": "RADIXMESH_DECODE_DEPHT"}]


def _warned(caplog: pytest.LogCaptureFixture) -> list[tuple[str, object]]:
    return [(record.getMessage(), record.__dict__["radixmesh_fields"]) for record in caplog.records]


@pytest.mark.parametrize(
    ("argv", "environ", "old", "new"),
    [
        (["--hang-s", "2"], {}, "--hang-s", "--step-timeout-s"),
        (["--silence-s", "2"], {}, "--silence-s", "--step-timeout-s"),
        ([], {"RADIXMESH_HANG_S": "2"}, "RADIXMESH_HANG_S", "RADIXMESH_STEP_TIMEOUT_S"),
        ([], {"RADIXMESH_SILENCE_S": "2"}, "RADIXMESH_SILENCE_S", "RADIXMESH_STEP_TIMEOUT_S"),
    ],
)
def test_a_deprecated_name_works_and_warns_once_with_the_new_one(
    caplog: pytest.LogCaptureFixture, argv: list[str], environ: dict[str, str], old: str, new: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert _load(["--model", "m", *argv], environ).step_timeout_s == 2
    assert _warned(caplog) == [("deprecated_setting", {"deprecated": old, "use": new})]


def test_a_deprecated_switch_works_both_ways(caplog: pytest.LogCaptureFixture) -> None:
    assert _load(["--model", "m", "--strict"]).is_strict
    assert not _load(["--model", "m", "--no-strict"], {"RADIXMESH_IS_STRICT": "1"}).is_strict
    assert [fields for _, fields in _warned(caplog)] == [{"deprecated": "--strict", "use": "--is-strict"}] * 2


@pytest.mark.parametrize(
    ("argv", "environ", "seconds"),
    [
        (["--hang-s", "2", "--step-timeout-s", "3"], {}, 3),
        (["--hang-s", "2"], {"RADIXMESH_STEP_TIMEOUT_S": "3"}, 2),
        ([], {"RADIXMESH_HANG_S": "2", "RADIXMESH_STEP_TIMEOUT_S": "3"}, 3),
    ],
)
def test_flags_win_over_variables_and_new_names_over_deprecated_ones(
    argv: list[str], environ: dict[str, str], seconds: float
) -> None:
    assert _load(["--model", "m", *argv], environ).step_timeout_s == seconds


def test_a_wrong_value_of_a_deprecated_flag_names_that_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--hang-s (also RADIXMESH_HANG_S): 'soon'" in _refusal(capsys, ["--model", "m", "--hang-s", "soon"])


def test_a_warning_before_logging_is_configured_shows_its_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    _load(["--model", "m", "--hang-s", "2"], {"RADIXMESH_UNKNOWN": "1"})
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["daemon"], line["event"]) for line in lines] == [
        ("worker", "deprecated_setting"),
        ("worker", "unknown_variable_ignored"),
    ]
    assert (lines[0]["use"], lines[1]["variable"]) == ("--step-timeout-s", "RADIXMESH_UNKNOWN")


def test_help_shows_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        _load(["--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "plans in flight [default 1; RADIXMESH_DECODE_DEPTH]" in text
    assert "folder of the model [required; RADIXMESH_MODEL]" in text
    assert "in % of 1" in text
    assert "a timeout [default 5.0; RADIXMESH_STEP_TIMEOUT_S]" in text
    assert "hang" not in text.lower() and "--strict" not in text


def test_a_setting_of_an_unsupported_type_shows_at_once() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Odd:
        table: dict[str, str] = field(default_factory=dict)

    with pytest.raises(TypeError, match="dict"):
        load_settings(Odd, [], "odd", {})
