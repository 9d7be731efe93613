"""Settings of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from radixmesh.daemons.runtime.common_settings import CommonSettings
from radixmesh.daemons.runtime.guided.backend import BACKENDS
from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.runtime.settings import setting
from radixmesh.daemons.worker.kv_transfer.transports.choice import TransferTransport
from radixmesh.daemons.worker.limits import MAX_TOKENS_PER_ROW, MAX_TREE_CANDIDATES
from radixmesh.daemons.worker.simulated.clock import ClockKind
from radixmesh.daemons.worker.simulated.faults import Fault
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.speculation.settings import Speculation, SpeculativeAlgorithm, read_speculation

_MIB = 1024 * 1024
_MOST_REDUNDANT = 4096
_MOST_MASK_PROCESSES = 64
_MODEL_IMPLS = ("auto", "radixmesh", "transformers")
_TP_COLLECTIVES = ("auto", "peer", "nccl", "host")
_EP_TRANSPORTS = ("auto", "nccl", "nixl", "deepep", "host")
_QUANTIZATIONS = ("none", "auto", "fp8", "fp8-block")


class Backend(StrEnum):
    CPU = "cpu"
    SIMULATED = "simulated"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(CommonSettings):
    """One rank of a model: weights, KV memory and steps, driven by a scheduler."""

    backend: Backend = setting(Backend.CPU, "what computes: cpu, simulated (made-up tokens, a latency model) or cuda")
    model: Path | None = setting(None, "folder of the model in Hugging Face format; a simulated worker needs none")
    served_model_name: str = setting("", "name by which clients ask for the model; empty: that of its folder")
    generation_config: bool = setting(True, "requests that set no sampling get that of the folder's "
        "generation_config.json")  # fmt: skip
    page_size: int = setting(1, "tokens per KV page")
    num_pages: int | None = setting(None, "KV pages; none: as many as fit the memory (simulated: 262144 tokens)")
    num_slots: int = setting(256, "requests that can hold a slot at a time")
    max_total_len: int | None = setting(None, "longest prompt + output in tokens; none: what the model takes")
    max_tokens_per_step: int = setting(2048, "most tokens, chunks and decodes together, of one step")
    max_plans_in_flight: int = setting(8, "plans taken ahead of the running one, itself included")
    max_blob_bytes: int = setting(32 * _MIB, "largest blob")
    grammar_backend: str = setting("xgrammar", "library that follows the grammars that tokenizers compile by it")
    mask_processes: int | None = setting(
        None,
        "CUDA: processes that follow grammars beside the worker; none: by its cores, 1 to 8; 0: threads of it do",
    )
    jump_forward_tokens: int = setting(0, "CPU and CUDA: most tokens of a text that a grammar forces which one step "
        "verifies at once; 0: none")  # fmt: skip
    speculative_algorithm: SpeculativeAlgorithm = setting(SpeculativeAlgorithm.OFF, "what drafts tokens that a step "
        "verifies beside a row's last one: off, ngram (as its own text went on before), standalone (a smaller model "
        "of the vocabulary), eagle3 (a head) or mtp (DeepSeek-V3's layer)")  # fmt: skip
    speculative_draft_model_path: Path | None = setting(None, "folder of the network that drafts, in Hugging Face "
        "format, for --speculative-algorithm standalone and eagle3")  # fmt: skip
    speculative_num_steps: int | None = setting(None, "most drafts of a row in one step; none: 4, or a token less than "
        "--speculative-num-draft-tokens; of a tree: levels")  # fmt: skip
    speculative_num_draft_tokens: int | None = setting(None, "most tokens that one step verifies of a row, its last "
        "one included; none: one more than --speculative-num-steps; of a tree topk more")  # fmt: skip
    speculative_eagle_topk: int = setting(1, "most drafts of a network that follow the same token, so that the drafts "
        "of a row are a tree; 1: a chain")  # fmt: skip
    speculative_adaptive: bool = setting(True, "rows draft as much as pays, by what drafts yield and steps cost")
    blob_store_bytes: int = setting(256 * _MIB, "bytes of all blobs together")
    transfer_staging_bytes: int = setting(0, "bytes of KV on its way to and from other workers (disaggregated prefill "
        "and decode); 0: there are no transfers")  # fmt: skip
    transfer_piece_bytes: int = setting(64 * _MIB, "bytes of that KV in one copy of the device, at least, where it "
        "moves behind its prefill: one piece is scattered while the next is gathered; 0: all is copied at once"
        )  # fmt: skip
    kv_store: str = setting("", "where KV that is in host memory is kept for restarts and replicas: "
        "disk:///FOLDER?budget=100GiB, redis://HOST:PORT/DB, s3://BUCKET/PREFIX, nixl-file:///FOLDER?budget=10TiB, "
        "nixl-obj://BUCKET/PREFIX or mooncake://HOST:PORT; empty: nowhere")  # fmt: skip
    transfer_transport: TransferTransport = setting(TransferTransport.DEVICE, "what carries that KV: device "
        "(between GPUs of one host, otherwise as shared_memory), shared_memory (between workers of one host), nixl "
        "(between workers that have it), each over gRPC to any other, or grpc")  # fmt: skip
    host_kv_bytes: int = setting(0, "bytes of host memory for KV that the device evicts, which comes back before it is "
        "needed; 0: evicted KV is computed anew")  # fmt: skip
    host_kv_segment: Path | None = setting(None, "file for that memory, in /dev/shm for instance, which a worker that "
        "starts again finds as it was; the rank is added to its name; none: it goes with the worker")  # fmt: skip
    dump_folder: Path | None = setting(None, "folder, ours alone (mode 700), for plans of died steps and profiler "
        "traces; none: radixmesh/dumps in ~/.local/state, or a new one below the temporary folder")  # fmt: skip
    record_plans: Path | None = setting(None, "file that every plan is written to, for sending them again (bench/gpu)")
    cpu_threads: int | None = setting(None, "threads per operation of the CPU backend; none: one a core")
    deterministic: bool | None = setting(None, "a token depends on neither batch nor chunking, which costs "
        "speed; none: yes on a CPU, no on a GPU")  # fmt: skip
    attention_backend: str = setting("auto", "how attention is computed; cpu: paged_torch, naive; cuda: triton, "
        "flashinfer, torch")  # fmt: skip
    dtype: str = setting("auto", "of weights and KV: float32, bfloat16 or (cuda) float16; auto: float32 on a CPU, "
        "bfloat16 on a GPU")  # fmt: skip
    kv_dtype: str = setting("auto", "of KV pages: fp8 (e4m3, with the checkpoint's scales), or CUDA: float16, bfloat16 "
        "or float32; auto: as dtype, but float16 where that is float32 and flashinfer reads them")  # fmt: skip
    mem_fraction: float = setting(0.88, "CUDA: share of the GPU's memory for weights, work space and KV together")
    cuda_graphs: bool = setting(True, "CUDA: decode steps are captured and replayed")
    cuda_pdl: bool = setting(True, "CUDA: kernels begin while those ahead of them end (programmatic dependent launch)")
    cuda_device: int = setting(0, "CUDA: the GPU, by its index among those that the process sees")
    tune_gemm: bool = setting(True, "CUDA: GEMMs of captured steps take the fastest of cuBLASLt's algorithms, not "
        "its first, or on Hopper of this project's kernels, as measured at the start",
        deprecated=("tune-products",))  # fmt: skip
    kernels: str = setting("triton", "CUDA: what computes norms, RoPE and SwiGLU between GEMMs: triton (this "
        "project's kernels), compiled (torch.compile) or torch")  # fmt: skip
    load_format: str = setting("auto", "auto: weights from the folder; dummy: random ones of its config's shapes")
    quantization: str = setting("auto", "of weights: auto (what the checkpoint says), none (FP8 ones are dequantised "
        "when loaded), or CUDA: fp8 (a scale an output channel), fp8-block (a scale for 128 x 128)")  # fmt: skip
    model_impl: str = setting("auto", "code of the model: radixmesh (a family of this engine), transformers (its "
        "modules with our attention, slower) or auto (the first that there is)")  # fmt: skip
    embed_pooling: str = setting("mean", "what embed tasks give of hidden states: mean, last or cls (the first)")
    simulated_time: ClockKind = setting(ClockKind.REAL, "real: steps take their time; virtual: they only say so")
    simulated_base_us: float = setting(2000.0, "microseconds of any step")
    simulated_decode_row_us: float = setting(10.0, "microseconds a decode row adds")
    simulated_decode_context_us: float = setting(0.027, "microseconds a token of KV read by decodes adds")
    simulated_prefill_token_us: float = setting(9.0, "microseconds an uncached prefill token adds")
    simulated_prefill_context_us: float = setting(0.0005, "microseconds a pair of prefill token and context token adds")
    simulated_loaded_token_us: float = setting(2.3, "microseconds a token of KV takes from the host to the device")
    simulated_device: bool = setting(False, "steps and copies of KV run beside the host, as on a GPU, and KV goes from "
        "one such worker of a host to another without it")  # fmt: skip
    simulated_copied_token_us: float = setting(0.2, "microseconds a token of KV takes from or to a region of staging, "
        "with --simulated-device")  # fmt: skip
    simulated_vocab_size: int = setting(32_000, "ids, where no model folder is given")
    simulated_eos_ids: tuple[str, ...] = setting((), "ids that end an output, where no model folder is given")
    simulated_eos_rate: float = setting(0.0, "probability that a token is an EOS")
    simulated_max_tokens_per_row: int = setting(
        1, "a decode yields 0 to that many tokens a step, at random; 1: exactly one"
    )
    simulated_row_seed: int = setting(0, "seed of the number of tokens that a decode yields")
    tp_size: int = setting(1, "ranks that share one batch (tensor parallelism)")
    tp_rank: int = setting(0, "position of this worker among them, from 0 on")
    tp_collectives: str = setting("auto", "CUDA: sums of --tp-size ranks by peer (kernels that read each other's "
        "memory, on one host), nccl, or host (through the CPUs: slow, without graphs); auto: peer")  # fmt: skip
    ep_transport: str = setting("auto", "CUDA: rows to experts of --ep-size ranks by nccl, nixl (NIXL EP) or deepep "
        "(both for rows of bfloat16), or host (through the CPUs: slow, without graphs); auto: nccl")  # fmt: skip
    group_host: str = setting("", "address of this machine by which the other ranks reach this one, with --tp-size; "
        "empty: that of --listen")  # fmt: skip
    dp_size: int = setting(1, "batches of the group, each with slots and pages of its own (data-parallel attention)")
    dp_rank: int = setting(0, "the one of them that this worker computes, from 0 on")
    ep_size: int = setting(1, "ranks that share the experts of a layer; 1: every rank has all")
    ep_rank: int = setting(0, "position of this worker among them: the rank, --dp-rank x --tp-size + --tp-rank, modulo "
        "--ep-size")  # fmt: skip
    two_batch_min_rows: int = setting(0, "with --ep-size, steps in which a rank has so many rows run as two half "
        "batches: one computes while rows of the other travel; 0: none does (CUDA: at low latency)")  # fmt: skip
    ep_redundant_experts: int = setting(0, "with --ep-size, slots of a layer for further copies of experts in demand, "
        "on all ranks together")  # fmt: skip
    faults: tuple[str, ...] = setting((), "faults on demand: kind@STEP[:MS] or kind%PROBABILITY[:MS], kind one of "
        "refuse, die, delay, duplicate, reorder, vanish, hang; or, where KV transfers wait, PHASE@TRANSFER[:MS] or "
        "PHASE%PROBABILITY[:MS], phase one of reserved, writing, written, scattering, validated")  # fmt: skip
    fault_seed: int = setting(0, "seed of the faults that come with a probability")

    def __post_init__(self) -> None:
        CommonSettings.__post_init__(self)
        for name in ("page_size", "num_slots", "max_tokens_per_step", "max_plans_in_flight", "max_blob_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must be >= 1, not {getattr(self, name)}")
        for name in ("num_pages", "max_total_len", "cpu_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{_flag(name)} must be >= 1, not {value}")
        if self.blob_store_bytes < self.max_blob_bytes:
            raise ValueError(f"{_flag('blob_store_bytes')} must hold one blob of {_flag('max_blob_bytes')}")
        if not 0 <= self.jump_forward_tokens < MAX_TOKENS_PER_ROW:
            most = MAX_TOKENS_PER_ROW - 1
            raise ValueError(f"{_flag('jump_forward_tokens')} must be in [0, {most}], not {self.jump_forward_tokens}")
        if self.mask_processes is not None and not 0 <= self.mask_processes <= _MOST_MASK_PROCESSES:
            most = _MOST_MASK_PROCESSES
            raise ValueError(f"{_flag('mask_processes')} must be in [0, {most}], not {self.mask_processes}")
        has_jumps = self.backend in (Backend.CPU, Backend.CUDA) and self.tp_size == self.ep_size == 1
        if self.jump_forward_tokens and not has_jumps:
            raise ValueError(f"{_flag('jump_forward_tokens')}: --backend cpu or cuda with --tp-size 1 and --ep-size 1 "
                "alone has it so far")  # fmt: skip
        if self.transfer_staging_bytes < 0:
            raise ValueError(f"{_flag('transfer_staging_bytes')} must be >= 0, not {self.transfer_staging_bytes}")
        if self.transfer_piece_bytes < 0:
            raise ValueError(f"{_flag('transfer_piece_bytes')} must be >= 0, not {self.transfer_piece_bytes}")
        if self.host_kv_bytes < 0:
            raise ValueError(f"{_flag('host_kv_bytes')} must be >= 0, not {self.host_kv_bytes}")
        if self.host_kv_bytes and self.transfer_staging_bytes:
            raise ValueError(f"{_flag('host_kv_bytes')} and {_flag('transfer_staging_bytes')} do not go together yet: "
                "KV that comes from other workers is written beside the plans that order saves")  # fmt: skip
        if self.host_kv_segment is not None and not self.host_kv_bytes:
            raise ValueError(f"{_flag('host_kv_segment')} is a file for host memory: set {_flag('host_kv_bytes')}")
        if self.kv_store and not self.host_kv_bytes:
            raise ValueError(f"{_flag('kv_store')} keeps what host memory has: set {_flag('host_kv_bytes')}")
        if self.grammar_backend not in BACKENDS:
            raise ValueError(f"{_flag('grammar_backend')} must be one of {', '.join(BACKENDS)}")
        if not 0.0 <= self.simulated_eos_rate <= 1.0:
            raise ValueError(f"{_flag('simulated_eos_rate')} must be in [0, 1], not {self.simulated_eos_rate}")
        if not 1 <= self.simulated_max_tokens_per_row <= MAX_TOKENS_PER_ROW:
            raise ValueError(
                f"{_flag('simulated_max_tokens_per_row')} must be in [1, {MAX_TOKENS_PER_ROW}],"
                f" not {self.simulated_max_tokens_per_row}"
            )
        if self.simulated_device and (
            self.simulated_time is not ClockKind.REAL or self.simulated_max_tokens_per_row > 1 or self.host_kv_bytes
        ):
            raise ValueError(f"{_flag('simulated_device')} takes real time and a token a row, and has no host memory")
        if self.simulated_copied_token_us < 0:
            raise ValueError(f"{_flag('simulated_copied_token_us')} must be >= 0, not {self.simulated_copied_token_us}")
        if self.simulated_vocab_size < 1:
            raise ValueError(f"{_flag('simulated_vocab_size')} must be >= 1, not {self.simulated_vocab_size}")
        if not all(text.strip().isdigit() for text in self.simulated_eos_ids):
            raise ValueError(f"{_flag('simulated_eos_ids')} are token ids, not {','.join(self.simulated_eos_ids)}")
        if self.backend is not Backend.SIMULATED and self.model is None:
            raise ValueError(f"{_flag('model')}: the {self.backend} backend needs the folder of a model")
        if self.model_impl not in _MODEL_IMPLS:
            raise ValueError(f"{_flag('model_impl')} must be one of {', '.join(_MODEL_IMPLS)}, not {self.model_impl}")
        if self.model_impl != "auto" and self.backend is Backend.SIMULATED:
            raise ValueError(f"{_flag('model_impl')} {self.model_impl} is for --backend cpu or cuda")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"{_flag('load_format')} must be auto or dummy, not {self.load_format}")
        if self.load_format == "dummy" and self.backend is not Backend.CUDA:
            raise ValueError(f"{_flag('load_format')} dummy is for --backend cuda: others load the folder's weights")
        if self.kernels != "triton" and self.backend is not Backend.CUDA:
            raise ValueError(f"{_flag('kernels')} {self.kernels} is for --backend cuda: others have no choice of them")
        if self.quantization not in _QUANTIZATIONS:
            choices = ", ".join(_QUANTIZATIONS)
            raise ValueError(f"{_flag('quantization')} must be one of {choices}, not {self.quantization}")
        if self.quantization not in ("auto", "none") and self.backend is not Backend.CUDA:
            raise ValueError(f"{_flag('quantization')} {self.quantization} is for --backend cuda: a CPU computes with "
                "the weights dequantised")  # fmt: skip
        if self.kv_dtype == "fp8" and self.backend is Backend.SIMULATED:
            raise ValueError(f"{_flag('kv_dtype')} fp8 is for --backend cpu or cuda: a simulated worker has no KV")
        if self.kv_dtype not in ("auto", "fp8") and self.backend is not Backend.CUDA:
            raise ValueError(f"{_flag('kv_dtype')} {self.kv_dtype} is for --backend cuda: a CPU keeps KV as the "
                "weights (auto) or as fp8")  # fmt: skip
        if not 0.0 < self.mem_fraction <= 1.0:
            raise ValueError(f"{_flag('mem_fraction')} must be in (0, 1], not {self.mem_fraction}")
        if self.two_batch_min_rows < 0:
            raise ValueError(f"{_flag('two_batch_min_rows')} must be >= 0, not {self.two_batch_min_rows}")
        if self.two_batch_min_rows and self.ep_size == 1:
            raise ValueError(f"{_flag('two_batch_min_rows')} is for ranks that share experts: set --ep-size")
        if not 0 <= self.ep_redundant_experts <= _MOST_REDUNDANT:
            raise ValueError(f"{_flag('ep_redundant_experts')} must be in [0, {_MOST_REDUNDANT}]")
        _ = self.rank_layout
        if self.tp_collectives not in _TP_COLLECTIVES:
            choices = ", ".join(_TP_COLLECTIVES)
            raise ValueError(f"{_flag('tp_collectives')} must be one of {choices}, not {self.tp_collectives}")
        if self.tp_collectives != "auto" and self.backend is not Backend.CUDA:
            raise ValueError(f"{_flag('tp_collectives')} {self.tp_collectives} is for --backend cuda")
        if self.cuda_device < 0:
            raise ValueError(f"{_flag('cuda_device')} must be >= 0, not {self.cuda_device}")
        _check_shared_experts(self)
        # They say what is wrong with themselves.
        _ = self.latency, self.parsed_faults
        _check_speculation(self)

    @property
    def speculation(self) -> Speculation | None:
        """None: off."""
        steps, tokens = self.speculative_num_steps, self.speculative_num_draft_tokens
        folder, topk = self.speculative_draft_model_path, self.speculative_eagle_topk
        return read_speculation(self.speculative_algorithm, steps, tokens, folder, topk)

    @property
    def rank_layout(self) -> RankLayout:
        return RankLayout(
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            ep_size=self.ep_size,
            ep_rank=self.ep_rank,
        )

    @property
    def device_staging_bytes(self) -> int:
        """Bytes of the GPU's memory for KV on its way."""
        kinds = (TransferTransport.DEVICE, TransferTransport.NIXL)
        return self.transfer_staging_bytes if self.transfer_transport in kinds else 0

    @property
    def latency(self) -> LatencyModel:
        return LatencyModel(
            base=self.simulated_base_us,
            per_decode_row=self.simulated_decode_row_us,
            per_decode_context=self.simulated_decode_context_us,
            per_prefill_token=self.simulated_prefill_token_us,
            per_prefill_context=self.simulated_prefill_context_us,
            per_loaded_token=self.simulated_loaded_token_us,
        )

    @property
    def parsed_faults(self) -> tuple[Fault, ...]:
        return tuple(Fault.parse(text) for text in self.faults)


def _check_speculation(settings: WorkerSettings) -> None:
    if settings.speculation is None:
        return
    flag = _flag("speculative_algorithm")
    if settings.backend is Backend.SIMULATED:
        raise ValueError(f"{flag} is for --backend cpu or cuda: a simulated worker drafts nothing, its rows yield "
            "several tokens with --simulated-max-tokens-per-row")  # fmt: skip
    tree = settings.speculation.tree
    if settings.backend is Backend.CUDA and tree is not None and tree.num_candidates > MAX_TREE_CANDIDATES:
        raise ValueError(f"{_flag('speculative_eagle_topk')} {tree.topk} and {tree.num_steps} steps are "
            f"{tree.num_candidates} candidates for the drafts of a row: a GPU chooses among {MAX_TREE_CANDIDATES}; set "
            "a smaller one of the two")  # fmt: skip
    if settings.tp_size > 1 or settings.ep_size > 1:
        raise ValueError(f"{flag} {settings.speculative_algorithm} needs --tp-size 1 and --ep-size 1: ranks do not "
            "draft together yet; use replicas or --dp-size")  # fmt: skip
    if settings.attention_backend == "flashinfer":
        raise ValueError(f"{flag} needs --attention-backend triton (or torch): flashinfer plans by exact lengths, "
            "which the host does not know while steps run")  # fmt: skip


def _check_shared_experts(settings: WorkerSettings) -> None:
    """Of ranks that share experts on GPUs."""
    is_cuda = settings.backend is Backend.CUDA
    if settings.ep_transport not in _EP_TRANSPORTS:
        choices = ", ".join(_EP_TRANSPORTS)
        raise ValueError(f"{_flag('ep_transport')} must be one of {choices}, not {settings.ep_transport}")
    if settings.ep_transport != "auto" and not is_cuda:
        raise ValueError(f"{_flag('ep_transport')} {settings.ep_transport} is for --backend cuda")
    if not is_cuda or settings.ep_size == 1:
        return
    if settings.deterministic:
        raise ValueError(f"{_flag('deterministic')} with --ep-size above 1 is for --backend cpu: on GPUs experts take "
            "tiles by how many rows come")  # fmt: skip
    if settings.two_batch_min_rows and settings.attention_backend == "flashinfer":
        raise ValueError(f"{_flag('two_batch_min_rows')} needs --attention-backend triton (or torch): flashinfer plans "
            "one batch at a time")  # fmt: skip
    if settings.two_batch_min_rows and settings.tp_size % settings.ep_size == 0:
        raise ValueError(f"{_flag('two_batch_min_rows')} is for rows that travel, and where {_flag('ep_size')} divides "
            "--tp-size none do on GPUs: leave it out")  # fmt: skip


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')} (or RADIXMESH_{name.upper()})"
