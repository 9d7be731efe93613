"""Chat templates: equal to what transformers renders, typed errors for what does not fit."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from support.small_tokenizers import byte_level, write_folder

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.tokenize.chat import Chat, read_message, read_template_args, read_tools
from radixmesh.daemons.runtime.tokenize.chat_template import ChatTemplate

TINY = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.content is defined %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

LLAMA_LIKE = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system = messages[0]['content'] | trim %}
{% else %}
    {% set loop_messages = messages %}
    {% set system = '' %}
{% endif %}
{% if tools %}
    Tools:
    {% for tool in tools %}
{{ tool | tojson(indent=2) }}
    {% endfor %}
{% endif %}
{% for m in loop_messages %}
    {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate <user> & <assistant>') }}
    {% endif %}
    {% if loop.first and system %}
[INST] <<SYS>>{{ system }}<</SYS>> {{ m['content'] | trim }} [/INST]
    {% elif m['role'] == 'user' %}
[INST] {{ m['content'] | trim }} [/INST]
    {% else %}
{{ m['content'] | trim }} {{ eos_token }}
    {% endif %}
{% endfor %}"""

REASONING = """{% set ns = namespace(last=-1) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}
{% if m.role == 'system' %}{% continue %}{% endif %}
<{{ m.role }}>{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}{% endif %}
{% generation %}{% set inner = m.content %}{{ inner }}{% endgeneration %}{{ inner }}</{{ m.role }}>
{% endfor %}
{% if add_generation_prompt %}
<assistant>{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{% endif %}
{% if documents %}{{ documents | length }} documents{% endif %}"""

TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m.thinking }}{{ m.content | trim }}{% endfor %}"

TEMPLATES = {"trimming": TRIMMING, "chatml": CHATML, "llama_like": LLAMA_LIKE, "reasoning": REASONING}

TOOL = {"type": "function", "function": {"name": "add", "description": "a < b & 'c' é", "parameters": {"x": [1, None]}}}
CHATS: dict[str, list[dict[str, object]]] = {
    "one": [{"role": "user", "content": "Hello <there> & 'you'\n "}],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "日本 😀"},
        {"role": "assistant", "content": "Yes. "},
        {"role": "user", "content": "Why?"},
    ],
    "open": [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": " I think "}],
    "tool_calls": [
        {"role": "user", "content": "1+1"},
        {
            "role": "assistant",
            "content": "",
            "name": None,
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "z": "é<"}}}],
        },
    ],
    "reasoning": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning": "because", "thinking": None},
    ],
}


@cache
def oracle(name: str, folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    written = {
        name: write_folder(root / name, byte_level(), chat_template=source) for name, source in TEMPLATES.items()
    }
    # The same template in a file of its own goes before the config's.
    (written["chatml"] / "chat_template.jinja").write_text(CHATML + "{# file #}")
    return {**written, "tiny": TINY}


@pytest.mark.parametrize("chat_name", sorted(CHATS))
@pytest.mark.parametrize("template_name", [*sorted(TEMPLATES), "tiny"])
@pytest.mark.parametrize(
    "args",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": [TOOL]},
        {"template_args": {"enable_thinking": False, "bos_token": "<B>", "documents": [{"title": "t", "text": "x"}]}},
    ],
    ids=["default", "no_prompt", "continue", "tools", "args"],
)
def test_equal_to_transformers(
    folders: dict[str, Path], template_name: str, chat_name: str, args: dict[str, object]
) -> None:
    folder = folders[template_name]
    messages = CHATS[chat_name]
    try:
        expected = oracle(template_name, folder).apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=args.get("add_generation_prompt", True),
            continue_final_message=args.get("continue_final_message", False),
            tools=args.get("tools"),
            **args.get("template_args", {}),
        )
    except Exception:
        expected = None
    chat = Chat(messages=messages, **args)
    if expected is None:
        with pytest.raises(MeshError) as error:
            ChatTemplate.load(folder).render(chat)
        assert error.value.reason == ErrorReason.ERROR_REASON_INVALID_CHAT
    else:
        assert ChatTemplate.load(folder).render(chat) == expected


def test_most_cases_of_the_comparison_render(folders: dict[str, Path]) -> None:
    """The comparison above would also pass if both sides always failed."""
    for name in ("chatml", "llama_like", "reasoning"):
        text = ChatTemplate.load(folders[name]).render(Chat(messages=CHATS["one"]))
        assert "Hello <there> & 'you'" in text


def test_tools_pick_the_template_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"}, {})
    messages = [{"role": "user", "content": "x"}]
    assert template.render(Chat(messages=messages)) == "plain"
    assert template.render(Chat(messages=messages, tools=[])) == "with tools"


def test_strftime_now_is_there() -> None:
    text = ChatTemplate({"default": "{{ strftime_now('%Y') }}"}, {}).render(Chat(messages=[{"role": "user"}]))
    assert text.isdigit() and len(text) == 4


@pytest.mark.parametrize(
    ("source", "chat", "part"),
    [
        ("{{ raise_exception('no system role') }}", Chat(messages=[{"role": "u"}]), "no system role"),
        ("{{ messages[0].content + 1 }}", Chat(messages=[{"role": "u", "content": "x"}]), "refuses this chat"),
        ("{{ missing.key }}", Chat(messages=[{"role": "u"}]), "undefined"),
        ("{{ messages.__class__.__mro__ }}", Chat(messages=[{"role": "u"}]), "unsafe"),
        ("x", Chat(messages=[]), "at least one message"),
        ("x", Chat(messages=[{"role": "u", "content": "c"}], continue_final_message=True), "excludes"),
        (
            "x",
            Chat(messages=[{"role": "u", "content": "c"}], continue_final_message=True, add_generation_prompt=False),
            "cannot be continued",
        ),
        (
            "x",
            Chat(messages=[{"role": "u"}], continue_final_message=True, add_generation_prompt=False),
            "needs content",
        ),
    ],
)
def test_chats_that_do_not_fit(source: str, chat: Chat, part: str) -> None:
    with pytest.raises(MeshError) as error:
        ChatTemplate({"default": source}, {}).render(chat)
    assert error.value.reason == ErrorReason.ERROR_REASON_INVALID_CHAT
    assert part in error.value.message


def test_a_model_without_template_does_not_chat() -> None:
    template = ChatTemplate({}, {})
    assert template.is_empty
    with pytest.raises(MeshError, match="no chat template"):
        template.render(Chat(messages=[{"role": "user", "content": "x"}]))


def test_a_broken_template_is_a_broken_model() -> None:
    with pytest.raises(MeshError) as error:
        ChatTemplate({"default": "{% for %}"}, {})
    assert error.value.reason == ErrorReason.ERROR_REASON_BAD_CHECKPOINT


@pytest.mark.parametrize(
    "text", ["{", "[1]", '"x"', '{"role": "x"}', '{"content": null}', '{"a": "\\ud800"}', "[" * 100_000]
)
def test_extra_json_that_is_none(text: str) -> None:
    with pytest.raises(MeshError) as error:
        read_message("user", "hi", text)
    assert error.value.reason == ErrorReason.ERROR_REASON_INVALID_CHAT
    assert error.value.metadata == {"field": "extra_json"}


def test_json_parts_are_read() -> None:
    assert read_message("tool", "4", '{"name": "add", "n": 1.5}') == {
        "role": "tool",
        "content": "4",
        "name": "add",
        "n": 1.5,
    }
    assert read_tools("") is None
    assert read_tools(json.dumps([TOOL])) == [TOOL]
    assert read_template_args('{"enable_thinking": true}') == {"enable_thinking": True}
    for wrong in ("{}", "[1]", "null"):
        with pytest.raises(MeshError, match="tools_json"):
            read_tools(wrong)
    with pytest.raises(MeshError, match="messages"):
        read_template_args('{"messages": []}')
