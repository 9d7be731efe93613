"""Seconds of a worker's start by phase: with empty caches of kernels, then with those that this start has left.

    python bench/gpu/start.py --shape llama-3.2-3b > bench/results/h200-start-phases.json
    python bench/gpu/start.py --shape llama-3.2-3b --weights      # random ones are written to a file, and read

The folder has a tokenizer of 128,000 tokens, which a worker's grammars need. Without --weights these are made up on the
GPU: what reading them takes comes on top. at_s: since the process was started; a phase's line of the log comes at its
end. serving_s: until health says so. cold: caches of Triton, of GEMMs and of their choices are new folders. Modules
are compiled to bytecode ahead, as pip does with what it installs: where PYTHONDONTWRITEBYTECODE is set, every process
would compile a tree of sources again. The system's cache of files is as it was.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import safetensors.torch
import tokenizers
import torch
from gpu.mesh import gpu_name, short_line
from gpu.shapes import SHAPES, write_shape
from hop_ladder.processes import Processes

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.cuda.weights.source import make_random
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.models.registry import model_families
from radixmesh.daemons.worker.ranks.group import LocalGroup

_NUM_TOKENS = 128_000
_PACKAGES = (
    *("radixmesh", "torch", "torchgen", "triton", "numpy", "grpc", "google", "transformers", "huggingface_hub"),
    *("xgrammar", "tvm_ffi", "pydantic", "tokenizers", "safetensors"),
)


async def main() -> None:
    args = _parse()
    compiled = compile_modules(_PACKAGES)
    with tempfile.TemporaryDirectory(prefix="start") as name:
        root = Path(name)
        model = write_shape(args.shape, root)
        write_tokenizer(model, _NUM_TOKENS)
        if args.weights:
            write_weights(model)
        starts: dict[str, object] = {}
        for number in range(args.rounds):
            caches = root / f"caches-{number}"
            os.environ.update(
                TRITON_CACHE_DIR=f"{caches}/triton", XDG_CACHE_HOME=f"{caches}/others", CUDA_CACHE_PATH=f"{caches}/cuda"
            )
            for kind in ("cold", "warm"):
                folder = root / f"{kind}-{number}"
                folder.mkdir()
                starts[f"{kind} {number + 1}"] = found = await _start(model, folder, args)
                print(kind, json.dumps(found), file=sys.stderr, flush=True)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{gpu_name()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "shape": args.shape,
        "compiled_to_bytecode": compiled,
        "starts": starts,
    }
    print(json.dumps(result, indent=1))


async def _start(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, object]:
    flags = {
        "backend": args.backend,
        "model": model,
        **({"load_format": "dummy"} if args.backend == "cuda" and not args.weights else {}),
        "num_slots": 512,
        "max_tokens_per_step": 8192,
        "max_total_len": 8192,
        "log-level": "info",
        **dict(text.split("=", 1) for text in args.worker),
    }
    async with Processes(folder, "unix", start_s=240.0) as processes:
        started, started_at = time.monotonic(), time.time()
        await processes.start("worker", "worker", flags)
        serving_s = time.monotonic() - started
        lines = [json.loads(line) for line in (folder / "worker.log").read_text().splitlines() if line[:1] == "{"]
        phases = [
            {"at_s": round(datetime.fromisoformat(line["ts"]).timestamp() - started_at, 2), **_phase(line)}
            for line in lines
        ]
        return {"serving_s": round(serving_s, 2), "phases": phases}


def _phase(line: dict[str, object]) -> dict[str, object]:
    """A line of the log, without lists of what was chosen."""
    return {key: value for key, value in short_line(line).items() if not isinstance(value, dict | list)}


def compile_modules(packages: Sequence[str]) -> list[str]:
    """Compiles the modules of packages that have no bytecode; their names. A folder that cannot be written stays as it
    is."""
    missing = {name: roots for name in packages if (roots := _without_bytecode(name))}
    folders = [str(root) for roots in missing.values() for root in roots]
    if folders:
        # A small process: one that has torch takes long to fork, and compileall forks for each folder.
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", *folders], check=False)
    return list(missing)


def _without_bytecode(name: str) -> list[Path]:
    """Folders of a package, unless all modules in the upper two levels of it have their bytecode."""
    spec = importlib.util.find_spec(name)
    roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
    # Folders of this tree are links to those of the sources, into which compileall does not go.
    linked = [folder.resolve() for root in roots for folder in root.iterdir() if folder.is_symlink()]
    sources = [path for folder in (*roots, *linked) for path in (*folder.glob("*.py"), *folder.glob("*/*.py"))]
    has_all = all(Path(importlib.util.cache_from_source(str(path))).exists() for path in sources)
    return [] if has_all else [*roots, *linked]


def write_tokenizer(folder: Path, num_tokens: int) -> None:
    """A byte-level BPE tokenizer of so many tokens, of two or three bytes most of them."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: index for index, byte in enumerate(alphabet)}
    merges = []
    pairs = ((first, second) for first, second in itertools.product(alphabet, repeat=2))
    triples = ((first + second, third) for first, second, third in itertools.product(alphabet, repeat=3))
    for left, right in itertools.chain(pairs, triples):
        if len(vocabulary) == num_tokens:
            break
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_weights(folder: Path) -> None:
    """Random weights in bf16, of the names and shapes that the model has. Made on a GPU where there is one."""
    config = ConfigReader.open(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    placement = Placement(device=torch.device("meta"), dtype=torch.bfloat16, group=LocalGroup())
    targets = model_families().create(config.strings("architectures")[0]).build(config, placement).targets
    tensors: dict[str, torch.Tensor] = {}
    for seed, (name, target) in enumerate(targets.tensors.items()):
        made = torch.empty(target.shape, dtype=torch.bfloat16, device=device)
        make_random(name, made, seed)
        tensors[name] = made.cpu()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    torch.cuda.empty_cache()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-3.2-3b")
    parser.add_argument("--weights", action="store_true", help="in a file that is read, as large as the model")
    parser.add_argument("--rounds", type=int, default=1, help="cold and warm starts, in turns")
    parser.add_argument("--backend", default="cuda", help="of the worker: another one to see that this script runs")
    parser.add_argument("--worker", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the worker")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
