"""Calls of the admin service of every router that a verb is about."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import grpc

from radixmesh.cli.access import Access, access_of, add_access_flags
from radixmesh.cli.routers import find_routers
from radixmesh.cli.terminal import Terminal
from radixmesh.daemons.cluster.errors import NotRunningError
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.router.v1 import router_pb2_grpc

if TYPE_CHECKING:
    from radixmesh.router.v1.router_pb2_grpc import RouterAdminServiceAsyncStub

TIMEOUT_S = 10.0

Metadata = tuple[tuple[str, str], ...]
Answer = tuple[Mapping[str, object], str]
"""Of one router: fields for --json, and text."""
Call = Callable[["RouterAdminServiceAsyncStub", Metadata], Awaitable[Answer]]
"""Asks one router. Raises grpc.RpcError."""


def add_router_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say which routers, how to get in, and how to print."""
    parser.add_argument("-r", "--router", action="append", default=[], metavar="ADDRESS", help="routers to tell")
    parser.add_argument("-p", "--project", help="which cluster, if several run here")
    parser.add_argument("--json", action="store_true", help="one JSON object per router and line, for programs")
    add_access_flags(parser)


def call_routers(verb: str, options: argparse.Namespace, call: Call) -> int:
    """Prints a line for each router: 0 if all have done it, 1 if one could not."""
    terminal = Terminal()
    try:
        access = access_of(options)
        routers = find_routers(options.router, options.project, access)
    except (NotRunningError, OSError, ValueError, MeshError) as error:
        terminal.error(f"radixmesh {verb}: {error}")
        return 1
    failures = 0
    for address in routers:
        try:
            record, text = asyncio.run(_call_router(address, access, call))
        except MeshError as error:
            terminal.error(f"radixmesh {verb}: {address}: {error}")
            failures += 1
            continue
        terminal.line(json.dumps({"router": address, **record}) if options.json else f"{address}: {text}")
    return 1 if failures else 0


async def _call_router(address: str, access: Access, call: Call) -> Answer:
    async with open_channel(address, access.tls) as channel:
        try:
            return await call(router_pb2_grpc.RouterAdminServiceStub(channel), access.metadata)
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error
