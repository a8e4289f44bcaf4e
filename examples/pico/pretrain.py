"""Make pico from nothing: tokenizer, architecture, pre-training, model folder.

    python examples/pico/pretrain.py --output tunekit/models/pico

The whole of pre-training on one page, small enough for a laptop's processor:

1. **Tokenizer.** Byte-level BPE learned from the corpus, 2048 entries. Digits stay single, so that a number is
   always written in the same pieces and adding can be learned digit by digit.
2. **Model.** A Llama of 2.75 million parameters, loaded later like any other.
3. **Data.** Rows of 256 tokens, packed with whole documents. The batch of step n is made from the seed and n alone:
   nothing is stored, and a resumed run sees exactly what an uninterrupted one would have seen.
4. **Loss.** Next-token cross-entropy. What the user says counts a tenth of what the model says: which numbers
   a user will ask about cannot be learned, but the words around them are worth knowing.
5. **Optimizer.** Muon for the matrices inside the layers, AdamW for the embedding and the norms; warm-up, then
   down to nothing.

Weights stay in float32 while training, matrix products run in bfloat16, and the result is stored in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import END_OF_TEXT, IM_END, IM_START, documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 2048
ROW_TOKENS = 256
MAX_POSITIONS = 1024
#: The weight in the loss of a token that is not the model's to say.
PROMPT_WEIGHT = 0.1

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {%- set function = tool['function'] if tool['function'] is defined else tool %}
        {{- function['name'] + '(' }}
        {%- for name, property in function['parameters']['properties'].items() %}
            {{- name + ': ' + property['type'] | string + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ') ' + function['description'] + ('\\n' if not loop.last else '') }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] or '' }}
            {%- for call in message['tool_calls'] or [] %}
                {%- set function = call['function'] if call['function'] is defined else call %}
                {{- '<tool_call>{"name": "' + function['name'] + '", "arguments": ' }}
                {{- function['arguments'] if function['arguments'] is string else function['arguments'] | tojson }}
                {{- '}</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(seed: int, num_documents: int = 20_000) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer learned from the corpus, with single digits and the chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The markers are whole tokens already; left in the text, their letters would take up merges.
    pieces = (text for document in islice(documents(seed), num_documents) for text, _ in document)
    bpe.train_from_iterator((re.sub(r"<\|\w+\|>", "", text) for text in pieces), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=END_OF_TEXT,
        eos_token=IM_END,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    if len(tokenizer) != VOCAB_SIZE:
        raise ValueError(f"the corpus gave {len(tokenizer)} entries instead of {VOCAB_SIZE}")
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A new model in float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def make_batch(
    tokenizer: PreTrainedTokenizerFast, seed: int, step: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one step and the weight of each token in the loss, both `(num_rows, ROW_TOKENS + 1)`.

    A row begins with the first token of a document and is filled with documents to its end, where the last one
    is cut: beginnings are what a chat model meets in use.
    """
    stream = documents(f"{seed}/{step}")
    separator = tokenizer.pad_token_id
    rows: list[list[int]] = []
    weights: list[list[float]] = []
    row: list[int] = []
    weight: list[float] = []
    while len(rows) < num_rows:
        for text, is_own in next(stream):
            ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
            row += ids
            weight += [1.0 if is_own else PROMPT_WEIGHT] * len(ids)
        row.append(separator)
        weight.append(PROMPT_WEIGHT)
        if len(row) > ROW_TOKENS:
            rows.append(row[: ROW_TOKENS + 1])
            weights.append(weight[: ROW_TOKENS + 1])
            row, weight = [], []
    return torch.tensor(rows), torch.tensor(weights)


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted mean cross-entropy of the next token, in nats."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    flat = weights[:, 1:].flatten()
    return (losses * flat).sum() / flat.sum()


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices and AdamW for all else, each with its peak learning rate as `peak_lr`."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01)
    adamw = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers: list[torch.optim.Optimizer] = [muon, adamw]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def schedule(step: int, num_steps: int, warmup: int = 100, horizon: int = 2400) -> float:
    """The share of the peak learning rate: a line up, a slow cosine, and a line down over the last 30 % of the run.

    The cosine does not depend on the length of the run, only the line down does. So a checkpoint can be brought to
    its end sooner or later than planned, with `--resume --steps`, and gives what a run of that length would give.
    """
    slow = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / (horizon - warmup)))
    return slow * min(1.0, (step + 1) / warmup, (num_steps - step) / (0.3 * num_steps))


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model folder in bfloat16, leaving the training weights as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    with torch.device("meta"):
        stored = LlamaForCausalLM(model.config)
    stored = stored.to(torch.bfloat16)
    stored.load_state_dict(state, assign=True)
    stored.tie_weights()
    stored.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    stored.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Transformers 5 writes a class name that Transformers 4, and what is built on it, cannot read. Both know this one.
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train, or go on training, and write the model folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--work", type=Path, default=Path("runs/pico"), help="where checkpoints are kept")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--rows", type=int, default=16, help="rows of 256 tokens per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in the work folder")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    tokenizer = train_tokenizer(args.seed)
    model = build_model(tokenizer, args.seed)
    optimizers = build_optimizers(model)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint_path = args.work / "checkpoint.pt"
    start, seconds_before = 0, 0.0
    if args.resume:
        checkpoint = torch.load(checkpoint_path)
        model.load_state_dict(checkpoint["model"])
        for optimizer, state in zip(optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        start, seconds_before = checkpoint["step"], checkpoint["seconds"]

    began = time.perf_counter()
    smoothed = 0.0
    for step in range(start, args.steps):
        rows, weights = make_batch(tokenizer, args.seed, step, args.rows)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * schedule(step, args.steps)
            optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, rows, weights)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        smoothed = loss.item() if step == start else 0.95 * smoothed + 0.05 * loss.item()
        done = step + 1
        seconds = time.perf_counter() - began
        if done % 25 == 0:
            tokens = (done - start) * args.rows * ROW_TOKENS
            print(f"step {done:5d}  loss {smoothed:.4f}  {tokens / seconds:6.0f} tokens/s", flush=True)
        if done % args.save_every == 0 or done == args.steps:
            state = {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": done,
                "seconds": seconds_before + seconds,
            }
            torch.save(state, checkpoint_path)
            save_model(model, tokenizer, args.work / "latest")
    save_model(model, tokenizer, args.output)
    total = seconds_before + time.perf_counter() - began
    print(f"{args.steps * args.rows * ROW_TOKENS:,} tokens in {total / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
