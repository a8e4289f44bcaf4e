"""Which models keep packed documents apart, with which attention: every causal LM of the installed transformers, small.

    python benchmarks/isolation.py [MODEL_TYPE ...] [--save]

A model of random weights and four layers is built of each type. It reads two documents laid one behind the other, as
the trainer's collator makes the batch: positions that begin again at zero, the boundaries for the kernels that take
them, no attention mask. The second document must have the logits that it has alone, and keep them when the tokens of
the first change. Layers that a plan runs once for each document are run so here.

Flash attention needs an accelerator. What can be seen without is whether a model passes the boundaries on to it, so
transformers' own wrapper runs here around a varlen attention written in plain torch. tunekit's attention for packed
rows is to be right besides: what a document has alone is taken from eager attention there.

`--save` keeps the verdicts of other types that the same versions gave.

The rules in `tunekit/planner/decisions/families.yaml` were derived from this table.
"""

import argparse
import contextlib
import importlib
import inspect
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tunekit.models.attention import register_packed_attention
from tunekit.models.documents import run_by_document
from tunekit.planner.decisions.backends import families
from tunekit.planner.plan import VARLEN

RESULTS = Path(__file__).parent / "results" / "isolation.json"

FLASH = "flash_attention_on_cpu"
ATTENTIONS = {"sdpa": "sdpa", "eager": "eager", "flash": FLASH, "varlen": VARLEN}
"""Attention implementations by the names under which they are shown."""

TOLERANCE = 1e-4
"""Largest difference, as a share of the largest logit, that is rounding and not another document: models compute in
double, but what they cast themselves is float32."""

NOT_MEASURED = (
    ValueError,
    TypeError,
    RuntimeError,
    LookupError,
    AttributeError,
    ImportError,
    StopIteration,
    StrictDataclassError,
)
"""What is raised where a configuration does not take the sizes below, or a model needs what is not installed."""

MAX_PARAMS = 20_000_000
"""A model above this was not made small by the sizes below, and is left out."""

FIRST, OTHER, SECOND = list(range(100, 109)), list(range(120, 129)), list(range(200, 211))
"""Token ids: the first document, what it is changed to, and the second document."""

SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 256),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("attention_hidden_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("dense_intermediate_size", "prefix_dense_intermediate_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "d_ff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "rotary_dim", "index_topk"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("num_global_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "swa_v_head_dim", "v_head_dim", "index_head_dim", "d_kv"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "global_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "sliding_window", "attention_chunk_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_num_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("ssm_state_size", "state_size", "window_size", "attention_window_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_group", "topk_group", "n_groups", "moe_layer_freq"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128),
    "is_decoder": True,
    "attention_dropout": 0.0,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""Sizes of a small model by the names that configurations have for them; each takes those that it knows."""

OWN: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32")},
    **{name: {"num_key_value_heads": 4} for name in ("glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu")},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_k": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"expert_ffn_hidden_size": 16, "num_layers": 2, "moe_topk": 2, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What some types need besides."""


@dataclass(frozen=True)
class Isolation:
    """What became of two documents laid one behind the other.

    Attributes:
        verdict: `isolates`, `leaks`, `differs` (the tokens of the first document do not matter, but that it is there
            does), `refuses` (the model itself will not take them), `unsupported` (it has no such attention) or
            `not measured`.
        leak: Change of the second document's logits with the first one's tokens, as a share of the largest logit.
        difference: Their difference from those that the document has alone, likewise.
        detail: The error, where there was one.
    """

    verdict: str
    leak: float | None = None
    difference: float | None = None
    detail: str = ""


def small_model(model_type: str, attention: str, **changes: Any) -> PreTrainedModel:
    """A model of a type with random weights, small enough for a processor; `changes` go to its configuration."""
    register_packed_attention()
    config_class = CONFIG_MAPPING[model_type]
    known = inspect.signature(config_class.__init__).parameters
    sizes = {name: value for name, value in SMALL.items() if name in known}
    config = config_class(**{**sizes, **OWN.get(model_type, {}), **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if attention == FLASH and not model._supports_flash_attn:
        raise ValueError(f"{type(model).__name__} does not support flash attention")
    if model.num_parameters() > MAX_PARAMS:
        raise ValueError(f"{model.num_parameters():,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    # Grouped products know no double.
    model.set_experts_implementation("eager")
    # What is small or zero at first, such as a gate, would hide what passes through it.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.1 * noise)
    return model


def logits_of(model: PreTrainedModel, *documents: list[int]) -> torch.Tensor:
    """Logits of documents in one batch without padding: `(tokens, vocabulary)`."""
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collator([{"input_ids": document} for document in documents])
    del batch["labels"]
    with torch.no_grad():
        return model(**batch, use_cache=False).logits[0]


def isolation_of(model: PreTrainedModel, alone: torch.Tensor | None = None) -> Isolation:
    """Whether a model keeps two documents apart.

    Args:
        model: The model.
        alone: What the second document is to have; what the model gives it alone where left out.
    """
    together = logits_of(model, FIRST, SECOND)[len(FIRST) :]
    changed = logits_of(model, OTHER, SECOND)[len(OTHER) :]
    alone = logits_of(model, SECOND) if alone is None else alone
    largest = alone.abs().max()
    leak, difference = (((together - other).abs().max() / largest).item() for other in (changed, alone))
    # Written so that what is not a number is no isolation.
    verdict = "leaks" if not leak < TOLERANCE else "isolates" if difference < TOLERANCE else "differs"
    return Isolation(verdict, leak, difference)


def measure(model_type: str, attention: str, **changes: Any) -> Isolation:
    """Build a small model of a type and look whether it keeps documents apart."""

    def built(implementation: str) -> PreTrainedModel:
        model = small_model(model_type, implementation, **changes)
        if model_type in families()["by_document"]:
            run_by_document(model)
        return model

    try:
        with flash_attention_on_cpu():
            model = built(ATTENTIONS[attention])
            if attention != "varlen":
                return isolation_of(model)
            return isolation_of(model, logits_of(built("eager"), SECOND))
    except NOT_MEASURED as error:
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        if "keep packed sequences apart" in detail:
            return Isolation("refuses", detail=detail)
        unsupported = any(words in detail for words in ("does not support", "only supports", VARLEN))
        return Isolation("unsupported" if unsupported else "not measured", detail=detail)


@contextlib.contextmanager
def flash_attention_on_cpu() -> Iterator[None]:
    """Transformers' wrapper of flash attention, around the functions below."""
    from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import flash_attention_mask

    for name in (FLASH, "kernels-community/vllm-flash-attn3"):  # what models with sinks put in its place
        AttentionInterface.register(name, flash_attention_forward)
        AttentionMaskInterface.register(name, flash_attention_mask)
    for model_type in ("falcon", "gpt_neo", "gptj"):  # their own classes call it, and import it where it is installed
        module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        module._flash_attention_forward = modeling_flash_attention_utils._flash_attention_forward
    original = modeling_flash_attention_utils._lazy_imports
    modeling_flash_attention_utils._lazy_imports = lambda *_args, **_kwargs: (
        flash_attn_func,
        flash_attn_varlen_func,
        None,
        modeling_flash_attention_utils._pad_input,
        modeling_flash_attention_utils._unpad_input,
    )
    try:
        yield
    finally:
        modeling_flash_attention_utils._lazy_imports = original


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> torch.Tensor:
    """Attention within each of several sequences: q `(tokens, heads, head_dim)`, k and v with fewer heads or as many.

    Only what decides who sees whom is here: no scale, softcap or sinks.
    """
    parts = [
        flash_attn_func(q[None, start:end], k[None, start:end], v[None, start:end], **options)[0]
        for start, end in pairwise(cu_seqlens_q.tolist())
    ]
    return torch.cat(parts)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention within whole rows: q `(batch, seq, heads, head_dim)`."""
    at = torch.arange(q.shape[1])
    seen = torch.ones(len(at), len(at), dtype=torch.bool)
    if causal:
        seen &= at[:, None] >= at
    if window_size[0] >= 0:
        seen &= at[:, None] - at <= window_size[0]
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def main() -> None:
    """Measure, print the table, and with `--save` keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_type", nargs="*", help="types to measure (all)")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    table: dict[str, dict[str, str]] = {}
    for model_type in args.model_type or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found = {attention: measure(model_type, attention) for attention in ATTENTIONS}
        table[model_type] = {attention: isolation.verdict for attention, isolation in found.items()}
        columns = [
            isolation.verdict if isolation.leak is None else f"{isolation.verdict} {isolation.leak:.0e}"
            for isolation in found.values()
        ]
        details = {isolation.detail for isolation in found.values() if isolation.verdict in ("refuses", "not measured")}
        print(f"{model_type:26}" + "".join(f"{column:18}" for column in columns), *sorted(details), flush=True)
    for attention in ATTENTIONS:
        print(attention, dict(Counter(verdicts[attention] for verdicts in table.values())))
    if args.save:
        versions = {name: version(name) for name in ("torch", "transformers", "trl")}
        saved = json.loads(RESULTS.read_text())
        others = saved["verdicts"] if saved["versions"] == versions else {}
        verdicts = dict(sorted((others | table).items()))
        document = {"date": datetime.now(UTC).date().isoformat(), "versions": versions, "verdicts": verdicts}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
