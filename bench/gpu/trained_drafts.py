"""Speed of decodes with an EAGLE-3 head that was trained for its model, both on text found in installed packages.

    python bench/gpu/trained_drafts.py > bench/results/h200-trained-drafts.json
    python bench/gpu/trained_drafts.py --device cpu --small --model-s 20 --head-s 20

A Llama of --model-s seconds of training goes on with files that it has not seen: sources and documentation of Python
and of installed packages, of which one in fifty is held out. The head learns for --head-s seconds what the model
itself would say next, by its hidden states, on chains of drafts (compose/models/train_tiny_drafters.py). Then workers
alone serve one row after another, greedily and at temperature 1: one without drafts, one with chains and one with
lengths that adapt, of the same settings otherwise. They take turns, prompt by prompt, behind --warm-up prompts each
that do not count. Outputs are compared: other kernels round otherwise in bfloat16, so that some differ late; how many
tokens were the same first is told (same_tokens).

tokens_per_s: of one row's decodes by wall clock, plans two ahead, the prompt left out; the host's work is within.
speed_ups: of single prompts, the lowest and the highest. ms, device_ms: of a step by wall clock, and on the device,
from its launch or from the end of the step before: where ms is much more, the host takes that long for a step.
tokens_a_step: of a row that verifies. drafting: share of the steps with drafts. by_position: share of drafts at each
place that were accepted, with those before. compiled_late: kernels that were compiled while prompts were served.
--device cpu: the CPU worker, to see that the script runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "compose" / "models"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu.mesh import gpu_name
from support.plan_driver import PlanDriver
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from train_tiny_drafters import EAGLE_CONFIG, EagleHead, chain_loss
from transformers import LlamaConfig, LlamaForCausalLM

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.load_drafter import load_model_drafter
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_cuda_runner
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths
from radixmesh.daemons.worker.speculation.drafter import MOST_BEHIND
from radixmesh.daemons.worker.speculation.settings import Speculation, SpeculativeAlgorithm

_SEED = 5
_HELD_OUT = 50
"""One file of so many."""
_PROMPT_TOKENS = 256
_STEPS_AHEAD = 2
_SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".json")


class Sizes(NamedTuple):
    """Of the model, the text and the batches."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    text_bytes: int
    batch: int
    length: int
    head_batch: int
    head_length: int

    @property
    def hidden_layers(self) -> tuple[int, int, int]:
        return 1, self.num_layers // 2 - 1, self.num_layers - 4

    def config(self) -> dict[str, object]:
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.hidden_size // self.num_heads,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }

    def head_config(self) -> dict[str, object]:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        sizes = {name: self.config()[name] for name in (*names, "head_dim")}
        layers = {"eagle_aux_hidden_state_layer_ids": list(self.hidden_layers), "use_aux_hidden_state": True}
        return {**EAGLE_CONFIG, **sizes, "eagle_config": layers}


# 164 million parameters.
SIZES = Sizes(8192, 1024, 2816, 12, 16, 8, 60_000_000, 32, 512, 24, 256)
SMALL = Sizes(512, 64, 128, 5, 4, 2, 1_000_000, 4, 128, 2, 64)


class Text(NamedTuple):
    """tokens: of all files for training, one after the other. held_out: beginnings of files that are not among them."""

    tokens: torch.Tensor
    held_out: list[list[int]]
    tokenizer: Tokenizer


def read_text(sizes: Sizes, num_prompts: int) -> Text:
    files = list(_files(sizes.text_bytes))
    held_out, kept = files[::_HELD_OUT], [file for number, file in enumerate(files) if number % _HELD_OUT]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=sizes.vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(kept[: max(1, len(kept) // 8)], trainer)
    encoded = tokenizer.encode_batch_fast(kept, add_special_tokens=False)
    tokens = np.concatenate([np.array([0, *encoding.ids], np.int32) for encoding in encoded])
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(held_out, add_special_tokens=False)]
    long = [ids[:_PROMPT_TOKENS] for ids in prompts if len(ids) >= _PROMPT_TOKENS]
    return Text(torch.from_numpy(tokens), long[:num_prompts], tokenizer)


def _files(most_bytes: int) -> Iterator[str]:
    """Text of files in an order that is the same each time, each once."""
    paths = sysconfig.get_paths()
    folders = {Path(paths[name]) for name in ("stdlib", "purelib", "platlib")} | {Path(np.__file__).parents[1]}
    found = sorted({file for folder in folders for file in folder.rglob("*") if file.suffix in _SUFFIXES})
    random.Random(_SEED).shuffle(found)
    seen: set[int] = set()
    for file in found:
        try:
            text = file.read_text(encoding="utf-8")[:100_000]
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) < 500 or hash(text) in seen:
            continue
        seen.add(hash(text))
        most_bytes -= len(text)
        yield text
        if most_bytes < 0:
            return


class Schedule:
    """Share of the peak learning rate by the time that has gone: a warm-up of a twentieth, then a cosine to zero."""

    def __init__(self, optimizer: torch.optim.Optimizer, peak: float, seconds: float) -> None:
        self._optimizer, self._peak, self._seconds, self._began = optimizer, peak, seconds, time.monotonic()
        self.steps = 0

    def goes_on(self) -> bool:
        part = (time.monotonic() - self._began) / self._seconds
        self.steps += 1
        scale = min(20 * part + 0.01, 0.5 * (1 + math.cos(math.pi * min(part, 1))))
        for group in self._optimizer.param_groups:
            group["lr"] = self._peak * scale
        return part < 1


def _optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _batches(tokens: torch.Tensor, batch: int, length: int, device: str) -> Iterator[torch.Tensor]:
    """[batch, length] int64, pieces of the text at random places."""
    tokens = tokens.to(device)
    rng = torch.Generator(device=device).manual_seed(_SEED)
    offsets_L = torch.arange(length, device=device)
    while True:
        starts_B1 = torch.randint(len(tokens) - length, (batch, 1), generator=rng, device=device)
        yield tokens[starts_B1 + offsets_L].long()


def _stepped(module: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


def train_model(sizes: Sizes, tokens: torch.Tensor, seconds: float, device: str) -> tuple[LlamaForCausalLM, dict]:
    torch.manual_seed(_SEED)
    model = LlamaForCausalLM(LlamaConfig(**sizes.config(), attn_implementation="sdpa")).to(device)
    optimizer = _optimizer(model)
    schedule, losses = Schedule(optimizer, 2e-3, seconds), []
    for ids_BL in _batches(tokens, sizes.batch, sizes.length + 1, device):
        if not schedule.goes_on():
            break
        with torch.autocast(device, torch.bfloat16):
            logits_BLV = model(input_ids=ids_BL[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits_BLV.flatten(0, 1).float(), ids_BL[:, 1:].flatten())
        _stepped(model, optimizer, loss)
        losses.append(loss.detach())
    last = torch.stack(losses[-20:]).mean().item()
    about = {"parameters": sum(p.numel() for p in model.parameters()), "steps": len(losses)}
    about |= {"tokens": len(losses) * sizes.batch * sizes.length, "loss": round(last, 3)}
    return model.requires_grad_(False).eval(), about


def train_head(
    sizes: Sizes, model: LlamaForCausalLM, tokens: torch.Tensor, seconds: float, device: str
) -> tuple[EagleHead, dict]:
    """Labels are the ids that the model itself finds most likely behind each beginning of the text."""
    ids = torch.arange(sizes.vocab_size, device=device)
    head = EagleHead(model.model.embed_tokens.weight.float(), ids, sizes.head_config()).to(device)
    states: dict[int, torch.Tensor] = {}
    for layer in sizes.hidden_layers:
        model.model.layers[layer].register_forward_hook(
            lambda module, inputs, output, layer=layer: states.update(
                {layer: output if isinstance(output, torch.Tensor) else output[0]}
            )
        )
    optimizer = _optimizer(head)
    schedule, losses = Schedule(optimizer, 1e-3, seconds), []
    for ids_BL in _batches(tokens, sizes.head_batch, sizes.head_length, device):
        if not schedule.goes_on():
            break
        with torch.autocast(device, torch.bfloat16):
            with torch.no_grad():
                logits_BLV = model(input_ids=ids_BL, use_cache=False).logits
                labels_BL = torch.cat((ids_BL[:, :1], logits_BLV[:, :-1].argmax(dim=-1)), dim=1)
            features = [states[layer].float() for layer in sizes.hidden_layers]
            loss = chain_loss(head, ids_BL, features, labels_BL)
        _stepped(head, optimizer, loss)
        losses.append(loss.detach())
    last = torch.stack(losses[-20:]).mean().item()
    about = {"parameters": sum(p.numel() for p in head.parameters()), "steps": len(losses)}
    return head, about | {"loss": round(last, 3)}


def save(sizes: Sizes, model: LlamaForCausalLM, head: EagleHead, tokenizer: Tokenizer, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **sizes.config()}
    config |= {"torch_dtype": "bfloat16", "attention_bias": False, "mlp_bias": False}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    head.save(folder / "head")


Load = Callable[[Speculation | None, "DraftLengths | None"], ModelRunner]


def loader(model: Path, device: str) -> Load:
    def load_cpu(speculation: Speculation | None, lengths: DraftLengths | None) -> ModelRunner:
        runner = load_cpu_runner(model, page_size=1, num_pages=4096, threads=1, max_total_len=1024)
        assert isinstance(runner, CpuRunner)
        if speculation is not None:
            drafter = load_model_drafter(speculation, runner, model, "float32")
            runner.verify(drafter, max_drafts=speculation.max_drafts, lengths=lengths)
        return runner

    def load_cuda(speculation: Speculation | None, lengths: DraftLengths | None) -> ModelRunner:
        settings = DeviceSettings(
            dtype="bfloat16",
            attention_backend="triton",
            load_format="auto",
            page_size=1,
            num_pages=32_768,
            num_slots=8,
            max_tokens_per_step=512,
            max_total_len=2048,
            mem_fraction=0.5,
            cuda_graphs=True,
            use_pdl=True,
            deterministic=False,
            speculation=speculation,
            max_drafts=0 if speculation is None else speculation.max_drafts,
        )
        if speculation is None:
            return load_cuda_runner(model, settings)
        most = speculation.max_drafts
        return load_cuda_runner(
            model,
            settings,
            lambda runner: runner.verify(runner.network_drafter, max_drafts=most, lengths=lengths),
        )

    return load_cpu if device == "cpu" else load_cuda


class Served(NamedTuple):
    """A prompt's output. seconds, num_tokens, num_steps: of its decodes that were timed; device_ns, drafted, accepted:
    of these steps, one by one."""

    output: list[int]
    seconds: float
    num_tokens: int
    num_steps: int
    device_ns: list[int]
    drafted: list[int]
    accepted: list[int]


def serve(runner: ModelRunner, prompt: list[int], seed: int, num_tokens: int, temperature: float) -> Served:
    driver = PlanDriver(runner, lag=_STEPS_AHEAD, num_slots=8, max_tokens_per_step=512)
    sampling = Sampling(temperature=temperature, seed=seed)
    # Room for those plans that are ahead when the last token comes.
    driver.add(0, prompt, sampling, chunk_len=512, num_out=num_tokens + 40, min_tokens=0, suppressed=())
    while not driver.tokens[0]:
        driver.run()
    had, num_before, began = len(driver.tokens[0]), len(driver.results), time.perf_counter()
    while len(driver.tokens[0]) < num_tokens:
        driver.run()
    took = time.perf_counter() - began
    yielded, num_steps = len(driver.tokens[0]) - had, len(driver.results) - num_before
    driver.finish(0)
    timed = driver.results[num_before : num_before + num_steps]
    return Served(
        output=driver.tokens[0][:num_tokens],
        seconds=took,
        num_tokens=yielded,
        num_steps=num_steps,
        device_ns=[result.device_end_ns - result.device_start_ns for result in timed],
        drafted=[int(result.drafted.sum()) for result in timed],
        accepted=[int(result.accepted.sum()) for result in timed],
    )


def in_turns(
    runners: Mapping[str, ModelRunner], prompts: Sequence[list[int]], warm_up: int, num_tokens: int, temperature: float
) -> dict[str, list[Served]]:
    """Each prompt by one runner after the other, each time another one first; the first `warm_up` do not count."""
    served: dict[str, list[Served]] = {name: [] for name in runners}
    names = list(runners)
    for number, prompt in enumerate(prompts):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            served[name].append(serve(runners[name], prompt, number, num_tokens, temperature))
    return {name: of[warm_up:] for name, of in served.items()}


def row_of(got: Sequence[Served], plain: Sequence[Served], most: int) -> dict[str, object]:
    drafted = np.array([number for one in got for number in one.drafted])
    accepted = np.array([number for one in got for number in one.accepted])[drafted > 0]
    speeds = [_speed([ours]) / _speed([theirs]) for ours, theirs in zip(got, plain, strict=True)]
    same = [_same(ours.output, theirs.output) for ours, theirs in zip(got, plain, strict=True)]
    return {
        "tokens_per_s": round(_speed(got), 1),
        "plain_tokens_per_s": round(_speed(plain), 1),
        "speed_up": round(_speed(got) / _speed(plain), 3),
        "speed_ups": [round(min(speeds), 3), round(max(speeds), 3)],
        "tokens_a_step": round(float(1 + accepted.mean()), 3) if len(accepted) else 1.0,
        "drafting": round(float((drafted > 0).mean()), 3),
        "by_position": [round(float((accepted >= n).mean()), 3) for n in range(1, most + 1)] if len(accepted) else [],
        **_times(got),
        **{f"plain_{name}": of for name, of in _times(plain).items()},
        "same_tokens": [f"{number} of {len(plain[0].output)}" for number in same],
    }


def _speed(served: Sequence[Served]) -> float:
    return sum(one.num_tokens for one in served) / sum(one.seconds for one in served)


def _times(served: Sequence[Served]) -> dict[str, float]:
    ms = sum(one.seconds for one in served) / sum(one.num_steps for one in served) * 1e3
    device_ms = float(np.mean([ns for one in served for ns in one.device_ns])) * 1e-6
    return {"ms": round(ms, 3), "device_ms": round(device_ms, 3)}


class LateCompiles(logging.Handler):
    """Names of the kernels that were compiled while prompts were served."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kernels: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "radixmesh_fields", {})
        if record.getMessage() == "kernel_compiled_late":
            self.kernels.append(str(fields["kernel"]))
        else:
            print(json.dumps({record.getMessage(): {name: str(of) for name, of in fields.items()}}), file=sys.stderr)


def _same(ours: list[int], theirs: list[int]) -> int:
    pairs = zip(ours, theirs, strict=True)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(ours))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--model-s", type=float, default=55.0, help="seconds of training")
    parser.add_argument("--head-s", type=float, default=35.0)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=4, help="prompts ahead of those, for each way and temperature")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--drafts", type=int, nargs="+", default=[4])
    args = parser.parse_args()
    sizes, device, began = SMALL if args.small else SIZES, args.device, time.monotonic()

    def say(what: str, about: object = None) -> None:
        print(json.dumps({"at_s": round(time.monotonic() - began, 1), what: about}), file=sys.stderr, flush=True)

    late = LateCompiles()
    logging.getLogger().addHandler(late)
    text = read_text(sizes, args.prompts + args.warm_up)
    say("text", {"tokens": len(text.tokens), "prompts": len(text.held_out)})
    torch.backends.cuda.matmul.allow_tf32 = True
    model, about_model = train_model(sizes, text.tokens, args.model_s, device)
    say("model", about_model)
    head, about_head = train_head(sizes, model, text.tokens, args.head_s, device)
    say("head", about_head)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        save(sizes, model, head, text.tokenizer, folder)
        del model, head
        if device == "cuda":
            torch.cuda.empty_cache()
        load = loader(folder / "model", device)
        plain_runner, example = load(None, None), ""
        for most in args.drafts:
            speculation = Speculation(
                algorithm=SpeculativeAlgorithm("eagle3"), max_drafts=most, draft_model=folder / "head"
            )
            runners = {
                "plain": plain_runner,
                "chains": load(speculation, None),
                "adaptive": load(speculation, DraftLengths(8, most, catch_up=MOST_BEHIND)),
            }
            say("loaded", list(runners))
            late.kernels.clear()
            for temperature in (0.0, 1.0):
                served = in_turns(runners, text.held_out, args.warm_up, args.tokens, temperature)
                example = example or text.tokenizer.decode(served["plain"][0].output)[:400]
                for name in ("chains", "adaptive"):
                    case = {"drafts": most, "adaptive": name == "adaptive", "temperature": temperature}
                    rows.append({**case, **row_of(served[name], served["plain"], most)})
                    rows[-1]["compiled_late"] = late.kernels[:]
                    say("row", rows[-1])
            del runners
    machine = f"{gpu_name()}, {os.cpu_count()} cores" if device == "cuda" else platform.machine()
    found = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "sizes": sizes._asdict(),
        "text_tokens": len(text.tokens),
        "model": about_model,
        "head": about_head,
        "example": example,
        "rows": rows,
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
