"""The worker daemon: runs plans of steps on a CPU or a GPU."""

from radixmesh.daemons.runtime.grpc_polling import poll_without_engine

poll_without_engine()
