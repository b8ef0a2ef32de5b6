"""The time of muon's and of soap's update: products by hand, ranks that share them, and what is not
a matrix.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

from mtrain.api import load
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import held_stages
from mtrain.models.count import ALONE
from mtrain.models.gpt.weights import latent
from mtrain.plan.rank import stage_memories
from mtrain.plan.states import Matrix, matrices_of, rank_states, shared_out
from mtrain.plan.time import step_time

BIG = Machine(cpu_cores=1 << 14, memory_bytes=1 << 60)
LARGE = (
    "model=llama3_70b cluster=h100x64 data=mock data.seq_length=4096 trainer.global_batch_size=256"
)
LARGE += " trainer.micro_batch_size=1"
FREQUENCY = "optim.soap.precondition_frequency"


@cache
def run_of(words: str) -> RunConfig:
    return load(words.split(), BIG, {}, to_run=False).run


def update_of(words: str) -> float:
    return step_time(run_of(f"{LARGE} {words}")).parts["optimizer"]


def muon_of(words: str, own: str = "") -> float:
    """Return the seconds that muon, with keys of its own, takes more than adamw."""
    return update_of(f"{words} optim=muon {own}") - update_of(words)


def test_plan_time_newton_schulz_runs_at_large_gemm_rate() -> None:
    h = 8192
    up = 2 * 28672
    down = 28672
    keys = 1024

    def of(short: int, long: int) -> int:
        return 5 * (4 * short**2 * long + 2 * short**3)

    layer = of(h, h) * 2 + 2 * of(keys, h) + of(h, up) + of(h, down)
    seconds = muon_of("parallel=tp2pp8 parallel.distributed_optimizer=false")
    rate = 10 * layer / seconds / 989e12
    assert 0.5 < rate < 0.75, "ten layers, each matrix whole on both tensor-parallel ranks"


def test_plan_time_dp_ranks_share_matrices_tp_ranks_do_not() -> None:
    alone, shared = (
        muon_of(f"parallel=tp2pp8 parallel.distributed_optimizer={on}") for on in ("false", "true")
    )
    assert 3.5 < alone / shared < 4.1, "four of them"
    halves = muon_of("parallel=tp2pp8 parallel.hsdp_replicas=2")
    assert 1.7 < halves / shared < 2.1, (
        "a replica has two of the four ranks, which share all matrices"
    )
    two, eight = (muon_of(f"parallel=tp{tp}pp4") for tp in (2, 8))
    assert 3 < eight / two < 4.5, "as many layers, and a fourth of the data-parallel ranks"
    whole, blocks = (
        muon_of("parallel=tp8pp4", f"optim.muon.tp_mode={mode}")
        for mode in ("duplicated", "blockwise")
    )
    assert whole > 4 * blocks


def test_plan_time_steps_and_format_decide() -> None:
    three, six = (muon_of("parallel=tp2pp8", f"optim.muon.num_ns_steps={n}") for n in (3, 6))
    assert 1.8 < six / three < 2.05
    assert muon_of("parallel=tp2pp8", "optim.muon.ns_dtype=fp32") > 5 * muon_of("parallel=tp2pp8")
    run = run_of(f"{LARGE} parallel=tp2pp8 optim=muon optim.muon.ns_dtype=fp32")
    bare = run.cluster.model_copy(update={"peak_tflops": {"bf16": 989.0}})
    assert step_time(run.model_copy(update={"cluster": bare})).missing == (
        "cluster.peak_tflops.fp32",
    )


def soap_of(words: str, own: str = "") -> float:
    """Return the seconds that soap, with keys of its own, takes more than adamw."""
    return update_of(f"{words} optim=soap {own}") - update_of(words)


def test_plan_time_rotations_and_bases_take_their_share() -> None:
    """Count in fp32: three turns and an average for each side of at most 10,000; the wider sides of
    MLPs have none.
    """
    h = 8192
    up = 2 * 28672
    down = 28672
    keys = 1024
    layer = sum(
        8 * r * c * n
        for r, c in ((h, h), (h + 2 * keys, h), (up, h), (h, down))
        for n in (r, c)
        if n <= 10000
    )
    layout = "parallel=tp2pp8 parallel.distributed_optimizer=false"
    rarely, often = (soap_of(layout, f"{FREQUENCY}={n}") for n in (10**6, 5))
    rate = 10 * layer / rarely / 67e12
    assert 0.4 < rate < 1.0, "ten layers, each matrix whole on both tensor-parallel ranks"
    assert often > 1.05 * rarely
    assert soap_of(layout, "optim.soap.max_precond_dim=2000") < 0.2 * rarely
    shared = soap_of(
        "parallel=tp2pp8 parallel.distributed_optimizer=true",
        "optim.soap.precondition_frequency=1000000",
    )
    assert 2 < rarely / shared < 4.1, "of four ranks, which send each other more than muon's"


def test_plan_time_tables_and_norms_have_no_matrices() -> None:
    run = run_of(
        "model=llama3_8b cluster=h100x8 parallel=dp data=mock trainer.global_batch_size=8"
        " optim=muon"
    )
    (held,) = held_stages(run)
    found = matrices_of(run, held)
    assert found == Counter(
        {
            Matrix((4096, 4096), ((4096, 4096),), expert=False, gathered=False): 32,
            Matrix(
                (6144, 4096),
                ((4096, 4096), (1024, 4096), (1024, 4096)),
                expert=False,
                gathered=False,
            ): 32,
            Matrix((28672, 4096), ((28672, 4096),), expert=False, gathered=False): 32,
            Matrix((4096, 14336), ((4096, 14336),), expert=False, gathered=False): 32,
        }
    )
    adamw = run_of(
        "model=llama3_8b cluster=h100x8 parallel=dp data=mock trainer.global_batch_size=8"
    )
    assert not matrices_of(adamw, held)


def test_plan_time_single_matrix_is_not_shared() -> None:
    large, small = (Matrix((n, n), ((n, n),), expert=False, gathered=False) for n in (1024, 64))
    muon = OPTIMIZERS["muon"].whole_matrices
    assert muon is not None
    how = muon(run_of(f"{LARGE} parallel=tp2pp8 optim=muon"))
    assert shared_out({large: 1, small: 3}, 4, how) == {
        frozenset({(large, 1)}),
        frozenset({(small, 1)}),
    }
    assert shared_out({large: 5}, 4, how) == {frozenset({(large, 1)}), frozenset({(large, 2)})}


def test_plan_time_plan_has_largest_rank_state() -> None:
    run = run_of(f"{LARGE} parallel=tp2pp8 optim=soap")
    states = rank_states(run, 0)
    every = [states.optimizer_bytes(rank) for rank in range(run.parallel.dp)]
    assert states.most_optimizer_bytes == max(every) > every[0]
    assert stage_memories(run)[0].parts["optimizer"] == max(every)


def test_plan_time_projection_bias_is_counted() -> None:
    words = "model=deepseek_tiny parallel=single model.moe=null data=mock"
    with_biases, without = (
        run_of(f"{words} model.add_bias_linear={word}").model for word in ("true", "false")
    )
    biases = {w.name: w.numel for w in latent(with_biases, ALONE, "") if w.name.endswith("bias")}
    assert not any(w.name.endswith("bias") for w in latent(without, ALONE, ""))
    assert sum(biases.values()) == with_biases.hidden_size
