"""The critic of a run: the policy with a value head in place of the output layer, at another
rate.
"""

from __future__ import annotations

from typing import Any

from mtrain.config.schema.run import RunConfig


def critic_of(run: RunConfig) -> RunConfig | None:
    """Return the run that the critic of a resolved run is, in the policy's layout; None without
    one.
    """
    o = run.objective
    # The run of a critic has none itself.
    if not o.criticises or run.model.head is not None:
        return None
    assert o.critic_lr is not None
    share = o.critic_lr / run.optim.lr
    rates: dict[str, Any] = {"lr": o.critic_lr, "min_lr": run.optim.min_lr * share}
    # Some optimizers have further rates, in a section of their own.
    own = getattr(run.optim, run.optim.name, None)
    further = {key: value for key, value in own or () if key.endswith("_lr") and value is not None}
    if own is not None and further:
        scaled = {key: value * share for key, value in further.items()}
        rates[run.optim.name] = own.model_copy(update=scaled)
    sections = {
        "model": run.model.model_copy(update={"head": "value"}),
        "optim": run.optim.model_copy(update=rates),
        # A critic is not compared with a reference, and the run has one model of rewards.
        "rollout": run.rollout.model_copy(update={"reward_model": None}),
        "objective": o.model_copy(update={"kl_coef": 0.0, "kl_in_reward": 0.0}),
    }
    return run.model_copy(update=sections)
