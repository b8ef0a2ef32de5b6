"""Chats by the templates of tokenizers: ids and masks are those of transformers, or it
is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrain.data.chats.loss_mask import EncodedChat, encode_chat
from mtrain.data.chats.messages import Chat, parse_chat
from mtrain.data.chats.template import ChatFormat
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import CorruptData
from tests.support.chats import TEMPLATES, folder_of, template_of, turns
from tests.support.tables import tables

TABLES = tables("chat_templates")

CHATS = {
    "turns of one line": turns("What is it?", "It is a cat.", " and 12?", "42  ", "naïve", "no"),
    "letters of many bytes": turns("日本", "☃ naïve 🙂", "🙂", "日本"),
    "lines and spaces": turns("x  y\n", " \n z\n\n  w", "\t", "a\tb "),
    "a question behind it": turns("a", "b", "c"),
    "code": turns("def f(x):\n    return x", "def g():\n\n    return '<b>'\n"),
    "special tokens in a text": turns("</s><|im_end|> [INST]", "<eos> ok"),
}
SYSTEM = [{"role": "system", "content": "Be kind.\nSpeak."}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """Return a folder of each kind, with and without `{% generation %}`."""
    home = tmp_path_factory.mktemp("tokenizers")
    return {
        (kind, marked): folder_of(home / f"{kind}-{marked}", kind, marked=marked).parent
        for kind in TEMPLATES
        for marked in (False, True)
    }


@pytest.fixture(scope="module")
def theirs(folders: dict[tuple[str, bool], Path]) -> dict[str, Any]:
    """Return the tokenizers of transformers."""
    from transformers import PreTrainedTokenizerFast

    return {
        kind: PreTrainedTokenizerFast.from_pretrained(folders[kind, True]) for kind in TEMPLATES
    }


def ours(folder: Path, made: Chat, loss_on: str = "assistant") -> EncodedChat:
    return encode_chat(made, ChatFormat(folder), Tokenizer(folder / "tokenizer.json"), loss_on)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_chat_template_ids_and_masks_equal_transformers(
    kind: str, folders: dict[tuple[str, bool], Path], theirs: dict[str, Any]
) -> None:
    for messages in CHATS.values():
        for given in (messages, [*SYSTEM, *messages]) if kind != "gemma" else (messages,):
            their = theirs[kind].apply_chat_template(
                given, return_dict=True, return_assistant_tokens_mask=True
            )
            for marked in (
                True,
                False,
            ):  # without marks, turns are found between the texts of the first messages
                found = ours(folders[kind, marked], parse_chat({"messages": given}))
                assert found.ids.tolist() == their["input_ids"], (given, marked)
                assert found.learned.astype(int).tolist() == their["assistant_masks"], (
                    given,
                    marked,
                )


@pytest.mark.parametrize("marked", [True, False])
def test_chat_template_tools_and_calls_equal_transformers(
    marked: bool, folders: dict[tuple[str, bool], Path], theirs: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "é": None}}}
    messages = [
        *SYSTEM,
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    their = theirs["chatml"].apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    found = ours(folders["chatml", marked], parse_chat({"messages": messages, "tools": tools}))
    assert (found.ids.tolist(), found.learned.astype(int).tolist()) == (
        their["input_ids"],
        their["assistant_masks"],
    )
    assert "<tool_call>" in theirs["chatml"].decode(found.ids[found.learned])


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("kind", ["chatml", "llama3", "mistral"])
def test_chat_template_last_turn_and_all_tokens_are_options(
    kind: str, marked: bool, folders: dict[tuple[str, bool], Path], theirs: dict[str, Any]
) -> None:
    made = parse_chat({"messages": turns("What is it?", "It is a cat.", "and?", "12 + 30")})
    last, whole = (ours(folders[kind, marked], made, loss_on) for loss_on in ("last", "all"))
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}[kind]
    assert theirs[kind].decode(last.ids[last.learned]).strip() == f"12 + 30{end}"
    assert whole.learned.all()
    assert whole.ids.tolist() == last.ids.tolist()


def test_chat_template_sharegpt_equals_messages(folders: dict[tuple[str, bool], Path]) -> None:
    said = [
        ("human", "What?"),
        ("gpt", "It."),
        ("human", "1 + 2"),
        ("function_call", '{"name": "add", "arguments": {}}'),
    ]
    said += [("observation", "3"), ("gpt", "3")]
    tools = '[{"type": "function", "function": {"name": "add"}}]'
    given = {
        "conversations": [{"from": who, "value": text} for who, text in said],
        "system": "S",
        "tools": tools,
    }
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    openai = [
        *turns("What?", "It.", "1 + 2", system="S"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    one = parse_chat(given)
    other = parse_chat(
        {"messages": openai, "tools": [{"type": "function", "function": {"name": "add"}}]}
    )
    assert one == other
    assert ours(folders["chatml", True], one).learned.any()


NO_PROOF = TABLES["no_proof"]


@pytest.mark.parametrize("name", NO_PROOF)
def test_chat_template_without_ownership_is_refused(name: str, tmp_path: Path) -> None:
    template, said = NO_PROOF[name]
    folder_of(tmp_path, "chatml")
    (tmp_path / "own.jinja").write_text(template)
    form = ChatFormat(tmp_path, tmp_path / "own.jinja")
    made = parse_chat({"messages": turns("What is it?", "It is a cat.", "and?", "12 + 30")})
    with pytest.raises(CorruptData, match=said) as refused:
        encode_chat(made, form, Tokenizer(tmp_path / "tokenizer.json"), "assistant")
    if "generation" not in template:
        assert "has no {% generation %}" in str(refused.value)
        assert "own.jinja" in str(refused.value)


def test_chat_template_mask_off_by_one_is_found(
    folders: dict[tuple[str, bool], Path], theirs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show that the comparison with transformers can fail."""
    from mtrain.data.chats import loss_mask

    monkeypatch.setattr(loss_mask, "_end", lambda text, start, ends: len(text))
    given = turns("What is it?", "It is a cat.")
    their = theirs["chatml"].apply_chat_template(
        given, return_dict=True, return_assistant_tokens_mask=True
    )
    found = ours(folders["chatml", False], parse_chat({"messages": given}))
    assert found.learned.astype(int).tolist() != their["assistant_masks"]


def test_chat_template_of_several_tool_template_serves_tools(tmp_path: Path) -> None:
    import json

    folder_of(tmp_path, "chatml")
    several = [
        {"name": "default", "template": template_of("chatml", marked=False)},
        {"name": "tool_use", "template": "T" + template_of("chatml", marked=True)},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    form = ChatFormat(tmp_path)
    messages = turns("a", "b")
    assert form.write(messages, [{"name": "x"}], prompt=False).text.startswith("T")
    assert form.write(messages, prompt=False).text.startswith("<|im_start|>")
    assert form.marks(with_tools=True)
    assert not form.marks(with_tools=False)
