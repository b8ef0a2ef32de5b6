"""The group `data`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from mtrain.config.schema.base import (
    MOST,
    Effect,
    Flag,
    Key,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
)

WEIGHTS_OF = {
    "blend": "blend_weights",
    "validation_blend": "validation_weights",
    "test_blend": "test_weights",
}
"""Key of corpora that are read side by side -> key of their shares."""


def read_corpora(
    corpora: tuple[str, ...] | None, shares: tuple[float, ...] | None
) -> tuple[str, ...]:
    """Return the corpora of a blend that are read: those whose weight is not 0."""
    if corpora is None or shares is None or len(shares) != len(corpora):
        return corpora or ()
    return _where(shares, corpora)


def _where(shares: tuple[float, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value for share, value in zip(shares, values, strict=False) if share)


class FimConfig(Section):
    """`data.fim`: documents whose middle is read behind their end, so that a model learns to fill
    it in.
    """

    rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the documents of a sample that are read so; 0: none."""
    spm_rate: Annotated[Annotated[float, Field(ge=0, le=1)], Key(when="data.fim.rate")] = 0.5
    """Share of those in which the suffix stands before the prefix (SPM), not behind it (PSM)."""
    ids: Annotated[
        tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] | None, Key(when="data.fim.rate")
    ] = Field(default=None, strict=False)
    """Ids of the tokens that mark prefix, suffix and middle."""


class DataConfig(Section):
    """`data`: what is read, and how it becomes samples."""

    kind: Literal["text", "indexed", "image_text", "sft", "preference", "mock"] | None = None
    """text: files, tokenized once, with a BPE trained on them where there is no tokenizer; indexed:
    Megatron .bin/.idx; image_text: a folder of images and a JSON Lines file of texts, for the
    family llava; sft: chats of a JSON Lines file, written by the chat template of a tokenizer;
    preference: the same with a chosen and a rejected answer; mock: synthetic tokens, and images
    where the model reads some. null: text where data.path or data.limit_mib is set, or for small
    vocabularies on a CPU; else mock. Where data.path is a .jsonl file, its first line says more: a
    chat is sft, a pair of answers preference. For the family llava: image_text where data.path is
    set, else mock.
    """
    path: Annotated[str | None, Key(effect=Effect.CONTENTS, aka="data_path data_prefix")] = None
    """text: a file or folder, null: the Python standard library of this machine; indexed: prefix of
    .bin and .idx; image_text: the folder, or its .jsonl file; sft, preference: a .jsonl file, or a
    folder that holds one.
    """
    blend: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1)] | None,
        Key(when="data.kind=indexed", effect=Effect.CONTENTS, aka="train_data_path"),
    ] = Field(default=None, strict=False)
    """indexed, in place of path: prefixes of several corpora that are read side by side; null: path
    alone.
    """
    blend_weights: Annotated[
        Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] | None, Key(when="data.blend")
    ] = Field(default=None, strict=False)
    """blend: shares of the samples that each corpus gives, in any unit; a corpus with 0 is not
    read. null: by their tokens, and by their samples with data.order=megatron.
    """
    blend_sizes: Annotated[
        Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None,
        Key(when="data.blend and data.order=keyed", unit="samples"),
    ] = Field(default=None, strict=False)
    """blend, in place of weights: how many samples each corpus gives of the first, in all as many
    as their sum; they are shares of what comes after. null: blend_weights.
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
    """[[sample, weights], ...]: blend, in place of weights: those that hold from a sample number
    on; the first is 0. A corpus may have a weight of 0 for a time. Validation and test have the
    last weights. null: blend_weights.
    """
    blend_max_epochs: Annotated[
        Annotated[tuple[Annotated[float, Field(gt=0, le=10**6)], ...], Field(min_length=1)] | None,
        Key(when="data.blend and data.order=keyed", unit="epochs"),
    ] = Field(default=None, strict=False)
    """blend: how often each corpus is read in training at most; the others keep their shares of
    what comes then. A run that asks for more is refused. null: as often as it takes.
    """
    validation_blend: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1)] | None,
        Key(when="data.kind=indexed", effect=Effect.CONTENTS, aka="valid_data_path"),
    ] = Field(default=None, strict=False)
    """indexed: prefixes of the corpora that validation reads.

    With them, or test_blend, every split reads the whole of its own corpora and data.split has no
    effect; one that has none is not read. null: a share of the corpora of training.
    """
    validation_weights: Annotated[
        Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] | None,
        Key(when="data.validation_blend", effect=Effect.RUNTIME),
    ] = Field(default=None, strict=False)
    """validation_blend: shares of the samples that each corpus gives; a corpus with 0 is not read.

    null: by their tokens.
    """
    test_blend: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1)] | None,
        Key(when="data.kind=indexed", effect=Effect.CONTENTS, aka="test_data_path"),
    ] = Field(default=None, strict=False)
    """indexed: prefixes of the corpora that tests read; null: as for validation_blend."""
    test_weights: Annotated[
        Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] | None,
        Key(when="data.test_blend", effect=Effect.RUNTIME),
    ] = Field(default=None, strict=False)
    """test_blend: shares of the samples that each corpus gives; 0: it is not read.

    null: by their tokens.
    """
    order: Annotated[Literal["keyed", "megatron"], Key(when="data.kind=text|indexed")] = "keyed"
    """keyed: which tokens make a sample is computed from the seed, the epoch and its number, and
    nothing is made before the first step; megatron, of text and indexed data: Megatron-LM's own
    order, one sample for one, of a run of as many steps as this one, which is made before the first
    step and kept in data.cache_dir.
    """
    megatron_cache: Annotated[
        str | None, Key(when="data.order=megatron", effect=Effect.RUNTIME, aka="data_cache_path")
    ] = None
    """order=megatron: a folder in which Megatron-LM left the orders of its runs
    (--data-cache-path); what it holds of the same data, seed and steps is read and not made again.
    null: none.
    """
    fim: FimConfig = Field(default_factory=FimConfig)
    """Fill in the middle: documents whose middle is read behind their end."""
    tokenizer: Annotated[str | None, Key(effect=Effect.CONTENTS, aka="tokenizer_model")] = None
    """Path of a tokenizer.json.

    null: that of the model whose weights the run goes on from (checkpoint.resume,
    checkpoint.init_from), and another one is refused. Without such a model, text, image_text: a BPE
    is trained; indexed: no text can be generated; sft, preference: one has to be named.
    """
    tokenizer_vocab_size: Annotated[int, Field(ge=300, le=1_000_000)] = 4096
    """text, image_text: size of the BPE vocabulary, where one is trained."""
    suffixes: tuple[str, ...] = Field(default=(".py", ".txt", ".rst", ".md"), strict=False)
    """text: file name endings that are read from a folder."""
    limit_mib: Annotated[Annotated[float, Field(gt=0, le=MOST)] | None, Key(unit="MiB")] = None
    """text: read at most this much text, of one file its beginning; null: all."""
    seq_length: Annotated[
        Annotated[int, Field(ge=2, le=MOST)] | None,
        Key(
            flag=Flag("--seq-length", absent=None, always=True, also=("--encoder-seq-length",)),
            aka="sequence_length max_seq_len",
            unit="tokens",
        ),
    ] = None
    """Tokens per sample. The one place where the sequence length is written.

    null: model.max_position_embeddings, at most 8192, and at most 256 on a CPU; for the family
    llava, that and the tokens of an image.
    """
    split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = Field(
        default=(0.96, 0.03, 0.01), strict=False
    )
    """Shares of train, validation and test; they are normalised to one."""
    eod_mask_loss: Annotated[bool, Key(flag="--eod-mask-loss")] = False
    """No loss on the prediction that follows an end-of-document token."""
    packed: bool = False
    """A sample's documents do not see each other and each starts at position 0 (packed sequences,
    THD). sft: a sample is as many whole chats as fit into it, by first fit, and not one.
    """
    packed_multiple: Annotated[PositiveInt | None, Key(when="data.packed=true")] = None
    """packed: documents are padded to a multiple of this many tokens; what no longer fits in the
    sample is left out. null: 2 * cp under context parallelism, else 1.
    """
    packing_scheduler: Annotated[
        Literal["dp_balanced"] | None,
        Key(
            when="data.packed=true and parallel.hybrid_context_parallel=false",
            effect=Effect.PARALLELISM,
            aka="sequence_packing_scheduler",
        ),
    ] = None
    """packed: which samples of a step a data-parallel rank runs.

    dp_balanced: those with which ranks have about as much attention in each micro-batch, by the
    squares of the lengths of documents; every rank reads all samples of a step for that. A step has
    the same samples and the same loss, but that the balancing loss of experts is one of other
    micro-batches. null: samples are dealt out in turn.
    """
    document_tokens: Annotated[
        PositiveInt | None, Key(when="data.packed=true", effect=Effect.RUNTIME, unit="tokens")
    ] = None
    """packed: what a plan, and the FLOPs of a step, take the length of a document to be, in the
    mean over tokens: a token sees no other document. It changes nothing in a run. null: each sample
    is one document, the most there can be to do.
    """
    packed_by: Annotated[
        Literal["stream", "first_fit"], Key(when="data.packed=true and data.kind=text|indexed|mock")
    ] = "stream"
    """packed.

    stream: a sample is seq_length tokens of all documents end to end, so that its first and its
    last document may be parts of one; first_fit: a sample is as many whole documents as fit into
    it, by first fit among packed_window consecutive ones, and padding. Where documents end is known
    from the index then, without a token.
    """
    packed_window: Annotated[
        Annotated[int, Field(ge=1, le=1 << 16)],
        Key(when="data.packed_by=first_fit", unit="documents"),
    ] = 2048
    """first_fit: consecutive documents that are put into samples together.

    More of them leave less padding, and take longer to be fitted, which is done once.
    """
    long_documents: Annotated[
        Literal["cut", "drop", "refuse"], Key(when="data.packed_by=first_fit")
    ] = "cut"
    """first_fit: what becomes of a document of more than seq_length + 1 tokens.

    cut: it is read in pieces of seq_length tokens, each of which predicts the first token of the
    next one and sees nothing of the others; drop: it is left out; refuse: an error names it. What
    is cut and what is left out is counted when a run begins.
    """
    chat_template: Annotated[
        str | None, Key(when="data.kind=sft|preference", effect=Effect.CONTENTS)
    ] = None
    """sft, preference: path of a chat template (Jinja); null: the chat_template.jinja beside the
    tokenizer, else the chat_template of its tokenizer_config.json.
    """
    loss_on: Annotated[
        Literal["assistant", "last", "all"],
        Key(when="data.kind=sft", aka="assistant_only_loss train_on_inputs mask_history"),
    ] = "assistant"
    """sft: the tokens of a chat that are learned.

    assistant: those of every turn of the assistant, with the token that ends it; last: of its last
    turn; all: every token.
    """
    bad_lines: Annotated[
        NonNegativeInt | None,
        Key(when="data.kind=sft|preference", null=100, effect=Effect.RUNTIME, unit="lines"),
    ] = None
    """sft, preference: at most so many lines that are no JSON or no UTF-8 are left out, each named
    in rejects.jsonl in the cache; more are an error. null: 100.
    """
    ignored_keys: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Key(when="data.kind=sft|preference|image_text"),
    ] = Field(default=(), strict=False)
    """sft, preference, image_text: keys of records and messages that are not read, also where they
    say what is learned, as `weight` does. Any other key that mtrain does not know is refused, with
    its line.
    """
    prefetch: Annotated[
        Annotated[int, Field(ge=0, le=64)],
        Key(effect=Effect.RUNTIME, aka="prefetch_factor num_workers", unit="steps"),
    ] = 2
    """Steps whose samples a thread reads ahead of the one that takes them; 0: each step reads its
    own.
    """
    remote_cache_gib: Annotated[
        Annotated[float, Field(gt=0, le=MOST)], Key(effect=Effect.RUNTIME, unit="GiB")
    ] = 50.0
    """Most that blocks of corpora in object stores (s3://, gs://, hf://) take in cache_dir, but for
    their indices.
    """
    cache_dir: Annotated[str, Key(effect=Effect.RUNTIME)] = "~/.cache/mtrain"
    """Where tokenized text is kept.

    When a corpus is added, those go that no run used for 90 days, and, of more than 100 GiB in all,
    those that were used longest ago; never one that a run reads or has used in the last day.
    """

    def without_excluded(self) -> "DataConfig":
        """Return the same without the corpora that have a weight of 0: no order has a part of them,
        and none is opened.
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
            if names == "blend" and self.blend_max_epochs is not None:
                update["blend_max_epochs"] = _where(shares, self.blend_max_epochs)
        return self.model_copy(update=update) if update else self

    @property
    def length(self) -> int:
        """Return tokens per sample, once it is resolved."""
        return self.seq_length or 256

    @property
    def seen_tokens(self) -> int:
        """Return tokens that see each other, of a sample or, where they are packed, of a document
        as plans take it.
        """
        return min(self.document_tokens or self.length, self.length) if self.packed else self.length

    @property
    def whole_documents(self) -> bool:
        """Return whether samples are whole documents of a corpus, put side by side by first fit."""
        return (
            self.packed
            and self.packed_by == "first_fit"
            and self.kind in ("text", "indexed", "mock")
        )

    @property
    def least_tokens(self) -> int:
        """Return tokens that a corpus needs for one sample."""
        return 2 if self.whole_documents else self.length + 1

    @property
    def needs_document_ends(self) -> bool:
        """Return whether it is a token that tells packed documents apart."""
        return self.packed and not self.whole_documents
