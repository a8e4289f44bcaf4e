"""Generate completions by transformers' `generate` and by its continuous batching, on this machine's device.

    python -m benchmarks.generation [--repeats N] [--save]

`generate` computes all completions of a batch until the longest is complete; continuous batching replaces those that
are complete, with a paged cache. Prompts are random tokens, and completions end by their lengths alone: all at 128
tokens (`even`), or one of eight at 128 and the others at 16 (`uneven`). Cases are repeated in turns, and medians are
compared.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig

from benchmarks.circumstances import circumstances

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "generation.json"
PACKAGES = ("torch", "transformers")
SIZES = {"2.7 M": (192, 12), "23 M": (512, 8)}
"""Width and layers, by the number of parameters."""
VOCAB_SIZE, PROMPT_TOKENS, LONGEST, SHORT = 512, 64, 128, 16


def model_of(width: int, num_layers: int, device: str) -> PreTrainedModel:
    """Return a Llama of random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=width, intermediate_size=8 * width // 3 // 16 * 16,
        num_hidden_layers=num_layers, num_attention_heads=width // 64, num_key_value_heads=width // 64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    return model.to(device).eval()


def lengths_of(kind: str, num: int) -> list[int]:
    """Return the lengths of completions."""
    return [LONGEST if kind == "even" or place % 8 == 0 else SHORT for place in range(num)]


def by_generate(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int]) -> None:
    """Generate as TRL's trainers do: a batch until the longest completion is complete."""
    ids = torch.tensor(prompts, device=model.device)
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=_sampling(max(lengths), None))


def by_continuous_batching(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int]) -> None:
    """Generate by continuous batching."""
    # The cache fits all of them.
    blocks = -(-(PROMPT_TOKENS + LONGEST) * len(prompts) // 256) + 1
    batching = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=PROMPT_TOKENS * len(prompts))
    manager = model.init_continuous_batching(
        generation_config=_sampling(LONGEST, -1), continuous_batching_config=batching
    )
    manager.start()
    try:
        for prompt, length in zip(prompts, lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length)
        results = [manager.get_result() for _ in prompts]
    finally:
        manager.stop(block=True)
    assert sorted(len(result.generated_tokens) for result in results) == sorted(lengths)


def _sampling(max_new_tokens: int, no_end: int | None) -> GenerationConfig:
    return GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max_new_tokens, eos_token_id=no_end, pad_token_id=0)


def measure(device: str, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each size, number and kind of completions."""
    ways: dict[str, Callable[..., None]] = {"generate": by_generate, "continuous": by_continuous_batching}
    rows = []
    for size, (width, num_layers) in SIZES.items():
        model = model_of(width, num_layers, device)
        for num in (8, 64):
            prompts = torch.randint(VOCAB_SIZE, (num, PROMPT_TOKENS)).tolist()
            for kind in ("even", "uneven"):
                lengths, seconds = lengths_of(kind, num), {way: [] for way in ways}
                for repeat in range(repeats + 1):
                    for way, generate in ways.items():
                        began = time.perf_counter()
                        with torch.no_grad():
                            generate(model, prompts, lengths)
                        if repeat:
                            seconds[way].append(time.perf_counter() - began)
                medians = {way: statistics.median(values) for way, values in seconds.items()}
                row = {"params": size, "completions": num, "lengths": kind, "seconds": medians}
                rows.append(row | {"ratio": medians["continuous"] / medians["generate"]})
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, print, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    rows = measure(device, arguments.repeats)
    if arguments.save:
        RESULTS.write_text(json.dumps({**circumstances(PACKAGES), "device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
