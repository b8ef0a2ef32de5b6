"""Megatron-LM's configurations in YAML, as the words of its command line.

There are two kinds: `MODEL_ARGS` with flags as keys, as in its functional tests, and arguments by
name in sections, as `--yaml-cfg` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtrain.config.compose.yaml_reader import parse
from mtrain.errors import ConfigError, Problem
from mtrain.recipes.imported import Imported
from mtrain.recipes.megatron.arguments import Arguments, spelled
from mtrain.recipes.megatron.command import FEW_FLAGS, family_of, not_a_gpt, other_than_gpt
from mtrain.recipes.megatron.importer import import_words
from mtrain.recipes.megatron.table import known_flags
from mtrain.recipes.secrets import Secrets
from mtrain.recipes.shell.expansion import Expander
from mtrain.recipes.shell.gaps import Word, pieces_of, word_of
from mtrain.recipes.shell.lexer import Lexer, Raw
from mtrain.recipes.shell.reader import read_script

_LIST = re.compile(r"\[\s*[A-Za-z_][\w ,]*\]\Z")
_SECTIONS = ("language_model", "model_parallel")

_NAMED = {
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
}
"""Arguments of `--yaml-cfg` whose flag has another name."""
# here true sets the flag
_TRUE = {"layernorm_zero_centered_gamma": "--apply-layernorm-1p"}
# flags that turn an argument off
_FALSE = {"add_bias_linear": "--disable-bias-linear", "fp8_wgrad": "--no-fp8-wgrad"}
_ACTIVATIONS = {
    "swiglu": ["--swiglu"],
    "squaredrelu": ["--squared-relu"],
    "squared_relu": ["--squared-relu"],
    "quick_gelu": ["--quick-geglu"],
    "gelu": [],
}
_WITHOUT_FLAG = re.findall(
    r"\w+",
    """
    perform_initialization bert_binary_head barrier_with_L1_time enable_one_logger batch_p2p_comm
    batch_p2p_sync tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
    tp_comm_bulk_wgrad tp_comm_bulk_dgrad cpu_offloading_activations add_position_embedding
    """,
)
"""Arguments that are on by default, or follow from others."""


def import_yaml(texts: Sequence[tuple[str, str]], name: str, extra: Sequence[str] = ()) -> Imported:
    """Return the configuration of the last text, which is YAML; the texts before it are scripts
    that set its `${VARIABLES}`.

    Args:
        texts: each a text with the name of its file. `name` and `extra` are as for `import_texts`.

    Raises:
        ConfigError: the text holds neither `MODEL_ARGS` nor arguments of Megatron-LM, or trains
            another model than a GPT.
    """
    text, source = texts[-1]
    document = parse(text, source, foreign=True)
    values = document.values
    held = read_script(*texts[:-1]).variables
    # later than variables of scripts, which the file may override
    held |= {
        str(k): [spelled(v)] for k, v in _mapping(values.get("ENV_VARS")).items() if v is not None
    }
    expander = Expander({n: list(map(pieces_of, words)) for n, words in held.items()}, source)
    notes = [
        "how many processes it starts is not set: cluster.nodes and cluster.devices_per_node are"
        " unset"
    ]
    notes += [f"{key} is written twice; the later one counts" for key in document.repeated]
    words: list[Word]
    if isinstance(values.get("MODEL_ARGS"), dict):
        words = list(_of_flags(values["MODEL_ARGS"], expander))
        notes += [
            f"{key} is for another run than the first, and is not read"
            for key in values
            if isinstance(key, str) and key.startswith("MODEL_ARGS_")
        ]
    else:
        words = list(_of_arguments(values))
    if len({word for word in words if word in known_flags()}) < FEW_FLAGS:
        rule = "it holds neither MODEL_ARGS nor the arguments of Megatron-LM"
        raise ConfigError(
            [
                Problem(
                    "MT701", "", None, rule, "a model_config.yaml, or a file for --yaml-cfg", source
                )
            ]
        )
    flags = Arguments(words).flags
    mode = str(values.get("MODE", ""))
    if mode == "inference":
        does = "generates text (MODE: inference)"
    else:
        does = other_than_gpt(None, flags, source)
    family = family_of(does)
    if family is None:
        raise ConfigError([not_a_gpt(f"it {does}", source)])
    named = {**held, **{flag: given for flag, given in flags.items() if flag not in known_flags()}}
    secrets = Secrets(
        {name: [word for word in given if isinstance(word, str)] for name, given in named.items()}
    )
    return import_words(words, None, name, source, extra, secrets, notes, {}, family=family)


def is_yaml(text: str) -> bool:
    """Return whether a text without a name is such a file, and not a script."""
    return (
        re.search(r"^(MODEL_ARGS|language_model|model_parallel):", text, re.MULTILINE) is not None
    )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _of_flags(args: Mapping[str, Any], expander: Expander) -> Iterator[Word]:
    """Yield the words of `MODEL_ARGS`: true is a switch, false leaves the flag out."""
    for key, value in args.items():
        if value is False:
            continue
        yield key if str(key).startswith("--") else f"--{key}"
        if value is None or value is True:
            continue
        for item in _items(value):
            raw = Raw()
            Lexer(item, expander.source).quoted(raw, "")
            # the test harness expands variables, and nothing else, in the values
            yield word_of(expander.joined(raw.parts)) if "$" in item else item


def _items(value: Any) -> list[str]:
    if isinstance(value, list):
        return [spelled(item) for item in value]
    text = spelled(value)
    return text.strip("[]").replace(",", " ").split() if _LIST.match(text) else [text]


def _of_arguments(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a file for `--yaml-cfg`, without nulls and defaults."""
    flat = {key: value for key, value in values.items() if not isinstance(value, dict)}
    for section in _SECTIONS:
        flat |= _mapping(values.get(section))
    gated = flat.pop("gated_linear_unit", False)
    # swiglu already implies a gate
    if gated is True and flat.get("activation_func") != "swiglu":
        yield "--gated-linear-unit"
    if flat.get("num_query_groups") and not flat.get("group_query_attention"):
        yield "--group-query-attention"
    for key, value in flat.items():
        dashed = str(key).replace("_", "-")
        flag = _NAMED.get(key, f"--{dashed}")
        if key == "activation_func" and str(value).lower() in _ACTIVATIONS:
            yield from _ACTIVATIONS[str(value).lower()]
        elif value is None or value == "" or key in _WITHOUT_FLAG:
            continue
        elif value is True:
            if key in _TRUE or (f"--no-{dashed}" not in known_flags() and key not in _FALSE):
                yield _TRUE.get(key, flag)
        elif value is False:
            off = _FALSE.get(key, f"--no-{dashed}")
            if off in known_flags():
                yield off
        elif isinstance(value, list) and key == "window_size":
            yield from (flag, ",".join(map(spelled, value)))
        else:
            yield from (flag, *_items(value))
