#!/bin/bash
# Llama 3.1 405B: 126 layers are cut so that the first and the last of eight stages hold fewer.
NODES=128
ARGS=(
    --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248
    --num-attention-heads 128 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 131072
    --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8.0
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --context-parallel-size 2
    --num-virtual-stages-per-pipeline-rank 1
    --decoder-first-pipeline-num-layers 15 --decoder-last-pipeline-num-layers 15
    --sequence-parallel --cp-comm-type a2a
    --micro-batch-size 1 --global-batch-size 1536 --train-iters 300000
    --lr 8e-5 --min-lr 8e-7 --lr-warmup-iters 8000 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --num-distributed-optimizer-instances 2
    --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128255 --padded-vocab-size 128256
    --distributed-timeout-minutes 30
)
torchrun --nnodes $NODES --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}"
