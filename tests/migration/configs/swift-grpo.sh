CUDA_VISIBLE_DEVICES=0,1,2,3 \
NPROC_PER_NODE=4 \
swift rlhf \
    --rlhf_type grpo \
    --model Qwen/Qwen2.5-7B-Instruct \
    --use_hf true \
    --train_type full \
    --dataset data/prompts.jsonl \
    --reward_funcs accuracy format \
    --reward_weights 1 0.5 \
    --num_generations 8 \
    --max_length 1024 \
    --max_completion_length 2048 \
    --temperature 1.0 \
    --beta 0.0 \
    --loss_type dapo \
    --epsilon_high 0.28 \
    --overlong_filter true \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_gpu_memory_utilization 0.5 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 2 \
    --learning_rate 1e-6 \
    --max_steps 200 \
    --log_completions true \
    --deepspeed zero2
