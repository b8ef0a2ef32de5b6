#!/bin/bash
# Llama 3 70B on 64 GPUs: TP4 PP4, five virtual stages, activations of some layers computed again.
TP=4
PP=4
MBS=1
GBS=$(( 256 * MBS ))
LAYERS=80

llama_args() {
  ARGS="--num-layers $LAYERS --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64"
  ARGS="$ARGS --group-query-attention --num-query-groups 8"
  ARGS+=" --swiglu --normalization RMSNorm --disable-bias-linear --use-rotary-position-embeddings"
  ARGS+=" --rotary-base 500000 --untie-embeddings-and-output-weights"
  ARGS+=" --attention-dropout 0 --hidden-dropout 0"
}
llama_args

LAYOUT="--tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} --sequence-parallel \
  --num-layers-per-virtual-pipeline-stage $((LAYERS / PP / 5))"

torchrun --nnodes=8 --nproc_per_node=8 ./pretrain_gpt.py $ARGS $LAYOUT \
  --seq-length 8192 --max-position-embeddings 8192 \
  --micro-batch-size $MBS --global-batch-size $GBS --train-iters 1168251 \
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
  --weight-decay 0.1 --adam-beta2 0.95 --bf16 \
  --recompute-granularity full --recompute-method block --recompute-num-layers 2 \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --tp-comm-overlap --transformer-impl transformer_engine \
  --data-path /data/c4_text_document --tokenizer-type HuggingFaceTokenizer \
  --tokenizer-model /models/llama3/tokenizer.json --eval-interval 2000 --save-interval 500 --save /ckpt
