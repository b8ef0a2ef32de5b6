"""Declared effects of keys, compared with their real effects: the digest of the weights after two
steps.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.messages.keys import effect_of, field_of, schema_keys
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import apply, check, value_at
from mtrain.config.schema.base import Effect
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.data.store.indexed import IndexedWriter
from tests.support.chats import CHATML, chats_file, folder_of, turns
from tests.support.commands import latest
from tests.support.configs import LAPTOP
from tests.support.forked import run_alone

SMALL = (
    "model=llama_tiny model.num_layers=1 model.hidden_size=64 model.ffn_hidden_size=128"
    " model.vocab_size=700 "
)
SMALL += (
    "data=mock data.seq_length=32 data.tokenizer_vocab_size=400 precision.dtype=fp32"
    " parallel=single cluster=local "
)
SMALL += (
    "trainer.train_iters=4 trainer.global_batch_size=4 trainer.micro_batch_size=2"
    " trainer.eval_iters=0 "
)
SMALL += (
    "trainer.eval_interval=null trainer.sample_tokens=0 optim.warmup_iters=0 optim.lr=0.01"
    " optim.min_lr=0.001 "
)
SMALL += "cluster.device=cpu kernels=reference"
RUNTIME = [
    key
    for key in schema_keys()
    if effect_of(key) is Effect.RUNTIME and not key.startswith("recipe.")
]
CONTEXTS = {
    "tokens": "",
    "text": "data=text data.path=text data.cache_dir=cache",
    "chats": (
        "data=sft data.seq_length=160 data.path=chats.jsonl data.tokenizer=hf/tokenizer.json "
        "data.cache_dir=cache"
    ),
    "apart": "data=indexed data.path=a data.validation_blend=[c]",
    "blend": (
        "data=indexed data.blend=[a,b] data.blend_weights=[1,2] data.validation_blend=[c]"
        " data.test_blend=[c]"
    ),
}
GIVEN: dict[str, tuple[Any, ...]] = {
    "data.validation_weights": ((2.0,),),
    "data.test_weights": ((2.0,),),
    "data.bad_lines": (7,),
    "trainer.stop_signals": (("SIGUSR1",),),
    "log.name": ("another",),
    "log.runs_dir": ("elsewhere",),
    "cluster.name": ("another",),
    "model.name": ("another",),
    "objective.name": ("ipo",),
    "objective.loss_weights": ((1.0, 2.0),),
    "objective.label_smoothing": (0.1,),
    "objective.jsd_beta": (0.3,),
}
"""Values of keys whose type does not say which make sense."""
MODELS = {
    "experts": "model=mixtral_tiny model.moe.aux_loss_coeff=0.01 model.moe.ffn_hidden_size=64",
    "latent": "model=deepseek_tiny",
    "learned positions": "model=pythia_tiny",
    "windows": "model.window_size=8",
    "dropout": "model.hidden_dropout=0.1 model.attention_dropout=0.1",
    "predictions": "model.mtp_num_layers=1",
    "adapters": "peft=lora",
    "muon": "optim=muon",
    "soap": "optim=soap",
    "sgd": "optim=sgd",
    "wsd": "optim.schedule=wsd optim.wsd_decay_iters=3",
    "packed": (
        "data=text data.path=text data.cache_dir=cache data.packed=true data.packed_by=first_fit"
    ),
    "pairs": "objective=dpo",
    "pairs with weights": "objective=dpo objective.loss_type=[sigmoid,robust]",
    "answers with labels": "objective=kto",
    "pairs with a margin": "objective=simpo",
    "rewards": "objective=reward",
    "rollouts": "objective=grpo objective.group_size=2 objective.kl_coef=0.1",
    "another sampler": "objective=grpo objective.group_size=2 objective.importance=truncated",
    "critic": "objective=ppo",
    "teacher": "objective=distil objective.teacher=drawn objective.divergence=jsd",
}
"""More configurations, in which a key that changes numbers may have its effect."""
UNSEEN = {
    "model.family model.max_position_embeddings": "other keys come with it, and a limit",
    (
        "model.head objective.teacher objective.teacher_file objective.score_margins"
        " objective.critic rollout.engine"
    ): ("they come with another key, a file or a folder"),
    (
        "rollout.rewards rollout.reward_weights rollout.pattern rollout.answer_column"
        " rollout.free_tokens rollout.failed_rewards rollout.resample rollout.updates"
        " rollout.max_tokens objective.group_size objective.scale_rewards objective.clip_ratio_low"
        " rollout.top_k rollout.top_p rollout.min_p objective.max_staleness"
        " objective.clip_ratio_high objective.importance_cap objective.kl_in_reward"
        " objective.gae_lambda rollout.replay_routes rollout.environment rollout.max_turns"
        " rollout.reward_model"
    ): "they act on answers that were sampled, which synthetic ones are not: test_answers,"
    " test_critics, test_routing_replay, test_answers_of_turns and test_reward_model",
    "peft.target peft.init_from checkpoint.init_from": "names of what the test does not have",
    "model.qk_layernorm_across_heads model.mtp_detach_heads model.mtp_use_repeated_layer": (
        "needs others"
    ),
    (
        "precision.fp8_recipe precision.fp8_margin precision.fp8_amax_history_len "
        "precision.fp8_amax_compute_algo precision.fp8_wgrad precision.fp8_dot_product_attention "
        "precision.fp8_multi_head_attention precision.fp4 precision.tp_only_amax_red "
        "precision.fp4_recipe precision.fp8 optim.main_params_dtype "
        "precision.num_layers_at_start_in_bf16 precision.num_layers_at_end_in_bf16 "
        "precision.grad_reduce_in_fp32 parallel.ddp_reduce_scatter_with_fp32_accumulation"
    ): ("formats of GPUs, or of 16 bits"),
    (
        "precision.initial_loss_scale precision.loss_scale_window precision.min_loss_scale "
        "precision.loss_scale_hysteresis optim.soap.shampoo_beta optim.soap.precondition_frequency "
        "optim.muon.use_nesterov optim.muon.split_qkv"
    ): ("later than in two steps, or null says the same"),
    "optim.soap.tp_mode optim.muon.tp_mode": "over tensor-parallel ranks",
    (
        "data.fim.rate data.fim.spm_rate data.fim.ids data.blend_sizes data.blend_curriculum "
        "data.blend_max_epochs data.suffixes data.limit_mib data.eod_mask_loss "
        "data.tokenizer_vocab_size model.no_rope_freq peft.dropout data.long_documents "
        "data.packed_multiple data.packed_window data.split data.loss_on data.ignored_keys "
        "optim.min_lr optim.skip_above_grad_norm trainer.rampup_batch_size "
        "trainer.batch_size_schedule trainer.loss_average model.rotary_base_local "
        "model.window_attn_skip_freq"
    ): ("lists, and values between others"),
}
"""Keys that change numbers, though not in the configurations above, or with a value that is guessed
-> why.
"""
SECTIONS = [
    "moe",
    "mla",
    "bert",
    "t5",
    "llava",
    "hybrid",
    "dsa",
    "mup",
    "rope_scaling",
    "linear_attention",
]
"""Sections of a model that the plain one lacks; their keys are tested where their layers are."""
NAMES = {
    "data.path": ("text", "more"),
    "data.blend": ("blend", ["a", "c"]),
    "data.tokenizer": ("chats", "larger/tokenizer.json"),
    "data.chat_template": ("chats", "other.jinja"),
    "data.validation_blend": ("apart", None),
}
"""Keys that name what is read -> where they do, and another place with other contents."""


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Enter a folder with texts, chats, a tokenizer and corpora."""
    home = tmp_path_factory.mktemp("effects")
    for name, words in (("text", "one two three "), ("more", "four five six ")):
        (home / name).mkdir()
        (home / name / "a.txt").write_text(words * 400)
    folder_of(home / "hf", "chatml")
    folder_of(home / "larger", "llama3")
    (home / "other.jinja").write_text(
        CHATML.replace("[[", "")
        .replace("]]", "")
        .replace("message.role + '\\n'", "message.role + ': '")
    )
    (home / "larger" / "tokenizer_config.json").write_text(
        (home / "hf/tokenizer_config.json").read_text()
    )
    chats = [turns(f"{i}+1?", "it is 0", "no", f"it is {i + 1}") for i in range(12)]
    for chat in chats:
        chat[1]["weight"] = 0
    chats_file(home / "chats.jsonl", chats)
    for number, name in enumerate("abc"):
        with IndexedWriter(home / name, np.dtype("<u2")) as writer:
            writer.add((7 * np.arange(4000) + number) % 600, np.full(100, 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        yield home


def values_of(annotation: Any, now: Any) -> Iterator[Any]:
    """Yield other values that a type allows, as far as they can be guessed from it."""
    origin = get_origin(annotation)
    inside = get_args(annotation)
    if origin is Annotated:
        yield from values_of(inside[0], now)
    elif origin in (Union, types.UnionType):
        for part in inside:
            yield from values_of(part, now)
    elif origin is Literal:
        yield from inside
    elif annotation is bool:
        yield not now
    elif annotation is int:
        yield from (4, 1) if now is None else (now + 1, 2 * now, 1)
    elif annotation is float:
        yield from (0.5, 40.0) if not now else (1.5 * now, 0.5 * now)
    elif annotation is str:
        yield "other"
    elif annotation is types.NoneType:
        yield None


@cache
def raw_of(context: str) -> UnresolvedRun:
    return compose(latest(*SMALL.split(), *CONTEXTS[context].split())).run


@cache
def digest_of(run_json: str) -> str:
    """Return the digest of the weights of a resolved run after two steps."""
    run = RunConfig.model_validate_json(run_json)

    def job() -> str:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import train_step
        from mtrain.world.init import joined

        with joined(run) as world:
            parts = assemble(run, world, splits_of(run))
            for _ in range(2):
                train_step(parts, stop_requested=False)
            digest = hashlib.sha256()
            for chunk in parts.state.trained:
                for name, weight in sorted(chunk.named_parameters()):
                    digest.update(name.encode() + weight.detach().float().numpy().tobytes())
            return digest.hexdigest()

    found: str = run_alone(job)
    return found


def digest(raw: UnresolvedRun) -> str:
    return digest_of(resolve(raw, LAPTOP).model_dump_json())


def accepted(raw: UnresolvedRun, key: str, value: Any) -> UnresolvedRun | None:
    """Return the configuration with another value of a key; None if it cannot run here."""
    try:
        changed = apply(raw, {key: value})
    except ValueError:
        return None
    run = resolve(changed, LAPTOP)
    return None if any(p.severity == "error" for p in check(run, raw=changed)) else changed


def test_declared_effect_digest_changes_with_any_number() -> None:
    plain = raw_of("tokens")
    assert digest(plain) == digest(apply(plain, {"log.interval": 3}))
    assert digest(plain) != digest(apply(plain, {"optim.eps": 1e-7}))


@pytest.mark.sampled(72)
@pytest.mark.parametrize("key", RUNTIME)
def test_declared_effect_none_changes_no_weight(key: str) -> None:
    field = field_of(key)
    assert field is not None
    for context in CONTEXTS if key.startswith("data.") else ("tokens",):
        raw = raw_of(context)
        now = value_at(raw, key)
        others = GIVEN.get(key) or [
            value for value in values_of(field.annotation, now) if value != now
        ]
        for value in list(others)[:3]:
            changed = accepted(raw, key, value)
            if changed is not None and changed != raw:
                assert digest(changed) == digest(raw), f"{key}={value} in {context}"


def _seen() -> list[str]:
    """Return the keys that are declared to change numbers, of sections that the configurations
    above have.
    """
    unseen = {key for keys in UNSEEN for key in keys.split()}
    absent = tuple(f"model.{name}." for name in SECTIONS)
    found = [
        key for key in schema_keys() if effect_of(key) in (Effect.ARCHITECTURE, Effect.NUMERICS)
    ]
    return [key for key in found if key not in unseen and not key.startswith(absent)]


@pytest.mark.full
@pytest.mark.parametrize("key", _seen())
def test_declared_effect_numbers_changes_numbers(key: str) -> None:
    field = field_of(key)
    assert field is not None
    for words in (*CONTEXTS.values(), *MODELS.values()):
        raw = compose(latest(*SMALL.split(), *words.split())).run
        now = value_at(raw, key)
        values = GIVEN.get(key) or tuple(dict.fromkeys(values_of(field.annotation, now)))
        for value in values[:4]:
            changed = None if value == now else accepted(raw, key, value)
            if changed is not None and digest(changed) != digest(raw):
                return
    raise AssertionError(
        f"{key} is declared to change {effect_of(key)}, and no value of it changed a weight"
    )


def test_declared_effect_unread_key_changes_learning() -> None:
    assert effect_of("data.ignored_keys") is Effect.NUMERICS
    raw = raw_of("chats")
    assert digest(apply(raw, {"data.ignored_keys": ("weight",)})) != digest(raw)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("key", NAMES)
def test_declared_effect_path_content_changes_weights(key: str, home: Path) -> None:
    assert effect_of(key) is Effect.CONTENTS
    context, other = NAMES[key]
    raw = raw_of(context)
    assert digest(apply(raw, {key: other})) != digest(raw)
    now = value_at(raw, key)
    if isinstance(now, str) and (home / now).is_dir():
        (home / "again").symlink_to(home / now)
        assert digest(apply(raw, {key: "again"})) == digest(raw), (
            "the same contents under another name"
        )
