"""KV of a device's pages for everyone but the steps: host memory, transfers, copies of pages.

All of it happens in the order of the steps, and a network that drafts hears of every token whose KV it has not
computed: it would otherwise draft from states of another token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.worker.cuda.device import CudaDevice, Device
from radixmesh.daemons.worker.cuda.drafting.device_network import DeviceNetwork
from radixmesh.daemons.worker.cuda.kv_device import PoolDevice
from radixmesh.daemons.worker.cuda.ranks.peer_memory import CudaPeerMemory
from radixmesh.daemons.worker.host_memory.host_pool import ArrayHostPool, HostPool
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.kv_pool import KvPool, kv_slots, rows_of_pages


class KvAccess:
    """One thread calls it, that of the steps. network: drafts, with KV of its own; None: none does."""

    def __init__(self, device: Device, pool: KvPool, network: DeviceNetwork | None) -> None:
        self._device, self._pool, self._network = device, pool, network

    def create_device(self) -> PoolDevice | None:
        """Copies to memory of other GPUs; None where the pool has no kernels for it."""
        if not isinstance(self._device, CudaDevice) or not self._pool.copies_by_address:
            return None
        memory = CudaPeerMemory("transfer_transport", "KV goes through the host's memory")
        return PoolDevice(self._device, self._pool, memory, None if self._network is None else self._received)

    def create_host_pool(self, num_bytes: int, segment: HostSegment | None) -> HostPool:
        """Raises as `ModelRunner.add_host_pool`."""
        features = None if self._network is None else self._network.features_NF
        rows = () if features is None else (rows_of_pages(features, self._pool),)
        if not isinstance(self._device, CudaDevice):
            arrays = [of.numpy() for of in rows]
            return ArrayHostPool(num_bytes, self._pool.page_planes(), self._loaded, segment, beside_kv=arrays)
        # Triton is needed where there is a GPU alone.
        from radixmesh.daemons.worker.cuda.host_tier.host_pool import CudaHostPool

        words, num_pages = self._pool.page_words(), self._pool.num_pages
        beside_kv = [of.view(torch.int32)[None] for of in rows]
        return CudaHostPool(self._device, words, num_bytes, num_pages, self._loaded, segment, beside_kv=beside_kv)

    @torch.inference_mode()
    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """As ModelRunner's."""
        with self._device.in_order():
            self._pool.copy_page(source, target, num_tokens)
            if self._network is not None:
                self._network.copied(source, target, num_tokens)

    @torch.inference_mode()
    def read(self, indexes: IntArray, part: KvShare | None) -> npt.NDArray[np.uint8]:
        """As `ModelRunner.read_kv`."""
        # Behind the steps that were launched: the copy to the host waits for them, and for itself.
        with self._device.in_order():
            tokens = torch.from_numpy(indexes).to(self._device.torch_device)
            return self._pool.read_tokens(tokens, part).cpu().numpy()

    @torch.inference_mode()
    def write(self, indexes: IntArray, data: npt.NDArray[np.uint8], part: KvShare | None) -> None:
        """As `ModelRunner.write_kv`."""
        # From memory that is not pinned the copy to the device returns when the source may change.
        with self._device.in_order():
            tokens = torch.from_numpy(indexes).to(self._device.torch_device)
            self._pool.write_tokens(tokens, torch.from_numpy(data).to(self._device.torch_device), part)
            self._received(tokens)

    @torch.inference_mode()
    def clear(self) -> None:
        """As ModelRunner's."""
        with self._device.in_order():
            self._pool.clear()
            if self._network is not None:
                self._network.cleared()

    def _received(self, tokens: torch.Tensor) -> None:
        """KV of these tokens came from elsewhere: a network has not seen it."""
        if self._network is not None:
            self._network.received(tokens)

    @torch.inference_mode()
    def _loaded(self, pages: IntArray) -> None:
        """KV comes back into these pages, with a network's features of it."""
        if self._network is not None:
            with self._device.in_order():
                indexes = kv_slots(pages, len(pages) * self._pool.page_size, self._pool.page_size).astype(np.int32)
                tokens = torch.empty(len(indexes), dtype=torch.int32, device=self._device.torch_device)
                # Not a copy that waits for the steps that were launched.
                self._device.upload(indexes, tokens)
                self._network.received(tokens, has_features=True)
