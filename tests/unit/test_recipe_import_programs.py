"""Limits of the import: programs of other models, YAML, tokenizers, launchers that are too
small.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.config.compose.composer import Rejected, compose
from mtrain.errors import ConfigError
from mtrain.recipes.delta import delta, recipe_text
from mtrain.recipes.imported import Imported, name_of
from mtrain.recipes.megatron.flags_training import ids_of
from mtrain.recipes.megatron.importer import import_scripts, import_texts, read_texts
from mtrain.recipes.megatron.yaml_configs import import_yaml
from mtrain.recipes.secrets import names_secret
from tests.support.tables import tables

TABLES = tables("recipe_import_programs")

SCRIPTS = Path(__file__).resolve().parents[1] / "support/megatron_scripts"
MODEL = (
    "--num-layers 4 --hidden-size 72 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1"
    " --lr 1e-3 "
)
KNOWN = (
    "--vocab-size 1023 --tokenizer-type NullTokenizer --mock-data --train-iters 10"
    " --global-batch-size 8 "
)


def script(
    words: str, program: str = "pretrain_gpt.py", launcher: str = "torchrun --nproc-per-node 4"
) -> Imported:
    return import_texts([(f"{launcher} {program} {MODEL} {words}\n", "train.sh")], "train")


@pytest.mark.parametrize(
    ("program", "flags", "what"),
    TABLES["other_training"],
)
def test_import_programs_other_training_is_refused_by_name(
    program: str, flags: str, what: str
) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        script(f"{KNOWN} {flags}", program)
    assert {p.code for p in caught.value.problems} == {"MT706"}


@pytest.mark.parametrize(
    "program", ["pretrain_xyz.py", "code/finetune.py", "-m my.package.train_and_eval"]
)
def test_import_programs_unknown_is_taken_for_gpt_with_note(program: str) -> None:
    found = script(KNOWN, program)
    assert any("is taken for a program that trains a GPT" in note for note in found.notes)
    assert script(KNOWN, f"/home/vision/work/team/{program.split()[-1]}").run.model.num_layers == 4
    assert not any("is taken for" in note for note in script(KNOWN).notes)
    assert not any("is taken for" in note for note in script(KNOWN, "/a/b/pretrain_gpt.py").notes)


def test_import_programs_of_several_gpt_is_read() -> None:
    more = "--max-position-embeddings 128 --bf16 --swiglu --tensor-model-parallel-size 2"
    text = (
        f"torchrun --nproc-per-node 8 tools/run_text_generation_server.py {MODEL} {KNOWN} {more}\n"
        f"torchrun --nproc-per-node 4 pretrain_gpt.py {MODEL} {KNOWN}\n"
    )
    assert import_texts([(text, "s.sh")], "s").run.cluster.devices_per_node == 4


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 32), (4, 8), (8, 4)])
def test_import_programs_too_few_ranks_are_reported(
    ranks: int, nodes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"
    (tmp_path / "t.sh").write_text(
        f"torchrun --nproc-per-node {ranks} pretrain_gpt.py {MODEL} {KNOWN} {layout}\n"
    )
    assert main(["recipe", "import", str(tmp_path / "t.sh"), "-o", str(tmp_path / "t.yaml")]) == 0
    report = capsys.readouterr().err
    assert (
        f"the script starts {ranks} processes, and its layout has at least tp 8 x cp 1 x pp 4 = 32"
        in report
    )
    assert f"cluster.nodes={nodes}" in report
    assert "MT112" in (tmp_path / "t.yaml").read_text()


def test_import_programs_unknown_flags_are_fast() -> None:
    words = " ".join(f"--flag-of-nobody-{n} {n}" for n in range(8000))
    start = time.process_time()
    found = script(f"{KNOWN} {words}")
    assert time.process_time() - start < 1
    assert len(found.unplaced) >= 8000


@pytest.mark.parametrize(
    ("kind", "model", "size"),
    TABLES["tokenizers"],
)
def test_import_programs_known_tokenizer_size_is_known(
    kind: str, model: str | None, size: int | None
) -> None:
    found = ids_of(kind, model)
    assert (found[0] if found else None) == size


@pytest.mark.parametrize(
    ("model", "divisible", "tp", "size"),
    [
        ("Qwen/Qwen3-8B", 1187, 1, 151936),  # 128 * 1187, as the published model has
        ("deepseek-ai/DeepSeek-V3", 3232, 1, 129280),
        ("deepseek-ai/DeepSeek-V2", 3200, 1, 102400),
        ("Qwen/Qwen2.5-7B", 128, 4, 152064),
        ("meta-llama/Meta-Llama-3-8B", 128, 1, 128256),
    ],
)
def test_import_programs_vocabulary_is_padded_as_megatron(
    model: str, divisible: int, tp: int, size: int
) -> None:
    found = script(
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}"
        f" --tensor-model-parallel-size {tp} --make-vocab-size-divisible-by {divisible} --mock-data"
    )
    assert found.run.model.vocab_size == size
    assert any(model in note and "is taken to have" in note for note in found.notes)


def test_import_programs_unknown_vocabulary_is_left_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.sh").write_text(
        f"torchrun --nproc-per-node 1 pretrain_gpt.py {MODEL} --mock-data --train-iters 5\n"
    )
    recipe = tmp_path / "t.yaml"
    assert main(["recipe", "import", str(tmp_path / "t.sh"), "-o", str(recipe)]) == 2
    assert "model.vocab_size is left to fill in" in capsys.readouterr().err
    assert "vocab_size: null" in recipe.read_text()
    assert "# fill in model.vocab_size" in recipe.read_text()
    with pytest.raises(Rejected) as caught:
        compose([f"recipe={recipe}"])
    assert [(p.code, p.path, p.fix) for p in caught.value.problems] == [
        ("MT702", "model.vocab_size", "model.vocab_size=32000")
    ]
    assert compose([f"recipe={recipe}", "model.vocab_size=32000"]).run.model.num_layers == 4


def test_import_programs_batch_schedule_round_trips() -> None:
    flags = f'{KNOWN} --step-batch-size-schedule "0:4 8K:16 25600:32" --train-samples 1000'
    trainer = script(
        flags.replace("--global-batch-size 8 ", "").replace("--train-iters 10 ", "")
    ).run.trainer
    assert trainer.batch_size_schedule == ((4, 7936), (16, 25600))  # whole samples of 128 tokens
    assert trainer.global_batch_size == 32
    # 62 samples in 16 steps of 4, then 16 each from 64 to 208, then 24 steps of 32 and 24 samples
    # left
    assert trainer.train_iters == 16 + 9 + (1000 - 208) // 32
    for bad in ("500:4", "0:4 0:8", "0:x", "0:0", "", "0:4 8K"):
        with pytest.raises(ConfigError, match="step-batch-size-schedule"):
            script(f'{KNOWN} --step-batch-size-schedule "{bad}"')


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ("--recompute-activations --moe-layer-recompute", ("core_attn", "moe")),
        ("--moe-layer-recompute --recompute-modules layernorm", ("layernorm", "moe")),
        (
            "--recompute-granularity selective --recompute-modules mlp core_attn layernorm",
            ("mlp", "core_attn", "layernorm"),
        ),
        ("--recompute-activations", None),
    ],
)
def test_import_programs_recomputed_modules_are_kept(
    flags: str, modules: tuple[str, ...] | None
) -> None:
    assert script(f"{KNOWN} --num-experts 4 {flags}").run.parallel.recompute.modules == modules


def test_import_programs_layout_becomes_degrees() -> None:
    name = "llama31_405b"
    found = delta(import_scripts([SCRIPTS / f"{name}.sh"]).run)
    assert found.choices["parallel"].startswith("tp8pp8cp2")
    for file in sorted(SCRIPTS.glob("*.sh")):
        assert "_h100x" not in delta(import_scripts([file]).run).choices.get("parallel", "")


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *(
            (name, False)
            for name in ("--linear-num-key-heads", "--linear-key-head-dim", "--tokenizer-model")
        ),
        *(
            (name, False)
            for name in ("--eod-token", "NUM_KEY_HEADS", "--moe-token-drop", "--image-token")
        ),
        *((name, False) for name in ("--token-shift", "--token-budget", "--reset-token-count")),
        *(
            (name, True)
            for name in ("--api-key", "HF_TOKEN", "--wandb-api-key", "WANDB_KEY", "TOKEN", "--key")
        ),
        *(
            (name, True)
            for name in ("AWS_SECRET_ACCESS_KEY", "db.password", "--auth", "GITHUB_TOKEN_FIRST")
        ),
    ],
)
def test_import_programs_attention_key_is_no_secret(name: str, secret: bool) -> None:
    assert names_secret(name) is secret


def test_import_programs_conditional_flags_leave_keys_open() -> None:
    text = (
        'ARGS=(--bf16)\nif [ "$FP8" = 1 ]; then\n  ARGS+=(--fp8-format hybrid --wandb-project'
        f' x)\nfi\ntorchrun --nproc-per-node 1 pretrain_gpt.py {MODEL} {KNOWN} "${{ARGS[@]}}"\n'
    )
    found = import_texts([(text, "t.sh")], "t")
    assert found.run.precision.dtype == "bf16"
    assert "precision.fp8" in found.open
    assert "(t.sh:2)" in found.open["precision.fp8"]
    assert not [key for key in found.open if not key.startswith("precision.")]
    assert {u.flag: u.why for u in found.unplaced}["--wandb-project"] == "unreadable"
    assert "precision.fp8" not in import_texts([(text, "t.sh")], "t", ["precision.fp8=null"]).open


def test_import_programs_conditional_values_leave_keys_open() -> None:
    text = (
        "SIZE=$1\nif [ $SIZE = 1b ]; then\n  LAYERS=16\nelif [ $SIZE = 7b ]; then\n "
        f" LAYERS=32\nfi\ntorchrun --nproc-per-node 1 pretrain_gpt.py {MODEL} {KNOWN} --num-layers"
        " $LAYERS\n"
    )
    found = import_texts([(text, "t.sh")], "t")
    assert "if" not in found.open
    assert "set under a condition: [ $SIZE = 1b ]" in found.open["model.num_layers"]


def test_import_programs_environment_words_are_noted() -> None:
    line = f"torchrun --nproc-per-node 1 pretrain_gpt.py {MODEL} {KNOWN} --bf16"
    found = import_texts([(f'{line} $EXTRA "$@"\n', "t.sh")], "t")
    assert not found.open
    assert [
        note.partition(":")[2][:9] for note in found.notes if "flags that it may hold" in note
    ] == [
        "1: $EXTRA",
        "1: $@ is ",
    ]
    found = import_texts([(f"{line} --seed $SEED $(cat more)\n", "t.sh")], "t")
    assert set(found.open) == {"trainer.seed", "recipe.verified"}
    assert "$(cat more)" in found.open["recipe.verified"]
    found = import_texts([(f"{line} --no-such-flag 3\n", "t.sh")], "t")
    assert "--no-such-flag" in found.open["recipe.verified"]
    found = import_texts(
        [(f"torchrun --nproc-per-node 1 pretrain_gpt.py {KNOWN} $(cat more)\n", "t.sh")], "t"
    )
    assert {"model.num_layers", "model.hidden_size", "model.max_position_embeddings"} <= set(
        found.open
    )


@pytest.mark.parametrize(
    "flags", ["--weight-decay 0.3 --bf16", "--fp16", "--weight-decay 0.3 --data-path x"]
)
def test_import_programs_array_part_leaves_open(flags: str) -> None:
    given = KNOWN.replace("--mock-data", "") if "--data-path" in flags else KNOWN
    text = (
        f"ALL=({flags})\ntorchrun --nproc-per-node 1 pretrain_gpt.py {MODEL} {given}"
        ' "${ALL[@]:0:2}"\n'
    )
    found = import_texts([(text, "t.sh")], "t")
    keys = {
        "--weight-decay": "optim.weight_decay",
        "--bf16": "precision.dtype",
        "--fp16": "precision.dtype",
    }
    keys["--data-path"] = "data.path"
    assert {key for flag, key in keys.items() if flag in flags} <= set(found.open)


def test_import_programs_incomplete_recipe_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        f"torchrun --nproc-per-node 1 pretrain_gpt.py {MODEL} {KNOWN} --lr $(cat lr) $(cat more)\n"
    )
    (tmp_path / "t.sh").write_text(line)
    recipe = tmp_path / "t.yaml"
    assert main(["recipe", "import", str(tmp_path / "t.sh"), "-o", str(recipe)]) == 2
    shown = capsys.readouterr().err
    assert "error[MT702] optim.lr=???" in shown
    assert f"{tmp_path}/t.sh:1" in shown
    assert not any("\ue000" <= char <= "\uf8ff" for char in shown + recipe.read_text())
    with pytest.raises(Rejected) as caught:
        compose([f"recipe={recipe}"])
    assert {p.path for p in caught.value.problems} == {"optim.lr", "recipe.verified"}
    recipe.write_text(
        recipe.read_text()
        .replace('verified: "???"', "verified: read")
        .replace('lr: "???"', "lr: 0.1")
    )
    assert compose([f"recipe={recipe}"]).run.optim.lr == 0.1


def test_import_programs_gpus_count_before_tasks() -> None:
    for head, nodes, per_node in (
        (
            (
                "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\nsrun"
                " python"
            ),
            2,
            8,
        ),
        ("#SBATCH -N 2\n#SBATCH --gres=gpu:h100:4\n#SBATCH --ntasks-per-node=1\nsrun python", 2, 4),
        ("srun -N2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8", 2, 8),
        ("srun --nodes 2 --ntasks 16 python", 2, 8),
        ("mpirun -np 16 -npernode 8 python", 2, 8),
        ("mpirun -np 16 -N 8 --hostfile hosts python", 2, 8),
        ("mpiexec -n 16 -ppn 8 python", 2, 8),
        ("mpirun -np 16 -H a:8,b:8 python", 2, 8),
        ("mpirun -n 16 --map-by ppr:8:node python", 2, 8),
        ("srun -n 16 --ntasks-per-node 8 python", 2, 8),
    ):
        run = import_texts([(f"{head} pretrain_gpt.py {MODEL} {KNOWN}\n", "t.sh")], "t").run
        assert (run.cluster.nodes, run.cluster.devices_per_node) == (nodes, per_node), head
    for head in (
        "mpirun -np 16 --hostfile h python",
        "jsrun -n 16 python",
        "deepspeed --hostfile h --num_gpus 8",
    ):
        found = import_texts([(f"{head} pretrain_gpt.py {MODEL} {KNOWN}\n", "t.sh")], "t")
        assert "cluster.nodes" in found.open, head


@pytest.mark.parametrize("ranks", [8, 16])
def test_import_programs_too_few_ranks_for_experts_are_reported(ranks: int) -> None:
    layout = "--num-experts 8 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8"
    notes = script(f"{KNOWN} {layout}", launcher=f"torchrun --nproc-per-node {ranks}").notes
    assert any("at least ep 8 x etp 1 x pp 4 = 32" in note for note in notes)


def yaml(name: str, *extra: str) -> Imported:
    path = SCRIPTS / name
    return import_yaml(read_texts([path]), name_of(path), extra)


def test_import_programs_megatron_test_case_is_read() -> None:
    found = yaml("model_config.yaml")
    flat = found.run.flat()
    wanted = {
        "model.num_layers": 6,
        "model.ffn_hidden_size": 1024,
        "model.vocab_size": 50432,  # 50257 to a multiple of 2 * 128
        "data.seq_length": 512,
        "data.split": [949.0, 50.0, 1.0],
        "trainer.global_batch_size": 16,
        "optim.lr": 2.5e-4,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "parallel.recompute.modules": ["layernorm", "mlp"],
        "precision.dtype": "bf16",
    }
    assert {key: flat.get(key) for key in wanted} == wanted
    assert "MODEL_ARGS.--lr is written twice; the later one counts" in found.notes
    why = {u.flag: u.why for u in found.unplaced}
    assert (why["--exit-interval"], why["--data-path"]) == ("not supported", "unreadable")


def test_import_programs_sections_are_read_by_name(tmp_path: Path) -> None:
    found = yaml("yaml_cfg.yaml", "model.vocab_size=32000")
    flat = found.run.flat()
    wanted = {
        "model.num_query_groups": 4,
        "model.layernorm_epsilon": 1e-6,
        "model.layernorm_zero_centered_gamma": True,
        "model.add_bias_linear": False,
        "model.activation": "swiglu",
        "model.tie_word_embeddings": False,
        "parallel.tp": 2,
        "parallel.vpp": 3,
        "trainer.rampup_batch_size": [8, 8, 1600],
    }
    assert {key: flat.get(key) for key in wanted} == wanted
    assert not [u for u in found.unplaced if u.why == "unknown"]
    (tmp_path / "r.yaml").write_text(recipe_text(delta(found.run), {"title": "x"}))
    assert compose([f"recipe={tmp_path / 'r.yaml'}"]).run.digest() == found.run.digest()


@pytest.mark.parametrize(
    ("activation", "gated", "lost"),
    [
        ("gelu", False, []),
        ("gelu", True, ["--gated-linear-unit"]),
        ("swiglu", True, []),
        ("swish", False, ["swish"]),
    ],
)
def test_import_programs_yaml_gate_is_kept(activation: str, gated: bool, lost: list[str]) -> None:
    sizes = "num_layers: 2, hidden_size: 64, num_attention_heads: 4"
    text = (
        f"language_model: {{{sizes}, activation_func: {activation}, gated_linear_unit:"
        f" {str(gated).lower()}}}\n"
    )
    found = import_yaml([(f"{text}seq_length: 128\n", "x.yaml")], "x", ["model.vocab_size=1000"])
    words = [word for u in found.unplaced for word in (u.flag, u.value) if u.why == "not supported"]
    assert [word for word in words if word in ("--gated-linear-unit", "swish")] == lost


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("test_cases/t5/t5_220m", "MODEL_ARGS: {--num-layers: 2, --hidden-size: 64, --lr: 1}"),
        (
            "test_cases/hybrid/hybrid_tp1",
            "MODEL_ARGS: {--num-layers: 2, --hidden-size: 64, --lr: 1}",
        ),
        ("x", "MODEL_ARGS: {--num-layers: 2, --hidden-size: 64, --lr: 1, --is-hybrid-model: true}"),
        ("x", "MODE: inference\nMODEL_ARGS: {--num-layers: 2, --hidden-size: 64, --lr: 1}"),
    ],
)
def test_import_programs_yaml_of_other_model_is_refused(folder: str, text: str) -> None:
    with pytest.raises(ConfigError, match="only GPTs and BERTs are imported"):
        import_yaml([(text, f"{folder}/model_config.yaml")], "x")


def test_import_programs_other_yaml_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither MODEL_ARGS nor"):
        import_yaml([("model: {num_layers: 2}", "x.yaml")], "x")
