"""The plan: every decision about a run, with its reasons. Written once, read by every process, never decided again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from tunekit.errors import PlanError
from tunekit.estimates.facts import DataFacts, Device, Facts, Origin
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import Confidence, MemoryEstimate, Part, Saving
from tunekit.estimates.memory.sharding import ZeroBuckets
from tunekit.estimates.memory.states import Dtype, Reference
from tunekit.estimates.throughput.speed import Speed
from tunekit.files import load_template, read_table
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.model import ModelSection

FlashAttention = Literal["FA2", "FA3", "FA4"]
"""Flash attentions that torch's varlen attention can go to; the first is torch's own."""

Kernels = Literal["tunekit", "liger", "torch"]
"""Kernels of norms, gated MLPs, rotary embeddings, adapters and the head."""

VARLEN = "tunekit_varlen"
"""Name of tunekit's attention for rows that are padding-free."""

LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""YAML loader of plans: in C where PyYAML was built with it, ten times as fast."""

EXCHANGE_MARGIN_SECONDS = 60
"""Seconds by which collectives wait longer than the watchdog."""

MAX_DEPTH = 50
"""Deepest nesting of what is read as a plan."""

GIVEN = frozenset({"device", "model", "data", "mixture", "communication", "failures", "faster elsewhere"})
"""Topics of what was found and not decided."""

ADVICE = "advice"
"""Topic of better recipes for the machine, where a plan is legal but poor."""

_TABLES = read_table(Path(__file__).with_suffix(".yaml"))
COLOURS: Mapping[Part, str] = _TABLES["colours"]
"""Colors of the parts of memory, in the order in which they are drawn: what lasts, what a step adds, and what is no
tensor."""

NO_TENSORS: frozenset[Part] = frozenset({"context", "reserve"})
"""Parts that torch does not count among its tensors."""

_BASIS: Mapping[Confidence, str] = _TABLES["basis"]
"""Description of memory figures, by their confidence."""

VARIABLES = frozenset(_TABLES["variables"])
"""Environment variables that a plan may set. Others could make a process load other libraries and modules."""


class Reason(Facts):
    """One decision: what it is about, what was chosen, and why."""

    topic: str
    choice: str
    why: str


class Rejected(Facts):
    """A layout that was looked at before the chosen one, and the number that ruled it out."""

    layout: Layout
    why: str
    needed_bytes: int | None = None
    """Bytes that each device would have needed at least; None where something other than memory ruled it out."""


class Schedule(Facts):
    """Schedule of a run, in optimizer steps."""

    num_steps: int
    steps_per_epoch: int | None
    warmup_steps: int
    eval_steps: int | None
    """Steps between evaluations; none without evaluation rows."""
    save_steps: int
    save_together: int = 1
    """Steps of whose multiples a checkpoint can be made: it holds no answers, which several steps may learn from."""


class VLLM(Facts):
    """Use of vLLM."""

    mode: Literal["colocate", "server"]
    gpu_memory_utilization: float | None = None
    """Share of each device's whole memory; None for a server that the run does not start."""
    devices: tuple[str, ...] = ()
    """Values of CUDA_VISIBLE_DEVICES for the server that the run starts; none where they are not known."""


class Plan(Facts):
    """Plan of a recipe on a machine."""

    recipe: Recipe = Field(exclude=True)
    origin: Origin | None = None
    """The run or the adapter that training starts from; None where it is a model that no run made."""
    reference: Reference = "none"
    """Reference model of the training."""
    layout: Layout
    """Distribution of the work over devices."""
    num_nodes: int
    """Machines that the processes of `layout` run on, as many on each."""
    device: Device
    """One of those devices; they are equal."""
    dtype: Dtype
    """Type of the products, and of the frozen weights."""
    autocast: bool
    """True if products are computed in `dtype` while trained weights are kept in float32."""
    attn_implementation: Literal[
        "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "tunekit_varlen"
    ]
    flash_attention: FlashAttention = "FA2"
    """Backend of tunekit_varlen on CUDA."""
    kernels: Kernels = "torch"
    """Kernels that replace sequences of small torch operations; torch's own in plans that do not say."""
    torch_compile: bool = False
    """True if each decoder layer is compiled."""
    fp8: bool = False
    """True if products of linear layers have 8-bit factors."""
    padding_free: bool
    """True if the rows of a micro-batch are concatenated, kept apart by their positions; always when packed."""
    by_document: bool = False
    """True if layers that carry a state along a row are run once for each document in it."""
    decoder_by_document: bool = False
    """True if the whole decoder is, since its attention would not keep documents apart."""
    gradient_checkpointing: bool
    activation_offloading: bool = False
    """True if the inputs of recomputed layers are in host memory until the backward pass."""
    mlp_tile_tokens: int | None = None
    """Tokens that an MLP computes at a time; None for all."""
    new_tokens: tuple[int, ...] = ()
    """Ids of tokens that the recipe adds to the tokenizer."""
    micro_batch_size: int
    gradient_accumulation_steps: int
    dataloader_num_workers: int
    """Processes that make micro-batches beside each that computes."""
    environment: Mapping[str, str] = {}
    """Variables that every process finds in its environment."""
    timeout_seconds: int = 600
    """Seconds that a process may make no progress in a step, or wait for the others in it."""
    patience_seconds: int = 600
    """The same where nobody sees whether it moves: while it loads or saves, in its first step, at answers."""
    vllm: VLLM | None = None
    """Engine that generates the answers that the model learns from; None for transformers."""
    zero_buckets: ZeroBuckets | None = None
    """Sizes of DeepSpeed's communication buckets; None for other engines."""
    pad_to_multiple_of: int | None = None
    """Multiple that the length of a micro-batch is padded to, where sequences are divided."""
    learning_rate: float
    router_aux_loss_coef: float | None = None
    """Coefficient of the routers' auxiliary loss, 0 where it is left out; None where model or method have none."""
    num_params: int
    num_trainable_params: int
    data: DataFacts
    schedule: Schedule | None
    """None while the number of packed sequences is not known, which is only before tokenizing."""
    saving: Saving = Saving()
    """Checkpoints of the run."""
    memory: MemoryEstimate
    unchecked: str | None = None
    """Properties outside of the range in which the formulas of memory were checked; None where there are none."""
    memory_limit_bytes: int
    """Bytes of the device that the plan allows itself to use."""
    speed: Speed | None = None
    """Time and cost; None for models whose operations are not counted."""
    reasons: tuple[Reason, ...]
    rejected: tuple[Rejected, ...] = ()
    """Rejected layouts, in the order in which they were tried."""
    change_first: str | None = None
    """Change of the recipe to try first if memory runs out after all."""

    @property
    def exchange_timeout_seconds(self) -> int:
        """Seconds that collectives wait: longer than the watchdog, whose error says more."""
        return self.patience_seconds + EXCHANGE_MARGIN_SECONDS

    def to_yaml(self) -> str:
        """The plan as YAML, without the recipe, which stands beside it in the run folder."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)

    @classmethod
    def from_yaml(cls, text: str, recipe: Recipe) -> "Plan":
        """The plan that `to_yaml` wrote, with its recipe.

        Raises:
            PlanError: It sets a variable that no plan sets; some make a process run other code.
            ValueError: It is none.
        """
        _check_depth(text)
        values = yaml.load(text, LOADER)
        if not isinstance(values, dict):
            raise ValueError("not a YAML mapping")
        plan = cls.model_validate({**values, "recipe": recipe})
        extra = sorted(set(plan.environment) - VARIABLES)
        if extra:
            raise PlanError(
                f"the plan sets environment variable {extra[0]}, which tunekit never sets",
                hint="undo the manual change and export the variable instead",
            )
        return plan

    @property
    def reduce_dtype(self) -> Dtype:
        """Type in which gradients are summed over devices."""
        return self.layout.reduces_in(self.dtype, self.trained_dtype)

    @property
    def trained_dtype(self) -> Dtype:
        """Type of trained weights and of their gradients."""
        return self.recipe.train.trained_dtype

    @property
    def devices_words(self) -> str:
        """Devices of the run: `16 x H100 SXM 80 GB in 2 nodes`."""
        number = self.layout.num_processes
        words = self.device.name if number == 1 else f"{number} x {self.device.name}"
        return words if self.num_nodes == 1 else f"{words} in {self.num_nodes} nodes"

    @property
    def layout_words(self) -> str:
        """Layout of the work, and whether activations are recomputed: `FSDP2, full shard, checkpointing`."""
        words = [self.layout.name, *["checkpointing"] * self.gradient_checkpointing]
        words += ["activations offloaded"] * self.activation_offloading
        words += ["tiled MLP"] * (self.mlp_tile_tokens is not None)
        return ", ".join(words)

    @property
    def batch_words(self) -> str:
        """The batch of a step: sequences of a micro-batch, micro-batches one after another, and side by side."""
        batches = self.layout.num_batches
        accumulated = f"{self.micro_batch_size} x {self.gradient_accumulation_steps}"
        return accumulated if batches == 1 else f"{accumulated} x {batches}"

    @property
    def headline(self) -> str:
        """The choice in one sentence: what fits where, and how the work is spread."""
        chosen = f"{self.recipe.adapter.type} on {self.model_words} fits on {self.devices_words}: {self.layout_words}"
        return f"{chosen}; {self.unchecked}" if self.unchecked else chosen

    @property
    def memory_basis(self) -> str:
        """Basis of the memory figures: how they were checked, and on which side they err."""
        if self.device.kind == "cuda" and self.kernels != "torch":
            if self.memory.is_fused:
                return f"{_BASIS[self.memory.confidence]}, adjusted for tunekit's kernels"
            return f"{_BASIS[self.memory.confidence]}; upper bound, since {self.kernels}'s kernels store less"
        if self.torch_compile:
            return f"{_BASIS[self.memory.confidence]}; upper bound, since compiled layers store less"
        return _BASIS[self.memory.confidence]

    @property
    def model_words(self) -> str:
        """Name of the trained model."""
        return self.recipe.model.path if self.origin is None else self.origin.name

    @property
    def base(self) -> ModelSection:
        """The model that transformers loads: that of the recipe, or the one below a run's adapter."""
        return self.recipe.model if self.origin is None else self.origin.loaded_for(self.recipe.model)

    @property
    def figures(self) -> str:
        """Figures of the choice in one line: memory, speed, time and cost."""
        each = "" if self.layout.num_processes == 1 else " per device"
        memory = f"{used_of(self.memory.total_bytes, self.memory_limit_bytes)}{each}"
        is_known = self.speed is not None and self.speed.tokens_per_second is not None
        reason = self._speed_reason if is_known else None
        return f"{memory}; {reason.choice if reason else 'throughput unknown'}"

    @property
    def speed_basis(self) -> str:
        """Source of the speed figures, or why there are none."""
        return self._speed_reason.why if self._speed_reason else ""

    @property
    def _speed_reason(self) -> Reason | None:
        return next((reason for reason in self.reasons if reason.topic == "speed"), None)

    @property
    def given(self) -> tuple[Reason, ...]:
        """The reasons that tell what was found."""
        return tuple(reason for reason in self.reasons if reason.topic in GIVEN)

    @property
    def decisions(self) -> tuple[Reason, ...]:
        """The reasons that tell what was decided."""
        return tuple(reason for reason in self.reasons if reason.topic not in {*GIVEN, ADVICE, "speed"})

    @property
    def advice(self) -> tuple[Reason, ...]:
        """Better recipes for the machine, two at most; none where the plan is not poor."""
        return tuple(reason for reason in self.reasons if reason.topic == ADVICE)

    def explain(self) -> str:
        """The plan in words: the choice, memory by part, each decision with its reason, and what was ruled out."""
        lines = [self.headline, self.figures, self.speed_basis]
        lines += [f"advice: {reason.choice}: {reason.why}" for reason in self.advice]
        lines += ["", f"memory: {self.memory_line()}", *self.elsewhere_lines()]
        rows = [(reason.topic, reason.choice, reason.why) for reason in (*self.decisions, *self.given)]
        lines += ["", *_aligned(rows)]
        if self.rejected:
            lines += ["", "ruled out:", *_aligned([(rejected.layout.name, rejected.why) for rejected in self.rejected])]
        if self.change_first:
            lines += ["", f"if memory runs out: {self.change_first}"]
        return "\n".join(lines)

    def memory_line(self) -> str:
        """Predicted memory by part against the limit, in one line."""
        parts = ", ".join(f"{name} {gib(size)}" for name, size in self.memory_parts().items())
        total = f"{used_of(self.memory.total_bytes, self.memory_limit_bytes)} ({self.memory_basis})"
        return f"{total}, {self.memory.peak_words}: {parts}"

    def memory_parts(self) -> dict[Part, int]:
        """Predicted bytes by part, the largest first."""
        return dict(sorted(self.memory.parts.items(), key=lambda part: -part[1]))

    def drawn_parts(self) -> list[tuple[Part, int, str]]:
        """Predicted bytes by part in the order in which they are drawn, each with its color."""
        return [(part, self.memory.parts[part], COLOURS[part]) for part in COLOURS if part in self.memory.parts]

    def elsewhere_lines(self) -> list[str]:
        """Return the needs of each node besides its devices, a line each."""
        sizes = (("host memory", self.memory.host_bytes), ("disk", self.memory.nvme_bytes))
        return [f"{name}: {gib(size)} per node" for name, size in sizes if size]

    def __str__(self) -> str:
        return self.explain()

    def _repr_html_(self) -> str:
        template = load_template(Path(__file__).with_name("plan.html.jinja"), gib=gib)
        return template.render(plan=self, colours=COLOURS)

    def to_dict(self) -> dict[str, Any]:
        """The plan and its recipe as plain data, for JSON."""
        return {"recipe": self.recipe.model_dump(mode="json"), "plan": self.model_dump(mode="json")}


def gib(size_bytes: float) -> str:
    """A size in words: `1.4 GiB`, or `23 MiB` below a tenth of a GiB."""
    if size_bytes < 2**30 / 10:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes < 10 * 2**30 else f"{size_bytes / 2**30:,.1f} GiB"


def used_of(used_bytes: float, limit_bytes: float) -> str:
    """A use of a limit in words, with one unit where both have the same: `1.4 of 22.1 GiB`."""
    limit = gib(limit_bytes)
    return f"{gib(used_bytes).removesuffix(limit[-4:])} of {limit}"


def count(number: int) -> str:
    """A count of parameters in words: `2.75 M`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of words as lines with columns, the last of which is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _check_depth(text: str) -> None:
    """Refuse a text that is nested deep: the loader in C calls itself for each level, and ends the program."""
    depth = 0
    try:
        for event in yaml.parse(text, LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > MAX_DEPTH:
                raise ValueError("nested too deeply")
    except yaml.MarkedYAMLError as error:
        # PyYAML 6.0.4 has a limit of its own, which it meets while it looks ahead.
        if "maximum nesting depth" in str(error.problem):
            raise ValueError("nested too deeply") from error
        raise
