"""The teacher of a run: another model, frozen, on this rank's part of the layout, and its view of
micro-batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtrain.assembly.model import build_reference
from mtrain.assembly.weights import initialize
from mtrain.ckpt import state as ckpt_state
from mtrain.ckpt.folder import TEACHER, committed
from mtrain.config.compose.paths import CHECKPOINTS, MANIFEST, user_path
from mtrain.config.schema.objective import ObjectiveConfig
from mtrain.config.schema.run import RunConfig
from mtrain.data import Splits
from mtrain.data.batch import GlobalBatches
from mtrain.data.teacher_rows import IDS, VALUES, teaching_collator
from mtrain.errors import ConfigError, CorruptData
from mtrain.mcore import api as mcore
from mtrain.mcore.models.distillation import Divergence, Head, Lesson, TopK, top_k
from mtrain.mcore.models.language_model import LESSON
from mtrain.mcore.state.local_params import unwrap
from mtrain.plan.teacher import FIX, HF_CONFIG, teacher_of
from mtrain.plan.teacher_file import facts_problems, files_problems, read_facts
from mtrain.train.folder_weights import load_folder
from mtrain.train.objectives import Batch
from mtrain.world.init import World

BETA = {"forward_kl": 0.0, "reverse_kl": 1.0}
READ = 1 << 20
"""Bytes of a file of weights that are hashed at each of three places."""
OTHER_SEED = 1
"""Difference of the seed of a drawn teacher from that of its student."""


@dataclass(frozen=True)
class Teacher:
    """The output layer of a teacher on the last stage, and the loss that reads it."""

    divergence: Divergence
    head: Head | None
    dtype: torch.dtype
    vocab_size: int
    top: int | None
    sequence_parallel: bool

    @classmethod
    def of(cls, run: RunConfig, chunks: list[Any]) -> Teacher:
        """Return the teacher of a run that these chunks are."""
        last = unwrap(chunks[-1])
        return cls(
            divergence_of(run.objective),
            last.output_head() if last.post_process else None,
            last.config.params_dtype,
            run.model.loss_vocab_size,
            run.objective.distil_top_k,
            bool(run.parallel.sequence_parallel),
        )

    def lesson(self, hidden: torch.Tensor) -> Lesson:
        """Return the lesson of a micro-batch whose last hidden states are `hidden`."""
        assert self.head is not None
        # megatron-core widens the output of a last stage.
        hidden = hidden.to(self.dtype)
        if self.top is None:
            return Lesson(self.divergence, hidden, self.head)
        group = mcore.parallel_state.get_tensor_model_parallel_group()
        top = top_k(
            hidden,
            self.head,
            self.top,
            vocab_size=self.vocab_size,
            temperature=self.divergence.temperature,
            group=group if group.size() > 1 else None,
            sequence_parallel=self.sequence_parallel,
        )
        return Lesson(self.divergence, top=top)


def divergence_of(objective: ObjectiveConfig) -> Divergence:
    """Return the loss of a resolved objective `distil`."""
    assert objective.divergence is not None
    assert objective.temperature is not None
    beta = BETA.get(objective.divergence, objective.jsd_beta)
    assert beta is not None
    return Divergence(beta, objective.temperature, objective.ce_weight)


def build_teacher(run: RunConfig, world: World, *, drawn: bool = True) -> list[Any]:
    """Return this rank's chunks of the teacher with its weights, without gradients; unless `drawn`,
    weights have no values.

    Raises:
        ConfigError: the folder has another model than its configuration says.
        CorruptData: its weights are not whole.
    """
    other = teacher_of(run)
    assert other is not None
    chunks = build_reference(other, world)
    for chunk in chunks:
        unwrap(chunk).keeps_hidden = True
    name = run.objective.teacher
    assert name is not None
    # A trace has no memory for weights, and the folder may be on another machine.
    if not drawn:
        return chunks
    if run.objective.draws:
        initialize(chunks, run.trainer.seed + OTHER_SEED)
        return chunks
    folder = Path(user_path(name))
    if not loaded(folder, other, run, world, chunks):
        raise ConfigError.of(
            "MT388", "objective.teacher", name, "the run has no checkpoint yet", FIX
        )
    return chunks


def loaded(folder: Path, other: RunConfig, run: RunConfig, world: World, chunks: list[Any]) -> bool:
    """Read the weights of a frozen model, the run `other`; return False for a run without a
    checkpoint.

    Raises as `build_teacher` does.
    """
    checkpoint = checkpoint_of(folder)
    if checkpoint is not None:
        ckpt_state.load_model(ckpt_state.opened(checkpoint, run, world), chunks)
    elif (folder / HF_CONFIG).is_file():
        load_folder(other, folder, chunks)
    else:
        return False
    return True


def digest_of(run: RunConfig) -> str:
    """Return a hash of the teacher's files: of a checkpoint its manifest, which has the hashes of
    all tensors; of a Hugging Face folder the configuration, and size, head, middle and end of each
    file of weights. Empty if its weights are drawn.
    """
    if run.objective.draws or run.objective.teacher is None:
        return ""
    return digest_of_folder(Path(user_path(run.objective.teacher)))


def digest_of_folder(folder: Path) -> str:
    """Return the hash of `digest_of` of a run, a checkpoint or a Hugging Face folder."""
    checkpoint = checkpoint_of(folder)
    # Weights have hundreds of gigabytes, of which each rank reads only its own part.
    files = [folder / HF_CONFIG, *sorted(folder.glob("*.safetensors"))]
    found = hashlib.sha256()
    for file in files if checkpoint is None else [checkpoint / MANIFEST]:
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for place in (0, size // 2, max(0, size - READ)):
                opened.seek(place)
                found.update(opened.read(READ if checkpoint is None else size))
    return found.hexdigest()


def read_instead(run: RunConfig, splits: Splits, data: Mapping[str, GlobalBatches | None]) -> str:
    """Have the collators of parts add the rows of `objective.teacher_file`; return the hash of the
    teacher that they are of.

    Raises:
        ConfigError: the folder is of another corpus, tokenizer, teacher or configuration.
    """
    assert run.objective.teacher_file is not None
    folder = Path(user_path(run.objective.teacher_file))
    facts = read_facts(folder)
    named = run.objective.teacher
    is_here = named is not None and Path(user_path(named)).exists()
    digest = digest_of(run) if is_here else ""
    known = splits.identity()
    files = known.get("fingerprint"), known.get("tokenizer_sha256")
    problems = facts_problems(run, facts) + files_problems(run, facts, *files, digest)
    if problems:
        raise ConfigError(problems)
    for part, batches_of in data.items():
        if batches_of is not None:
            batches_of.collator = teaching_collator(folder, part, facts, batches_of.collator)
    return facts.teacher_digest


def with_lesson(run: RunConfig, batch: Batch) -> Batch:
    """Return a micro-batch with the lesson that `objective.teacher_file` has of its samples; one of
    a stage that reads no samples as it is.
    """
    if IDS not in batch:
        return batch
    top = TopK(batch[IDS].transpose(0, 1), batch[VALUES].transpose(0, 1))
    return {**batch, LESSON: Lesson(divergence_of(run.objective), top=top)}


def same_teacher(facts: Mapping[str, Any], state: ckpt_state.TrainState) -> None:
    """Require the teacher of a checkpoint with these facts.

    Raises:
        CorruptData: it was another one.
    """
    before = facts.get(TEACHER)
    if before is not None and before != state.teacher_digest:
        raise CorruptData(
            f"the run learned from a teacher or a model of rewards whose files have the hash"
            f" {before[:12]}, and those of objective.teacher or rollout.reward_model have"
            f" {state.teacher_digest[:12] or 'none'}",
            "name the files of that model, or set checkpoint.accept_changes=true",
        )


def checkpoint_of(folder: Path) -> Path | None:
    """Return a checkpoint folder, or the newest checkpoint of a run folder; None without one."""
    if (folder / MANIFEST).is_file():
        return folder
    saved = committed(folder / CHECKPOINTS)
    return saved[-1] if saved else None
