"""Keys of chats and records: what they say of the loss is honoured, and what nothing reads is
refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.cli.main import main
from mtrain.data.chats.messages import parse_chat, parse_pair
from mtrain.data.image_text import parse_record
from mtrain.errors import CorruptData
from tests.support.chats import CHATML, chats_file, folder_of, template_of, turns
from tests.support.launched import light

SMALL = (
    "model.num_layers=2 model.vocab_size=700 data.seq_length=128 data.split=[1,0,0]"
    " trainer.eval_iters=0"
)
SMALL += " trainer.eval_interval=null samples=1"
OFF = [
    {"weight": 0},
    {"loss": False},
    {"train": False},
    {"loss_mask": 0},
    {"weight": 0.0, "train": False},
]
Preview = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("keys")
    folder_of(home / "plain", "chatml")
    folder_of(home / "marked", "chatml", marked=True)
    return home


@pytest.fixture
def preview(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Preview:
    """Return a function that runs `data preview` on chats and returns its exit code, the learned
    text of the first, and the messages.
    """

    def call(chats: list[Any], *words: str, kind: str = "plain") -> tuple[int, str, str]:
        file = chats_file(tmp_path / "chats.jsonl", chats)
        named = [f"data.tokenizer={home}/{kind}/tokenizer.json", f"data.cache_dir={tmp_path}/cache"]
        code = main(
            [
                "data",
                "preview",
                "data=sft",
                f"data.path={file}",
                *named,
                *SMALL.split(),
                *words,
                "--json",
            ]
        )
        said = capsys.readouterr()
        if code:
            return code, "", said.out + said.err
        found = json.loads(said.out)
        tokens = [token for document in found["samples"][0]["documents"] for token in document]
        text = "".join(token["text"] for token in tokens if token["weight"])
        return code, text, "\n".join(found["remarks"])

    return call


def corrected(**flags: Any) -> list[dict[str, Any]]:
    """Return a wrong answer with `flags` of its own, and its correction."""
    found = turns("2+2?", "WRONG", "look again", "four")
    found[1] |= flags
    return found


@pytest.mark.full
def test_record_excluded_answer_has_no_loss(home: Path, tmp_path: Path) -> None:
    file = chats_file(tmp_path / "chats.jsonl", [corrected(weight=0)])
    words = [
        "data=sft",
        f"data.path={file}",
        f"data.tokenizer={home}/plain/tokenizer.json",
        *SMALL.split(),
    ]
    done = light("data", "preview", *words, f"data.cache_dir={tmp_path}/cache", cwd=tmp_path)
    learned = re.findall(r" loss  +(.*)", done.stdout)
    assert done.returncode == 0, done.stderr
    assert "".join(learned).replace("|", "") == "four<im_end>"


@pytest.mark.sampled(9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["plain", "marked"])
@pytest.mark.parametrize("flags", OFF, ids=str)
def test_record_answer_may_be_context(flags: dict[str, Any], kind: str, preview: Preview) -> None:
    code, learned, _ = preview([corrected(**flags)], kind=kind)
    assert (code, learned) == (0, "four<|im_end|>")
    last = turns("2+2?", "four", "and 3+3?", "WRONG")
    last[3] |= flags
    assert preview([last], kind=kind)[:2] == (0, "four<|im_end|>")
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "WRONG", **flags}]
    sharegpt += [{"from": "human", "value": "again"}, {"from": "gpt", "value": "right"}]
    assert preview([{"conversations": sharegpt}], kind=kind)[:2] == (0, "right<|im_end|>")


def test_record_whole_chat_exclusion_covers_any_role(preview: Preview) -> None:
    every = preview([turns("2+2?", "WRONG", "look again", "four")], "data.loss_on=all")[1]
    assert "WRONG" in every
    left = preview([corrected(weight=0)], "data.loss_on=all")[1]
    assert left == every.replace("<|im_start|>assistant\nWRONG<|im_end|>\n", "")
    asked = turns("SECRET", "four")
    asked[0]["train"] = False
    assert "SECRET" not in preview([asked], "data.loss_on=all")[1]
    assert preview([asked])[1] == "four<|im_end|>", "a question is never learned, so it may say so"


@pytest.mark.parametrize(
    "flags", [{"weight": 1}, {"loss": True}, {"train": True, "loss_mask": 1}, {"weight": None}]
)
def test_record_included_answer_is_learned(flags: dict[str, Any], preview: Preview) -> None:
    assert preview([corrected(**flags)])[1] == "WRONG<|im_end|>four<|im_end|>"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("chats", "words", "said"),
    [
        ([corrected(weight=0.5)], (), "its weight is '0.5'"),
        ([corrected(loss="no")], (), "its loss is 'no'"),
        ([corrected(loss_mask=[0, 1])], (), "its loss_mask is"),
        ([corrected(weight=0, train=True)], (), "says both that it is learned and that it is not"),
        (
            [
                [
                    {"role": "user", "content": "q", "weight": 1},
                    {"role": "assistant", "content": "a"},
                ]
            ],
            (),
            "message 1, of u",
        ),
        ([corrected(weight=1)], ("data.loss_on=last",), "data.loss_on=last does not learn it"),
        (
            [[*turns("q"), {"role": "assistant", "content": "a", "weight": 0}]],
            (),
            "is not learned: remove the line",
        ),
        (
            [{"messages": turns("q", "a"), "weight": 0}],
            (),
            "the chat is not to be learned (weight: 0): remove the line",
        ),
        ([{"messages": turns("q", "a"), "weight": 0.3}], (), "its weight is '0.3'"),
        ([corrected(wieght=0)], (), "message 2 of messages has an unknown key: wieght"),
        ([corrected(wieght=0)], (), "did you mean weight?"),
        ([corrected(masked=True)], (), "data.ignored_keys=[masked]"),
        (
            [{"messages": turns("q", "a"), "functions": [{"name": "f"}]}],
            (),
            "an unknown key: functions",
        ),
        ([{"messages": turns("q", "a"), "completion": "b"}], (), "an unknown key: completion"),
        (
            [{"messages": turns("q", "a"), "prompt": "another"}],
            (),
            "its prompt is not one of its messages",
        ),
        (
            [
                [
                    {"role": "user", "content": [{"type": "text", "text": "q", "weight": 0}]},
                    *turns("", "a")[1:],
                ]
            ],
            (),
            "a part of",
        ),
    ],
)
def test_record_impossible_exclusion_names_line(
    chats: list[Any], words: tuple[str, ...], said: str, preview: Preview
) -> None:
    code, _, text = preview([turns("1", "2"), *chats], *words)
    assert code == 4
    assert "chats.jsonl:2: " in text
    assert said in text


def test_record_metadata_keys_are_known_others_named(preview: Preview) -> None:
    rows = [
        {
            "messages": turns("q", "a"),
            "id": 7,
            "source": "web",
            "metadata": {"weight": 0},
            "strange": None,
        }
    ]
    assert preview(rows)[:2] == (0, "a<|im_end|>")
    rows[0]["strange"] = 1
    assert preview(rows)[0] == 4
    assert preview(rows, "data.ignored_keys=[strange]")[:2] == (0, "a<|im_end|>")


def test_record_message_key_used_by_template_is_known() -> None:
    from mtrain.data.records import FLAGS, Keys

    message = {**turns("q", "a")[1], "channel": "final"}
    values = {"messages": [*turns("q"), message]}
    with pytest.raises(CorruptData, match="an unknown key: channel"):
        parse_chat(values, Keys(template=CHATML))
    made = parse_chat(values, Keys(template=CHATML + "{{ message['channel'] }}"))
    assert made.messages[1]["channel"] == "final"
    assert not set(FLAGS) & parse_chat({"messages": corrected(weight=0)}).messages[1].keys(), (
        "templates see no flags"
    )


def test_record_json_arguments_become_objects_with_note(preview: Preview) -> None:
    def called(arguments: Any) -> list[Any]:
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return [*turns("2+2?"), {"role": "assistant", "content": "", "tool_calls": [call]}]

    _, as_object, nothing = preview([called({"a": 2, "b": "x"})])
    _, as_text, said = preview([called('{"a": 2, "b": "x"}')])
    assert as_text == as_object
    assert '"arguments": {"a": 2, "b": "x"}' in as_text
    assert said.count("1 chats have arguments of tools as JSON text") == 1
    assert "JSON text" not in nothing
    assert preview([called("")])[1] == preview([called({})])[1]
    for wrong in ("2+2", "[1]", '{"a": 1, "a": 2}', '{"a": NaN}'):
        code, _, said = preview([called(wrong)])
        assert code == 4
        assert "the arguments of a call are an object, or the JSON text of one" in said


AS_TEXT = {
    "written": (
        "{{- '<tool_call>' }}{{- call.function.name }} {{ call.function.arguments }}{{-"
        " '</tool_call>' }}"
    ),
    "joined": "{{- '<tool_call>' + call['function']['arguments'] + '</tool_call>' }}",
    "trimmed": "{{- '<tool_call>' + (call.function.arguments | trim) + '</tool_call>' }}",
    "as it is": (
        "{%- if call.function.arguments is string %}{{- call.function.arguments }}"
        "{%- else %}{{- call.function.arguments | tojson }}{%- endif %}"
    ),
}
AS_OBJECT = {
    "to JSON": "{{- '<tool_call>' + call.function.arguments | tojson + '</tool_call>' }}",
    "by key": (
        "{%- for key, value in call.function.arguments.items() %}{{- key }}={{- value }};{%-"
        " endfor %}"
    ),
    "a mapping": (
        "{%- if call.function.arguments is mapping %}{{- call.function.arguments | tojson }}{%-"
        " endif %}"
    ),
}
WEATHER = '{"city":  "Paris", "now": true}'
OLD_CALL = "{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"


def calling(*arguments: Any) -> list[dict[str, Any]]:
    calls = [
        {"type": "function", "function": {"name": "get", "arguments": one}} for one in arguments
    ]
    return [*turns("2+2?"), {"role": "assistant", "content": "", "tool_calls": calls}]


def with_template(tmp_path: Path, text: str) -> str:
    (tmp_path / "given.jinja").write_text(text)
    return f"data.chat_template={tmp_path}/given.jinja"


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", AS_TEXT)
def test_record_json_arguments_stay_text_where_written_so(
    kind: str, preview: Preview, tmp_path: Path
) -> None:
    template = with_template(
        tmp_path, template_of("chatml", marked=False).replace(OLD_CALL, AS_TEXT[kind])
    )
    code, learned, said = preview([calling(WEATHER)], template)
    assert (code, "JSON text" in said) == (0, False), said
    assert WEATHER in learned
    code, learned, said = preview([calling("{}", WEATHER)], template)
    assert (code, "JSON text" in said) == (0, False), said
    assert "{}" in learned
    assert preview([calling("2+2")], template)[0] == 4, "it is still the text of an object"


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", AS_OBJECT)
def test_record_json_arguments_are_parsed_where_wanted(
    kind: str, preview: Preview, tmp_path: Path
) -> None:
    template = with_template(
        tmp_path, template_of("chatml", marked=False).replace(OLD_CALL, AS_OBJECT[kind])
    )
    for text in (WEATHER, "{}", ""):
        _, as_object, nothing = preview([calling(json.loads(text or "{}"))], template)
        code, as_text, said = preview([calling(text)], template)
        assert (code, as_text) == (0, as_object)
        assert said.count("1 chats have arguments of tools as JSON text") == 1
        assert "JSON text" not in nothing
    asked = calling(WEATHER)
    asked[0]["content"] = f"call it with {WEATHER}"
    assert preview([asked], template)[1] == preview([calling(json.loads(WEATHER))], template)[1]


def test_record_python_repr_is_not_learned(preview: Preview, tmp_path: Path) -> None:
    written = template_of("chatml", marked=False).replace(OLD_CALL, AS_TEXT["written"])
    code, _, said = preview([calling({"city": "Paris"})], with_template(tmp_path, written))
    assert code == 4
    assert (
        "chats.jsonl:1: message 2: the chat template writes the arguments of its call, an object"
        in said
    )
    assert "make it JSON text" in said
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
        {"role": "assistant", "content": "4"},
    ]
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    code, _, said = preview([parts], with_template(tmp_path, plain))
    assert code == 4
    assert (
        "message 1: the chat template writes its content, a list of parts, as Python prints it"
        in said
    )
    quoted = turns("what is {'city': 'Paris'}?", "an object")
    assert preview([quoted], with_template(tmp_path, plain))[0] == 0, "it is what they said"


def test_record_unread_calls_are_reported() -> None:
    from mtrain.data.records import Keys

    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    values = {"messages": [*turns("q"), {"role": "assistant", "content": "", "tool_calls": [call]}]}
    with pytest.raises(CorruptData, match="does not read its tool_calls"):
        parse_chat(values, Keys(template=template_of("llama3", marked=False)))
    assert parse_chat(values, Keys(template=CHATML)).messages[1]["tool_calls"] == [call]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "refusal"])
def test_record_extra_content_keys_are_reported(key: str, preview: Preview, tmp_path: Path) -> None:
    asked = turns("2+2?", "four")
    asked[1][key] = "two and two is four"
    code, _, said = preview([asked])
    assert code == 4
    assert (
        f"chats.jsonl:1: message 2 of messages: the chat template does not read its {key}" in said
    )
    assert f"data.ignored_keys=[{key}]" in said
    assert preview([asked], f"data.ignored_keys=[{key}]")[:2] == (0, "four<|im_end|>")
    for nothing in ("", None):
        assert preview([[asked[0], asked[1] | {key: nothing, "name": "x"}]])[:2] == (
            0,
            "four<|im_end|>",
        )
    reading = template_of("chatml", marked=False).replace(
        "{%- if message.content %}", f"{{{{- message.{key} or '' }}}}:{{%- if message.content %}}"
    )
    assert (
        preview([asked], with_template(tmp_path, reading))[1]
        == "two and two is four:four<|im_end|>"
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_record_reasoning_has_several_names(key: str, preview: Preview, tmp_path: Path) -> None:
    asked = turns("2+2?", "four", "sure?", "yes")
    asked[1][key] = "dropped"
    asked[3][key] = "kept"
    for name in ("reasoning_content", "reasoning", "thinking"):
        of_last = (
            f"{{%- if loop.last %}}{{{{- message['{name}'] }}}}:{{%- endif %}}{{%- if"
            " message.content %}"
        )
        reading = template_of("chatml", marked=True).replace("{%- if message.content %}", of_last)
        code, learned, said = preview([asked], with_template(tmp_path, reading))
        assert (code, learned) == (0, "four<|im_end|>kept:yes<|im_end|>"), said


def test_record_ignored_key_claims_no_learning(preview: Preview) -> None:
    rows = [{"messages": corrected(loss=0.4), "weight": 2.5}]
    code, _, said = preview(rows)
    assert code == 4
    assert "data.ignored_keys=[weight]" in said
    words = "data.ignored_keys=[loss,weight]"
    assert preview(rows, words)[:2] == (0, "WRONG<|im_end|>four<|im_end|>")


def test_record_pairs_have_chat_keys() -> None:
    values = {"prompt": "q", "chosen": turns("", "good")[1:], "rejected": turns("", "bad")[1:]}
    assert parse_pair(values)[0].turns == [1]
    with pytest.raises(CorruptData, match="an unknown key: strength"):
        parse_pair({**values, "strength": 0.3})
    with pytest.raises(CorruptData, match="its weight is"):
        parse_pair({**values, "chosen": [{"role": "assistant", "content": "good", "weight": 0.5}]})
    assert parse_pair({**values, "score_chosen": 3.5})[1].turns == [1]


def test_record_images_have_flags_and_no_unknown_keys() -> None:
    def parsed(*turns: dict[str, Any], **more: Any) -> list[Any]:
        said = [{"from": "human", "value": "<image> q"}, {"from": "gpt", "value": "WRONG"}, *turns]
        said[1] |= more.pop("first", {})
        line = {"id": 1, "image": "a.png", "conversations": said, **more}
        return [
            piece.text
            for piece in parse_record(json.dumps(line).encode()).pieces
            if getattr(piece, "learned", 0)
        ]

    more = ({"from": "human", "value": "again"}, {"from": "gpt", "value": "right"})
    assert parsed(*more) == [" WRONG", " right"]
    assert all(parsed(*more, first=flags) == [" right"] for flags in OFF)
    for wrong in (
        {"first": {"weight": 0}},
        {"weight": 0},
        {"first": {"los": False}},
        {"caption": "x"},
    ):
        with pytest.raises(CorruptData, match=r"remove the line|unknown key: (los|caption)"):
            parsed(**wrong)
    scored = {"text": "a", "weight": 2.5}
    with pytest.raises(CorruptData, match=r"data\.ignored_keys=\[weight\]"):
        parse_record(json.dumps(scored).encode())
    assert parse_record(json.dumps(scored).encode(), frozenset({"weight"})).pieces
