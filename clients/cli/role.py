"""`radixmesh role`: a running scheduler takes another part in disaggregated prefill and decode."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import grpc

from radixmesh.cli.access import access_from_environment
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

_ROLES = {
    "both": scheduler_pb2.SCHEDULER_ROLE_UNSPECIFIED,
    "prefill": scheduler_pb2.SCHEDULER_ROLE_PREFILL,
    "decode": scheduler_pb2.SCHEDULER_ROLE_DECODE,
}


def run(arguments: list[str]) -> int:
    """Prints what runs there still: 0 if the role is taken, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="radixmesh role",
        description="Let a running scheduler take another role. Its outputs end as they began; routers place by the "
        "new role within a second. A restarted scheduler has that of its --role.",
    )
    parser.add_argument("scheduler", metavar="ADDRESS", help="host:port or unix:/path of the scheduler")
    parser.add_argument("role", choices=tuple(_ROLES))
    parser.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="wait so long (default 10)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        answer = asyncio.run(_set(options.scheduler, _ROLES[options.role], options.timeout))
    except grpc.aio.AioRpcError as error:
        print(f"radixmesh role: {mesh_error_from_rpc(error)}", file=sys.stderr)
        return 1
    previous = next((name for name, value in _ROLES.items() if value == answer.previous), str(answer.previous))
    if options.json:
        print(json.dumps({"role": options.role, "previous": previous, "still_running": answer.num_remaining}))
    else:
        print(f"{previous} -> {options.role}, {answer.num_remaining} outputs still run there")
    return 0


async def _set(address: str, role: scheduler_pb2.SchedulerRole, timeout_s: float) -> scheduler_pb2.SetRoleResponse:
    async with open_channel(address, access_from_environment().tls) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return await stub.SetRole(scheduler_pb2.SetRoleRequest(role=role), timeout=timeout_s)
