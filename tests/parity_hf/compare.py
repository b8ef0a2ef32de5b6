"""One configuration on both sides, with the same weights and the same tokens: how far they are
apart.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import check
from mtrain.errors import ConfigError
from mtrain.models.gpt.hf import TABLES
from mtrain.models.table import to_ours, to_theirs
from mtrain.recipes.delta import delta, recipe_text
from mtrain.recipes.huggingface.importer import import_config
from tests.parity_hf import hf_reference

BATCH = 2
PROMPT = 8
NEW_TOKENS = 24
STEPS = 2
COMMON = (
    "cluster=cpu",
    f"trainer.global_batch_size={BATCH}",
    f"trainer.micro_batch_size={BATCH}",
    "trainer.eval_iters=0",
    "optim.lr=1e-2",
    "optim.warmup_iters=0",
    "optim.schedule=constant",
    "optim.clip_grad=0.5",
    # not so small that Adam makes a full step of the rounding in a gradient that is 0, such as that
    # of a key's bias
    "optim.eps=1e-4",
)
UNTAUGHT = ".indexer."
"""Part of the names of weights that transformers does not train."""
LEARNS_LITTLE = ("model.dsa.indexer_loss_coeff=1e-12",)
CHANGES_NUMBERS = ("not supported", "unknown")
"""Reasons for leaving out a key without which the model is another one."""


@dataclass
class Case:
    """A configuration of transformers; `length` tokens a sample, `extra` keys of ours."""

    kind: str
    values: dict[str, Any]
    length: int = 40
    extra: tuple[str, ...] = ()
    seed: int = 0
    flaw: float = 0.0
    """Share by which our last norm is made larger than theirs, for a test of the comparison."""


@dataclass
class Result:
    """Result of a comparison."""

    refused: list[str] = field(default_factory=list)
    """Keys that the import names because it cannot take them over; then nothing is compared."""
    problems: list[str] = field(default_factory=list)
    """Problems of the import, or findings of rules on our keys; then nothing is compared."""
    errors: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Largest relative error of each quantity, and where."""
    text: tuple[list[int], list[int]] = ((), ())  # type: ignore[assignment]

    def note(
        self, quantity: str, where: str, ours: Tensor, other: Tensor, scale: Tensor | None = None
    ) -> None:
        """Keep how far a tensor is from the other, as a share of the largest of `scale`, or of the
        other.
        """
        if not ours.numel():
            return
        ours = ours.detach()
        other = other.detach()
        size = float((other if scale is None else scale.detach()).abs().max())
        apart = float((ours - other).abs().max())
        error = apart / size if size > 0 else apart
        error = math.inf if math.isnan(error) else error
        if error > self.errors.get(quantity, (-1.0, ""))[0]:
            self.errors[quantity] = (error, where)


class Windows:
    """Drawn samples, as the training data of a run."""

    def __init__(self, vocab: int, length: int, seed: int) -> None:
        self.windows = np.random.default_rng(seed).integers(0, vocab, (BATCH * STEPS, length + 1))

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, numbers: np.ndarray) -> np.ndarray:
        """Return windows, int64 [n, length + 1]."""
        return self.windows[numbers]

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the tokens and labels [batch, length] of a step."""
        drawn = torch.from_numpy(self.windows[number * BATCH : (number + 1) * BATCH])
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def imported(case: Case, values: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return the run that the import makes of a `config.json` with these values, and the keys that
    it refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(values))
        extra = (*case.extra, *(LEARNS_LITTLE if case.kind == "deepseek_v32" else ()))
        found = import_config(file, (*COMMON, f"data.seq_length={case.length}", *extra))
    run = found.run.model_copy(
        update={"model": found.run.model.model_copy(update={"name": case.kind})}
    )
    return run, [u.flag for u in found.unplaced if u.why in CHANGES_NUMBERS]


def written(run: Any) -> Any:
    """Return the `model` section of the recipe that `recipe import` writes for a run, read
    again.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(recipe_text(delta(run), {"title": "imported"}))
        return compose([f"recipe={file}"]).run.model


def older(values: dict[str, Any]) -> dict[str, Any]:
    """Return the same configuration as transformers 4 wrote it, and as in published files: without
    `rope_parameters`.
    """
    if values["model_type"] == "gpt_oss":  # it came with transformers 4, and has yarn by default
        return values
    out = dict(values)
    rope = dict(out.pop("rope_parameters", None) or {})
    if out["model_type"] == "gemma3_text":
        out["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    names = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
    if out["model_type"] == "gpt_neox":
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    out |= {old: rope.pop(key) for key, old in names.items() if key in rope}
    kind = rope.pop("rope_type", "default")
    if kind != "default":
        out["rope_scaling"] = {**rope, "type" if kind == "yarn" else "rope_type": kind}
    return out


def compare(case: Case) -> Result:
    """Import, build and train both; a job for `run_ranks` with one rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    config = hf_reference.configuration(case.kind, case.values)
    try:
        run, refused = imported(case, config.to_dict())
    except ConfigError as error:
        return Result(problems=[p.render() for p in error.problems])
    result = Result(refused=refused)
    if refused:
        return result
    for values in (config.to_diff_dict(), older(config.to_dict())):
        again, refused = imported(case, values)
        assert (again.model, refused) == (run.model, []), (
            "another spelling of the file means something else"
        )
    assert written(run) == run.model
    resolved = resolve(run, Machine.here(), 1)
    result.problems = [p.render() for p in check(resolved, raw=run) if p.severity == "error"]
    if not result.problems:
        _compare(case, config, resolved, result)
    return result


def _compare(case: Case, config: Any, run: Any, result: Result) -> None:
    from mtrain.world.init import joined

    made = hf_reference.model(config, case.seed)
    moved = run.model.moe is not None and run.model.moe.router_bias_update_rate
    biases = hf_reference.Biases(made, moved or 0.0)
    table = TABLES[case.kind]
    windows = Windows(config.vocab_size, case.length, case.seed)
    with joined(run) as world:
        parts = _parts(run, world, windows)
        chunk = parts.state.chunks[0]
        own = _own_tensors(chunk)
        load(to_ours(table, run.model, hf_reference.tensors(made)), own, run)
        own["decoder.final_layernorm.weight"].data *= 1 + case.flaw
        parts.state.optimizer.reload_model_params()
        _compare_text(run, world, parts, made, windows, result)
        _compare_gradients(table, run, parts, made, windows, result)
        biases.move()
        _compare_steps(table, run, parts, made, biases, windows, result)


def half_precision_errors(case: Case) -> tuple[dict[str, float], dict[str, float]]:
    """Return the errors of both sides in bf16 against transformers in fp32: logits and gradients,
    as a share of their size.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    from mtrain.world.init import joined

    config = hf_reference.configuration(case.kind, case.values)
    run, _ = imported(replace(case, extra=("precision=bf16",)), config.to_dict())
    run = resolve(run, Machine.here(), 1)
    made = hf_reference.model(config, case.seed)
    table = TABLES[case.kind]
    windows = Windows(config.vocab_size, case.length, case.seed)
    tokens, labels = windows.step(0)
    with torch.no_grad():
        for parameter in made.parameters():  # all start from the same weights
            parameter.copy_(parameter.bfloat16())
    exact = _quantities(made, tokens, labels)
    half = _quantities(made.bfloat16(), tokens, labels)
    with joined(run) as world:
        parts = _parts(run, world, windows)
        load(
            to_ours(table, run.model, hf_reference.tensors(made)),
            _own_tensors(parts.state.chunks[0]),
            run,
        )
        logits, _, gradients = _forward_backward(parts, tokens)
        ours = {"logits": logits, **to_theirs(table, run.model, gradients)}
    return _distances(ours, exact), _distances(half, exact)


def _quantities(made: Any, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    found = hf_reference.loss(made, tokens, labels)
    found.cross_entropy.backward()
    gradients = {name: p.grad.clone() for name, p in made.named_parameters()}
    return {"logits": found.logits.detach(), **gradients}


def _distances(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative errors in the mean square: of the logits, and of all gradients
    together.
    """

    def error(names: list[str]) -> float:
        pairs = [(found[name].float(), exact[name].float()) for name in names]
        apart = sum(float((a - b).square().sum()) for a, b in pairs)
        return float((apart / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)

    return {"logits": error(["logits"]), "gradients": error(sorted(exact.keys() - {"logits"}))}


def _parts(run: Any, world: Any, windows: Windows) -> Any:
    from mtrain.assembly.model import build_model
    from mtrain.assembly.optim import build_optimizer, build_schedule
    from mtrain.ckpt.state import TrainState
    from mtrain.data.batch import GlobalBatches
    from mtrain.train.assemble import configure_schedule_hooks
    from mtrain.train.loop.context import TrainContext

    chunks = build_model(run, world)
    optimizer = build_optimizer(run, chunks)
    configure_schedule_hooks(run, chunks, optimizer)
    state = TrainState(chunks, optimizer, build_schedule(run, optimizer))
    return TrainContext(run, world, state, GlobalBatches(windows, BATCH, BATCH, 0, 1), None)


def _own_tensors(chunk: Any) -> dict[str, Tensor]:
    """Return the parameters and the buffers that a checkpoint holds, by name."""
    from mtrain.mcore.state.local_params import unwrap

    model = unwrap(chunk)
    saved = model.state_dict().keys()
    return dict(model.named_parameters()) | {k: v for k, v in model.named_buffers() if k in saved}


@torch.no_grad()
def load(given: dict[str, Tensor], own: dict[str, Tensor], run: Any) -> None:
    """Copy whole tensors; rows that pad the vocabulary keep what the model started with."""
    assert given.keys() == own.keys(), f"only one side has {sorted(given.keys() ^ own.keys())}"
    for name, tensor in own.items():
        assert given[name].shape == tensor.shape, (name, given[name].shape, tensor.shape)
        rows = run.model.vocab_size if _has_words(name) else None
        tensor[:rows].copy_(given[name][:rows])


def _taught(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if UNTAUGHT not in name}


def _has_words(name: str) -> bool:
    return name in ("embedding.word_embeddings.weight", "output_layer.weight")


def _compare_text(
    run: Any, world: Any, parts: Any, made: Any, windows: Windows, result: Result
) -> None:
    from mtrain.train.generate.sampler import Sampler

    prompt = [int(token) for token in windows.windows[0, :PROMPT]]
    sampler = Sampler(run, world, parts.state.chunks)
    kept = (
        not sampler.obstacle_to(PROMPT + NEW_TOKENS)
        or run.model.rotary_constant_to < PROMPT + NEW_TOKENS + 1
    )
    assert kept or run.model.dsa is not None, (
        "text is compared as it is written with keys and values kept"
    )
    ours = sampler.generate(prompt, NEW_TOKENS, temperature=0.0)
    result.text = (ours, hf_reference.text(made, prompt, NEW_TOKENS))


def _forward_backward(parts: Any, tokens: Tensor) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Return our logits [b, s, vocabulary] for tokens, and loss and gradients of the first step,
    before clipping.
    """
    from mtrain.train.loop.step import reduce_report, run_schedule

    chunk = parts.state.chunks[0]
    with torch.no_grad():
        logits = chunk(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    chunk.zero_grad_buffer()
    batches = parts.train_data.microbatches(0, BATCH)
    reports = run_schedule(parts, batches, forward_only=False)
    loss = reduce_report(parts.world, parts.table, reports, False)["loss"]
    gradients = {
        name: p.main_grad for name, p in _own_tensors(chunk).items() if hasattr(p, "main_grad")
    }
    return logits[..., : parts.run.model.vocab_size], loss, gradients


def _compare_gradients(
    table: Any, run: Any, parts: Any, made: Any, windows: Windows, result: Result
) -> None:
    tokens, labels = windows.step(0)
    their = hf_reference.loss(made, tokens, labels)
    (their.cross_entropy + their.balance).backward()
    logits, loss, own = _forward_backward(parts, tokens)
    own = _taught(own)
    result.note("logits", "", logits, their.logits)
    result.note("loss", "", torch.tensor(loss), their.cross_entropy)
    for name in filter(_has_words, own):
        result.note("gradient of padding", name, own[name][run.model.vocab_size :], torch.zeros(()))
    gradients = {k: p.grad for k, p in hf_reference.tensors(made).items() if p.grad is not None}
    largest = torch.stack([g.abs().max() for g in gradients.values()]).max()
    for name, gradient in to_theirs(table, run.model, own).items():
        # what is 0 but for rounding has no scale of its own
        scale = torch.maximum(gradients[name].abs().max(), 1e-3 * largest)
        result.note("gradient", name, gradient, gradients[name], scale)
    assert own.keys() == to_ours(table, run.model, gradients).keys()
    made.zero_grad()


def _compare_steps(
    table: Any, run: Any, parts: Any, made: Any, biases: Any, windows: Windows, result: Result
) -> None:
    from mtrain.train.loop.step import train_step

    before = {name: t.detach().clone() for name, t in hf_reference.tensors(made).items()}
    update = hf_reference.optimizer(made, run.optim)
    for number in range(STEPS):
        ours = train_step(parts, stop_requested=False)
        their = hf_reference.loss(made, *windows.step(number))
        (their.cross_entropy + their.balance).backward()
        biases.move()
        norm = update(ours.lr)
        result.note(
            "loss of a step", f"step {number + 1}", torch.tensor(ours.loss), their.cross_entropy
        )
        result.note(
            "gradient norm", f"step {number + 1}", torch.tensor(ours.grad_norm), torch.tensor(norm)
        )
    after = hf_reference.tensors(made)
    own = _taught({name: t.detach() for name, t in _own_tensors(parts.state.chunks[0]).items()})
    for name, tensor in to_theirs(table, run.model, own).items():
        result.note(
            "weights after the steps", name, tensor, after[name], after[name] - before[name]
        )


def largest_difference(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], scale: dict[str, Tensor], floor: float
) -> tuple[float, str]:
    """Return the largest difference of a tensor as a share of the largest of its `scale`, which is
    at least the share `floor` of the largest of all, and where it is.
    """
    assert ours.keys() == theirs.keys()
    # a key's bias has no effect but rounding
    least = floor * max(float(t.abs().max()) for t in scale.values())
    sizes = {name: max(float(scale[name].abs().max()), least) for name in scale}
    errors = {name: float((ours[name] - t).abs().max()) / sizes[name] for name, t in theirs.items()}
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def tensor_bytes(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of `model.safetensors`."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118


def adam_of(parameters: Iterable[Tensor], optim: Any) -> torch.optim.AdamW:
    """Return torch's AdamW with the settings of `optim`, which decays matrices only."""
    given = list(parameters)
    groups = [
        {"params": [p for p in given if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in given if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps)
