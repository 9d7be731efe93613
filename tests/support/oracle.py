"""Output of transformers for a prompt: the reference for everything that the mesh answers with a tiny model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from radixmesh.daemons.runtime.arrays import FloatArray, as_ints
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.daemons.worker.sampling.sampler import sample_tokens
from support.jobs import MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """`ids` and the logprob of each, float32 [tokens]."""

    ids: list[int]
    logprobs: FloatArray


class Oracle:
    """transformers' logits, float32 on the CPU, and the project's sampler where a token is asked for."""

    def __init__(self, model: str = "tiny-llama") -> None:
        self._model = AutoModelForCausalLM.from_pretrained(MODELS / model, dtype=torch.float32).eval()

    def continue_with(self, prompt_ids: list[int], sampling: Sampling, num_tokens: int) -> Reference:
        """`num_tokens` tokens after the prompt, EOS ignored, one forward with a KV cache per token."""
        prompt = as_ints(prompt_ids)
        ids: list[int] = []
        logprobs: list[float] = []
        fed, past = torch.tensor([prompt_ids]), None
        for _ in range(num_tokens):
            with torch.inference_mode():
                out = self._model(input_ids=fed, past_key_values=past, use_cache=True)
            past, row = out.past_key_values, out.logits[0, -1]
            position = len(prompt_ids) + len(ids)
            wanted = SampleInput(sampling=sampling, position=position, prompt_ids=prompt, output_ids=as_ints(ids))
            (token,) = sample_tokens(row.numpy()[None], [wanted])
            logprobs.append(float(torch.log_softmax(row, -1)[token]))
            ids.append(token)
            fed = torch.tensor([[token]])
        return Reference(ids=ids, logprobs=np.array(logprobs, np.float32))

    def prompt_logprobs(self, prompt_ids: list[int]) -> FloatArray:
        """Logprob of every prompt token but the first, float32 [tokens - 1]."""
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([prompt_ids])).logits[0]
        rows = torch.log_softmax(logits[:-1], -1)
        values: FloatArray = rows.gather(1, torch.tensor(prompt_ids[1:])[:, None])[:, 0].numpy()
        return values
