"""The GPU worker's parts that need no GPU: tables by slot, times, what is said when memory does not suffice."""

import subprocess
import sys
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.plans import Steps, admit, chunk, grant, simulated_executor

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.backends import create_member, load_model
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.cuda import device as device_module
from radixmesh.daemons.worker.cuda import load as cuda_load
from radixmesh.daemons.worker.cuda import memory
from radixmesh.daemons.worker.cuda.device import CudaEvent, DeviceClock, HostDevice, HostEvent, TimedEvent
from radixmesh.daemons.worker.cuda.ranks import peer_memory
from radixmesh.daemons.worker.cuda.step.outputs.token_ring import Asking, TokenRing
from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState
from radixmesh.daemons.worker.cuda.step.step_graphs import tuned_rows
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.limits import MAX_SUPPRESSED_IDS
from radixmesh.daemons.worker.profile import TorchProfiler
from radixmesh.daemons.worker.speculation.drafter import EachRow
from radixmesh.daemons.worker.speculation.settings import SpeculativeAlgorithm


def test_a_slots_table_holds_what_its_request_was_granted_since_it_was_admitted():
    state = SlotState(HostDevice(), num_slots=2, max_pages=4, dummy_page=9)
    tables, num_pages = np.zeros((2, 4), np.int32), np.zeros(2, np.int32)
    slots = np.array([1, 0], np.int32)
    for pages in ([[1, 2, 3], [4]], [[1, 2, 3], [4, 5, 6, 7]]):
        for slot, of_slot in enumerate(pages):
            tables[slot, : len(of_slot)], num_pages[slot] = of_slot, len(of_slot)
        state.send(slots, tables, num_pages)
    state.admitted(admit(0, [3, 8]))
    tables[0, :2], num_pages[0] = [8, 1], 2
    state.send(slots, tables, num_pages)
    assert state.page_tables.tolist() == [[8, 1, 3, 0], [4, 5, 6, 7], [9, 9, 9, 9]]
    assert state.last_tokens.tolist() == [8, 0, 0]


def test_a_slot_that_lacks_many_pages_gets_them_by_a_copy_of_its_own():
    device, sent = HostDevice(), list[int]()
    state = SlotState(device, num_slots=2, max_pages=2000, dummy_page=9)
    upload, device.upload = device.upload, lambda values, to: (sent.append(len(values)), upload(values, to))
    tables = np.arange(4000, dtype=np.int32).reshape(2, 2000)
    slots, expected = np.array([1, 0], np.int32), np.zeros((2, 2000), np.int32)
    for num_pages in ([511, 3], [1500, 700], [1500, 701]):
        state.send(slots, tables, np.array(num_pages, np.int32))
        for slot, count in enumerate(num_pages):
            expected[slot, :count] = tables[slot, :count]
        assert (state.page_tables[:2].numpy() == expected).all() and (state.page_tables[2] == 9).all()
    assert sent == [2 * 514, 697, 989, 2]


def test_tokens_are_kept_when_their_turn_comes_again():
    ring = TokenRing(HostDevice(), max_rows=2, num_steps=3)
    fetched = []
    for step in range(8):
        turn = ring.take()
        ring.rows[turn] = ring.logprobs[turn] = step
        fetched.append(ring.fetch(1 + step % 2, HostEvent(), Asking([0], [step])))
    results = [one.result() for one in fetched]
    assert [got.tokens.tolist() for got in results] == [[step] * (1 + step % 2) for step in range(8)]
    assert [got.logprobs[0].top_ids.tolist() for got in results] == [[[step] * step] for step in range(8)]


class _DriverEvent:
    """torch.cuda.Event, counted; done once somebody has waited for it."""

    made = 0
    asked = 0

    def __init__(self, **options):
        type(self).made += 1
        self.is_over = False

    def record(self, stream):
        self.is_over = False

    def query(self):
        type(self).asked += 1
        return self.is_over

    def synchronize(self):
        type(self).asked += 1
        self.is_over = True


def test_events_of_steps_are_made_once_and_asked_until_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _DriverEvent)
    spare: deque[torch.cuda.Event] = deque()
    for _ in range(5):
        older, event = CudaEvent(None, spare), CudaEvent(None, spare)
        assert older._event is not event._event, "an event that somebody has is recorded anew"
        assert not event.is_done, "an event that was done before is not now"
        event.wait()
        asked = _DriverEvent.asked
        event.wait()
        assert event.is_done and _DriverEvent.asked == asked
        assert event.seconds_since(event) == 0.0
        del older, event
    assert _DriverEvent.made == 2


class _Event(TimedEvent):
    is_done = True

    def __init__(self, recorded_ns, device_s):
        self.recorded_ns, self.device_s = recorded_ns, device_s

    def wait(self):
        return

    def seconds_since(self, earlier):
        return self.device_s - earlier.device_s


@pytest.mark.parametrize("rate", [1.0, 0.999, 1.001])
def test_device_times_stay_on_the_hosts_clock_whatever_the_devices_does(monkeypatch, rate):
    """Ten steps of 10 ms, a second apart, on a device whose clock is wrong."""
    now_ns = [0]
    monkeypatch.setattr(device_module.time, "monotonic_ns", lambda: now_ns[0])
    clock = DeviceClock(_Event(0, 5.0))
    last_ns = 0
    for step in range(1, 11):
        start_s = float(step)
        now_ns[0] = int((start_s + 0.0105) * 1e9)
        events = (_Event(int(start_s * 1e9), 5.0 + at * rate) for at in (start_s, start_s + 0.01))
        start_ns, end_ns = clock.place(*events)
        assert start_ns == pytest.approx(start_s * 1e9, abs=1e6) and end_ns <= now_ns[0]
        assert end_ns - start_ns == pytest.approx(1e7, abs=2e4) and start_ns >= last_ns
        last_ns = end_ns


def test_a_step_begins_where_the_one_ahead_of_it_ends_while_that_runs():
    events = []

    class Device(HostDevice):
        def record_event(self):
            events.append(SimpleNamespace(is_done=False))
            return events[-1]

    device = Device()
    clock = DeviceClock(SimpleNamespace(is_done=True))
    first = clock.begin(device), clock.end(device)
    assert first == tuple(events)
    assert clock.begin(device) is first[1]
    second_end = clock.end(device)
    second_end.is_done = True
    assert clock.begin(device) is events[-1] and len(events) == 4


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("too much"), RuntimeError("CUDA error: out of memory")])
@pytest.mark.parametrize("has_context", [True, False])
def test_what_does_not_fit_is_named_with_the_flag_to_change(monkeypatch, error, has_context):
    def figures():
        if not has_context:
            raise RuntimeError("CUDA error: out of memory")
        return 7, 11

    monkeypatch.setattr(torch.cuda, "mem_get_info", figures)
    message = r"tables do not fit .*7.*change --num-slots" if has_context else r"tables do not fit .*change --num-slots"
    with pytest.raises(MeshError, match=message) as caught, memory.fitting("tables", "--num-slots or --mem-fraction"):
        raise error
    assert caught.value.reason_name == "INVALID_ARGUMENT"
    with pytest.raises(RuntimeError, match="a bug"), memory.fitting("tables", "--num-slots"):
        raise RuntimeError("a bug")


_MODEL = SimpleNamespace(
    hidden_size=64,
    vocab_size=1000,
    dtype=torch.bfloat16,
    row_bytes=lambda: 1792,
    expert_row_bytes=lambda: 0,
    position_bytes=lambda: 64,
)


def test_graphs_keep_their_logits_and_memory_is_left_for_them():
    settings = memory.MemorySettings(
        mem_fraction=0.9, num_pages=None, page_size=1, num_slots=8, max_tokens_per_step=64, max_total_len=128
    )
    plain = memory.work_bytes(settings, _MODEL)
    graphs = memory.work_bytes(replace(settings, graph_rows=(1, 2, 4, 8)), _MODEL)
    assert graphs - plain == 2 * 15 * 1000 * 2
    attention = memory.work_bytes(replace(settings, attention_bytes=12345), _MODEL)
    assert attention - plain == 12345


@pytest.fixture
def few_pages(monkeypatch):
    """A GPU of 10 GiB of which 6 are free, and a model whose pages take 64 KiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 << 30, 10 << 30))
    token_bytes = 1 << 16

    def choose(**changes):
        settings = memory.MemorySettings(
            **{
                "mem_fraction": 0.9,
                "num_pages": None,
                "page_size": 1,
                "num_slots": 64,
                "max_tokens_per_step": 64,
                "max_total_len": 2048,
                **changes,
            }
        )
        return memory.choose_num_pages(settings, _MODEL, token_bytes, torch.device("cuda"))

    return choose


def test_pages_take_what_is_left_and_the_log_has_the_numbers(few_pages, monkeypatch):
    lines = []
    monkeypatch.setattr(memory, "log", SimpleNamespace(info=lambda event, **fields: lines.append((event, fields))))
    num_pages = few_pages()
    ((event, fields),) = lines
    assert event == "memory_sized" and fields["num_pages"] == num_pages == fields["pages_that_fit"]
    assert (fields["total_bytes"], fields["used_bytes"], fields["mem_fraction"]) == (10 << 30, 4 << 30, 0.9)
    budget = int(0.9 * (10 << 30)) - fields["used_bytes"] - fields["work_bytes"]
    assert num_pages == budget // fields["kv_bytes_per_page"] > 40_000
    assert few_pages(mem_fraction=0.8) < num_pages
    # Of a small model no more than all slots can fill twice.
    assert few_pages(num_slots=4) == 2 * 4 * 2048


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"num_pages": 80_000}, "--num-pages"),
        ({"mem_fraction": 0.3}, "--mem-fraction"),
        ({"max_total_len": 60_000}, "--max-total-len"),
    ],
)
def test_pages_that_do_not_fit_name_their_flag(few_pages, changes, flag):
    assert few_pages(num_pages=10_000) == 10_000
    with pytest.raises(MeshError, match=rf"do not fit.*change .*{flag}") as caught:
        few_pages(**changes)
    assert caught.value.reason_name == "INVALID_ARGUMENT"


def test_more_suppressed_ids_than_tables_hold_are_refused():
    steps = Steps(simulated_executor())
    ids = [5 + i % 90 for i in range(MAX_SUPPRESSED_IDS + 1)]
    with pytest.raises(MeshError, match="suppressed") as caught:
        steps.run([], admits=[admit(0, [3], min_tokens=2, suppressed_ids=ids)], grants=[grant(0, [0, 1])])
    assert caught.value.metadata["max"] == str(MAX_SUPPRESSED_IDS)
    steps.run(
        [],
        admits=[admit(0, [3], min_tokens=2**32 - 1, suppressed_ids=ids[1:])],
        grants=[grant(0, [0, 1])],
        chunks=[chunk(0, 1)],
    )


def test_steps_go_on_where_a_trace_cannot_be_written(tmp_path):
    class Trace:
        def stop(self):
            return

        def export_chrome_trace(self, path):
            raise OSError(28, "No space left on device", path)

    profiler = TorchProfiler(tmp_path, "me")
    profiler.running, profiler.steps_left = Trace(), 1
    profiler.on_step()
    profiler.on_step()
    with pytest.raises(MeshError, match="No space left"):
        profiler.stop()


class _Verifying:
    """As much of a device's runner as the loader needs."""

    tasks = frozenset({Task.GENERATE})
    takes_grammars, max_total_len = False, 64

    def __init__(self) -> None:
        self.verified: dict[str, object] = {}
        self.network_drafter = EachRow(lambda sample, most: ())

    def verify(self, drafter, **options):
        self.verified = {"drafter": type(drafter).__name__, **options}


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ({}, None),
        ({"speculative_algorithm": SpeculativeAlgorithm.NGRAM, "speculative_num_steps": 3}, ("NgramDrafter", 3, 0)),
        ({"jump_forward_tokens": 5}, ("NoDrafts", 5, 5)),
        ({"speculative_algorithm": SpeculativeAlgorithm.MTP, "speculative_num_steps": 2}, ("EachRow", 2, 0)),
    ],
)
def test_flags_that_ask_for_drafts_reach_a_worker_on_a_gpu(monkeypatch, flags, want):
    """They were read, and dropped on the way to the runner: no CUDA worker drafted."""
    runner = _Verifying()

    def load(folder, settings, verify=None, *others, **named):
        assert (settings.speculation is None) == ("speculative_algorithm" not in flags)
        if verify is not None:
            verify(runner)
        return runner

    monkeypatch.setattr("radixmesh.daemons.worker.cuda.load.load_cuda_runner", load)
    model = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
    load_model(WorkerSettings(backend=Backend.CUDA, model=model, **flags))
    got = runner.verified
    assert want == ((got["drafter"], got["max_drafts"], got["max_forced"]) if got else None)


@pytest.mark.parametrize(
    ("flags", "num"),
    [
        ({"mask_processes": 2}, 2),
        ({}, 1),
        ({"mask_processes": 0}, 0),
        ({"jump_forward_tokens": 2, "mask_processes": 2}, 2),
        ({"speculative_algorithm": SpeculativeAlgorithm.NGRAM, "speculative_num_steps": 3}, 1),
        ({"mask_processes": 2, "tp_size": 2, "group_host": "localhost"}, 0),
    ],
)
def test_masks_of_a_worker_on_a_gpu_are_filled_by_processes(monkeypatch, flags, num):
    pytest.importorskip("xgrammar")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(7))

    def load(folder, settings, *others, **named):
        assert settings.mask_processes == num
        runner = _Verifying()
        runner.takes_grammars = True
        runner.mask_memory = SlotMasks(HostDevice(), num_slots=8, max_rows=8, vocab_size=64, num_processes=num)
        return runner

    monkeypatch.setattr("radixmesh.daemons.worker.cuda.load.load_cuda_runner", load)
    prepared = []
    monkeypatch.setattr(GrammarStore, "prepare", lambda store: prepared.append(store))
    model = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
    loaded = load_model(WorkerSettings(backend=Backend.CUDA, model=model, num_slots=8, **flags))
    guides = loaded.guides
    # A start waited 4 s for a library that the worker's own process does not use.
    assert bool(prepared) == (num == 0) and loaded.grammars is not None
    assert guides is None or guides.reads_blobs
    try:
        assert (guides is None) == (num == 0)
        assert guides is None or len(guides.pids) == num
    finally:
        if guides is not None:
            guides.close()


def test_grammars_are_made_ready_while_weights_are_read(monkeypatch):
    """A start that compiled nothing imported the library and sorted the vocabulary behind its last graph."""
    is_ready = threading.Event()
    monkeypatch.setattr(GrammarStore, "prepare", lambda store: is_ready.set())
    was_ready = []

    def load(*args, **kwargs):
        was_ready.append(is_ready.wait(30.0))
        raise MeshError(ErrorReason.ERROR_REASON_BAD_CHECKPOINT, "no weights")

    monkeypatch.setattr("radixmesh.daemons.worker.cuda.load.load_cuda_runner", load)
    monkeypatch.setattr("radixmesh.daemons.worker.cuda.compilers.client.start_compilers", lambda *_: None)
    model = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
    with pytest.raises(MeshError, match="no weights"):
        load_model(WorkerSettings(backend=Backend.CUDA, model=model, mask_processes=0))
    assert was_ready == [True]


_IMPORTS = """
import gc, sys
from radixmesh.daemons.worker.backends import kept_imports
assert "torch" not in sys.modules
with kept_imports():
    assert not gc.isenabled()
    import torch
frozen = gc.get_freeze_count()
assert gc.isenabled() and frozen > 100_000, frozen
with kept_imports():
    assert gc.isenabled()
"""


def test_the_collector_rests_while_torch_is_imported_for_the_first_time():
    """It took a fifth of the imports, and a quarter of a second of each collection behind them."""
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_rank_makes_its_context_while_it_imports_torch(monkeypatch):
    """Ranks import torch before they listen, and made the context behind that."""
    made = []
    monkeypatch.setattr("radixmesh.daemons.worker.cuda.early_context.make_context_beside", made.append)
    model = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
    create_member(WorkerSettings(backend=Backend.CUDA, model=model, tp_size=2, tp_rank=1, cuda_device=1))
    assert made == [1]
    create_member(WorkerSettings(backend=Backend.CPU, model=model, tp_size=2, tp_rank=1))
    assert made == [1]


@pytest.mark.parametrize(
    ("changes", "formats"),
    [
        ({}, ["dummy", "asked", "auto"]),
        # Kernels of their own make FP8 weights; scales of FP8 KV are read with the weights.
        ({"quantization": "fp8"}, ["fp8: auto", "asked"]),
        ({"kv_dtype": "fp8"}, ["auto", "asked"]),
        ({"load_format": "dummy"}, ["dummy", "asked"]),
        ({"kernels": "torch"}, ["auto"]),
    ],
)
def test_kernels_are_asked_for_before_weights_are_read(monkeypatch, changes, formats):
    """A first start read all weights before it said which kernels there would be."""
    folder = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
    done = []

    def read(folder, placement, *, load_format, quantization, **others):
        done.append(load_format if quantization == "auto" else f"{quantization}: {load_format}")
        placement = replace(placement, device=torch.device("cpu"))
        return load_weights(folder, placement, load_format=load_format, quantization="auto", **others)

    load_weights = cuda_load.load_model
    monkeypatch.setattr(cuda_load, "load_model", read)
    monkeypatch.setattr(
        cuda_load, "create_runner", lambda *_, **__: SimpleNamespace(can_compile_ahead=True, launch_all=0)
    )
    compilers = SimpleNamespace(ask=lambda launch_all: done.append("asked"))
    settings = replace(TINY_SETTINGS, attention_backend="triton", **changes)
    cuda_load.load_on_device(folder, settings, HostDevice(), compilers)
    assert done == formats


def test_gemms_are_tuned_for_the_rows_of_steps_that_verify_drafts():
    """They were tuned for plain steps alone: with 4 drafts no step found a kernel of its own."""
    assert tuned_rows((1, 2, 4, 8), 0) == (1, 2, 4, 8)
    assert tuned_rows((1, 2, 4, 8), 4) == (1, 2, 4, 5, 8, 10, 20, 40)
    # Chains of a network may be of one and of two drafts.
    assert tuned_rows((1, 2, 6, 8), 4, has_levels=True) == (1, 2, 3, 4, 5, 6, 8, 10, 16, 24, 30, 40)


class _Driver:
    """libcuda of a thread that has a device, and no context yet. Every call but those for contexts wants one."""

    def __init__(self) -> None:
        self.context, self.calls = None, []

    def cuCtxGetCurrent(self, context) -> int:
        context._obj.value = self.context
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device) -> int:
        context._obj.value = 100 + device.value
        return 0

    def cuCtxSetCurrent(self, context) -> int:
        self.context = context.value
        return 0

    def __getattr__(self, name: str):
        def call(*arguments: object) -> int:
            self.calls.append(name)
            return 0 if self.context else 201

        return call


def test_memory_for_peers_is_had_on_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver()
    monkeypatch.setattr(peer_memory, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    memory = peer_memory.CudaPeerMemory()
    memory.allocate(100)
    memory.write(0, b"stamp")
    assert driver.context == 101 and driver.calls[-2:] == ["cuMemcpyHtoD_v2", "cuStreamSynchronize"]
    driver.context = 7
    memory.read(0, 10)
    assert driver.context == 7, "the thread has one"
    monkeypatch.setattr(driver, "cuCtxSetCurrent", lambda context: 3)
    driver.context = None
    with pytest.raises(MeshError, match="CUDA error 3"):
        memory.close(0)
