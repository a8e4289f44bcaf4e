"""NeMo Automodel as an engine: its configuration by a plan, and whether that is what runs.

Automodel builds the model, divides it (FSDP2, pipeline and expert parallel), computes losses, gradients and updates,
and writes weights and states. Rows and their order, the learning rate of each step, and what becomes of a run are
tunekit's. Names are those of Automodel 0.7.0 (`nemo_automodel.recipes.llm.train_ft`).
"""

from pathlib import Path
from typing import Any

import yaml

from tunekit.errors import RunError
from tunekit.planner.decisions.backends import families
from tunekit.planner.plan import Plan
from tunekit.runs.small_files import write_whole

ROWS = "tunekit.training.automodel_rows.TokenRows"
"""Import path of the rows that Automodel takes."""

EXPERT_BACKEND = {
    "_target_": "nemo_automodel.components.models.common.BackendConfig",
    "attn": "sdpa",
    "linear": "torch",
    "rms_norm": "torch_fp32",
    "rope_fusion": False,
    "experts": "torch",
    "dispatcher": "torch",
    "enable_hf_state_dict_adapter": True,
}
"""Kernels of Automodel's own classes of mixtures of experts: torch's, so that no package decides what is computed."""


FOLDER = "automodel"
"""Folder of a run that Automodel's configuration and its own logs are in."""


def write_configuration(plan: Plan, run_folder: Path, model_type: str, *, first_step: int = 0) -> dict[str, Any]:
    """Write `automodel/config.yaml` in the folder of a run, and return what it says."""
    sections = configuration(plan, run_folder, model_type, first_step=first_step)
    (run_folder / FOLDER).mkdir(exist_ok=True)
    write_whole(run_folder / FOLDER / "config.yaml", yaml.safe_dump(sections, sort_keys=False))
    return sections


def configuration(plan: Plan, run_folder: Path, model_type: str, *, first_step: int = 0) -> dict[str, Any]:
    """Return the configuration of Automodel's recipe for a run, as plain data.

    Args:
        plan: The plan, with `layout.engine` automodel and a schedule.
        run_folder: The run's folder.
        model_type: Type of the model by its configuration.
        first_step: Steps that were taken before.
    """
    layout, train, schedule = plan.layout, plan.recipe.train, plan.schedule
    assert schedule is not None
    per_step = plan.micro_batch_size * plan.gradient_accumulation_steps
    local = per_step if layout.pp_size > 1 else plan.micro_batch_size
    rows = {"_target_": ROWS, "run_folder": str(run_folder), "tokenizer": None}
    loader = {
        "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
        "shuffle": False,
        "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
    }
    args = plan.recipe.method.trainer_args
    sections: dict[str, Any] = {
        "seed": train.seed,
        "step_scheduler": {
            "global_batch_size": per_step * layout.num_batches,
            "local_batch_size": local,
            "max_steps": schedule.num_steps,
            # Rows of all epochs stand one after another, and checkpoints are made by tunekit.
            "num_epochs": 2,
            "ckpt_every_steps": schedule.num_steps + 1,
            "save_checkpoint_every_epoch": False,
            "validate_on_checkpoint": False,
            "preemption_signal": None,
        },
        "dist_env": {"timeout_minutes": max(1, plan.exchange_timeout_seconds // 60)},
        "model": _model(plan, model_type),
        "distributed": _distributed(plan, model_type),
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "optimizer": {
            "_target_": "torch.optim.AdamW",
            "lr": plan.learning_rate,
            "betas": [args.get("adam_beta1", 0.9), args.get("adam_beta2", 0.999)],
            "eps": args.get("adam_epsilon", 1e-8),
            "weight_decay": train.weight_decay,
        },
        "clip_grad_norm": {"max_norm": train.max_grad_norm},
        "dataset": {**rows, "split": "train", "first_step": first_step},
        "dataloader": loader,
        "checkpoint": {
            "enabled": True,
            "checkpoint_dir": str(run_folder / FOLDER),
            "model_save_format": "safetensors",
            "save_consolidated": "final",
        },
    }
    if plan.data.num_eval:
        sections["validation_dataset"] = {**rows, "split": "eval"}
        sections["validation_dataloader"] = dict(loader)
    return sections


def has_own_class(model_type: str) -> bool:
    """Return whether a model is trained by a class of Automodel's own, which divides experts, in any layout."""
    return model_type in families()["automodel_expert_parallel"]


def _model(plan: Plan, model_type: str) -> dict[str, Any]:
    """Return the section of the model: Transformers' class, or Automodel's own of a family whose experts it divides."""
    section: dict[str, Any] = {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": plan.base.path,
        "torch_dtype": plan.trained_dtype,
        "attn_implementation": plan.attn_implementation,
        "use_liger_kernel": False,
    }
    if plan.base.revision is not None:
        section["revision"] = plan.base.revision
    if plan.router_aux_loss_coef is not None:
        # Automodel's own classes add the gradient of that loss whatever else is set.
        section["router_aux_loss_coef"] = plan.router_aux_loss_coef
    if has_own_class(model_type):
        return section | {"backend": EXPERT_BACKEND}
    return section | {"force_hf": True}


def _distributed(plan: Plan, model_type: str) -> dict[str, Any]:
    layout = plan.layout
    section: dict[str, Any] = {
        "strategy": "fsdp2",
        "dp_size": layout.num_batches,
        "dp_replicate_size": layout.dp_replicate_size,
        "tp_size": 1,
        "cp_size": 1,
        "pp_size": layout.pp_size,
        "ep_size": layout.ep_size,
        "defer_fsdp_grad_sync": not layout.sync_each_batch,
        "reshard_after_forward": layout.reshard_after_forward,
        "activation_checkpointing": plan.gradient_checkpointing,
        "mp_policy": {
            "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
            "param_dtype": plan.dtype,
            "reduce_dtype": plan.reduce_dtype,
            "output_dtype": plan.dtype,
        },
    }
    if layout.pp_size > 1:
        # Automodel's own classes run with some of the layers as they are; forward methods of others are replaced.
        is_replaced = not has_own_class(model_type)
        section["pipeline"] = {
            "pp_schedule": "1f1b",
            "pp_microbatch_size": plan.micro_batch_size,
            # Else there is a buffer for each micro-batch.
            "pp_recv_buffer_pool": True,
            "patch_inner_model": is_replaced,
            "patch_causal_lm_model": is_replaced,
        }
    return section


def verify(recipe: Any, plan: Plan) -> dict[str, Any]:
    """Compare what Automodel has built with the plan.

    Args:
        recipe: Automodel's recipe, after its `setup`.
        plan: The plan.

    Returns:
        What runs, for the `engine` event.

    Raises:
        RunError: It is not what was planned.
    """
    layout, mesh, experts = plan.layout, recipe.device_mesh, recipe.moe_mesh
    parameters = [parameter for part in recipe.model_parts for parameter in part.parameters()]
    states = {
        id(parameter)
        for optimizer in recipe.optimizer
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    planned = {
        "num_processes": layout.num_processes,
        "device": plan.device.kind,
        "pp_size": layout.pp_size,
        "dp_size": layout.num_batches,
        "ep_size": layout.ep_size,
        "trained_dtype": plan.trained_dtype,
        "not_updated": 0,
    }
    actual = {
        "num_processes": recipe.dist_env.world_size,
        "device": parameters[0].device.type,
        "pp_size": mesh["pp"].size() if "pp" in mesh.mesh_dim_names else 1,
        "dp_size": recipe._get_dp_group_size(),
        "ep_size": experts["ep"].size() if experts is not None and "ep" in experts.mesh_dim_names else 1,
        "trained_dtype": ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})),
        "not_updated": sum(parameter.requires_grad and id(parameter) not in states for parameter in parameters),
    }
    for name, value in planned.items():
        if actual[name] != value:
            raise RunError(
                f"NeMo Automodel runs with {name} {actual[name]}, but the plan has {value}",
                hint="use nemo-automodel 0.7.0, and report this with recipe.yaml and plan.yaml of the run",
            )
    return {"engine": "automodel", **actual, "micro_batch_size": plan.micro_batch_size}
