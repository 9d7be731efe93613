"""The model runner on CPUs. Importing this package imports no torch; `load_cpu_runner` does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.experts.expert_dispatch import ExpertDispatch
    from radixmesh.daemons.worker.ranks.group import Group
    from radixmesh.daemons.worker.runner import ModelRunner


def load_cpu_runner(
    model: Path,
    *,
    page_size: int = 1,
    num_pages: int | None = None,
    threads: int | None = None,
    is_deterministic: bool = True,
    attention_backend: str = "paged_torch",
    dtype: str = "float32",
    kv_dtype: str = "auto",
    max_total_len: int | None = None,
    embed_pooling: str = "mean",
    model_impl: str = "auto",
    group: Group | None = None,
    experts: ExpertDispatch | None = None,
    two_batch_min_rows: int = 0,
) -> ModelRunner:
    """Loads a folder in Hugging Face format; takes seconds and more, blocks.

    num_pages None: sized by memory (`kv_pool.py`). threads None: as torch chooses (OMP_NUM_THREADS, or the cores).
    is_deterministic False: faster, but a row's last bits depend on its batch. dtype of weights and KV: "float32" or
    "bfloat16". kv_dtype: "auto" (as the weights) or "fp8", with the checkpoint's scales. max_total_len
    shortens what the config allows; None leaves it.
    embed_pooling: what an embed task gives of the states after the final norm: "mean" of the prompt, "last", "cls".
    model_impl: "radixmesh" (a family of this engine), "transformers" (its modules, slower) or "auto" (the first).
    group: the ranks that hold the model together, of which this one loads its share; None: it computes alone.
    experts: the ranks that share the experts, of which this one loads its own; None: it has all.
    two_batch_min_rows: see `CpuRunner`.
    Raises MeshError BAD_CHECKPOINT, UNSUPPORTED or INVALID_ARGUMENT.
    """
    from radixmesh.daemons.worker.cpu.load import load_runner

    return load_runner(
        model,
        page_size=page_size,
        num_pages=num_pages,
        threads=threads,
        is_deterministic=is_deterministic,
        attention_backend=attention_backend,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_total_len=max_total_len,
        embed_pooling=embed_pooling,
        model_impl=model_impl,
        group=group,
        experts=experts,
        two_batch_min_rows=two_batch_min_rows,
    )
