"""Choice of a runner's attention, and of the layout of the KV pool that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.backend import AttentionCreator, DeviceAttention
from radixmesh.daemons.worker.cuda.attention.pool_attention import PoolAttention
from radixmesh.daemons.worker.kv_pool import latents_in_fp8
from radixmesh.daemons.worker.models.kv_layout import KvLayout
from radixmesh.kernels.attention.mla_prompt import projection_bytes
from radixmesh.kernels.kv_fp8 import KV_FP8

if TYPE_CHECKING:
    from radixmesh.daemons.worker.cuda.flashinfer.backend import FlashInferBackend
    from radixmesh.daemons.worker.cuda.flashinfer.shared_prefix import FlashInferSharedPrefix
    from radixmesh.daemons.worker.cuda.load import DeviceSettings

_log = get_logger(__name__)

ATTENTION_BACKENDS = ("triton", "flashinfer", "torch")
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_FLASHINFER_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """name: one of ATTENTION_BACKENDS. dtype: the model's; query_dtype: the kernels'; kv_dtype: the pool's, which is
    FP8 or as the queries. latent_rank: as of `LoadedModel`."""

    name: str
    dtype: torch.dtype
    query_dtype: torch.dtype
    kv_dtype: torch.dtype
    latent_rank: int | None = None

    def check_latents(self, architecture: str) -> None:
        """Raises MeshError UNSUPPORTED where it cannot serve a model whose cached tokens are latents."""
        if self.name == "flashinfer":
            raise self._lacks(architecture, "latent attention (MLA)")
        if self.kv_dtype == KV_FP8:
            raise latents_in_fp8()

    def check_softcap(self, architecture: str) -> None:
        """Raises MeshError UNSUPPORTED where it cannot serve a model with soft-capped scores."""
        if self.name == "flashinfer":
            raise self._lacks(architecture, "soft-capped scores")

    def check_masks(self, architecture: str, *, has_sinks: bool, attention_chunks: Sequence[int]) -> None:
        """Raises MeshError UNSUPPORTED where it cannot serve a model with attention sinks, or one whose layers attend
        within chunks of a sequence."""
        for feature, is_there in (("attention sinks", has_sinks), ("chunked attention", bool(attention_chunks))):
            if is_there and self.name == "flashinfer":
                raise self._lacks(architecture, feature)

    def _lacks(self, architecture: str, feature: str) -> MeshError:
        message = (
            f"{architecture} needs kernels of {feature}, which --attention-backend {self.name} does not have here: "
            "use --attention-backend triton"
        )
        metadata = {"field": "attention_backend", "feature": feature}
        return MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, metadata)

    def of_latents(self, rank: int) -> AttentionChoice:
        """The same for a model whose cached tokens are latents."""
        return replace(self, latent_rank=rank)

    def layout(self, layout: KvLayout) -> KvLayout:
        """The model's, with rows padded to a size that the kernels have. Raises MeshError UNSUPPORTED."""
        return layout.padded(self._stored_dim(layout.planes[0].row_shape[-1]))

    def work_bytes(
        self, settings: DeviceSettings, shape: AttentionShape, windows: Sequence[int | None], device: torch.device
    ) -> int:
        """Bytes of GPU memory that it takes beside the pool, if that is much. shape, windows: the model's."""
        if self.name != "flashinfer":
            is_projecting = self.name == "triton" and self.latent_rank is not None
            return projection_bytes(shape.head_dim, self.dtype) if is_projecting else 0
        return _flashinfer_bytes(settings, self._stored_shape(shape), windows, self, device)

    def creator(
        self,
        settings: DeviceSettings,
        shape: AttentionShape,
        windows: Sequence[int | None],
        attention_chunks: Sequence[int] = (),
        *,
        has_sinks: bool = False,
    ) -> AttentionCreator:
        """Makes it when the page tables are there. All but the settings: the model's."""
        stored_shape = self._stored_shape(shape)
        is_plain = stored_shape == shape and self.query_dtype == self.dtype

        def create(page_tables: torch.Tensor) -> DeviceAttention:
            inner = self._create(settings, stored_shape, windows, page_tables, attention_chunks, has_sinks=has_sinks)
            return inner if is_plain else PoolAttention(inner, self.query_dtype)

        return create

    def _create(
        self,
        settings: DeviceSettings,
        shape: AttentionShape,
        windows: Sequence[int | None],
        page_tables: torch.Tensor,
        attention_chunks: Sequence[int],
        *,
        has_sinks: bool,
    ) -> DeviceAttention:
        if self.name == "torch":
            from radixmesh.daemons.worker.cuda.attention.torch_attention import TorchAttention

            return TorchAttention(shape, page_size=settings.page_size)
        if self.name == "flashinfer":
            return _flashinfer(settings, shape, windows, self, page_tables)
        from radixmesh.daemons.worker.cuda.attention.latent_kernels import LatentKernels
        from radixmesh.daemons.worker.cuda.attention.paged_kernels import KeyValueKernels
        from radixmesh.daemons.worker.cuda.attention.triton_attention import TritonAttention

        sizes = (shape, settings.page_size, self.kv_dtype, page_tables.device)
        rank = self.latent_rank
        return TritonAttention(
            KeyValueKernels(*sizes)
            if rank is None
            else LatentKernels(*sizes, rank=rank, is_plain=self.kv_dtype == self.dtype),
            windows=windows,
            # In deterministic mode the rows of chunks come as decodes too.
            max_rows=max(settings.num_slots, settings.max_tokens_per_step if settings.deterministic else 0),
            is_deterministic=settings.deterministic,
            use_pdl=settings.use_pdl and page_tables.is_cuda,
            attention_chunks=attention_chunks,
            has_sinks=has_sinks,
        )

    def _stored_shape(self, shape: AttentionShape) -> AttentionShape:
        """Of the heads as they are stored; the scale stays the model's."""
        return replace(shape, head_dim=self._stored_dim(shape.head_dim))

    def _stored_dim(self, head_dim: int) -> int:
        if self.name != "flashinfer":
            return head_dim
        size = next((size for size in _FLASHINFER_HEAD_DIMS if size >= head_dim), None)
        if size is None:
            raise MeshError(
                ErrorReason.ERROR_REASON_UNSUPPORTED,
                f"FlashInfer has no kernel for head_dim {head_dim}, {_FLASHINFER_HEAD_DIMS[-1]} at most: "
                "choose the triton attention backend",
                {"head_dim": str(head_dim)},
            )
        return size


def choose_attention(
    settings: DeviceSettings, dtype: torch.dtype, kv_dtype: torch.dtype | None, device: torch.device
) -> AttentionChoice:
    """kv_dtype None: as suits. Raises MeshError INVALID_ARGUMENT."""
    name = _name(settings, device)
    read_dtype = torch.float16 if name == "flashinfer" and dtype not in _FLASHINFER_DTYPES else dtype
    if kv_dtype == KV_FP8:
        # Queries stay as they are: kernels make the pool's numbers what queries are.
        return AttentionChoice(name=name, dtype=dtype, query_dtype=read_dtype, kv_dtype=KV_FP8)
    if kv_dtype is None:
        kv_dtype = read_dtype
        if kv_dtype != dtype:
            _log.info("kv_dtype_chosen", kv_dtype="float16", dtype=str(dtype).removeprefix("torch."), attention=name)
    elif name == "flashinfer" and kv_dtype not in _FLASHINFER_DTYPES:
        chosen = str(kv_dtype).removeprefix("torch.")
        raise _invalid(
            "kv_dtype",
            f"is {chosen!r}, of which FlashInfer reads no pages: choose float16, bfloat16 or fp8, or the triton "
            "attention backend",
        )
    return AttentionChoice(name=name, dtype=dtype, query_dtype=kv_dtype, kv_dtype=kv_dtype)


def _name(settings: DeviceSettings, device: torch.device) -> str:
    name = settings.attention_backend
    if name == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if name not in ATTENTION_BACKENDS or (settings.deterministic and name != "triton" and device.type == "cuda"):
        choices = "triton" if settings.deterministic else ", ".join(ATTENTION_BACKENDS)
        raise _invalid("attention_backend", f"is {name!r}: choose one of {choices}")
    if name == "torch" and settings.cuda_graphs and device.type == "cuda":
        raise _invalid("attention_backend", "torch reads lengths on the host, which no graph can: add --no-cuda-graphs")
    return name


def _flashinfer(
    settings: DeviceSettings,
    shape: AttentionShape,
    windows: Sequence[int | None],
    choice: AttentionChoice,
    page_tables: torch.Tensor,
) -> FlashInferBackend:
    from radixmesh.daemons.worker.cuda.flashinfer.attention import FlashInferAttention
    from radixmesh.daemons.worker.cuda.flashinfer.backend import FlashInferBackend
    from radixmesh.daemons.worker.cuda.step.inputs.row_order import RowOrder

    kernels = FlashInferAttention(
        shape,
        page_tables,
        dtype=choice.query_dtype,
        kv_dtype=choice.kv_dtype,
        page_size=settings.page_size,
        max_rows=settings.num_slots,
        max_extend_tokens=settings.max_tokens_per_step,
        windows=windows,
    )
    return FlashInferBackend(
        kernels,
        _shared_prefix(settings, shape, choice, page_tables) if _can_share(windows) else None,
        dummy_slot=page_tables.shape[0] - 1,
        page_size=settings.page_size,
        order=RowOrder(settings.num_slots, page_tables.device),
    )


def _flashinfer_bytes(
    settings: DeviceSettings,
    shape: AttentionShape,
    windows: Sequence[int | None],
    choice: AttentionChoice,
    device: torch.device,
) -> int:
    from radixmesh.daemons.worker.cuda.flashinfer.attention import attention_plan_specs
    from radixmesh.daemons.worker.cuda.flashinfer.shared_prefix import shared_prefix_plan_specs
    from radixmesh.daemons.worker.cuda.flashinfer.workspace import num_sms_of

    decodes, extends = attention_plan_specs(
        shape,
        device,
        dtype=choice.query_dtype,
        kv_dtype=choice.kv_dtype,
        page_size=settings.page_size,
        max_rows=settings.num_slots,
        max_extend_tokens=settings.max_tokens_per_step,
        windows=windows,
    )
    shared = shared_prefix_plan_specs(
        shape,
        dtype=choice.query_dtype,
        kv_dtype=choice.kv_dtype,
        page_size=settings.page_size,
        max_rows=settings.num_slots,
    )
    specs = [*decodes, *extends, *(shared if _can_share(windows) else ())]
    return sum(spec.num_bytes(num_sms_of(device)) for spec in specs)


def _can_share(windows: Sequence[int | None]) -> bool:
    """A window may end within a prefix."""
    return set(windows) == {None}


def _shared_prefix(
    settings: DeviceSettings, shape: AttentionShape, choice: AttentionChoice, page_tables: torch.Tensor
) -> FlashInferSharedPrefix | None:
    """None where its kernels are not among the compiled ones, while all others are."""
    from radixmesh.daemons.worker.cuda.flashinfer.shared_prefix import FlashInferSharedPrefix

    try:
        return FlashInferSharedPrefix(
            shape,
            page_tables,
            dtype=choice.query_dtype,
            kv_dtype=choice.kv_dtype,
            page_size=settings.page_size,
            max_rows=settings.num_slots,
        )
    except MeshError as error:
        _log.warning("prefixes_read_by_every_row", reason=str(error))
        return None


def _invalid(field: str, what: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, f"{field} {what}", {"field": field})
