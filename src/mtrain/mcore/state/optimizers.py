"""The class that megatron-core builds its optimizers of: torch's, TransformerEngine's, or one of
ours.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from mtrain.mcore.adapter.installed import require_installed

require_installed()  # nothing of megatron may be imported before this line

from megatron.core import optimizer as core  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer  # noqa: E402


@dataclass
class OwnOptimizerConfig(OptimizerConfig):
    """megatron-core's configuration where the class is ours.

    Its own check asks for TransformerEngine wherever the optimizer holds the main weights, and
    wants fp32 moments elsewhere; ours needs neither.
    """

    def __post_init__(self) -> None:
        self.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = self.use_precision_aware_optimizer


def use_torch() -> None:
    """Let megatron-core build torch's AdamW and SGD, also where TransformerEngine is installed."""
    _use(torch.optim.AdamW, torch.optim.SGD, own_names=False)


def use_te() -> None:
    """Let megatron-core build TransformerEngine's fused optimizers.

    Raises:
        ImportError: it is not installed.
    """
    te = importlib.import_module("transformer_engine.pytorch.optimizers")
    _use(te.FusedAdam, te.FusedSGD, own_names=True)


def use_own(base: type, **kept: Any) -> None:
    """Let megatron-core build `base` where it says Adam; `kept` are its arguments but those that
    any Adam has.

    Ours have the interface of TransformerEngine's Adam, so megatron-core takes the same way with
    them: main weights may be the optimizer's, and its state is made by `initialize_state`. Their
    step count is a number of each parameter group, so no two parameters can share one, and a resume
    cannot count twice.
    """

    class Own(base):  # type: ignore[misc, valid-type]
        def __init__(self, params: Any, **passed: Any) -> None:
            # megatron-core also passes dtypes and main weights; `kept` has those of the run.
            known = {
                k: passed[k]
                for k in ("lr", "weight_decay", "betas", "eps", "adam_w_mode")
                if k in passed
            }
            super().__init__(params, **known, **kept)

    _use(Own, torch.optim.SGD, own_names=True)


def _use(adam: type, sgd: type, *, own_names: bool) -> None:
    """Set the names that megatron-core's modules found when they were imported."""
    core.Adam = adam
    core.SGD = sgd
    core.USING_PYTORCH_OPTIMIZER = not own_names
    distrib_optimizer.Adam = adam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = own_names
