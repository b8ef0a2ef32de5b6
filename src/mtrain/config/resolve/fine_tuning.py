"""Defaults of fine-tuning: published rates and batches by model size, and steps by the number of
chats.

docs/reference/defaults.md lists the sources.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from math import ceil
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from mtrain.config.compose.paths import user_path
from mtrain.config.disk.files import form_of_preferences, records_of
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.run import RunConfig

# Kinds of data that the chat template of a tokenizer formats.
CHATS = ("sft", "preference", "prompts")
# Epochs of Tulu 3.
EPOCHS = 2
# Tokens of a chat if chats are packed but batches count chats: the mean of Tulu 3.
CHAT_TOKENS = 1024
# Bytes per token of a file of chats.
LETTERS = 4
# The least steps of an epoch, as in LIMA (arXiv 2305.11206), below which the batch is halved, and
# the smallest batch.
FEWEST_STEPS = 30
SMALLEST_BATCH = 8
# Steps of a run whose chats cannot be counted on this machine.
STEPS_UNSEEN = 500
# Bytes of a file in which chats are counted; the rest of a larger one is assumed to be alike.
COUNTED_BYTES = 1 << 26


class Tuned(NamedTuple):
    """A published fine-tuning."""

    name: str
    parameters: float
    lr: float
    batch: int
    source: str


TULU_3 = "Tulu 3 (arXiv 2411.15124)"
QLORA = "QLoRA (arXiv 2305.14314)"
# Rate and chats per step for training all weights.
ALL_WEIGHTS = (
    Tuned("3B", 3.1e9, 2e-5, 128, "SmolLM3 (Hugging Face's alignment-handbook)"),
    Tuned("8B", 8e9, 5e-6, 128, TULU_3),
    Tuned("70B", 70.6e9, 2e-6, 128, TULU_3),
)
# The same for low-rank adapters.
ADAPTERS = (
    Tuned("7B", 6.7e9, 2e-4, 16, QLORA),
    Tuned("13B", 13e9, 2e-4, 16, QLORA),
    Tuned("33B", 32.5e9, 1e-4, 16, QLORA),
    Tuned("65B", 65.2e9, 1e-4, 16, QLORA),
)
# Rate and answers per step of a preference, two for each pair.
PREFERENCES = (
    Tuned("8B", 8e9, 5e-7, 256, f"DPO of {TULU_3}"),
    Tuned("70B", 70.6e9, 2e-7, 256, f"DPO of {TULU_3}"),
)
# The same for a model of rewards, whose value head is new.
REWARDS = (Tuned("8B", 8e9, 3e-6, 512, f"reward model of {TULU_3}"),)
REWARDS_OF_ADAPTERS = (Tuned("any", 7e9, 1e-4, 16, "TRL's RewardConfig"),)
DEEPSEEK_MATH = "GRPO of DeepSeekMath (arXiv 2402.03300)"
# Rate and answers per step of a policy that learns from rewards.
POLICIES = (Tuned("7B", 7e9, 1e-6, 1024, DEEPSEEK_MATH),)
ZEPHYR = "DPO with QLoRA of Zephyr (Hugging Face's alignment-handbook)"
PREFERENCES_OF_ADAPTERS = (Tuned("7B", 7.2e9, 5e-6, 64, ZEPHYR),)


def published(run: RunConfig) -> Tuned:
    """Return the published fine-tuning of the nearest size, of adapters where trained."""
    adapters = run.peft.kind is not None
    if run.objective.judges:
        return nearest(POLICIES, run.model)
    if run.objective.reads_values:
        return nearest(REWARDS_OF_ADAPTERS if adapters else REWARDS, run.model)
    if run.objective.pairs:
        return nearest(PREFERENCES_OF_ADAPTERS if adapters else PREFERENCES, run.model)
    return nearest(ADAPTERS if adapters else ALL_WEIGHTS, run.model)


def batch_of(run: RunConfig) -> tuple[int, str]:
    """Return the samples of a step, and the reason: chats, or packed windows of as many tokens."""
    row = published(run)
    samples = row.batch
    what = "answers" if run.objective.answers else "chats"
    why = f"{row.batch} {what} of {row.source}: its {row.name} model"
    if run.data.packed:
        samples = ceil(row.batch * CHAT_TOKENS / run.data.length)
        why = f"{why}, {CHAT_TOKENS} tokens each"
    held = samples_of_an_epoch(run)
    full = samples
    if run.objective.rolls:
        return samples, why
    while held is not None and samples > SMALLEST_BATCH and held < FEWEST_STEPS * samples:
        samples = max(SMALLEST_BATCH, samples // 2)
    if samples < full:
        why = (
            f"{held} samples in data.path: {FEWEST_STEPS} steps an epoch, or {SMALLEST_BATCH}"
            " samples a step"
        )
    return samples, why


def steps_of(run: RunConfig) -> tuple[int, str]:
    """Return the steps of a run whose batch is known, and the reason."""
    held = samples_of_an_epoch(run)
    if held is None:
        return (
            STEPS_UNSEEN,
            f"trainer.fine_tuning true, and data.kind {run.data.kind} has no chats to count here",
        )
    # Tulu 3 reads chats twice, and pairs once; DeepSeekMath reads prompts once.
    epochs = 1 if run.objective.answers else EPOCHS
    steps = max(1, ceil(epochs * held / run.trainer.batch))
    words = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    source = DEEPSEEK_MATH if run.objective.judges else TULU_3
    return steps, f"{words} of {held} samples, as {source}"


def samples_of_an_epoch(run: RunConfig) -> int | None:
    """Return the number of training samples in data.path; None if it has none here."""
    d = run.data
    if d.kind not in CHATS or d.path is None:
        return None
    # The rules report the reason why there is none.
    file, _ = records_of(user_path(d.path), "what the chats are")
    if file is None:
        return None
    try:
        facts = os.stat(file)
        chats = _count(file, facts.st_size, facts.st_mtime_ns)
    except OSError:
        return None
    if not chats:
        return None
    samples = chats * d.split[0] / (sum(d.split) or 1)
    # Scored answers make a number of pairs that only their scores tell: count one a line.
    if d.kind != "preference" or form_of_preferences(d.path) != "labels":
        samples *= run.objective.whole
    if d.packed:
        # Packed chats share windows: estimate the tokens of a chat from its bytes.
        samples *= min(1.0, facts.st_size / chats / LETTERS / d.length)
    return max(1, round(samples))


@cache
def _count(file: Path, size: int, changed: int) -> int:
    """Return the number of non-empty lines of a file; the cache key changes with the file."""
    lines = 0
    read = 0
    with file.open("rb") as stream:
        while read < COUNTED_BYTES and (block := stream.read(1 << 20)):
            read += len(block)
            lines += block.count(b"\n")
            last = block[-1:]
    if not read:
        return 0
    if read < size:
        return max(1, round(lines * size / read))
    return lines + (last != b"\n")


class Sized(Protocol):
    """A row of a table by model size."""

    @property
    def parameters(self) -> float:
        """Return the parameters of its model."""
        ...


Row = TypeVar("Row", bound=Sized)


def nearest(rows: Sequence[Row], model: ModelConfig) -> Row:
    """Return the row whose size is nearest, by ratio, to the parameters that a token visits."""
    size = visited_parameters(model)
    return min(rows, key=lambda row: max(row.parameters / size, size / row.parameters))


def visited_parameters(model: ModelConfig) -> int:
    """Return about how many matrix weights a token visits, to find a row of a table."""
    m = model
    width = m.ffn_hidden_size
    if m.moe is not None:
        # Of the experts, a token visits only some.
        width = m.moe.router_topk * m.moe.ffn_hidden_size + (
            m.moe.shared_expert_intermediate_size or 0
        )
    attention = 2 * m.head_dim * (m.num_attention_heads + m.query_groups)
    layer = m.hidden_size * (attention + (3 if m.gated else 2) * width)
    tables = 1 if m.tie_word_embeddings or m.head else 2
    return m.num_layers * layer + tables * m.vocab_size * m.hidden_size
