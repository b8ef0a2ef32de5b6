"""The page of all keys with the fields of megatron-core, and of all fields without a key."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.engine import core_fields
from mtrain.config.engine import release as facts
from mtrain.config.engine.core_fields import feeds
from mtrain.config.engine.release import FIELD_VERSIONS
from mtrain.config.messages.describe import default_of, example_section, groups, meaning, type_of
from mtrain.config.messages.keys import schema_keys
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.dsa import SparseAttentionConfig
from mtrain.config.schema.linear_attention import LinearAttentionConfig
from mtrain.config.schema.mla import MLAConfig
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.moe import MoEConfig
from mtrain.config.schema.mup import MupConfig
from mtrain.config.schema.run import UnresolvedRun
from mtrain.models.hybrid.config import HybridConfig

HEAD = """# Keys and fields

`python launch.py schema fields > docs/reference/fields.md` generates this page, and a test compares
it. The first table lists every key with its type, its default, its meaning and the fields of
megatron-core that it feeds; mtrain itself reads keys that feed no field. The second table lists the
fields of megatron-core that no key feeds, and why.
"""


def fed() -> dict[str, list[str]]:
    """Return key -> the fields it feeds in models with experts, MLA, hybrids and others."""
    experts = MoEConfig(num_experts=2, ffn_hidden_size=64)
    plain = ModelConfig.model_validate({**example_section(ModelConfig), "moe": experts})
    plain = plain.model_copy(update={"linear_attention": LinearAttentionConfig()})
    out: dict[str, list[str]] = {}
    hybrid = HybridConfig(pattern="ME", num_heads=8)
    latent = {"mla": MLAConfig(rope_type="yarn"), "dsa": SparseAttentionConfig()}
    laptop = Machine(cpu_cores=1, memory_bytes=0)
    for update in ({}, latent, {"hybrid": hybrid}, {"mup": MupConfig()}):
        model = plain.model_copy(update=update)
        run = resolve(UnresolvedRun(model=model), laptop)
        for key, fields in feeds(run).items():
            known = out.setdefault(key, [])
            known += [name for name in map(_owned, fields) if name not in known]
    return out


def _owned(field: str) -> str:
    """Return a field under its declaring class: MLA's configuration inherits all others."""
    owner, _, name = field.partition(".")
    inherited = owner == facts.LATENT and (
        name not in core_fields.MLA_FIELDS or name == "multi_latent_attention"
    )
    return f"{facts.TRANSFORMER}.{name}" if inherited else field


def page() -> str:
    """Return the Markdown of `docs/reference/fields.md`."""
    return "\n".join([HEAD, *_keys(), *_fields()]).rstrip() + "\n"


def _keys() -> Iterator[str]:
    reached = fed()
    for group, words in groups().items():
        yield f"## `{group}`: {words}\n"
        yield "| key | may be | default | means | feeds |"
        yield "|---|---|---|---|---|"
        for key in schema_keys():
            if key.startswith(f"{group}."):
                means = meaning(key)
                names = ", ".join(map(_named, reached.get(key, ())))
                cells = (f"`{key}`", _literal(type_of(key)), f"`{default_of(key)}`", means, names)
                yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def _fields() -> Iterator[str]:
    yield "## Fields without a key\n"
    yield "| field | why | |"
    yield "|---|---|---|"
    rows = {name: ("fixed", text) for name, text in facts.FIXED_IN_TABLES.items()} | facts.UNMAPPED
    for name in sorted(rows, key=lambda n: (facts.OWNERS.index(n.partition(".")[0]), rows[n], n)):
        why, text = rows[name]
        yield f"| {_named(name)} | {why} | {text} |"


def _named(field: str) -> str:
    """Return a field with the releases of megatron-core that have it, if not all do."""
    return f"`{field}` ({FIELD_VERSIONS[field]})" if field in FIELD_VERSIONS else f"`{field}`"


def _literal(text: str) -> str:
    """Return text whose brackets and stars are not Markdown, such as a pattern."""
    return text.replace("[", "\\[").replace("*", "\\*")
