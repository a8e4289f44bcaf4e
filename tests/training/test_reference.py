"""SFT against a training loop written out here in plain torch: the same batches must give the same losses.

The loop shares nothing with the code under test. It builds its own token ids and labels from the rows, its own
low-rank layers, its own schedule and its own token-weighted mean. It only borrows the order in which rows came and
the initial low-rank matrices, which a wrapper around the model's call records.
"""

import json
import math

import pytest
import torch

import tunekit
from tests.tiny import make_tokenizer, save_tiny_model, watching_models

STEPS = 10
BATCH = 8
RATE = 3e-3
RANK, ALPHA = 4, 12.0
BLOCK = 16


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows():
    """Conversations of very different lengths, one or two turns each."""
    made = []
    for n in range(40):
        turns = [("user", "?" * (1 + n * 7 % 23)), ("assistant", f"{n * n} is " + "ok " * (1 + n * 5 % 17))]
        if n % 3 == 0:
            turns += [("user", "and then"), ("assistant", "x" * (n % 11) + ".")]
        if n % 4 == 1:
            turns.insert(0, ("system", "count"))
        made.append([{"role": role, "content": content} for role, content in turns])
    return made


def encode(turns) -> tuple[list[int], list[int]]:
    """Token ids and labels of a conversation, piece by piece."""
    tokenizer = make_tokenizer()
    ids, labels = [], []
    for turn in turns:
        answer = turn["role"] == "assistant"
        for piece, counts in (
            (f"<|im_start|>{turn['role']}\n", False),
            (f"{turn['content']}<|im_end|>", answer),
            ("\n", False),
        ):
            tokens = tokenizer.encode(piece, add_special_tokens=False)
            ids += tokens
            labels += tokens if counts else [-100] * len(tokens)
    return ids, labels


class Recorder:
    """Notes, from outside, which rows the model is trained on and where its low-rank matrices start."""

    def __init__(self):
        self.micro_batches = []
        self.low_rank = {}

    def watch(self, module, kwargs):
        if type(module).__name__ != "LlamaForCausalLM" or not module.training:
            return
        if not self.low_rank:
            self.low_rank = {
                name: tensor.detach().clone()
                for name, tensor in (*module.named_parameters(), *module.named_buffers())
                if "lora_" in name or "vera_A" in name or "vera_B" in name
            }
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
        self.micro_batches.append([tuple(row[kept.bool()].tolist()) for row, kept in zip(ids, mask, strict=True)])


def train_with_tunekit(model_folder, rows, folder, adapter, micro_batch_size):
    """Losses by step, and what the recorder saw."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in rows), encoding="utf-8")
    recorder = Recorder()
    recipe = {
        "model": str(model_folder),
        "data": {"train": str(data), "max_length": 256},
        "adapter": adapter,
        "train": {
            "max_steps": STEPS,
            "global_batch_size": BATCH,
            "micro_batch_size": micro_batch_size,
            "learning_rate": RATE,
            "lr_scheduler_type": "linear",
            "warmup_steps": 2,
        },
        "output": {"dir": str(folder / "run"), "sample_prompts": []},
    }
    with watching_models(recorder.watch):
        run = tunekit.train(recipe)
    return run.metrics()["loss"].tolist(), recorder


class LowRank(torch.nn.Module):
    """W x + (alpha / r) B A x."""

    def __init__(self, linear, a, b):
        super().__init__()
        self.linear, self.a, self.b = linear, torch.nn.Parameter(a), torch.nn.Parameter(b)

    def forward(self, x):
        return self.linear(x) + (ALPHA / RANK) * (x @ self.a.T @ self.b.T)


class Factors(torch.nn.Module):
    """l * (W x), or W (l * x)."""

    def __init__(self, linear, *, of_inputs):
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.linear, self.of_inputs = linear, of_inputs
        self.l = torch.nn.Parameter(torch.ones(inputs if of_inputs else outputs))

    def forward(self, x):
        return self.linear(self.l * x) if self.of_inputs else self.l * self.linear(x)


class Vectors(torch.nn.Module):
    """W x + b * (B (d * (A x))), with the first rows and columns of the large B and A."""

    def __init__(self, linear, a, b):
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.linear, self.fixed = linear, (a[:, :inputs], b[:outputs])
        self.d, self.b = torch.nn.Parameter(torch.full((len(a),), 0.1)), torch.nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        a, b = self.fixed
        return self.linear(x) + self.b * ((self.d * (x @ a.T)) @ b.T)


class Blocks(torch.nn.Module):
    """(W + [D D ... D]) x, with D for each block of inputs, cut where the last block has fewer."""

    def __init__(self, linear):
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.linear, self.num_blocks = linear, -(-inputs // BLOCK)
        self.d = torch.nn.Parameter(torch.zeros(outputs, BLOCK))

    def forward(self, x):
        repeated = self.d.repeat(1, self.num_blocks)[:, : x.shape[-1]]
        return torch.nn.functional.linear(x, self.linear.weight + repeated, self.linear.bias)


class Rotation(torch.nn.Module):
    """W (R x): x in blocks, each by its R = I + 2 (Q + Q^2 + Q^3) + Q^4, which is near to orthogonal."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        blocks = linear.weight.shape[1] // BLOCK
        self.q = torch.nn.Parameter(torch.zeros(blocks, BLOCK * (BLOCK - 1) // 2))

    def forward(self, x):
        upper = torch.zeros(len(self.q), BLOCK, BLOCK).masked_scatter(
            torch.ones(BLOCK, BLOCK).triu(1).bool().expand(len(self.q), BLOCK, BLOCK), self.q
        )
        q = upper - upper.mT
        rotation = torch.eye(BLOCK) + 2 * (q + q @ q + q @ q @ q) + q @ q @ q @ q
        return self.linear((x.unflatten(-1, (-1, 1, BLOCK)) @ rotation).flatten(-3))


def adapted(kind, name, linear, recorder):
    """A linear layer with its adapter as it begins."""
    if kind == "ia3":
        return Factors(linear, of_inputs=name.endswith("down_proj"))
    if kind == "vera":
        # All layers have the same two, which a module lists once.
        fixed = recorder.low_rank
        a, b = (next(fixed[key] for key in fixed if key.endswith(f"vera_{side}.default")) for side in "AB")
        return Vectors(linear, a, b)
    if kind in ("oft", "miss"):
        return Rotation(linear) if kind == "oft" else Blocks(linear)
    a, b = (recorder.low_rank[f"{name}.lora_{side}.default.weight"] for side in "AB")
    assert a.shape[0] == RANK and not b.any()
    return LowRank(linear, a.clone(), b.clone())


def reference_losses(model_folder, rows, recorder, adapter):
    """The same training, written out."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()
    if adapter["type"] != "full":
        model.requires_grad_(False)
        for name in [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]:
            if name == "lm_head":
                continue
            parent, _, child = name.rpartition(".")
            layer = adapted(adapter["type"], name, model.get_submodule(name), recorder)
            setattr(model.get_submodule(parent), child, layer)
    encoded = {tuple(ids): labels for ids, labels in map(encode, rows)}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    per_step = math.ceil(len(recorder.micro_batches) / STEPS)
    losses = []
    for step in range(STEPS):
        batch = [ids for micro in recorder.micro_batches[step * per_step : (step + 1) * per_step] for ids in micro]
        assert len(batch) == BATCH
        count = sum(label != -100 for ids in batch for label in encoded[ids][1:])
        total = torch.zeros(())
        for ids in batch:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            labels = torch.tensor(encoded[ids])
            total = total + torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        rate = RATE * (step / 2 if step < 2 else (STEPS - step) / (STEPS - 2))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
    return losses


ADAPTERS = {
    "full": {"type": "full"},
    "lora": {"type": "lora", "rank": RANK, "alpha": ALPHA},
    "ia3": {"type": "ia3", "feedforward_modules": ["down_proj"]},
    "vera": {"type": "vera", "rank": 8},
    "oft": {"type": "oft", "oft_block_size": BLOCK},
    "miss": {"type": "miss", "rank": BLOCK},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_losses_equal_a_plain_torch_loop_whatever_the_micro_batch(kind, model_folder, rows, tmp_path):
    adapter = ADAPTERS[kind]
    whole, recorder = train_with_tunekit(model_folder, rows, tmp_path / "whole", adapter, BATCH)
    halved, _ = train_with_tunekit(model_folder, rows, tmp_path / "halved", adapter, BATCH // 2)
    expected = reference_losses(model_folder, rows, recorder, adapter)
    assert len(whole) == STEPS
    assert whole[-1] < whole[0] - 0.05
    assert whole == pytest.approx(expected, abs=1e-5)
    assert halved == pytest.approx(whole, abs=1e-5)
