"""Peak of a step in each stage of a real pipeline: torch's FSDP2 and 1F1B, over gloo, on a CPU.

    torchrun --standalone --nproc-per-node 4 -m tests.estimates.oracle_stages MICRO_BATCHES TOKENS FILE

writes the bytes of each stage to FILE, as JSON. Two stages of two layers, each divided over two processes, set up as
NeMo Automodel does (weights stay gathered, products in bfloat16, gradients summed in float32). Tensors that a stage
receives, and its float32 shards, are there before the step and not counted.
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from tunekit.models.step_trace import LiveBytes

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256, tie_word_embeddings=False, attn_implementation="sdpa",
)  # fmt: skip


class Stage(nn.Module):
    """Half of a Llama."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(CONFIG.vocab_size, CONFIG.hidden_size) if index == 0 else None
        self.layers = nn.ModuleList([LlamaDecoderLayer(CONFIG, 2 * index + number) for number in range(2)])
        self.rotary = LlamaRotaryEmbedding(CONFIG)
        self.norm = LlamaRMSNorm(CONFIG.hidden_size) if index == 1 else None
        self.head = nn.Linear(CONFIG.hidden_size, CONFIG.vocab_size, bias=False) if index == 1 else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Tokens, or a residual stream of (rows, tokens, hidden), to a stream or to logits."""
        stream = inputs if self.embed is None else self.embed(inputs)
        positions = self.rotary(stream, torch.arange(stream.shape[1])[None])
        for layer in self.layers:
            stream = layer(stream, position_embeddings=positions, attention_mask=None)
        return stream if self.head is None or self.norm is None else self.head(self.norm(stream))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over tokens, in float32."""
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def main() -> None:
    """Run two steps, and trace the second."""
    micro_batches, tokens = map(int, sys.argv[1:3])
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    stage = Stage(index)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for unit in (*stage.layers, stage.embed, stage.head, stage):
        if unit is not None:
            fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=False, mp_policy=policy)
    pipeline = PipelineStage(stage, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(pipeline, n_microbatches=micro_batches, loss_fn=loss_of, scale_grads=False)
    rows = torch.randint(0, CONFIG.vocab_size, (2, micro_batches, tokens))

    def step() -> None:
        if index == 0:
            schedule.step(rows[0], return_outputs=False)
        else:
            schedule.step(target=rows[1], losses=[], return_outputs=False)

    step()
    stage.zero_grad()
    live = LiveBytes(list(stage.parameters()))
    with live:
        step()
    peaks: list[int] = [0, 0]
    distributed.all_gather_object(peaks, max(live.peaks.values()), group=mesh.get_group("pp"))
    if distributed.get_rank() == 0:
        Path(sys.argv[3]).write_text(json.dumps(peaks), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
