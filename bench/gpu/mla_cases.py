"""The pool, the rows and the figures of the benchmarks of attention over latents (`mla.py`)."""

from __future__ import annotations

import torch

from radixmesh.kernels.attention.mla_decode import mla_decode_reference

RANK, ROPE = 512, 64
LATENT = RANK + ROPE
SCALE = 0.07
_FLUSH_BYTES = 160 << 20
_MOST_TURNS = 128

Record = dict[str, object]


class Pool:
    """Latents of a layer, and tables over them."""

    def __init__(self, num_tokens: int) -> None:
        self.latents_SC = torch.randn(num_tokens, LATENT, device="cuda", dtype=torch.bfloat16)

    def tables(self, num_rows: int, length: int) -> list[torch.Tensor]:
        """Of launches in turn, each [rows, length] of other tokens as far as there are enough."""
        num_tokens = num_rows * length
        turns = min(_MOST_TURNS, max(4, _FLUSH_BYTES // (2 * LATENT * num_tokens)))
        order = torch.randperm(len(self.latents_SC), device="cuda").int()
        return [
            order.roll(turn * num_tokens)[:num_tokens].view(num_rows, length).contiguous()
            if num_tokens <= len(order)
            else torch.randint(len(order), (num_rows, length), device="cuda", dtype=torch.int32)
            for turn in range(turns)
        ]


def rows_of(num_rows: int, heads: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, slots and lengths."""
    q = torch.randn(num_rows, heads, LATENT, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(num_rows, device="cuda", dtype=torch.int32)
    return q, slots, torch.full((num_rows,), length, device="cuda", dtype=torch.int32)


def check(
    got: torch.Tensor, q: torch.Tensor, pool: Pool, table: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor
) -> None:
    """Raises RuntimeError where results are not the reference's."""
    want = mla_decode_reference(q, pool.latents_SC, table, slots, lens, 1, SCALE, RANK).float()
    error = float((got.float() - want).norm() / want.norm())
    if not error < 0.02:
        raise RuntimeError(f"differs from torch's by {error:.3g}")


def figures(us: float, *, read: int, pairs: int, heads: int) -> Record:
    """read: tokens; pairs: of a row and a token."""
    flop = 2 * (LATENT + RANK) * heads * pairs
    return {
        "us": round(us, 1),
        "tb_s": round(2 * LATENT * read / us * 1e-6, 2),
        "tflop_s": round(flop / us * 1e-6, 1),
    }
