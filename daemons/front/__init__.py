"""The L4 proxy in front of several routers."""

from radixmesh.daemons.runtime.grpc_polling import poll_without_engine

poll_without_engine()
