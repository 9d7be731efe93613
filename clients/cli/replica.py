"""`radixmesh replica`: schedulers are added to running routers, or removed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from radixmesh.cli.admin_calls import TIMEOUT_S, Answer, Metadata, add_router_flags, call_routers
from radixmesh.router.v1 import router_pb2

if TYPE_CHECKING:
    from radixmesh.router.v1.router_pb2_grpc import RouterAdminServiceAsyncStub


def run(arguments: list[str]) -> int:
    """Tells every router: 0 if all have done it, 1 if one could not."""
    parser = argparse.ArgumentParser(
        prog="radixmesh replica",
        description="Add a scheduler to running routers, or remove one, whose outputs go on at others.",
    )
    parser.add_argument("action", choices=("add", "remove"))
    parser.add_argument("scheduler", metavar="ADDRESS", help="host:port or unix:/path, as routers reach it")
    parser.add_argument("--finish", action="store_true", help="with remove: let what runs there end there first")
    add_router_flags(parser)
    options = parser.parse_args(arguments)
    if options.finish and options.action != "remove":
        parser.error("--finish goes with remove")

    async def tell(stub: RouterAdminServiceAsyncStub, metadata: Metadata) -> Answer:
        running = 0
        if options.action == "add":
            added = router_pb2.AddSchedulerRequest(address=options.scheduler)
            await stub.AddScheduler(added, timeout=TIMEOUT_S, metadata=metadata)
        else:
            removed = router_pb2.RemoveSchedulerRequest(address=options.scheduler, finish_outputs=options.finish)
            running = (await stub.RemoveScheduler(removed, timeout=TIMEOUT_S, metadata=metadata)).num_running
        rest = f", after {running} outputs that run there" if running else ""
        done = "added" if options.action == "add" else "removed"
        return {"action": options.action, "still_running": running}, done + rest

    return call_routers("replica", options, tell)
