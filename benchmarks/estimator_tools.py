"""Ask public calculators of training memory, each by its own functions, in the environment that has them.

    python benchmarks/estimator_tools.py TOOL < questions.json > answers.json

`benchmarks.estimators` runs this file with the Python of an environment of its own: nothing of these packages is a
dependency of tunekit, and this file imports nothing of tunekit. A question describes one training step; an answer has
bytes, or the reason that the tool cannot answer.

Each tool is given what it takes: sizes from the model's config.json, the exact number of parameters, rows and their
length, checkpointing, attention without stored scores, rank and targets of LoRA, Adam, and the number of devices that
divide the states. A tool that asks for the precision of computing gets that of the step, one that asks for the type of
the weights gets that: full fine-tuning under autocast keeps float32 weights. What a tool cannot be told is a reason
not to answer. Bytes that a tool names apart for the device's context, for fragmentation or for safety are in
`total_bytes`, not in `tensor_bytes`.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

MIB, GIB, GB = 2**20, 2**30, 10**9
MODEL = "local/model"
"""Name of the model of a question, where a tool wants one."""
ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
ALL = (*ATTENTION, "down_proj", "gate_proj", "up_proj")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Question:
    """One training step, in terms that calculators take."""

    config: dict[str, Any]
    """The model's config.json."""
    num_parameters: int
    num_trained: int
    largest_layer: int
    """Most parameters that a single module has."""
    method: Literal["full", "lora", "dora"]
    batch: int
    length: int
    checkpointing: bool
    precision: Literal["bfloat16", "float32"]
    rank: int = 0
    targets: tuple[str, ...] = ()
    trains_tables: bool = False
    """True if embeddings or head are trained next to the adapter."""
    strategy: Literal["single", "fsdp2"] = "single"
    num_shards: int = 1
    """Devices that divide weights, gradients and optimizer states."""
    reshards: bool = True
    """True if weights are freed after the forward pass."""

    @property
    def weights(self) -> str:
        """Type in which most weights are stored."""
        return "float32" if self.method == "full" else self.precision

    @property
    def max_length(self) -> int:
        """Longest row that the model takes, no shorter than those of the step."""
        return max(self.length, self.config.get("max_position_embeddings") or 0)

    @property
    def num_experts(self) -> int:
        """Experts of a layer, 1 in dense models."""
        return next((int(self.config[name]) for name in EXPERTS if self.config.get(name)), 1)

    @property
    def experts_per_token(self) -> int:
        """Experts that a token goes through."""
        return int(self.config.get("num_experts_per_tok") or 1) if self.num_experts > 1 else 1

    @property
    def width(self) -> int:
        """Width of the MLP, of one expert where there are several."""
        return int(self.config.get("moe_intermediate_size") or self.config["intermediate_size"])


@dataclass(frozen=True)
class Answer:
    """Bytes on one device, or why there are none."""

    tensor_bytes: int | None = None
    total_bytes: int | None = None
    """With context, fragmentation and safety, where the tool adds them."""
    no_logits_bytes: int | None = None
    """Bytes of tensors without the logits of all tokens, where the tool names these."""
    reason: str | None = None


class Unanswerable(Exception):
    """A property of a step that a tool cannot be told."""


Tool = Callable[[Question], Answer]


def short(name: str) -> str:
    """Return the short name of a type."""
    return {"bfloat16": "bf16", "float32": "fp32"}[name]


def require(question: Question, *methods: str, devices: bool = False, tables: bool = False) -> None:
    """Refuse steps that a tool has no words for.

    Args:
        question: The step.
        methods: Methods of training that the tool knows.
        devices: True if it knows states that devices divide.
        tables: True if it knows trained embeddings beside an adapter.

    Raises:
        Unanswerable: A property that the tool cannot be told.
    """
    if question.strategy != "single" and not devices:
        raise Unanswerable("FSDP2")
    if question.method not in methods:
        raise Unanswerable({"full": "full fine-tuning", "lora": "LoRA", "dora": "DoRA"}[question.method])
    if question.trains_tables and not tables:
        raise Unanswerable("trained embeddings beside LoRA")


def fitcheck(question: Question) -> Answer:
    """Ask fitcheck-llm: dense models on one device."""
    require(question, "full", "lora")

    from fitcheck.config_parser import fetch_model_config
    from fitcheck.estimator import TrainingConfig, activation_breakdown, estimate
    from fitcheck.gpu_db import get_gpu

    # It reads the hub's cache without network, and takes the hub's number of parameters where it can ask.
    model = replace(fetch_model_config(in_hub_cache(question)), num_params=question.num_parameters)
    training = TrainingConfig(
        precision=short(question.precision),
        optimizer="adamw",
        batch_size=question.batch,
        seq_len=question.length,
        lora_rank=None if question.method == "full" else question.rank,
        lora_targets=list(question.targets or ALL),
        grad_checkpoint=question.checkpointing,
        flash_attn=True,
    )
    report = estimate(model, training, get_gpu("h200"))
    tensors = report.total_mib - report.overhead_mib
    parts = activation_breakdown(model, training)
    if question.checkpointing:
        layers = parts["checkpoint_store_mib"] + parts["layer_mib"]
    else:
        layers = parts["all_layers_mib"] - parts["logits_mib"]
    no_logits = tensors - report.activation_mib + layers
    return Answer(round(MIB * tensors), round(MIB * report.total_mib), round(MIB * no_logits))


def canifinetune(question: Question) -> Answer:
    """Ask canifinetune, which has weights in the type of computing, for one device."""
    require(question, "full", "lora")

    from canifinetune.estimator.memory import EstimateRequest, estimate

    if question.weights != question.precision:
        raise Unanswerable("float32 weights under bfloat16 autocast")
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    sizes = {name: question.config[name] for name in (*names, "tie_word_embeddings")}
    sizes |= {"num_local_experts": question.num_experts, "num_experts_per_tok": question.experts_per_token}
    sizes |= {"intermediate_size": question.width, "total_params": question.num_parameters}
    scopes = {("q_proj", "v_proj"): "conservative", ATTENTION: "attention", ALL: "all_linear", (): "attention"}
    request = EstimateRequest(
        model_id=MODEL,
        override={**sizes, "family": question.config["model_type"]},
        use_network=False,
        gpu_vram_gb=141,
        method=question.method,
        base_dtype=short(question.precision),
        micro_batch_size=question.batch,
        seq_len=question.length,
        lora_rank=question.rank or 1,
        lora_target_scope=scopes[question.targets],
        optimizer="adamw_torch_fused",
        gradient_checkpointing=question.checkpointing,
        attention_implementation="sdpa",
    )
    memory = estimate(request).memory
    total = memory.total_estimated_gb
    tensors = total - memory.cuda_overhead_gb - memory.safety_margin_gb
    return Answer(round(GIB * tensors), round(GIB * total), round(GIB * (tensors - memory.logits_gb)))


def ftuneai(question: Question) -> Answer:
    """Ask ftuneai, which divides states as FSDP does."""
    require(question, "full", "lora", devices=True)

    from ftuneai.core import memory, models

    scopes = {("q_proj", "v_proj"): "attention", ATTENTION: "attention_all", ALL: "all_linear", (): "all_linear"}
    sharding = {True: "fsdp", False: "fsdp_shard_grad"}[question.reshards]
    spec = models.ModelSpec(
        name=MODEL,
        parameters=question.num_parameters,
        hidden_size=question.config["hidden_size"],
        num_layers=question.config["num_hidden_layers"],
        num_attention_heads=question.config["num_attention_heads"],
        num_kv_heads=question.config["num_key_value_heads"],
        intermediate_size=question.width,
        vocab_size=question.config["vocab_size"],
        max_seq_length=question.max_length,
        default_dtype=question.weights,
        is_moe=question.num_experts > 1,
        num_experts=question.num_experts,
        num_active_experts=question.experts_per_token,
    )
    training = models.TrainingConfig(
        method=models.FineTuneMethod(question.method),
        batch_size=question.batch,
        seq_length=question.length,
        gradient_checkpointing=question.checkpointing,
        optimizer=models.OptimizerType.ADAMW,
        lora_rank=question.rank,
        lora_target=models.LoRATarget(scopes[question.targets]),
        flash_attention=True,
        sharding=models.ShardingStrategy(sharding if question.strategy == "fsdp2" else "none"),
        num_gpus=question.num_shards,
    )
    total = memory.MemoryEstimator(spec, training).estimate().total_gb
    return Answer(round(GIB * total / (1 + memory.CUDA_OVERHEAD_FRACTION)), round(GIB * total))


def gpu_estimator(question: Question) -> Answer:
    """Ask gpu-estimator: full fine-tuning by number of parameters. It chooses the number of devices itself."""
    require(question, "full")

    from gpu_estimator.estimator import GPUEstimator

    result = GPUEstimator().estimate(
        model_params=question.num_parameters,
        batch_size=question.batch,
        sequence_length=question.length,
        precision=short(question.precision),
        optimizer="adamw",
        gradient_checkpointing=question.checkpointing,
    )
    states = result.model_memory_gb + result.gradient_memory_gb + result.optimizer_memory_gb
    return Answer(round(GIB * (states + result.activation_memory_gb)), round(GIB * result.total_memory_gb))


def hf_vram_calc(question: Question) -> Answer:
    """Ask hf-vram-calc: a factor on the weights."""
    require(question, "full", "lora")

    from hf_vram_calc.calculator import VRAMCalculator
    from hf_vram_calc.config import ConfigManager

    calculator = VRAMCalculator(ConfigManager())
    weights = calculator.calculate_model_memory(question.num_parameters, short(question.weights))
    if question.method == "full":
        total = calculator.calculate_training_memory(weights)
    else:
        total = calculator.calculate_lora_memory(weights, question.num_parameters, question.rank)
    # Its factors of 1.3 and 1.2 stand for activations too.
    return Answer(round(GIB * total), round(GIB * total))


def llm_analysis(question: Question) -> Answer:
    """Ask llm-analysis: pretraining in mixed precision, with ZeRO."""
    require(question, "full", devices=True)

    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig, ParallelismConfig

    bits = {"bfloat16": 16, "float32": 32}[question.precision]
    hidden = question.config["hidden_size"]
    model = ModelConfig(
        name=MODEL,
        num_layers=question.config["num_hidden_layers"],
        n_head=question.config["num_attention_heads"],
        hidden_dim=hidden,
        vocab_size=question.config["vocab_size"],
        max_seq_len=question.max_length,
        num_key_value_heads=question.config["num_key_value_heads"],
        ffn_embed_dim=question.width,
        expansion_ratio=question.width / hidden,
        model_type=question.config["model_type"],
        moe_num_experts=question.num_experts,
        moe_top_k=question.experts_per_token,
    )
    device = GPUConfig(MODEL, 10**6, 4800, 450, 8e-6, 989)
    types = DtypeConfig(MODEL, weight_bits=bits, activation_bits=bits, embedding_bits=bits)
    devices = ParallelismConfig(dp_size=question.num_shards)
    zero = (DSZeRO.STAGE_3 if question.reshards else DSZeRO.STAGE_2) if question.strategy == "fsdp2" else DSZeRO.NONE
    result = LLMAnalysis(model, device, types, devices).training(
        batch_size_per_gpu=question.batch,
        gradient_accumulation_steps=1,
        seq_len=question.length,
        activation_recomputation=ActivationRecomputation.FULL
        if question.checkpointing
        else ActivationRecomputation.NONE,
        ds_zero=zero,
        flash_attn=True,
        mlp_gated_linear_units=True,
    )
    size = round(result["(weight+op_state+grad+act)_memory_per_gpu"])
    return Answer(size, size, size - round(result["activation_memory_embedding_output_per_gpu"]))


def ml_memguard(question: Question) -> Answer:
    """Ask ml-memguard, for one device."""
    require(question, "full", "lora", "dora")

    from memory_guard.estimator import FinetuneMethod, ModelArch, ModelSpec, TrainSpec, estimate_training_memory

    model = ModelSpec(
        params=question.num_parameters,
        hidden_dim=question.config["hidden_size"],
        num_heads=question.config["num_attention_heads"],
        num_kv_heads=question.config["num_key_value_heads"],
        num_layers=question.config["num_hidden_layers"],
        intermediate_dim=question.width,
        bits={"bfloat16": 16, "float32": 32}[question.weights],
        arch=ModelArch.MOE if question.num_experts > 1 else ModelArch.DENSE,
        num_experts=question.num_experts,
        num_active_experts=question.experts_per_token,
    )
    training = TrainSpec(
        method=FinetuneMethod(question.method),
        batch_size=question.batch,
        seq_length=question.length,
        lora_rank=question.rank or 1,
        lora_layers=question.config["num_hidden_layers"],
        lora_targets=len(question.targets) or len(ALL),
        optimizer="adamw",
        grad_checkpoint=question.checkpointing,
        mixed_precision=question.precision != "float32",
        flash_attention=True,
    )
    result = estimate_training_memory(model, training)
    return Answer(round(MIB * (result.total_mb - result.overhead_mb)), round(MIB * result.total_mb))


def mlsysim(question: Question) -> Answer:
    """Ask mlsysim, with ZeRO's stages for FSDP2."""
    # A share of the parameters that is trained describes any adapter.
    require(question, "full", "lora", "dora", devices=True, tables=True)

    from mlsysim import Hardware, ureg
    from mlsysim.engine.solvers.training import TrainingMemoryModel
    from mlsysim.models.types import TransformerWorkload

    model = TransformerWorkload(
        name=MODEL,
        architecture=question.config["model_type"],
        parameters=ureg.Quantity(question.num_parameters, "count"),
        layers=question.config["num_hidden_layers"],
        hidden_dim=question.config["hidden_size"],
        heads=question.config["num_attention_heads"],
        kv_heads=question.config["num_key_value_heads"],
    )
    stages = {True: 3, False: 2}
    result = TrainingMemoryModel().solve(
        model,
        Hardware.Cloud.H200,
        batch_size=question.batch * question.num_shards,
        seq_len=question.length,
        precision=short(question.precision),
        optimizer="adamw",
        # Its "selective" is without stored attention scores, as with flash kernels.
        activation_checkpointing="full" if question.checkpointing else "selective",
        dp_size=question.num_shards,
        zero_stage=stages[question.reshards] if question.strategy == "fsdp2" else 0,
        trainable_fraction=min(1.0, question.num_trained / question.num_parameters),
        communication_buffer_fraction=0.05 if question.strategy == "fsdp2" else 0.0,
    )
    size = round(GB * result.total_memory.to("GB").magnitude)
    return Answer(size, size)


def qmemcalc(question: Question) -> Answer:
    """Ask qmemcalc, for one device."""
    # It takes the number of trained parameters, whatever they are.
    require(question, "full", "lora", "dora", tables=True)

    from qmemcalc import estimate_memory

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(question.config), encoding="utf-8")
        parts = estimate_memory(
            folder,
            batch_size=question.batch,
            seq_len=question.length,
            lora_r=question.rank,
            precision=short(question.weights),
            optimizer="adamw",
            num_trainable_params=question.num_trained,
            gradient_checkpointing=question.checkpointing,
        )
    return Answer(round(1e6 * (parts["total_MB"] - parts["buffers_MB"])), round(1e6 * parts["total_MB"]))


TOOLS: dict[str, Tool] = {
    "fitcheck-llm": fitcheck,
    "canifinetune": canifinetune,
    "ftuneai": ftuneai,
    "mlsysim": mlsysim,
    "llm-analysis": llm_analysis,
    "ml-memguard": ml_memguard,
    "gpu-estimator": gpu_estimator,
    "hf-vram-calc": hf_vram_calc,
    "qmemcalc": qmemcalc,
}
"""Calculators by the names of their packages."""


def in_hub_cache(question: Question) -> str:
    """Write the model's config.json to the hub's cache, and return the name under which it is found there."""
    folder = Path(os.environ["HF_HUB_CACHE"]) / f"models--{MODEL.replace('/', '--')}"
    revision = "0" * 40
    for path, text in (
        (folder / "refs" / "main", revision),
        (folder / "snapshots" / revision / "config.json", json.dumps(question.config)),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return MODEL


def answer(tool: Tool, question: Question) -> Answer:
    """Ask one tool, and take an error of its own for a refusal."""
    try:
        return tool(question)
    except Unanswerable as error:
        return Answer(reason=str(error))
    except (ValueError, AssertionError) as error:
        sentence = str(error).partition(". ")[0].partition(" (")[0]
        return Answer(reason=f"refused: {sentence.replace(MODEL, 'model')}")


def main() -> None:
    """Answer the questions of the standard input."""
    tool = TOOLS[sys.argv[1]]
    questions = [Question(**{**entry, "targets": tuple(entry["targets"])}) for entry in json.load(sys.stdin)]
    # Some of them print.
    with contextlib.redirect_stdout(sys.stderr):
        answers = [asdict(answer(tool, question)) for question in questions]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
