#!/usr/bin/env bash
set -e
MODEL=Qwen/Qwen2.5-3B
trl orpo \
    --model_name_or_path $MODEL \
    --dataset_name data/pairs3.jsonl \
    --beta 0.2 \
    --learning_rate 8e-6 \
    --lr_scheduler_type linear \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 4 \
    --num_train_epochs 3 \
    --max_length 1024 \
    --use_peft \
    --lora_r 16 \
    --lora_alpha 16 \
    --lora_target_modules q_proj k_proj v_proj o_proj
