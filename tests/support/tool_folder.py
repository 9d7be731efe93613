"""The tiny model with a chat template that says how calls are written, and takes tools and their answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "<|assistant|>{% if enable_thinking is defined %}<think>{% if not enable_thinking %}</think>{% endif %}{% endif %}"
)


def tool_folder(parent: Path) -> Path:
    """A copy of the model below `parent`."""
    folder = parent / FOLDER.name
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder
