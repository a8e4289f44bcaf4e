"""Make pico-vision from nothing but pico's tokenizer: eyes, then words.

    python examples/pico_vision/pretrain.py --output tunekit/models/pico_vision

The way of LLaVA, on one page:

1. **Model.** A vision transformer (SigLIP's), a projector of two layers, and a small Llama.
2. **Tokens.** A picture is resized to 48 x 48 pixels and cut into 36 patches, each a token among those of the text.
3. **Eyes first.** Transformer and projector learn to say what is where in the language model's own words: in each
   cell of a 3 x 3 grid one patch becomes the embedding of a color and a shape, and in a number's picture the first
   patches become its digits. Heads that classify the same help on the way, and are thrown away.
4. **Then words.** Conversations about scenes of `scenes.py`, of five questions and answers. The language model is
   trained on the next token of the answers; the eyes stay as they are.

The batch of step n is made from the seed and n alone. AdamW, float32; stored in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scenes import COLORS, OF_NUMBERS, OF_SHAPES, SHAPES, TASKS, Group, draw, number, shapes
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    SiglipImageProcessorPil,
)

ROOT = Path(__file__).parents[2]

PICO = ROOT / "tunekit" / "models" / "pico"
IMAGE_SIZE, PATCH_SIZE = 48, 8
NUM_QUESTIONS = 5
"""Questions about each picture, in one conversation."""

CHAT_TEMPLATE = """\
{%- macro render(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {{- '<image>' if part['type'] == 'image' else part['text'] }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- render(message['content']) + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- render(message['content']) + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_processor() -> LlavaProcessor:
    """Return pico's tokenizer with a token for pictures, and an image processor."""
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return LlavaProcessor(
        SiglipImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}),
        tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="full",
        image_token="<image>",
        chat_template=CHAT_TEMPLATE,
    )


def build_model(processor: LlavaProcessor, seed: int) -> LlavaForConditionalGeneration:
    """Return a new model in float32."""
    torch.manual_seed(seed)
    tokenizer = processor.tokenizer
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlavaConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        text_config=text.to_dict(),
        image_token_id=processor.image_token_id,
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config).float()
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=64, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def make_batch(processor: LlavaProcessor, seed: int, step: int, num_rows: int) -> dict[str, torch.Tensor]:
    """Return the inputs of one step, padded, and the weight of each token in the loss, `(num_rows, seq)`."""
    rng = random.Random(f"{seed}/{step}")
    tokenizer = processor.tokenizer
    image = [processor.image_token_id] * (IMAGE_SIZE // PATCH_SIZE) ** 2
    rows: list[tuple[list[int], list[float]]] = []
    pictures = []
    while len(rows) < num_rows:
        scene = number(rng) if rng.random() < 0.2 else shapes(rng)
        if scene.is_held_out:
            continue
        pictures.append(draw(scene, rng))
        tasks = OF_NUMBERS if scene.number else OF_SHAPES
        ids, weights = [], []
        for turn in range(NUM_QUESTIONS):
            question, answer = TASKS[rng.choice(tasks)](scene, rng)
            texts = ("<|im_start|>user\n", f"{question}<|im_end|>\n<|im_start|>assistant\n", f"{answer}<|im_end|>")
            before, behind, own = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
            asked = [*tokenizer.encode("\n"), *before] if turn else [*before, *image]
            ids += [*asked, *behind, *own]
            weights += [0.0] * (len(asked) + len(behind)) + [1.0] * len(own)
        rows.append((ids, weights))
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
        "weights": torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in rows]),
        "pixel_values": processor.image_processor(pictures, return_tensors="pt")["pixel_values"],
    }


def eye_lessons(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, seed: int, num_rows: int
) -> tuple[Callable[[int], torch.Tensor], list[torch.nn.Parameter]]:
    """Return the loss of a step, and what it trains: the vision transformer, the projector, and two heads.

    It is the cross-entropy of the heads, and the squared distance of projected patches from embeddings of words.
    """
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    table = model.model.language_model.embed_tokens.weight.detach()
    names = (*COLORS, *SHAPES, *"0123456789")
    ids = {name: processor.tokenizer.encode(f" {name}", add_special_tokens=False) for name in names}
    ids |= {digit: processor.tokenizer.encode(digit, add_special_tokens=False) for digit in "0123456789"}
    words = {name: table[pieces].sum(0) for name, pieces in ids.items()}
    width = tower.config.hidden_size
    in_cells = torch.nn.Linear(width, len(SHAPES) + len(COLORS) + 2)
    in_numbers = torch.nn.Linear(width * (IMAGE_SIZE // PATCH_SIZE) ** 2, 3 * 11)
    colors = sorted(COLORS)

    def loss_of_step(step: int) -> torch.Tensor:
        rng = random.Random(f"eyes/{seed}/{step}")
        scenes = [shapes(rng) if row % 2 else number(rng) for row in range(num_rows)]
        places: list[dict[tuple[int, int], Group]] = [{} for _ in scenes]
        pictures = [draw(scene, rng, cells) for scene, cells in zip(scenes, places, strict=True)]
        pixels = processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
        features = tower(pixels, output_hidden_states=True).hidden_states[-1]
        side = IMAGE_SIZE // PATCH_SIZE
        cells = in_cells(
            F.avg_pool2d(features[1::2].transpose(1, 2).unflatten(2, (side, side)), side // 3).flatten(2).mT
        )
        groups = [[cell.get((x, y)) for y in range(3) for x in range(3)] for cell in places[1::2]]
        shape_ids = torch.tensor([[SHAPES.index(g.shape) + 1 if g else 0 for g in row] for row in groups])
        color_ids = torch.tensor([[colors.index(g.color) + 1 if g else 0 for g in row] for row in groups])
        by_shape, by_color = cells.split([len(SHAPES) + 1, len(COLORS) + 1], dim=-1)
        digits = in_numbers(features[::2].flatten(1)).unflatten(1, (3, 11))
        digit_ids = torch.tensor([[int(d) if d != " " else 10 for d in f"{s.number:>3}"] for s in scenes[::2]])
        targets = torch.zeros(num_rows, side * side, table.shape[1])
        for row, (scene, cells_of_row) in enumerate(zip(scenes, places, strict=True)):
            for place, digit in enumerate(scene.number):
                targets[row, place] = words[digit]
            for (x, y), group in cells_of_row.items():
                targets[row, y * 2 * side + x * 2] = words[group.color] + words[group.shape]
        distance = F.mse_loss(projector(features), targets) / targets.square().mean()
        return (
            2 * distance
            + F.cross_entropy(by_shape.flatten(0, 1), shape_ids.flatten())
            + F.cross_entropy(by_color.flatten(0, 1), color_ids.flatten())
            + F.cross_entropy(digits.flatten(0, 1), digit_ids.flatten())
        )

    return loss_of_step, [
        *tower.parameters(),
        *projector.parameters(),
        *in_cells.parameters(),
        *in_numbers.parameters(),
    ]


def loss_of(model: LlavaForConditionalGeneration, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy of the answers' tokens, in nats."""
    names = ("input_ids", "attention_mask", "pixel_values")
    hidden = model.model(**{name: batch[name] for name in names}, use_cache=False).last_hidden_state[:, :-1]
    counts = batch["weights"][:, 1:] > 0
    return F.cross_entropy(model.lm_head(hidden[counts]), batch["input_ids"][:, 1:][counts])


def build_optimizer(parameters: Iterable[torch.nn.Parameter], peak: float) -> torch.optim.AdamW:
    """Return AdamW, without decay for vectors."""
    listed = list(parameters)
    groups = [
        {"params": [p for p in listed if p.ndim > 1], "weight_decay": 0.02},
        {"params": [p for p in listed if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98))


def schedule(step: int, num_steps: int, warmup: int = 50) -> float:
    """Return the share of the peak learning rate: up in a line, then down by a cosine."""
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def save_model(model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path) -> None:
    """Write the model folder in bfloat16, leaving the training weights as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        stored = LlavaForConditionalGeneration(model.config).to(torch.bfloat16)
    stored.load_state_dict({name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}, assign=True)
    stored.tie_weights()
    stored.generation_config = model.generation_config
    stored.save_pretrained(folder)
    processor.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train, and write the model folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the model folder to write")
    parser.add_argument(
        "--eyes", type=Path, default=Path("eyes.pt"), help="file of the vision tower; reused if it exists"
    )
    parser.add_argument("--eye-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--rows", type=int, default=32, help="rows per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=200, help="steps between written models")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    processor = build_processor()
    model = build_model(processor, args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    lesson, parameters = eye_lessons(model, processor, args.seed, args.rows)
    if args.eyes.exists():
        model.load_state_dict(torch.load(args.eyes))
    else:
        run("eyes", args.eye_steps, lesson, build_optimizer(parameters, 1e-3))
        torch.save(model.state_dict(), args.eyes)
    model.model.vision_tower.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(False)

    def words(step: int) -> torch.Tensor:
        if step % args.save_every == 0:
            save_model(model, processor, args.output)
        return loss_of(model, make_batch(processor, args.seed, step, args.rows))

    run("words", args.steps, words, build_optimizer(model.model.language_model.parameters(), 2e-3))
    save_model(model, processor, args.output)


def run(
    name: str, num_steps: int, loss_of_step: Callable[[int], torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Take steps, and print the loss."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    began, smoothed = time.perf_counter(), 0.0
    for step in range(num_steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(step, num_steps)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of_step(step)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        smoothed = loss.item() if step == 0 else 0.95 * smoothed + 0.05 * loss.item()
        if (step + 1) % 25 == 0:
            print(f"{name} {step + 1:5d}  loss {smoothed:.4f}  {time.perf_counter() - began:6.0f} s", flush=True)


if __name__ == "__main__":
    main()
