"""Energy-based fine-tuning: GRPO by rewards of features, and how they are computed."""

from tunekit.methods.ebft.trainer import build

__all__ = ["build"]
