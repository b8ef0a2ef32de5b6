"""BERT without ranks: what its samples become, what it counts, and what is refused for it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.api import load
from mtrain.cli.main import main
from mtrain.config.compose.composer import compose
from mtrain.config.families import limits
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import apply
from mtrain.data import open_splits, prepare
from mtrain.data.batch import GlobalBatches
from mtrain.errors import ConfigError
from mtrain.models.bert import family
from mtrain.models.bert.config import BertConfig
from mtrain.models.bert.data import collator
from mtrain.plan.count import parameters
from tests.support.configs import LAPTOP, errors
from tests.support.tables import tables

TABLES = tables("bert")

MASK = 397
CLS = 398
SEP = 399
VOCAB = 400
LENGTH = 64
IDS = {"mask_token_id": MASK, "cls_token_id": CLS, "sep_token_id": SEP}


def _batches(
    part: str = "train", *, seed: int = 1, micro: int = 4, batch: int = 4, **bert: Any
) -> Any:
    """Return the steps of one rank over synthetic tokens without special ones."""
    raw = compose(
        [
            "model=bert_tiny",
            "data=mock",
            f"data.seq_length={LENGTH}",
            f"trainer.seed={seed}",
            "parallel=single",
        ]
    ).run
    model = raw.model.model_copy(update={"vocab_size": VOCAB, "bert": BertConfig(**(IDS | bert))})
    run = resolve(raw.model_copy(update={"model": model}), LAPTOP)
    splits = open_splits(run.data, MASK, seed, prepare(run.data))
    made = collator(run, splits, part)
    return GlobalBatches(getattr(splits, part), batch, micro, 0, 1, made)


def _whole(data: Any, first: int = 0, size: int | None = None) -> dict[str, torch.Tensor]:
    parts = data.microbatches(first, size)
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def test_bert_masks_share_of_each_sample() -> None:
    b = _whole(_batches(batch=400, micro=400))
    chosen = b["loss_mask"] == 1
    assert (chosen.sum(1) == round(0.15 * LENGTH)).all()
    assert not (chosen & torch.isin(b["labels"], torch.tensor([CLS, SEP]))).any(), (
        "special tokens are not predicted"
    )
    read = b["tokens"][chosen]
    meant = b["labels"][chosen]
    assert float((read == MASK).float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((read == meant).float().mean()) == pytest.approx(0.1, abs=0.03)
    assert (b["tokens"] == b["labels"])[~chosen].all()
    places = chosen.float().mean(0)[1:30]
    assert float(places.max()) < 2 * float(places.min()), "every place is chosen about as often"


def test_bert_pair_has_two_halves_second_maybe_foreign() -> None:
    pairs = _whole(_batches(batch=200, micro=50))
    alone = _whole(_batches(batch=200, micro=50, next_sentence=False))
    text = pairs["labels"]
    apart = pairs["next_sentence"]
    assert 60 < int(apart.sum()) < 140
    assert (text[:, 0] == CLS).all()
    first = LENGTH - 3 - (LENGTH - 3) // 2
    assert (
        (text == SEP).nonzero()[:, 1].reshape(-1, 2) == torch.tensor([first + 1, LENGTH - 1])
    ).all()
    assert (pairs["token_types"] == (torch.arange(LENGTH) >= first + 2).long()).all()
    whole = alone["labels"]
    assert (text[:, 1 : first + 1] == whole[:, 1 : first + 1]).all()
    follows = (text[:, first + 2 : -1] == whole[:, first + 1 : LENGTH - 2]).all(1)
    assert (follows == (apart == 0)).all()
    assert "next_sentence" not in alone
    assert int(alone["token_types"].sum()) == 0


class _Numbered:
    """Three samples an epoch, whose tokens are their own number."""

    def __len__(self) -> int:
        return 3

    def batch(self, numbers: np.ndarray) -> np.ndarray:
        return np.repeat(np.asarray(numbers)[:, None], LENGTH + 1, 1)


def test_bert_foreign_half_comes_from_same_epoch() -> None:
    """Take both halves from one epoch: other epochs are cut elsewhere, so a sample of one may hold
    the continuation of another.
    """
    run = compose(["model=bert_tiny", "data=mock", f"data.seq_length={LENGTH}"]).run
    run = run.model_copy(
        update={
            "model": run.model.model_copy(update={"vocab_size": VOCAB, "bert": BertConfig(**IDS)})
        }
    )
    numbers = np.arange(300, 360)
    source = _Numbered()
    made: Any = collator(run, SimpleNamespace(train=source, masked_eod=None), "train")  # type: ignore[arg-type]
    batch = made(torch.from_numpy(source.batch(numbers)), numbers)
    first = batch["labels"][:, 1]
    second = batch["labels"][:, -2]
    apart = batch["next_sentence"].bool()
    assert apart.any()
    assert (first // 3 == second // 3).all()
    assert ((first != second) == apart).all()


def test_bert_draws_depend_on_seed_split_and_sample() -> None:
    whole = _whole(_batches(batch=8, micro=8))
    for again in (_batches(batch=8, micro=2), _batches(batch=8, micro=1)):
        assert all(torch.equal(value, whole[key]) for key, value in _whole(again).items())
    later = _whole(_batches(batch=4, micro=4), first=4)
    assert all(torch.equal(value, whole[key][4:]) for key, value in later.items()), (
        "a resumed run goes on with them"
    )
    for other in (_batches(batch=8, micro=8, seed=2), _batches("validation", batch=8, micro=8)):
        assert not torch.equal(_whole(other)["loss_mask"], whole["loss_mask"])
    assert not torch.equal(whole["loss_mask"][0, 1:30], whole["loss_mask"][1, 1:30])


def test_bert_excluded_ids_leave_fewer_masks() -> None:
    data = _batches(pad_token_id=5, next_sentence=False)
    (batch,) = data.microbatches(0)
    assert not (batch["loss_mask"].bool() & (batch["labels"] == 5)).any()
    windows = torch.full((2, LENGTH + 1), 5)
    windows[1, 7] = 6
    found = data.collator(windows, np.array([0, 1]))
    assert found["loss_mask"].sum(1).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "published"), [("bert_base", 110_106_428), ("bert_large", 336_226_108)]
)
def test_bert_published_count_excludes_padding(name: str, published: int) -> None:
    m = compose([f"model={name}"]).run.model
    assert parameters(m) - (m.padded_vocab_size - m.vocab_size) * (m.hidden_size + 1) == published


def test_bert_counts_attention_to_both_sides() -> None:
    m = compose(["model=bert_base"]).run.model
    twice = family.flops_per_token(m, 512) - family.flops_per_token(m, 256)
    assert twice == 12.0 * 12 * 768 * 256
    assert family.flops_per_token(m, 512, causal=True) == family.flops_per_token(
        m, 512, causal=False
    )


ODD: dict[str, Any] = {
    "model.norm_placement": "pre_and_post",
    "model.normalization": "RMSNorm",
    "model.activation": "swiglu",
    "model.position_embedding_type": "rope",
    "model.add_bias_linear": False,
    "model.tie_word_embeddings": False,
    "model.num_query_groups": 4,
    "model.kv_channels": 64,
    "model.moe": {"num_experts": 4, "ffn_hidden_size": 64},
    "model.mla": {
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
    },
    "model.mtp_num_layers": 1,
    "model.rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "model.rope_scaling_factor": 8.0,
    "model.window_size": 16,
    "model.linear_attention": {},
    "model.mup": {"base_hidden_size": 64},
    "model.attention_output_gate": True,
    "model.softmax_scale": 0.5,
    "model.attn_logit_softcapping": 50.0,
    "model.final_logit_softcapping": 30.0,
    "model.parallel_residual": True,
    "model.add_qkv_bias": True,
    "model.qk_layernorm": True,
    "model.qk_l2_norm": True,
    "model.scale_embedding": True,
    "model.layernorm_zero_centered_gamma": True,
    "model.softmax_type": "learnable",
    "parallel.cp": 2,
    "parallel.hybrid_context_parallel": True,
    "data.packed": True,
    "trainer.sample_tokens": 8,
    "peft.kind": "lora",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("key", ODD)
def test_bert_unsupported_is_refused(key: str) -> None:
    assert {limit.key for limit in limits("bert")} == ODD.keys()
    run = apply(compose(["model=bert_tiny", "parallel=single", "cluster=cpu"]).run, {key: ODD[key]})
    assert ("MT248", key) in {(p.code, p.path) for p in errors(run)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "code", "fix"),
    TABLES["refusals"],
)
def test_bert_refusal_offers_a_fix(words: str, code: str, fix: str) -> None:
    try:
        problems = load(words.split(), LAPTOP, {}).warnings
    except ConfigError as raised:
        problems = raised.problems
    found = {problem.code: problem for problem in reversed(problems)}
    assert found[code].fix.startswith(fix), found[code].fix


def test_bert_foreign_section_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--json", "model.bert={}"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["value"] == BertConfig().model_dump()
    assert main(["check", "model.bert={}"]) == 2
    assert "model.bert={type_vocab_size: 2, next_sentence: true," in capsys.readouterr().err


def test_bert_writes_no_sample_text() -> None:
    assert load(["model=bert_tiny", "data=stdlib"], LAPTOP, {}).run.trainer.sample_tokens == 0
