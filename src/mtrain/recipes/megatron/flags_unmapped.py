"""Flags of Megatron-LM without a key, and why: mtrain does the same anyway, has no use for it, or
lacks the feature.
"""

from __future__ import annotations

from mtrain.config.compose.paths import program
from mtrain.recipes.megatron.arguments import Why

NO_SUCH_PART = "changes the numbers: mtrain has no such part of the network"
"""The reason of flags for parts of a network that mtrain does not build."""

# A flag that takes a value ends with `=`: the reader has to know which words are values.
_GROUPS: tuple[tuple[Why, str, str], ...] = (
    (
        "no effect",
        "is ignored by Megatron-LM",
        """
        --use-mcore-models --no-async-tensor-model-parallel-allreduce --local-rank=
        --fp8-interval= --use-dist-ckpt --dist-ckpt-format= --ckpt-fully-parallel-save
        --moe-extended-tp --checkpoint-activations
        """,
    ),
    (
        "no effect",
        "is read only by Megatron-LM's program for BERT",
        """
        --bert-no-binary-head --mask-prob= --short-seq-prob=
        """,
    ),
    (
        "derived here",
        "kernels.* chooses the implementation of an operation, fusions included",
        """
        --use-flash-attn --attention-backend= --no-masked-softmax-fusion --no-bias-swiglu-fusion
        --no-bias-dropout-fusion --bias-dropout-fusion --no-rope-fusion --apply-rope-fusion
        --no-persist-layer-norm --cross-entropy-loss-fusion --cross-entropy-fusion-impl=
        --moe-grouped-gemm --moe-use-legacy-grouped-gemm --moe-permute-fusion --moe-router-fusion
        --use-fused-weighted-squared-relu --use-te-activation-func --attention-softmax-in-fp32
        """,
    ),
    (
        "derived here",
        "mtrain has its own process groups, data reader and loss, and needs no such choice",
        """
        --num-workers= --data-cache-path= --no-create-attention-mask-in-dataloader
        --no-mmap-bin-files --num-dataset-builder-threads= --mid-level-dataset-surplus=
        --distributed-backend= --lazy-mpu-init --disable-gloo-process-groups
        --use-cpu-initialization --init-model-with-meta-device --no-overlap-p2p-communication
        --no-align-grad-reduce --no-align-param-gather --no-scatter-gather-tensors-in-pipeline
        --clone-scatter-output-in-embedding --no-clone-scatter-output-in-embedding
        --ddp-average-in-collective --no-initialization --manual-gc --manual-gc-interval=
        --no-manual-gc-eval --empty-unused-memory-level= --train-sync-interval=
        --high-priority-stream-groups= --use-tp-pp-dp-mapping --te-rng-tracker
        --inference-rng-tracker --no-gradient-reduce-div-fusion --legacy-tokenizer --disable-msc
        --enable-experimental --ckpt-assume-constant-structure
        """,
    ),
    (
        "derived here",
        "optim.muon.ns_dtype is the dtype of the products of Newton-Schulz steps",
        """
        --muon-fp32-matmul-prec=
        """,
    ),
    (
        "derived here",
        (
            "the size of the vocabulary follows from the type of the tokenizer, whose files are not"
            " read"
        ),
        """
        --merge-file= --vocab-file=
        """,
    ),
    (
        "derived here",
        "a checkpoint is mtrain's own: whole state, hashed, read in any layout",
        """
        --ckpt-format= --auto-detect-ckpt-format --no-ckpt-fully-parallel-save
        --ckpt-fully-parallel-load --dist-ckpt-strictness= --dist-ckpt-optim-fully-reshardable
        --distrib-optim-fully-reshardable-mem-efficient --use-checkpoint-args
        --use-mp-args-from-checkpoint-args --override-opt_param-scheduler
        --override-opt-param-scheduler --use-checkpoint-opt_param-scheduler
        --use-checkpoint-opt-param-scheduler --exit-on-missing-checkpoint
        --dist-ckpt-save-pre-mcore-014 --no-save-rng --no-load-rng
        --no-use-tokenizer-model-from-checkpoint-args
        """,
    ),
    (
        "derived here",
        (
            "the run folder has every metric of every step, and a stop is always answered with a"
            " checkpoint"
        ),
        """
        --log-throughput --log-progress --log-params-norm --log-num-zeros-in-grad --log-energy
        --timing-log-level= --timing-log-option= --no-barrier-with-level-1-timing
        --log-timers-to-tensorboard --log-memory-to-tensorboard
        --log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard
        --no-log-loss-scale-to-tensorboard --logging-level= --exit-signal-handler
        --check-for-nan-in-loss-and-grad --no-check-for-nan-in-loss-and-grad --log-straggler
        --disable-straggler-on-startup --straggler-ctrlr-port= --straggler-minmax-count=
        --no-one-logger --one-logger-project= --one-logger-run-name= --one-logger-async
        --app-tag-run-name= --app-tag-run-version= --config-logger-dir= --rerun-mode=
        --enable-ft-package --calc-ft-timeouts --tensorboard-log-interval=
        --tensorboard-queue-size=
        """,
    ),
    (
        "not supported",
        "no tracker is written to; the run folder has the metrics",
        """
        --tensorboard-dir= --wandb-project= --wandb-entity= --wandb-exp-name= --wandb-save-dir=
        """,
    ),
    (
        "not supported",
        (
            f"checkpoints of Megatron-LM are not read; resume a run of mtrain with `{program()}"
            " resume RUN`"
        ),
        """
        --load= --finetune --pretrained-checkpoint= --ckpt-step= --no-load-optim
        --load-main-params-from-ckpt --no-save-optim --ckpt-convert-format= --ckpt-convert-save=
        --moe-use-upcycling --async-save --use-persistent-ckpt-worker --save-retain-interval=
        --non-persistent-save-interval= --non-persistent-ckpt-type=
        --non-persistent-global-ckpt-dir= --non-persistent-local-ckpt-dir= --replication
        --replication-jump= --replication-factor=
        """,
    ),
    (
        "not supported",
        "changes speed or memory, not the numbers",
        """
        --cpu-offloading-num-layers= --tp-comm-overlap --async-strategy= --async-ckpt-use-cpu-shm
        --fsdp-manual-registration --outer-dp-sharding-strategy= --use-transformer-engine-op-fuser
        --no-use-layer-wise-param-layout --check-weight-hash-across-dp-replicas-interval=
        --verify-integrity --DDP-impl= --tp-comm-overlap-cfg= --disable-tp-comm-overlap-ag
        --disable-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad --disable-tp-comm-bulk-dgrad
        --disable-tp-comm-bulk-wgrad --disable-tp-comm-split-ag --disable-tp-comm-split-rs
        --tp-comm-bootstrap-backend= --overlap-param-gather-with-optimizer-step --ddp-num-buckets=
        --defer-embedding-wgrad-compute --wgrad-deferral-limit= --use-ring-exchange-p2p
        --use-nccl-ub --use-sharp --sharp-enabled-group= --disable-symmetric-registration
        --nccl-communicator-config-path= --pipeline-model-parallel-comm-backend=
        --fsdp-double-buffer --suggested-communication-unit-size=
        --torch-fsdp2-no-reshard-after-forward --enable-full-sharding-in-hsdp
        --keep-fp8-transpose-cache --moe-deepep-num-sms= --overlap-moe-expert-parallel-comm
        --delay-wgrad-compute --use-torch-optimizer-for-cpu-offload
        --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params
        --moe-per-layer-logging --record-memory-history --memory-snapshot-path=
        --distributed-timeout-seconds-after-init= --decrease-batch-size-if-needed --exit-interval=
        --exit-duration-in-mins= --adlr-autoresume --adlr-autoresume-interval= --inprocess-restart
        """,
    ),
    (
        "not supported",
        "changes the numbers: a number format that mtrain does not have",
        """
        --fp8-param-gather --fp4-param-gather --reuse-grad-buf-for-mxfp8-param-ag
        --fp32-residual-connection --megatron-fsdp-grad-comm-dtype=
        --megatron-fsdp-main-grads-dtype= --megatron-fsdp-main-params-dtype=
        --fp16-lm-cross-entropy --disable-bf16-reduced-precision-matmul --loss-scale=
        """,
    ),
    (
        "not supported",
        NO_SUCH_PART,
        """
        --apply-residual-connection-post-layernorm --mrope-section=
        --relative-attention-num-buckets= --relative-attention-max-distance=
        --apply-query-key-layer-scaling --spec= --heterogeneous-layers-config-path=
        --heterogeneous-layers-config-encoded-json= --hybrid-attention-ratio= --hybrid-mlp-ratio=
        --hybrid-override-pattern= --is-hybrid-model --mamba-state-dim= --mamba-head-dim=
        --mamba-num-groups= --mamba-num-heads= --use-legacy-models --decoder-num-layers=
        --enable-gpt-oss --gated-linear-unit --activation-func= --mup-width-mult=
        --decoder-seq-length= --vocab-extra-ids=
        """,
    ),
    (
        "not supported",
        "changes the numbers: mtrain has no such choice for training",
        """
        --iterations-to-skip= --init-method-xavier-uniform --data-parallel-random-init
        --lr-warmup-init= --decoupled-lr= --decoupled-min-lr= --start-weight-decay=
        --end-weight-decay= --weight-decay-incr-style= --dataloader-type=
        --eval-global-batch-size= --data-args-path= --per-split-data-args-path= --full-validation
        --sample-rate= --sft
        """,
    ),
    (
        "not supported",
        (
            "changes the numbers: data.fim.rate is similar: boundaries fall between tokens, and ids"
            " mark the parts"
        ),
        """
        --fim-data --fim-rate= --fim-spm-rate=
        """,
    ),
    (
        "not supported",
        (
            "changes the numbers: data.packed=true is similar: documents do not see each other and"
            " start at position 0"
        ),
        """
        --reset-position-ids --reset-attention-mask
        """,
    ),
    (
        "not supported",
        "a file that a script names is never read, and no code of it is run",
        """
        --yaml-cfg= --trust-remote-code --tokenizer-metadata= --tiktoken-pattern=
        --tiktoken-num-special-tokens= --tiktoken-special-tokens= --dump-param-to-param-group-map=
        """,
    ),
)

OTHERS: dict[str, tuple[Why, str]] = {
    flag.rstrip("="): (why, text) for why, text, flags in _GROUPS for flag in flags.split()
}
"""Flag -> why it has no key, and a sentence."""
VALUED = frozenset(
    flag.rstrip("=") for _, _, flags in _GROUPS for flag in flags.split() if flag.endswith("=")
)
"""The flags among them that take a value, written with `=` above."""

FITTING: dict[str, dict[str, str]] = {
    "--dataloader-type": {
        "single": "every sample is read once, in a seeded order",
        "cyclic": "samples are shuffled",
    },
    "--weight-decay-incr-style": {"constant": "the weight decay is constant"},
    "--lr-warmup-init": {"0": "the warmup starts at 0", "0.0": "the warmup starts at 0"},
}
"""Flag -> the values that describe what mtrain always does."""
