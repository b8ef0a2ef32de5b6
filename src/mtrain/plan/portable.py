"""The run as it is traced: on a CPU, with the portable kernels, at its real size."""

from __future__ import annotations

from mtrain.config.machine.devices import CPU
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.models.rank import Rank
from mtrain.plan.shrink import MACHINE, on_a_cpu


def portable(run: RunConfig) -> RunConfig:
    """Return a resolved run with its model, layout and batch as they are, on synthetic tokens,
    without CUDA graphs and copies of activations to host memory.

    TransformerEngine's, Triton's and torch's kernels for a GPU become those of a CPU, which save
    the same tensors. Two stay as they are: the implementation of the loss, and Triton's attention,
    since a CPU's saves scores as well. Products in eight bits become products in the format of the
    weights.
    """
    run = run.on_any_device()
    kernels = {**on_a_cpu(run), **({"loss": "megatron"} if run.kernels.loss == "megatron" else {})}
    kernels |= {"attention": "triton"} if Rank.of(run).words["attention"] == "triton" else {}
    values = {
        "precision": run.precision.unquantized(run.precision.format),
        "data": run.data.model_copy(
            update={"kind": "mock", "path": None, "blend": None, "blend_weights": None}
        ),
        "kernels": run.kernels.model_copy(update=kernels),
        "cluster": run.cluster.model_copy(
            update={"device": CPU.name, "nodes": 1, "devices_per_node": None, "peak_tflops": {}}
        ),
    }
    return resolve(RunConfig.model_validate(run.model_copy(update=values).model_dump()), MACHINE)
