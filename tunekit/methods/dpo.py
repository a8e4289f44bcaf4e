"""Direct preference optimisation. It can be planned; TRL's DPOTrainer is not built here yet."""

from tunekit.data.learner import Learner

LEARNER = Learner("dpo", ("preference",))
"""What it learns from."""
