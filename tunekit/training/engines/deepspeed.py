"""DeepSpeed as a plan has it: what its engine is told, whether that is what runs, and the state of it in one piece.

Nothing is left to `auto`: the numbers of the configuration are those that the plan's memory estimate was made with.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from peft.utils import ModulesToSaveWrapper
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import Trainer
from transformers.integrations import HfDeepSpeedConfig

from tunekit.estimates.memory.memory import Part
from tunekit.estimates.memory.sharding import SUB_GROUP_PARAMS
from tunekit.planner.plan import Plan
from tunekit.recipe.sections.adapters import FullAdapter


def join(plan: Plan) -> None:
    """Have DeepSpeed take over the process group that is there, before anything of its own is made.

    On a processor it would compile sums over shared memory for that, for half a minute, which only its inference uses
    (deepspeed 0.19, `TorchBackend`). What it may compile stands in a table that is there to be edited.
    """
    import deepspeed

    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__ or plan.device.kind == "cuda"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if plan.device.kind == "cuda" else "gloo"
    deepspeed.init_distributed(backend, timeout=timedelta(seconds=plan.exchange_timeout_seconds), verbose=False)


def trainer_args(plan: Plan) -> dict[str, Any]:
    """Arguments of TRL's config that choose DeepSpeed and divide sequences."""
    layout = plan.layout
    args = {"deepspeed": config(plan), "ddp_timeout": plan.exchange_timeout_seconds}
    if layout.sp_size == 1:
        return args
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation=plan.attn_implementation
    )
    sequences = ParallelismConfig(
        dp_shard_size=layout.dp_shard_size, sp_backend="deepspeed", sp_size=layout.sp_size, sp_handler=handler
    )
    return {**args, "parallelism_config": sequences, "pad_to_multiple_of": plan.pad_to_multiple_of}


def config(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's configuration of a plan. Accelerate works out the batch of a step from the rest."""
    assert plan.zero_buckets is not None, plan.layout
    stage = int(plan.layout.strategy[-1])
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": plan.zero_buckets.reduced}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": plan.zero_buckets.prefetched,
            "stage3_param_persistence_threshold": plan.zero_buckets.persistent,
            "sub_group_size": SUB_GROUP_PARAMS,
            # A checkpoint holds a model that can be loaded as it is, besides what is divided.
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    layout = plan.layout
    devices = {"offload_param": layout.offload_param_device, "offload_optimizer": layout.offload_optimizer_device}
    for what, where in devices.items():
        if where != "none":
            zero[what] = {"device": where, "pin_memory": plan.device.kind == "cuda"}
        if where == "nvme":
            zero[what]["nvme_path"] = plan.recipe.parallel.nvme_path
    return {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "gradient_clipping": plan.recipe.train.max_grad_norm,
        "bf16": {"enabled": plan.autocast and plan.dtype == "bfloat16"},
        # The recipe's optimizer takes its steps wherever the states are.
        "zero_force_ds_cpu_optimizer": False,
        "fp16": {"enabled": plan.autocast and plan.dtype == "float16"},
    }


def cast_trained(trainer: Trainer, plan: Plan) -> None:
    """Give ZeRO-3 all that is trained in the type of the products, where modules are trained whole beside an adapter.

    PEFT keeps them in float32, and without autocast, which DeepSpeed has none of for `bf16` (0.19), they would return
    float32 to 16-bit layers that do not take it. The optimizer keeps float32 copies, of parameters of one type.
    """
    if plan.layout.strategy != "zero3" or not plan.autocast:
        return
    if not any(isinstance(module, ModulesToSaveWrapper) for module in trainer.model.modules()):
        return
    for parameter in trainer.model.parameters():
        if parameter.requires_grad and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(getattr(torch, plan.dtype))


class EachEpoch:
    """Divided rows that begin anew with every epoch.

    DeepSpeed's loader stays at the end of the first one: the first step of the second has no rows, and is left out
    without a word (deepspeed 0.19, `UlyssesSPDataLoaderAdapter`).

    Args:
        rows: The loader of the rows.
        divide: Makes a loader of their parts, from the beginning.
    """

    def __init__(self, rows: Any, divide: Callable[[], Iterator[Any]]) -> None:
        self.rows = rows
        self.divide = divide

    def __iter__(self) -> Iterator[Any]:
        return self.divide()

    def set_epoch(self, epoch: int) -> None:
        """Tell a stream which epoch begins."""
        self.rows.set_epoch(epoch)


def divide_every_epoch(trainer: Trainer) -> None:
    """Have every epoch of a trainer begin at its beginning, where its sequences are divided."""
    accelerator = trainer.accelerator
    adapt = accelerator.deepspeed_ulysses_dl_adapter
    accelerator.deepspeed_ulysses_dl_adapter = lambda rows, model: EachEpoch(rows, lambda: adapt(rows, model))


@contextmanager
def loading(plan: Plan) -> Iterator[None]:
    """While a model is loaded: ZeRO-3 divides each weight as soon as it is read, and PEFT gathers what it looks at."""
    # It is known to transformers as long as somebody holds it.
    ds_config = HfDeepSpeedConfig(config(plan))
    yield
    del ds_config


def open_states_as_data(trainer: Trainer) -> None:
    """Have the engine that a trainer's model will get open its checkpoints without running what they name.

    It opens them as pickles (deepspeed 0.19, `TorchCheckpointEngine.load`).
    """
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    from tunekit.training.checkpointing.safe_load import load_states

    accelerator = trainer.accelerator
    prepare = accelerator.prepare

    def prepared(*given: Any, **how: Any) -> Any:
        result = prepare(*given, **how)
        # None while rows are all that is prepared.
        if accelerator.deepspeed_engine_wrapped is not None:
            states = accelerator.deepspeed_engine_wrapped.engine.checkpoint_engine
            assert type(states) is TorchCheckpointEngine and callable(states.load), type(states)
            states.load = load_states
        return result

    accelerator.prepare = prepared


def found(trainer: Trainer, plan: Plan) -> dict[str, Any]:
    """Return the running configuration, by the names of the `engine` event, and misplaced and updated parameters."""
    from deepspeed import DeepSpeedEngine

    engine = trainer.model_wrapped
    assert isinstance(engine, DeepSpeedEngine), type(engine)
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    named = list(engine.module.named_parameters())
    size, sequences = engine.seq_dp_world_size, engine.sequence_parallel_size
    if stage == 3:
        groups, masters = optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat
        sizes = {name: (parameter.ds_tensor.ds_numel, parameter.ds_numel) for name, parameter in named}
        misplaced = [name for name, (part, whole) in sizes.items() if part != -(-whole // size)]
        local_share = sum(part for part, _ in sizes.values()) / sum(whole for _, whole in sizes.values())
    else:
        groups, masters = optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups
        misplaced = []
        trained = sum(parameter.numel() for _, parameter in named if parameter.requires_grad)
        local_share = sum(master.numel() for master in masters) / trained
    param, states = engine.zero_offload_param(), engine.zero_offload_optimizer()
    computed, _ = engine.get_data_types()
    optimizer_class, _ = trainer.get_optimizer_cls_and_kwargs(trainer.args)
    mesh = {"dp_shard": size // sequences, "sp": sequences}
    return {
        "engine": f"zero{stage}",
        "mesh": {name: number for name, number in mesh.items() if number > 1},
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "trained_dtype": [master.dtype for master in masters],
        "compute_dtype": [computed],
        "reduce_dtype": [engine.communication_data_type],
        "optimizer": type(engine.basic_optimizer).__name__,
        "is_recipes_optimizer": type(engine.basic_optimizer) is optimizer_class,
        "offload_param_device": "none" if param is None else param.device,
        "offload_optimizer_device": "none" if states is None else states.device,
        # Of all weights in stage 3; below, of the float32 copies that the optimizer updates.
        "local_share": round(local_share, 4),
        "misplaced": misplaced,
        "updated": [parameter for group in groups for parameter in group],
    }


def held(trainer: Trainer, plan: Plan) -> "dict[Part, list[Tensor]]":
    """Return the tensors that this process holds on its device from step to step.

    Gradients of stages 1 and 2 are not among it: when the trainer says that a step was taken they are gone.
    """
    engine = trainer.model_wrapped
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    full = isinstance(plan.recipe.adapter, FullAdapter)
    if engine.zero_optimization_stage() == 3:
        masters, gradients = optimizer.fp32_partitioned_groups_flat, [optimizer.grad_partitions_flat_buffer]
        # Small ones stay whole besides their parts.
        stored = {parameter: [parameter.ds_tensor, parameter.detach()] for parameter in parameters}
    else:
        masters, gradients = optimizer.single_partition_of_fp32_groups, []
        stored = {parameter: [parameter.detach()] for parameter in parameters}
    states = [value for states in engine.basic_optimizer.state.values() for value in states.values()]
    adapters = [] if full else [parameter for parameter in parameters if parameter.requires_grad]
    weights = [parameter for parameter in parameters if full or not parameter.requires_grad]
    parts: dict[Part, list[Tensor]] = {
        "weights": [tensor for parameter in weights for tensor in stored[parameter]],
        "adapters": [tensor for parameter in adapters for tensor in stored[parameter]],
        "masters": masters,
        "gradients": gradients,
        "optimizer": [state for state in states if not isinstance(state, (int, float))],
    }
    kind = plan.device.kind
    return {part: [tensor for tensor in tensors if tensor.device.type == kind] for part, tensors in parts.items()}


def write_through(trainer: Trainer, write: Callable[[Callable[[Any, str], None], Any, str], None]) -> None:
    """Have an engine write its files through a function, which is given its own, the states and the path.

    DeepSpeed can write in another process itself, which is not used: that one ends with the next update of the weights
    at the latest, needs asynchronous access to the disk that is compiled at first use, and leaves a file out without a
    word where the process is gone (deepspeed 0.19, `DecoupledCheckpointEngine`).

    It writes neither its scripts into a checkpoint nor the name of the folder that it took, which `write_latest` does:
    both are written by the main process alone between exchanges of all.
    """
    engine = trainer.model_wrapped
    files, save = engine.checkpoint_engine, engine.checkpoint_engine.save
    files.save = lambda state_dict, path: write(save, state_dict, path)
    engine._copy_recovery_script = lambda save_path: None
    engine.save_checkpoint = functools.partial(engine.save_checkpoint, save_latest=False)


def write_latest(trainer: Trainer, folder: Path) -> None:
    """Write where DeepSpeed's states are in a checkpoint, for its loading."""
    (folder / "latest").write_text(f"global_step{trainer.model_wrapped.global_steps}", encoding="utf-8")


def forget_order(trainer: Trainer) -> None:
    """Make ZeRO-3 forget in which order the modules ran, after passes that are not those of training.

    It gathers weights ahead of their use by that order. TRL's fused head takes the weight of the head and calls no
    module, so that one that was gathered ahead would be gathered twice (deepspeed 0.19, trl 1.16: an assertion).
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    models = [trainer.model_wrapped, *(vars(trainer).get(name) for name in ("ref_model", "teacher_model"))]
    for engine in [model for model in models if model is not None]:
        is_frozen = isinstance(engine.optimizer, DeepSpeedZeRoOffload)
        offload = engine.optimizer if is_frozen else engine.optimizer.parameter_offload
        coordinator = offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()


def full_state(trainer: Trainer, plan: Plan) -> dict[str, Tensor]:
    """The weights to save, whole and in the main memory of the main process; nothing elsewhere. Called by all together.

    One weight after the other is put together, so that no device ever holds the whole model. Of what is trained it is
    the float32 weight that the optimizer updates. Of a model with an adapter it is the adapter alone.
    """
    model: Module = trainer.model
    parameters = dict(model.named_parameters(remove_duplicate=False))
    full, is_main = isinstance(plan.recipe.adapter, FullAdapter), trainer.accelerator.is_main_process
    wholes: dict[Parameter, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        parameter = parameters.get(name)
        if parameter is None:
            state[name] = tensor.cpu()
        elif full or parameter.requires_grad:
            if parameter not in wholes:
                wholes[parameter] = _whole(parameter, keep=is_main)
            state[name] = wholes[parameter]
    return state if is_main else {}


def _whole(parameter: Parameter, *, keep: bool) -> Tensor:
    """A parameter in one piece, empty where it is not kept."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter.requires_grad:
        whole: Tensor = safe_get_full_fp32_param(parameter)
        return whole.cpu() if keep else whole.new_empty(0, device="cpu")
    with GatheredParameters([parameter]):
        return parameter.detach().to("cpu", copy=True) if keep else parameter.detach().new_empty(0, device="cpu")
