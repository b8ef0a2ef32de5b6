#!/bin/bash
# Qwen3 30B-A3B with FSDP: heads wider than hidden/heads, 128 experts, and balancing by two losses that nobody here has.
GPUS=8
torchrun --nproc-per-node $GPUS pretrain_gpt.py \
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm \
    --position-embedding-type rope --rotary-base 1000000 --max-position-embeddings 40960 --seq-length 4096 \
    --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear \
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-router-pre-softmax \
    --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-3 1e-4 \
    --moe-z-loss-coeff 1e-5 --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity \
    --moe-token-dispatcher-type alltoall \
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer \
    --overlap-grad-reduce --overlap-param-gather --ckpt-format fsdp_dtensor \
    --micro-batch-size 1 --global-batch-size 64 --train-iters 1000 --lr 1e-4 --min-lr 0 --lr-decay-style constant \
    --optimizer adam --adam-eps 1e-8 --bf16 --mock-data \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-30B-A3B --vocab-size 151936 \
    --no-such-flag 3
