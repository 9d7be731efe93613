"""NIXL's storage plugins: records between the lanes of a pool and files or objects, one transfer for each group.

The library is imported here, on demand alone, in the version that kv_transfer/ has. Each lane has an agent of its own,
so that a write that blocks within the library holds up no read. An agent needs no GPU.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.kv_store.backend import KvStoreError, StoreFailure
from radixmesh.daemons.worker.kv_store.registered_memory import NUM_LANES, Lane, LanePool

_log = get_logger(__name__)

_POLL_S = (0.00005, 0.002)


class Place(NamedTuple):
    """A record in a lane, and the file descriptor or object that it is written to or read from."""

    offset: int
    num_bytes: int
    device: int
    name: str = ""


class NixlStorage:
    """plugin: POSIX, GDS, GDS_MT or OBJ. kind: of its targets, FILE or OBJ. options: the plugin's own.

    Raises KvStoreError SETTINGS where the package or the plugin cannot be loaded.
    """

    def __init__(self, plugin: str, kind: str, options: Mapping[str, str], pool: LanePool) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        try:
            import nixl_cu13._api as api
        except ImportError as error:
            message = f"pages over NIXL need its package ({error}): pip install 'radixmesh[kv-nixl]'"
            raise KvStoreError(StoreFailure.SETTINGS, message) from error
        self._plugin, self._kind = plugin, kind
        self._agents = []
        try:
            for _ in range(NUM_LANES):
                agent = api.nixl_agent(f"radixmesh-{secrets.token_hex(8)}", api.nixl_agent_config(backends=[]))
                agent.create_backend(plugin, dict(options))
                agent.register_memory([(pool.memory.ctypes.data, pool.memory.nbytes, 0, "")], "DRAM")
                self._agents.append(agent)
        except Exception as error:
            message = (
                f"NIXL's plugin {plugin} cannot be used here ({error}): GDS needs libcufile, OBJ of NIXL 1.5 and later"
                " libcuobjclient (pip install 'nixl-cu13<1.5' is without it)"
            )
            raise KvStoreError(StoreFailure.SETTINGS, message) from error

    def write(self, lane: Lane, places: Sequence[Place]) -> bool:
        """Writes records of the lane as one transfer; False if any of them failed. Blocks until it is over."""
        return self._transfer("WRITE", lane, places)

    def read(self, lane: Lane, places: Sequence[Place]) -> bool:
        """Reads records into the lane as one transfer; False if any of them failed. Blocks until it is over."""
        return self._transfer("READ", lane, places)

    def close(self) -> None:
        """Lets the agents go; no transfer is under way."""
        self._agents.clear()

    def _transfer(self, operation: str, lane: Lane, places: Sequence[Place]) -> bool:
        agent = self._agents[lane.index]
        memory = [(lane.address + place.offset, place.num_bytes, 0) for place in places]
        # Objects are named when they are registered; transfers name them by the number alone.
        named = [(0, place.num_bytes, place.device, place.name) for place in places]
        registered = handle = None
        try:
            registered = agent.register_memory(named, self._kind)
            source = agent.get_xfer_descs(memory, "DRAM")
            target = agent.get_xfer_descs([each[:3] for each in named], self._kind)
            handle = agent.initialize_xfer(operation, source, target, agent.name)
            state, pause = agent.transfer(handle), _POLL_S[0]
            while state == "PROC":
                time.sleep(pause)
                pause = min(2 * pause, _POLL_S[1])
                state = agent.check_xfer_state(handle)
            return bool(state == "DONE")
        except Exception as error:
            # A transfer ends as an exception that has the kind of its failure, and no errno.
            _log.debug("nixl_transfer_failed", plugin=self._plugin, operation=operation, error=str(error))
            return False
        finally:
            if handle is not None:
                agent.release_xfer_handle(handle)
            if registered is not None:
                agent.deregister_memory(registered)
