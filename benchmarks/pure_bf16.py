"""What trained weights in bfloat16 cost: evaluation losses of pico, by how weights are rounded.

    python -m benchmarks.pure_bf16 [--seeds N ...] [--learning-rate RATE] [--save]

The recipe is sft/quickstart with all weights trained, at a tenth of the rate that it has for its adapter. Trained are:

- float32: weights, gradients, states and products in float32, with torch's AdamW.
- stochastic: all of them in bfloat16, with the stochastic rounding of tunekit's AdamW (`train.pure_bf16`).
- stochastic, 8 bits: the same with states in 8 bits.
- nearest: all of them in bfloat16 with torch's AdamW, which rounds to the nearest.

`excess` is what the evaluation loss at the end lies above that of float32, as a share of it.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import tunekit
from benchmarks.circumstances import circumstances

RESULTS = Path(__file__).parent / "results" / "pure_bf16.json"
PACKAGES = ("tunekit", "torch", "transformers", "trl", "accelerate")
RECIPE = "sft/quickstart"

VARIANTS: dict[str, tuple[str, ...]] = {
    "float32": ("model.dtype=float32",),
    "stochastic": ("train.pure_bf16=true",),
    "stochastic, 8 bits": ("train.pure_bf16=true", "train.optim=tunekit_adamw_8bit"),
    "nearest": ("train.pure_bf16=true", "train.optim=adamw_torch"),
}
"""Changes of the recipe, by what is compared."""


def trained(folder: Path, overrides: tuple[str, ...], *, seed: int, learning_rate: float) -> dict[str, float]:
    """Train one variant, and return its losses.

    Args:
        folder: Where the run is written.
        overrides: The variant.
        seed: Seed of the order of rows and of the rounding.
        learning_rate: The peak.
    """
    shared = (
        "adapter=full",
        f"train.learning_rate={learning_rate}",
        f"train.seed={seed}",
        "train.eval_steps=1000000",
        "train.save_steps=1000000",
        "output.sample_prompts=[]",
        f"output.dir={folder}",
    )
    result = tunekit.train(RECIPE, (*shared, *overrides)).result()
    return {name: round(result[name], 5) for name in ("first_eval_loss", "eval_loss", "last_loss")}


def with_excess(losses: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the losses of a seed with the share by which each evaluation lies above that of float32."""
    reference = losses["float32"]["eval_loss"]
    return {name: {**found, "excess": round(found["eval_loss"] / reference - 1, 5)} for name, found in losses.items()}


def main() -> None:
    """Train all variants, and print their losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    seeds: dict[str, Any] = {}
    for seed in args.seeds:
        losses = {}
        for name, overrides in VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                losses[name] = trained(Path(folder) / "run", overrides, seed=seed, learning_rate=args.learning_rate)
            print(f"seed {seed}  {name:20}  {losses[name]}", flush=True)
        seeds[str(seed)] = with_excess(losses)
    result = {**circumstances(PACKAGES), "recipe": RECIPE, "learning_rate": args.learning_rate, "seeds": seeds}
    print(json.dumps(result, indent=2))
    if args.save:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
