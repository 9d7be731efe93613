"""Fingerprint of a model folder, without loading it: content hashes and the sizes that daemons agree on.

A folder is in Hugging Face format: config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
chat_template.jinja and *.safetensors. Two copies of one model give equal fingerprints wherever they lie and however
their JSON is laid out; anything that changes ids, text or logits changes one of them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

# The format's own limit: a longer header is no safetensors file.
_MAX_HEADER_BYTES = 100_000_000
# As many as a request may add stop ids.
_MAX_EOS_IDS = 256
# Parts of tokenizer.json that say how a batch is cut and padded, which no daemon here lets it do.
_BATCH_KEYS = ("truncation", "padding")

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """name: of the folder. vocab_size: ids of the model, every id is below it. max_total_len: prompt + output in
    tokens, 0 = the config does not say. eos_ids: ids that end an output, ascending; may be empty."""

    name: str
    vocab_size: int
    max_total_len: int
    eos_ids: tuple[int, ...]


def read_model_identity(folder: Path) -> ModelIdentity:
    """Name and sizes from config.json, EOS ids from generation_config.json or else config.json.

    Raises MeshError BAD_CHECKPOINT where a file is missing or broken.
    """
    outer = read_json_object(folder / "config.json")
    config = _text_config(outer)
    vocab_size = config.get("vocab_size", outer.get("vocab_size"))
    if not _is_count(vocab_size):
        raise _bad_file(folder / "config.json", "has no positive vocab_size")
    max_total_len = config.get("max_position_embeddings", 0)
    if not _is_count(max_total_len):
        max_total_len = 0
    generation = folder / "generation_config.json"
    eos = read_json_object(generation).get("eos_token_id") if generation.is_file() else None
    if eos is None:
        eos = config.get("eos_token_id", outer.get("eos_token_id"))
    assert isinstance(vocab_size, int) and isinstance(max_total_len, int)
    return ModelIdentity(
        name=folder.resolve().name,
        vocab_size=vocab_size,
        max_total_len=max_total_len,
        eos_ids=_ids_of(eos, folder),
    )


def tokenizer_fingerprint(folder: Path) -> str:
    """SHA-256 (hex) of tokenizer.json and the chat templates, independent of layout and key order.

    Raises MeshError BAD_CHECKPOINT where tokenizer.json is missing or broken.
    """
    tokenizer = {k: v for k, v in read_json_object(folder / "tokenizer.json").items() if k not in _BATCH_KEYS}
    digest = hashlib.sha256()
    _feed(digest, "tokenizer.json", _canonical(tokenizer))
    for name, template in sorted(read_chat_templates(folder).items()):
        _feed(digest, f"chat_template/{name}", template.encode())
    return digest.hexdigest()


def model_fingerprint(folder: Path) -> str:
    """SHA-256 (hex) of config.json and of each safetensors file's name, size and header; the weights are not read.

    Raises MeshError BAD_CHECKPOINT where config.json or all weights are missing, or a header is broken.
    """
    digest = hashlib.sha256()
    _feed(digest, "config.json", _canonical(read_json_object(folder / "config.json")))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _bad_file(folder / "model.safetensors", "is missing: the folder holds no *.safetensors")
    for file in files:
        _feed(digest, f"{file.name}:{file.stat().st_size}", _safetensors_header(file))
    return digest.hexdigest()


def read_chat_templates(folder: Path) -> Mapping[str, str]:
    """The folder's chat templates by name; the usual one is "default". Empty = the model has none.

    Template files (chat_template.jinja, additional_chat_templates/*.jinja) go before tokenizer_config.json, whose
    "chat_template" is a string or a list of {name, template}: the order that transformers uses.
    """
    templates: dict[str, str] = {}
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if templates or not config.is_file():
        return templates
    value = read_json_object(config).get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    for item in value if isinstance(value, list) else ():
        if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str):
            templates[item["name"]] = item["template"]
    return templates


def read_json_object(path: Path) -> Json:
    """The JSON object in a file. Raises MeshError BAD_CHECKPOINT if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise _bad_file(path, "is missing: name a folder in Hugging Face format") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _bad_file(path, f"cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise _bad_file(path, "holds no JSON object")
    return value


def _safetensors_header(file: Path) -> bytes:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if length > _MAX_HEADER_BYTES:
            raise _bad_file(file, "is no safetensors file: its header has no plausible length")
        header = stream.read(length)
    if len(header) != length:
        raise _bad_file(file, f"is truncated within its header of {length} bytes: copy it again")
    return header


def _feed(digest: hashlib._Hash, name: str, content: bytes) -> None:
    # Lengths go first, so that no two lists of (name, content) read the same.
    for part in (name.encode(), content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _canonical(value: object) -> bytes:
    # ASCII escapes also carry lone surrogates, which JSON allows and UTF-8 does not.
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _text_config(config: Json) -> Json:
    # Models with more than text keep the language model's part under this key.
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and "vocab_size" in inner else config


def _ids_of(value: object, folder: Path) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if len(ids) > _MAX_EOS_IDS:
        raise _bad_file(folder / "generation_config.json", f"names {len(ids)} EOS ids, more than {_MAX_EOS_IDS}")
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in ids):
        raise _bad_file(folder / "generation_config.json", f"names EOS ids that are no token ids: {str(value)[:200]}")
    return tuple(sorted(set(ids)))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _bad_file(path: Path, what: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_BAD_CHECKPOINT, f"{path} {what}", {"file": str(path)})
