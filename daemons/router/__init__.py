"""The router daemon: HTTP and gRPC for clients, requests to schedulers."""

from radixmesh.daemons.runtime.grpc_polling import poll_without_engine

poll_without_engine()
