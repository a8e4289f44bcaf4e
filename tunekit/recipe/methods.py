"""Training methods: one section for each, with only the fields that matter to it.

Each is carried out by a trainer of TRL's. Whatever else that trainer can do stands in `trainer_args`, by TRL's names.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.rewards import Reward
from tunekit.recipe.sections.section import Section, type_alone

DPOLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]
"""Losses of DPO by TRL's names; `sft` is the likelihood of the better answer, as a part of a mix (RPO, MPO), and
`sigmoid_norm` divides log-probabilities by the length of an answer."""

GRPOLoss = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
"""Losses of GRPO by TRL's names."""


class GenerationSection(Section):
    """How answers are generated while a model learns from them."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of sampling. Below 1 the likely tokens come more often."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only the likeliest tokens that make up this share of the probability are sampled. 1: all."""

    top_k: Annotated[int, Field(ge=0)] = 0
    """Only so many of the likeliest tokens are sampled. 0: all."""

    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    """Only tokens with at least this share of the likeliest one's probability are sampled."""

    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1, tokens that were there before become less likely."""

    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts at which an answer ends, besides the model's own end token."""

    use_vllm: Literal["auto"] | bool = "auto"
    """Whether vLLM generates, rather than transformers. `auto`: where it is installed and there is a GPU."""

    vllm_mode: Literal["colocate", "server"] = "colocate"
    """Where vLLM is: on the devices that train, or a server of its own (`trl vllm-serve`)."""

    vllm_server_base_url: str | None = None
    """Address of the server, such as `http://host:8000`."""

    vllm_gpu_memory_utilization: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Share of each device's memory for vLLM where it is colocated: its copy of the weights and its cache. Left out:
    the plan chooses."""


class SFTMethod(Section):
    """Supervised fine-tuning: imitate the answers in the data (TRL's SFTTrainer)."""

    shorthand = "type"

    type: Literal["sft"] = "sft"
    """Supervised fine-tuning."""

    trainer_args: dict[str, Any] = {}
    """Anything else for TRL's SFTConfig, by its names. Checked against the fields of the installed version; what
    tunekit sets itself is refused."""


class DPOMethod(Section):
    """Direct preference optimisation: prefer the better of two answers (TRL's DPOTrainer)."""

    shorthand = "type"

    type: Literal["dpo"] = "dpo"
    """Direct preference optimisation, on preference pairs (arXiv 2305.18290)."""

    loss_type: Annotated[
        list[DPOLoss],
        Field(min_length=1),
        BeforeValidator(
            lambda given: [given] if isinstance(given, str) else given,
            json_schema_input_type=DPOLoss | Annotated[list[DPOLoss], Field(min_length=1)],
        ),
    ] = ["sigmoid"]
    """Loss by TRL's name, or a list of losses that are summed, such as `[sigmoid, sft]`."""

    loss_weights: list[Annotated[float, Field(ge=0)]] | None = None
    """Weights of several losses, in their order. Left out: 1 each."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs that may be the wrong way round. For the losses `robust`, `aot` and `aot_unpaired`, and for
    `exo_pair`, which needs it (the paper has 1e-3)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the model is held to what it was before training: the higher, the closer it stays."""

    precompute_ref_log_probs: bool = False
    """Compute the log-probabilities of the reference model once, before training. Full fine-tuning then keeps no
    second copy of the weights, and no step runs a second forward pass."""

    trainer_args: dict[str, Any] = {}
    """Anything else for TRL's DPOConfig, by its names. Checked against the fields of the installed version; what
    tunekit sets itself is refused."""


class KTOMethod(Section):
    """Kahneman-Tversky optimisation: more of the good answers, less of the bad (TRL's KTOTrainer)."""

    shorthand = "type"

    type: Literal["kto"] = "kto"
    """Kahneman-Tversky optimisation, on single answers that are good or bad (arXiv 2402.01306)."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """Loss by TRL's name. `kto` compares an answer with others of its micro-batch, which has two rows at least."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the model is held to what it was before training: the higher, the closer it stays."""

    desirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the good answers."""

    undesirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the bad answers."""

    precompute_ref_log_probs: bool = False
    """Compute the log-probabilities of the reference model once, before training."""

    trainer_args: dict[str, Any] = {}
    """Anything else for TRL's KTOConfig, by its names. Checked against the fields of the installed version; what
    tunekit sets itself is refused."""


class ORPOMethod(Section):
    """Odds ratio preference optimisation: imitate and prefer at once, without a reference (TRL's ORPOTrainer)."""

    shorthand = "type"

    type: Literal["orpo"] = "orpo"
    """Odds ratio preference optimisation, on preference pairs (arXiv 2403.07691). Experimental in TRL."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the odds ratio beside the likelihood of the better answer."""

    trainer_args: dict[str, Any] = {}
    """Anything else for TRL's ORPOConfig, by its names. Checked against the fields of the installed version; what
    tunekit sets itself is refused."""


class CPOMethod(Section):
    """Contrastive preference optimisation, and SimPO: without a reference (TRL's CPOTrainer)."""

    shorthand = "type"

    type: Literal["cpo"] = "cpo"
    """Contrastive preference optimisation, on preference pairs (arXiv 2401.08417). Experimental in TRL."""

    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"] = "sigmoid"
    """Loss by TRL's name."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Scale of the log-probabilities in the loss."""

    cpo_alpha: Annotated[float | None, Field(ge=0)] = None
    """Weight of the likelihood of the better answer. Left out: 1, and 0 for simpo and alphapo, which have none."""

    simpo_gamma: Annotated[float, Field(ge=0)] = 0.5
    """Margin that simpo and alphapo ask for."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs that may be the wrong way round. Not for `hinge` and `ipo`."""

    trainer_args: dict[str, Any] = {}
    """Anything else for TRL's CPOConfig, by its names. Checked against the fields of the installed version; what
    tunekit sets itself is refused."""


class RewardMethod(Section):
    """Reward modelling: a score for each answer, higher for the better of two (TRL's RewardTrainer)."""

    shorthand = "type"

    type: Literal["reward"] = "reward"
    """Reward modelling, on preference pairs (Bradley-Terry). The result judges, and does not talk."""

    center_rewards_coefficient: Annotated[float | None, Field(gt=0)] = None
    """How strongly scores are held around 0 (arXiv 2312.09244)."""

    trainer_args: dict[str, Any] = {}
    """Anything else for TRL's RewardConfig, by its names. Checked against the fields of the installed version; what
    tunekit sets itself is refused."""


class GRPOMethod(Section):
    """Group relative policy optimisation: generate answers, prefer the rewarded (TRL's GRPOTrainer)."""

    shorthand = "type"

    type: Literal["grpo"] = "grpo"
    """Group relative policy optimisation, on prompts (arXiv 2402.03300)."""

    rewards: list[Reward] = []
    """What judges answers: rewards that come with tunekit (`exact_match`, or with settings `{type: numeric_match,
    tolerance: 0.01, weight: 2}`), and functions of your own (`my_module:my_function`). Their values are multiplied by
    their weights and summed. Training needs one at least, a plan none."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Answers to each prompt, which are compared with each other. It divides `train.global_batch_size`."""

    max_completion_length: Annotated[int, Field(gt=0)] = 512
    """Longest answer, in tokens. Prompts have what it leaves of `data.max_length`."""

    num_iterations: Annotated[int, Field(gt=0)] = 1
    """Optimizer steps on the same answers before new ones are generated."""

    beta: Annotated[float, Field(ge=0)] = 0.0
    """How strongly the model is held to what it was before training. 0: not at all, and no reference is computed."""

    loss_type: GRPOLoss = "dapo"
    """Loss by TRL's name: `dapo`, `grpo`, `dr_grpo` and `bnpo` differ in what sums are divided by; `cispo`, `sapo`,
    `luspo` and `vespo` in how they limit steps away from the model that gave the answers."""

    importance_sampling_level: Literal["token", "sequence"] = "token"
    """What is compared with the model that gave the answers: each token, or whole answers (GSPO, arXiv 2507.18071)."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What rewards are divided by, once the group's mean is taken away: the spread of the group, of the batch, or
    nothing."""

    epsilon: Annotated[float, Field(gt=0)] = 0.2
    """How far a step may go from the model that gave the answers, as a share, before it counts no more."""

    epsilon_high: Annotated[float | None, Field(gt=0)] = None
    """The same upwards. Left out: `epsilon`. For `cispo` the ratio itself at which tokens count no more, such as 5."""

    mask_truncated_completions: bool = False
    """Leave answers that reach `max_completion_length` out of the loss."""

    generation: GenerationSection = GenerationSection()
    """How answers are generated."""

    trainer_args: dict[str, Any] = {}
    """Anything else for TRL's GRPOConfig, by its names. Checked against the fields of the installed version; what
    tunekit sets itself is refused."""


class RLOOMethod(Section):
    """REINFORCE leave-one-out: generate answers, prefer the rewarded (TRL's RLOOTrainer)."""

    shorthand = "type"

    type: Literal["rloo"] = "rloo"
    """REINFORCE leave-one-out, on prompts (arXiv 2402.14740)."""

    rewards: list[Reward] = []
    """What judges answers: rewards that come with tunekit (`exact_match`, or with settings `{type: numeric_match,
    tolerance: 0.01, weight: 2}`), and functions of your own (`my_module:my_function`). Their values are multiplied by
    their weights and summed. Training needs one at least, a plan none."""

    num_generations: Annotated[int, Field(ge=2)] = 2
    """Answers to each prompt, which are compared with each other. It divides `train.global_batch_size`."""

    max_completion_length: Annotated[int, Field(gt=0)] = 512
    """Longest answer, in tokens. Prompts have what it leaves of `data.max_length`."""

    num_iterations: Annotated[int, Field(gt=0)] = 1
    """Optimizer steps on the same answers before new ones are generated."""

    beta: Annotated[float, Field(ge=0)] = 0.05
    """How strongly the model is held to what it was before training, as a part of the reward. 0: not at all."""

    normalize_advantages: bool = False
    """Divide what answers are preferred by through its spread."""

    epsilon: Annotated[float, Field(gt=0)] = 0.2
    """How far a step may go from the model that gave the answers, as a share, before it counts no more."""

    epsilon_high: Annotated[float | None, Field(gt=0)] = None
    """The same upwards. Left out: `epsilon`."""

    mask_truncated_completions: bool = False
    """Leave answers that reach `max_completion_length` out of the loss."""

    generation: GenerationSection = GenerationSection()
    """How answers are generated."""

    trainer_args: dict[str, Any] = {}
    """Anything else for TRL's RLOOConfig, by its names. Checked against the fields of the installed version; what
    tunekit sets itself is refused."""


class DistillationMethod(Section):
    """Distillation: learn a larger model's probabilities on one's own answers (TRL's DistillationTrainer)."""

    shorthand = "type"

    type: Literal["distillation"] = "distillation"
    """On-policy distillation, on prompts (arXiv 2306.13649)."""

    teacher: ModelSection
    """The model to learn from, of the same vocabulary."""

    max_completion_length: Annotated[int, Field(gt=0)] = 512
    """Longest answer, in tokens. Prompts have what it leaves of `data.max_length`."""

    beta: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Divergence from the teacher: 0 is the forward, 1 the reverse Kullback-Leibler divergence, 0.5 half of each."""

    generation: GenerationSection = GenerationSection()
    """How answers are generated."""

    trainer_args: dict[str, Any] = {}
    """Anything else for TRL's DistillationConfig, by its names. Checked against the fields of the installed version;
    what tunekit sets itself is refused."""


PairMethod = DPOMethod | ORPOMethod | CPOMethod | RewardMethod
"""Methods that learn from preference pairs."""

OnPolicyMethod = GRPOMethod | RLOOMethod | DistillationMethod
"""Methods that learn from answers which the model gives while it is trained."""

RewardedMethod = GRPOMethod | RLOOMethod
"""Those of them whose answers are judged by rewards."""

Method = Annotated[
    SFTMethod
    | DPOMethod
    | KTOMethod
    | ORPOMethod
    | CPOMethod
    | RewardMethod
    | GRPOMethod
    | RLOOMethod
    | DistillationMethod,
    Field(discriminator="type"),
    BeforeValidator(type_alone),
]
"""How it is trained, told apart by `method.type`. `method: sft` is short for `method: {type: sft}`."""
