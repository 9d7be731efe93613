"""Encoders on the CPU worker against transformers, in any chunks and beside any neighbours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
    XLMRobertaModel,
)

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.runner import ModelRunner, Segment

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}
_MODELS = {
    "bert": (BertModel, BertConfig),
    "bert_masked": (BertForMaskedLM, BertConfig),
    "roberta": (RobertaModel, RobertaConfig),
    "xlm_roberta": (XLMRobertaModel, XLMRobertaConfig),
    "xlm_roberta_masked": (XLMRobertaForMaskedLM, XLMRobertaConfig),
}


def _model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model_class, config_class = _MODELS[name]
    model: PreTrainedModel = model_class(config_class(**_SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.dim() > 1 else parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def _runner(folder: Path, **settings: object) -> ModelRunner:
    return load_cpu_runner(folder, threads=1, page_size=4, **settings)  # type: ignore[arg-type]


def _segments(slot: int, ids: np.ndarray, chunk: int) -> list[Segment]:
    return [
        Segment(
            slot=slot,
            ids=ids[start : start + chunk],
            start=start,
            pages=np.arange(-(-len(ids) // 4), dtype=np.int32),
            task=Task.EMBED,
            is_last_chunk=start + chunk >= len(ids),
        )
        for start in range(0, len(ids), chunk)
    ]


def _ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 97, length).astype(np.int32)


@pytest.mark.parametrize("name", _MODELS)
def test_vectors_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = _model(name)
    model.save_pretrained(tmp_path)
    length = 66 if name.startswith("bert") else 64
    ids = _ids(length)
    # An id of padding inside a prompt has a position of its own with RoBERTa.
    ids[7] = model.config.pad_token_id
    with torch.inference_mode():
        hidden = model.base_model(torch.from_numpy(ids).long()[None]).last_hidden_state[0].numpy()
    assert hidden.std() > 0.5
    for pooling, expected in (("mean", hidden.mean(axis=0)), ("cls", hidden[0]), ("last", hidden[-1])):
        runner = _runner(tmp_path, embed_pooling=pooling)
        assert runner.tasks == {Task.EMBED} and runner.max_total_len == length
        *firsts, last = _segments(0, ids, 17)
        assert all(runner.forward([segment])[0].vector is None for segment in firsts)
        vector = runner.forward([last])[0].vector
        assert vector is not None and np.abs(vector - expected).max() <= 1e-4


def test_neither_chunks_nor_neighbours_nor_an_aborted_prompt_change_bits(tmp_path: Path) -> None:
    _model("xlm_roberta").save_pretrained(tmp_path)
    runner = _runner(tmp_path)
    prompts = [_ids(40, 1), _ids(23, 2)]
    alone = [runner.forward(_segments(slot, ids, 100))[0].vector for slot, ids in enumerate(prompts)]
    runner.forward(_segments(0, _ids(30, 3), 10)[:2])
    chunks = [_segments(slot, ids, chunk) for slot, ids, chunk in ((0, prompts[0], 14), (1, prompts[1], 8))]
    for together in zip(*chunks, strict=True):
        outputs = runner.forward(together)
    for output, expected in zip(outputs, alone, strict=True):
        assert output.vector is not None and expected is not None
        assert np.array_equal(output.vector.view(np.int32), expected.view(np.int32))


def test_an_encoder_that_we_do_not_compute_is_refused_by_key(tmp_path: Path) -> None:
    model = _model("bert")
    model.config.is_decoder = True
    model.save_pretrained(tmp_path)
    with pytest.raises(MeshError, match="is_decoder") as caught:
        _runner(tmp_path)
    assert caught.value.reason_name == "UNSUPPORTED"
