"""Configuration of DDP, FSDP2, DeepSpeed and tensor parallelism through Accelerate."""
