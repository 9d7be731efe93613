"""Backends by name: each makes a runner and says which model that is. What a backend needs is imported only then."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.addresses import own_host
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import GrammarBackend, GuidedVocabulary, installed_format, load_backend
from radixmesh.daemons.runtime.model_folder.fingerprint import (
    ModelIdentity,
    model_fingerprint,
    read_json_object,
    read_model_identity,
    tokenizer_fingerprint,
)
from radixmesh.daemons.runtime.model_folder.generation_config import read_sampling_defaults
from radixmesh.daemons.runtime.rpc.hello import identity_to_proto
from radixmesh.daemons.runtime.sampling import SAMPLER_VERSION
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guides import Guides, jump_forward
from radixmesh.daemons.worker.guided.process_guides import ProcessGuides
from radixmesh.daemons.worker.models.transformers_fallback import is_chosen
from radixmesh.daemons.worker.ranks.group_member import GroupMember, UnconnectedMember
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths
from radixmesh.daemons.worker.speculation.drafter import MOST_BEHIND, ByGrammar, Drafter, EachRow, NoDrafts
from radixmesh.daemons.worker.speculation.registry import drafters
from radixmesh.daemons.worker.speculation.settings import NETWORKS, Speculation

if TYPE_CHECKING:
    from radixmesh.daemons.worker.cuda.runner import DeviceRunner
    from radixmesh.daemons.worker.experts.expert_dispatch import ExpertDispatch
    from radixmesh.daemons.worker.ranks.group import Group


_log = get_logger(__name__)

# Defaults of the simulated backend.
_SIMULATED_MAX_TOTAL_LEN = 8192
_SIMULATED_TOKENS = 262_144
# Of a worker with so many cores a quarter, at most so many. A process tells of its rows when all are filled: of 64, at
# 60 to 88 us each as on loaded cores, that is later than the step, and rows go on every second one.
_CORES_A_MASK_PROCESS, _MOST_MASK_PROCESSES = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A runner and the identity that peers compare."""

    runner: ModelRunner
    identity: common_pb2.ModelIdentity
    grammars: GrammarStore | None = None
    """None: the runner follows no grammars, or their library is not installed."""
    guides: Guides | None = None
    """Of outputs that follow grammars; None: the executor has its own."""


def check_backend(settings: WorkerSettings) -> None:
    """Raises UNSUPPORTED for a backend that this version does not have: known before anything is loaded."""
    if settings.backend not in _LOADERS:
        names = ", ".join(sorted(_LOADERS))
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"the {settings.backend} backend is not available yet: choose one of {names}",
            {"feature": settings.backend.value},
        )


def load_model(
    settings: WorkerSettings, group: Group | None = None, experts: ExpertDispatch | None = None
) -> LoadedModel:
    """Loads; takes as long as it takes. group: the ranks that hold the model together; None: this one alone does.
    experts: reaches those that share the experts with this one; None: it has all.

    Raises BAD_CHECKPOINT, UNSUPPORTED or INVALID_ARGUMENT.
    """
    check_backend(settings)
    if settings.backend is Backend.CPU:
        return _load_cpu(settings, group, experts)
    if settings.backend is Backend.CUDA:
        return _load_cuda(settings, group, experts)
    return _LOADERS[settings.backend](settings)


def create_member(settings: WorkerSettings) -> GroupMember:
    """The worker's position among the ranks of its group, and what connects it with those that it computes with."""
    layout = settings.rank_layout
    if settings.backend is Backend.SIMULATED or layout.tp_size == layout.ep_size == 1:
        return UnconnectedMember(layout)
    if settings.backend is Backend.CUDA:
        from radixmesh.daemons.worker.cuda.early_context import make_context_beside

        # Beside the import of torch, which is here for a rank, not where its model is loaded.
        make_context_beside(settings.cuda_device)
    # Losing a rank is ours to tell: torch would put stacks of C++ frames between our lines.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from radixmesh.daemons.worker.collectives.member import CollectiveMember

    host = settings.group_host or own_host(settings.listen)
    return CollectiveMember(layout, host, redundant_experts=settings.ep_redundant_experts)


def _load_cpu(
    settings: WorkerSettings, group: Group | None = None, experts: ExpertDispatch | None = None
) -> LoadedModel:
    from radixmesh.daemons.worker.cpu import load_cpu_runner

    folder = settings.model
    assert folder is not None, "settings see to it"
    runner = load_cpu_runner(
        folder,
        page_size=settings.page_size,
        num_pages=settings.num_pages,
        threads=settings.cpu_threads,
        is_deterministic=settings.deterministic is not False,
        attention_backend="paged_torch" if settings.attention_backend == "auto" else settings.attention_backend,
        dtype="float32" if settings.dtype == "auto" else settings.dtype,
        kv_dtype=settings.kv_dtype,
        max_total_len=settings.max_total_len,
        embed_pooling=settings.embed_pooling,
        model_impl=settings.model_impl,
        group=group,
        experts=experts,
        two_batch_min_rows=settings.two_batch_min_rows,
    )
    _verify_on_cpu(settings, runner)
    fingerprint = _fingerprint(settings, folder)
    if settings.kv_dtype == "fp8" and settings.dtype == "bfloat16":
        # Ranks of a group are compared by the dtype of their KV, which is not that of the rows that they exchange here.
        fingerprint = hashlib.sha256(f"bfloat16/{fingerprint}".encode()).hexdigest()
    return _loaded(settings, folder, runner, fingerprint)


def _verify_on_cpu(settings: WorkerSettings, runner: ModelRunner) -> None:
    """Has the runner verify drafts, if the settings ask for any."""
    speculation, num_forced = settings.speculation, settings.jump_forward_tokens
    if speculation is None and not num_forced:
        return
    from radixmesh.daemons.worker.cpu.runner import CpuRunner

    if not isinstance(runner, CpuRunner):
        assert settings.model is not None
        raise _drafts_nothing(settings.model)
    # Of a row with a grammar, masks of drafted positions are made ready for the forced ones alone.
    guided = EachRow(jump_forward) if num_forced else NoDrafts()
    if speculation is None:
        runner.verify(guided, max_drafts=num_forced)
        return
    most = speculation.max_drafts
    if speculation.algorithm in drafters().names:
        free = drafters().create(speculation.algorithm)
    else:
        from radixmesh.daemons.worker.cpu.load_drafter import load_model_drafter

        assert settings.model is not None
        free = load_model_drafter(
            speculation, runner, settings.model, "float32" if settings.dtype == "auto" else settings.dtype
        )
    drafter = ByGrammar(guided, num_forced, free, most)
    lengths = _draft_lengths(settings, most, speculation)
    runner.verify(drafter, max_drafts=max(most, num_forced), lengths=lengths)


def _draft_lengths(settings: WorkerSettings, max_drafts: int, speculation: Speculation | None) -> DraftLengths | None:
    """None: steps draft whether that pays or not."""
    if not settings.speculative_adaptive:
        return None
    is_network = speculation is not None and speculation.algorithm in NETWORKS
    has_trees = speculation is not None and speculation.tree is not None
    catch_up = MOST_BEHIND if is_network else 0
    return DraftLengths(settings.num_slots, max_drafts, catch_up=catch_up, is_whole=has_trees)


def _drafts_nothing(folder: Path) -> MeshError:
    return MeshError(
        ErrorReason.ERROR_REASON_UNSUPPORTED,
        f"{folder.name} generates no text, so nothing can be drafted for it: leave out --speculative-algorithm and"
        " --jump-forward-tokens",
        {"feature": "speculative_algorithm"},
    )


def _load_cuda(
    settings: WorkerSettings, group: Group | None = None, experts: ExpertDispatch | None = None
) -> LoadedModel:
    from radixmesh.daemons.worker.cuda.compilers.client import start_compilers
    from radixmesh.daemons.worker.cuda.early_context import make_context_beside

    folder = settings.model
    assert folder is not None, "settings see to it"
    # Imports beside this process, which takes seconds to import torch. It is told what to compile by running steps, in
    # which ranks that hold the model together would wait for those that have their kernels.
    is_alone = settings.rank_layout.tp_size == settings.rank_layout.ep_size == 1
    compilers = start_compilers(folder, settings) if is_alone else None
    make_context_beside(settings.cuda_device)
    started = time.monotonic()
    with kept_imports():
        from radixmesh.daemons.worker.collectives.rank_group import RankGroup
        from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_cuda_runner
        from radixmesh.daemons.worker.cuda.memory import fitting

    _log.info("backend_imported", seconds=round(time.monotonic() - started, 3))
    speculation, num_forced = settings.speculation, settings.jump_forward_tokens
    # Ranks that hold the model together follow none.
    grammars = _grammars(folder, settings.grammar_backend) if settings.tp_size == 1 else None
    num_processes = 0 if grammars is None else _num_mask_processes(settings)
    guides = ProcessGuides(num_processes, folder, settings.grammar_backend) if num_processes else None
    # With processes this one needs no library of grammars, whose import would take the interpreter from the start.
    read_here = None if guides is not None else grammars
    if compilers is None:
        _prepare_beside(read_here, folder, settings.model_impl)

    def verify_drafts(runner: DeviceRunner) -> None:
        if Task.GENERATE not in runner.tasks:
            raise _drafts_nothing(folder)
        drafter: Drafter = NoDrafts()
        if speculation is not None and speculation.algorithm in NETWORKS:
            drafter = runner.network_drafter
        elif speculation is not None:
            drafter = drafters().create(speculation.algorithm)
        most = max(num_forced, 0 if speculation is None else speculation.max_drafts)
        with fitting("graphs of steps that verify drafts", "--mem-fraction, --num-slots or --speculative-num-steps"):
            lengths = _draft_lengths(settings, most, speculation)
            runner.verify(drafter, max_drafts=most, lengths=lengths, max_forced=num_forced)

    runner = load_cuda_runner(
        folder,
        DeviceSettings(
            dtype=settings.dtype,
            attention_backend=settings.attention_backend,
            load_format=settings.load_format,
            page_size=settings.page_size,
            num_pages=settings.num_pages,
            num_slots=settings.num_slots,
            max_tokens_per_step=settings.max_tokens_per_step,
            max_total_len=settings.max_total_len,
            mem_fraction=settings.mem_fraction,
            cuda_graphs=settings.cuda_graphs,
            use_pdl=settings.cuda_pdl,
            staging_bytes=settings.device_staging_bytes,
            deterministic=settings.deterministic is True,
            tune_gemm=settings.tune_gemm,
            kernels=settings.kernels,
            kv_dtype=settings.kv_dtype,
            quantization=settings.quantization,
            embed_pooling=settings.embed_pooling,
            model_impl=settings.model_impl,
            speculation=speculation,
            max_drafts=max(num_forced, 0 if speculation is None else speculation.max_drafts),
            tp_collectives=settings.tp_collectives,
            ep_transport=settings.ep_transport,
            two_batch_min_rows=settings.two_batch_min_rows,
            mask_processes=num_processes,
        ),
        None if speculation is None and not num_forced else verify_drafts,
        compilers,
        meanwhile=lambda: None if read_here is None else read_here.prepare(),
        index=settings.cuda_device,
        ranks=group if isinstance(group, RankGroup) else None,
        experts=experts,
    )
    if settings.load_format == "dummy":
        # No weights are there to be told apart; nobody else's tokens may be continued by these.
        fingerprint = hashlib.sha256(b"dummy/" + (folder / "config.json").read_bytes()).hexdigest()
    else:
        fingerprint = _fingerprint(settings, folder)
    if settings.quantization not in ("auto", "none"):
        # Other numbers than the folder's, or may be: who computes with the folder's own does not continue them.
        fingerprint = hashlib.sha256(f"{settings.quantization}/{fingerprint}".encode()).hexdigest()
    attached = None if guides is None else _attached(guides, runner, settings.num_slots)
    loaded = _loaded(settings, folder, runner, fingerprint, grammars, is_read_here=attached is None)
    return replace(loaded, guides=attached)


@contextmanager
def kept_imports() -> Iterator[None]:
    """Around the first import of torch: the garbage collector rests, which would take a fifth of the time, and passes
    over what is there from then on. Nearly all of it stays for as long as the process does."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()


def _prepare_beside(grammars: GrammarStore | None, folder: Path, model_impl: str) -> None:
    """Makes the library of grammars ready while weights are read: 1.6 s for 128,000 tokens. `_loaded` waits for it. A
    start that compiles kernels has a better time for it, when it waits for them."""
    architectures = read_json_object(folder / "config.json").get("architectures")
    # Two threads that import transformers, whose modules import each other, may find them half made.
    if grammars is None or not isinstance(architectures, list) or not architectures:
        return
    if not is_chosen(str(architectures[0]), model_impl):
        threading.Thread(target=grammars.prepare, name="grammars", daemon=True).start()


def _num_mask_processes(settings: WorkerSettings) -> int:
    """0: masks are filled by threads."""
    if settings.mask_processes is not None:
        return min(settings.mask_processes, settings.num_slots)
    most = min(_MOST_MASK_PROCESSES, settings.num_slots)
    return max(1, min(most, len(os.sched_getaffinity(0)) // _CORES_A_MASK_PROCESS))


def _attached(guides: ProcessGuides, runner: DeviceRunner, num_slots: int) -> Guides | None:
    """The guides with the runner's memory; None: it follows no grammars. Processes that are not ready yet are not
    waited for: they began to start ahead of the weights, and outputs that come earlier wait for them alone."""
    if not runner.takes_grammars or runner.mask_memory.descriptor < 0:
        guides.close()
        return None
    guides.attach(runner.mask_memory, num_slots=num_slots, max_total_len=runner.max_total_len)
    return guides


def _fingerprint(settings: WorkerSettings, folder: Path) -> str:
    """Of the folder, and of the list of longrope's factors where the longest sequence chooses it: workers with other
    lists give other tokens, and must not continue each other's."""
    fingerprint, config = model_fingerprint(folder), read_json_object(folder / "config.json")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if settings.max_total_len is None or not isinstance(rope, dict):
        return fingerprint
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    is_longrope = rope.get("rope_type", rope.get("type")) in ("longrope", "su")
    if not is_longrope or not isinstance(original, int) or settings.max_total_len > original:
        return fingerprint
    return hashlib.sha256(f"short factors/{fingerprint}".encode()).hexdigest()


def _loaded(
    settings: WorkerSettings,
    folder: Path,
    runner: ModelRunner,
    fingerprint: str,
    grammars: GrammarStore | None = None,
    *,
    is_read_here: bool = True,
) -> LoadedModel:
    """grammars: the folder's store, if it was made before the runner. is_read_here: it is made ready, for which the
    start waits; False: processes read grammars."""
    if settings.kv_dtype == "fp8":
        # Tokens over KV of FP8 are not those over KV as the model has it: nobody continues the other's.
        fingerprint = hashlib.sha256(f"kv fp8/{fingerprint}".encode()).hexdigest()
    identity = identity_to_proto(
        _named(settings, read_model_identity(folder)),
        model_fingerprint=fingerprint,
        tokenizer_fingerprint=_tokenizer_fingerprint(folder),
        sampler_version=SAMPLER_VERSION,
    )
    identity.max_total_len = runner.max_total_len
    _add_sampling_defaults(settings, identity)
    grammars = (grammars or _grammars(folder, settings.grammar_backend)) if runner.takes_grammars else None
    identity.grammar_format = "" if grammars is None else grammars.format
    if grammars is not None and is_read_here:
        grammars.prepare()
    return LoadedModel(runner=runner, identity=identity, grammars=grammars)


def _grammars(folder: Path, backend: str) -> GrammarStore | None:
    grammar_format = installed_format(backend)
    if not grammar_format or not (folder / "tokenizer.json").is_file():
        return None

    def make() -> GrammarBackend:
        from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary

        return load_backend(backend, GuidedVocabulary.of(Vocabulary.load(folder)))

    return GrammarStore(grammar_format, make)


def _load_simulated(settings: WorkerSettings) -> LoadedModel:
    from radixmesh.daemons.worker.simulated.clock import make_clock
    from radixmesh.daemons.worker.simulated.device import DeviceClock, DeviceRunner
    from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
    from radixmesh.daemons.worker.simulated.token_source import Alphabet
    from radixmesh.daemons.worker.simulated.uneven_runner import UnevenRunner

    model = _simulated_identity(settings)
    max_total_len = settings.max_total_len or model.max_total_len or _SIMULATED_MAX_TOTAL_LEN
    most = settings.simulated_max_tokens_per_row
    uneven = partial(UnevenRunner, max_tokens_per_row=most, row_seed=settings.simulated_row_seed)
    arguments: dict[str, object] = {"clock": make_clock(settings.simulated_time)}
    create: Callable[..., SimulatedRunner] = uneven if most > 1 else SimulatedRunner
    if settings.simulated_device:
        create, arguments = (
            DeviceRunner,
            {
                "clock": DeviceClock(),
                "num_slots": settings.num_slots,
                "copied_token_us": settings.simulated_copied_token_us,
            },
        )
    runner = create(
        page_size=settings.page_size,
        num_pages=settings.num_pages or max(1, _SIMULATED_TOKENS // settings.page_size),
        vocab_size=model.vocab_size,
        max_total_len=max_total_len,
        alphabet=Alphabet.of(
            model.vocab_size,
            special_ids=_unspeakable_ids(settings.model, model.vocab_size),
            eos_ids=model.eos_ids,
            eos_rate=settings.simulated_eos_rate,
        ),
        latency=settings.latency,
        **arguments,
    )
    # Its tokens are its own: no other worker may continue what it began, whatever folder that one serves.
    options = f"{model.vocab_size}/{model.eos_ids}/{settings.simulated_eos_rate}"
    identity = identity_to_proto(
        model,
        model_fingerprint=hashlib.sha256(f"simulated/{options}".encode()).hexdigest(),
        tokenizer_fingerprint=_tokenizer_fingerprint(settings.model),
        sampler_version=SAMPLER_VERSION,
    )
    identity.max_total_len = max_total_len
    _add_sampling_defaults(settings, identity)
    return LoadedModel(runner=runner, identity=identity)


def _add_sampling_defaults(settings: WorkerSettings, identity: common_pb2.ModelIdentity) -> None:
    if settings.model is not None and settings.generation_config:
        defaults = read_sampling_defaults(settings.model)
        if defaults.ListFields():
            identity.default_sampling.CopyFrom(defaults)


def _simulated_identity(settings: WorkerSettings) -> ModelIdentity:
    if settings.model is not None:
        return _named(settings, read_model_identity(settings.model))
    return ModelIdentity(
        name=settings.served_model_name or "simulated",
        vocab_size=settings.simulated_vocab_size,
        max_total_len=_SIMULATED_MAX_TOTAL_LEN,
        eos_ids=tuple(sorted(int(text) for text in settings.simulated_eos_ids)),
    )


def _named(settings: WorkerSettings, model: ModelIdentity) -> ModelIdentity:
    return replace(model, name=settings.served_model_name or model.name)


def _tokenizer_fingerprint(folder: Path | None) -> str:
    """Empty, so not compared, where the folder has no tokenizer: a worker needs none."""
    return tokenizer_fingerprint(folder) if folder is not None and (folder / "tokenizer.json").is_file() else ""


def _unspeakable_ids(folder: Path | None, vocab_size: int) -> tuple[int, ...]:
    """Special ids of the folder's tokenizer, and those that it has no spelling for."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return ()
    from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary

    vocabulary = Vocabulary.load(folder)
    spellings = vocabulary.tokens
    unspelled = [i for i in range(vocab_size) if i >= len(spellings) or not spellings[i]]
    return (*vocabulary.special_ids, *unspelled)


_LOADERS: Mapping[Backend, Callable[[WorkerSettings], LoadedModel]] = {
    Backend.CPU: _load_cpu,
    Backend.CUDA: _load_cuda,
    Backend.SIMULATED: _load_simulated,
}
