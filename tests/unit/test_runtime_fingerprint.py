"""Fingerprints change with what changes ids, text or logits, and with nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.small_tokenizers import byte_level, write_folder

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.fingerprint import (
    model_fingerprint,
    read_chat_templates,
    read_model_identity,
    tokenizer_fingerprint,
)
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary

TINY = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "small", byte_level(), chat_template="{{ messages }}")


def test_layout_of_json_does_not_count(folder: Path) -> None:
    before = tokenizer_fingerprint(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(dict(reversed(content.items())), indent=7))
    assert tokenizer_fingerprint(folder) == before
    # A template in a file of its own is the same template.
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_fingerprint(folder) == before


def test_tokens_and_template_count(folder: Path) -> None:
    prints = [tokenizer_fingerprint(folder)]
    (folder / "chat_template.jinja").write_text("{{ messages }}!")
    prints.append(tokenizer_fingerprint(folder))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    assert read_chat_templates(folder) == {"default": "{{ messages }}!", "tool_use": "x"}
    prints.append(tokenizer_fingerprint(folder))
    tokenizer = byte_level()
    tokenizer.add_tokens(["one more"])
    tokenizer.save(str(folder / "tokenizer.json"))
    prints.append(tokenizer_fingerprint(folder))
    assert len(set(prints)) == 4


def test_a_list_of_named_templates_is_read(folder: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_chat_templates(folder) == {"default": "d", "rag": "r"}


def test_the_model_is_known_by_config_and_weights(tmp_path: Path) -> None:
    copy = tmp_path / "tiny-llama"
    shutil.copytree(TINY, copy)
    prints = [model_fingerprint(TINY)]
    assert model_fingerprint(copy) == prints[0]
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    header_len = int.from_bytes(data[:8], "little")
    start = data.index(b"model.", 8, 8 + header_len)
    data[start : start + 6] = b"nodel."
    weights.write_bytes(data)
    prints.append(model_fingerprint(copy))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 1.5}))
    prints.append(model_fingerprint(copy))
    weights.rename(copy / "other.safetensors")
    prints.append(model_fingerprint(copy))
    assert len(set(prints)) == 4


def test_identity_is_read(folder: Path) -> None:
    identity = read_model_identity(folder)
    assert (identity.name, identity.max_total_len) == ("small", 4096)
    assert identity.eos_ids == (byte_level().token_to_id("</s>"),)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 3, 7]}')
    assert read_model_identity(folder).eos_ids == (3, 7)
    (folder / "config.json").write_text('{"text_config": {"vocab_size": 9, "max_position_embeddings": 5}}')
    identity = read_model_identity(folder)
    assert (identity.vocab_size, identity.max_total_len) == (9, 5)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", None),
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", "{}"),
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
    ],
)
def test_broken_folders_are_named(folder: Path, name: str, content: str | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(MeshError) as error:
        Vocabulary.load(folder)
    assert error.value.reason == ErrorReason.ERROR_REASON_BAD_CHECKPOINT
    assert name in error.value.metadata["file"]


@pytest.mark.parametrize("data", [b"", b"\x05\0\0", b"\xff" * 16, b"\x10\0\0\0\0\0\0\0{}"])
def test_weights_without_a_header_are_named(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(MeshError, match=r"model\.safetensors"):
        model_fingerprint(folder)
