"""A vocabulary as large as a shape's, without training: words of Python's own library and their beginnings."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

from radixmesh.daemons.runtime.model_folder.token_bytes import byte_level_table

_PIECES = re.compile(r" ?\w+|[^\w\s]+|\s+")
_MAX_PIECE = 14
_NUM_SPECIAL = 256  # The last ids, as in Llama 3.


def write_vocabulary(folder: Path, size: int, num_bytes: int = 12_000_000) -> None:
    """Writes tokenizer.json beside the config.json of a model: byte-level, all single bytes, the most frequent
    pieces of `num_bytes` of source text. Nothing is encoded with it: it has no merges."""
    letters = {byte: chr(code) for code, byte in byte_level_table().items() if byte < 256}
    texts = [bytes([byte]) for byte in range(256)]
    known = set(texts)
    for piece, _ in _pieces(num_bytes).most_common():
        text = piece.encode()
        if len(texts) >= size - _NUM_SPECIAL:
            break
        if text not in known:
            known.add(text)
            texts.append(text)
    # A library without its tests has fewer pieces.
    texts += [b" word%d" % number for number in range(size - _NUM_SPECIAL - len(texts))]
    ids = {"".join(letters[byte] for byte in text): index for index, text in enumerate(texts)}
    names = ("<|begin|>", "<|end|>")
    special = [
        {"id": size - _NUM_SPECIAL + index, "content": name, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, name in enumerate(names)
    ]
    ids |= {name: size - _NUM_SPECIAL + index for index, name in enumerate(names)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": ids, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _pieces(num_bytes: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        text = path.read_text(errors="ignore")
        for piece, count in Counter(_PIECES.findall(text)).items():
            for end in range(1, min(len(piece), _MAX_PIECE) + 1):
                counts[piece[:end]] += count
        num_bytes -= len(text)
        if num_bytes < 0:
            break
    return counts
