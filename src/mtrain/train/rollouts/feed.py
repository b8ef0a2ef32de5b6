"""The micro-batches of steps whose answers the policy samples: prompts, rollouts, rewards,
advantages.

All ranks sample the answers of a global batch together, and have all of them. Rank 0 has them
judged. The advantages are a pure function of all rewards, so that no layout changes them, and each
data-parallel rank collates its own answers.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain.config.compose.paths import user_path
from mtrain.config.resolve.batches import size_after
from mtrain.config.schema.rollout import MODEL
from mtrain.data import PromptSamples
from mtrain.data.answers import Answer, answer_batch
from mtrain.data.chats.template import ChatFormat
from mtrain.data.records import Keys
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import TrainingError, warn
from mtrain.mcore.layers.routes import layers_of
from mtrain.train.generate.request import END, LENGTH, Sampling
from mtrain.train.loop.context import Stopped, TrainContext
from mtrain.train.loop.prefetch import Batch, to_device
from mtrain.train.loop.result import StepResult
from mtrain.train.loop.step import log_probabilities
from mtrain.train.policy import OLD, PolicyObjective
from mtrain.train.rewards import Sampled
from mtrain.train.rollouts.ahead import Ahead
from mtrain.train.rollouts.credit import Credit, credit_of
from mtrain.train.rollouts.engine import Engine, Prompt, Rollout
from mtrain.train.rollouts.engines import engine_of, push
from mtrain.train.rollouts.judges import Judges, Verdict
from mtrain.train.rollouts.scores import ModelScores
from mtrain.train.rollouts.server import ServerEngine
from mtrain.train.rollouts.token_scores import scores_of
from mtrain.train.rollouts.turns import Turns
from mtrain.world.heartbeat import begin_phase, waiting

NAMED = 3
"""Failed rewards of a step that are named."""
SETTINGS = ("answer_column", "pattern", "free_tokens", "reward_url", "reward_seconds")
"""Keys of `rollout` that rewards read."""
EQUAL = 1e-9
"""Largest difference between rewards that are taken to be equal."""


def answered(source: PromptSamples, count: int, context: TrainContext) -> dict[str, float] | None:
    """Return the metrics of answers to at most `count` samples of the validation split; None if a
    rank has a request to stop.
    """
    feed = context.prefetcher
    assert isinstance(feed, RolloutFeed)
    try:
        return feed.evaluated(source, count)
    except Stopped:
        return None


@dataclass(frozen=True)
class Step:
    """The answers of a global batch."""

    place: tuple[int, int]
    """Samples consumed before, and samples of the step."""
    rollouts: Sequence[Rollout]
    credit: Credit
    measured: Mapping[str, float]
    """Numbers for the record of the step."""
    old: Sequence[torch.Tensor] = ()
    """Log-probabilities of labels by the policy that sampled, [b, s] for each micro-batch of this
    rank; empty if the step has its weights, and on stages without the loss.
    """


class RolloutFeed:
    """A source of micro-batches in the place of a `BatchPrefetcher`."""

    def __init__(self, context: TrainContext) -> None:
        """Begin the engine and, on rank 0, the processes of the rewards."""
        run = context.run
        source = context.train_data.samples
        assert isinstance(source, PromptSamples)
        assert context.tokenizer is not None
        self._context = context
        self._source = source
        self._objective = context.objective
        self._tokenizer = Tokenizer(context.tokenizer)
        self._sampling = Sampling(
            tokens=run.rollout.tokens(run.data.length),
            temperature=run.rollout.temperature,
            top_k=run.rollout.top_k,
            top_p=run.rollout.top_p,
            min_p=run.rollout.min_p,
            reports=run.rollout.top_k > 0,
            seed=run.trainer.seed,
        )
        if run.rollout.replay_routes:
            context.routes = layers_of(context.state.chunks)
        engine = engine_of(context, self._tokenizer)
        self._server = engine if isinstance(engine, ServerEngine) else None
        self._ahead = None
        if run.objective.max_staleness:
            assert self._server is not None
            self._ahead = Ahead(context, self._server)
        else:
            # A run before this one may have had some under way.
            context.state.sampled = None
        r = run.rollout
        self._judges = None
        self._scores = ModelScores(context) if r.scores else None
        # Rewards are foreign code, which may be slow or random: one rank has them computed.
        if context.world.is_rank0 and run.objective.judges:
            self._judges = Judges(r.reward_workers, r.reward_seconds, r.reward_memory_gib)
        self._engine: Engine = self._with_turns(engine) if r.environment else engine
        self._steps: dict[tuple[int, int], Step] = {}
        self._measured: dict[int, dict[str, float]] = {}
        self.waited_s = 0.0
        context.measures.append(self.measured)

    def _with_turns(self, engine: Engine) -> Engine:
        """Return an engine whose answers the environment of the run continues."""
        run = self._context.run
        name = run.rollout.environment
        assert name is not None
        file = self._tokenizer.path
        template = run.data.chat_template
        form = ChatFormat(file.parent, user_path(template) if template else None)
        keys = Keys(frozenset(run.data.ignored_keys), "\n".join(form.templates.values()))
        ask = None if self._judges is None else partial(self._judges.replies, name)
        tell = self._context.world.tell
        most = run.rollout.max_turns
        return Turns(engine, self._tokenizer, form, keys, most, ask, tell, run.trainer.seed)

    def take(self, consumed: int, size: int) -> Sequence[Batch]:
        """Return the micro-batches of the step of `size` samples after `consumed`, on this rank's
        device.

        Raises:
            Stopped: a rank has a request to stop.
            TrainingError: more rewards failed than `rollout.failed_rewards`.
        """
        place = consumed, size
        if place not in self._steps:
            self._steps = {step.place: step for step in self._sampled_steps(place)}
        step = self._steps[place]
        # The device may be steps behind: the numbers of a step wait for its record.
        self._measured[self._context.state.step + 1] = dict(step.measured)
        batches = self._batches(step, self._context.world.coords["dp"])
        for batch, old in zip(batches, step.old, strict=False):
            batch[OLD] = old
        return batches

    def _sampled_steps(self, place: tuple[int, int]) -> list[Step]:
        """Sample and judge the answers of the next `rollout.updates` steps.

        Raises as `take` does.
        """
        places = self._places(place)
        numbers = np.arange(place[0], sum(places[-1]))
        seconds = {"rollout_s": 0.0, "reward_s": 0.0}
        if self._ahead is not None:
            self._ahead.require(self._prompts(numbers), self._sampling)
        elif self._is_behind():
            begin_phase("rollouts")
            push(self._context, self._engine)
        rollouts, rewards = self._judged(numbers, seconds, places[-1])
        resampled = 0
        resamples = self._context.run.rollout.resample
        for again in range(1, resamples + 1):
            equal = np.flatnonzero(self._equal(self._grouped(rewards)).repeat(self._source.group))
            if not len(equal):
                break
            resampled += len(equal) // self._source.group
            # The same places of the following steps: every rank and a resumed run know them.
            later = numbers[equal] + again * len(numbers)
            others, rewards[equal] = self._judged(later, seconds, None)
            for number, other in zip(equal, others, strict=True):
                rollouts[number] = other
        # Replacements have the weights of the answers that they replace.
        if resamples:
            self._begin_after(places[-1])
        steps: list[Step] = []
        for consumed, size in places:
            part = slice(consumed - place[0], consumed - place[0] + size)
            groups = self._grouped(rewards[part])
            credit = self._credit((consumed, size), rollouts[part], groups)
            measured = self._described(rollouts[part], rewards[part], groups) | seconds
            measured |= credit.measured
            measured |= self._ages(rollouts[part], self._context.state.step + len(steps))
            if resamples:
                measured["resampled_groups"] = resampled
            steps.append(Step((consumed, size), rollouts[part], credit, measured))
            # The first step of several has all of the work.
            seconds = dict.fromkeys(seconds, 0.0)
            resampled = 0
        return [steps[0], *map(self._with_old, steps[1:])]

    def _is_behind(self) -> bool:
        """Return whether a server has other weights than the policy: it starts with those of step
        0, and that of transformers with none.
        """
        return self._context.state.step > 0 or self._context.run.rollout.engine == "transformers"

    def evaluated(self, source: PromptSamples, count: int) -> dict[str, float]:
        """Return the metrics of answers to the first `count` samples of another split, in whole
        groups. An answer passes if the first of `rollout.rewards` is 1 or more.

        Raises as `take` does.
        """
        seconds = {"rollout_s": 0.0, "reward_s": 0.0}
        twin = copy.copy(self)
        twin._source = source
        begin_phase("evaluation")
        if self._is_behind():
            push(self._context, self._engine)
        count = max(source.group, min(count, len(source)) // source.group * source.group)
        rollouts, rewards = twin._judged(np.arange(count), seconds, None)
        groups = twin._grouped(rewards)
        passed = (rewards[:, 0] >= 1 - EQUAL).reshape(groups.shape)
        return twin._described(rollouts, rewards, groups) | {
            "samples": count,
            "tokens": sum(one.sampled for one in rollouts),
            "pass_share": float(passed.mean()),
            f"pass_at_{source.group}": float(passed.any(axis=1).mean()),
        }

    def _credit(
        self, place: tuple[int, int], rollouts: Sequence[Rollout], rewards: np.ndarray
    ) -> Credit:
        """Return the credit of the answers of a step, by the models as they are now."""
        context = self._context
        blank = Credit(np.zeros((place[1], context.run.data.length)))
        batches: list[dict[str, Any]] = []
        places = self._answers_of(place, context.world.coords["dp"])
        o = context.run.objective
        if not isinstance(self._objective, PolicyObjective):
            return blank
        if o.kl_in_reward or o.criticises:
            batches = self._batches(Step(place, rollouts, blank, {}), context.world.coords["dp"])
        scores = scores_of(context, rollouts, batches, places)
        return credit_of(self._objective, rewards, scores)

    def _answers_of(self, place: tuple[int, int], dp_rank: int) -> np.ndarray:
        """Return the answers of a step in each micro-batch of a data-parallel rank, int64
        [micro-batches, rows].
        """
        return self._context.train_data.of_rank(dp_rank).numbers(*place) - place[0]

    def _judged(
        self, numbers: np.ndarray, seconds: dict[str, float], place: tuple[int, int] | None
    ) -> tuple[list[Rollout], np.ndarray]:
        """Return answers to samples and their rewards, float64 [answers, functions]; add the time
        of both to `seconds`.

        While the answers are judged, a server may sample those of the step after `place`.
        """
        begun = time.perf_counter()
        begin_phase("rollouts")
        rollouts = self._fresh(self._generated(numbers, seconds), seconds)
        if place is not None and not self._context.run.rollout.resample:
            self._begin_after(place)
        sampled = time.perf_counter()
        begin_phase("rewards")
        rewards = self._rewards(rollouts)
        seconds["rollout_s"] += sampled - begun
        seconds["reward_s"] += time.perf_counter() - sampled
        return rollouts, rewards

    def _prompts(self, numbers: np.ndarray) -> list[Prompt]:
        talks = self._context.run.rollout.environment is not None
        return [
            Prompt(
                tuple(self._source.ids(n).tolist()),
                int(n),
                self._source.record(n) if talks else {},
            )
            for n in numbers
        ]

    def _generated(self, numbers: np.ndarray, seconds: dict[str, float]) -> list[Rollout]:
        rollouts = self._engine.generate(self._prompts(numbers), self._sampling)
        if rollouts is None:
            raise Stopped
        if self._server is not None:
            seconds["stale_answers"] = seconds.get("stale_answers", 0) + self._server.stale
        return rollouts

    def _fresh(self, rollouts: list[Rollout], seconds: dict[str, float]) -> list[Rollout]:
        """Return answers of weights that are not older than `objective.max_staleness`: older ones
        are sampled anew, with the weights as they are.
        """
        if self._server is None:
            return rollouts
        oldest = self._context.state.step - self._context.run.objective.max_staleness
        stale = [i for i, rollout in enumerate(rollouts) if rollout.version < oldest]
        if not stale:
            return rollouts
        push(self._context, self._engine)
        numbers = np.array([rollouts[i].prompt.number for i in stale])
        for i, other in zip(stale, self._generated(numbers, seconds), strict=True):
            rollouts[i] = other
        seconds["stale_answers"] += len(stale)
        return rollouts

    def _begin_after(self, place: tuple[int, int]) -> None:
        """Let a server begin with the answers of the step after `place`, if it works ahead."""
        if self._ahead is None:
            return
        consumed = sum(place)
        if self._context.state.step + 1 >= self._context.run.trainer.steps:
            self._ahead.end()
            return
        numbers = np.arange(consumed, consumed + size_after(self._context.batch_sizes, consumed))
        self._ahead.begin(self._prompts(numbers), self._sampling)

    def _ages(self, rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
        """Return the steps between the weights that sampled and those that train after `step`."""
        if self._server is None:
            return {}
        ages = [step - rollout.version for rollout in rollouts]
        return {"sample_age": float(np.mean(ages)), "sample_age_max": max(ages)}

    def _grouped(self, rewards: np.ndarray) -> np.ndarray:
        """Return the weighed rewards of answers by group, float64 [groups, answers]."""
        weighed = rewards @ np.array(self._context.run.rollout.weights)
        return weighed.reshape(-1, self._source.group)

    @staticmethod
    def _equal(groups: np.ndarray) -> np.ndarray:
        """Return whether all rewards of each group are equal, bool [groups]."""
        return np.asarray(groups.max(axis=1) - groups.min(axis=1) <= EQUAL)

    def _places(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the steps from one on that share their rollouts."""
        context = self._context
        updates = context.run.rollout.updates
        # A step that is a multiple begins anew, also after a resume in between.
        left = updates - context.state.step % updates
        left = min(left, context.run.trainer.steps - context.state.step)
        places = [place]
        while len(places) < left:
            consumed = sum(places[-1])
            places.append((consumed, size_after(context.batch_sizes, consumed)))
        return places

    def _with_old(self, step: Step) -> Step:
        """Return a step with the log-probabilities of the policy as it is now, if its loss reads
        them.
        """
        context = self._context
        if not context.run.objective.judges:
            return step
        batches = self._batches(step, context.world.coords["dp"])
        return replace(step, old=log_probabilities(context, batches, "none"))

    def read_for(self, dp_rank: int, consumed: int, size: int) -> Sequence[Batch]:
        """Return the micro-batches of another data-parallel rank of the step that was taken
        last.
        """
        return self._batches(self._steps[consumed, size], dp_rank)

    def expect(self, consumed: int, size: int) -> None:
        """Do nothing: answers are sampled with the weights that the step begins with."""

    def close(self) -> None:
        """End the engine and the processes of the rewards."""
        self._engine.close()
        if self._judges is not None:
            self._judges.close()

    def measured(self, context: TrainContext, result: StepResult) -> dict[str, float]:
        """Return the rewards and lengths of a step for its record."""
        found = self._measured.pop(result.step, {})
        if context.routes is not None:
            share = result.metrics["routes_differ"] / max(1.0, result.metrics["routes"])
            found["routes_differ"] = share
        return found

    def _rewards(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """Return the reward of each answer by each function, float64 [answers, functions], on every
        rank; that of a function that failed is 0.
        """
        context = self._context
        names = context.run.rollout.rewards or ()
        if not context.run.objective.judges:
            return np.zeros((len(rollouts), 0))
        device = context.world.torch_device
        values = torch.zeros((len(rollouts), len(names)), dtype=torch.float64, device=device)
        problem = ""
        sampled = [self._sampled(one) for one in rollouts]
        scored = []
        if self._scores is not None:
            answers = [
                one.messages or ({"role": "assistant", "content": one.text},) for one in sampled
            ]
            found = self._scores.scores([one.record for one in sampled], answers)
            scored = [Verdict(*one) for one in zip(*found, strict=True)]
        if self._judges is not None:
            by_function = [name for name in names if name != MODEL]
            verdicts = self._judges.verdicts(by_function, sampled)
            for row, verdict in zip(verdicts, scored, strict=False):
                row.insert(names.index(MODEL), verdict)
            problem = self._failures(rollouts, verdicts)
            rows = [[verdict.value for verdict in row] for row in verdicts]
            values += torch.tensor(rows, dtype=torch.float64, device=device)
        problem = context.world.first_problem(problem)
        if problem:
            raise TrainingError(problem)
        with waiting():
            dist.broadcast(values, src=0)
            return values.nan_to_num(0.0).cpu().numpy()

    def _sampled(self, rollout: Rollout) -> Sampled:
        r = self._context.run.rollout
        settings = {name: getattr(r, name) for name in SETTINGS}
        ids = rollout.ids[:-1] if rollout.ended == END else rollout.ids
        said = [one["content"] for one in rollout.messages if one["role"] == "assistant"]
        return Sampled(
            said[-1] if said else self._tokenizer.decode(ids),
            self._source.record(rollout.prompt.number),
            rollout.sampled,
            self._sampling.tokens,
            rollout.ended != LENGTH,
            settings,
            rollout.messages,
        )

    def _failures(self, rollouts: Sequence[Rollout], verdicts: list[list[Verdict]]) -> str:
        """Name a few rewards that failed; return a problem if there are too many."""
        names = self._context.run.rollout.rewards or ()
        failed = [
            f"the reward {name} of the answer to {self._source.place(rollout.prompt.number)}:"
            f" {verdict.why}"
            for rollout, row in zip(rollouts, verdicts, strict=True)
            for name, verdict in zip(names, row, strict=True)
            if verdict.why
        ]
        failed += [
            f"the environment of the answer to {self._source.place(one.prompt.number)}: {one.why}"
            for one in rollouts
            if one.why
        ]
        step = self._context.state.step + 1
        limit = self._context.run.rollout.failed_rewards
        total = len(rollouts) * len(names)
        if len(failed) > limit * total:
            return (
                f"step {step}: {len(failed)} of {total} rewards failed, above"
                f" rollout.failed_rewards={limit:g} ({'; '.join(failed[:NAMED])}). Correct the"
                " function or the data, or set a larger share"
            )
        for text in failed[:NAMED]:
            warn(f"step {step}: {text}; it counts as 0")
        return ""

    def _described(
        self, rollouts: Sequence[Rollout], rewards: np.ndarray, groups: np.ndarray
    ) -> dict[str, float]:
        names = self._context.run.rollout.rewards or ()
        lengths = np.array([one.sampled for one in rollouts])
        ended = [one.ended != LENGTH for one in rollouts]
        o = self._context.run.objective
        judged = {
            "reward": float(groups.mean()),
            "reward_std": float(groups.std()),
            **{f"reward_{name}": float(rewards[:, i].mean()) for i, name in enumerate(names)},
        }
        if o.groups:
            judged["equal_groups"] = float(self._equal(groups).mean())
        return {
            **(judged if o.judges else {}),
            "answer_tokens": float(lengths.mean()),
            "answer_tokens_max": int(lengths.max()),
            "ended_share": float(np.mean(ended)),
        }

    def _batches(self, step: Step, dp_rank: int) -> list[dict[str, Any]]:
        run = self._context.run
        return [
            dict(to_device(self._batch(step, row, run.objective.divisor), self._context.world))
            for row in self._answers_of(step.place, dp_rank)
        ]

    def _batch(self, step: Step, places: np.ndarray, divisor: str) -> Mapping[str, Any]:
        known = self._context.routes
        layers = [] if known is None else list(known.own)
        answers = []
        for place in places:
            rollout = step.rollouts[place]
            first = len(rollout.prompt.ids) - 1
            # A label is the token after its place.
            labels = place, slice(first, first + len(rollout.ids))
            credit = step.credit
            critic: dict[str, Any] = {}
            if credit.returns is not None and credit.values is not None:
                critic = {"returns": credit.returns[labels], "values": credit.values[labels]}
            answers.append(
                Answer(
                    np.array(rollout.prompt.ids),
                    np.array(rollout.ids),
                    np.array(rollout.log_probabilities, np.float32),
                    credit.advantages[labels],
                    np.array(rollout.own) if rollout.own else None,
                    among=rollout.among,
                    routes=None if rollout.routes is None else rollout.routes[:, layers],
                    **critic,
                )
            )
        length = self._context.run.data.length
        return answer_batch(answers, length, divisor, self._sampling.tokens)
