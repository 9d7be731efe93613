"""bf16 logits of a model with random weights against transformers: no further from its fp32 than its own bf16 is.

python bench/gpu/numerics.py --tokens 256 --attention triton flashinfer > numerics.json
python bench/gpu/numerics.py --tokens 256 --quantization fp8 fp8-block > numerics-fp8.json

With FP8 weights, what is off is the weights' rounding and, in steps of more than one row, that of the rows. `one_row`
is of the first tokens alone, a step each, as decodes of one stream are.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import transformers
from gpu.shapes import write_shape
from transformers import AutoConfig, AutoModelForCausalLM

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_cuda_runner
from radixmesh.daemons.worker.cuda.weights.source import fill_randomly
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.models.registry import model_families
from radixmesh.daemons.worker.ranks.group import LocalGroup
from radixmesh.daemons.worker.runner import Segment

# Of steps of one row each.
_FEW_TOKENS = 48
_SETTINGS = DeviceSettings(
    dtype="bfloat16",
    attention_backend="triton",
    load_format="dummy",
    page_size=1,
    num_pages=8192,
    num_slots=8,
    max_tokens_per_step=2048,
    max_total_len=4096,
    mem_fraction=0.9,
    cuda_graphs=False,
    use_pdl=True,
    deterministic=False,
)


def _reference(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model with the very weights that `--load-format dummy` makes, rounded to bf16."""
    reader = ConfigReader.open(folder)
    placement = Placement(device=torch.device("cuda"), dtype=torch.bfloat16, group=LocalGroup(), is_out_first=True)
    built = model_families().create(reader.strings("architectures")[0]).build(reader, placement)
    fill_randomly(built.targets)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), torch_dtype=dtype)
    missing, unexpected = model.load_state_dict(dict(built.targets.tensors), strict=False)
    assert not unexpected and all("lm_head" in name or "rotary" in name for name in missing), (missing, unexpected)
    model.tie_weights()
    return model.to(dtype).eval()


def _ours(
    folder: Path, ids: np.ndarray, settings: DeviceSettings, chunk_lens: Sequence[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Logits by the length of the chunks that the ids come in; of the first few alone where they come one by one."""
    runner = load_cuda_runner(folder, settings)
    for chunk_len in chunk_lens:
        some = ids[:_FEW_TOKENS] if chunk_len == 1 else ids
        parts = []
        for start in range(0, len(some), chunk_len):
            chunk = some[start : start + chunk_len]
            pages = np.arange(start + len(chunk), dtype=np.int32)[::-1].copy() + (len(some) - start - len(chunk))
            parts += runner.logits([Segment(slot=0, ids=chunk, start=start, pages=pages)])
        yield chunk_len, torch.from_numpy(np.concatenate(parts))
    del runner
    torch.cuda.empty_cache()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama-3.2-3b"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--attention", nargs="+", default=["triton"])
    parser.add_argument("--quantization", nargs="*", default=[], help="beside bf16 weights: fp8, fp8-block")
    args = parser.parse_args()
    results = []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_shape(shape, Path(scratch))
            ids = np.random.default_rng(0).integers(10, 100_000, args.tokens).astype(np.int32)
            inputs = torch.from_numpy(ids).long().cuda()[None]
            exact, rounded = (
                _reference(folder, dtype)(inputs).logits[0].float().cpu() for dtype in (torch.float32, torch.bfloat16)
            )
            torch.cuda.empty_cache()
            row: dict[str, object] = {"shape": shape, "transformers_bf16": _error(rounded, exact)}
            runs = {attention: replace(_SETTINGS, attention_backend=attention) for attention in args.attention}
            runs |= {name: replace(_SETTINGS, quantization=name) for name in args.quantization}
            for name, settings in runs.items():
                for chunk_len, logits in _ours(folder, ids, settings, (args.tokens, 100, 64, 1)):
                    what = "one_row" if chunk_len == 1 else f"chunks_of_{chunk_len}"
                    row[f"{name}_{what}"] = _error(logits, exact[: len(logits)])
        results.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"command": " ".join(sys.argv), "versions": versions, "results": results}))


def _error(logits: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Relative error by the norm, largest difference, and how often the most likely id is the same."""
    same = (logits.argmax(dim=-1) == exact.argmax(dim=-1)).float().mean()
    return {
        "relative": round(float((logits - exact).norm() / exact.norm()), 6),
        "largest": round(float((logits - exact).abs().max()), 5),
        "same_argmax": round(float(same), 4),
    }


if __name__ == "__main__":
    main()
