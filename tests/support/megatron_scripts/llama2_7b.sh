#!/usr/bin/env bash
set -euo pipefail

# Llama 2 7B on one machine. Everything in one command, values joined by "=".
cd "$(dirname "$0")/.." && python3 -m torch.distributed.run --nproc-per-node=8 pretrain_gpt.py \
  --num-layers=32 --hidden-size=4096 --ffn-hidden-size=11008 --num-attention-heads=32 \
  --seq-length=4096 --max-position-embeddings=4096 \
  --position-embedding-type=rope --swiglu --normalization=RMSNorm --norm-epsilon=1e-5 \
  --disable-bias-linear --untie-embeddings-and-output-weights \
  --attention-dropout=0.0 --hidden-dropout=0.0 --no-position-embedding \
  --tensor-model-parallel-size=2 --sequence-parallel \
  --micro-batch-size=2 --global-batch-size=1024 --train-samples=2048000 \
  --lr=3e-4 --min-lr=3e-5 --lr-decay-style=cosine --lr-warmup-samples=204800 \
  --adam-beta1=0.9 --adam-beta2=0.95 --adam-eps=1e-5 --weight-decay=0.1 --clip-grad=1.0 \
  --bf16 --recompute-activations --use-flash-attn \
  --tokenizer-type=Llama2Tokenizer --tokenizer-model='models/llama 2/tokenizer.model' \
  --data-path 1.0 '/data/my corpus/text_document' --split=98,2,0 \
  --make-vocab-size-divisible-by=1 2>&1 | tee "logs/llama2.log"
