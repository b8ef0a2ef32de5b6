#!/bin/bash
# Qwen2.5 7B: biases on query, key and value alone. Nothing but flags behind one variable, used by a wrapper elsewhere.
QWEN_ARGS="
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --max-position-embeddings 131072
    --seq-length 4096
    --position-embedding-type rope
    --rotary-base 1000000
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --disable-bias-linear
    --add-qkv-bias
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 10000
    --lr 1e-5
    --lr-decay-style WSD
    --lr-wsd-decay-iters 1000
    --lr-warmup-iters 100
    --tensor-model-parallel-size 4
    --bf16
    --mock-data
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model Qwen/Qwen2.5-7B
"
