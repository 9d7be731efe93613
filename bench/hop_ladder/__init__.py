"""Cost of each process boundary of the mesh: rungs of a ladder, load points, round trips."""

from radixmesh.daemons.runtime.grpc_polling import poll_without_engine

# This process has ends of streams that are a daemon's elsewhere: they cost as much here.
poll_without_engine()
