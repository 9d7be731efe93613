"""Routers that a verb talks to: those named, those of the environment, or those of the cluster that runs here."""

import os
from collections.abc import Sequence
from pathlib import Path

from radixmesh.cli.access import Access
from radixmesh.daemons.cluster.errors import NotRunningError
from radixmesh.daemons.cluster.processes.process_identity import is_own_listener
from radixmesh.daemons.cluster.run_folder import find_run_folder, read_state


def find_routers(named: Sequence[str], project: str | None, access: Access) -> list[str]:
    """Addresses, at least one. `named` and RADIXMESH_ROUTER may hold several separated by commas.

    Raises NotRunningError if nothing is named and no cluster with a router is found, or the API key must not go there.
    """
    given = list(named) or [os.environ.get("RADIXMESH_ROUTER", "")]
    addresses = [address.strip() for text in given for address in text.split(",") if address.strip()]
    if addresses:
        return addresses
    folder = find_run_folder(project, Path.cwd(), os.environ)
    found = [
        process.address
        for process in read_state(folder).processes
        if process.service == "router" and process.address is not None
    ]
    if not found:
        raise NotRunningError(f"the cluster in {folder} has no service 'router'; name the address with --router")
    for address in found:
        if not may_send_key(address, access):
            raise NotRunningError(
                f"the cluster in {folder} names {address}, which is another machine's, or another user listens there: "
                "the API key goes there under TLS only; name the address with --router if you mean it"
            )
    return found


def may_send_key(address: str, access: Access) -> bool:
    """True if the key may go to an address that nobody named: a port of ours on this machine, or any under TLS."""
    return not access.api_key or access.tls.has_client or is_own_listener(address)
