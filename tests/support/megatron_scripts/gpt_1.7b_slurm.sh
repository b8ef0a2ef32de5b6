#!/bin/bash
#SBATCH --job-name=gpt-1.7b
#SBATCH --nodes=6
#SBATCH --ntasks-per-node=8
#SBATCH --output=logs/%x-%j.log

# The smallest GPT of the scaling tables on 48 GPUs, data parallel only: one string of options, run by srun.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export WANDB_API_KEY=canary-5f3a9c

HIDDEN=2048
options=" \
    --tensor-model-parallel-size 1 \
    --pipeline-model-parallel-size 1 \
    --num-layers 24 \
    --hidden-size ${HIDDEN} \
    --num-attention-heads $((HIDDEN / 128)) \
    --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 \
    --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 4 --global-batch-size 192 \
    --train-iters 50 --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-fraction 0.1 \
    --adam-beta2 0.95 --weight-decay 0.1 \
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 131071 \
    --eval-iters 0 --log-interval 1 --log-throughput \
    --wandb-project scaling --wandb-api-key ${WANDB_API_KEY}"

run_cmd="python -u pretrain_gpt.py ${options}"
srun --label bash -c "${run_cmd}"
