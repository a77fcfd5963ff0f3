from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from moiety_text.chat import ChatTemplate
from moiety_text.errors import TemplateRefused

CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_LIKE = """\
{{- bos_token }}{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- for m in rest %}
  {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Roles must alternate user/assistant/user') }}
  {%- endif %}
  {%- if m['role'] == 'user' %}
{{ '[INST] ' ~ (system ~ '\\n\\n' if loop.first and system is defined else '') ~ m['content'] ~ ' [/INST]' }}
  {%- else %}
{%- generation %}{{ ' ' ~ m['content'] ~ eos_token }}{%- endgeneration %}
  {%- endif %}
{%- endfor %}
"""
WITH_TOOLS = """\
{%- set ns = namespace(tools_told=false, turns=0) %}
{%- macro describe(tool) %}
- {{ tool.function.name }}: {{ tool | tojson(indent=2) }} {{ tool.function | tojson }}
{%- endmacro %}
{%- if tools %}
{{ "Tools <&>:" }}{% for tool in tools %}{{ describe(tool) }}{% endfor %}
{%- set ns.tools_told = true %}{% endif %}
{%- for message in messages[::-1] %}
  {%- if message.role == 'system' %}{% continue %}{% endif %}
  {%- set ns.turns = ns.turns + 1 %}
  {%- if message.tool_calls %}{% for call in message.tool_calls %}
<call>{{ call.function.name }}({{ call.function.arguments | tojson }})</call>
  {%- endfor %}{% else %}
{{ loop.index }}/{{ ns.turns }} {{ message.role | upper | center(12) }}: {{ message.content }}
  {%- endif %}
  {%- if ns.turns >= 5 %}{% break %}{% endif %}
{%- endfor %}
{{ '*' * 5 }}{{ '%s!' % ns.tools_told }}{{ missing }}{{ 'thinking' if enable_thinking is defined and enable_thinking }}
"""
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": " 2+2? é🙂 "},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Thanks\n"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds <é>", "parameters": {"type": "object", "properties": {}}},
    }
]
CALLS: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": "'<x>'"}}}]}
]
SPECIALS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("template", [CHATML, LLAMA_LIKE, WITH_TOOLS])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompting", [False, True])
def test_rendering_equals_that_of_transformers(
    backends: dict[str, tokenizers.Tokenizer], template: str, tools: Any, prompting: bool
) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=backends["byte_level"], **SPECIALS)
    ours = ChatTemplate(template, SPECIALS)
    talks = [TALK, TALK[1:2], TALK + CALLS + TALK] if template is WITH_TOOLS else [TALK, TALK[1:]]
    for talk in talks:
        for extra in ({}, {"enable_thinking": True}):
            expected = theirs.apply_chat_template(
                talk, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=prompting, **extra
            )
            assert ours.render(talk, tools=tools, add_generation_prompt=prompting, extra=extra) == expected


def test_errors_that_the_template_raises_reach_the_caller() -> None:
    with pytest.raises(TemplateRefused, match="Roles must alternate"):
        ChatTemplate(LLAMA_LIKE, SPECIALS).render([TALK[2]])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nope.deeper }}",
        "{{ messages[0]['role'] + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages | tojson('x', 2, 3) }}",
    ],
)
def test_failing_expressions_are_refusals(source: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(source, {}).render(TALK)


def test_a_template_that_does_not_parse_is_refused_with_its_line() -> None:
    with pytest.raises(TemplateRefused, match="line 2"):
        ChatTemplate("a\n{% for %}", {})


def test_a_template_of_which_no_program_can_be_made_is_refused() -> None:
    with pytest.raises(TemplateRefused, match="outside loop"):
        ChatTemplate("{% break %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include 'x' %}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 10 ** 10000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{0.__class__}'.format(1) | tojson | length * ('a' * 60000000) | length }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        "{{ ([('a' * 9000000)] * 9000000) | join }}",
        "{{ [('a' * 9000000)] * 9000000 }}",
        "{{ [('a' * 9000000)] * 9000000 | tojson }}",
        "{{ ('a' * 9000000).replace('a', 'b' * 9000000) }}",
        "{{ ('a' * 9000000) | replace('a', 'b' * 9000000) }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = y %}{% endfor %}",
    ],
)
def test_a_hostile_template_is_stopped(source: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(source, {}).render(TALK)


def test_a_template_leaves_the_messages_as_they_were() -> None:
    before = [dict(message) for message in TALK]
    with pytest.raises(TemplateRefused):
        ChatTemplate("{% do messages[0].update({'role': 'x'}) %}{{ messages[0].update(role='x') }}", {}).render(TALK)
    assert before == TALK


def test_extra_variables_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages | length }}{{ add_generation_prompt }}{{ more }}", {})
    assert template.render(TALK, extra={"messages": [], "add_generation_prompt": 0, "more": "!"}) == "4True!"


def test_the_date_comes_from_the_given_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, now=lambda: datetime(2031, 2, 3))
    assert template.render([]) == "2031-02-03"
