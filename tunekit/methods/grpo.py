"""Group relative policy optimization through TRL's GRPOTrainer, which generates answers and scores them by rewards."""

from contextlib import ExitStack
from dataclasses import replace

from tunekit.methods.arguments import Parts
from tunekit.methods.generation import rewarded_trainer
from tunekit.methods.rollouts.async_rollouts import AsyncRollouts
from tunekit.methods.rollouts.dynamic_sampling import DynamicSampling
from tunekit.methods.rollouts.groups import Groups
from tunekit.methods.rollouts.replay import ReplayBuffer
from tunekit.methods.run_trainer import RunTrainer
from tunekit.methods.tool_use import ToolUse, follow_turns, tool_use
from tunekit.recipe.methods.grpo import GRPOMethod


def build(method: GRPOMethod, parts: Parts) -> RunTrainer:
    """A trainer over prompts.

    Args:
        method: The groups, and what else goes to GRPOConfig.
        parts: All else. Rows have a column `prompt` of texts or messages, and others for the rewards.
    """
    use = tool_use(method, parts)
    with ExitStack() as started:
        started.callback(use.close)
        trainer = _build(method, parts, use)
        started.pop_all()
    return trainer


def _build(method: GRPOMethod, parts: Parts, use: ToolUse) -> RunTrainer:
    from trl import GRPOConfig, GRPOTrainer

    parts = replace(parts, train_dataset=use.rows(parts.train_dataset), eval_dataset=use.rows(parts.eval_dataset))
    trainer = rewarded_trainer(
        GRPOTrainer,
        GRPOConfig,
        method,
        parts,
        use.arguments,
        max_tool_calling_iterations=method.max_tool_calling_iterations,
        loss_type=method.loss_type,
        importance_sampling_level=method.importance_sampling_level,
        scale_rewards=method.scale_rewards,
    )
    follow_turns(trainer, use, method, divides_weights=parts.plan.layout.divides_weights)
    seed, pad = parts.train.seed, parts.tokenizer.pad_token_id
    groups = Groups(trainer) if method.resamples or method.replays else None
    if groups is not None and method.resamples:
        DynamicSampling(trainer, groups, method.max_resample_times, seed, pad)
    if groups is not None and method.replays:
        ReplayBuffer(trainer, groups, method.replay_buffer_size, seed, pad)
    if method.max_staleness:
        AsyncRollouts(trainer, method.max_staleness)
    return trainer
