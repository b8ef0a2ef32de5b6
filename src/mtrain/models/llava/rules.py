"""Rules of the family llava: a tower that can be built, and room for images in a sample."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.compose.paths import names_near, user_path
from mtrain.config.disk.files import WHICH, records_of
from mtrain.config.families import ships
from mtrain.config.rules.families import of_family
from mtrain.config.rules.finding import Change, Finding, divisors, multiples, nearest
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig
from mtrain.models.llava.config import LlavaConfig


@of_family(
    "llava",
    Code("MT271", example="model=llava_tiny model.llava.patch_size=64"),
    Code(
        "MT272",
        "The heads of the tower divide its width.",
        example="model=llava_tiny model.llava.vision_heads=5",
    ),
    Code(
        "MT273",
        "Features are those behind a layer of it.",
        example="model=llava_tiny model.llava.feature_layer=-9",
    ),
    reads=(
        "model.llava.patch_size model.llava.image_size model.llava.vision_heads "
        "model.llava.vision_hidden_size model.llava.feature_layer model.llava.vision_layers"
    ),
)
def tower_can_be_built(run: RunConfig, own: LlavaConfig) -> Iterator[Finding]:
    """An image has a patch at least."""
    if own.patch_size > own.image_size:
        rule = f"an image of {own.image_size} pixels has no patch of {own.patch_size}"
        sizes = [n for n in divisors(own.image_size) if n < own.image_size][-2:]
        yield Finding(
            "MT271",
            "model.llava.patch_size",
            rule,
            tuple({"model.llava.patch_size": n} for n in sizes),
        )
    width = own.vision_hidden_size
    heads = own.vision_heads
    if width % heads:
        rule = f"{heads} heads do not divide a width of {width}"
        near = nearest(heads, divisors(width))[:2]
        yield Finding(
            "MT272",
            "model.llava.vision_heads",
            rule,
            tuple({"model.llava.vision_heads": n} for n in near),
        )
    if not 1 <= own.used_layers <= own.vision_layers:
        most = own.vision_layers
        rule = f"the tower has {most} layers, and 1 to {most} or -1 to -{most} are behind one"
        fixes: tuple[Change, ...] = (
            {"model.llava.feature_layer": -2},
            {"model.llava.feature_layer": -1},
        )
        yield Finding("MT273", "model.llava.feature_layer", rule, fixes)


@of_family(
    "llava",
    Code("MT274", example="model=llava_tiny model.llava.image_token_id=5000"),
    reads="model.vocab_size model.llava.image_token_id",
)
def image_token_is_in_the_vocabulary(run: RunConfig, own: LlavaConfig) -> Iterator[Finding]:
    """The token in whose place patches stand is one of the vocabulary."""
    vocab = run.model.vocab_size
    if own.image_token_id >= vocab:
        rule = f"the vocabulary has ids 0 to {vocab - 1} (model.vocab_size {vocab})"
        fixes: tuple[Change, ...] = (
            {"model.llava.image_token_id": vocab - 1},
            {"model.vocab_size": own.image_token_id + 1},
        )
        yield Finding("MT274", "model.llava.image_token_id", rule, fixes)


@of_family(
    "llava",
    Code("MT275", example="model=llava_tiny model.llava.freeze=[vision,projector,language]"),
    reads="model.llava.freeze",
)
def something_is_trained(run: RunConfig, own: LlavaConfig) -> Iterator[Finding]:
    """A part of the model is trained."""
    if len(set(own.freeze)) == 3:
        rule = "all three parts are frozen, and nothing is left to train"
        fixes: tuple[Change, ...] = (
            {"model.llava.freeze": ["vision", "language"]},
            {"model.llava.freeze": ["vision"]},
        )
        yield Finding("MT275", "model.llava.freeze", rule, fixes)


@of_family(
    "llava",
    Code(
        "MT276",
        example="model=llava_tiny model.hidden_size=192 model.llava.vision_heads=3 parallel=tp2",
    ),
    reads=(
        "parallel.tp model.hidden_size model.llava.vision_heads model.llava.vision_ffn_hidden_size"
    ),
)
def tower_divides_over_ranks(run: RunConfig, own: LlavaConfig) -> Iterator[Finding]:
    """Heads and MLP of the vision tower, and the projector, divide over tensor-parallel ranks."""
    tp = run.parallel.tp
    if tp == 1:
        return
    for key, value in (
        ("model.llava.vision_heads", own.vision_heads),
        ("model.llava.vision_ffn_hidden_size", own.vision_ffn_hidden_size),
        ("model.hidden_size", run.model.hidden_size),
    ):
        if value % tp:
            fits = [{"parallel.tp": n} for n in reversed(divisors(value, tp))]
            wider = [{key: n} for n in multiples(value, tp)]
            yield Finding(
                "MT276",
                key,
                f"{value} does not divide by tp {tp}",
                (*fits, *wider),
                also=("parallel.tp",),
            )


@rule(
    Code("MT277", example="model=llava_tiny parallel=tp2sp model.hidden_dropout=0.1"),
    reads="model.family model.hidden_dropout parallel.sequence_parallel",
)
def embeddings_are_dropped_alike(run: RunConfig) -> Iterator[Finding]:
    """With sequence parallelism no embedding is dropped: every rank makes all of them, and would
    drop others.
    """
    m = run.model
    if m.family == "llava" and m.hidden_dropout and run.parallel.sequence_parallel:
        rule = (
            "every tensor-parallel rank embeds all tokens, and would drop others than its"
            " neighbours"
        )
        fixes: tuple[Change, ...] = (
            {"model.hidden_dropout": 0.0},
            {"parallel.sequence_parallel": False},
        )
        yield Finding("MT277", "model.hidden_dropout", rule, fixes)


@rule(
    Code(
        "MT323",
        "Only LLaVA learns from images.",
        example="model=llama_tiny data=image_text data.path=images",
    ),
    Code("MT324", "LLaVA learns from images with texts.", example="model=llava_tiny data=stdlib"),
    reads="model.family data.kind",
)
def images_are_for_llava(run: RunConfig) -> Iterator[Finding]:
    """Images with texts are what LLaVA learns from, and no other family of those that ship."""
    family = run.model.family
    kind = run.data.kind
    if kind == "image_text" and family != "llava" and ships(family):
        rule = f"a model of the family {family} reads no images"
        yield Finding("MT323", "data.kind", rule, hint="a model that does, as model=llava_tiny")
    if family == "llava" and kind not in ("image_text", "mock"):
        hint = "data=image_text data.path=FOLDER, or data=mock for synthetic images"
        yield Finding("MT324", "data.kind", f"kind {kind} has no images", hint=hint)


@of_family(
    "llava",
    Code("MT325", example="model=llava_tiny data.seq_length=16"),
    reads="data.seq_length model.llava.image_size model.llava.patch_size",
)
def a_sample_holds_an_image(run: RunConfig, own: LlavaConfig) -> Iterator[Finding]:
    """A sample has room for an image and some text."""
    if run.data.length < own.image_tokens + 2:
        rule = f"{run.data.length} tokens hold no image of {own.image_tokens} patches with text"
        length = -(-(own.image_tokens + 64) // 64) * 64
        yield Finding(
            "MT325",
            "data.seq_length",
            rule,
            tuple({"data.seq_length": n} for n in (length, 2 * length)),
        )


@of_family(
    "llava",
    Code(
        "MT326",
        example="model=llava_tiny data=image_text data.path=images data.tokenizer_vocab_size=5000",
    ),
    reads=("data.kind data.tokenizer data.tokenizer_vocab_size model.llava.image_token_id"),
)
def image_token_is_no_text(run: RunConfig, own: LlavaConfig) -> Iterator[Finding]:
    """No token of text has the id of the image token."""
    d = run.data
    if d.kind != "image_text" or d.tokenizer is not None:
        return
    if d.tokenizer_vocab_size > own.image_token_id:
        rule = (
            f"token ids up to {d.tokenizer_vocab_size - 1}, and {own.image_token_id} stands for"
            " images"
        )
        fixes: tuple[Change, ...] = ({"data.tokenizer_vocab_size": own.image_token_id},) * (
            own.image_token_id >= 300
        )
        yield Finding("MT326", "data.tokenizer_vocab_size", rule, fixes)


@rule(
    Code(
        "MT327",
        help="Name a folder that holds images and one .jsonl file.",
        example="model=llava_tiny data=image_text data.path=/nowhere/images",
    ),
    reads="data.kind data.path",
    disk=True,
)
def records_are_there(run: RunConfig) -> Iterator[Finding]:
    """The folder of images exists and holds the file that says what belongs together."""
    d = run.data
    if d.kind != "image_text":
        return
    if d.path is None:
        rule = "kind image_text reads a folder of images and a .jsonl file, and data.path is null"
        yield Finding("MT327", "data.path", rule, hint="data.path=FOLDER", lacks="input")
        return
    path = user_path(d.path)
    found, rule = records_of(path, WHICH) if d.path else (None, "is empty, and a folder is needed")
    if found is None:
        near: tuple[Change, ...] = tuple({"data.path": name} for name in names_near(path))
        yield Finding("MT327", "data.path", rule, near)


RULES = (
    tower_can_be_built,
    image_token_is_in_the_vocabulary,
    something_is_trained,
    tower_divides_over_ranks,
    embeddings_are_dropped_alike,
    images_are_for_llava,
    a_sample_holds_an_image,
    image_token_is_no_text,
    records_are_there,
)
