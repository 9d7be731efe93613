"""The tiny model with chat templates that say how calls are written, and take tools and their answers."""

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

# As Llama 3 writes calls. Chats without tools are written as the model learned them.
LLAMA_TEMPLATE = (
    '{{ bos_token }}{% if tools %}<|system|>Call {"name": function name, "parameters": arguments} of '
    "{{ tools | tojson }}<|end_of_turn|>{% endif %}{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    "{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}{% endfor %}<|end_of_turn|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tool_folder(parent: Path, template: str = TEMPLATE) -> Path:
    """A copy of the model below `parent`."""
    folder = parent / FOLDER.name
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder
