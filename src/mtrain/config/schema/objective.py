"""`objective`: the loss that a run minimises, and the model that it is compared with."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import Key, NonNegativeFloat, PositiveFloat, Section

Reference = Literal["frozen", "adapter_off", "precomputed", "none"]
LossType = Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "apo_zero", "apo_down"]
# Objectives of pairs of answers; those of the first row compare the policy with a reference.
WITH_REFERENCE = ("dpo", "ipo", "kto")
PAIRS = (*WITH_REFERENCE, "orpo", "simpo", "reward")


class ObjectiveConfig(Section):
    """`objective`: the loss of a step, and what its sum is divided by."""

    name: Annotated[str, Key(aka="objective rl_algorithm")] = "next_token"
    """Loss that the run minimises. next_token: cross entropy of tokens, the next one or those that
    the model's family masks or writes; label_smoothing: the same with a share of each label for
    every token of the vocabulary. Of pairs of answers: dpo, ipo, kto, orpo, simpo, and reward,
    which trains a model of rewards; see docs/post_training.md. Installed packages publish others
    under the entry point group `mtrain.objectives`.
    """
    beta: Annotated[
        PositiveFloat | None,
        Key(when="objective.name=dpo|ipo|kto|orpo|simpo", null=0.1, aka="dpo_beta kl_coef"),
    ] = None
    """dpo: the factor of log-ratios, the larger the closer to the reference (Rafailov et al. 2023,
    arXiv:2305.18290, whose experiments have 0.1 and 0.5); ipo: the same, tau there (Azar et al.
    2023, arXiv:2310.12036); kto: the same (Ethayarajh et al. 2024, arXiv:2402.01306, which has
    0.1); orpo: the weight of the odds ratio, lambda there (Hong et al. 2024,
    arXiv:2403.07691, which has 0.1); simpo: the factor of mean log-probabilities (Meng et al. 2024,
    arXiv:2405.14734, which has 2.0 to 10). null: 0.1.
    """
    loss_type: Annotated[
        LossType | None, Key(when="objective.name=dpo", null="sigmoid", aka="dpo_loss_type")
    ] = None
    """dpo: the function of both log-ratios. sigmoid: as in the paper; sigmoid_norm: of means over
    the tokens of an answer (Lambert et al. 2024, arXiv:2411.15124, section 5.1); hinge: Zhao et al.
    2023, arXiv:2305.10425; ipo: arXiv:2310.12036, of means; robust: with labels that are wrong with
    the probability label_smoothing (Chowdhury et al. 2024, arXiv:2403.00409); apo_zero, apo_down:
    d'Oosterlinck et al. 2024, arXiv:2408.06266. null: sigmoid.
    """
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
        Key(when="objective.name=simpo", null=1.0, aka="simpo_gamma target_reward_margin"),
    ] = None
    """simpo: the margin between the rewards of both answers (arXiv:2405.14734, which has 0.3 to
    1.6). null: 1.0.
    """
    center_weight: Annotated[
        NonNegativeFloat,
        Key(when="objective.name=reward", aka="center_rewards_coefficient"),
    ] = 0.0
    """reward: the weight of the square of the sum of both rewards of a pair, which keeps rewards
    around 0 (Eisenstein et al. 2023, arXiv:2312.09244; TRL's RewardTrainer names 0.01).
    """
    desirable_weight: Annotated[PositiveFloat, Key(when="objective.name=kto")] = 1.0
    """kto: the weight of chosen answers (arXiv:2402.01306, lambda_D)."""
    undesirable_weight: Annotated[PositiveFloat, Key(when="objective.name=kto")] = 1.0
    """kto: the weight of rejected answers (arXiv:2402.01306, lambda_U)."""
    reference: Annotated[
        Reference | None, Key(when="objective.name=dpo|ipo|kto", aka="ref_model reference_model")
    ] = None
    """The model that the policy is compared with. frozen: a copy of the starting weights, in the
    layout of the policy, without gradients and optimizer state; checkpoints hold it. adapter_off:
    the policy without its adapters, which needs no copy. precomputed: a number for each answer that
    the run reads, computed with the starting weights before the first step; checkpoints hold them.
    none: log-ratios are log-probabilities.
    null: adapter_off with adapters, else frozen.
    """

    @property
    def pairs(self) -> bool:
        """Return whether a sample is an answer of a pair, the chosen one or the rejected one."""
        return self.name in PAIRS

    @property
    def reads_values(self) -> bool:
        """Return whether the loss reads one number at each position, and no log-probability."""
        return self.name == "reward"

    @property
    def refers(self) -> bool:
        """Return whether the loss reads log-probabilities of a reference model."""
        return self.name in WITH_REFERENCE and self.reference != "none"

    @property
    def mismatches(self) -> bool:
        """Return whether the loss reads answers to other prompts, too."""
        return self.name == "kto"

    @property
    def copies(self) -> bool:
        """Return whether ranks hold a frozen copy of the model."""
        return self.name in WITH_REFERENCE and self.reference == "frozen"
