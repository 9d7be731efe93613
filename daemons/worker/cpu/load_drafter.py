"""From a folder to a drafter that is a network, beside a runner on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.checkpoint.loader import load_tensors
from radixmesh.daemons.worker.checkpoint.tensor_index import index_tensors
from radixmesh.daemons.worker.cpu.attention.backend import AttentionPlacement
from radixmesh.daemons.worker.cpu.attention.registry import attention_backends
from radixmesh.daemons.worker.cpu.load import load_model
from radixmesh.daemons.worker.cpu.model_drafter import ModelDrafter, scratch_tokens
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.models.encoder import ENCODER_ARCHITECTURES
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.ranks.group import LocalGroup
from radixmesh.daemons.worker.speculation.models.draft_model import DraftModel
from radixmesh.daemons.worker.speculation.models.eagle3 import Eagle3Model, TargetSizes, build_eagle3
from radixmesh.daemons.worker.speculation.models.mtp import mtp_of
from radixmesh.daemons.worker.speculation.models.standalone import StandaloneModel
from radixmesh.daemons.worker.speculation.settings import Speculation, SpeculativeAlgorithm

_log = get_logger(__name__)


def load_model_drafter(speculation: Speculation, runner: CpuRunner, model: Path, dtype: str) -> ModelDrafter:
    """model: folder of the target, which `runner` computes. dtype: of the network's weights and KV, as that of
    `load_cpu_runner`. The network's KV takes memory beside that of the runner's pool, for as many tokens.

    Raises MeshError BAD_CHECKPOINT, UNSUPPORTED, or INVALID_ARGUMENT for a network that is not for this model.
    """
    placement = Placement(
        device=torch.device("cpu"),
        dtype=getattr(torch, dtype),
        group=LocalGroup(),
        max_total_len=runner.max_total_len,
    )
    with torch.inference_mode(), _fitting(speculation):
        network: DraftModel
        if speculation.algorithm is SpeculativeAlgorithm.STANDALONE:
            network = _load_standalone(speculation, runner, model, placement)
        elif speculation.algorithm is SpeculativeAlgorithm.EAGLE3:
            network = _load_eagle3(speculation, runner, placement)
        else:
            network = mtp_of(runner.model, placement)
        attention = attention_backends().create("paged_torch")(
            network.attention_shape,
            AttentionPlacement(device=placement.device, dtype=placement.dtype, is_deterministic=False),
        )
        shape = speculation.tree
        num_scratch = 0 if shape is None else -(-scratch_tokens(shape) // runner.page_size)
        pool = KvPool(
            network.kv_layout,
            num_pages=runner.num_pages + num_scratch,
            page_size=runner.page_size,
            dtype=placement.dtype,
            device=placement.device,
        )
        drafter = ModelDrafter(network, pool, attention, placement.dtype, shape)
    num_tokens = pool.num_pages * runner.page_size
    kv_bytes = network.kv_layout.bytes_per_token(placement.dtype) + network.num_features * placement.dtype.itemsize
    _log.info("drafter_loaded", algorithm=str(speculation.algorithm), kv_bytes=kv_bytes * num_tokens)
    return drafter


def _load_eagle3(speculation: Speculation, runner: CpuRunner, placement: Placement) -> DraftModel:
    folder, target = speculation.draft_model, runner.model
    assert folder is not None, "settings see to it"
    if not target.shows_hidden:
        raise shows_nothing()
    sizes = TargetSizes(target.hidden_size, target.vocab_size, target.kv_layout.num_layers)
    built = build_eagle3(ConfigReader.open(folder), index_tensors(folder), sizes, placement)
    load_tensors(folder, built.targets)
    built.check(folder)
    return Eagle3Model(built.config, built.weights, target, built.hidden_layers, placement)


def _load_standalone(speculation: Speculation, runner: CpuRunner, target: Path, placement: Placement) -> DraftModel:
    folder = speculation.draft_model
    assert folder is not None, "settings see to it"
    architecture = ConfigReader.open(folder).strings("architectures")[0]
    if architecture in ENCODER_ARCHITECTURES:
        raise no_drafter(folder, f"is the encoder {architecture}, which generates no text")
    model = load_model(folder, placement).model
    if Task.GENERATE not in model.tasks:
        raise no_drafter(folder, "generates no text")
    check_vocabulary(folder, target)
    return StandaloneModel(model, runner.vocab_size)


def check_vocabulary(folder: Path, target: Path) -> None:
    """Raises MeshError INVALID_ARGUMENT for a network whose ids mean other texts than the target's, where both folders
    tell."""
    if all((of / "tokenizer.json").is_file() for of in (folder, target)):
        of_draft, of_target = (Vocabulary.load(of).tokens for of in (folder, target))
        if of_draft != of_target:
            raise no_drafter(folder, f"has another vocabulary than {target.name}, so its ids mean other texts")


def shows_nothing() -> MeshError:
    """Refusal of a network that reads states of a target that shows none."""
    return MeshError(
        common_pb2.ERROR_REASON_UNSUPPORTED,
        "--speculative-algorithm eagle3 reads states of the model's layers, which one that is computed by modules "
        "of transformers does not show: draft with ngram or standalone",
        {"feature": "speculative_algorithm"},
    )


@contextmanager
def _fitting(speculation: Speculation) -> Iterator[None]:
    """Turns torch's failure to allocate into INVALID_ARGUMENT, which says what takes the memory."""
    try:
        yield
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        of = "" if speculation.draft_model is None else f" of {speculation.draft_model}"
        raise MeshError(
            common_pb2.ERROR_REASON_INVALID_ARGUMENT,
            f"--speculative-algorithm {speculation.algorithm}: the network{of} and its KV do not fit in memory: set "
            f"fewer --num-pages, or check the sizes in its config.json ({error})",
            {"field": "speculative_algorithm"},
        ) from error


def no_drafter(folder: Path, what: str) -> MeshError:
    """Refusal of a folder that holds no network for the target."""
    return MeshError(
        common_pb2.ERROR_REASON_INVALID_ARGUMENT,
        f"--speculative-draft-model-path: {folder} {what}: name the folder of a network for this model",
        {"field": "speculative_draft_model_path"},
    )
