"""The catalogue of bad input: what a user writes, and what `check` must say of it.

Data; the tests are elsewhere.

Numbers 1 to 94 are those of the catalogue that was collected from today's training systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from mtrain.api import load
from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem
from tests.support.configs import LAPTOP, within_a_second


@dataclass(frozen=True)
class Row:
    """One bad input."""

    number: int
    words: tuple[str, ...]
    """The command line; `{file}` stands for a recipe with `text`."""
    code: str = ""
    """The code of the problem; empty where the input is fine."""
    path: str = ""
    """The key that the problem is about."""
    says: tuple[str, ...] = ()
    """What the sentence must contain: the numbers."""
    severity: str = "error"
    text: str = ""
    """A recipe."""
    line: int = 0
    """The line of the recipe that is to blame; 0: the command line."""
    origin: str = "command line"
    """Who set the key, where it is neither."""

    @property
    def name(self) -> str:
        """Return the name of the test case."""
        return f"{self.number} {' '.join(self.words)}"[:70]


def bad(
    number: int, words: str, code: str, path: str, *says: str, origin: str = "command line"
) -> Row:
    """Make the row of a command line that is refused."""
    return Row(number, tuple(words.split()), code, path, says, origin=origin)


def odd(number: int, words: str, code: str, path: str, *says: str) -> Row:
    """Make the row of a command line with a warning."""
    return Row(number, tuple(words.split()), code, path, says, "warning")


def fine(number: int, words: str) -> Row:
    """Make the row of a command line that works here, although other systems refuse or spoil it."""
    return Row(number, tuple(words.split()))


def recipe(number: int, text: str, line: int, code: str, path: str, *says: str) -> Row:
    """Make the row of a recipe that is refused because of one line."""
    return Row(number, ("recipe={file}",), code, path, says, text=text, line=line)


def validated(words: Sequence[str]) -> list[Problem]:
    """Return the findings of `check` for a command line on a small machine without GPUs."""
    with within_a_second():
        try:
            return list(load(words, LAPTOP, {}).warnings)
        except ConfigError as error:
            return list(error.problems)


HEADS = "model.num_query_groups=null model.kv_channels=16"
MIXTRAL = "model=mixtral_tiny parallel=single"
DEFAULT = "default"
ROWS: tuple[Row, ...] = (
    bad(
        1,
        f"model.num_attention_heads=3 {HEADS} parallel=tp2",
        "MT101",
        "parallel.tp",
        "3 attention heads",
        "1, 3",
    ),
    bad(
        2,
        "model.num_attention_heads=12 model.num_query_groups=3 model.kv_channels=16 parallel=tp2",
        "MT102",
        "parallel.tp",
        "tp 2",
        "3 query groups",
    ),
    bad(
        3,
        "model.num_query_groups=3 parallel=single",
        "MT202",
        "model.num_query_groups",
        "3",
        "8",
        "1, 2, 4, 8",
    ),
    bad(
        4,
        "model.hidden_size=66 model.num_attention_heads=4 parallel=single",
        "MT201",
        "model.hidden_size",
        "66 / 4 heads = 16.5",
    ),
    bad(
        5,
        "model.ffn_hidden_size=255 parallel=tp2",
        "MT103",
        "model.ffn_hidden_size",
        "255",
        "tp 2",
        "254, 256",
    ),
    fine(6, "model.vocab_size=129 parallel=tp2 data=mock data.seq_length=64"),
    bad(
        7, "model.num_layers=3 parallel=pp2", "MT107", "parallel.pp", "3 layers", "2 stages", "1, 3"
    ),
    bad(8, "model.num_layers=1 parallel=pp2", "MT106", "parallel.pp", "1 layer on 2 stages"),
    bad(9, "parallel=single parallel.vpp=2", "MT109", "parallel.vpp", "2 virtual stages", "pp 1"),
    bad(
        10,
        "model.num_layers=6 parallel=pp2vpp2",
        "MT108",
        "parallel.vpp",
        "3 layers",
        "2 virtual",
        "1, 3",
    ),
    bad(
        11,
        "parallel=tp2pp2 parallel.ranks=6",
        "MT112",
        "parallel.ranks",
        "6 ranks",
        "tp 2 * pp 2 * cp 1 = 4",
    ),
    bad(
        12,
        "parallel=single parallel.sequence_parallel=true",
        "MT115",
        "parallel.sequence_parallel",
        "tp 1",
    ),
    fine(13, "parallel=tp2sp"),
    bad(13, "parallel=tp2sp kernels.norm=te", "MT403", "kernels.norm", "cuda", "cpu"),
    fine(14, "parallel=cp2"),
    bad(14, "parallel=cp2 kernels.attention=te", "MT403", "kernels.attention", "cuda", "cpu"),
    bad(
        15,
        "parallel=cp2 data.seq_length=15",
        "MT117",
        "data.seq_length",
        "15",
        "2 * cp 2 = 4",
        "16, 12",
    ),
    bad(16, "parallel=ep2", "MT120", "parallel.ep", "ep 2", "dense"),
    bad(
        17,
        "model=mixtral_tiny model.moe.num_experts=3 parallel=ep2",
        "MT122",
        "parallel.ep",
        "3 experts",
        "ep 2",
    ),
    bad(
        18,
        f"{MIXTRAL} model.moe.num_experts=2 model.moe.router_topk=4",
        "MT220",
        "model.moe.router_topk",
        "4 of 2",
    ),
    bad(19, f"{MIXTRAL} model.moe.num_experts=0", "MT014", "model.moe.num_experts", "at least 1"),
    bad(20, f"{MIXTRAL} model.moe.num_experts=-1", "MT014", "model.moe.num_experts", "at least 1"),
    bad(21, "precision.bf16=true", "MT012", "precision.bf16", "precision.dtype=bf16"),
    bad(21, "precision.fp16=true", "MT012", "precision.fp16", "precision.dtype=fp16"),
    bad(
        22,
        "precision=fp8_delayed",
        "MT442",
        "precision.fp8",
        "TransformerEngine",
        "cpu",
        origin="conf/precision/fp8_delayed.yaml:4",
    ),
    bad(22, "precision=fp8", "MT011", "precision", "choices", "fp8_tensorwise"),
    bad(
        23, "precision=fp8_tensorwise precision.fp8=e4m4", "MT014", "precision.fp8", "e4m3, hybrid"
    ),
    bad(24, "model.hiden_size=256", "MT012", "model.hiden_size", "no such key"),
    recipe(
        24,
        "optim:\n  lr: 1e-3\nmodel:\n  hiden_size: 256\n  num_layers: 4\n",
        4,
        "MT012",
        "model.hiden_size",
        "no such key",
    ),
    bad(25, "model.num_layers='2'", "MT013", "model.num_layers", "whole number", 'text ("2")'),
    bad(26, "model.hidden_size=64.0", "MT013", "model.hidden_size", "whole number", "64.0"),
    bad(27, "model.num_layers=0", "MT014", "model.num_layers", "at least 1"),
    bad(28, "model.num_layers=-2", "MT014", "model.num_layers", "at least 1"),
    bad(29, "model.hidden_size=0", "MT014", "model.hidden_size", "at least 1"),
    bad(30, "model.num_attention_heads=0", "MT014", "model.num_attention_heads", "at least 1"),
    bad(31, "model.hidden_dropout=1.5", "MT014", "model.hidden_dropout", "less than 1"),
    bad(32, "model.attention_dropout=-0.1", "MT014", "model.attention_dropout", "at least 0"),
    odd(33, "model.layernorm_epsilon=0", "MT219", "model.layernorm_epsilon", "epsilon 0", "1e-5"),
    bad(34, "model.layernorm_epsilon=-1", "MT014", "model.layernorm_epsilon", "at least 0"),
    bad(35, "model.init_method_std=-0.02", "MT014", "model.init_method_std", "more than 0"),
    odd(36, "model.init_method_std=20", "MT211", "model.init_method_std", "20", "0.002 to 0.05"),
    bad(37, "model.normalization=RMSnorm", "MT014", "model.normalization", "RMSNorm, LayerNorm"),
    bad(38, "data.seq_length=2048", "MT204", "data.seq_length", "2048", "1024"),
    bad(
        39,
        "data.seq_length=2048 model.position_embedding_type=learned_absolute",
        "MT204",
        "data.seq_length",
        "2048",
        "1024",
    ),
    bad(40, "model.position_embedding_type=rpoe", "MT014", "model.position_embedding_type", "rope"),
    bad(41, "model.rotary_base=0", "MT014", "model.rotary_base", "more than 1"),
    bad(42, "model.rotary_percent=1.7", "MT014", "model.rotary_percent", "at most 1"),
    bad(
        43,
        "model.kv_channels=15",
        "MT203",
        "model.rotary_percent",
        "15 channels",
        "even",
        origin=DEFAULT,
    ),
    bad(46, "model.vocab_size=0", "MT014", "model.vocab_size", "at least 1"),
    bad(
        47,
        "parallel.recompute.granularity=Full",
        "MT014",
        "parallel.recompute.granularity",
        "selective, full",
    ),
    fine(48, "parallel.recompute.granularity=full"),
    bad(
        49,
        "parallel=single parallel.recompute.granularity=full parallel.recompute.num_layers=99",
        "MT171",
        "parallel.recompute.num_layers",
        "99 layers",
        "at most 4",
    ),
    bad(
        50,
        "precision.pipeline_dtype=bf16",
        "MT012",
        "precision.pipeline_dtype",
        "follows from precision.dtype",
    ),
    fine(51, "model.tie_word_embeddings=true parallel=pp2"),
    bad(
        52, "model.bias_activation_fusion=true", "MT012", "model.bias_activation_fusion", "kernels"
    ),
    bad(
        53,
        f"{MIXTRAL} model.moe.router_load_balancing_type=aux_los",
        "MT014",
        "model.moe.router_load_balancing_type",
        "aux_loss",
    ),
    bad(
        54,
        f"{MIXTRAL} model.moe.token_dispatcher_type=alltoal",
        "MT014",
        "model.moe.token_dispatcher_type",
        "alltoall",
    ),
    bad(55, "model.window_size=-1", "MT014", "model.window_size", "at least 2"),
    bad(56, "parallel.tp=0", "MT014", "parallel.tp", "at least 1"),
    bad(57, "parallel.tp=-1", "MT014", "parallel.tp", "at least 1"),
    bad(
        58,
        "parallel=cp2 parallel.cp_comm_type=p2pp",
        "MT014",
        "parallel.cp_comm_type",
        "all_gather, p2p",
    ),
    bad(
        59,
        "parallel=single trainer.global_batch_size=15 trainer.micro_batch_size=2",
        "MT130",
        "trainer.global_batch_size",
        "15",
        "micro_batch_size 2 * dp 1 = 2",
        "14, 16",
    ),
    bad(
        60,
        "parallel=dp2 trainer.global_batch_size=4 trainer.micro_batch_size=4",
        "MT130",
        "trainer.global_batch_size",
        "4 * dp 2 = 8",
        "nearest: 8",
    ),
    bad(
        61,
        "model.num_layers=8 parallel=pp4vpp2 trainer.global_batch_size=6",
        "MT131",
        "trainer.global_batch_size",
        "6 micro-batches",
        "pp 4",
    ),
    bad(62, "trainer.micro_batch_size=0", "MT014", "trainer.micro_batch_size", "at least 1"),
    bad(62, "trainer.micro_batch_size=-4", "MT014", "trainer.micro_batch_size", "at least 1"),
    bad(63, "trainer.rampup_batch_size=[16,8]", "MT014", "trainer.rampup_batch_size", "3 values"),
    bad(
        63,
        "parallel=single trainer.rampup_batch_size=[3,2,100]",
        "MT137",
        "trainer.rampup_batch_size",
        "from 3",
        "8",
    ),
    bad(64, "optim.lr=1e-3 optim.min_lr=0.1", "MT421", "optim.min_lr", "0.1", "0.001"),
    bad(
        65,
        "trainer.train_iters=50 optim.warmup_iters=100",
        "MT422",
        "optim.warmup_iters",
        "100 steps",
        "step 50",
    ),
    bad(66, "optim.schedule=wsd", "MT424", "optim.wsd_decay_iters", "final decay", origin=DEFAULT),
    bad(
        67,
        "trainer.train_iters=10 trainer.train_samples=1000",
        "MT012",
        "trainer.train_samples",
        "train_iters",
    ),
    bad(68, "optim.weight_decay=-0.1", "MT014", "optim.weight_decay", "at least 0"),
    bad(68, "optim.end_weight_decay=0.01", "MT012", "optim.end_weight_decay", "optim.weight_decay"),
    odd(69, "optim.lr=3", "MT427", "optim.lr", "rate of 3", "1e-5 to 1e-2"),
    fine(69, "optim.lr=3e-4"),
    recipe(69, "optim:\n  lr: '3e-4'\n", 2, "MT013", "optim.lr", "number", 'text ("3e-4")'),
    bad(70, "optim.beta2=1.0", "MT014", "optim.beta2", "less than 1"),
    bad(71, "optim.clip_grad=0", "MT014", "optim.clip_grad", "more than 0"),
    bad(71, "optim.clip_grad=-1", "MT014", "optim.clip_grad", "more than 0"),
    bad(72, "model.seq_length=512", "MT012", "model.seq_length", "no such key"),
    bad(73, "data.path=/nowhere/text", "MT305", "data.path", "no such file"),
    bad(
        73,
        "data=indexed data.path=/nowhere/corpus_text_document data.seq_length=64",
        "MT306",
        "data.path",
        "corpus_text_document.idx",
    ),
    bad(75, "data.split=[0,0,0]", "MT308", "data.split", "0 of 0"),
    bad(75, "data.split=[-1,1,1]", "MT014", "data.split.0", "at least 0"),
    bad(
        76,
        "data=indexed data.seq_length=64 data.path=x data.blend=[a,b]",
        "MT316",
        "data.path",
        "data.blend names all corpora",
    ),
    bad(76, "data.blend=[a,b]", "MT150", "data.blend", "data.kind=indexed"),
    bad(77, "data.tokenizer_vocab_size=5000", "MT310", "data.tokenizer_vocab_size", "4999", "4096"),
    odd(
        78,
        "data.tokenizer_vocab_size=400",
        "MT311",
        "data.tokenizer_vocab_size",
        "400",
        "4096",
        "90%",
    ),
    bad(83, "checkpoint.save_interval=-1", "MT014", "checkpoint.save_interval", "at least 0"),
    bad(
        85,
        "parallel=dp2 parallel.fsdp=fsdp2 parallel.distributed_optimizer=true",
        "MT162",
        "parallel.fsdp",
        "distributed_optimizer must be false",
    ),
    bad(
        86,
        "parallel.overlap_param_gather=true",
        "MT118",
        "parallel.overlap_param_gather",
        "parallel.distributed_optimizer and parallel.overlap_grad_reduce",
    ),
    recipe(88, "optim:\n  lr: 1e-3\n  lr: 1e-4\n", 3, "MT004", "optim.lr", "lines 2 and 3"),
    recipe(89, "optim: {eps: 1e-8}\n\ttrainer: 1\n", 2, "MT003", "", "<TAB>trainer"),
    recipe(89, "optim:\n    lr: 1e-3\n  eps: 1e-8\n", 3, "MT003", "", "eps"),
    bad(90, "model.hiden_size=1", "MT012", "model.hiden_size", "no such key"),
    bad(90, "+model.hidden_size=512", "MT010", "", "is set already"),
    bad(91, "optim.lr=1e-3,2e-3", "MT010", "optim.lr", "sweep"),
    Row(
        91,
        ("trainer.sample_prompt=it's a, b",),
        "MT010",
        "trainer.sample_prompt",
        ("cannot be read",),
    ),
    bad(92, "optim.lr=${optim.lr}", "MT007", "optim.lr", "optim.lr -> optim.lr"),
    bad(92, "optim.lr=${nothing.here}", "MT007", "optim.lr", "nothing.here"),
    odd(
        93,
        "parallel=dp64 trainer.global_batch_size=64",
        "MT111",
        "parallel.ranks",
        "64 processes",
        "2 CPU cores",
    ),
)
"""Everything that a configuration shows by itself; what data, checkpoints or machines show is
tested at preflight.
"""


@cache
def accepted() -> tuple[RunConfig, ...]:
    """Return the catalogue's configurations that the schema accepts."""
    found = []
    for row in ROWS:
        if not row.text:
            with suppress(ConfigError):
                found.append(resolve(compose(row.words).run, LAPTOP))
    return tuple(found)
