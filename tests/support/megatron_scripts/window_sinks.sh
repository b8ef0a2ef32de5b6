#!/bin/bash
# A small model with everything that is unusual: windows, learnt sinks, squared relu, interleaved rotary halves, SGD.
args="--num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64"
args="$args --window-size (127,0) --window-attn-skip-freq 2 --softmax-type learnable"
args="$args --squared-relu --position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved"
args="$args --attention-dropout 0.05"
args="${args} --seq-length 1024"
args="${args} --micro-batch-size 2 --train-iters 100 --lr 0.01 --optimizer sgd --sgd-momentum 0.8 --clip-grad 0.0"
args="${args} --accumulate-allreduce-grads-in-fp32 --vocab-size 32000 --seed 42 --exit-signal-handler"
args="${args} --num-experts 0 --moe-router-topk 4"
python pretrain_gpt.py ${args} --apply-query-key-layer-scaling ${@:2}
