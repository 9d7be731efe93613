"""The detokenizer daemon: ids to text, as they come, and stop strings."""

from radixmesh.daemons.runtime.grpc_polling import poll_without_engine

poll_without_engine()
