#!/bin/bash
export OMP_NUM_THREADS=8
nproc_per_node=8
NPROC_PER_NODE=$nproc_per_node swift sft \
    --model Qwen/Qwen3-8B \
    --tuner_type full \
    --dataset data/messages.jsonl \
    --split_dataset_ratio 0.05 \
    --packing true \
    --attn_impl flash_attn \
    --max_length 8192 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 4 \
    --learning_rate 1e-5 \
    --lr_scheduler_type cosine \
    --warmup_ratio 0.05 \
    --weight_decay 0.1 \
    --adam_beta2 0.95 \
    --num_train_epochs 2 \
    --use_liger_kernel true \
    --deepspeed zero3
