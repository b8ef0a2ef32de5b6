"""Objectives of answers that the policy samples: groups, sampling and rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

from mtrain.config.machine import installed
from mtrain.config.resolve.batches import stages
from mtrain.config.rules.batch import MICRO
from mtrain.config.rules.finding import Finding, each, multiples
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.rollout import MODEL
from mtrain.config.schema.run import RunConfig

NAME = "objective.name"
ROLLS = f"{NAME} objective.on_policy"
"""Keys that decide whether a run samples answers."""
GROUP = "objective.group_size"
BATCH = "trainer.global_batch_size"
KL = "objective.kl_in_reward"
REWARDS = "rollout.rewards"
SCORER = "rollout.reward_model"
URL = "rollout.reward_url"
STALENESS = "objective.max_staleness"
ROUTES = "rollout.replay_routes"
BALANCE = "model.moe.router_load_balancing_type"
RAMP = "trainer.batch_size_schedule trainer.rampup_batch_size"
URL_FORM = re.compile(r"https?://[^/?#@\s]+(/[^?#\s]*)?")
GRPO = "objective=grpo data=mock data.seq_length=64"


@rule(
    Code("MT338", example=f"{GRPO} rollout.temperature=0"),
    reads=f"{NAME} rollout.temperature",
)
def sampled_answers(run: RunConfig) -> Iterator[Finding]:
    """Cannot train on answers without chance because then each has the probability 1, and all of a
    group are equal.
    """
    if run.objective.judges and run.rollout.temperature == 0:
        key = "rollout.temperature"
        yield Finding("MT338", key, f"objective.name is {run.objective.name}", each(key, [1.0]))


@rule(
    Code("MT339", example=f"{GRPO} {GROUP}=1"),
    Code(
        "MT347",
        text="Cannot compare the answers to a prompt because a step holds a part of a group.",
        example=f"{GRPO} {GROUP}=8 {BATCH}=12 {MICRO}=4",
    ),
    reads=f"{NAME} {GROUP} {BATCH} {RAMP}",
)
def whole_groups(run: RunConfig) -> Iterator[Finding]:
    """Cannot compare the answers to a prompt because there is one."""
    o = run.objective
    if not o.judges:
        return
    if o.whole == 1 and o.groups:
        yield Finding("MT339", GROUP, f"objective.name is {o.name}", each(GROUP, [8, 4, 2]))
    elif odd := [size for _, size in stages(run) if size % o.whole]:
        sizes = multiples(run.trainer.batch, o.whole)
        detail = f"{odd[0]} samples, groups of {o.whole}"
        groups = [n for n in (o.whole // 2, 4, 2) if n > 1 and run.trainer.batch % n == 0]
        yield Finding("MT347", BATCH, detail, [*each(BATCH, sizes), *each(GROUP, groups)])


@rule(
    Code(
        "MT336",
        help="Use objective.reference=frozen.",
        example=f"objective=ppo data=mock data.seq_length=64 {KL}=0.1 objective.reference=none",
    ),
    reads=f"{NAME} {KL} objective.kl_coef objective.reference",
)
def divergence_in_reward(run: RunConfig) -> Iterator[Finding]:
    """Cannot take the divergence from the reference off rewards because there is no reference."""
    o = run.objective
    if o.judges and o.kl_in_reward and o.reference == "none":
        fixes = [*each("objective.reference", ["frozen"]), {KL: 0.0}]
        yield Finding("MT336", KL, "objective.reference is none", fixes)


@rule(
    Code("MT379", example="objective=ppo data=mock data.seq_length=64 objective.gamma=1.5"),
    reads=f"{NAME} objective.gamma",
)
def discount(run: RunConfig) -> Iterator[Finding]:
    """Cannot discount rewards because the factor is above 1, so they would grow with distance."""
    o = run.objective
    if o.judges and o.gamma is not None and o.gamma > 1:
        yield Finding("MT379", "objective.gamma", f"{o.gamma:g}", each("objective.gamma", [1.0]))


@rule(
    Code(
        "MT350",
        help="Set rollout.url, rollout.weights_folder and checkpoint.init_from=HF_DIR.",
        example=f"{GRPO} rollout.engine=openai",
    ),
    reads=(
        f"rollout.engine rollout.url rollout.weights_folder {ROLLS} checkpoint.init_from peft.kind"
    ),
)
def served_rollouts(run: RunConfig) -> Iterator[Finding]:
    """Cannot sample answers on a server because it would not have the weights of the policy."""
    r = run.rollout
    if not run.objective.rolls or r.engine == "local":
        return
    local = each("rollout.engine", ["local"])
    for key, value in (
        ("rollout.url", r.url or r.engine == "transformers" or None),
        ("rollout.weights_folder", r.weights_folder),
        ("checkpoint.init_from", run.checkpoint.init_from),
    ):
        if value is None:
            yield Finding("MT350", key, f"rollout.engine is {r.engine}", local, lacks="input")
    if run.peft.kind is not None:
        detail = "weights with adapters are not pushed"
        yield Finding("MT350", "peft.kind", detail, [*local, {"peft.kind": None}])


@rule(
    Code(
        "MT385",
        help="Use top_k with rollout=local, or no limits.",
        example=f"{GRPO} rollout.top_p=0.9",
    ),
    reads=f"{ROLLS} rollout.engine rollout.top_k rollout.top_p rollout.min_p",
)
def limited_draws(run: RunConfig) -> Iterator[Finding]:
    """Cannot leave out unlikely tokens because the trainer would not know which ones."""
    r = run.rollout
    limits: dict[str, object] = {}
    if r.top_k:
        limits["rollout.top_k"] = 0
    if r.top_p < 1:
        limits["rollout.top_p"] = 1.0
    if r.min_p:
        limits["rollout.min_p"] = 0.0
    if not run.objective.rolls or not limits:
        return
    key = next(iter(limits))
    if r.engine in ("openai", "sglang"):
        detail = f"a server of the kind {r.engine} does not report them"
        yield Finding("MT385", key, detail, [limits, {"rollout.engine": "local"}])
    elif not r.top_k:
        detail = "without rollout.top_k, any number of them may be kept"
        yield Finding("MT385", key, detail, [{"rollout.top_k": 64}, limits])


@rule(
    Code(
        "MT384",
        help="Use objective.max_staleness=0, or a server with rollout.updates=1.",
        example=f"{GRPO} {STALENESS}=1",
    ),
    reads=f"{STALENESS} {ROLLS} rollout.engine rollout.updates rollout.environment",
)
def stale_rollouts(run: RunConfig) -> Iterator[Finding]:
    """Cannot sample answers while a step trains because this run samples them between steps."""
    r = run.rollout
    if not run.objective.rolls or not run.objective.max_staleness:
        return
    if r.engine == "local":
        detail = "rollout.engine is local, which samples with the trained shards"
        yield Finding("MT384", STALENESS, detail, each(STALENESS, [0]))
    elif r.updates > 1:
        detail = f"{r.updates} updates for each batch of rollouts"
        yield Finding("MT384", STALENESS, detail, [{"rollout.updates": 1}, {STALENESS: 0}])
    elif r.environment is not None:
        detail = f"rollout.environment is {r.environment}, which answers between two turns"
        yield Finding("MT384", STALENESS, detail, each(STALENESS, [0]))


@rule(
    Code(
        "MT393",
        text="Cannot send tokens to the experts of the sampler.",
        example=f"{GRPO} model=mixtral_8x7b {BALANCE}=sinkhorn {ROUTES}=true",
    ),
    reads=f"{NAME} {ROUTES} {BALANCE} rollout.environment",
)
def replayed_routes(run: RunConfig) -> Iterator[Finding]:
    """Require routers that choose by themselves for each token, and answers of one turn."""
    moe = run.model.moe
    if not run.objective.judges or moe is None or not run.rollout.replay_routes:
        return
    if moe.router_load_balancing_type == "sinkhorn":
        fixes = [*each(ROUTES, [False]), {BALANCE: "aux_loss"}]
        detail = f"{BALANCE} is sinkhorn, which weighs the tokens of a micro-batch together"
        yield Finding("MT393", ROUTES, detail, fixes)
    elif run.rollout.environment is not None:
        detail = f"rollout.environment is {run.rollout.environment}, whose answers have turns"
        yield Finding("MT393", ROUTES, detail, each(ROUTES, [False]))


@rule(
    Code("MT349", example=f"{GRPO} rollout.updates=4 resilience.rerun=on_anomaly"),
    reads=f"rollout.updates {ROLLS} resilience.rerun",
)
def repeated_updates(run: RunConfig) -> Iterator[Finding]:
    """Cannot repeat a step on other ranks because its ratios are to weights that are gone."""
    if run.objective.rolls and run.rollout.updates > 1 and run.resilience.rerun != "off":
        detail = f"{run.rollout.updates} updates for each batch of rollouts"
        fixes = [*each("resilience.rerun", ["off"]), {"rollout.updates": 1}]
        yield Finding("MT349", "resilience.rerun", detail, fixes)


@rule(
    Code(
        "MT337",
        text="Cannot judge answers.",
        help="Use rewards=[exact], or other shipped or installed rewards.",
        example="objective=grpo data=prompts data.path=prompts.jsonl data.tokenizer=tokenizer.json",
    ),
    reads=f"{NAME} data.kind {REWARDS} rollout.reward_weights rollout.pattern {SCORER} {URL}",
    disk=True,
)
def known_rewards(run: RunConfig) -> Iterator[Finding]:
    """Require rewards that this machine has, with the keys that they need."""
    r = run.rollout
    if not run.objective.judges or (run.data.kind != "prompts" and r.rewards is None):
        return
    if r.rewards is None:
        yield Finding("MT337", REWARDS, "no reward is named", each(REWARDS, [["exact"]]))
        return
    known = [MODEL, *installed.names(installed.SHIPPED_REWARDS, installed.REWARDS)]
    for name in sorted(set(r.rewards) - set(known)):
        detail = f"neither mtrain nor an installed package has {name!r} ({', '.join(known)})"
        yield Finding("MT337", REWARDS, detail, hint="rewards=[exact]")
    if r.reward_weights is not None and len(r.reward_weights) != len(r.rewards):
        key = "rollout.reward_weights"
        detail = f"{len(r.reward_weights)} weights for {len(r.rewards)} rewards"
        yield Finding("MT337", key, detail, [{key: None}, {key: [1.0] * len(r.rewards)}])
    if "format" in r.rewards and not _is_pattern(r.pattern):
        detail = "the reward format needs a regular expression"
        yield Finding("MT337", "rollout.pattern", detail, hint="rollout.pattern='.*[0-9]+'")
    if MODEL in r.rewards and not r.reward_model:
        hint = f"{SCORER}=FOLDER, a run of objective=reward or a classifier of one label"
        detail = "the reward model needs a folder"
        yield Finding("MT337", SCORER, detail, hint=hint, lacks="input")
    if "http" in r.rewards and not URL_FORM.fullmatch(r.reward_url or ""):
        detail = "the reward http needs the address of a server, without a user and a query"
        yield Finding("MT337", URL, detail, hint=f"{URL}=http://HOST:8000/judge", lacks="input")
    if "math" in r.rewards and find_spec("math_verify") is None:
        detail = "the reward math needs math-verify, which is not installed here"
        hint = "pip install 'mtrain[rl]'"
        yield Finding("MT337", REWARDS, detail, hint=hint, lacks="input")


@rule(
    Code(
        "MT398",
        text="Cannot continue answers because this machine has no such environment.",
        help="Use a shipped or installed one, such as rollout.environment=calculator.",
        example=f"{GRPO} rollout.environment=nowhere",
    ),
    reads=f"{ROLLS} rollout.environment",
    disk=True,
)
def known_environment(run: RunConfig) -> Iterator[Finding]:
    """Require an environment that this machine has."""
    name = run.rollout.environment
    if not run.objective.rolls or name is None:
        return
    known = installed.names(installed.SHIPPED_ENVIRONMENTS, installed.ENVIRONMENTS)
    if name not in known:
        key = "rollout.environment"
        yield Finding("MT398", key, f"known are {', '.join(known)}", each(key, [*known[:2], None]))


def _is_pattern(text: str | None) -> bool:
    if text is None:
        return False
    try:
        re.compile(text)
    except re.error:
        return False
    return True
