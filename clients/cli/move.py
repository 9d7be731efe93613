"""`radixmesh move`: running outputs go on at another scheduler."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from radixmesh.cli.admin_calls import TIMEOUT_S, Answer, Metadata, add_router_flags, call_routers
from radixmesh.router.v1 import router_pb2

if TYPE_CHECKING:
    from radixmesh.router.v1.router_pb2_grpc import RouterAdminServiceAsyncStub

# The wire's own bound.
_MAX_OUTPUTS = (1 << 32) - 1


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
    parser.add_argument("--drain", action="store_true", help="send nothing new to the scheduler until it restarts")
    add_router_flags(parser)
    options = parser.parse_args(arguments)
    if not 0 <= options.max <= _MAX_OUTPUTS:
        parser.error(f"--max is {options.max}: write a number of outputs up to {_MAX_OUTPUTS}, 0 for all")
    if options.drain and (not options.source or options.request or options.target or options.max):
        parser.error("--drain takes --from, and moves all that is there: leave --request, --to and --max out")
    if not (options.request or options.source):
        parser.error("say which outputs: --request, --from or both")

    async def ask(stub: RouterAdminServiceAsyncStub, metadata: Metadata) -> Answer:
        if options.drain:
            drain = router_pb2.DrainSchedulerRequest(address=options.source, move_outputs=True)
            drained = await stub.DrainScheduler(drain, timeout=TIMEOUT_S, metadata=metadata)
            moved, running = drained.num_moved, drained.num_running
            return {"moved": moved, "still_running": running}, f"{moved} moved, {running} still run there"
        request = router_pb2.MoveOutputsRequest(
            request_id=options.request,
            from_address=options.source,
            to_address=options.target,
            max_outputs=options.max,
        )
        moved = (await stub.MoveOutputs(request, timeout=TIMEOUT_S, metadata=metadata)).num_moved
        return {"moved": moved, "still_running": None}, f"{moved} moved"

    return call_routers("move", options, ask)
