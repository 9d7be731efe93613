"""Reports of kernels that Triton compiles while requests wait."""

import logging
from types import SimpleNamespace

import pytest

knobs = pytest.importorskip("triton.knobs")


def test_a_kernel_that_is_compiled_late_is_a_line_of_the_log(monkeypatch, caplog):
    from radixmesh.daemons.worker.cuda.step.warm_up.late_compiles import watch_compiles

    monkeypatch.setattr(knobs.compilation, "listener", None)
    watch_compiles()
    times = knobs.CompileTimes(
        ir_initialization=200_000, lowering_stages=[("ttir", 300_000), ("cubin", 700_000)], store_results=50_000
    )
    with caplog.at_level(logging.WARNING):
        knobs.compilation.listener(
            src=SimpleNamespace(name="_rows_kernel"), metadata={}, metadata_group={}, times=times, cache_hit=False
        )
    (record,) = caplog.records
    assert record.getMessage() == "kernel_compiled_late"
    assert record.radixmesh_fields == {"kernel": "_rows_kernel", "seconds": 1.25, "is_from_cache": False}


def test_a_runner_that_starts_behind_another_one_compiles_in_time(monkeypatch):
    from radixmesh.daemons.worker.cuda.step.warm_up.late_compiles import expect_compiles, watch_compiles

    monkeypatch.setattr(knobs.compilation, "listener", None)
    watch_compiles()
    expect_compiles()
    assert knobs.compilation.listener is None
    watch_compiles()
    assert knobs.compilation.listener is not None
