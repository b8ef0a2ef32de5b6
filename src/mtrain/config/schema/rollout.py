"""The section `rollout`: how answers are sampled, and the rewards that judge them."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import (
    Effect,
    Key,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)

WITH_REWARDS = "objective.name=grpo|rloo|ppo|reinforce_pp"
JUDGED = f"{WITH_REWARDS} and rollout.rewards"
ACTED = f"{WITH_REWARDS} and rollout.environment"
SAMPLED = "objective.name=grpo|rloo|ppo|reinforce_pp|distil"
SERVED = f"{SAMPLED} and rollout.engine=openai|sglang|transformers"
REMOTE = f"{SAMPLED} and rollout.engine=openai|sglang"
MODEL = "model"
"""The reward that ranks compute together, by a model; all others are functions in processes."""
Share = Annotated[float, Field(ge=0, le=1)]


class RolloutConfig(Section):
    """`rollout`: answers to prompts, which the policy samples in every step."""

    engine: Annotated[Literal["local", "openai", "sglang", "transformers"], Key(aka="backend")] = (
        "local"
    )
    """The sampler. local: the trained shards themselves, in the layout of the run; openai: a server
    with OpenAI's completions and token ids, such as vLLM; sglang: a server of SGLang;
    transformers: a process of transformers next to the first rank, which is slow: for tests.
    """
    url: Annotated[
        str | None, Key(when=REMOTE, effect=Effect.RUNTIME, aka="vllm_server_base_url base_url")
    ] = None
    """openai, sglang: the address of the server, such as http://host:8000. The environment variable
    MTRAIN_ROLLOUT_KEY has its key.
    """
    server_model: Annotated[str | None, Key(when=REMOTE, effect=Effect.RUNTIME)] = None
    """openai, sglang: the name of the model there; null: the only one that the server has."""
    weights_folder: Annotated[str | None, Key(when=SERVED, effect=Effect.RUNTIME)] = None
    """openai, sglang, transformers: a folder on a disk that the server reads too. The weights are
    written to it before each batch of rollouts, in the format of checkpoint.init_from; not before
    that of step 1 where a server starts with them and objective.max_staleness is 0.
    """
    request_seconds: Annotated[Seconds, Key(when=SERVED, effect=Effect.RUNTIME)] = 600.0
    """openai, sglang, transformers: the most time of a request."""
    temperature: Annotated[NonNegativeFloat, Key(aka="sampling_temperature")] = 1.0
    """Divisor of logits, in sampling and in every log-probability of the loss."""
    top_k: Annotated[NonNegativeInt, Key(aka="sampling_top_k", unit="tokens")] = 0
    """The most likely tokens that are drawn; 0: all. With one of these three limits,
    log-probabilities are those among the tokens that it keeps, for the sampler and the trainer.
    """
    top_p: Annotated[Annotated[float, Field(gt=0, le=1)], Key(aka="sampling_top_p")] = 1.0
    """The probability of the most likely tokens that are drawn; needs top_k."""
    min_p: Annotated[Annotated[float, Field(ge=0, lt=1)], Key()] = 0.0
    """The least probability of a token that is drawn, as a share of the most likely one's; needs
    top_k.
    """
    max_tokens: Annotated[
        PositiveInt | None,
        Key(aka="max_completion_length max_new_tokens max_response_length", unit="tokens"),
    ] = None
    """The most tokens of an answer. A prompt with so many more has to fit in data.seq_length + 1.
    null: half of data.seq_length.
    """
    rows: Annotated[
        PositiveInt, Key(effect=Effect.PARALLELISM, aka="max_num_seqs", unit="answers")
    ] = 32
    """Answers that are sampled together by each data-parallel rank, or requests that a server gets
    at once; an answer does not depend on the others.
    """
    replay_routes: Annotated[
        bool | None,
        Key(
            when=f"{WITH_REWARDS} and model.moe",
            aka="enable_rollout_routing_replay use_rollout_routing_replay moe_router_replay",
        ),
    ] = None
    """The trainer sends each token of an answer, and of its prompt, to the experts that the sampler
    sent it to (routing replay, arXiv:2510.11370). The weights of these experts are the trained
    router's. A server has to report them. null: true with the engine local, unless
    model.moe.router_load_balancing_type is sinkhorn or there is an environment.
    """
    updates: Annotated[
        PositiveInt, Key(aka="num_iterations steps_per_generation ppo_epochs", unit="steps")
    ] = 1
    """Steps whose answers are sampled at once, with the weights before the first of them. From the
    second on, ratios are to the policy that sampled and are clipped; the trainer computes its
    log-probabilities once. A run that resumes between such steps samples the rest anew.
    """
    resample: Annotated[
        NonNegativeInt,
        Key(
            when="objective.name=grpo|rloo",
            aka="max_num_gen_batches dynamic_sampling filter_groups",
        ),
    ] = 0
    """The most times that groups with equal rewards, which teach nothing, are replaced by answers
    to later prompts (dynamic sampling of DAPO, arXiv:2503.14476, equation 11). What is equal after
    that stays. Each time, the run samples as many answers as it replaces.
    """
    environment: Annotated[str | None, Key(when=JUDGED, aka="tools environment_factory")] = None
    """A function that writes what follows a turn of the model, as messages of tools or users, or
    ends the answer; nothing is learned from them. calculator: values of `<calc>1 + 2</calc>`.
    Installed packages publish others under the entry point group `mtrain.environments`. They run in
    the processes of the rewards, with their limits. null: an answer is one turn.
    """
    max_turns: Annotated[
        PositiveInt, Key(when=ACTED, aka="max_tool_calling_iterations max_assistant_turns")
    ] = 8
    """environment: the most turns of the model in an answer, which together with what stands
    between them has at most max_tokens.
    """
    rewards: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1)] | None,
        Key(when=WITH_REWARDS, aka="reward_funcs"),
    ] = Field(default=None, strict=False)
    """The functions that judge an answer; `rewards=[exact]` on the command line sets them. exact:
    1 if it is the text of the column `answer_column`, without the blanks around it; math: 1 if
    math-verify finds both equal (extra rl); format: 1 if `pattern` matches all of it; length: 1 up
    to `free_tokens`, then falling to 0 at max_tokens; model: the score of `reward_model`; http: the
    number of the server at `reward_url`. Installed packages publish others under the entry point
    group `mtrain.rewards`.
    """
    reward_weights: Annotated[
        Annotated[tuple[float, ...], Field(min_length=1)] | None, Key(when=JUDGED)
    ] = Field(default=None, strict=False)
    """The factor of each of `rewards` in their sum. null: 1."""
    answer_column: Annotated[str, Key(when=JUDGED)] = "answer"
    """Key of the lines of data.path with the right answer."""
    reward_model: Annotated[str | None, Key(when=JUDGED, aka="reward_model_path")] = None
    """model: a run of objective=reward, a checkpoint of one, or a Hugging Face folder of a
    `...ForSequenceClassification` with one label. It is frozen on the ranks of the policy, in their
    layout, and reads prompt and answer as its own chat template writes them.
    """
    reward_url: Annotated[
        str | None, Key(when=JUDGED, effect=Effect.RUNTIME, aka="reward_model_url remote_rm_url")
    ] = None
    """http: the address of a server that gets {"id", "prompt", "answer", "columns"} and replies
    {"id", "reward"}. It gets prompts and answers, so only the command line and own choices set it.
    The environment variable MTRAIN_REWARD_KEY has its key.
    """
    pattern: Annotated[str | None, Key(when=JUDGED, aka="format_pattern")] = None
    """format: a regular expression, as Python's re reads it, in which a dot is any character."""
    free_tokens: Annotated[PositiveInt | None, Key(when=JUDGED, unit="tokens")] = None
    """length: the tokens up to which an answer has the whole reward. null: half of max_tokens."""
    reward_seconds: Annotated[Seconds, Key(when=JUDGED, effect=Effect.RUNTIME)] = 5.0
    """The most time of one function for one answer."""
    reward_memory_gib: Annotated[PositiveFloat, Key(when=JUDGED, effect=Effect.RUNTIME)] = 4.0
    """The most memory of each process that runs them."""
    reward_workers: Annotated[PositiveInt, Key(when=JUDGED, effect=Effect.RUNTIME)] = 2
    """Processes that run them, next to the first rank."""
    failed_rewards: Annotated[Share, Key(when=JUDGED)] = 0.01
    """The share of a step's rewards that may fail: the function raised, took too long, or returned
    no finite number. Such a reward is 0, and the run says which it was. Above it, the run ends.
    """

    def tokens(self, length: int) -> int:
        """Return the most tokens of an answer in samples of `length` tokens."""
        return self.max_tokens or max(1, length // 2)

    @property
    def scores(self) -> bool:
        """Return whether a model of rewards judges answers."""
        return self.reward_model is not None and MODEL in (self.rewards or ())

    @property
    def weights(self) -> tuple[float, ...]:
        """Return the weight of each reward."""
        return self.reward_weights or (1.0,) * len(self.rewards or ())
