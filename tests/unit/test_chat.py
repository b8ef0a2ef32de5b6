"""A chat renders as transformers renders it, and its template cannot leave the sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtrain.data.chats import template as chat
from mtrain.data.chats.template import ChatFormat
from mtrain.errors import ConfigError, CorruptData

CHATML = """{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('system comes first') }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {{- message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
TAGGED = """{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}
{% set ns.n = ns.n + 1 %}
{% if m.role == "assistant" %}
    {% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}
[{{ ns.n }}] {{ m | tojson }}
{% endif %}
{% if ns.n > 5 %}{% break %}{% endif %}
{% endfor %}"""
MESSAGES = [
    {"role": "system", "content": " Sei höflich. "},
    {"role": "user", "content": "<b>Hi</b>"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "and?"},
]
SETTINGS = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "model_max_length": 10**30,
}


def _format(folder: Path, template: object) -> ChatFormat:
    (folder / chat.SETTINGS_FILE).write_text(json.dumps({**SETTINGS, "chat_template": template}))
    return ChatFormat(folder)


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["chatml", "tagged"])
def test_chat_renders_as_transformers(template: str, tmp_path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True, **special
    )
    assert _format(tmp_path, template).render(MESSAGES) == expected


def test_chat_own_template_file_comes_first(
    tmp_path: Path,
) -> None:
    several = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    form = _format(tmp_path, several)
    assert form.render(MESSAGES) == "D"
    (tmp_path / chat.TEMPLATE_FILE).write_text("F")
    assert ChatFormat(tmp_path).render(MESSAGES) == "F"
    assert form.special("eos_token") == "</s>"


HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append('x') }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ namespace(__class__=1) }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ raise_exception('roles must be in turn') }}",
    "{% include '/etc/passwd' %}",
    "{% if",
]


@pytest.mark.parametrize("template", HOSTILE)
def test_chat_sandbox_escape_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        _format(tmp_path, template).render(MESSAGES)
    assert [problem.code for problem in refused.value.problems] == ["MT509"]


def test_chat_missing_template_or_jinja_states_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="has no chat_template"):
        ChatFormat(tmp_path).render(MESSAGES)
    form = _format(tmp_path, "x")
    monkeypatch.setattr(chat, "version", lambda name: "3.1.5")
    with pytest.raises(ConfigError, match=r"pip install 'mtrain\[chat\]'"):
        form.render(MESSAGES)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_chat_damaged_settings_are_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / chat.SETTINGS_FILE).write_bytes(content)
    with pytest.raises(CorruptData, match=r"tokenizer_config\.json"):
        ChatFormat(tmp_path).render(MESSAGES)
