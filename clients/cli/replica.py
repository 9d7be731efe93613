"""`radixmesh replica`: schedulers are added to running routers, or removed."""

import argparse
import asyncio
import json

import grpc

from radixmesh.cli.access import Access, access_of, add_access_flags
from radixmesh.cli.routers import find_routers
from radixmesh.cli.terminal import Terminal
from radixmesh.daemons.cluster.errors import NotRunningError
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

_TIMEOUT_S = 10.0


def run(arguments: list[str]) -> int:
    """Tells every router: 0 if all have done it, 1 if one could not."""
    parser = argparse.ArgumentParser(
        prog="radixmesh replica",
        description="Add a scheduler to running routers, or remove one, whose outputs go on at others.",
    )
    parser.add_argument("action", choices=("add", "remove"))
    parser.add_argument("scheduler", metavar="ADDRESS", help="host:port or unix:/path, as routers reach it")
    parser.add_argument("--finish", action="store_true", help="with remove: let what runs there end there first")
    parser.add_argument("-r", "--router", action="append", default=[], metavar="ADDRESS", help="routers to tell")
    parser.add_argument("-p", "--project", help="which cluster, if several run here")
    parser.add_argument("--json", action="store_true", help="one JSON object per router and line, for programs")
    add_access_flags(parser)
    options = parser.parse_args(arguments)
    if options.finish and options.action != "remove":
        parser.error("--finish goes with remove")
    terminal = Terminal()
    try:
        access = access_of(options)
        routers = find_routers(options.router, options.project, access)
    except (NotRunningError, OSError, ValueError, MeshError) as error:
        terminal.error(f"radixmesh replica: {error}")
        return 1
    failures = 0
    for address in routers:
        try:
            running = asyncio.run(_tell(address, options, access))
        except MeshError as error:
            terminal.error(f"radixmesh replica: {address}: {error}")
            failures += 1
            continue
        if options.json:
            terminal.line(json.dumps({"router": address, "action": options.action, "still_running": running}))
        else:
            rest = f", after {running} outputs that run there" if running else ""
            terminal.line(f"{address}: {'added' if options.action == 'add' else 'removed'}{rest}")
    return 1 if failures else 0


async def _tell(address: str, options: argparse.Namespace, access: Access) -> int:
    """Outputs that still run at a removed scheduler. Raises MeshError."""
    async with open_channel(address, access.tls) as channel:
        stub = router_pb2_grpc.RouterAdminServiceStub(channel)
        try:
            if options.action == "add":
                added = router_pb2.AddSchedulerRequest(address=options.scheduler)
                await stub.AddScheduler(added, timeout=_TIMEOUT_S, metadata=access.metadata)
                return 0
            removed = router_pb2.RemoveSchedulerRequest(address=options.scheduler, finish_outputs=options.finish)
            return (await stub.RemoveScheduler(removed, timeout=_TIMEOUT_S, metadata=access.metadata)).num_running
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error
