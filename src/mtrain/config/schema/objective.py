"""`objective`: the loss that a run minimises, and the model that it is compared with."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import Key, NonNegativeFloat, PositiveFloat, PositiveInt, Section

Reference = Literal["frozen", "adapter_off", "precomputed", "none"]
LossType = Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "apo_zero", "apo_down"]
Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
# Objectives of pairs of answers; those of the first row compare the policy with a reference.
WITH_REFERENCE = ("dpo", "ipo", "kto")
PAIRS = (*WITH_REFERENCE, "orpo", "simpo", "reward")
# Objectives of answers that the policy itself samples.
GROUPED = ("grpo", "rloo")
ROLLOUTS = (*GROUPED, "ppo", "reinforce_pp")
AHEAD = "objective.name=grpo|rloo|ppo|reinforce_pp and rollout.engine=openai|sglang|transformers"
PolicyLoss = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]
DRAWN = "drawn"
"""Word for a teacher with weights from another seed: of the student's shape, or with `:NAME` behind
it of that choice of `model`.
"""


class ObjectiveConfig(Section):
    """`objective`: the loss of a step, and what its sum is divided by."""

    name: Annotated[str, Key(aka="objective rl_algorithm")] = "next_token"
    """Loss that the run minimises. next_token: cross entropy of tokens, the next one or those that
    the model's family masks or writes; label_smoothing: the same with a share of each label for
    every token of the vocabulary. distil: the divergence from a teacher. Of pairs of answers: dpo,
    ipo, kto, orpo, simpo, and reward, which trains a model of rewards; of answers that the policy
    samples and rewards judge: grpo, rloo, ppo, which trains a critic, too, and reinforce_pp; see
    docs/post_training.md. Installed packages publish
    others under the entry point group `mtrain.objectives`.
    """
    beta: Annotated[
        PositiveFloat | None,
        Key(when="objective.name=dpo|ipo|kto|orpo|simpo", null=0.1, aka="dpo_beta"),
    ] = None
    """dpo: the factor of log-ratios, the larger the closer to the reference (Rafailov et al. 2023,
    arXiv:2305.18290, whose experiments have 0.1 and 0.5); ipo: the same, tau there (Azar et al.
    2023, arXiv:2310.12036); kto: the same (Ethayarajh et al. 2024, arXiv:2402.01306, which has
    0.1); orpo: the weight of the odds ratio, lambda there (Hong et al. 2024,
    arXiv:2403.07691, which has 0.1); simpo: the factor of mean log-probabilities (Meng et al. 2024,
    arXiv:2405.14734, which has 2.0 to 10). null: 0.1.
    """
    loss_type: Annotated[
        LossType | Annotated[tuple[LossType, ...], Field(min_length=1, strict=False)] | None,
        Key(when="objective.name=dpo", null="sigmoid", aka="dpo_loss_type"),
    ] = None
    """dpo: the function of both log-ratios, or a list of them, whose weighted sum is the loss.
    sigmoid: as in the paper; sigmoid_norm: of means over
    the tokens of an answer (Lambert et al. 2024, arXiv:2411.15124, section 5.1); hinge: Zhao et al.
    2023, arXiv:2305.10425; ipo: arXiv:2310.12036, of means; robust: with labels that are wrong with
    the probability label_smoothing (Chowdhury et al. 2024, arXiv:2403.00409); apo_zero, apo_down:
    d'Oosterlinck et al. 2024, arXiv:2408.06266. null: sigmoid.
    """
    loss_weights: Annotated[
        Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None,
        Key(when="objective.name=dpo"),
    ] = Field(default=None, strict=False)
    """dpo with a list of loss_type: the weight of each; null: 1 for each."""
    label_smoothing: Annotated[
        Annotated[float, Field(ge=0, lt=0.5)],
        Key(when="objective.loss_type=sigmoid|sigmoid_norm|robust"),
    ] = 0.0
    """dpo with loss_type sigmoid, sigmoid_norm or robust: the share of pairs whose label is taken
    to be the other way round.
    """
    nll_weight: Annotated[
        NonNegativeFloat, Key(when="objective.name=dpo", aka="rpo_alpha sft_weight")
    ] = 0.0
    """dpo: the weight of the mean negative log-probability of the tokens of each chosen answer,
    which is added to the loss of its pair (Pang et al. 2024, arXiv:2404.19733, which has 1).
    """
    gamma: Annotated[
        NonNegativeFloat | None,
        Key(
            when="objective.name=simpo|ppo|reinforce_pp",
            null=1.0,
            aka="simpo_gamma target_reward_margin discount",
        ),
    ] = None
    """simpo: the margin between the rewards of both answers (arXiv:2405.14734, which has 0.3 to
    1.6). ppo, reinforce_pp: the discount of a reward for each token before it, at most 1 (Schulman
    et al. 2015, arXiv:1506.02438). null: 1.0.
    """
    center_weight: Annotated[
        NonNegativeFloat,
        Key(when="objective.name=reward", aka="center_rewards_coefficient"),
    ] = 0.0
    """reward: the weight of the square of the sum of both rewards of a pair, which keeps rewards
    around 0 (Eisenstein et al. 2023, arXiv:2312.09244, equation 2; TRL recommends 0.01).
    """
    score_margins: Annotated[bool, Key(when="objective.name=reward")] = False
    """reward: the difference of the scores of two answers is the margin by which the reward of the
    better one exceeds the other's in the loss (Touvron et al. 2023, arXiv:2307.09288, equation 2).
    The column `margin` of a file of pairs is always read so, as in TRL.
    """
    desirable_weight: Annotated[PositiveFloat, Key(when="objective.name=kto")] = 1.0
    """kto: the weight of desirable answers (arXiv:2402.01306, lambda_D)."""
    undesirable_weight: Annotated[PositiveFloat, Key(when="objective.name=kto")] = 1.0
    """kto: the weight of answers that are not desirable (arXiv:2402.01306, lambda_U)."""
    reference: Annotated[
        Reference | None,
        Key(
            when="objective.name=dpo|ipo|kto|grpo|rloo|ppo|reinforce_pp",
            aka="ref_model reference_model",
        ),
    ] = None
    """The model that the policy is compared with. frozen: a copy of the starting weights, in the
    layout of the policy, without gradients and optimizer state; checkpoints hold it. adapter_off:
    the policy without its adapters, which needs no copy. precomputed: a number for each answer that
    the run reads, computed with the starting weights before the first step; checkpoints hold them.
    none: log-ratios are log-probabilities.
    grpo, rloo, ppo and reinforce_pp have one if kl_coef or kl_in_reward is above 0.
    null: adapter_off with adapters, else frozen.
    """
    group_size: Annotated[
        PositiveInt | None,
        Key(
            when="objective.name=grpo|rloo|ppo|reinforce_pp",
            aka="num_generations n_samples_per_prompt num_generations_per_prompt rollout.n",
        ),
    ] = None
    """grpo, rloo: the answers to each prompt, whose rewards are compared; ppo, reinforce_pp: the
    answers to each prompt, which are not compared. A sample is one answer, and a step has whole
    groups. null: 8 for grpo and rloo, as in TRL 1.16 (Shao et al. 2024, arXiv:2402.03300, have 64);
    1 for ppo and reinforce_pp.
    """
    policy_loss: Annotated[
        PolicyLoss | None,
        Key(when="objective.name=grpo", null="dapo", aka="loss_agg_mode loss_mode"),
    ] = None
    """grpo: the loss of a token and its divisor. grpo: clipped ratios, the mean over answers of the
    mean over their tokens (arXiv:2402.03300, equation 3); dapo: the mean over all tokens of the
    step (Yu et al. 2025, arXiv:2503.14476, equation 8), which TRL calls bnpo where a step is one
    batch; dr_grpo: the sum over tokens divided by answers times rollout.max_tokens (Liu et al.
    2025, arXiv:2503.20783); gspo: one ratio for an answer, the mean over answers (Zheng et al.
    2025, arXiv:2507.18071, equation 5); cispo: ratios are clipped weights without a gradient, the
    mean over all tokens (MiniMax 2025, arXiv:2506.13585, equation 4). null: dapo, as in TRL 1.16.
    """
    scale_rewards: Annotated[
        Literal["group", "batch", "none"] | None, Key(when="objective.name=grpo", null="group")
    ] = None
    """grpo: what advantages, rewards without the mean of their group, are divided by: the standard
    deviation of their group (arXiv:2402.03300), that of all rewards of the step (Hu et al. 2025,
    arXiv:2501.03262, with a mean of groups), or nothing (arXiv:2503.20783). null: group.
    """
    clip_ratio_low: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None,
        Key(
            when="objective.name=grpo|rloo|ppo|reinforce_pp",
            null=0.2,
            aka="epsilon ratio_clip_min eps_clip clip_ratio",
        ),
    ] = None
    """grpo, rloo, ppo, reinforce_pp: a ratio below 1 minus this gains nothing more from a worse
    answer. cispo: the least weight is 1 minus this. With one update for each sampled batch, ratios
    are exactly 1 unless the sampler is behind. null: 0.2 (Schulman et al. 2017, arXiv:1707.06347).
    """
    clip_ratio_high: Annotated[
        PositiveFloat | None,
        Key(
            when="objective.name=grpo|rloo|ppo|reinforce_pp",
            null=0.2,
            aka="epsilon_high ratio_clip_max eps_clip_high",
        ),
    ] = None
    """grpo, rloo, ppo, reinforce_pp: a ratio above 1 plus this gains nothing more from a better
    answer; DAPO has 0.28 (arXiv:2503.14476). cispo: the largest weight is 1 plus this. null: 0.2.
    """
    kl_coef: Annotated[
        NonNegativeFloat,
        Key(
            when="objective.name=grpo|rloo|ppo|reinforce_pp",
            aka="kl_loss_coef reference_policy_kl_penalty init_kl_coef",
        ),
    ] = 0.0
    """grpo, rloo, ppo, reinforce_pp: the weight of the divergence from the reference, which is
    added to the loss of each token (arXiv:2402.03300 has 0.04). 0, as in TRL 1.16: none.
    """
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Key(when="objective.kl_coef", aka="kl_loss_type kl_penalty"),
    ] = "k3"
    """kl_coef: the estimate from x, the log-ratio of reference to policy: k1: -x; k2: x^2 / 2; k3:
    exp(x) - 1 - x (Schulman 2020, http://joschu.net/blog/kl-approx.html).
    """
    kl_in_reward: Annotated[
        NonNegativeFloat,
        Key(
            when="objective.name=grpo|rloo|ppo|reinforce_pp",
            aka="use_kl_in_reward algorithm.kl_ctrl.kl_coef kl_penalty_coef",
        ),
    ] = 0.0
    """grpo, rloo, ppo, reinforce_pp: the factor of log(policy / reference) of each sampled token
    (the estimate k1), which is subtracted from rewards: from that of its token, or, where an answer
    has one advantage (grpo, rloo), their sum from that of the answer (Ouyang et al. 2022,
    arXiv:2203.02155, section 3.4, which has 0.02). The policy is the one that sampled. 0: none.
    """
    critic: Annotated[
        str | None, Key(when="objective.name=ppo", aka="critic_model value_model")
    ] = None
    """ppo: the model that the critic starts from, a Hugging Face folder, or a run or checkpoint
    folder, such as that of a model of rewards. It has the architecture of the policy with a value
    head, which is drawn where the folder has none, and its layout. null: the weights that the
    policy starts from, with a drawn head. Checkpoints hold the critic: a resumed run does not read
    the folder.
    """
    critic_lr: Annotated[
        PositiveFloat | None, Key(when="objective.name=ppo", aka="critic_learning_rate critic.lr")
    ] = None
    """ppo: the largest learning rate of the critic, which has the optimizer and the schedule of the
    policy; its other rates are to this one as those of the policy are to optim.lr. null: 10 times
    optim.lr (verl 0.9.1 has 1e-5 and 1e-6).
    """
    gae_lambda: Annotated[
        Annotated[float, Field(ge=0, le=1)] | None,
        Key(when="objective.name=ppo", null=1.0, aka="lam gae_lam"),
    ] = None
    """ppo: the weight of the errors of further tokens in an advantage (arXiv:1506.02438, equation
    16). 1: the sum of the rewards less the value; 0: the error of the token itself. null: 1.0, as
    in verl 0.9.1.
    """
    value_clip: Annotated[
        PositiveFloat | None,
        Key(when="objective.name=ppo", null=0.2, aka="cliprange_value vf_clip"),
    ] = None
    """ppo: a value further than this from that of the rollout has the larger loss of both (Engstrom
    et al. 2020, arXiv:2005.12729, section 3). null: 0.2, as in TRL's PPO.
    """
    teacher: Annotated[
        str | None,
        Key(when="objective.name=distil", aka="teacher_model teacher_name"),
    ] = None
    """distil: the model that is imitated: a Hugging Face folder, or a run or checkpoint folder. It
    has an architecture of its own and the vocabulary of the student, and runs in turn on the
    student's ranks, in their layout, without gradients and optimizer state. Checkpoints do not hold
    it: a resumed run reads it again. `drawn`: the student's architecture with weights from another
    seed, `drawn:NAME`: that of the choice model=NAME; for tests and plans.
    """
    teacher_file: Annotated[str | None, Key(when="objective.name=distil")] = None
    """distil: a folder of `data distil` with the teacher's likeliest tokens at each place of the
    data, which is read in the place of a teacher; it is of one corpus, length, seed, temperature
    and distil_top_k. A teacher that is named as well must be the one that the folder was made with.
    """
    on_policy: Annotated[bool, Key(when="objective.name=distil", aka="gkd_lmbda")] = False
    """distil: the student learns from answers that it samples itself to the prompts of data=prompts
    (Agarwal et al. 2023, arXiv:2306.13649, with lambda 1), so it learns where its own answers lead.
    """
    divergence: Annotated[
        Divergence | None, Key(when="objective.name=distil", null="forward_kl", aka="kd_loss")
    ] = None
    """distil: the divergence of each token, of teacher q and student p. forward_kl: KL(q || p)
    (Hinton et al. 2015, arXiv:1503.02531), whose student covers all that the teacher may write;
    reverse_kl: KL(p || q), whose student keeps to what the teacher would write (Gu et al. 2023,
    arXiv:2306.08543, MiniLLM); jsd: jsd_beta KL(q || m) + (1 - jsd_beta) KL(p || m) of m =
    jsd_beta q + (1 - jsd_beta) p (Agarwal et al. 2023, arXiv:2306.13649, GKD). null: forward_kl.
    """
    jsd_beta: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        Key(when="objective.divergence=jsd", null=0.5, aka="gkd_beta"),
    ] = None
    """jsd: the teacher's share of the mixture (arXiv:2306.13649, beta, with experiments of 0.1, 0.5
    and 0.9). null: 0.5, as in TRL.
    """
    temperature: Annotated[
        PositiveFloat | None,
        Key(when="objective.name=distil", null=1.0, aka="kd_temperature distillation_temperature"),
    ] = None
    """distil: the divisor of the logits of both models (arXiv:1503.02531, section 2). The loss is
    not multiplied by its square. null: 1.0.
    """
    ce_weight: Annotated[
        Annotated[float, Field(ge=0, lt=1)],
        Key(when="objective.name=distil", aka="hard_label_weight"),
    ] = 0.0
    """distil: the share of the cross entropy of the labels, at a temperature of 1, in the loss; the
    divergence has the rest (arXiv:1503.02531, section 2).
    """
    distil_top_k: Annotated[
        PositiveInt | None, Key(when="objective.name=distil", unit="token ids")
    ] = None
    """distil: the likeliest tokens of the teacher whose probabilities the student learns; all
    others are one bucket. null: the whole vocabulary.
    """

    importance: Annotated[
        Literal["none", "truncated", "masked", "sequence_masked"],
        Key(
            when="objective.name=grpo|rloo|ppo|reinforce_pp",
            aka="vllm_importance_sampling_mode use_importance_sampling_correction rollout_is",
        ),
    ] = "none"
    """grpo, rloo, ppo, reinforce_pp: the weight of a token's loss, from the ratio of the trainer's
    probability to the sampler's, for a sampler that computes differently or has older weights.
    truncated: the ratio, at most importance_cap (Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl); masked: the ratio, 0 outside of 1 / importance_cap
    to importance_cap; sequence_masked: the same with the ratio of the whole answer. none: 1.
    """
    importance_cap: Annotated[
        Annotated[float, Field(gt=1)],
        Key(
            when="objective.importance=truncated|masked|sequence_masked",
            aka="tis_imp_ratio_cap vllm_importance_sampling_cap",
        ),
    ] = 2.0
    """importance: the largest ratio."""
    max_staleness: Annotated[
        Annotated[int, Field(ge=0, le=1)],
        Key(
            when=AHEAD,
            aka="max_off_policy_steps staleness_threshold max_weight_sync_lag",
        ),
    ] = 0
    """grpo, rloo with a server: the most steps by which the weights that sampled an answer may be
    older than those that it trains. 0: a step waits for its answers; 1: the answers of the next
    step are sampled while a step trains. Older answers are sampled anew.
    """

    @property
    def pairs(self) -> bool:
        """Return whether a sample is an answer, the chosen one or the rejected one."""
        return self.name in PAIRS

    @property
    def reads_values(self) -> bool:
        """Return whether the loss reads one number at each position, and no log-probability."""
        return self.name == "reward"

    @property
    def weighted_losses(self) -> tuple[tuple[LossType, float], ...]:
        """Return the functions that a dpo loss is the sum of, with their weights."""
        kinds = (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type or ()
        return tuple(zip(kinds, self.loss_weights or (1.0,) * len(kinds), strict=True))

    @property
    def contrasts(self) -> bool:
        """Return whether the loss compares the two answers of a pair with each other."""
        return self.pairs and self.name != "kto"

    @property
    def refers(self) -> bool:
        """Return whether log-probabilities of a reference model are read."""
        return self.compares and self.reference != "none"

    @property
    def loss_refers(self) -> bool:
        """Return whether the loss itself reads them, not only rewards."""
        return self.refers and (not self.judges or self.kl_coef > 0)

    @property
    def mismatches(self) -> bool:
        """Return whether the loss reads answers to other prompts, too."""
        return self.name == "kto"

    @property
    def distils(self) -> bool:
        """Return whether the loss reads a teacher."""
        return self.name == "distil"

    @property
    def taught_live(self) -> bool:
        """Return whether a teacher runs next to the student."""
        return self.distils and self.teacher_file is None

    @property
    def draws(self) -> bool:
        """Return whether the weights of the teacher come from a seed."""
        return self.teacher is not None and self.teacher.partition(":")[0] == DRAWN

    @property
    def copies(self) -> bool:
        """Return whether ranks hold a frozen copy of the model."""
        return self.compares and self.reference == "frozen"

    @property
    def compares(self) -> bool:
        """Return whether the run may have a reference."""
        divergence = self.kl_coef > 0 or self.kl_in_reward > 0
        return self.name in WITH_REFERENCE or (self.judges and divergence)

    @property
    def judges(self) -> bool:
        """Return whether the loss reads rewards of answers that the policy samples."""
        return self.name in ROLLOUTS

    @property
    def groups(self) -> bool:
        """Return whether the rewards of the answers to a prompt are compared."""
        return self.name in GROUPED

    @property
    def criticises(self) -> bool:
        """Return whether a run trains a critic, too."""
        return self.name == "ppo"

    @property
    def rolls(self) -> bool:
        """Return whether a sample is an answer that the policy samples."""
        return self.judges or (self.distils and self.on_policy)

    @property
    def answers(self) -> bool:
        """Return whether a sample is an answer, of which the loss reads log-probabilities."""
        return self.pairs or self.judges

    @property
    def divisor(self) -> str:
        """Return what the sum over sampled tokens is divided by: their number (`token`), that of
        answers, each of which is a mean (`sequence`), or answers times the most tokens
        (`constant`).
        """
        if self.name == "rloo":
            return "sequence"
        return {"grpo": "sequence", "gspo": "sequence", "dr_grpo": "constant"}.get(
            self.policy_loss or "dapo", "token"
        )

    @property
    def whole(self) -> int:
        """Return the samples of a step that belong together."""
        if self.judges:
            return self.group_size or (8 if self.groups else 1)
        return 2 if self.pairs else 1
