"""A tiny model that calls a tool."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tunekit.methods.tool_use import tool_schemas
from tunekit.probe.model import PICO
from tunekit.recipe.methods.grpo import GRPOMethod


def save_calling_model(folder: Path, name: str = "guess") -> None:
    """Save a model with pico's tokenizer that has learned to call a tool with a number, and nothing else."""
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    (schema,) = tool_schemas(GRPOMethod(environment="guess_number"))
    schema["function"]["name"] = name
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            tie_word_embeddings=True,
        )
    )
    rows = []
    for number in range(1, 13):
        called = {"type": "function", "function": {"name": name, "arguments": {"number": number}}}
        turns = [{"role": "user", "content": "Guess my number. Begin at 1."}]
        for hint in ("higher", "lower"):
            turns.append({"role": "assistant", "content": "", "tool_calls": [called]})
            turns.append({"role": "tool", "name": name, "content": hint})
        turns.append({"role": "assistant", "content": "I do not know."})
        rows.append(tokenizer.apply_chat_template(turns, tools=[schema], return_dict=False))
    longest = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(300):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
