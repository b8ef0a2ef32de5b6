"""An optimizer with the interface of the fused Adam that megatron-core's distributed optimizer
drives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.optimizer.op import FLOATS, MOMENTS, adamw_
from mtrain_kernels.optimizer.reference import Hyper, Lists
from mtrain_kernels.optimizer.rounding import (
    join_master,
    load_moment,
    scales_of,
    split_master,
    store_moment,
)

MASTER = "master_param"
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Adam, or AdamW with `adam_w_mode`, on fp32, fp16 or bf16 parameters, a launch for each
    combination of dtypes.

    Arguments and state are named as TransformerEngine and megatron-core name them. `exp_avg_dtype`
    and `exp_avg_sq_dtype` are fp32, bf16 or uint8 (eight bits with a scale for 128 elements).
    `master_weights` keeps an fp32 `master_param`, or with `store_param_remainders` the 16 bits of
    it that a bf16 parameter has not. `use_decoupled_grad` reads `param.decoupled_grad`, which may
    have any dtype, instead of `param.grad`. Without masters `stochastic_rounding` keeps bf16
    weights and moments right on average, with numbers that depend on `seed`, step, place of the
    parameter and element only. The step count is an int in each parameter group, and never a
    tensor that parameters could share. `capturable` reads step and learning rate from the device,
    so that a CUDA graph of `step`, captured after a step without one, follows them: call `advance`
    before each replay. Parameters must be contiguous. Raises `ValueError` for what does not fit.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        capturable: bool = False,
        impl: str = "auto",
    ) -> None:
        if amsgrad or master_weight_dtype != torch.float32:
            raise ValueError(
                f"amsgrad {amsgrad} and masters in {master_weight_dtype} are not offered: False and"
                " fp32 are"
            )
        if exp_avg_dtype not in MOMENTS or exp_avg_sq_dtype not in MOMENTS:
            raise ValueError(
                f"moments in {exp_avg_dtype} and {exp_avg_sq_dtype}: choose of {MOMENTS}"
            )
        if store_param_remainders and not master_weights:
            raise ValueError(
                "store_param_remainders keeps a part of masters: it needs master_weights"
            )
        if not (
            lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)
        ):
            raise ValueError(
                f"lr {lr}, eps {eps}, weight_decay {weight_decay} or betas {betas} out of range"
            )
        self.moment_dtypes = dict(zip(MOMENT_NAMES, (exp_avg_dtype, exp_avg_sq_dtype), strict=True))
        self.master_weights = master_weights
        self.store_param_remainders = store_param_remainders
        self.use_decoupled_grad = use_decoupled_grad
        self.adam_w_mode = adam_w_mode
        self.stochastic_rounding = stochastic_rounding
        self.seed = seed
        self.impl = impl
        self.capturable = capturable
        # of each group by its place: learning rate and step in fp64
        self._clocks: dict[int, Tensor] = {}
        self._scales: dict[Tensor, dict[str, Tensor]] = {}
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay, "step": 0})

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Make the state of a parameter: zero moments, and the master that the parameter's value
        asks for.
        """
        if store_param_remainders is None:
            remainders = self.store_param_remainders
        else:
            remainders = store_param_remainders
        state = self.state[param]
        self._scales[param] = {}
        for name, dtype in self.moment_dtypes.items():
            state[name] = torch.zeros_like(
                param, dtype=dtype, memory_format=torch.contiguous_format
            )
            self._add_scale(param, name)
        if self.master_weights:
            halved = remainders and param.dtype == torch.bfloat16
            if halved:
                # A bf16 parameter is the upper half of its master, so the rest starts at zero.
                state[MASTER] = torch.zeros_like(param, dtype=torch.int16)
            else:
                state[MASTER] = param.detach().float().clone()

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """Return a moment or the whole master of a parameter in fp32, however it is kept; fp32
        state is returned itself.
        """
        kept = self.state[param][state_name]
        if state_name == MASTER:
            return join_master(param.detach(), kept) if kept.dtype == torch.int16 else kept
        scale = self._scales.get(param, {}).get(state_name)
        return load_moment(kept.view(-1), scale, state_name == "exp_avg_sq").view(kept.shape)

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Store a moment or a master given in fp32 in its own format; a remainder takes the
        parameter's own bits with it.

        A master in int16 is taken as the remainder itself. What is no tensor stays as it is:
        megatron-core passes its own marks, such as `padding`, along with a parameter's tensors.
        """
        if not isinstance(unscaled_state, Tensor):
            return
        if state_name not in self.state[param]:
            self.initialize_state(param)
        kept = self.state[param][state_name]
        value = unscaled_state.to(param.device).reshape(param.shape)
        if state_name == MASTER and kept.dtype == torch.int16 and value.dtype != torch.int16:
            weight, remainder = split_master(value.float())
            param.copy_(weight)
            kept.copy_(remainder)
        elif state_name == MASTER or value.dtype == kept.dtype == torch.uint8:
            kept.copy_(value)
        else:
            stored, scale = store_moment(
                value.reshape(-1).float(), kept.dtype, state_name == "exp_avg_sq"
            )
            kept.view(-1).copy_(stored)
            if scale is not None:
                self._scales[param][state_name] = scale

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, grad_scale: Tensor | None = None
    ) -> Any:
        """Return one step on every parameter that has a gradient; `grad_scale` [] fp32 multiplies
        the gradients first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A capture records a step that is replayed later; `advance` counts each replay.
        if not (self.capturable and _capturing()):
            self.advance()
        stream = 0
        for group in self.param_groups:
            self._update(group, stream, grad_scale)
            stream += len(group["params"])
        return loss

    def advance(self) -> None:
        """Count a step in each group, and writes it and the learning rate to the device if
        `capturable`.
        """
        for place, group in enumerate(self.param_groups):
            group["step"] = int(group["step"]) + 1
            if self.capturable and group["params"]:
                now = torch.tensor((float(group["lr"]), group["step"]), dtype=torch.float64)
                device = group["params"][0].device
                if place not in self._clocks:
                    self._clocks[place] = now.to(device)
                elif device.type == "cuda":
                    # Pinned memory, so that the host does not wait for the copy.
                    self._clocks[place].copy_(now.pin_memory(), non_blocking=True)
                else:
                    self._clocks[place].copy_(now)

    def _clock(self, group: dict[str, Any]) -> Tensor | None:
        place = next(i for i, other in enumerate(self.param_groups) if other is group)
        return self._clocks.get(place)

    def _update(self, group: dict[str, Any], stream: int, grad_scale: Tensor | None) -> None:
        """Step the parameters of one group, a launch for each combination of dtypes."""
        buckets: dict[tuple[Any, ...], list[tuple[int, Tensor, Tensor]]] = {}
        for number, param in enumerate(group["params"], stream + 1):
            if not self.state[param]:
                self.initialize_state(param)
            grad = self._gradient(param)
            if grad is not None and param.numel():
                master = self.state[param].get(MASTER)
                kind = (
                    param.device,
                    param.dtype,
                    grad.dtype,
                    None if master is None else master.dtype,
                )
                buckets.setdefault(kind, []).append((number, param, grad))
        for bucket in buckets.values():
            streams, params, grads = zip(*bucket, strict=True)
            lists = self._lists(params, grads)
            clock = self._clock(group)
            adamw_(
                lists,
                self._hyper(group),
                streams=streams,
                grad_scale=grad_scale,
                clock=clock,
                impl=self.impl,
            )

    def _gradient(self, param: Tensor) -> Tensor | None:
        return getattr(param, "decoupled_grad" if self.use_decoupled_grad else "grad", None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget or zeroes the gradients, the decoupled ones where they are used."""
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for param in group["params"]:
                if set_to_none:
                    param.decoupled_grad = None
                elif getattr(param, "decoupled_grad", None) is not None:
                    param.decoupled_grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as it is kept, scales as `<moment>_scale` beside their moments; see
        `load_state_dict`.
        """
        packed = super().state_dict()
        order = [param for group in self.param_groups for param in group["params"]]
        for index, state in packed["state"].items():
            scales = self._scales.get(order[index], {})
            packed["state"][index] = {
                **state,
                **{f"{name}_scale": scale for name, scale in scales.items()},
            }
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state to the bit where it is kept in this optimizer's dtypes, else converts it
        through fp32.

        The state of torch.optim.AdamW is understood too: its step tensors become the int of each
        group. Raises `ValueError` where groups or parameters do not match.
        """
        # torch would cast the state to the parameters' dtype; `_load` keeps it to the bit.
        super().load_state_dict({**state_dict, "state": {}})
        self._scales.clear()
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            if index in state_dict["state"]:
                self._load(param, state_dict["state"][index])
        for group in self.param_groups:
            # Groups that another optimizer saved may lack some of these keys.
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            steps = {
                int(state_dict["state"][i]["step"])
                for i, param in zip(saved, params, strict=True)
                if any(param is p for p in group["params"])
                and "step" in state_dict["state"].get(i, {})
            }
            if len(steps) > 1:
                raise ValueError(f"parameters of one group are at different steps: {sorted(steps)}")
            group["step"] = steps.pop() if steps else group["step"]

    def _load(self, param: Tensor, saved: dict[str, Tensor]) -> None:
        self.initialize_state(param)
        for name, kept in self.state[param].items():
            if name not in saved:
                continue
            value = saved[name].to(param.device)
            if value.numel() != param.numel():
                raise ValueError(
                    f"{name} {tuple(value.shape)} does not fit a parameter {tuple(param.shape)}"
                )
            if name != MASTER and value.dtype == torch.uint8:
                scale = saved.get(f"{name}_scale", torch.ones(scales_of(param.numel()))).to(
                    param.device
                )
                if kept.dtype == torch.uint8:
                    self._scales[param][name].copy_(scale)
                else:
                    value = load_moment(value.view(-1), scale, name == "exp_avg_sq")
            if value.dtype == kept.dtype:
                kept.copy_(value.view(kept.shape))
            else:
                self.set_scaled_state(param, name, value)

    def _add_scale(self, param: Tensor, name: str) -> None:
        if self.moment_dtypes[name] == torch.uint8:
            self._scales[param][name] = torch.ones(scales_of(param.numel()), device=param.device)

    def _lists(self, params: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Lists:
        for param, grad in zip(params, grads, strict=True):
            if (
                param.dtype not in FLOATS
                or not param.is_contiguous()
                or grad.numel() != param.numel()
            ):
                raise ValueError(
                    f"a parameter {tuple(param.shape)} {param.dtype} with a gradient"
                    f" {tuple(grad.shape)}"
                )
        for param in params:
            missing = {*MOMENT_NAMES, *([MASTER] * self.master_weights)} - self.state[param].keys()
            if missing:
                raise RuntimeError(
                    f"a parameter {tuple(param.shape)} was given a state without {sorted(missing)}"
                )
        state = [self.state[param] for param in params]
        scales = [self._scales.get(param, {}) for param in params]
        return Lists(
            [param.detach() for param in params],
            [grad.detach().contiguous() for grad in grads],
            [s["exp_avg"] for s in state],
            [s["exp_avg_sq"] for s in state],
            [s[MASTER] for s in state] if self.master_weights else [],
            self._scales_of("exp_avg", scales),
            self._scales_of("exp_avg_sq", scales),
        )

    def _scales_of(self, moment: str, scales: list[dict[str, Tensor]]) -> list[Tensor]:
        # only eight bits have scales, and an empty list tells the kernel so
        return [s[moment] for s in scales] if self.moment_dtypes[moment] == torch.uint8 else []

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        step = group["step"]
        beta1, beta2 = group["betas"]
        corrected = group["bias_correction"]
        return Hyper(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            bias1=1 - beta1**step if corrected else 1.0,
            bias2=1 - beta2**step if corrected else 1.0,
            decoupled=self.adam_w_mode,
            stochastic=self.stochastic_rounding,
            seed=self.seed,
            step=step,
        )


def _capturing() -> bool:
    """Return whether what is launched now goes into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
