"""`radixmesh serve` on three folders of transformers' save_pretrained, one of a family that has no code here.

The seconds to the first answer are printed: run with -s.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from support.containers import free_port
from support.llama_folders import TINY_LLAMA
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from radixmesh.daemons.worker.models.registry import model_families

DEADLINE_S = 120.0
PROMPT = "The Tyger"
NUM_TOKENS = 8
# Random weights large enough for one likeliest token, by a clear margin.
_STD = 0.3
_SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
_OURS = {"intermediate_size": 64, "num_key_value_heads": 2, "initializer_range": _STD}


def _model(name: str, vocab_size: int) -> PreTrainedModel:
    torch.manual_seed(7)
    match name:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**_SIZES, **_OURS, vocab_size=vocab_size))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**_SIZES, **_OURS, head_dim=16, vocab_size=vocab_size))
        case _:
            return Starcoder2ForCausalLM(Starcoder2Config(**_SIZES, **_OURS, vocab_size=vocab_size))


_FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("llama", "qwen3")]


@pytest.mark.parametrize("name", [*_FULL, "starcoder2"])
def test_a_folder_of_save_pretrained_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    model = _model(name, len(tokenizer)).eval()
    model.save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / name)
    has_family = model.config.architectures[0] in model_families().names
    assert has_family == (name != "starcoder2"), "the third has no family of its own"
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    seconds, got = _served(tmp_path, name, ids[0].tolist())
    print(f"{name}: {seconds:.1f} s from the command to the first answer")
    assert len(got) == NUM_TOKENS and got == _greedy(model, ids, got)


def _greedy(model: PreTrainedModel, ids: torch.Tensor, got: list[int]) -> list[int]:
    """The likeliest ids; of two that are as likely up to rounding, the one that was got."""
    expected: list[int] = []
    with torch.inference_mode():
        for token in got:
            logits = model(ids).logits[0, -1]
            best = int(logits.argmax())
            expected.append(token if logits[token] > logits[best] - 1e-4 else best)
            ids = torch.cat([ids, torch.tensor([[expected[-1]]])], 1)
    return expected


def _served(folder: Path, name: str, ids: list[int]) -> tuple[float, list[int]]:
    """Seconds from the command to the first answer, and the answer's ids."""
    command = [sys.executable, "-m", "radixmesh.cli", "serve", str(folder / name), "--gpu", "cpu", "--port", "PORT"]
    port, grpc_port = free_port(), free_port()
    command = [str(port) if word == "PORT" else word for word in command] + ["--grpc-port", str(grpc_port)]
    started = time.monotonic()
    with (folder / "output").open("w+") as output:
        environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)
        try:
            body = {"model": name, "input_ids": ids}
            body["sampling_params"] = {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
            while time.monotonic() - started < DEADLINE_S:
                assert process.poll() is None, (folder / "output").read_text()
                try:
                    answer = httpx.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=DEADLINE_S)
                except httpx.TransportError:
                    time.sleep(0.05)
                    continue
                if answer.status_code == 200:
                    seconds = time.monotonic() - started
                    whole = answer.json()
                    return seconds, whole.get("output_ids") or whole["meta_info"]["output_ids"]
                time.sleep(0.1)
            pytest.fail((folder / "output").read_text())
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            finally:
                process.kill()
                process.wait()
