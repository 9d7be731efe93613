"""`radixmesh transfers`: KV transfers of a worker, and the operator's word that a writer is gone."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import grpc

from radixmesh.cli.access import access_from_environment
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc


def run(arguments: list[str]) -> int:
    """Prints transfers and quarantined staging; 1 if the worker has no transfers or cannot be reached."""
    parser = argparse.ArgumentParser(
        prog="radixmesh transfers",
        description="Show the KV transfers of a worker, and staging that is quarantined: its transfer has failed, and "
        "whoever wrote to it may still write. --free says that the writer is gone for certain: its host is down, or "
        "its process was ended. Otherwise that may spoil another transfer, which then fails and is computed anew.",
    )
    parser.add_argument("worker", metavar="ADDRESS", help="host:port or unix:/path of the worker")
    parser.add_argument("--free", metavar="ID", action="append", default=[], help="a quarantined transfer; repeatable")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="wait so long (default 10)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        reply = asyncio.run(_asked(options.worker, options.free, options.timeout))
    except grpc.aio.AioRpcError as error:
        print(f"radixmesh transfers: {mesh_error_from_rpc(error)}", file=sys.stderr)
        return 1
    if not reply.HasField("transfers"):
        print("radixmesh transfers: the worker has none; see --transfer-staging-bytes", file=sys.stderr)
        return 1
    counts = reply.transfers
    if options.json:
        values = {field.name: getattr(counts, field.name) for field in counts.DESCRIPTOR.fields}
        print(json.dumps({**values, "quarantined": list(counts.quarantined)}))
        return 0
    print(f"sending {counts.num_sending}, receiving {counts.num_receiving}, staging {counts.staging_bytes} bytes")
    print(f"since the start: sent {counts.num_sent}, received {counts.num_received}, failed {counts.num_failed}")
    if counts.hand_over_us:
        rate = 1e-3 * counts.hand_over_bytes / counts.hand_over_us
        print(f"behind prefills: {counts.hand_over_bytes} bytes at {rate:.3g} GB/s, gather and scatter included")
    print("\n  ".join([f"quarantined {counts.quarantined_bytes} bytes", *counts.quarantined]))
    return 0


async def _asked(address: str, freed: list[str], timeout_s: float) -> worker_pb2.GetCapabilitiesResponse:
    async with open_channel(address, access_from_environment().tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        for transfer_id in freed:
            request = worker_pb2.AbortTransferRequest(transfer_id=transfer_id, is_writer_gone=True)
            await stub.AbortTransfer(request, timeout=timeout_s)
        return await stub.GetCapabilities(worker_pb2.GetCapabilitiesRequest(), timeout=timeout_s)
