"""What finished runs tell about the next one on the same device."""

from tunekit.planner.facts import Facts
from tunekit.planner.states import Dtype


class RunRecord(Facts):
    """What a finished run tells about the next one."""

    device: str
    """Name of the device."""
    model_type: str
    adapter: str
    dtype: Dtype
    num_params: int
    flops_per_token: float
    """As its plan counted them."""
    tokens_per_second: float
    peak_memory_bytes: int
    planned_memory_bytes: int

    @property
    def flops_per_second(self) -> float:
        """What the device achieved; padding and data movement are in it as lost time."""
        return self.tokens_per_second * self.flops_per_token

    @property
    def memory_share(self) -> float:
        """Measured over planned memory."""
        return self.peak_memory_bytes / self.planned_memory_bytes
