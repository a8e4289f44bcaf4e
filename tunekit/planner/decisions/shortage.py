"""Memory that ran out although the plan had it fit: the plan beside the truth, and what would have fitted."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tunekit.estimates.facts import Facts, Hardware, ModelFacts
from tunekit.estimates.memory.memory import MemoryEstimate, Part
from tunekit.planner.decisions.candidates import Setting, divisors
from tunekit.planner.decisions.changes import Smaller, what_would_fit
from tunekit.planner.plan import Plan, Reason, gib
from tunekit.planner.resolve import setting_of

CONSTANT: tuple[Part, ...] = ("weights", "adapters", "optimizer")
"""Parts that are the same in all phases of a step, so that their plan can be compared with what is held at any time."""


class Shortage(Facts):
    """Planned and actual memory when it ran out."""

    planned: MemoryEstimate
    held: Mapping[Part, int]
    """Measured bytes of the parts; those that were not allocated yet are missing."""
    context_bytes: int | None
    """Bytes of the process besides tensors; None where they were not measured."""
    taken_bytes: int
    """Bytes taken for tensors: reserved by torch on an accelerator, resident beyond the context on a CPU."""
    free_bytes: int = 0
    """Free bytes of the device."""
    asked_bytes: int = 0
    """Bytes of the failed allocation; 0 where the error did not say."""
    allocated_bytes: int | None = None
    """Bytes of tensors in what was taken, where torch counts them."""

    @property
    def limit_bytes(self) -> int:
        """Limit for another plan so that its run fits, assuming that it is off by as much as this one."""
        context = self.planned.parts["context"]
        planned = self.planned.total_bytes - context
        unforeseen = max(0, self.taken_bytes + self.asked_bytes - planned)
        return context + min(self.taken_bytes + self.free_bytes - unforeseen, planned - 1)

    def words(self) -> str:
        """Describe the failed allocation and the free memory in one line."""
        parts = [f"{gib(self.asked_bytes)} requested"] if self.asked_bytes else []
        if self.allocated_bytes is not None:
            reserved = f"{gib(self.allocated_bytes)} allocated and {gib(self.taken_bytes)} reserved"
            parts.append(f"{reserved}, {gib(self.free_bytes)} free")
        return "; ".join(parts)

    def table(self) -> str:
        """The plan's parts beside what was measured, one a line."""
        rows = [("", "planned", "measured"), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"  {name:<{widths[0]}}  {planned:>{widths[1]}}  {measured:>{widths[2]}}"
            for name, planned, measured in rows
        )

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        parts = dict(self.planned.parts)
        context, remaining = parts.pop("context"), self.taken_bytes
        for part in CONSTANT:
            planned, measured = parts.pop(part, 0), self.held.get(part)
            if planned:
                remaining -= measured or 0
                yield part, gib(planned), "not allocated" if measured is None else gib(measured)
        yield ", ".join(parts), gib(sum(parts.values())), gib(remaining)
        yield "context", gib(context), "not measured" if self.context_bytes is None else gib(self.context_bytes)
        used = self.taken_bytes + (self.context_bytes or 0)
        yield "total", gib(self.planned.total_bytes), gib(used)


def change_that_fits(plan: Plan, model: ModelFacts, limit_bytes: int, teacher: ModelFacts | None = None) -> Smaller:
    """The smallest change of a plan's recipe with which it fits: what leaves the result as it is comes first.

    Args:
        plan: The plan that did not fit.
        model: Its model.
        limit_bytes: What it may come to, which is less than it does.
        teacher: The model that it learns from, for distillation.
    """
    of_a_node = plan.layout.num_processes // plan.num_nodes
    setting = _setting_of(plan, model, limit_bytes, teacher)
    for checkpointing in sorted({plan.gradient_checkpointing, True}):
        for size in divisors(plan.micro_batch_size):
            memory = setting.memory_as(plan, plan.num_nodes, size, checkpointing=checkpointing)
            if setting.fits(memory, of_a_node):
                smaller = f"train.micro_batch_size={size}" if size != plan.micro_batch_size else ""
                again = "train.gradient_checkpointing=true" if checkpointing != plan.gradient_checkpointing else ""
                changes = tuple(change for change in (smaller, again) if change)
                comes_to = gib(memory.total_bytes)
                words = f"set {' and '.join(changes)}: needs {comes_to}, with the same result"
                return Smaller(words, changes)
    return what_would_fit(setting)


def with_half_the_batch(plan: Plan, model: ModelFacts, teacher: ModelFacts | None = None) -> Plan | None:
    """The same plan with half the micro-batch, or the most below, and the same global batch; None where it is one row.

    Args:
        plan: The plan that did not fit.
        model: Its model.
        teacher: The model that it learns from, for distillation.
    """
    sizes = [size for size in divisors(plan.micro_batch_size) if 2 * size <= plan.micro_batch_size]
    if not sizes:
        return None
    size = max(sizes)
    setting = _setting_of(plan, model, plan.memory_limit_bytes, teacher)
    memory = setting.memory_as(plan, plan.num_nodes, size, checkpointing=plan.gradient_checkpointing)
    steps = plan.gradient_accumulation_steps * plan.micro_batch_size // size
    update = {"micro_batch_size": size, "gradient_accumulation_steps": steps, "memory": memory}
    smaller = plan.model_copy(update=update)
    why = f"micro-batches of {plan.micro_batch_size} ran out of memory (train.retry_out_of_memory)"
    batch = Reason(topic="batch", choice=smaller.batch_words, why=why)
    reasons = tuple(batch if reason.topic == "batch" else reason for reason in plan.reasons)
    return smaller.model_copy(update={"reasons": reasons})


def _setting_of(plan: Plan, model: ModelFacts, limit_bytes: int, teacher: ModelFacts | None) -> Setting:
    """Return the settings that a plan was chosen among, on its own devices."""
    if plan.device.kind == "cpu":
        hardware = Hardware(cpu=plan.device)
    else:
        hardware = Hardware(
            accelerators=(plan.device,) * (plan.layout.num_processes // plan.num_nodes),
            num_nodes=plan.num_nodes,
            flash_attn=plan.attn_implementation.startswith("flash_attention"),
            flash_attn_3=plan.flash_attention == "FA3",
            flash_attn_4=plan.flash_attention == "FA4",
        )
    setting = setting_of(plan.recipe, hardware, model, data=plan.data, limit_bytes=limit_bytes, teacher=teacher)
    return replace(setting, by_vllm=plan.vllm is not None)
