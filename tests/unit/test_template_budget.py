"""Chat templates that would take for ever, or make too much: refused, typed, soon."""

from __future__ import annotations

import time

import pytest

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.tokenize.chat import Chat
from radixmesh.daemons.runtime.tokenize.chat_template import ChatTemplate

MANY = [{"role": "user", "content": "m" * 100}] * 4096
FOR_EVER = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a + b %}{% endfor %}{% endfor %}",
    "nested": "{% for m in messages %}{% for n in messages %}{% set c = m.content %}{% endfor %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}
TOO_MUCH = {
    "times": "{{ 'x' * 10 ** 9 }}",
    "list": "{{ (messages * 10 ** 6) | length }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "plus": "{% set s = namespace(x='x') %}{% for i in range(60) %}{% set s.x = s.x + s.x %}{% endfor %}{{ s.x }}",
    "concat": "{% set s = namespace(x='x') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}",
    "block": "{% set x %}{% for m in messages %}{{ messages }}{% endfor %}{% endset %}",
    "center": "{{ 'x' | center(10 ** 9) }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "filter": "{{ '%999999999d' | format(1) }}",
    "replace": "{{ (messages | tojson).replace('m', messages | tojson) }}",
    "replace filter": "{{ messages | tojson | replace('m', messages | tojson) }}",
    "join": "{{ (messages | tojson).join(messages | map(attribute='content') | list) }}",
    "indent": "{{ messages | tojson(indent=10 ** 9) }}",
    "output": "{% for m in messages %}{{ m.content * 30 }}{% endfor %}",
}


@pytest.mark.parametrize("name", FOR_EVER)
def test_a_template_that_does_not_end_is_ended(name: str) -> None:
    template = ChatTemplate({"default": FOR_EVER[name]}, {})
    since_s = time.thread_time()
    with pytest.raises(MeshError) as error:
        template.render(Chat(messages=MANY), max_s=0.2)
    assert error.value.reason == ErrorReason.ERROR_REASON_TOO_LARGE and "CPU" in error.value.message
    assert time.thread_time() - since_s < 5


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_template_that_makes_too_much_is_refused_before_it_has_it(name: str) -> None:
    template = ChatTemplate({"default": TOO_MUCH[name]}, {})
    with pytest.raises(MeshError) as error:
        template.render(Chat(messages=MANY))
    assert error.value.reason == ErrorReason.ERROR_REASON_TOO_LARGE and "4194304" in error.value.message


def test_the_budget_is_each_renderings_own() -> None:
    template = ChatTemplate(
        {"default": "{% for m in messages %}{{ loop.index }}{{ m.content }}{{ loop.length }}{% endfor %}"}, {}
    )
    short = [{"role": "user", "content": "x"}] * 2
    for _ in range(3):
        with pytest.raises(MeshError):
            template.render(Chat(messages=MANY), max_chars=1000)
        assert template.render(Chat(messages=short), max_chars=1000) == "1x22x2"
