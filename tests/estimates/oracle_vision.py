"""Allocations of a step on rows with pictures, traced as `oracle` traces those of text.

The whole model runs, its tower too. Token ids, masks and the sizes of pictures are real tensors, since code of towers
branches on their values; weights, pixels and what follows of them have no storage. Pixels count as long as the trainer
holds them: those of all micro-batches of a step are on the device until its end.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import trl.trainer.utils as trl_head
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from tests.estimates.oracle import Trace
from tunekit.estimates.facts import ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import MemoryEstimate, estimate
from tunekit.estimates.memory.pictures import PictureLoad
from tunekit.estimates.memory.states import Dtype
from tunekit.models.documents import tell_documents_apart
from tunekit.models.load import attach_adapter, keep_trained
from tunekit.models.step_trace import LiveBytes, as_on_cuda, materialise, take_batch, watch
from tunekit.models.towers import towers
from tunekit.probe.model import sketch_model
from tunekit.recipe.sections.adapters import Adapter, FullAdapter
from tunekit.recipe.sections.model import ModelSection


@dataclass(frozen=True)
class VisionStep:
    """One training step on pictures to trace.

    Attributes:
        config: The model's config.json.
        adapter: What is trained.
        pictures: Of each row: height and width in patches for Qwen; the number of tiles for others.
        length: Tokens of a row.
        documents: Documents that are packed into the one row.
    """

    config: dict[str, Any]
    adapter: Adapter
    pictures: tuple[tuple[tuple[int, int] | int, ...], ...]
    length: int
    checkpointing: bool = False
    dtype: Dtype = "bfloat16"
    accumulates: bool = False
    trained_dtype: Dtype = "float32"
    documents: int = 1

    @property
    def autocasts(self) -> bool:
        return self.dtype != "float32" and self.trained_dtype == "float32"

    @property
    def batch(self) -> int:
        return len(self.pictures)

    def with_layers(self, num_layers: int) -> "VisionStep":
        config = copy.deepcopy(self.config)
        text = config["text_config"]
        text["num_hidden_layers"] = num_layers
        if text.get("layer_types"):
            text["layer_types"] = text["layer_types"][:num_layers]
        return VisionStep(**{**vars(self), "config": config})


class Values(TorchDispatchMode):
    """Computes for real what depends on real tensors alone, and makes real tensors of whole numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return func(*args, **kwargs)
        if leaves or kwargs.get("dtype") in (torch.int64, torch.int32, torch.bool) or "arange" in str(func):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def inputs_of(step: VisionStep) -> dict[str, torch.Tensor]:
    """The batch that a processor makes."""
    config = step.config
    kind, vision = config["model_type"], config["vision_config"]
    image = config.get("image_token_id", config.get("image_token_index"))
    ids = torch.zeros(step.batch, step.length, dtype=torch.long)
    batch: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    channels, patch = 3, vision["patch_size"]
    if kind in ("qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen2_5_omni_thinker"):
        merge = vision.get("spatial_merge_size", 2) ** 2
        grids = [picture for row in step.pictures for picture in row]
        num = sum(h * w for h, w in grids)
        batch["pixel_values"] = torch.empty(num, channels * vision.get("temporal_patch_size", 2) * patch * patch)
        batch["image_grid_thw"] = torch.tensor([(1, h, w) for h, w in grids])
        kinds = torch.zeros_like(ids)
        for row, pictures in enumerate(step.pictures):
            at = 1
            for h, w in pictures:
                ids[row, at : at + h * w // merge] = image
                kinds[row, at : at + h * w // merge] = 1
                ids[row, at - 1] = config["vision_start_token_id"]
                # The one that ends a picture, and the one that begins the next.
                at += h * w // merge + 2
            assert at <= step.length
        if kind != "qwen2_5_omni_thinker":
            batch["mm_token_type_ids"] = kinds
        return batch
    size = vision["image_size"]
    patches = (size // patch) ** 2
    tiles = [sum(row) for row in step.pictures]
    if kind == "mllama":
        most = vision["max_num_tiles"]
        num_media = max(len(row) for row in step.pictures)
        batch["pixel_values"] = torch.empty(step.batch, num_media, most, channels, size, size)
        batch["aspect_ratio_ids"] = torch.ones(step.batch, num_media, dtype=torch.long)
        batch["aspect_ratio_mask"] = torch.ones(step.batch, num_media, most, dtype=torch.long)
        batch["cross_attention_mask"] = torch.ones(step.batch, step.length, num_media, most, dtype=torch.long)
        ids[:, 1] = image
        return batch
    if kind in ("idefics3", "smolvlm"):
        tokens = patches // config["scale_factor"] ** 2
        batch["pixel_values"] = torch.ones(step.batch, max(tiles), channels, size, size)
        batch["pixel_attention_mask"] = torch.ones(step.batch, max(tiles), size, size, dtype=torch.bool)
    elif kind == "gemma3":
        tokens = config["mm_tokens_per_image"]
        batch["pixel_values"] = torch.empty(sum(tiles), channels, size, size)
    else:
        tokens = patches
        batch["pixel_values"] = torch.empty(sum(tiles), channels, size, size)
    for row, num in enumerate(tiles):
        assert num * tokens < step.length
        ids[row, 1 : 1 + num * tokens] = image
    if kind == "gemma3":
        batch["token_type_ids"] = (ids == image).long()
    return batch


def packed(batch: dict[str, torch.Tensor], step: VisionStep) -> dict[str, torch.Tensor]:
    """A batch of one row as a row of several documents of equal length, if the step asks for it."""
    if step.documents == 1:
        return batch
    assert step.length % step.documents == 0
    positions = torch.arange(step.length // step.documents).repeat(step.documents)[None]
    return {**{name: value for name, value in batch.items() if name != "attention_mask"}, "position_ids": positions}


def trace(step: VisionStep) -> Trace:
    """The live bytes of one step, beside weights and optimizer states."""
    with torch.device("meta"):
        model, base = built(step)
    batches = [packed(inputs_of(step), step) for _ in range(2 if step.accumulates else 1)]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, as_on_cuda():
        materialise(model)
        model.train()
        for batch in batches:
            if step.config["model_type"] not in ("idefics3", "smolvlm"):
                batch["pixel_values"] = fake.from_tensor(batch["pixel_values"])
        trained = [p.nbytes for p in model.parameters() if p.requires_grad]
        tracker = LiveBytes([*model.parameters(), *model.buffers()])
        watch(base, tracker)
        for name in towers(base):
            base.get_submodule(name).register_forward_pre_hook(lambda *_: tracker.enter("pictures"))
        base.get_decoder().register_forward_pre_hook(lambda *_: tracker.enter("forward"))
        with Values(), tracker:
            for batch in batches:
                for tensor in batch.values():
                    tracker._count(tensor.untyped_storage())
            for batch in batches:
                take_batch(model, tracker, batch, getattr(torch, step.dtype) if step.autocasts else None)
            tracker.enter("optimizer")
            tracker.peaks["optimizer"] = tracker.live
        return Trace(tracker.own_bytes, 2 * sum(trained), dict(tracker.peaks))


def built(step: VisionStep) -> tuple[torch.nn.Module, PreTrainedModel]:
    """The model and the one below its adapter."""
    full = isinstance(step.adapter, FullAdapter)
    settings = {key: value for key, value in step.config.items() if key not in ("model_type", "architectures")}
    config = CONFIG_MAPPING[step.config["model_type"]](**copy.deepcopy(settings))
    weights = getattr(torch, step.trained_dtype if full else step.dtype)
    base = AutoModelForImageTextToText.from_config(config, dtype=weights, attn_implementation="sdpa")
    trl_head.add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
    tell_documents_apart(base)
    model: Any = attach_adapter(base, step.adapter, seed=0)
    if not full:
        keep_trained(model)
    if step.checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if not full:
            base.enable_input_require_grads()
    return model, base


def facts_of(step: VisionStep) -> ModelFacts:
    """Facts as a probe reads them from config.json."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(step.config))
        return sketch_model(ModelSection(path=folder))


def estimate_of(step: VisionStep) -> MemoryEstimate:
    """Return the planned memory of a step on an accelerator."""
    facts = facts_of(step)
    masks = step.batch > 1 or step.documents > 1 or (facts.tower is not None and facts.tower.masks_text)
    mask_length = step.length if masks else None
    window = facts.sliding_window
    return estimate(
        facts,
        step.adapter,
        device="cuda",
        dtype=step.dtype,
        optim="adamw_torch_fused",
        trained_dtype=step.trained_dtype,
        num_tokens=step.batch * step.length,
        mask_length=mask_length,
        sliding_mask_length=mask_length or (step.length if window is not None and step.length >= window else None),
        gradient_checkpointing=step.checkpointing,
        accumulates=step.accumulates,
        layout=Layout(),
        devices_per_node=1,
        reserve_share=0.0,
        pictures=PictureLoad(inputs_of(step)["pixel_values"].numel(), 2 if step.accumulates else 1),
    )
