"""`radixmesh move`: running outputs go on at another scheduler."""

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
    """Prints how many have moved: 0 if all routers have done it, 1 if one could not."""
    parser = argparse.ArgumentParser(
        prog="radixmesh move",
        description="Let running outputs go on at another scheduler, each where it stands. Every router moves its own.",
    )
    parser.add_argument("--request", default="", metavar="ID", help="only the outputs of this request")
    parser.add_argument("--from", dest="source", default="", metavar="ADDRESS", help="only those on this scheduler")
    parser.add_argument("--to", dest="target", default="", metavar="ADDRESS", help="where to; default: by the policy")
    parser.add_argument("--max", type=int, default=0, metavar="N", help="so many outputs of each router at most")
    parser.add_argument(
        "--drain", action="store_true", help="send nothing new to the scheduler of --from until it restarts"
    )
    parser.add_argument("-r", "--router", action="append", default=[], metavar="ADDRESS", help="routers to ask")
    parser.add_argument("-p", "--project", help="which cluster, if several run here")
    parser.add_argument("--json", action="store_true", help="one JSON object per router and line, for programs")
    add_access_flags(parser)
    options = parser.parse_args(arguments)
    if options.drain and (not options.source or options.request or options.target or options.max):
        parser.error("--drain takes --from, and moves all that is there: leave --request, --to and --max out")
    if not (options.request or options.source):
        parser.error("say which outputs: --request, --from or both")
    terminal = Terminal()
    try:
        access = access_of(options)
        routers = find_routers(options.router, options.project, access)
    except (NotRunningError, OSError, ValueError, MeshError) as error:
        terminal.error(f"radixmesh move: {error}")
        return 1
    failures = 0
    for address in routers:
        try:
            moved, running = asyncio.run(_ask(address, options, access))
        except MeshError as error:
            terminal.error(f"radixmesh move: {address}: {error}")
            failures += 1
            continue
        if options.json:
            terminal.line(json.dumps({"router": address, "moved": moved, "still_running": running}))
        else:
            rest = "" if running is None else f", {running} still run there"
            terminal.line(f"{address}: {moved} moved{rest}")
    return 1 if failures else 0


async def _ask(address: str, options: argparse.Namespace, access: Access) -> tuple[int, int | None]:
    """Outputs that have moved, and those that a drained scheduler still runs. Raises MeshError."""
    async with open_channel(address, access.tls) as channel:
        stub = router_pb2_grpc.RouterAdminServiceStub(channel)
        try:
            if options.drain:
                drain = router_pb2.DrainSchedulerRequest(address=options.source, move_outputs=True)
                drained = await stub.DrainScheduler(drain, timeout=_TIMEOUT_S, metadata=access.metadata)
                return drained.num_moved, drained.num_running
            request = router_pb2.MoveOutputsRequest(
                request_id=options.request,
                from_address=options.source,
                to_address=options.target,
                max_outputs=max(0, options.max),
            )
            return (await stub.MoveOutputs(request, timeout=_TIMEOUT_S, metadata=access.metadata)).num_moved, None
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error
