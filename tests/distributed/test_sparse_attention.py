"""Sparse attention: compared with a definition in fp64 and with plain MLA, in layouts, and its
counts.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.config.schema.run import RunConfig
from tests.distributed.test_builders import built_as
from tests.distributed.test_peft import compared
from tests.support.cases import cases_of
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import train_steps

TINY = "model=deepseek_v3_2_tiny model.num_layers=2"
ALONE = "model.mtp_num_layers=null model.mtp_loss_scaling_factor=null"
COEFFICIENT = 0.7


def _layer(x: dict[str, Tensor], w: dict[str, Tensor], run: RunConfig) -> tuple[Tensor, Tensor]:
    """Compute attention and the indexer's loss by the definitions of DeepSeek-V3.2's report, for
    one sample [s, ...].
    """
    dsa = run.model.dsa
    mla = run.model.mla
    assert dsa is not None
    assert mla is not None
    turned = mla.qk_pos_emb_head_dim
    heads = dsa.indexer_n_heads
    s = x["x"].shape[0]
    rates = run.model.rotary_base ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    turns = torch.polar(
        torch.ones(s, turned // 2, dtype=torch.float64), torch.arange(s)[:, None] * rates
    )

    def turn(v: Tensor) -> Tensor:
        pairs = torch.complex(v[..., : turned // 2], v[..., turned // 2 : turned]) * turns[:, None]
        return torch.cat([pairs.real, pairs.imag, v[..., turned:]], dim=-1)

    q = turn((x["qr"] @ w["linear_wq_b.weight"].T).view(s, heads, -1))
    k = x["x"] @ w["linear_wk.weight"].T
    centred = k - k.mean(-1, keepdim=True)
    k = (
        centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w["k_norm.weight"]
        + w["k_norm.bias"]
    )
    k = turn(k[:, None])[:, 0]
    gates = x["x"] @ w["linear_weights_proj.weight"].T / math.sqrt(heads)
    scores = torch.einsum(
        "sh,sht->st", gates, (torch.einsum("shd,td->sht", q, k) / math.sqrt(q.shape[-1])).relu()
    )
    out = []
    loss = torch.zeros((), dtype=torch.float64)
    for t in range(s):
        chosen = min(dsa.indexer_topk, t + 1)
        ranked = scores[t, : t + 1].sort(descending=True).values
        assert chosen == t + 1 or ranked[chosen - 1] > ranked[chosen], (
            "of two equal scores either may be chosen"
        )
        best = scores[t, : t + 1].topk(chosen).indices
        logits = torch.einsum("nd,und->nu", x["query"][t], x["key"][: t + 1]) / math.sqrt(
            x["query"].shape[-1]
        )
        out.append(torch.einsum("nu,une->ne", logits[:, best].softmax(-1), x["value"][best]))
        used = best if dsa.indexer_use_sparse_loss else torch.arange(t + 1)
        p = logits[:, used].detach().softmax(-1).mean(0)
        loss = loss + (p * (p.log() - scores[t, used].log_softmax(0))).sum()
    return torch.stack(out), loss


def _apart(run: RunConfig, fault: str) -> dict[str, float]:
    """Return the largest difference of each output and gradient of a layer, as a share of the
    largest element; a job for a rank.
    """
    from mtrain.assembly.model import build_model
    from mtrain.mcore import api
    from mtrain.mcore.state.local_params import unwrap
    from mtrain.world.init import joined

    with joined(run) as world:
        core = (
            unwrap(build_model(run, world, wrap=False)[0])
            .decoder.layers[0]
            .self_attention.core_attention.double()
        )
        m = run.model
        mla = run.model.mla
        s = 24
        b = 2
        assert mla is not None
        width = mla.qk_head_dim + mla.qk_pos_emb_head_dim
        n = m.num_attention_heads
        torch.manual_seed(8)
        sizes = {
            "x": (m.hidden_size,),
            "qr": (mla.q_lora_rank,),
            "query": (n, width),
            "key": (n, width),
        }
        sizes |= {"value": (n, mla.v_head_dim)}
        given = {
            k: torch.randn(s, b, *size, dtype=torch.float64, requires_grad=True)
            for k, size in sizes.items()
        }
        factors = torch.randn(s, b, n * mla.v_head_dim, dtype=torch.float64)
        weights = {
            k: 40 * p.detach().clone() if p.ndim > 1 else p.detach().clone()
            for k, p in core.indexer.named_parameters()
        }
        for name, parameter in core.indexer.named_parameters():
            parameter.data.copy_(weights[name])
            if name == fault:
                parameter.data[0] *= 1.01
        out = core(
            given["query"],
            given["key"],
            given["value"],
            None,
            x=given["x"],
            qr=given["qr"],
            attn_mask_type=api.AttnMaskType.causal,
        )
        (out * factors).sum().backward()
        found = {k: t.grad for k, t in given.items()} | {
            k: p.grad for k, p in core.indexer.named_parameters()
        }
        assert found.pop("x") is None
        assert found.pop("qr") is None, "what an indexer reads learns nothing from it"
        again = {k: t.detach().clone().requires_grad_() for k, t in {**given, **weights}.items()}
        parts = [
            _layer({k: again[k][:, i] for k in sizes}, {k: again[k] for k in weights}, run)
            for i in range(b)
        ]
        expected = torch.stack([part.flatten(1) for part, _ in parts], dim=1)
        ((expected * factors).sum() + COEFFICIENT * sum(loss for _, loss in parts)).backward()
        values = {k: again[k].grad for k in found} | {"out": expected}
        found["out"] = out
        return {
            k: float((found[k] - values[k]).abs().max() / values[k].abs().max()) for k in values
        }


@pytest.mark.parametrize("sparse", ["false", "true"])
def test_sparse_attention_layer_equals_report(sparse: str) -> None:
    words = (
        f"{TINY} parallel=single model.dsa.indexer_topk=7"
        f" model.dsa.indexer_loss_coeff={COEFFICIENT}"
    )
    run = built_as("gpt", f"{words} model.dsa.indexer_use_sparse_loss={sparse}")
    errors = run_ranks(1, _apart, run, "")[0]
    assert len(errors) == 3 + 5 + 1
    assert max(errors.values()) < 1e-5, errors
    if sparse == "true":
        assert max(run_ranks(1, _apart, run, "linear_wk.weight")[0].values()) > 1e-4


def _logits_and_gradients(
    run: RunConfig, given: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and gradients of a model whose weights are `given` by their names; if it is
    empty, fill it with the model's own. A job for a rank.
    """
    from mtrain.assembly.model import build_model
    from mtrain.mcore.state.local_params import unwrap
    from mtrain.world.init import joined

    with joined(run) as world:
        (wrapped,) = build_model(run, world)
        chunk = unwrap(wrapped)
        own = dict(chunk.named_parameters())
        for name, parameter in own.items():
            if name in given:
                parameter.data.copy_(given[name])
            else:
                given[name] = parameter.data.clone()
        tokens = torch.arange(32)[None] * 7 % run.model.vocab_size
        places = torch.arange(32)[None]
        with torch.no_grad():
            logits = wrapped(tokens, places, None).clone()
        wrapped(tokens, places, None, labels=tokens.roll(-1)).backward()
        return logits, {name: p.main_grad.clone() for name, p in own.items()}


def test_sparse_attention_all_keys_equal_plain_mla() -> None:
    plain = built_as("gpt", f"{TINY} parallel=single model.dsa=null")
    runs = [
        built_as("gpt", f"{TINY} parallel=single model.dsa.indexer_topk={topk}")
        for topk in (32, 31, 4)
    ]

    def job() -> list[Any]:
        given: dict[str, Tensor] = {}
        return [_logits_and_gradients(run, given) for run in (plain, *runs)]

    (logits, gradients), (same, own), (_, nearly), (other, _) = run_ranks(1, job)[0]
    assert (same - logits).abs().max() < 1e-5 * logits.abs().max()
    indexers = {name for name in own if ".indexer." in name}
    assert own.keys() - indexers == gradients.keys()
    assert len(indexers) == 5 * (2 + 1)
    for name, gradient in gradients.items():
        assert (own[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max().clamp_min(1e-3), (
            name
        )
    assert all(own[name].abs().max() > 0 for name in indexers)
    assert any(not torch.equal(nearly[name], own[name]) for name in gradients)
    assert (other - logits).abs().max() > 1e-3 * logits.abs().max()


LAYOUTS = cases_of("sparse_attention")


@pytest.mark.full
@pytest.mark.parametrize("name", some(LAYOUTS, ["tp2, sequence parallel"]))
def test_sparse_attention_layout_equals_one_rank(name: str) -> None:
    rows = compared(f"model=deepseek_v3_2_tiny {LAYOUTS[name]}")
    assert all(row.equal for row in rows), "\n".join(map(str, rows))


@pytest.mark.full
def test_sparse_attention_target_of_one_rank_heads_is_found() -> None:
    def job(run: RunConfig, faulty: bool) -> list[tuple[float, float]]:
        from mtrain.mcore.layers.sparse_attention import SparseAttention

        if faulty:
            SparseAttention._mean = lambda self, summed: (
                2 * summed / self.config.num_attention_heads
            )  # type: ignore
        return train_steps(run, 1)

    words = f"{TINY} {ALONE} model.dsa.indexer_loss_coeff=100"
    one, two = (built_as("gpt", f"{words} parallel={layout}") for layout in ("single", "tp2sp"))
    ((_, norm),) = run_ranks(1, job, one, False)[0]
    found = [run_ranks(2, job, two, faulty)[0][0][1] / norm - 1 for faulty in (False, True)]
    assert abs(found[0]) < 1e-6 < 1e-4 < abs(found[1]), found
