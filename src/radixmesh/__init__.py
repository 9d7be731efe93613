"""radixmesh: an LLM inference engine cut into daemons that speak typed gRPC."""

__version__ = "0.1.0"
