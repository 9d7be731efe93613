"""A daemon with this folder on its PYTHONPATH announces the contract version before this one, and speaks that."""

from radixmesh.daemons.runtime.rpc import hello

hello.MAX_CONTRACT_VERSION -= 1
