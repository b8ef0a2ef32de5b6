#!/bin/bash
# DeepSeek-V3 on 1024 GPUs: latent attention, 256 experts of which 8 are visited, one layer of multi-token prediction.
MOE_LAYERS=58
ARGS=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --rope-type yarn --rotary-base 10000 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --seq-length 4096 --max-position-embeddings 163840 --position-embedding-type rope
    --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.006
    --num-experts 256 --moe-layer-freq "([0]*3+[1]*${MOE_LAYERS})" --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-shared-expert-overlap
    --moe-router-topk 8 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3 --moe-router-num-groups 8 --moe-router-group-topk 4
    --moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-router-pre-softmax --moe-router-dtype fp32
    --moe-token-dispatcher-type flex --moe-enable-deepep --moe-grouped-gemm --moe-permute-fusion
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --expert-model-parallel-size 64
    --expert-tensor-parallel-size 1 --sequence-parallel
    --pipeline-model-parallel-layout "Et|(tt|)*30mL"
    --recompute-granularity selective --recompute-modules mla_up_proj mlp
    --micro-batch-size 1 --global-batch-size 16384 --train-samples 585937500
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-samples 1536000 --lr-warmup-init 3.9e-7
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3 --vocab-size 129280
    --make-vocab-size-divisible-by 3232
)
exec torchrun --nproc-per-node 8 --nnodes 128 pretrain_gpt.py "${ARGS[@]}"
