"""Breakdown of a traced window: every microsecond goes to one kind of kernel, or to none."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from gpu import where

    yield where
    for name in [name for name in sys.modules if name.split(".")[0] in ("gpu", "hop_ladder")]:
        del sys.modules[name]


def test_time_is_that_of_the_first_kernel_that_runs_and_adds_up(where: ModuleType) -> None:
    Span = where.Span
    window = where.spent(
        [
            Span(10.0, 20.0, "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"),
            # Begins under the GEMM, and goes on after it.
            Span(15.0, 32.0, "_rope_kv_kernel"),
            # Within RoPE.
            Span(16.0, 18.0, "_split_attention_kernel"),
            Span(40.0, 50.0, "_split_attention_kernel"),
            # A step that samples with noise has two of the last.
            Span(50.0, 50.5, "_highest_kernel"),
            Span(50.5, 50.7, "_finish_kernel"),
            Span(50.7, 51.0, "_finish_kernel"),
            Span(51.0, 54.0, "void unheard_of<float>(int)"),
        ]
    )
    assert window.by_kind == {
        "gemm": 10.0,
        "RoPE and KV write": 12.0,
        "idle": 8.0,
        "attention of decodes": 10.0,
        "sampling": 1.0,
        "others": 3.0,
    }
    assert (window.total_us, window.num_steps) == (44.0, 1) and window.others == {"void unheard_of<float>(int)": 3.0}
    result = where.table([window, window])
    assert result["windows"] == result["steps"] == 2
    assert result["us_per_step_of_kernels"]["_split_attention_kernel"] == 10.0
    assert next(iter(result["shares"])) == "RoPE and KV write" and result["us_per_step"]["idle"] == 8.0
    assert sum(result["shares"].values()) == pytest.approx(1.0, abs=1e-3)


def test_only_the_devices_work_is_read(where: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    kernel = {"cat": "kernel", "ts": 5, "dur": 2.5, "name": "_silu_mul_kernel"}
    events = [kernel, kernel | {"cat": "cpu_op"}, {"name": "process_name", "ph": "M"}]
    path.write_text(json.dumps({"traceEvents": events}))
    assert where.read_spans(path) == [where.Span(5.0, 7.5, "_silu_mul_kernel")]
