"""A model of rewards on the ranks of the policy: frozen, in their layout, without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain.assembly.model import build_reference
from mtrain.config.compose.paths import CHECKPOINTS, user_path
from mtrain.config.resolve.model_tokenizer import TOKENIZER
from mtrain.config.schema.run import RunConfig
from mtrain.data.batch import collate
from mtrain.data.chats.loss_mask import resolve_arguments
from mtrain.data.chats.messages import parse_prompt
from mtrain.data.chats.samples import NOTHING, Sample
from mtrain.data.chats.template import ChatFormat
from mtrain.data.pairs import at_last_tokens
from mtrain.data.records import Keys
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import ConfigError, CorruptData
from mtrain.plan.teacher import FIX, reward_model_of
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.prefetch import to_device
from mtrain.train.loop.step import outputs
from mtrain.train.teacher import digest_of_folder, loaded
from mtrain.world.heartbeat import begin_phase, waiting
from mtrain.world.init import World


def build_reward_model(
    run: RunConfig, world: World, *, drawn: bool = True
) -> tuple[list[Any], str]:
    """Return this rank's chunks of the model of rewards with its weights, and the hash of its
    files; unless `drawn`, weights have no values.

    Raises as `build_teacher` does.
    """
    other = reward_model_of(run)
    name = run.rollout.reward_model
    assert other is not None
    assert name is not None
    chunks = build_reference(other, world)
    folder = Path(user_path(name))
    if drawn and not loaded(folder, other, run, world, chunks):
        raise ConfigError.of(
            "MT397", "rollout.reward_model", name, "the run has no checkpoint yet", FIX
        )
    return chunks, digest_of_folder(folder)


class ModelScores:
    """The scores of whole answers."""

    def __init__(self, context: TrainContext) -> None:
        """Open the tokenizer and the chat template of the model of rewards."""
        run = context.run
        other = reward_model_of(run)
        assert other is not None
        assert run.rollout.reward_model is not None
        folder = Path(user_path(run.rollout.reward_model))
        # The files of a run are next to those of its checkpoints.
        home = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
        self._context = context
        self._tokenizer = Tokenizer(home / TOKENIZER)
        self._vocab_size = other.model.loss_vocab_size
        self._form = ChatFormat(home)
        self._form.require_jinja()
        self._keys = Keys(
            frozenset(run.data.ignored_keys), "\n".join(self._form.templates.values())
        )

    def scores(
        self, records: Sequence[Mapping[str, Any]], answers: Sequence[Sequence[Mapping[str, Any]]]
    ) -> tuple[np.ndarray, list[str]]:
        """Return the score of each answer, its messages, to the prompt of its line, float64
        [answers], 0 for one that cannot be read, and why it cannot; the same on every rank.
        """
        begin_phase("rewards")
        context = self._context
        run = context.run
        length = run.data.length
        texts = [self._read(*pair) for pair in zip(records, answers, strict=True)]
        whys = [text if isinstance(text, str) else "" for text in texts]
        rows = [np.zeros(1, np.int64) if isinstance(text, str) else text for text in texts]
        # Interleaved stages take whole groups of micro-batches.
        together = run.trainer.micro * (run.parallel.pp if run.parallel.vpp > 1 else 1)
        share = -(-len(rows) // (context.world.grid.dp * together)) * together
        first = share * context.world.coords["dp"]
        mine = [rows[i] if i < len(rows) else rows[0] for i in range(first, first + share)]
        samples = [_row(ids, length) for ids in mine]
        batches = []
        for place in range(0, share, run.trainer.micro):
            held = samples[place : place + run.trainer.micro]
            batch = collate(held, packed=False)
            batch["loss_mask"] = at_last_tokens(held)
            batches.append(dict(to_device(batch, context.world)))
        found = outputs(context, batches, context.state.reward_model)
        values = torch.zeros(share * context.world.grid.dp, dtype=torch.float64)
        values = values.to(context.world.torch_device)
        # Tensor-parallel ranks have the same values, and context-parallel ones parts of a row.
        if found and context.world.coords["tp"] == 0:
            own = [
                torch.where(batch["loss_mask"] > 0, each.double(), 0.0).sum(-1)
                for batch, each in zip(batches, found, strict=True)
            ]
            values[first : first + share] = torch.cat(own)
        with waiting():
            dist.all_reduce(values)
            scores = values[: len(rows)].cpu().numpy()
        for place, score in enumerate(scores):
            whys[place] = whys[place] or ("" if np.isfinite(score) else f"it returned {score}")
        return np.where([bool(why) for why in whys], 0.0, scores), whys

    def _read(
        self, record: Mapping[str, Any], answer: Sequence[Mapping[str, Any]]
    ) -> np.ndarray | str:
        """Return the tokens of a prompt and its answer, int64 [tokens]; or why there are none."""
        try:
            chat = parse_prompt(dict(record), self._keys)
            chat, _ = resolve_arguments(chat, self._form)
            text = self._form.write([*chat.messages, *answer], chat.tools, prompt=False).text
        except CorruptData as error:
            return f"the template of the model of rewards refuses it: {error}"[:500]
        ids = self._tokenizer.encode(text)
        most = self._context.run.data.length
        if not 0 < len(ids) <= most:
            return f"it has {len(ids)} tokens of the model of rewards, not 1 to {most}"
        if max(ids) >= self._vocab_size:
            return f"its token {max(ids)} is behind the {self._vocab_size} of the model of rewards"
        return np.array(ids, np.int64)


def _row(ids: np.ndarray, length: int) -> Sample:
    tokens = np.full(length + 1, NOTHING, np.int64)
    tokens[: len(ids)] = ids
    return Sample(tokens, np.zeros(length + 1, np.bool_), (0,), ())
