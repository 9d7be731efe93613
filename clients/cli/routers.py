"""Which routers a verb talks to: those named, those of the environment, or those of the cluster that runs here."""

import os
from collections.abc import Sequence
from pathlib import Path

from radixmesh.daemons.cluster.errors import NotRunningError
from radixmesh.daemons.cluster.run_folder import find_run_folder, read_state


def find_routers(named: Sequence[str], project: str | None) -> list[str]:
    """Addresses, at least one. `named` and RADIXMESH_ROUTER may hold several separated by commas.

    Raises NotRunningError if nothing is named and no cluster with a router is found.
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
    return found
