"""Initial adapters that take more than the base weights: rows to train on, or the weights before quantization.

EVA (arXiv 2410.07170) begins with the main directions of a module's inputs, of which it takes more where they explain
more; CorDA (arXiv 2406.05223) with parts of a weight that matter for its inputs. Both are PEFT's. Every process sees
the same rows, and so gets the same matrices. LoftQ (arXiv 2310.08659) begins with what is lost by 4 bits: the base
stays the one of QLoRA, which is the first of its iterations (PEFT's default).
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import EvaConfig, LoraConfig, get_eva_state_dict, initialize_lora_eva_weights
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.config import CordaConfig
from torch import Tensor

from tunekit.errors import DataError, ModelError
from tunekit.models.base_parts import add, keep_initial
from tunekit.recipe.sections.adapters import LoraAdapter, QloraAdapter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

IGNORED = EvaConfig.label_mask_value
"""Label of a token that does not count in the loss, which EVA does not see."""

MAX_PASSES = 100
"""Passes over the rows within which EVA's directions have to settle."""


@dataclass(frozen=True)
class Document:
    """Tokens that see each other, and their labels."""

    ids: list[int]
    labels: list[int]

    @property
    def num_counted(self) -> int:
        """Number of tokens that count in the loss."""
        return sum(label != IGNORED for label in self.labels)


@dataclass(frozen=True)
class Sources:
    """Sources of initial matrices, read where they are needed."""

    documents: Callable[[], list[Document]]
    weights: "Callable[[], PreTrainedModel]"
    """The base on the CPU, not quantized."""


def draw(rows: Sequence[Mapping[str, list[int]]], num: int, seed: int) -> list[Document]:
    """Draw prepared rows by a seed, and return their documents, of which packed rows have several."""
    documents = []
    for index in sorted(random.Random(seed).sample(range(len(rows)), min(num, len(rows)))):
        row, start = rows[index], 0
        for length in row.get("seq_lengths") or [len(row["input_ids"])]:
            part = slice(start, start + length)
            documents.append(Document(row["input_ids"][part], row["labels"][part]))
            start += length
    return documents


def prepare(
    model: "PreTrainedModel", adapter: LoraAdapter, config: LoraConfig, names: list[str], sources: Sources
) -> None:
    """Prepare a base and a configuration for the initial matrices of an adapter, before it is attached."""
    if adapter.init_lora_weights == "corda":
        see_inputs(model, adapter, config, names, sources.documents())
    elif adapter.init_lora_weights == "eva":
        config.init_lora_weights, config.eva_config = "eva", EvaConfig(rho=adapter.rho)


def begin(model: "PeftModel", adapter: LoraAdapter, sources: Sources) -> None:
    """Give a new adapter its initial matrices, once it is attached."""
    if adapter.init_lora_weights == "corda":
        begin_by_parts(model)
        keep_initial(model)
    elif adapter.init_lora_weights == "eva":
        begin_by_inputs(model, adapter, sources.documents())
    elif adapter.init_lora_weights == "loftq":
        begin_by_loss(model, sources.weights())


def see_inputs(
    model: "PreTrainedModel", adapter: LoraAdapter, config: LoraConfig, names: list[str], documents: list[Document]
) -> None:
    """Give modules what CorDA takes of them, from all tokens of documents, as PEFT's `preprocess_corda` does.

    That keeps two whole factors of every weight in host memory until all are there; here they are cut one by one.

    Args:
        model: The base.
        adapter: The section.
        config: Its configuration in PEFT.
        names: Names of the modules to adapt.
        documents: Rows to see.
    """
    from peft.tuners.lora.corda import calib_cov_distribution, collect_eigens_for_layer, crop_corda_eigens

    decoder, device, was_training = model.get_decoder(), model.device, model.training
    config = copy(config)
    config.target_modules, config.corda_config = set(names), CordaConfig(corda_method=adapter.corda_method)

    def run() -> None:
        for document in documents:
            decoder(input_ids=torch.tensor([document.ids], device=device), use_cache=False)

    calib_cov_distribution(model, config, run, None, None)
    for name in names:
        module = cast(Any, model.get_submodule(name))
        config.target_modules = {name}
        module.rank, module.corda_method = adapter.rank_of(name), adapter.corda_method
        module.eigens = collect_eigens_for_layer(module, config)
        del module.covariance_matrix, module.sample_count
        crop_corda_eigens(model, config)
        del module.rank, module.corda_method
    model.train(was_training)


@torch.no_grad()
def begin_by_parts(model: "PeftModel") -> None:
    """Give a new adapter CorDA's parts of the weights, in float32, and take them out of the base.

    PEFT rounds the matrices to the type of the base once it has taken their product out, which nobody can repeat.
    """
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        layer = cast(Any, module)
        linear = layer.get_base_layer()
        eigens = linear.eigens
        del linear.eigens
        roots = (eigens.S_WC / layer.scaling["default"]).sqrt()
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        a.copy_(eigens.V_WC.t().mul(roots.view(-1, 1)))
        b.copy_(eigens.U_WC.mul(roots))
        add(module, (a, -b))


def begin_by_inputs(model: "PeftModel", adapter: LoraAdapter, documents: list[Document]) -> None:
    """Give a new adapter EVA's matrices A and ranks, from the tokens of documents that count in the loss.

    Raises:
        DataError: The documents have too few tokens, or the directions do not settle.
    """
    least = round(max(adapter.rank, *(adapter.rank_pattern or {}).values(), 0) * adapter.rho)
    batches = list(_batches(documents, least))
    decoder, num_passes = model.get_base_model().get_decoder(), 0

    def forward(_model: Any, inputs: dict[str, Tensor]) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes > MAX_PASSES * len(batches):
            raise DataError(
                f"adapter.init_lora_weights: the inputs of modules on {len(documents)} documents have fewer than "
                f"{least} stable directions",
                hint="raise adapter.num_init_rows, or lower adapter.rank or adapter.rho",
            )
        decoder(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False)

    state = get_eva_state_dict(
        model, batches, forward_fn=forward, gather_distributed_inputs=False, show_progress_bar=False
    )
    directions = dict(state)
    initialize_lora_eva_weights(model, eva_state_dict=state)
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            # PEFT makes the matrices of another rank in the type of the base.
            cast(Any, module).lora_A.float().default.weight.data.copy_(directions[name])
            cast(Any, module).lora_B.float()
    config = cast(Any, model.peft_config["default"])
    config.init_lora_weights, config.eva_config = True, None


def _batches(documents: list[Document], least: int) -> Iterator[dict[str, Tensor]]:
    """Yield documents in padded batches of at least so many tokens that count; those left over are in no batch.

    Raises:
        DataError: All together have fewer.
    """
    group: list[Document] = []
    num_batches = 0
    for document in documents:
        group.append(document)
        if sum(one.num_counted for one in group) >= least:
            yield _padded(group)
            group, num_batches = [], num_batches + 1
    if not num_batches:
        num_counted = sum(document.num_counted for document in group)
        raise DataError(
            f"adapter.num_init_rows: {num_counted} tokens of {len(documents)} documents are in the loss; eva needs "
            f"{least}, its largest rank",
            hint="raise adapter.num_init_rows, or lower adapter.rank or adapter.rho",
        )


def _padded(documents: list[Document]) -> dict[str, Tensor]:
    """Return documents as a batch, padded on the right."""
    length = max(len(document.ids) for document in documents)
    missing = [length - len(document.ids) for document in documents]
    rows = list(zip(documents, missing, strict=True))
    return {
        "input_ids": torch.tensor([document.ids + [0] * more for document, more in rows]),
        "attention_mask": torch.tensor([[1] * len(document.ids) + [0] * more for document, more in rows]),
        "labels": torch.tensor([document.labels + [IGNORED] * more for document, more in rows]),
    }


@torch.no_grad()
def begin_by_loss(model: "PeftModel", dense: "PreTrainedModel") -> None:
    """Give a new adapter of a base in 4 bits the best approximation of what those lose of each weight.

    Args:
        model: The adapted model.
        dense: The base with its weights as they were.

    Raises:
        ModelError: An adapted module has whole weights.
    """
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        layer, below = cast(Any, module), name.removeprefix("base_model.model.")
        base = layer.get_base_layer()
        if not isinstance(base, Linear4bit):
            raise ModelError(
                f"{below} is not in 4 bits, so it has no quantization error", hint="exclude it from the adapter"
            )
        packed = cast(Any, base.weight)
        weight = cast(Tensor, dense.get_submodule(below).weight).to(packed.device)
        lost = weight.float() - dequantize_4bit(packed.data, packed.quant_state).float()
        left, values, right = torch.linalg.svd(lost, full_matrices=False)
        rank = layer.r["default"]
        roots = (values[:rank] / layer.scaling["default"]).sqrt()
        layer.lora_A["default"].weight.copy_(roots[:, None] * right[:rank])
        layer.lora_B["default"].weight.copy_(left[:, :rank] * roots)


@torch.no_grad()
def round_base(model: "PeftModel", adapter: QloraAdapter) -> None:
    """Give adapted modules the values that their weights have in 4 bits, which an adapter of `loftq` belongs to."""
    from tunekit.models.quantization import Nf4

    how: Any = {"double_quant": adapter.double_quant, "quant_type": adapter.quant_type}
    for module in model.modules():
        if isinstance(module, LoraLayer):
            weight = cast(Any, module).get_base_layer().weight
            weight.copy_(Nf4.of(weight, **how).dense())
