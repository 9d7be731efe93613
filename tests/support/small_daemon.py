"""A daemon of a few lines that the lifecycle tests run as a process of its own; its name says what goes wrong.

Serves the detokenizer of runtime_servicers. Names: well, slow_load, bad_load, bug_in_load, task_fails, never_drains.
"""

import asyncio
import sys

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.common_settings import CommonSettings
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.lifecycle import Daemon, Runtime, run_daemon
from radixmesh.daemons.runtime.settings import load_settings
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.detokenizer.v1 import detokenizer_pb2_grpc
from support.runtime_servicers import Detokenizer

log = get_logger(__name__)


class SmallDaemon(Daemon):
    def __init__(self, runtime: Runtime, servicer: Detokenizer) -> None:
        self._runtime = runtime
        self._servicer = servicer

    async def load(self) -> None:
        name = self._runtime.name
        if name == "slow_load":
            await asyncio.sleep(3600)
        if name == "bad_load":
            raise MeshError(ErrorReason.ERROR_REASON_BAD_CHECKPOINT, "put the file there", {"file": "x"})
        if name == "bug_in_load":
            raise ZeroDivisionError
        if name == "task_fails":
            self._runtime.spawn(self._fail(), "loop")

    async def drain(self) -> None:
        log.info("drain_called")
        if self._runtime.name == "never_drains":
            await asyncio.sleep(3600)
        if self._servicer.num_open:
            await self._servicer.closed.wait()

    async def close(self) -> None:
        log.info("close_called")

    async def _fail(self) -> None:
        await asyncio.sleep(0.2)
        raise RuntimeError("the loop broke")


async def build(runtime: Runtime) -> Daemon:
    servicer = Detokenizer()
    runtime.server.add(detokenizer_pb2_grpc.add_DetokenizerServiceServicer_to_server, servicer)
    return SmallDaemon(runtime, servicer)


if __name__ == "__main__":
    name, *argv = sys.argv[1:]
    sys.exit(run_daemon(name, load_settings(CommonSettings, argv, name), build))
