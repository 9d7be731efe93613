"""Models of every family on a GPU: the greedy ids of transformers in float32, from caches too."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.fallback_models import FALLBACK_MODELS, fallback_model
from support.family_folders import FAMILIES, family_folder, family_model
from support.llama_folders import random_llama
from support.model_folders import random_model
from support.plan_driver import GREEDY
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from radixmesh.daemons.runtime.steps.step import Admit, Chunk, Grant, PageCopy, Release, StepPlan, StepResult
from radixmesh.daemons.worker.cuda.load import load_cuda_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import ModelRunner, Segment
from radixmesh.daemons.worker.step_handle import StepHandle

pytestmark = pytest.mark.gpu

SLOTS, NUM_OUT = 8, 24
# With it the logit of each of the first `_SURE_OUT` ids that `wide_llama` gives is ahead of all others by so many
# standard deviations of the logits, which rounding to two bytes does not change.
_SURE_SEED, _SURE_OUT, _SURE_LEAD = 305, 8, 0.045
# Ahead by so much, an id stays that when keys and values are rounded to float16.
_FLOAT16_LEAD = 0.005
# Of the tokens of the prompt before the last one: what the requests of the second round find in the cache.
_CACHED = (0, 1, 16, 22, 36)
# Of those that differ from Llama by their config, in float32: of the standard deviation of the logits, and a lead that
# sums in another order leave.
_FAMILY_TOLERANCE, _FAMILY_LEAD, _FAMILY_VOCAB = 1e-4, 1e-3, 97
SETTINGS = replace(
    TINY_SETTINGS,
    attention_backend="triton",
    num_pages=2048,
    num_slots=SLOTS,
    cuda_graphs=True,
    use_pdl=True,
    tune_gemm=False,
)


def wide_llama() -> LlamaForCausalLM:
    """Heads of a size that FlashInfer has."""
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    # torch's own numbers depend on the processor.
    rng = np.random.default_rng(_SURE_SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                scale = 1.0 if "embed" in name else 1.2 * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape, np.float32) * scale))
    return model


MODELS = {
    "llama_tied": lambda: random_llama("wide_heads_tied"),
    "llama_biases": lambda: random_llama("biases"),
    "llama3_rope": lambda: random_llama("llama3_rope"),
    "qwen2": lambda: random_model("qwen2"),
    "qwen3": lambda: random_model("qwen3"),
    "mistral": lambda: random_model("mistral"),
    "wide": wide_llama,
}
_made: dict[str, torch.nn.Module] = {}


def prompts_of(name: str) -> list[list[int]]:
    """Of several lengths; the first is the longest and the others of its beginning and their own."""
    rng = np.random.default_rng(sum(name.encode()))
    stem = rng.integers(2, 131, 40).tolist()
    return [stem, *(stem[:cached] + rng.integers(2, 131, 3).tolist() for cached in _CACHED)]


@torch.inference_mode()
def greedy_ids(model: torch.nn.Module, prompt: Sequence[int], num_out: int) -> tuple[list[int], float]:
    """Ids that transformers gives, and by how many standard deviations of all logits each is ahead at least."""
    ids, least = list(prompt), float("inf")
    for _ in range(num_out):
        logits = model(torch.tensor([ids])).logits[0, -1]
        (first, second), (token, _) = logits.topk(2)
        least = min(least, float((first - second) / logits.std()))
        ids.append(int(token))
    return ids[len(prompt) :], least


@torch.inference_mode()
def sure_len(model: torch.nn.Module, prompt: Sequence[int], ids: Sequence[int], lead: float) -> int:
    """Number of the first `ids` after the prompt that are ahead of all others by `lead` standard deviations."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    first, second = logits.topk(2).values.unbind(-1)
    is_sure = ((first - second) / logits.std(-1) > lead).tolist()
    return [*is_sure, False].index(False)


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _model(name: str) -> torch.nn.Module:
    if name not in _made:
        _made[name] = MODELS[name]()
    return _made[name]


class Script:
    """Requests of one model: the first prompt alone, then all others beside each other, from what it left behind."""

    def __init__(self, runner: ModelRunner, *, lag: int, chunk_len: int, num_out: int) -> None:
        self._executor = StepExecutor(runner, num_slots=SLOTS, max_tokens_per_step=64)
        self._executor.begin_epoch(1)
        self._size, self._lag, self._chunk_len, self._num_out = runner.page_size, lag, chunk_len, num_out
        self._launched: deque[tuple[StepHandle[StepResult], list[int]]] = deque()
        self._pages = iter(range(runner.num_pages - 1, -1, -1))
        self._decodes: list[int] = []
        self._num_steps = 0
        self.ids: dict[int, list[int]] = {}

    def run(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        stem_pages = self._add(0, prompts[0], [], 0)
        self._decode(self._num_out - 1)
        self._step(releases=(Release(slot=0, generation=1),), is_decoding=False)
        for slot, (prompt, cached) in enumerate(zip(prompts[1:], _CACHED, strict=True), start=1):
            self._add(slot, prompt, stem_pages, cached)
        self._decode(self._num_out)
        while self._launched:
            self._take()
        return [self.ids[slot][: self._num_out] for slot in range(len(prompts))]

    def _add(self, slot: int, prompt: list[int], stem_pages: list[int], cached: int) -> list[int]:
        """A request whose first `cached` tokens are in the stem's pages, of which a partly shared one is copied."""
        size = self._size
        num_full, num_copied = divmod(cached, size)
        full = np.array(stem_pages[:num_full], np.int32)
        total = len(prompt) + 2 * self._num_out
        own = [next(self._pages) for _ in range(-(-total // size) - num_full)]
        copies = ()
        if num_copied:
            copies = (PageCopy(source_page=stem_pages[num_full], target_page=own[0], num_tokens=num_copied),)
        admit = Admit(
            slot=slot,
            generation=1,
            request_id=f"r{slot}",
            prompt_ids=np.array(prompt, np.int32),
            max_total_len=total,
            sampling=GREEDY,
            cached_len=cached,
            cached_pages=full,
            cached_page_generations=self._executor.records.generations[full],
        )
        self.ids[slot] = []
        parts = {
            "admits": (admit,),
            "grants": (Grant(slot=slot, pages=np.array(own, np.int32)),),
            "page_copies": copies,
        }
        for start in range(cached, len(prompt), self._chunk_len):
            length = min(self._chunk_len, len(prompt) - start)
            is_last = start + length == len(prompt)
            self._step(chunk=Chunk(slot=slot, length=length), sampled=[slot] if is_last else [], **parts)
            parts = {}
        self._decodes.append(slot)
        return own

    def _decode(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(
        self, *, chunk: Chunk | None = None, sampled: Sequence[int] = (), is_decoding: bool = True, **parts: object
    ) -> None:
        if not is_decoding:
            self._decodes = []
        self._num_steps += 1
        plan = StepPlan(
            epoch=1,
            step_id=self._num_steps,
            chunks=() if chunk is None else (chunk,),
            decode_set=np.array(self._decodes, np.int32),
            **parts,
        )
        self._launched.append((self._executor.launch(plan), [*self._decodes, *sampled]))
        while len(self._launched) > self._lag:
            self._take()

    def _take(self) -> None:
        step, slots = self._launched.popleft()
        ids = iter(step.result().ids.tolist())
        for slot in slots:
            self.ids[slot].append(next(ids))


def _check(runner: ModelRunner, name: str, *, lag: int, chunk_len: int, num_out: int = NUM_OUT) -> None:
    prompts = prompts_of(name)
    assert Script(runner, lag=lag, chunk_len=chunk_len, num_out=num_out).run(prompts) == [
        greedy_ids(_model(name), prompt, num_out)[0] for prompt in prompts
    ]


@pytest.mark.parametrize(("page_size", "cuda_graphs"), [(1, True), (16, True), (16, False)])
def test_greedy_ids_are_those_of_transformers(name: str, page_size: int, cuda_graphs: bool, tmp_path: Path) -> None:
    _model(name).save_pretrained(tmp_path)
    runner = load_cuda_runner(tmp_path, replace(SETTINGS, page_size=page_size, cuda_graphs=cuda_graphs))
    for lag, chunk_len in ((0, 7), (1, 64), (2, 16)):
        runner.clear()
        _check(runner, name, lag=lag, chunk_len=chunk_len)


def test_greedy_ids_by_plain_attention_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    _model(name).save_pretrained(tmp_path)
    settings = replace(SETTINGS, attention_backend="torch", cuda_graphs=False)
    _check(load_cuda_runner(tmp_path, settings), name, lag=1, chunk_len=16)


@pytest.mark.parametrize(("page_size", "cuda_graphs"), [(1, True), (16, False)])
def test_greedy_ids_by_flashinfer_over_float16_pages(
    name: str, page_size: int, cuda_graphs: bool, tmp_path: Path
) -> None:
    """Heads of 12 to 64, as far as rounding keys and values cannot decide which id it is."""
    pytest.importorskip("flashinfer")
    _model(name).save_pretrained(tmp_path)
    settings = replace(SETTINGS, attention_backend="flashinfer", page_size=page_size, cuda_graphs=cuda_graphs)
    runner, prompts = load_cuda_runner(tmp_path, settings), prompts_of(name)
    num_sure = 0
    for prompt, got in zip(prompts, Script(runner, lag=2, chunk_len=16, num_out=NUM_OUT).run(prompts), strict=True):
        ids, _ = greedy_ids(_model(name), prompt, NUM_OUT)
        count = sure_len(_model(name), prompt, ids, _FLOAT16_LEAD)
        assert got[:count] == ids[:count]
        num_sure += count
    assert num_sure > len(prompts) * NUM_OUT // 3


@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_greedy_ids_in_two_bytes_are_those_in_four(attention: str, dtype: str, tmp_path: Path) -> None:
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    for prompt in prompts_of("wide"):
        assert greedy_ids(_model("wide"), prompt, _SURE_OUT)[1] > _SURE_LEAD
    _model("wide").save_pretrained(tmp_path)
    for page_size, cuda_graphs in ((1, True), (16, True), (16, False)):
        settings = replace(
            SETTINGS, dtype=dtype, attention_backend=attention, page_size=page_size, cuda_graphs=cuda_graphs
        )
        _check(load_cuda_runner(tmp_path, settings), "wide", lag=1, chunk_len=16, num_out=_SURE_OUT)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_captured_ids_of_other_families_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = family_model(name)
    runner = load_cuda_runner(family_folder(model, tmp_path), replace(SETTINGS, page_size=16))
    _check_logits_and_ids(runner, model, name)


@pytest.mark.parametrize("architecture", FALLBACK_MODELS)
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_models_without_a_family_give_the_logits_and_ids_of_transformers(
    architecture: str, cuda_graphs: bool, tmp_path: Path
) -> None:
    """Dense ones are captured too: their modules never wait for the device."""
    model = fallback_model(architecture, **FALLBACK_MODELS[architecture])
    model.save_pretrained(tmp_path)
    settings = replace(SETTINGS, page_size=16, cuda_graphs=cuda_graphs, model_impl="transformers")
    runner = load_cuda_runner(tmp_path, settings)
    assert isinstance(runner, DeviceRunner)
    is_captured = bool(runner.forwards.decodes.graphs.sizes)
    assert is_captured == cuda_graphs or "Olmoe" in architecture
    _check_logits_and_ids(runner, model, architecture)


def _check_logits_and_ids(runner: ModelRunner, model: PreTrainedModel, name: str) -> None:
    assert isinstance(runner, DeviceRunner)
    ids = np.random.default_rng(1).integers(0, _FAMILY_VOCAB, 60).astype(np.int32)
    with torch.inference_mode():
        want = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    segment = Segment(slot=1, ids=ids, start=0, pages=np.array([7, 3, 9, 1], np.int32))
    (got,) = runner.logits([segment])
    np.testing.assert_allclose(got, want, rtol=0, atol=_FAMILY_TOLERANCE * want.std())
    runner.clear()
    prompts = [[token % _FAMILY_VOCAB for token in prompt] for prompt in prompts_of(name)]
    # A worker takes one list of longrope's factors for all lengths, transformers the long one beyond this length only.
    original_len = getattr(model.config, "original_max_position_embeddings", None) or 0
    prompts = [[*prompts[0][:original_len], *prompt] for prompt in prompts]
    for prompt, out in zip(prompts, Script(runner, lag=2, chunk_len=16, num_out=NUM_OUT).run(prompts), strict=True):
        expected, _ = greedy_ids(model, prompt, NUM_OUT)
        count = sure_len(model, prompt, expected, _FAMILY_LEAD)
        assert count > NUM_OUT // 4 and out[:count] == expected[:count]
