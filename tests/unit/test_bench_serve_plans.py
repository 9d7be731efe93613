"""`bench serve` where not all goes as asked: contexts that are too short, failures, numbers, Ctrl-C, files."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from radixmesh.cli.bench import serve
from radixmesh.cli.bench.context_fit import fitting_share, longest_of, scaled_ids, scaled_turns
from radixmesh.cli.bench.datasets import make_turns
from radixmesh.cli.bench.load_turn import LoadTurn, Prompt
from radixmesh.cli.bench.report.request_record import RequestRecord
from radixmesh.cli.bench.report.summary import summarise, summary_lines, summary_rows
from radixmesh.cli.bench.serve_flags import serve_parser
from radixmesh.cli.bench.targets.target import Target, TargetOptions
from radixmesh.cli.bench.workloads import WORKLOADS


class SmallTarget(Target):
    """A context of 500 tokens; refuses what is longer, fails everything but warm-ups with `failing`, and never ends a
    request of `hanging`."""

    def __init__(self, *, failing: str = "", hanging: bool = False) -> None:
        self.lengths: list[int] = []
        self._failing = failing
        self._hanging = hanging

    @property
    def model(self) -> str:
        return "small"

    @property
    def context(self) -> int:
        return 500

    async def prepare(self) -> int | None:
        return 1000

    async def send(self, prompt: Prompt, out_len: int, record: RequestRecord) -> None:
        assert prompt.ids is not None
        is_warm_up = out_len == 8 and len(prompt.ids) == 64
        if not is_warm_up:
            self.lengths.append(len(prompt.ids) + out_len)
        if self._hanging and not is_warm_up and len(self.lengths) > 2:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if len(prompt.ids) + out_len > 500:
            record.end("PROMPT_TOO_LONG")
            return
        if self._failing and not is_warm_up:
            record.end(self._failing)
            return
        record.deliver(out_len)
        record.count(len(prompt.ids), out_len, 0)
        record.output_ids = np.full(out_len, 11, np.int32)
        record.end()

    async def close(self) -> None:
        pass


def run_on(
    target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, str]:
    def open_it(address: str, options: TargetOptions) -> Target:
        return target

    monkeypatch.setattr(serve, "open_target", open_it)
    status = serve.run(["--target", "grpc://nowhere:1", "--no-progress", *flags])
    return status, capsys.readouterr().out


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("context", [200, 2048])
def test_every_workload_fits_a_short_context(name: str, context: int) -> None:
    turns = make_turns(serve_parser().parse_args(["--dataset", name, "--num-requests", "64"]), 1000)
    share = fitting_share(turns, context)
    scaled = scaled_turns(turns, share)
    assert longest_of(scaled) == longest_of(turns, share) <= context and len(scaled) == len(turns)
    assert (share == 1) == (longest_of(turns) <= context)
    if share < 1:
        assert longest_of(scaled) > context * 0.8, "no shorter than needed"
    assert all(turn.out_len >= 1 and len(turn.added.ids) >= 1 for turn in scaled if turn.added.ids is not None)


def test_what_is_shared_stays_shared_and_what_differs_differs() -> None:
    flags = ["--dataset", "shared-prefix", "--prefix-len", "800", "--question-len", "80", "--num-requests", "32"]
    turns = make_turns(serve_parser().parse_args(flags), None)
    scaled = [turn.added.ids for turn in scaled_turns(turns, fitting_share(turns, 500))]
    shared = len(scaled_ids(np.arange(800, dtype=np.int32), fitting_share(turns, 500)))
    assert len({ids[:shared].tobytes() for ids in scaled if ids is not None}) == 2
    assert len({ids.tobytes() for ids in scaled if ids is not None}) == 32
    short, long = np.arange(100, dtype=np.int32), np.arange(999, dtype=np.int32)
    kept = scaled_ids(short, 0.37)
    assert np.array_equal(scaled_ids(long, 0.37)[: len(kept)], kept) and len(kept) == 37


def test_texts_and_unknown_contexts_are_left_alone() -> None:
    text = [LoadTurn(parent=None, added=Prompt(text="x" * 10_000), out_len=9999, delay_s=0.0)]
    assert fitting_share(text, 100) == 1 and scaled_turns(text, 0.5) == text
    turns = make_turns(serve_parser().parse_args([]), 1000)
    assert fitting_share(turns, None) == fitting_share(turns, 0) == 1
    chain = [
        LoadTurn(parent=i - 1 if i else None, added=Prompt(ids=np.array([11], np.int32)), out_len=1, delay_s=0.0)
        for i in range(60)
    ]
    with pytest.raises(ValueError, match="a context of 100 tokens is too short"):
        fitting_share(chain, 100)


def test_a_workload_is_scaled_to_the_context_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = SmallTarget()
    flags = ("--dataset", "shared-prefix", "--num-requests", "24", "--oracle", "--json", str(tmp_path / "a.json"))
    status, out = run_on(target, monkeypatch, capsys, *flags)
    assert status == 0 and len(target.lengths) == 16 and 400 < max(target.lengths) <= 500
    assert "16 requests, not 24: requests come in whole groups of 16 with one prefix (--per-group)" in out
    assert "the longest prompt and output are 2304 tokens together, the model's context is 500" in out
    assert "16 of 16 requests in" in out
    report = json.loads((tmp_path / "a.json").read_text())
    assert 0.2 < report["length_share"] < 0.22 and report["is_interrupted"] is False
    assert 0.8 < report["oracle_hit_rate"] < 0.9, "of the load that was sent"


def test_failures_alone_make_no_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--input-len", "50", "--output-len", "9", "--num-requests", "7")
    status, out = run_on(SmallTarget(failing="OVERLOADED"), monkeypatch, capsys, *flags)
    assert status == 1
    assert "none of 7 requests ended well: there is nothing to measure" in out and "7 failed: OVERLOADED" in out
    assert "ttft" not in out and "0.0" not in out


def test_figures_of_nothing_are_no_zeros() -> None:
    record = RequestRecord(index=0, due=0.0, sent=1.0)
    record.deliver(1)
    record.deliveries = [1.5]
    record.count(5, 1, 0)
    record.ended = 2.0
    rows = {row[0]: row[1:] for row in summary_rows(summarise([record]))}
    assert set(rows["itl (ms)"]) == set(rows["tpot (ms)"]) == {"-"}
    assert rows["ttft (ms)"][0] == "500.0"
    assert summary_lines(summarise([]))[0].startswith("none of 0 requests ended well")


def test_ctrl_c_tells_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("--input-len", "50", "--output-len", "9", "--num-requests", "9", "--concurrency", "1")
    target = SmallTarget(hanging=True)
    status, out = run_on(target, monkeypatch, capsys, *flags, "--json", str(tmp_path / "a.json"))
    assert status == 130
    assert "interrupted: of 9 planned requests 2 had ended, 1 were running, 6 were not sent" in out
    assert "2 of 2 requests in" in out
    report = json.loads((tmp_path / "a.json").read_text())
    assert (report["num_turns"], report["is_interrupted"], report["summary"]["num_done"]) == (9, True, 2)


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_said_before_the_load(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, shown = SmallTarget(), io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    status, out = run_on(target, monkeypatch, capsys, flag, str(tmp_path / "none" / "a.svg"))
    assert status == 1 and not target.lengths and out == ""
    assert f"{flag} {tmp_path}/none/a.svg: there is no folder {tmp_path}/none" in shown.getvalue()
