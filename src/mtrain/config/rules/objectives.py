"""Objectives of answers and of distillation: their samples, the models that they compare with, and
keys that exclude them.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.disk.files import form_of_preferences
from mtrain.config.resolve.defaults import CHATS
from mtrain.config.rules.batch import MICRO
from mtrain.config.rules.finding import DP, Change, Finding, each
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.objective import DRAWN
from mtrain.config.schema.run import RunConfig

NAME = "objective.name"
TOP_K = "objective.distil_top_k"
WEIGHTS = "objective.loss_weights"
DPO = "objective=dpo data=mock data.seq_length=64"
DISTIL = f"objective=distil objective.teacher={DRAWN} data=mock"
ENCODERS = ("bert", "t5", "llava")


@rule(
    Code(
        "MT328",
        help=(
            "Use data=preference with dpo, ipo, kto, orpo, simpo, reward; data=prompts with grpo,"
            " rloo, ppo, reinforce_pp."
        ),
        example="data.kind=preference data.path=pairs.jsonl data.tokenizer=tokenizer.json",
    ),
    reads=f"{NAME} data.kind objective.on_policy",
)
def objective_samples(run: RunConfig) -> Iterator[Finding]:
    """Cannot compute the loss because the objective and the samples do not go together."""
    kind = run.data.kind
    name = run.objective.name
    if run.objective.pairs and kind not in ("preference", "mock"):
        detail = f"objective {name} reads pairs of answers, and data.kind is {kind}"
        yield Finding("MT328", NAME, detail, hint="data=preference", also=("data.kind",))
    elif run.objective.rolls and kind not in ("prompts", "mock"):
        detail = f"objective {name} answers prompts, and data.kind is {kind}"
        yield Finding("MT328", NAME, detail, hint="data=prompts", also=("data.kind",))
    elif kind == "prompts" and run.objective.distils and not run.objective.on_policy:
        detail = "data.kind is prompts, and objective.on_policy is false"
        yield Finding("MT328", "objective.on_policy", detail, each("objective.on_policy", [True]))
    elif kind == "preference" and not run.objective.pairs:
        detail = f"data.kind is preference, and objective {name} reads no pairs"
        hint = "objective=dpo, or objective=kto for a file with labels"
        yield Finding("MT328", NAME, detail, hint=hint, also=("data.kind",))
    elif kind == "prompts" and not run.objective.rolls:
        detail = f"data.kind is prompts, and objective {name} samples no answers"
        yield Finding("MT328", NAME, detail, hint="objective=grpo", also=("data.kind",))


@rule(
    Code("MT329", example=f"{DPO} trainer.z_loss_coeff=1e-4"),
    reads=(
        f"{NAME} model.mtp_num_layers trainer.z_loss_coeff log.token_accuracy trainer.loss_average"
        " trainer.cuda_graph_impl data.kind data.packed data.fim.rate objective.reference"
        " objective.kl_coef objective.kl_in_reward parallel.fsdp"
        " parallel.hybrid_context_parallel"
    ),
)
def objective_terms(run: RunConfig) -> Iterator[Finding]:
    """Cannot use this with an objective of answers because its loss is of whole answers."""
    if not run.objective.answers:
        return
    terms: tuple[tuple[str, object, object, str], ...] = (
        ("model.mtp_num_layers", run.model.mtp_num_layers, None, "further tokens have no answers"),
        ("trainer.z_loss_coeff", run.trainer.z_loss_coeff, None, "z-loss is of single tokens"),
        ("log.token_accuracy", run.log.token_accuracy, False, "answers are judged, not tokens"),
        (
            "trainer.loss_average",
            run.trainer.loss_average != "token",
            "token",
            "the objective says what is counted",
        ),
        (
            "trainer.cuda_graph_impl",
            run.trainer.cuda_graph_impl != "none",
            "none",
            "log-probabilities are read between forward and backward",
        ),
        (
            "data.packed",
            run.data.packed and run.data.kind != "prompts" and _apart(run),
            False,
            "this objective reads each answer in a row of its own",
        ),
        (
            "parallel.hybrid_context_parallel",
            run.parallel.hybrid_context_parallel,
            False,
            "it gives the two answers of a pair to different ranks",
        ),
        # MT344 reports it for files of chats.
        (
            "data.fim.rate",
            run.data.fim.rate and run.data.kind not in CHATS,
            0.0,
            "answers keep their order",
        ),
        (
            "parallel.fsdp",
            run.objective.copies and run.parallel.fsdp != "none",
            "none",
            "the copy of objective.reference=frozen is not sharded",
        ),
        (
            "parallel.fsdp",
            run.objective.criticises and run.parallel.fsdp != "none",
            "none",
            "the critic of objective ppo starts from weights that are whole on a rank",
        ),
    )
    for key, is_set, off, why in terms:
        if is_set:
            yield Finding("MT329", key, why, each(key, [off]))


def _apart(run: RunConfig) -> bool:
    """Return whether each answer has its own row."""
    o = run.objective
    return o.rolls or o.mismatches or o.reads_values


@rule(
    Code(
        "MT330",
        help="Use a decoder-only model.",
        example="model=bert_tiny objective=dpo data=mock",
    ),
    reads=f"{NAME} model.family model.head",
)
def objective_family(run: RunConfig) -> Iterator[Finding]:
    """Cannot compute the loss because the model is no decoder of text only, or has no such head."""
    o = run.objective
    family = run.model.family
    headless = (o.reads_values or o.criticises or run.model.head is not None) and family != "gpt"
    if ((o.answers or o.distils) and family in ENCODERS) or headless:
        detail = f"model.family is {family}"
        hint = "model=llama_tiny, or another decoder-only model"
        yield Finding("MT330", NAME, detail, hint=hint, also=("model.family",))


@rule(
    Code("MT376", help="Leave model.head out.", example="model.head=value"),
    reads=f"{NAME} model.head",
)
def head_of_objective(run: RunConfig) -> Iterator[Finding]:
    """Cannot compute the loss because the objective reads logits and the model has a value head."""
    if run.model.head and not run.objective.reads_values:
        fixes: list[Change] = [{"model.head": None}, {NAME: "reward"}]
        yield Finding("MT376", "model.head", f"objective.name is {run.objective.name}", fixes)


@rule(
    Code("MT331", example=f"{DPO} {MICRO}=1"),
    reads=f"{NAME} data.packed {MICRO} trainer.global_batch_size {DP}",
)
def whole_pairs(run: RunConfig) -> Iterator[Finding]:
    """Cannot compare answers because a micro-batch holds half of a pair, which is two samples."""
    t = run.trainer
    if t.micro % run.together == 0:
        return
    rows = t.batch // run.parallel.dp
    even = [size for size in (t.micro - 1, t.micro + 1, 2) if size and rows % size == 0]
    yield Finding("MT331", MICRO, f"{t.micro} samples", each(MICRO, even))


@rule(
    Code("MT396", example=f"{DPO} objective.loss_type=[sigmoid,ipo] {WEIGHTS}=[1]"),
    reads=f"{NAME} objective.loss_type {WEIGHTS}",
)
def weighted_losses(run: RunConfig) -> Iterator[Finding]:
    """Cannot add up these losses because each needs one weight."""
    o = run.objective
    kinds = 1 if isinstance(o.loss_type, str) else len(o.loss_type or ())
    weights = o.loss_weights
    if weights is not None and len(weights) != kinds:
        detail = f"{len(weights)} weights, and objective.loss_type has {kinds}"
        yield Finding(
            "MT396", WEIGHTS, detail, each(WEIGHTS, [None]), also=("objective.loss_type",)
        )


@rule("MT395", reads=f"{NAME} data.kind data.path", disk=True)
def labelled_answers(run: RunConfig) -> Iterator[Finding]:
    """Cannot compare the answers of this file because each line has one, with a label."""
    o = run.objective
    if run.data.kind == "preference" and o.contrasts and _labelled(run):
        detail = f"objective {o.name}, and the first line of data.path has completion and label"
        yield Finding("MT395", NAME, detail, each(NAME, ["kto"]), also=("data.path",))


def _labelled(run: RunConfig) -> bool:
    return form_of_preferences(run.data.path) == "labels"


@rule(
    "MT333",
    reads=(
        f"{NAME} objective.reference objective.kl_coef objective.kl_in_reward data.kind data.packed"
    ),
)
def precomputed_reference(run: RunConfig) -> Iterator[Finding]:
    """Require answers that are known before training where the reference is computed then."""
    o = run.objective
    if o.reference != "precomputed" or not o.compares:
        return
    frozen = each("objective.reference", ["frozen"])
    if o.rolls:
        detail = f"objective {o.name} samples its answers"
        yield Finding("MT333", "objective.reference", detail, frozen)
        return
    if run.data.kind != "preference":
        detail = f"data.kind is {run.data.kind}, and its samples never end"
        yield Finding("MT333", "objective.reference", detail, frozen)
    elif run.data.packed:
        detail = "data.packed is true, and it computes single answers"
        yield Finding("MT333", "objective.reference", detail, frozen, also=("data.packed",))
    elif o.mismatches:
        detail = f"objective {o.name} also reads answers after other prompts"
        yield Finding("MT333", "objective.reference", detail, frozen)


@rule(
    Code("MT332", example=f"{DPO} objective.reference=adapter_off"),
    reads=f"{NAME} objective.reference peft.kind",
)
def reference_without_adapters(run: RunConfig) -> Iterator[Finding]:
    """Cannot switch adapters off because the run trains none, so policy and reference are one."""
    if run.objective.reference == "adapter_off" and run.peft.kind is None:
        fixes = [*each("objective.reference", ["frozen"]), {"peft.kind": "lora"}]
        yield Finding("MT332", "objective.reference", "peft.kind is null", fixes)


@rule(
    Code(
        "MT387",
        help="Name the teacher: `objective.teacher=HF_DIR`, or a run.",
        example="objective=distil data=mock",
    ),
    reads=f"{NAME} objective.teacher objective.teacher_file",
)
def teacher_is_named(run: RunConfig) -> Iterator[Finding]:
    """Cannot distil because no teacher is named."""
    o = run.objective
    if o.distils and not o.teacher and o.teacher_file is None:
        detail = f"objective.teacher is {'null' if o.teacher is None else 'empty'}"
        hint = "objective.teacher=FOLDER, a run or a Hugging Face model"
        yield Finding("MT387", "objective.teacher", detail, hint=hint)


@rule(
    Code("MT390", example=f"{DISTIL} trainer.z_loss_coeff=1e-4"),
    reads=(
        f"{NAME} model.mtp_num_layers trainer.z_loss_coeff log.token_accuracy"
        " trainer.cuda_graph_impl parallel.fsdp parallel.hybrid_context_parallel"
        " objective.on_policy objective.teacher_file trainer.loss_average data.packed data.kind"
    ),
)
def distillation_terms(run: RunConfig) -> Iterator[Finding]:
    """Cannot use this with distillation because its loss is the divergence from a teacher."""
    if not run.objective.distils:
        return
    graphs = run.trainer.cuda_graph_impl
    p = run.parallel
    terms: tuple[tuple[str, object, object, str], ...] = (
        ("model.mtp_num_layers", run.model.mtp_num_layers, None, "it is of the next token only"),
        ("trainer.z_loss_coeff", run.trainer.z_loss_coeff, None, "z-loss is no part of it"),
        ("log.token_accuracy", run.log.token_accuracy, False, "likeliest tokens are not counted"),
        ("trainer.cuda_graph_impl", graphs != "none", "none", "the teacher runs in between"),
        ("parallel.fsdp", p.fsdp != "none", "none", "the teacher is not sharded"),
        (
            "parallel.hybrid_context_parallel",
            p.hybrid_context_parallel,
            False,
            "the teacher reads whole micro-batches",
        ),
        (
            "objective.teacher_file",
            run.objective.rolls and run.objective.teacher_file is not None,
            None,
            "nobody knows the answers before they are sampled",
        ),
        (
            "trainer.loss_average",
            run.objective.rolls and run.trainer.loss_average != "token",
            "token",
            "each sampled token counts",
        ),
        (
            "data.packed",
            run.objective.rolls and run.data.packed and run.data.kind != "prompts",
            False,
            "an answer stands in a row of its own",
        ),
    )
    for key, is_set, off, why in terms:
        if is_set:
            yield Finding("MT390", key, why, each(key, [off]))


@rule(
    Code("MT392", example=f"{DISTIL} objective.distil_top_k=1000000"),
    reads=f"{NAME} objective.distil_top_k model.vocab_size model.mask_padded_vocab",
)
def distilled_tokens(run: RunConfig) -> Iterator[Finding]:
    """Cannot make a bucket of all other tokens because there are none."""
    k = run.objective.distil_top_k
    if run.objective.distils and k is not None and k >= run.model.loss_vocab_size:
        detail = f"k {k}, vocabulary {run.model.loss_vocab_size}"
        yield Finding("MT392", TOP_K, detail, each(TOP_K, [None, 64]))
