"""`model.activation` names one function: an MLP computes it with megatron-core's fusions and
without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mtrain.config.engine.core_fields import transformer_values
from mtrain.config.messages.keys import choices_of
from mtrain.config.rules import apply
from mtrain.config.schema.model import MoEConfig
from mtrain.config.schema.run import RunConfig
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": lambda g: g / (1 + (-g).exp()),
    "geglu": lambda g: g * (1 + torch.erf(g / 2**0.5)) / 2,
    "geglu_tanh": lambda g: g * (1 + torch.tanh((2 / math.pi) ** 0.5 * (g + 0.044715 * g**3))) / 2,
    "quick_geglu": lambda g: g / (1 + (-1.702 * g).exp()),
    "gelu": lambda g: g * (1 + torch.erf(g / 2**0.5)) / 2,
    "gelu_tanh": lambda g: g * (1 + torch.tanh((2 / math.pi) ** 0.5 * (g + 0.044715 * g**3))) / 2,
    "relu": lambda g: g.clamp(min=0),
    "squared_relu": lambda g: g.clamp(min=0) ** 2,
}


def _mlp_is_off_by(run: RunConfig) -> float:
    """Return the error of megatron-core's MLP of a run against its formula, with portable layers
    whatever `kernels` says.
    """
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    from mtrain.assembly.model import transformer_config
    from mtrain.devices import registry
    from mtrain.mcore import api
    from mtrain.mcore.layers.linear import ColumnLinear, RowLinear
    from mtrain.world.init import joined

    with joined(tiny_run()), torch.compiler.set_stance("force_eager"):
        config = transformer_config(run, registry.get("cpu"))
        mlp = MLP(
            config,
            MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear),
            tp_group=api.parallel_state.get_tensor_model_parallel_group(),
        )
        for parameter in mlp.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        x = torch.randn(8, 1, run.model.hidden_size)
        found = mlp(x)[0].double()
        weights = {name: value.double() for name, value in mlp.named_parameters()}
        inner = x.double() @ weights["linear_fc1.weight"].T + weights.get("linear_fc1.bias", 0.0)
        act = ACTIVATIONS[run.model.activation]
        if run.model.gated:
            gate, up = inner.chunk(2, -1)
            y = act(gate) * up
        else:
            y = act(inner)
        right = y @ weights["linear_fc2.weight"].T
        return float((found - right).norm() / right.norm())


def _experts_are_off_by(run: RunConfig) -> float:
    """Return the same for megatron-core's grouped experts, one of which gets no rows, in a joined
    world.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from mtrain.assembly.model import transformer_config
    from mtrain.devices import registry
    from mtrain.mcore.layers.grouped_linear import ColumnGroupedLinear, RowGroupedLinear

    experts = TEGroupedMLP(
        3,
        transformer_config(run, registry.get("cpu")),
        MLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(9, run.model.hidden_size)
    shares = torch.rand(9)
    rows = torch.tensor([5, 0, 4])
    found = experts(x, rows, shares)[0].double()
    weights = {name: value.double() for name, value in experts.named_parameters()}
    act = ACTIVATIONS[run.model.activation]
    right = []
    for e, (part, share) in enumerate(
        zip(x.double().split([5, 0, 4]), shares.double().split([5, 0, 4]), strict=True)
    ):
        inner = part @ weights[f"linear_fc1.weight{e}"].T + weights.get(f"linear_fc1.bias{e}", 0.0)
        gate, up = inner.chunk(2, -1) if run.model.gated else (inner, 1.0)
        y = act(gate) * up @ weights[f"linear_fc2.weight{e}"].T + weights.get(
            f"linear_fc2.bias{e}", 0.0
        )
        right.append(share[:, None] * y)
    return float((found - torch.cat(right)).norm() / torch.cat(right).norm())


@pytest.mark.parametrize("linear", ["reference", "te"])
def test_named_activation_experts_compute_it_fused_or_not(linear: str) -> None:
    moe = MoEConfig(num_experts=3, ffn_hidden_size=64)
    runs = [
        apply(
            tiny_run(model={"activation": kind, "add_bias_linear": bias, "moe": moe}),
            {"kernels.linear": linear},
        )
        for kind in ACTIVATIONS
        for bias in (False, True)
    ]

    def errors() -> list[float]:
        from mtrain.world.init import joined

        with joined(tiny_run()), torch.compiler.set_stance("force_eager"), torch.no_grad():
            return [_experts_are_off_by(run) for run in runs]

    found = run_ranks(1, errors)[0]
    wrong = {
        (r.model.activation, r.model.add_bias_linear): e
        for r, e in zip(runs, found, strict=True)
        if e > 1e-5
    }
    assert not wrong


@pytest.mark.parametrize("linear", ["reference", "te"])
def test_named_activation_mlp_computes_it_fused_or_not(linear: str) -> None:
    """Choose only the fusions with `te` here: they are megatron-core's own functions, which run
    anywhere.
    """
    assert set(ACTIVATIONS) == set(choices_of("model.activation") or ())
    runs = [
        apply(
            tiny_run(model={"activation": kind, "add_bias_linear": bias}),
            {"kernels.linear": linear},
        )
        for kind in ACTIVATIONS
        for bias in (False, True)
    ]
    found = run_ranks(1, lambda: [_mlp_is_off_by(run) for run in runs])[0]
    wrong = {
        (r.model.activation, r.model.add_bias_linear): e
        for r, e in zip(runs, found, strict=True)
        if e > 1e-5
    }
    assert not wrong


def test_named_activation_triton_computes_it() -> None:
    """Map the activation's function in the configuration to the layer in TransformerEngine's
    place.
    """
    gated = ("swiglu", "geglu", "geglu_tanh")
    runs = [
        apply(tiny_run(model={"activation": kind}), {"kernels.activation": "triton"})
        for kind in gated
    ]

    def kinds() -> list[str]:
        from mtrain.assembly.model import transformer_config
        from mtrain.devices import registry
        from mtrain.mcore.layers.portable import Activation

        return [Activation(transformer_config(run, registry.get("cpu"))).kind for run in runs]

    assert tuple(run_ranks(1, kinds)[0]) == gated


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "geglu", "geglu_tanh"])
def test_named_activation_experts_have_no_fused_gelu(kind: str) -> None:
    """Expect megatron-core's grouped experts to refuse it when they run."""
    model = {
        "activation": kind,
        "add_bias_linear": True,
        "moe": MoEConfig(num_experts=4, ffn_hidden_size=64),
    }
    values = transformer_values(apply(tiny_run(model=model), {"kernels.linear": "te"}))
    assert (values["bias_activation_fusion"], values["activation_func"]) == (False, kind)
