"""The section `data`."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from mtrain.config.schema.base import (
    MOST,
    SAME,
    Effect,
    Flag,
    Key,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
)

# Key of the corpora of a blend -> key of their shares.
WEIGHTS_OF = {
    "blend": "blend_weights",
    "validation_blend": "validation_weights",
    "test_blend": "test_weights",
}


def read_corpora(
    corpora: tuple[str, ...] | None, shares: tuple[float, ...] | None
) -> tuple[str, ...]:
    """Return the corpora of a blend with a positive weight."""
    if corpora is None or shares is None or len(shares) != len(corpora):
        return corpora or ()
    return _where(shares, corpora)


def _where(shares: tuple[float, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value for share, value in zip(shares, values, strict=False) if share)


class FimConfig(Section):
    """`data.fim`: documents whose middle is moved to their end, so that a model learns to fill it
    in.
    """

    rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of documents that are transformed; 0: none."""
    spm_rate: Annotated[Annotated[float, Field(ge=0, le=1)], Key(when="data.fim.rate")] = 0.5
    """The share of those in which the suffix precedes the prefix (SPM) instead of following it
    (PSM).
    """
    ids: Annotated[
        tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] | None, Key(when="data.fim.rate")
    ] = Field(default=None, strict=False)
    """The ids of the tokens that mark prefix, suffix and middle."""


DataKind = Literal["text", "indexed", "image_text", "sft", "preference", "prompts", "mock"]


class UnresolvedData(Section):
    """`data`: the source of the samples, and how they are made."""

    kind: DataKind | None = None
    """text: files, tokenized once, with a BPE trained on them if there is no tokenizer; indexed:
    Megatron .bin/.idx; image_text: a folder of images and a JSON Lines file of texts, for the
    family llava; sft: chats of a JSON Lines file, formatted by the chat template of a tokenizer;
    preference: the same with a chosen and a rejected answer, a labelled or several scored ones;
    prompts: the same without an answer, which the policy samples; mock: synthetic tokens, and
    images if the model reads some. null: text if data.path or data.limit_mib is set, or for small
    vocabularies on a CPU; else mock. The first line of a .jsonl file in data.path decides further:
    a chat is sft, answers to compare are preference, and with an objective of rollouts any is
    prompts. For the family llava: image_text if data.path is set, else mock.
    """
    path: Annotated[str | None, Key(effect=Effect.CONTENTS, aka="data_path data_prefix")] = None
    """text: a file or folder, null: the Python standard library of this machine; indexed: the
    prefix of .bin and .idx; image_text: the folder, or its .jsonl file; sft, preference, prompts: a
    .jsonl file, or a folder that holds one.
    """
    blend: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1)] | None,
        Key(when="data.kind=indexed", effect=Effect.CONTENTS, aka="train_data_path"),
    ] = Field(default=None, strict=False)
    """indexed, instead of path: prefixes of several corpora that are read together; null: only
    path.
    """
    blend_weights: Annotated[
        Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] | None, Key(when="data.blend")
    ] = Field(default=None, strict=False)
    """blend: the shares of samples from each corpus, in any unit; a corpus with 0 is not read.
    null: by their tokens; with data.order=megatron by their samples.
    """
    blend_sizes: Annotated[
        Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None,
        Key(when="data.blend and data.order=keyed", unit="samples"),
    ] = Field(default=None, strict=False)
    """blend, instead of weights: the number of the first samples that each corpus gives, in total
    their sum; later samples have the same shares. null: blend_weights.
    """
    blend_curriculum: Annotated[
        Annotated[
            tuple[
                Annotated[
                    tuple[
                        NonNegativeInt, Annotated[tuple[NonNegativeFloat, ...], Field(strict=False)]
                    ],
                    Field(strict=False),
                ],
                ...,
            ],
            Field(min_length=1),
        ]
        | None,
        Key(when="data.blend and data.order=keyed"),
    ] = Field(default=None, strict=False)
    """[[sample, weights], ...]: blend, instead of weights: the weights from each sample number on;
    the first is 0. A corpus may have weight 0 for a time. Validation and test use the last weights.
    null: blend_weights.
    """
    blend_max_epochs: Annotated[
        Annotated[tuple[Annotated[float, Field(gt=0, le=10**6)], ...], Field(min_length=1)] | None,
        Key(when="data.blend and data.order=keyed", unit="epochs"),
    ] = Field(default=None, strict=False)
    """blend: the largest number of epochs of each corpus in training; after it, the others keep
    their relative shares. A run that needs more is refused. null: unlimited.
    """
    validation_blend: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1)] | None,
        Key(when="data.kind=indexed", effect=Effect.CONTENTS, aka="valid_data_path"),
    ] = Field(default=None, strict=False)
    """indexed: prefixes of the validation corpora. With them, or test_blend, every split reads the
    whole of its own corpora and data.split has no effect; a split without corpora is not read.
    null: a share of the training corpora.
    """
    validation_weights: Annotated[
        Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] | None,
        Key(when="data.validation_blend", effect=Effect.RUNTIME),
    ] = Field(default=None, strict=False)
    """validation_blend: the shares of samples from each corpus; a corpus with 0 is not read. null:
    by their tokens.
    """
    test_blend: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1)] | None,
        Key(when="data.kind=indexed", effect=Effect.CONTENTS, aka="test_data_path"),
    ] = Field(default=None, strict=False)
    """indexed: prefixes of the test corpora; null: as for validation_blend."""
    test_weights: Annotated[
        Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] | None,
        Key(when="data.test_blend", effect=Effect.RUNTIME),
    ] = Field(default=None, strict=False)
    """test_blend: the shares of samples from each corpus; a corpus with 0 is not read. null: by
    their tokens.
    """
    order: Annotated[Literal["keyed", "megatron"], Key(when="data.kind=text|indexed")] = "keyed"
    """keyed: the tokens of a sample are computed from the seed, the epoch and its number, and
    nothing is prepared before the first step; megatron, for text and indexed data: exactly
    Megatron-LM's order in a run of as many steps, which is computed before the first step and kept
    in data.cache_dir.
    """
    megatron_cache: Annotated[
        str | None, Key(when="data.order=megatron", effect=Effect.RUNTIME, aka="data_cache_path")
    ] = None
    """order=megatron: a folder in which Megatron-LM left the orders of its runs
    (--data-cache-path); mtrain reads an order of the same data, seed and steps from it. null: none.
    """
    fim: FimConfig = Field(default_factory=FimConfig)
    """Fill in the middle: documents whose middle is moved to their end."""
    tokenizer: Annotated[str | None, Key(effect=Effect.CONTENTS, aka="tokenizer_model")] = None
    """The path of a tokenizer.json. null: that of the model whose weights the run continues
    (checkpoint.resume, checkpoint.init_from), and another one is refused. Without such a model,
    text, image_text: a BPE is trained; indexed: no text can be generated; sft, preference, prompts:
    the key is required.
    """
    tokenizer_vocab_size: Annotated[int, Field(ge=300, le=1_000_000)] = 4096
    """text, image_text: the vocabulary size of a trained BPE."""
    suffixes: tuple[str, ...] = Field(default=(".py", ".txt", ".rst", ".md"), strict=False)
    """text: endings of the files that are read from a folder."""
    limit_mib: Annotated[Annotated[float, Field(gt=0, le=MOST)] | None, Key(unit="MiB")] = None
    """text: the largest amount of text that is read, from the start of a single file; null: all."""
    seq_length: Annotated[
        Annotated[int, Field(ge=2, le=MOST)] | None,
        Key(
            flag=Flag(SAME, absent=None, always=True, also=("--encoder-seq-length",)),
            aka="sequence_length max_seq_len",
            unit="tokens",
        ),
    ] = None
    """Tokens per sample: the only key with the sequence length. null:
    model.max_position_embeddings, at most 8192, and at most 256 on a CPU; for the family llava,
    that plus the tokens of an image.
    """
    split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = Field(
        default=(0.96, 0.03, 0.01), strict=False
    )
    """The shares of train, validation and test; they are normalised to one."""
    eod_mask_loss: Annotated[bool, Key(flag=SAME)] = False
    """Exclude the prediction after an end-of-document token from the loss."""
    packed: bool = False
    """A sample's documents do not attend to each other, and each starts at position 0 (packed
    sequences, THD). sft: a sample is as many whole chats as fit into it, by first fit, instead of
    one.
    """
    packed_multiple: Annotated[PositiveInt | None, Key(when="data.packed=true")] = None
    """packed: documents are padded to a multiple of this many tokens; what no longer fits in the
    sample is dropped. null: 2 * cp under context parallelism, else 1.
    """
    packing_scheduler: Annotated[
        Literal["dp_balanced"] | None,
        Key(
            when="data.packed=true and parallel.hybrid_context_parallel=false",
            effect=Effect.PARALLELISM,
            aka="sequence_packing_scheduler",
        ),
    ] = None
    """packed: which samples of a step a data-parallel rank runs. dp_balanced: those that give ranks
    about equal attention work per micro-batch, by the squares of the document lengths; every rank
    reads all samples of a step for it. A step has the same samples and the same loss, except that
    the experts' balancing loss is computed over other micro-batches. null: round-robin.
    """
    document_tokens: Annotated[
        PositiveInt | None, Key(when="data.packed=true", effect=Effect.RUNTIME, unit="tokens")
    ] = None
    """packed: the length of a document that a plan and the FLOPs of a step assume, as a mean over
    tokens: a token sees no other document. It changes nothing in a run. null: each sample is one
    document, which is the most work.
    """
    packed_by: Annotated[
        Literal["stream", "first_fit"], Key(when="data.packed=true and data.kind=text|indexed|mock")
    ] = "stream"
    """packed. stream: a sample is seq_length tokens of all documents end to end, so that its first
    and its last document may be parts; first_fit: a sample is as many whole documents as fit into
    it, by first fit among packed_window consecutive ones, and padding. The index then tells where
    documents end, without a token.
    """
    packed_window: Annotated[
        Annotated[int, Field(ge=1, le=1 << 16)],
        Key(when="data.packed_by=first_fit", unit="documents"),
    ] = 2048
    """first_fit: the number of consecutive documents that are packed together. More leave less
    padding, and take longer to pack, which happens once.
    """
    long_documents: Annotated[
        Literal["cut", "drop", "refuse"], Key(when="data.packed_by=first_fit")
    ] = "cut"
    """first_fit: the treatment of a document of more than seq_length + 1 tokens. cut: it is split
    into pieces of seq_length tokens, each of which predicts the first token of the next and sees no
    other; drop: it is dropped; refuse: an error names it. A run reports at its start how many are
    cut or dropped.
    """
    chat_template: Annotated[
        str | None, Key(when="data.kind=sft|preference|prompts", effect=Effect.CONTENTS)
    ] = None
    """sft, preference, prompts: the path of a chat template (Jinja); null: the chat_template.jinja
    next to the tokenizer, else the chat_template of its tokenizer_config.json.
    """
    loss_on: Annotated[
        Literal["assistant", "last", "all"],
        Key(when="data.kind=sft", aka="assistant_only_loss train_on_inputs mask_history"),
    ] = "assistant"
    """sft: the tokens of a chat that count in the loss. assistant: those of every turn of the
    assistant, with the token that ends it; last: of its last turn; all: every token.
    """
    bad_lines: Annotated[
        NonNegativeInt | None,
        Key(when="data.kind=sft|preference|prompts", null=100, effect=Effect.RUNTIME, unit="lines"),
    ] = None
    """sft, preference, prompts: the largest number of lines without valid JSON or UTF-8 that are
    skipped, each listed in rejects.jsonl in the cache; more are an error. null: 100.
    """
    ignored_keys: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Key(when="data.kind=sft|preference|image_text"),
    ] = Field(default=(), strict=False)
    """sft, preference, image_text: keys of records and messages to ignore, even if they decide what
    is learned, as `weight` does. Any other unknown key is refused, with its line.
    """
    prefetch: Annotated[
        Annotated[int, Field(ge=0, le=64)],
        Key(effect=Effect.RUNTIME, aka="prefetch_factor num_workers", unit="steps"),
    ] = 2
    """The number of steps whose samples a thread prefetches; 0: each step reads its own."""
    remote_cache_gib: Annotated[
        Annotated[float, Field(gt=0, le=MOST)], Key(effect=Effect.RUNTIME, unit="GiB")
    ] = 50.0
    """The largest size of cached blocks of corpora in object stores (s3://, gs://, hf://) in
    cache_dir, without their indices.
    """
    cache_dir: Annotated[str, Key(effect=Effect.RUNTIME)] = "~/.cache/mtrain"
    """The folder of tokenized text. Adding a corpus deletes those that no run used for 90 days and,
    beyond 100 GiB in total, the least recently used; never one that a run reads or has used in the
    last day.
    """

    def without_excluded(self) -> Self:
        """Return the same without corpora of weight 0: no order includes them, and none
        is opened.
        """
        update: dict[str, Any] = {}
        for names, weights in WEIGHTS_OF.items():
            corpora = getattr(self, names)
            shares = getattr(self, weights)
            if (
                corpora is None
                or shares is None
                or all(shares)
                or len(shares) != len(corpora)
                or not any(shares)
            ):
                continue
            update |= {names: _where(shares, corpora), weights: _where(shares, shares)}
            # Limits are listed in the order of the corpora.
            if names == "blend" and self.blend_max_epochs is not None:
                update["blend_max_epochs"] = _where(shares, self.blend_max_epochs)
        return self.model_copy(update=update) if update else self


class DataConfig(UnresolvedData):
    """`data` of a resolved run: the keys below are never null."""

    kind: DataKind
    seq_length: int

    @property
    def length(self) -> int:
        """Return the tokens per sample."""
        return self.seq_length

    @property
    def seen_tokens(self) -> int:
        """Return the number of tokens that see each other: those of a sample or, if packed, of a
        document as plans assume it.
        """
        return min(self.document_tokens or self.length, self.length) if self.packed else self.length

    @property
    def whole_documents(self) -> bool:
        """Return whether samples are whole documents of a corpus, packed by first fit."""
        return (
            self.packed
            and self.packed_by == "first_fit"
            and self.kind in ("text", "indexed", "mock")
        )

    @property
    def least_tokens(self) -> int:
        """Return the number of tokens that a corpus needs for one sample."""
        # A sample of n tokens needs one more, which its last token predicts.
        return 2 if self.whole_documents else self.length + 1

    @property
    def needs_document_ends(self) -> bool:
        """Return whether packed documents are separated by a token."""
        return self.packed and not self.whole_documents
