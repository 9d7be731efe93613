"""Tiers of KV below the device, as the settings name them: host memory, and the store below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.weights_digest import weights_digest
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.kv_store.keys import PageFormat
from radixmesh.daemons.worker.runner import ModelRunner

if TYPE_CHECKING:
    from radixmesh.daemons.worker.plans.executor import StepExecutor


def page_format_of(settings: WorkerSettings, runner: ModelRunner, fingerprint: str) -> PageFormat:
    """Everything that the bytes of a page depend on besides its tokens, by content: for KV that outlives the worker.

    fingerprint: of the model, with its types. Reads all weights. Raises BAD_CHECKPOINT or UNSUPPORTED.
    """
    layout = settings.rank_layout
    if settings.model is None or settings.backend is Backend.SIMULATED or settings.load_format == "dummy":
        message = (
            "--kv-store and --host-kv-segment need weights that can be told from others: a model folder, and no "
            "--load-format dummy"
        )
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "kv_store"})
    return PageFormat(
        weights_digest=weights_digest(settings.model),
        compute=f"{settings.backend.value}/{fingerprint}",
        kv_dtype=runner.kv_dtype,
        kv_layout=runner.kv_layout,
        page_size=runner.page_size,
        shard=0 if runner.kv_is_whole else layout.tp_rank,
        num_shards=1 if runner.kv_is_whole else layout.tp_size,
    )


def add_host_memory(settings: WorkerSettings, runner: ModelRunner, page_format: PageFormat | None) -> None:
    """Gives the runner the host memory that the settings name. page_format: of memory that outlives the worker. Raises
    as ModelRunner.add_host_pool()."""
    if settings.host_kv_segment is None or page_format is None:
        runner.add_host_pool(settings.host_kv_bytes)
        return
    path = settings.host_kv_segment
    path = path.with_name(f"{path.name}.{settings.rank_layout.rank}")
    runner.add_host_pool(
        settings.host_kv_bytes, HostSegment(path, identity=page_format.root(), page_size=runner.page_size)
    )


def add_store(settings: WorkerSettings, executor: StepExecutor, page_format: PageFormat, metrics: Metrics) -> None:
    """Has the executor's host tier keep pages in the settings' store. Raises KvStoreError or UNSUPPORTED."""
    from radixmesh.daemons.worker.kv_store.identity import store_id
    from radixmesh.daemons.worker.kv_store.opening import open_backend
    from radixmesh.daemons.worker.kv_store.store import KvStore
    from radixmesh.daemons.worker.plans.tiers.store_tier import StoreTier

    host, layout = executor.host, settings.rank_layout
    assert host is not None, "settings see to it"
    backend = open_backend(settings.kv_store, rank=layout.rank)
    # One rank writes, if all of them hold the same and read from one place.
    puts = not (executor.runner.kv_is_whole and backend.is_shared and layout.tp_rank)
    store = KvStore(backend)
    try:
        name = store_id(settings.kv_store, backend, page_format)
        host.store = StoreTier(store, page_format, host.pool, host.records, metrics, puts=puts, store_id=name)
    except MeshError:
        store.close()
        raise
