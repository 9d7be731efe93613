"""The scheduler daemon: queues, the prefix cache and plans of steps."""

from radixmesh.daemons.runtime.grpc_polling import poll_without_engine

poll_without_engine()
