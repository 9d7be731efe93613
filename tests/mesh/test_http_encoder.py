"""/v1/embeddings of an encoder, through a whole mesh, against what transformers gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.http import http_client
from support.mesh import running_mesh
from support.small_tokenizers import TEXTS, byte_level, write_folder
from transformers import XLMRobertaConfig, XLMRobertaModel


@pytest.mark.asyncio
async def test_embeddings_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = max(tokenizer.get_vocab().values()) + 1
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=300,
    )
    model = XLMRobertaModel(config).eval()
    folder = write_folder(tmp_path / "encoder", tokenizer)
    model.save_pretrained(folder)
    async with running_mesh("cpu", model="encoder", folder=folder) as mesh, http_client(mesh) as http:
        answer = await http.post("/v1/embeddings", json={"model": "encoder", "input": list(TEXTS)})
        assert answer.status_code == 200, answer.text
        for entry, text in zip(answer.json()["data"], TEXTS, strict=True):
            ids = torch.tensor([tokenizer.encode(text).ids])
            with torch.inference_mode():
                expected = model(ids).last_hidden_state[0].mean(dim=0).numpy()
            assert np.abs(np.array(entry["embedding"]) - expected).max() <= 1e-4
        refused = await http.post("/v1/completions", json={"model": "encoder", "prompt": "a", "max_tokens": 1})
        assert refused.status_code == 400, refused.text
