"""The load generator's parts without a server: turns, order, slots, figures, files, picture."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from radixmesh.cli.bench.datasets import make_turns, plain_turns
from radixmesh.cli.bench.gate import Gate
from radixmesh.cli.bench.load_generator import LoadGenerator
from radixmesh.cli.bench.load_turn import LoadTurn, Prompt, fold_ids, paced
from radixmesh.cli.bench.progress_bar import ProgressBar
from radixmesh.cli.bench.report.plots import plot_load
from radixmesh.cli.bench.report.request_record import RequestRecord
from radixmesh.cli.bench.report.summary import summarise, summary_lines
from radixmesh.cli.bench.serve import run
from radixmesh.cli.bench.serve_flags import serve_parser
from radixmesh.cli.bench.sharegpt import read_sharegpt
from radixmesh.cli.bench.targets.target import Target, TargetError, TargetOptions, open_target
from radixmesh.cli.bench.workloads import make_workload


class ScriptedTarget(Target):
    """Answers a prompt of ids with their sum and its length, after a moment; fails those whose sum is in `failing`."""

    def __init__(self, *, knows_ids: bool = True, failing: tuple[int, ...] = ()) -> None:
        self.sent: list[tuple[float, list[int]]] = []
        self.num_running = self.max_running = 0
        self._knows_ids = knows_ids
        self._failing = failing

    @property
    def model(self) -> str:
        return "scripted"

    async def prepare(self) -> int | None:
        return None

    async def send(self, prompt: Prompt, out_len: int, record: RequestRecord) -> None:
        assert prompt.ids is not None
        ids = prompt.ids.tolist()
        self.sent.append((asyncio.get_running_loop().time(), ids))
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        await asyncio.sleep(0.02)
        self.num_running -= 1
        record.deliver(out_len)
        record.count(len(ids), out_len, 0)
        if self._knows_ids:
            record.output_ids = np.full(out_len, sum(ids), np.int32)
        record.end("refused" if sum(ids) in self._failing else "")

    async def close(self) -> None:
        pass


def turn(parent: int | None, ids: list[int], *, out_len: int = 2, delay_s: float = 0.0) -> LoadTurn:
    added = Prompt(ids=np.array(ids, np.int32))
    return LoadTurn(parent=parent, added=added, out_len=out_len, delay_s=delay_s)


async def test_a_turn_continues_its_parents_answer_after_its_delay() -> None:
    target = ScriptedTarget()
    load = LoadGenerator(target, [turn(None, [1, 2]), turn(0, [5], delay_s=0.5), turn(1, [6]), turn(0, [7])])
    await load.run()
    prompts = sorted(ids for _, ids in target.sent)
    assert prompts == sorted([[1, 2], [1, 2, 3, 3, 7], [1, 2, 3, 3, 5], [1, 2, 3, 3, 5, 14, 14, 6]])
    by_length = {tuple(ids): at for at, ids in target.sent}
    assert by_length[1, 2, 3, 3, 5] - by_length[1, 2] >= 0.5
    assert by_length[1, 2, 3, 3, 7] < by_length[1, 2, 3, 3, 5]
    assert (load.num_skipped, load.num_made_up) == (0, 0)


async def test_turns_behind_a_failure_are_not_sent() -> None:
    target = ScriptedTarget(failing=(3,))
    load = LoadGenerator(target, [turn(None, [1, 2]), turn(0, [5]), turn(1, [6]), turn(0, [7]), turn(None, [9])])
    await load.run()
    assert [ids for _, ids in target.sent] == [[1, 2], [9]]
    assert load.num_skipped == 3
    summary = summarise(load.records)
    assert (summary.num_done, summary.num_failed, summary.errors) == (1, 1, {"refused": 1})
    assert "1 failed: refused" in summary_lines(summary)


async def test_answers_without_ids_are_made_up_within_the_vocabulary() -> None:
    target = ScriptedTarget(knows_ids=False)
    load = LoadGenerator(target, [turn(None, [11, 12], out_len=50), turn(0, [13])], vocab_size=20)
    await load.run()
    prompt = target.sent[1][1]
    assert prompt[:2] == [11, 12] and prompt[-1] == 13 and len(prompt) == 53
    assert all(10 <= id < 20 for id in prompt) and len(set(prompt[2:-1])) > 3
    assert load.num_made_up == 1


async def test_concurrency_is_kept_and_conversations_that_began_go_first() -> None:
    target = ScriptedTarget()
    turns = [turn(None, [1]), turn(0, [2]), *(turn(None, [10 * i]) for i in range(1, 9))]
    await LoadGenerator(target, turns, concurrency=2).run()
    assert target.max_running == 2
    order = [ids[-1] for _, ids in target.sent]
    assert set(order[:2]) == {1, 10}
    assert order.index(2) < order.index(50), "the second turn need not wait for all first ones"


async def test_a_gate_neither_loses_nor_makes_slots() -> None:
    gate = Gate(1)
    await gate.enter(0)
    waiting = [asyncio.create_task(gate.enter(priority)) for priority in (5, 1, 3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    gate.leave()
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [False, True, True] and waiting[1].cancelled()
    # Cancelled in the moment in which the slot comes: it goes on to the next.
    gate.leave()
    waiting[0].cancel()
    await asyncio.sleep(0.01)
    await asyncio.wait_for(gate.enter(0), 60)
    blocked = asyncio.create_task(gate.enter(0))
    await asyncio.sleep(0.01)
    assert not blocked.done()
    blocked.cancel()


def test_folding_keeps_what_is_shared_and_special_ids_free() -> None:
    ids = np.array([10, 99_999, 700, 10, 757], np.int32)
    folded = fold_ids(ids, 768)
    assert folded.dtype == np.int32 and folded.min() >= 10 and folded.max() < 768
    assert folded[0] == folded[3] == 10 and folded[2] == 700
    assert fold_ids(ids, 100_000) is ids and fold_ids(ids, None) is ids
    with pytest.raises(ValueError, match="too small"):
        fold_ids(ids, 10)


def test_pacing_touches_first_turns_only() -> None:
    turns = [turn(None, [1], delay_s=7.0), turn(0, [2], delay_s=4.0), *(turn(None, [3]) for _ in range(2000))]
    assert [t.delay_s for t in paced(turns, math.inf, 0)[:2]] == [0.0, 4.0]
    delays = [t.delay_s for t in paced(turns, 50.0, 0) if t.parent is None]
    assert delays == sorted(delays)
    assert delays == [t.delay_s for t in paced(turns, 50.0, 0) if t.parent is None]
    gaps = np.diff(delays)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1) and gaps.std() == pytest.approx(1 / 50, rel=0.15)


def options(*flags: str):
    return serve_parser().parse_args(list(flags))


def test_flags_shape_the_workloads_they_name() -> None:
    small = make_turns(options("--input-len", "9", "--output-len", "4", "--num-requests", "50"), 64)
    assert len(small) == 50 and {len(t.added.ids) for t in small} == set(range(1, 10))
    assert {t.out_len for t in small} == {1, 2, 3, 4}
    shape = "--dataset shared-prefix --prefix-len 30 --question-len 5 --per-group 4 --output-len 6 --num-requests 12"
    grouped = make_turns(options(*shape.split()), None)
    assert len(grouped) == 12 and len({tuple(t.added.ids[:30].tolist()) for t in grouped}) == 3
    assert {(len(t.added.ids), t.out_len) for t in grouped} == {(35, 6)}
    with pytest.raises(ValueError, match="--prefix-len is of shared-prefix, not of random"):
        make_turns(options("--prefix-len", "5"), None)
    with pytest.raises(ValueError, match="--chat is of sharegpt"):
        make_turns(options("--dataset", "tree", "--chat"), None)
    with pytest.raises(ValueError, match="needs --file"):
        make_turns(options("--dataset", "sharegpt"), None)


def test_without_flags_a_workload_is_sent_as_it_is() -> None:
    for name in ("multi-turn", "random"):
        plain = make_workload(name)
        turns = make_turns(options("--dataset", name), None)
        assert len(turns) == len(plain) == len(plain_turns(options("--dataset", name)))
        for sent, made in zip(turns, plain, strict=True):
            assert (sent.parent, sent.out_len, sent.delay_s) == (made.parent, made.out_len, made.delay_s)
            assert np.array_equal(sent.added.ids, made.new_ids)
    scaled = make_turns(options("--dataset", "multi-turn", "--time-scale", "0.5"), None)
    assert [t.delay_s for t in scaled] == [t.delay_s / 2 for t in make_workload("multi-turn")]
    at_once = make_turns(options("--dataset", "few-shot", "--concurrency", "4"), None)
    assert {t.delay_s for t in at_once} == {0.0}


CHATS = [
    {"conversations": [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "x" * 40}]},
    {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "two?"},
            {"from": "gpt", "value": "é" * 40},
            {"from": "human", "value": "and?"},
            {"from": "gpt", "value": ""},
        ]
    },
    {"conversations": [{"from": "gpt", "value": "an answer to nothing"}, {"from": "human", "value": "?"}]},
    {"conversations": "none"},
    7,
]


def test_recorded_chats_become_texts_or_whole_chats(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(CHATS))
    texts = read_sharegpt(path, seed=0, num_requests=None, as_chat=False)
    assert {(t.added.text, t.out_len, t.parent) for t in texts} == {("one?", 10, None), ("two?", 20, None)}
    chats = read_sharegpt(path, seed=0, num_requests=None, as_chat=True)
    assert len(chats) == 3
    second = next(t for t in chats if t.added.messages[0]["content"] == "and?")
    assert chats[second.parent].added.messages == ({"role": "user", "content": "two?"},)
    assert second.out_len == 1
    assert {t.out_len for t in read_sharegpt(path, seed=0, num_requests=2, as_chat=True, out_len=3)} == {3}


@pytest.mark.parametrize(("content", "wrong"), [("{", "no JSON"), ('{"a": 1}', "not a list"), ("[7]", "holds no chat")])
def test_a_file_that_is_something_else_says_so(tmp_path: Path, content: str, wrong: str) -> None:
    path = tmp_path / "chats.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=wrong):
        read_sharegpt(path, seed=0, num_requests=None, as_chat=False)


async def test_the_progress_bar_counts_what_is_gone_running_and_failed() -> None:
    load = LoadGenerator(ScriptedTarget(), [turn(None, [1]), turn(0, [2]), turn(None, [3]), turn(None, [4])])
    stream = io.StringIO()
    bar = ProgressBar(load, stream)
    assert bar.line().startswith("[........................] 0/4, 0 running, 0 tokens/s")
    load.records = [seen(0, 0.0, [0.1], 0.2, 1, error="lost"), RequestRecord(index=2, due=0.0, sent=0.0)]
    load.num_skipped = 1
    assert bar.line().startswith("[############............] 2/4, 1 running, 1 failed, ")
    watching = asyncio.create_task(bar.watch())
    await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert stream.getvalue() == "", "no escape codes where there is no terminal"


def seen(index: int, sent: float, deliveries: list[float], ended: float, output: int, error: str = "") -> RequestRecord:
    record = RequestRecord(index=index, due=sent - 0.25, sent=sent)
    record.deliveries, record.num_delivered, record.ended, record.error = deliveries, output, ended, error
    record.count(100, output, 40 if index else 0)
    return record


def test_figures_are_what_the_records_say() -> None:
    records = [
        seen(0, 10.0, [10.1, 10.2, 10.4], 10.5, 7),
        seen(1, 10.5, [11.5], 12.0, 1),
        seen(2, 11.0, [11.2], 14.0, 2, error="lost"),
        RequestRecord(index=3, due=11.0, sent=11.0),
    ]
    s = summarise(records)
    assert (s.num_requests, s.num_done, s.num_failed, s.duration_s) == (3, 2, 1, 4.0)
    assert (s.requests_per_s, s.output_tokens, s.output_tokens_per_s) == (0.5, 10, 2.5)
    assert (s.prompt_tokens, s.cached_tokens, s.hit_rate) == (300, 80, pytest.approx(80 / 300))
    assert s.ttft_ms.mean == pytest.approx((100 + 1000) / 2) and s.ttft_ms.max == pytest.approx(1000)
    assert s.itl_ms.max == pytest.approx(200) and s.itl_ms.p50 == pytest.approx(150)
    assert s.tpot_ms.mean == pytest.approx(1000 * 0.3 / 6)
    assert s.e2e_ms.mean == pytest.approx((500 + 1500) / 2)
    assert s.delay_ms.p99 == pytest.approx(250)
    assert s.mean_running == pytest.approx((0.5 + 1.5 + 3) / 4) and s.max_running == 2
    assert s.tokens_per_delivery == 2.0 and s.is_exact


def test_nothing_at_all_has_figures_too() -> None:
    s = summarise([])
    assert (s.num_requests, s.duration_s, s.hit_rate, s.ttft_ms.p99) == (0, 0.0, 0.0, 0.0)
    ElementTree.fromstring(plot_load([], "nothing"))


def test_the_picture_holds_every_curve() -> None:
    records = [seen(i, i, [i + 0.1, i + 0.3], i + 0.5, 5) for i in range(20)]
    picture = plot_load(records, "<few & far> for 2$ or 3$")
    assert picture == plot_load(records, "<few & far> for 2$ or 3$"), "equal loads, equal files"
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(picture)
    texts = {text.text for text in root.iter(f"{svg}text")}
    assert {"<few & far> for 2$ or 3$", "TTFT", "ITL", "TPOT", "E2E", "running", "tokens/s / 100"} <= texts
    axes = [group for group in root.iter(f"{svg}g") if group.get("id", "").startswith("axes_")]
    curves = [[_num_points(group) for group in part if group.get("id", "").startswith("line2d_")] for part in axes]
    assert [len(lengths) for lengths in curves] == [1, 2, 1, 2]
    assert all(length > 2 for lengths in curves for length in lengths)


def _num_points(line: ElementTree.Element) -> int:
    (path,) = line
    return path.get("d", "").count("L") + 1


def test_a_missing_library_is_said_before_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "radixmesh.cli.bench.report.plots")
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        status = run(["--target", "grpc://127.0.0.1:1", "--plot", "x.svg"])
    assert status == 1 and "diagrams need matplotlib: pip install 'radixmesh[bench]'" in shown.getvalue()


async def test_a_target_is_grpc_or_http() -> None:
    for address in ("ftp://host/v1", "file:///x"):
        with pytest.raises(TargetError, match="name grpc://"):
            open_target(address, TargetOptions())
    with pytest.raises(TargetError):
        open_target("grpc://", TargetOptions())
