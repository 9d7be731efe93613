"""Checks of a model folder before anything is started: family, weights, memory."""

from __future__ import annotations

import ctypes
import difflib
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.fingerprint import read_json_object

# Beside the weights, on a CPU: the daemons, the interpreter and torch, and KV for at least some contexts.
_BESIDE_WEIGHTS_BYTES = 1 << 30
_PICKLED_WEIGHTS = ("*.bin", "*.pth", "*.pt", "*.gguf")


class ModelCheckError(Exception):
    """The folder cannot be served; the text says why, and what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """architecture: the first entry of config.json's `architectures`. weights_bytes: as stored.

    is_cpu_only: an encoder.
    """

    architecture: str
    weights_bytes: int
    is_cpu_only: bool = False


def check_model(folder: Path) -> CheckedModel:
    """Raises ModelCheckError for what no worker could load: no config, tokenizer or safetensors, an unknown family."""
    from radixmesh.daemons.worker.models.encoder import ENCODER_ARCHITECTURES
    from radixmesh.daemons.worker.models.registry import model_families
    from radixmesh.daemons.worker.models.transformers_fallback import is_causal_model

    try:
        config = read_json_object(folder / "config.json")
    except MeshError as error:
        raise ModelCheckError(str(error)) from error
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    known = (*model_families().names, *ENCODER_ARCHITECTURES)
    if architecture not in known and not is_causal_model(architecture):
        raise ModelCheckError(_unknown_architecture(architecture, known))
    if not (folder / "tokenizer.json").is_file():
        raise ModelCheckError(
            f"{folder} has no tokenizer.json: save a fast tokenizer beside the model "
            "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder))"
        )
    weights = list(folder.glob("*.safetensors"))
    if not weights:
        others = [file.name for pattern in _PICKLED_WEIGHTS for file in folder.glob(pattern)]
        found = f"only {others[0]}" if others else "none"
        raise ModelCheckError(
            f"{folder} holds no *.safetensors ({found}): save the model again with save_pretrained of transformers"
        )
    return CheckedModel(
        architecture=architecture,
        weights_bytes=sum(file.stat().st_size for file in weights),
        is_cpu_only=architecture in ENCODER_ARCHITECTURES,
    )


def count_gpus() -> int:
    """NVIDIA GPUs that the driver shows to this process; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def choose_cpu_dtype(model: CheckedModel, available_bytes: int) -> str:
    """float32, as the CPU worker prefers, or bfloat16 where only that leaves room. Raises ModelCheckError.

    The weights on disk are taken for 16-bit ones: float32 doubles them.
    """
    for dtype, factor in (("float32", 2), ("bfloat16", 1)):
        if model.weights_bytes * factor + _BESIDE_WEIGHTS_BYTES <= available_bytes:
            return dtype
    raise ModelCheckError(
        f"the weights are {_gib(model.weights_bytes)} and {_gib(available_bytes)} of memory are free: "
        "a smaller model fits, or a machine with more memory"
    )


def available_memory() -> int:
    """Bytes of main memory that processes may still take, as the kernel estimates it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _unknown_architecture(architecture: str, known: tuple[str, ...]) -> str:
    # By the families' own names: "ForCausalLM" would make all of them alike.
    families = {name.partition("For")[0]: name for name in reversed(known)}
    near = difflib.get_close_matches(architecture.partition("For")[0], families, n=1)
    hint = f" The nearest that is: {families[near[0]]}." if near else ""
    if architecture:
        named = (
            f"{architecture} is not supported: no family here has this name, and no causal model of {_transformers()}."
        )
    else:
        named = "config.json names no architecture."
    return f"{named}{hint} Supported: {', '.join(known)}. See docs/models.md."


def _transformers() -> str:
    try:
        return f"transformers {version('transformers')}, which runs further families (a newer one may know it)"
    except PackageNotFoundError:
        return "transformers, which would run further families (pip install transformers)"


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
