"""Shows each defect of megatron-core that `mtrain.mcore.patches.apply` lists.

Run as a module it prints, as JSON, what each case that is named gave without its patch. It imports
megatron.core once and forks from there, before any patch is applied, a process for each case, which
leaves out one patch.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from mtrain_kernels.registry import ops

from mtrain import mcore
from mtrain.config.schema.precision import PrecisionConfig
from mtrain.devices import registry
from mtrain.mcore import import_core
from tests.support import tiny
from tests.support.captured import let_capture
from tests.support.forked import RankFailed, import_engine, run_alone, run_ranks
from tests.support.offloading import let_offload
from tests.support.runs import tiny_run, train_steps
from tests.support.tiny import FINE

LOW_PRECISION = {
    "store_param_remainders": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
MEGATRON: dict[str, Any] = {"fsdp": "megatron", "fsdp_sharding": "optim_grads_params"}


@dataclass(frozen=True)
class Case:
    """One defect and the function that shows it."""

    run: Callable[[], str]
    """Runs on every rank with the adapter installed, with or without its patch; FINE, or what is
    wrong. May raise.
    """
    symptom: str
    """Regular expression of what is found without the patch."""
    ranks: int = 1


def _train(degrees: dict[str, Any] | None = None, spec: Any = None, **over: Any) -> str:
    tiny.start_world(**(degrees or {}))
    cfg = tiny.config(tensor_model_parallel_size=(degrees or {}).get("tp", 1), **over)
    tiny.accumulate_gradients(tiny.model(cfg, spec), cfg)
    return FINE


def _query_norm() -> str:
    from mtrain.mcore import api

    tiny.start_world(tp=2)
    cfg = tiny.config(tensor_model_parallel_size=2, **tiny.MLA)
    model = tiny.model(cfg)
    before = {}

    def remember_and_finalize(chunks: Any, *args: Any, **kwargs: Any) -> None:
        before.update(tiny.gradients(model))
        api.finalize_model_grads(chunks, *args, **kwargs)

    tiny.accumulate_gradients(model, cfg, remember_and_finalize)
    name = "decoder.layers.0.self_attention.q_layernorm.weight"
    factor = (tiny.gradients(model)[name].norm() / before[name].norm()).item()
    return FINE if abs(factor - 1) < 1e-5 else f"gradient times {factor:.3f}"


def _moe_loss_tokens() -> str:
    tiny.start_world(tp=2)
    moe = {
        **tiny.MOE,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 1.0,
    }
    cfg = tiny.config(
        tensor_model_parallel_size=2, sequence_parallel=True, calculate_per_token_loss=True, **moe
    )
    cfg.router_loss_share = 0.75
    router = tiny.model(cfg, wrap=False).decoder.layers[0].mlp.router
    loss: Any = torch.ones((), requires_grad=True)
    activation = torch.zeros(6, 4)
    router.attach_and_log_load_balancing_loss(
        activation, 1.0, loss, "load_balancing_loss", router.tp_cp_group
    ).sum().backward()
    logits: Any = torch.zeros(6, 4, requires_grad=True)
    (router.apply_z_loss(logits) * 0).sum().backward()
    # of logits that are all 0, d(logsumexp^2)/d(logit) is 2 log(4) / 4 for each
    expected = 2 * torch.tensor(4.0).log() / 4
    found = f"{loss.grad:g} of 12 tokens, z-loss gradient {logits.grad[0, 0] / expected:.3g}"
    return FINE if found == "9 of 12 tokens, z-loss gradient 0.75" else found


def _sequence_loss() -> str:
    """Compare the balancing loss with that of one sequence after the other."""
    tiny.start_world()
    moe = {**tiny.MOE, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0}
    router = (
        tiny.model(tiny.config(calculate_per_token_loss=True, **moe), wrap=False)
        .decoder.layers[0]
        .mlp.router
    )
    hidden = torch.randn(tiny.TOKENS, tiny.BATCH, 32, generator=torch.Generator().manual_seed(3))
    norms = []
    for pieces in (hidden.split(1, dim=1), (hidden,)):
        router.weight.grad = None
        for piece in pieces:
            (router(piece)[0] * 0).sum().backward()
        norms.append(router.weight.grad.norm())
    return FINE if torch.allclose(*norms) else f"gradient times {norms[1] / norms[0]:.3f}"


def _padding() -> torch.Tensor:
    """Return the mask of positions of `tiny.batch()` without a token: the last ones of its second
    sample.
    """
    padding = torch.zeros(tiny.BATCH, tiny.TOKENS, dtype=torch.bool)
    padding[1, tiny.TOKENS // 2 :] = True
    return padding


def _routed_padding() -> str:
    from mtrain.mcore.layers.padding import padding_is

    tiny.start_world()
    router = tiny.model(tiny.config(**tiny.MOE), wrap=False).decoder.layers[0].mlp.router
    with padding_is(_padding()):
        weights, _ = router(torch.randn(tiny.TOKENS, tiny.BATCH, 32))
    weigh = weights[_padding().t().reshape(-1)].any(dim=1).sum()
    return f"{weigh} positions of padding are weighed" if weigh else FINE


def _recomputed_padding() -> str:
    """Return whether gradients with padding are those of layers that are not computed again."""
    from mtrain.mcore.layers.padding import padding_is

    tiny.start_world()
    moe = {**tiny.MOE, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
    found = []
    for again in (
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ):
        model = tiny.model(tiny.config(**moe, **again), wrap=False)
        tiny.redraw_matrices(model)
        tokens, positions, labels = tiny.batch()
        with padding_is(_padding()):
            loss = model(tokens, positions, None, labels=labels)
        loss.sum().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    if all(torch.equal(found[0][name], found[1][name]) for name in found[0]):
        return FINE
    return "other gradients"


def _expert_gradients() -> str:
    tiny.start_world(tp=2, etp=1)
    cfg = tiny.config(
        tensor_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
        **tiny.MOE,
    )
    model = tiny.model(cfg)
    tiny.accumulate_gradients(model, cfg)
    own = torch.cat(
        [g.flatten() for name, g in tiny.gradients(model).items() if ".experts." in name]
    )
    both = [torch.empty_like(own) for _ in range(2)]
    torch.distributed.all_gather(both, own)
    return (
        FINE if torch.equal(*both) else "ranks that hold the same experts have different gradients"
    )


def _expert_norm() -> str:
    """Compare the norm with that of all gradients; each of two ranks holds two experts
    with biases.
    """
    from mtrain.mcore import api

    tiny.start_world(tp=2, ep=2, etp=1)
    degrees = {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    cfg = tiny.config(
        **degrees, sequence_parallel=True, add_bias_linear=True, moe_grouped_gemm=True, **tiny.MOE
    )
    model = tiny.model(cfg)
    for name, parameter in model.named_parameters():
        if ".experts." in name and "bias" in name:  # as TransformerEngine's layers leave them
            parameter.tensor_model_parallel = False
    tiny.accumulate_gradients(model, cfg)
    optimizer = api.get_megatron_optimizer(api.OptimizerConfig(optimizer="adam", lr=1e-2), [model])
    optimizer.prepare_grads()
    squares = torch.zeros(2, dtype=torch.float64)
    for parameter in model.parameters():
        sharded = getattr(parameter, "tensor_model_parallel", False) or not getattr(
            parameter, "allreduce", True
        )
        squares[int(sharded)] += parameter.main_grad.double().square().sum()
    torch.distributed.all_reduce(squares)
    expected = (squares[0] / 2 + squares[1]).sqrt().item()
    found = optimizer.get_grad_norm()
    return FINE if abs(found / expected - 1) < 1e-5 else f"norm times {found / expected:.4f}"


def _predicting_and_tied() -> str:
    from mtrain.mcore import api
    from mtrain.mcore.layers import backend

    tiny.start_world(pp=2)
    cfg = tiny.config(mtp_num_layers=1, pipeline_model_parallel_size=2)
    last = torch.distributed.get_rank() == 1
    provider = backend.provider(tiny.REFERENCE)
    gpt = api.GPTModel(
        config=cfg,
        transformer_layer_spec=backend.layer_spec(cfg, provider),
        vocab_size=tiny.VOCAB,
        max_sequence_length=tiny.TOKENS,
        pre_process=not last,
        post_process=last,
        share_embeddings_and_output_weights=True,
        mtp_block_spec=backend.mtp_spec(cfg, provider),
    )
    gpt.sharded_state_dict(metadata={"dp_cp_group": api.parallel_state.get_data_parallel_group()})
    return FINE


def _generating_with_predictions() -> str:
    tiny.start_world()
    tokens, positions, _ = tiny.batch()
    model = tiny.model(tiny.config(mtp_num_layers=1), wrap=False)
    calls: list[int] = []
    output = model.output_layer.register_forward_hook(lambda *_: calls.append(1))
    logits = model(tokens, positions, None)
    output.remove()
    if len(calls) > 1:
        return "logits of further tokens are made"
    if logits.shape == (tiny.BATCH, tiny.TOKENS, tiny.VOCAB):
        return FINE
    return f"logits {tuple(logits.shape)}"


def _names_of_predictions() -> str:
    tiny.start_world()
    cfg = tiny.config(mtp_num_layers=1)
    model = tiny.model(cfg)
    tiny.accumulate_gradients(model, cfg)
    names = [
        tiny.whole_name(name)
        for name, _ in model.named_parameters()
        if ".mlp." in name and "mtp." in name
    ]
    return FINE if all(".transformer_layer." in name for name in names) else names[0]


def _reduce() -> str:
    from mtrain.mcore import api

    tiny.start_world(tp=2)
    whole = torch.ones(3, 4)
    found = api.tensor_parallel.reduce_from_tensor_model_parallel_region(whole[:, ::2])
    if torch.equal(found, torch.full((3, 2), 2.0)):
        return FINE
    return f"sum over two ranks of 1 is {found[0, 0]:g}"


def _uneven_splits() -> str:
    from mtrain.mcore import api

    tiny.start_world(tp=2)
    rank = torch.distributed.get_rank()
    group = api.parallel_state.get_tensor_model_parallel_group()
    sizes = [1, 3]
    own: Any = torch.full((sizes[rank], 2), float(rank + 1), requires_grad=True)
    gathered = api.gather_from_sequence_parallel_region(own, group=group, output_split_sizes=sizes)
    (gathered * torch.arange(1.0, 5.0)[:, None]).sum().backward()
    expected = torch.tensor([1.0, 2.0, 2.0, 2.0])
    weights = [[1.0], [2.0, 3.0, 4.0]][rank]
    right = torch.equal(gathered[:, 0], expected) and own.grad[:, 0].tolist() == [
        2 * w for w in weights
    ]
    return (
        FINE if right else f"gathered {gathered[:, 0].tolist()}, gradient {own.grad[:, 0].tolist()}"
    )


def _gathered_pieces() -> str:
    from mtrain.mcore import api

    tiny.start_world(tp=2)
    own = torch.full((2, 3), float(torch.distributed.get_rank()))
    found = api.tensor_parallel.gather_split_1d_tensor(own)
    return FINE if found.tolist() == [0.0] * 6 + [1.0] * 6 else f"gathered {found.tolist()}"


def _host_weights() -> str:
    """Compare weights drawn on the host with those of the host's seed, for any seed of
    the device.
    """
    from mtrain.mcore import api

    tiny.start_world()
    drawn = []
    after = []
    for seed in (1, 2):
        torch.manual_seed(42)
        api.model_parallel_cuda_manual_seed(seed)
        layer = api.tensor_parallel.ColumnParallelLinear(
            4, 6, config=tiny.config(), init_method=torch.nn.init.normal_, bias=False
        )
        drawn.append(layer.weight)
        after.append(torch.rand(1).item())
    expected = torch.empty(6, 4).normal_(generator=torch.Generator().manual_seed(42))
    if not all(torch.equal(weight, expected) for weight in drawn):
        return "weights of the host follow the seed of the device"
    torch.manual_seed(1)
    if after[0] == torch.rand(1).item() != after[1]:
        return FINE
    return "the device's numbers are others than its seed's"


def _division() -> str:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    from mtrain.mcore import api

    tiny.start_world()
    config = api.DistributedDataParallelConfig(gradient_reduce_div_fusion=True)
    gradient = torch.ones(3)
    op = param_and_grad_buffer.gradient_reduce_preprocessing(gradient, 0.5, config)
    torch.distributed.all_reduce(gradient, op=op)
    if gradient.tolist() == [1.0] * 3:
        return FINE
    return f"sum over two ranks of a half is {gradient.tolist()}"


def _gradient_norm() -> str:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    tiny.start_world()
    gradient = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 1e-3
    found = get_grad_norm_fp32(
        [gradient, gradient], grad_stats_parallel_group=torch.distributed.group.WORLD
    )
    error = abs(found / (gradient.double().norm().item() * 2**0.5) - 1)
    if error < 1e-6:
        return FINE
    return f"off by {'more' if error > 1e-5 else 'less'} than 1e-5"


def _optimizer(model: Any) -> Any:
    from mtrain.mcore import api

    config = api.OptimizerConfig(
        optimizer="adam", lr=1e-2, clip_grad=1.0, use_distributed_optimizer=True
    )
    return api.get_megatron_optimizer(config, [model]).chained_optimizers[0]


def _trainee() -> tuple[Any, Any, Callable[[], None]]:
    cfg = tiny.config()
    model = tiny.model(cfg, distributed_optimizer=True)
    optimizer = _optimizer(model)

    def step() -> None:
        optimizer.zero_grad()
        tiny.accumulate_gradients(model, cfg)
        optimizer.step()

    return model, optimizer, step


def _state_before_first_step() -> str:
    tiny.start_world()
    _, optimizer, _ = _trainee()
    optimizer.state_dict()
    return FINE


def _resume() -> str:
    tiny.start_world()
    equal = tiny.resumes_bitwise(_trainee, 3)
    return FINE if equal else "weights differ three steps after the resume"


def _recomputed_bias() -> str:
    tiny.start_world()
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    model = tiny.model(tiny.config(add_bias_linear=True, **recomputed), wrap=False)
    tokens, positions, labels = tiny.batch()
    model(tokens, positions, None, labels=labels)
    outputs = [name for name, parameter in model.named_parameters() if not parameter.is_leaf]
    return f"{outputs[0]} became an output of its own recomputation" if outputs else FINE


def _short_groups() -> str:
    """Compare gradients of three layers that are recomputed in groups of two and one with stored
    ones.
    """
    tiny.start_world()
    found = []
    for again in (
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    ):
        cfg = tiny.config(num_layers=3, **again)
        model = tiny.model(cfg)
        tiny.redraw_matrices(model)
        tiny.accumulate_gradients(model, cfg)
        found.append(tiny.gradients(model))
    if all(torch.equal(found[0][name], found[1][name]) for name in found[0]):
        return FINE
    return "other gradients"


def _refilled_outputs() -> str:
    """Recompute a norm without ninja."""
    os.environ["PATH"] = ""
    return _train(recompute_granularity="selective", recompute_modules=["layernorm"])


def _evaluated_offload() -> str:
    """Train, evaluate and train again, with activations that wait in host memory."""
    let_offload()
    tiny.start_world()
    modules = {"offload_modules": ["core_attn", "attn_proj"], "min_offloaded_tensor_size": 1}
    cfg = tiny.config(fine_grained_activation_offloading=True, **modules)
    net = tiny.model(cfg)
    tiny.accumulate_gradients(net, cfg, number=3)
    with torch.no_grad():
        tiny.accumulate_gradients(net.eval(), cfg, number=2, forward_only=True)
    tiny.accumulate_gradients(net.train(), cfg, number=3)
    return FINE


def _trains_as_without(optim: dict[str, Any] | None = None, **parallel: Any) -> str:
    """Compare losses and norms of a run with these keys of `parallel` and `optim` with a
    plain run.
    """
    # it is installed already, with the patches of this case
    mcore.install = lambda device: None  # type: ignore[assignment,misc]
    dtype = parallel.pop("dtype", "fp32")
    model = parallel.pop("model", {})
    axes: dict[str, Any] = {key: parallel[key] for key in ("ranks", "pp", "tp") if key in parallel}
    runs = [
        tiny_run(model={"num_layers": 2, **model}, dtype=dtype, optim=changes, **keys)
        for keys, changes in ((axes, None), (parallel, optim))
    ]
    if dtype == "fp16":
        runs = [
            r.model_copy(
                update={"precision": PrecisionConfig(dtype="fp16", initial_loss_scale=16.0)}
            )
            for r in runs
        ]
    try:
        (expected, norm), (loss, found) = (train_steps(run, 2)[-1] for run in runs)
    except KeyError:  # whose text would be a whole tensor
        return "KeyError"
    tolerance = 1e-5 if dtype == "fp32" else 1e-2
    equal = abs(loss / expected - 1) < tolerance and abs(found / norm - 1) < tolerance
    return FINE if equal else f"loss {loss} instead of {expected}, norm {found} instead of {norm}"


def _captured_inputs() -> str:
    """Compare the second step of captured layers with that of others."""
    mcore.install = lambda device: None  # type: ignore[assignment,misc]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtrain.mcore.layers.linear._adds_in_place", lambda x, weight: False)
        _, (_, norm) = train_steps(tiny_run(), 2)
        let_capture(patch)
        _, (_, found) = train_steps(tiny_run(trainer={"cuda_graph_impl": "local"}), 2)
    return FINE if abs(found / norm - 1) < 1e-5 else f"norm {found} instead of {norm}"


def _default_norm() -> str:
    from mtrain.mcore.layers import backend

    cfg = tiny.config(sequence_parallel=True, tensor_model_parallel_size=2)
    one_layer = backend.one_layer_spec(cfg, backend.provider(tiny.REFERENCE), moe=False)
    return _train({"tp": 2}, one_layer, sequence_parallel=True)


def _rng_remark() -> str:
    from mtrain.mcore import api

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    tiny.start_world()
    with api.get_cuda_rng_tracker().fork():
        torch.rand(1)
    return said[0] if said else FINE


CASES: dict[str, Case] = {
    "router-gemm": Case(lambda: _train(**tiny.MOE), "NameError: name 'te_general_gemm'"),
    "mla-flag": Case(lambda: _train(**tiny.MLA), "TypeError: isinstance"),
    "mla-down-projection": Case(
        lambda: _train(**tiny.MLA), "ValueError: Unsupported linear_q_down_proj"
    ),
    "mla-query-projection": Case(
        lambda: _train(**tiny.MLA | {"q_lora_rank": None}),
        "RuntimeError: qk_layernorm requires TransformerEngine",
    ),
    "mla-query-norm": Case(_query_norm, "gradient times 2.000", ranks=2),
    "moe-loss-tokens": Case(
        _moe_loss_tokens, "(6|12) of 12 tokens, z-loss gradient (0.5|1)$", ranks=2
    ),
    "sequence-loss-batch": Case(_sequence_loss, "gradient times 0.500"),
    "routed-padding": Case(_routed_padding, "8 positions of padding are weighed"),
    "expert-gradients": Case(_expert_gradients, "have different gradients", ranks=2),
    "expert-norm": Case(_expert_norm, "norm times 0.9", ranks=2),
    "gate-slices": Case(
        lambda: _train({"tp": 2}, num_query_groups=1, attention_output_gate=True),
        "RuntimeError: (shape|The size)",
        ranks=2,
    ),
    "mtp-tied-output": Case(_predicting_and_tied, "AssertionError: dict_keys", ranks=2),
    "mtp-without-labels": Case(
        _generating_with_predictions,
        "AttributeError: 'NoneType' object has no attribute|logits of further tokens",
    ),
    "mtp-names": Case(_names_of_predictions, r"mtp\.layers\.0\.mtp_model_layer"),
    "reduce-result": Case(_reduce, "sum over two ranks of 1 is 1", ranks=2),
    "uneven-splits": Case(_uneven_splits, "RuntimeError: .*invalid tensor size", ranks=2),
    "gathered-pieces": Case(_gathered_pieces, "RuntimeError|ValueError", ranks=2),
    "host-weights": Case(_host_weights, "weights of the host follow the seed of the device"),
    "gradient-norm": Case(_gradient_norm, "off by more than 1e-5"),
    "optimizer-state-before-first-step": Case(_state_before_first_step, "AssertionError"),
    "optimizer-state-loading": Case(
        _resume, "leaf Variable that requires grad is being used in an in-place|KeyError: 'step'"
    ),
    "optimizer-step-counters": Case(_resume, "weights differ three steps after"),
    "te-version": Case(
        lambda: _trains_as_without(LOW_PRECISION, dtype="bf16", distributed_optimizer=True),
        "TypeError: '>=' not supported between instances of 'NoneType'",
    ),
    "checkpoint-without-fp8": Case(
        lambda: _train(
            recompute_granularity="selective", recompute_modules=["core_attn", "layernorm", "mlp"]
        ),
        "NameError: name 'FP8GlobalStateManager'",
    ),
    "recomputed-bias": Case(
        _recomputed_bias, "mlp.linear_fc2.bias became an output of its own recomputation"
    ),
    "recomputed-padding": Case(_recomputed_padding, "other gradients|Error"),
    "captured-inputs": Case(_captured_inputs, "norm .* instead of"),
    "short-groups": Case(_short_groups, "IndexError: index 3 is out of range"),
    "refilled-outputs": Case(_refilled_outputs, "RuntimeError: Ninja is required"),
    "evaluated-offload": Case(_evaluated_offload, "AssertionError: Chunk mismatch"),
    "offloaded-shards": Case(
        lambda: _trains_as_without({"cpu_offload": 0.5}, distributed_optimizer=True),
        "non-leaf Tensor",
    ),
    "offloaded-main-weights": Case(
        lambda: _trains_as_without({"cpu_offload": 0.5}, dtype="bf16"), "KeyError"
    ),
    "offloaded-copies": Case(
        lambda: _trains_as_without({"cpu_offload": 1.0}), "loss .* instead of"
    ),
    "norm-groups": Case(
        lambda: _trains_as_without(ranks=2, fsdp="fsdp2", hsdp_replicas=2),
        "RuntimeError: .*mesh_dim",
        ranks=2,
    ),
    "fsdp-te-linear": Case(
        lambda: _trains_as_without(ranks=2, tp=2, **MEGATRON), "TypeError: isinstance", ranks=2
    ),
    "fsdp-optim-replicas": Case(
        lambda: _trains_as_without(
            ranks=2, hsdp_replicas=2, fsdp="megatron", fsdp_sharding="optim"
        ),
        "norm .* instead of",
        ranks=2,
    ),
    "fsdp-lone-rank": Case(lambda: _trains_as_without(**MEGATRON), "norm .* instead of"),
    "fsdp-division": Case(_division, "RuntimeError|ReduceOp|PREMUL", ranks=2),
    "fsdp-meshes": Case(
        lambda: _trains_as_without(ranks=2, pp=2, **MEGATRON), "Shape mismatch", ranks=2
    ),
    "fsdp-checks": Case(
        lambda: _trains_as_without(
            ranks=4, tp=2, pp=2, layers_per_stage=(1, 3), model={"num_layers": 4}, **MEGATRON
        ),
        "TypeError|RankFailed|had not returned",
        ranks=4,
    ),
    "fsdp-tied-stages": Case(
        lambda: _trains_as_without(ranks=4, pp=2, model={"tie_word_embeddings": True}, **MEGATRON),
        "RuntimeError: attempting to assign a gradient of size",
        ranks=4,
    ),
    "fsdp-unscaling": Case(
        lambda: _trains_as_without(ranks=2, dtype="fp16", **MEGATRON),
        "AttributeError: 'NoneType'",
        ranks=2,
    ),
    "torch-norm": Case(_default_norm, "AssertionError: sequence parallel not supported", ranks=2),
    "gated-delta-without-fla": Case(
        lambda: _train(**tiny.GATED_DELTA), "ImportError: FLA is not installed"
    ),
    "gated-delta-norm": Case(tiny.gated_delta_norm, "the gradient of one rank's heads", ranks=2),
    "rng-remark": Case(_rng_remark, "CPU RNG state changed"),
}


def outcome(case: Case) -> str:
    """Return the result of `case` on ranks forked from this process, which has the adapter
    installed.
    """
    try:
        return next((v for v in run_ranks(case.ranks, case.run, timeout_s=60) if v != FINE), FINE)
    except RankFailed as failure:
        return str(failure).strip().splitlines()[-1]


def _without(name: str) -> str:
    import_engine(without=(name,))
    return outcome(CASES[name])


def main() -> None:
    """Print {patch: the result of its case without it} of the patches named in the arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_core(registry.get("cpu"))
        # imported before the forks to spare each of them the time; binds nothing that a patch
        # replaces
        modules = [
            f"megatron.core.{m}"
            for m in ("models.gpt", "distributed", "optimizer", "pipeline_parallel")
        ]
        for module in (
            *modules,
            "mtrain.config.compose.yaml_reader",
            "mtrain.data",
            "tokenizers",
            "safetensors.torch",
        ):
            importlib.import_module(module)
        ops()
    print(json.dumps({name: run_alone(partial(_without, name)) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
