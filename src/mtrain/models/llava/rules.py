"""Rules of the family llava: a tower that can be built, and room for images in a sample."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.compose.paths import names_near, user_path
from mtrain.config.disk.files import WHICH, records_of
from mtrain.config.families import ships
from mtrain.config.rules.families import of_family
from mtrain.config.rules.finding import Change, Finding, divisors, each, multiples, nearest
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig
from mtrain.models.llava.config import LlavaConfig

TINY = "model=llava_tiny"
OWN = "model.llava"
FREEZE = f"{OWN}.freeze"
IMAGE_ID = f"{OWN}.image_token_id"
TRAINED_IDS = "data.tokenizer_vocab_size"


@of_family(
    "llava",
    Code("MT271", example=f"{TINY} {OWN}.patch_size=64"),
    Code(
        "MT272",
        "Cannot split the width of the tower into heads because they do not divide it.",
        example=f"{TINY} {OWN}.vision_heads=5",
    ),
    Code(
        "MT273",
        "Cannot use the features after this layer because the tower does not have it.",
        example=f"{TINY} {OWN}.feature_layer=-9",
    ),
    reads=(
        f"{OWN}.patch_size {OWN}.image_size {OWN}.vision_heads "
        f"{OWN}.vision_hidden_size {OWN}.feature_layer {OWN}.vision_layers"
    ),
)
def tower_shape(run: RunConfig, own: LlavaConfig) -> Iterator[Finding]:
    """Cannot cut an image into patches because a patch is larger."""
    if own.patch_size > own.image_size:
        key = f"{OWN}.patch_size"
        # The two largest smaller patches: the number of tokens grows with the square of the factor.
        sizes = [n for n in divisors(own.image_size) if n < own.image_size][-2:]
        detail = f"an image of {own.image_size} pixels, patches of {own.patch_size}"
        yield Finding("MT271", key, detail, each(key, sizes))
    width = own.vision_hidden_size
    heads = own.vision_heads
    if width % heads:
        key = f"{OWN}.vision_heads"
        near = nearest(heads, divisors(width))[:2]
        yield Finding("MT272", key, f"{heads} heads, {width} wide", each(key, near))
    most = own.vision_layers
    # Negative numbers count from the last layer, as in Hugging Face's config.json.
    if not 1 <= own.used_layers <= most:
        key = f"{OWN}.feature_layer"
        detail = f"it has {most} layers: 1 to {most}, or -1 to -{most}"
        yield Finding("MT273", key, detail, each(key, [-2, -1]))


@of_family(
    "llava",
    Code("MT274", example=f"{TINY} {IMAGE_ID}=5000"),
    reads=f"model.vocab_size {IMAGE_ID}",
)
def image_token_range(run: RunConfig, own: LlavaConfig) -> Iterator[Finding]:
    """Cannot mark images by this token because it is not in the vocabulary."""
    vocab = run.model.vocab_size
    if own.image_token_id >= vocab:
        fixes = [{IMAGE_ID: vocab - 1}, {"model.vocab_size": own.image_token_id + 1}]
        yield Finding("MT274", IMAGE_ID, f"ids 0 to {vocab - 1}, model.vocab_size {vocab}", fixes)


@of_family(
    "llava", Code("MT275", example=f"{TINY} {FREEZE}=[vision,projector,language]"), reads=FREEZE
)
def trained_parts(run: RunConfig, own: LlavaConfig) -> Iterator[Finding]:
    """Cannot train the model because all of its parts are frozen."""
    if len(set(own.freeze)) == 3:
        yield Finding("MT275", FREEZE, "", each(FREEZE, [["vision", "language"], ["vision"]]))


@of_family(
    "llava",
    Code("MT276", example=f"{TINY} model.hidden_size=192 {OWN}.vision_heads=3 parallel=tp2"),
    reads=f"parallel.tp model.hidden_size {OWN}.vision_heads {OWN}.vision_ffn_hidden_size",
)
def tower_tensor_parallelism(run: RunConfig, own: LlavaConfig) -> Iterator[Finding]:
    """Cannot split the tower and the projector over tensor-parallel ranks because tp does not
    divide this.
    """
    tp = run.parallel.tp
    for key, value in (
        (f"{OWN}.vision_heads", own.vision_heads),
        (f"{OWN}.vision_ffn_hidden_size", own.vision_ffn_hidden_size),
        ("model.hidden_size", run.model.hidden_size),
    ):
        if tp > 1 and value % tp:
            fits = each("parallel.tp", reversed(divisors(value, tp)))
            fixes = [*fits, *each(key, multiples(value, tp))]
            yield Finding("MT276", key, f"{value}, tp {tp}", fixes, also=("parallel.tp",))


@rule(
    Code("MT277", example=f"{TINY} parallel=tp2sp model.hidden_dropout=0.1"),
    reads="model.family model.hidden_dropout parallel.sequence_parallel",
)
def embedding_dropout(run: RunConfig) -> Iterator[Finding]:
    """Cannot drop the same embeddings on all ranks because each tensor-parallel rank draws its own
    random numbers.
    """
    m = run.model
    if m.family == "llava" and m.hidden_dropout and run.parallel.sequence_parallel:
        fixes: list[Change] = [{"model.hidden_dropout": 0.0}, {"parallel.sequence_parallel": False}]
        yield Finding("MT277", "model.hidden_dropout", "sequence_parallel is true", fixes)


@rule(
    Code("MT323", example="model=llama_tiny data=image_text data.path=images"),
    Code(
        "MT324",
        "Cannot train LLaVA on this data because it has no images.",
        example=f"{TINY} data=stdlib",
    ),
    reads="model.family data.kind",
)
def image_data(run: RunConfig) -> Iterator[Finding]:
    """Cannot train on images because the model does not read them."""
    family = run.model.family
    kind = run.data.kind
    # A plug-in family may read images.
    if kind == "image_text" and family != "llava" and ships(family):
        hint = f"{TINY}, or another model that does"
        yield Finding("MT323", "data.kind", f"model.family is {family}", hint=hint)
    if family == "llava" and kind not in ("image_text", "mock"):
        hint = "data=image_text data.path=FOLDER, or data=mock for synthetic images"
        yield Finding("MT324", "data.kind", f"kind {kind}", hint=hint)


@of_family(
    "llava",
    Code("MT325", example=f"{TINY} data.seq_length=16"),
    reads=f"data.seq_length {OWN}.image_size {OWN}.patch_size",
)
def image_room(run: RunConfig, own: LlavaConfig) -> Iterator[Finding]:
    """Cannot fit an image with text into a sample because it has too few tokens."""
    if run.data.length < own.image_tokens + 2:
        # Room for some text, in whole multiples of 64.
        length = -(-(own.image_tokens + 64) // 64) * 64
        detail = f"{run.data.length} tokens, an image of {own.image_tokens} patches"
        fixes = each("data.seq_length", [length, 2 * length])
        yield Finding("MT325", "data.seq_length", detail, fixes)


@of_family(
    "llava",
    Code("MT326", example=f"{TINY} data=image_text data.path=images {TRAINED_IDS}=5000"),
    reads=f"data.kind data.tokenizer {TRAINED_IDS} {IMAGE_ID}",
)
def image_token_in_text(run: RunConfig, own: LlavaConfig) -> Iterator[Finding]:
    """Cannot mark images because the tokenizer that is trained here uses the id for text."""
    d = run.data
    image = own.image_token_id
    if d.kind != "image_text" or d.tokenizer is not None:
        return
    if d.tokenizer_vocab_size > image:
        detail = f"ids of text up to {d.tokenizer_vocab_size - 1}, image_token_id {image}"
        # Fewer ids are no tokenizer: 256 stand for bytes.
        fixes = each(TRAINED_IDS, [image] if image >= 300 else [])
        yield Finding("MT326", TRAINED_IDS, detail, fixes)


@rule(
    Code(
        "MT327",
        help="Name a folder that holds images and one .jsonl file.",
        example=f"{TINY} data=image_text data.path=/nowhere/images",
    ),
    reads="data.kind data.path",
    disk=True,
)
def image_folder(run: RunConfig) -> Iterator[Finding]:
    """Cannot read the images because their folder, or the .jsonl file in it, is missing."""
    d = run.data
    if d.kind != "image_text":
        return
    # The folder may be named where the run starts, so `check` only warns.
    if d.path is None:
        yield Finding("MT327", "data.path", "", hint="data.path=FOLDER", lacks="input")
        return
    path = user_path(d.path)
    found, detail = records_of(path, WHICH) if d.path else (None, "the name is empty")
    if found is None:
        yield Finding("MT327", "data.path", detail, each("data.path", names_near(path)))


RULES = (
    tower_shape,
    image_token_range,
    trained_parts,
    tower_tensor_parallelism,
    embedding_dropout,
    image_data,
    image_room,
    image_token_in_text,
    image_folder,
)
