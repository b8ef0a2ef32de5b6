"""Chats, and small tokenizers with chat templates of the kinds that are in use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHATML = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}[[
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>' }}]]{{- '\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = """{% for message in messages %}
{%- set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -%}
{{- (bos_token if loop.first else '') + header -}}
{%- if message['role'] == 'assistant' -%}[[{{- message['content'] | trim + '<|eot_id|>' -}}]]
{%- else -%}{{- message['content'] | trim + '<|eot_id|>' -}}{%- endif -%}
{% endfor %}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] + '\\n\\n' %}
{%- set rest = messages[1:] %}{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}
{%- for message in rest %}
{%- if message.role == 'user' %}{{- '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}[[{{- ' ' + message.content | trim + eos_token }}]]
{%- else %}{{- raise_exception('only user and assistant') }}{%- endif %}
{%- endfor %}"""
GEMMA = """{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<start_of_turn>' + role + '\\n' -}}
{%- if role == 'model' -%}[[{{- message['content'] | trim + '<end_of_turn>' -}}]]
{%- else -%}{{- message['content'] | trim + '<end_of_turn>' -}}{%- endif -%}{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}[[{{ message['content'] + eos_token }}]]{{ '\\n' }}
{%- else %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}"""
QWEN = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set body = message.content %}
{%- if message.reasoning_content and loop.last %}
{%- set body = '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' + message.content %}{%- endif %}
{{- '<|im_start|>assistant\\n' }}[[{{- body + '<|im_end|>' }}]]{{- '\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "zephyr": ZEPHYR,
    "qwen": QWEN,
}
"""Kind -> its template, with `[[` and `]]` around what the model says."""
SPECIAL = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": [
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|end_of_text|>",
    ],
    "mistral": ["<unk>", "<s>", "</s>"],
    "gemma": ["<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "zephyr": ["<unk>", "<s>", "</s>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}
NAMED: dict[str, dict[str, str]] = {
    "chatml": {"eos_token": "<|im_end|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
    "zephyr": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "qwen": {"eos_token": "<|im_end|>"},
}
TEXTS = [
    "You are kind. What is it?",
    "It is a cat, naïvely said: 12 + 30 = 42.",
    "def f(x):\n    return x",
    "日本 ☃",
]


def template_of(kind: str, *, marked: bool) -> str:
    """Return the template of a kind, with `{% generation %}` around the assistant's words if
    requested.
    """
    begin, end = ("{%- generation -%}", "{%- endgeneration -%}") if marked else ("", "")
    return TEMPLATES[kind].replace("[[", begin).replace("]]", end)


def tokenizer_of(kind: str) -> Tokenizer:
    """Make a tokenizer of byte-level BPE, or of sentencepiece's BPE with bytes, with a kind's
    special tokens.
    """
    if kind in ("mistral", "zephyr", "gemma"):
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token=SPECIAL[kind][0], fuse_unk=True))
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        made.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        made.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*"), "isolated")
        special = [*SPECIAL[kind], *(f"<0x{i:02X}>" for i in range(256))]
    else:
        made = Tokenizer(models.BPE())
        special = SPECIAL[kind]
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if special is SPECIAL[kind] else []
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS * 4, trainer)
    if special is SPECIAL[kind]:
        return made
    body = json.loads(made.to_str())  # the pieces of bytes are ordinary tokens
    body["added_tokens"] = [one for one in body["added_tokens"] if one["content"] in SPECIAL[kind]]
    return Tokenizer.from_str(json.dumps(body))


def folder_of(folder: Path, kind: str, *, marked: bool = False) -> Path:
    """Write a tokenizer.json and a tokenizer_config.json; return the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_of(kind).save(str(folder / "tokenizer.json"))
    settings = {**NAMED[kind], "chat_template": template_of(kind, marked=marked)}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


def turns(*said: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return alternating messages of user and assistant, after a system message if there is one."""
    roles = ("user", "assistant")
    found = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return [*([{"role": "system", "content": system}] if system is not None else []), *found]


def drawn_chats(home: Path, number: int) -> Path:
    """Write a tokenizer and `chats.jsonl` with chats of unlike lengths, some with a single learned
    token; return the folder.
    """
    dice = random.Random(5)
    folder_of(home, "chatml")
    said = [
        [str(dice.randrange(10)) * dice.randrange(1, 9) for _ in range(2)] for _ in range(number)
    ]
    chats_file(home / "chats.jsonl", [turns(*pair) for pair in said])
    return home


def chats_file(path: Path, chats: Iterable[Any]) -> Path:
    """Write a JSON Lines file of chats: lists of messages, or whole objects."""
    rows = [one if isinstance(one, dict) else {"messages": one} for one in chats]
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path
