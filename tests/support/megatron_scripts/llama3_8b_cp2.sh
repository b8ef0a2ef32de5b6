#!/bin/bash
# Llama 3 8B on eight GPUs with context parallelism; the tokenizer is that of Hugging Face.

NNODES=${SLURM_NNODES:-"1"}
GPUS=${SLURM_GPUS_ON_NODE:-8}
MOCK=${MOCK:-1}
DTYPE="bf16"

MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --rotary-percent 1.0
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --init-method-std 0.0134
    --attention-backend fused
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-samples 1953125
    --lr-decay-samples 1949218
    --lr-warmup-samples 3906
    --lr 0.00015
    --min-lr 0.00001
    --decoupled-lr 5.0e-4
    --lr-decay-style cosine
    --clip-grad 1.0
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
    --manual-gc
    --empty-unused-memory-level 1
)

# Conditional arguments, as they grow in such scripts.
if [[ "$DTYPE" == "fp8" ]]; then
    TRAINING_ARGS+=(
        "--fp8-format hybrid"
        --fp8-param-gather
    )
fi

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --context-parallel-size 2
    --cp-comm-type p2p
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)

DATA_ARGS=( --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B )
DATA_ARGS+=( --vocab-size 128256 --split '99,1,0' --no-create-attention-mask-in-dataloader --num-workers 1 )

EVAL_ARGS="--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --save out/ckpt --ckpt-format torch_dist"

torchrun --nproc_per_node $GPUS --nnodes $NNODES --rdzv_id $RANDOM \
    pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" ${EVAL_ARGS}
