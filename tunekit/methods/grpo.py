"""Group relative policy optimisation. It can be planned; TRL's GRPOTrainer is not built here yet."""

from tunekit.data.learner import Learner

LEARNER = Learner("grpo", ("prompts",))
"""What it learns from."""
