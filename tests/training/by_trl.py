"""Settings under which TRL's own trainers are compared with runs."""

from typing import Any

PLAIN: dict[str, Any] = {
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e9,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
}
"""Gradient descent at a constant rate, on a CPU in float32, with each step logged."""
