"""The reference of a run: plain torch, transformers and PEFT on one process, each sequence by itself.

Nothing here imports tunekit. Borrowed from the run are the trained parameters that are drawn at random (matrices A, a
new score head), and the order of packs, which no document defines; all else follows from the recipe and the rows.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, logsigmoid

from benchmarks.fuzz.encode import Learned, Pair, answers, sequences

Batch = list[Any]
"""Rows of a step: `Learned` or `Pair`."""

STORED = re.compile(r"^base_model\.model\.|\.modules_to_save(?=\.)|\.default(?=\.|$)|\.original_module(?=\.)")
"""Parts that PEFT adds to the names of a model."""


DRAWN = re.compile(r"(lora|ia3|vera|oft)_|^score\.")
"""Names of parameters that are drawn at random."""


def plain(name: str) -> str:
    """Return the name of a parameter without what PEFT adds to it."""
    return STORED.sub("", name)


@dataclass(frozen=True)
class Given:
    """Inputs of the reference.

    Attributes:
        recipe: The recipe as it was run.
        model: Folder of the model.
        adapter: Folder of the adapter that is trained further; None without.
        train_rows: Rows of each source.
        eval_rows: Rows to evaluate on.
        start: Trained parameters at the first step by plain name, borrowed for those that are random.
        steps: Token ids of the sequences of each step, where the order is borrowed.
        num_steps: Steps of the run where their number follows from the packs.
    """

    recipe: Mapping[str, Any]
    model: Path
    adapter: Path | None
    train_rows: Sequence[Sequence[Mapping[str, Any]]]
    eval_rows: Sequence[Mapping[str, Any]]
    start: Mapping[str, torch.Tensor]
    steps: Mapping[int, Sequence[tuple[int, ...]]] | None
    num_steps: int | None


@dataclass
class Expected:
    """Figures that the run must have, by step.

    Attributes:
        losses: Loss of each step, from the first one.
        grad_norms: Norm of the gradients before they are clipped.
        rates: Learning rate.
        tokens: Tokens read so far.
        evaluated: Loss on the evaluation rows after so many steps.
        gradients: Gradients of the first step, clipped, by plain name.
        largest: Largest gradients of each value over all steps, clipped, by plain name.
        before: Trained parameters before the first step.
        after: The same of the result.
        probe: Loss of the result on the first training rows.
        probe_of: Gives the same of another model.
        rows: Token ids of each step's sequences.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    evaluated: dict[int, float] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    largest: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)
    probe: float = math.nan
    probe_of: Callable[[Any], float] = float
    rows: list[list[tuple[int, ...]]] = field(default_factory=list)


class Reference:
    """The training of a recipe, written out.

    Args:
        given: The inputs.
        noise: Largest change of a weight before the first step, as a share of it: what rounding may do.
        seed: Seed of these changes.
    """

    def __init__(self, given: Given, *, noise: float = 0.0, seed: int = 0) -> None:
        from transformers import AutoTokenizer

        self.given = given
        self.kind = given.recipe["method"]["type"]
        self.method, self.train = given.recipe["method"], given.recipe["train"]
        self.data = given.recipe["data"]
        self.tokenizer = AutoTokenizer.from_pretrained(given.model)
        self.rows = self.encode([row for rows in given.train_rows for row in rows])
        self.eval_rows = self.encode(given.eval_rows) if given.eval_rows else []
        self.model = adapted(given)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters() if noise else ():
            parameter.data *= 1 + noise * (2 * torch.rand(parameter.shape, generator=generator) - 1)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.is_frozen_copy = self.kind in ("dpo", "kto") and given.recipe["adapter"]["type"] == "full"
        rope = given.recipe["model"].get("rope_scaling")
        self.reference = loaded(given.model, self.kind, rope) if self.is_frozen_copy else None
        if given.adapter is not None and self.kind in ("dpo", "kto"):
            self.reference = copy.deepcopy(self.model)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Rows as tokens."""
        max_length = self.data.get("max_length", 1024)
        if self.kind == "sft":
            loss_on = self.data.get("loss_on", "assistant")
            return list(sequences(rows, self.tokenizer, max_length=max_length, loss_on=loss_on))
        return list(answers(rows, self.tokenizer, max_length=max_length, classifies=self.kind == "reward"))

    # Order of the rows.

    @property
    def in_fixed_order(self) -> bool:
        """True for a loss that couples the rows of a step, so that each epoch has the same order."""
        return self.kind == "kto" and self.method.get("loss_type", "kto") == "kto"

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run."""
        if self.given.num_steps is not None:
            return self.given.num_steps
        if "max_steps" in self.train:
            return int(self.train["max_steps"])
        return math.ceil(self.train.get("num_epochs", 1) * math.ceil(len(self.rows) / self.train["global_batch_size"]))

    def batches(self) -> Iterator[Batch]:
        """The rows of each step."""
        if self.given.steps is not None:
            known: dict[tuple[int, ...], list[Learned]] = {}
            for row in self.rows:
                known.setdefault(row.ids, []).append(row)
            for step in range(self.num_steps):
                yield [known[ids][0] for ids in self.given.steps[step]]
            return
        epoch = 0
        size = self.train["global_batch_size"]
        left = self.num_steps
        while left:
            order = self.order(0 if self.in_fixed_order else epoch)
            steps = [order[at : at + size] for at in range(0, len(order), size)][:left]
            yield from ([self.rows[i] for i in step] for step in steps)
            left, epoch = left - len(steps), epoch + 1

    def order(self, epoch: int) -> list[int]:
        """Order of the rows in an epoch, with the rows of its beginning that fill the last step of a mean over rows."""
        num = len(self.rows)
        order = list(range(num))
        if self.data.get("curriculum") == "length":
            order.sort(key=lambda i: len(self.rows[i].ids))
        elif self.data.get("shuffle", True):
            order = torch.randperm(num, generator=torch.Generator().manual_seed(self.train["seed"] + epoch)).tolist()
        if self.kind == "sft":
            return order
        missing = -num % self.train["global_batch_size"]
        return order + [order[i % num] for i in range(missing)]

    # Losses.

    def log_probs(self, model: Any, ids: Sequence[int], start: int) -> torch.Tensor:
        """Log-probabilities of the tokens of a sequence behind the first ones: `(tokens,)`."""
        tokens = torch.tensor([ids])
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits[0].float()
        start = max(start, 1)
        return logits[start - 1 : -1].log_softmax(-1).gather(-1, tokens[0, start:, None])[:, 0]

    def loss(self, model: Any, batch: Batch, micro: int) -> torch.Tensor:
        """Loss of the rows of a step."""
        if self.kind == "sft":
            count = sum(label != -100 for row in batch for label in row.labels)
            return sum((_nats(model, row) for row in batch), torch.zeros(())) / count
        size = len(batch) if self.in_fixed_order else micro
        chunks = [batch[at : at + size] for at in range(0, len(batch), size)]
        return torch.stack([self.pair_loss(model, chunk) for chunk in chunks]).mean()

    def pair_loss(self, model: Any, batch: list[Pair]) -> torch.Tensor:
        """Loss of a micro-batch of pairs or of answers, or of a step whose rows are coupled."""
        losses: dict[str, Callable[[Any, list[Pair]], torch.Tensor]] = {
            "dpo": self._dpo, "kto": self._kto, "orpo": self._orpo, "cpo": self._cpo, "reward": self._reward,
        }  # fmt: skip
        return losses[self.kind](model, batch)

    def _of_reference(self, ids: Sequence[int], start: int) -> torch.Tensor:
        """Log-probability of an answer before training."""
        with torch.no_grad():
            if self.reference is not None:
                return self.log_probs(self.reference, ids, start).sum()
            with self.model.disable_adapter():
                return self.log_probs(self.model, ids, start).sum()

    def _dpo(self, model: Any, batch: list[Pair]) -> torch.Tensor:
        beta, (kind,) = self.method.get("beta", 0.1), self.method.get("loss_type", ["sigmoid"])
        losses = []
        for pair in batch:
            ratios, means = [], []
            for num, ids in zip(pair.num_prompt, pair.answers, strict=True):
                ratios.append(self.log_probs(model, ids, num).sum() - self._of_reference(ids, num))
                means.append(ratios[-1] / max(1, len(ids) - max(num, 1)))
            losses.append(pairwise(kind, beta, ratios[0], ratios[1], means[0] - means[1]))
        return torch.stack(losses).mean()

    def _kto(self, model: Any, batch: list[Pair]) -> torch.Tensor:
        beta, divergence = self.method.get("beta", 0.1), torch.zeros(())
        if self.in_fixed_order:
            # Each prompt with the answer of the row before it, of its step or of all rows that are evaluated.
            ratios = []
            for i, pair in enumerate(batch):
                other = batch[i - 1]
                answer = other.full[other.num_prompt[0] :]
                ids = (*pair.full[: pair.num_prompt[0]], *answer)[: self.data["max_length"]]
                with torch.no_grad():
                    of_model = self.log_probs(model, ids, pair.num_prompt[0]).sum()
                ratios.append(of_model - self._of_reference(ids, pair.num_prompt[0]))
            divergence = torch.stack(ratios).mean().clamp(min=0)
        losses = []
        for pair in batch:
            (num,), (ids,) = pair.num_prompt, pair.answers
            ratio = self.log_probs(model, ids, num).sum() - self._of_reference(ids, num)
            sign = 1 if pair.label else -1
            weight = self.method.get("desirable_weight" if pair.label else "undesirable_weight", 1.0)
            losses.append(weight * (1 - torch.sigmoid(sign * beta * (ratio - divergence))))
        return torch.stack(losses).mean()

    def _orpo(self, model: Any, batch: list[Pair]) -> torch.Tensor:
        beta, ratios, whole = self.method.get("beta", 0.1), [], []
        for pair in batch:
            odds = []
            for num, ids in zip(pair.num_prompt, pair.answers, strict=True):
                mean = self.log_probs(model, ids, num).mean()
                odds.append(mean - torch.log1p(-torch.exp(mean)))
            ratios.append(logsigmoid(odds[0] - odds[1]))
            whole.append(self.log_probs(model, pair.answers[0], 1))
        return -torch.cat(whole).mean() - beta * torch.stack(ratios).mean()

    def _cpo(self, model: Any, batch: list[Pair]) -> torch.Tensor:
        method, kind = self.method, self.method.get("loss_type", "sigmoid")
        beta, smoothing = method.get("beta", 0.1), method.get("label_smoothing", 0.0)
        alpha = method.get("cpo_alpha", 0.0 if kind == "simpo" else 1.0)
        losses, chosen = [], []
        for pair in batch:
            parts = [self.log_probs(model, ids, num) for num, ids in zip(pair.num_prompt, pair.answers, strict=True)]
            chosen.append(parts[0])
            scores = [part.mean() if kind in ("ipo", "simpo") else part.sum() for part in parts]
            margin = scores[0] - scores[1]
            if kind == "hinge":
                losses.append(torch.relu(1 - beta * margin))
            elif kind == "ipo":
                losses.append((margin - 1 / (2 * beta)) ** 2)
            else:
                logit = beta * margin - (method.get("simpo_gamma", 0.5) if kind == "simpo" else 0.0)
                losses.append(-logsigmoid(logit) * (1 - smoothing) - logsigmoid(-logit) * smoothing)
        return torch.stack(losses).mean() - alpha * torch.cat(chosen).mean()

    def _reward(self, model: Any, batch: list[Pair]) -> torch.Tensor:
        losses = []
        for pair in batch:
            chosen, rejected = (self._score(model, ids) for ids in pair.answers)
            center = self.method.get("center_rewards_coefficient") or 0.0
            losses.append(-logsigmoid(chosen - rejected) + center * (chosen + rejected) ** 2)
        return torch.stack(losses).mean()

    def _score(self, model: Any, ids: Sequence[int]) -> torch.Tensor:
        tokens = torch.tensor([ids])
        score: torch.Tensor = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0, 0].float()
        return score

    @torch.no_grad()
    def evaluate(self, model: Any) -> float:
        """Loss on the evaluation rows: over their tokens, or their mean."""
        model.eval()
        try:
            return float(self.loss(model, self.eval_rows, self.eval_micro()))
        finally:
            model.train()

    def eval_micro(self) -> int:
        """Rows that are evaluated at once, which a loss that couples them depends on."""
        micro, num = self.train["micro_batch_size"], self.given.recipe.get("parallel", {}).get("num_processes", 1)
        return next((size for size in range(micro, 0, -1) if len(self.eval_rows) % (size * num) == 0), 1)

    # The loop.

    def run(self) -> Expected:
        """Train, and return what came of it."""
        expected = Expected()
        expected.before = {plain(name): p.detach().clone() for name, p in self.trained.items()}
        groups = list(self.groups())
        optimizer = optimizer_of(self.train.get("optim", "adamw_torch"), groups, self.warmup)
        switch = self._modes(optimizer, average := {})
        peaks = [group["lr"] for group in groups]
        # The log has the recipe's rate, or that of the first parameters where none is trained at it.
        shown = self.train["learning_rate"] if self.train["learning_rate"] in peaks else peaks[0]
        self._evaluate_at(expected, 0, switch)
        for step, batch in enumerate(self.batches()):
            expected.rows.append([ids for row in batch for ids in (row.answers if self.kind != "sft" else (row.ids,))])
            loss = self.loss(self.model, batch, self.train["micro_batch_size"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), self.train.get("max_grad_norm", 1.0))
            gradients = {plain(name): p.grad.clone() for name, p in self.trained.items() if p.grad is not None}
            expected.gradients = expected.gradients or gradients
            for name, value in gradients.items():
                expected.largest[name] = torch.maximum(expected.largest.get(name, value.abs()), value.abs())
            factor = self.factor(step)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
            self._average(average)
            expected.losses.append(float(loss))
            expected.grad_norms.append(float(norm))
            expected.rates.append(shown * factor)
            num = sum(map(len, expected.rows[-1]))
            expected.tokens.append(num + (expected.tokens[-1] if expected.tokens else 0))
            self._evaluate_at(expected, step + 1, switch)
        switch(averaged=True)
        expected.after = {plain(name): p.detach().clone() for name, p in self.trained.items()}
        expected.probe, expected.probe_of = self.probe(self.model.eval()), self.probe
        return expected

    @torch.no_grad()
    def probe(self, model: Any) -> float:
        """Loss of a model on the first rows."""
        return float(self.loss(model, self.rows[:4], min(4, len(self.rows))))

    def _modes(self, optimizer: Any, average: dict[str, torch.Tensor]) -> Callable[..., None]:
        """Return what gives the model the averaged weights, or those that are trained again."""

        def switch(*, averaged: bool) -> None:
            if self.train.get("optim") == "schedule_free_adamw":
                (optimizer.eval if averaged else optimizer.train)()
            else:
                self._switch(average)

        return switch

    def _evaluate_at(self, expected: Expected, step: int, switch: Callable[..., None]) -> None:
        if not self.eval_rows:
            return
        often = self.train.get("eval_steps") or max(1, math.ceil(self.num_steps / 4))
        if step == 0 or step == self.num_steps or step % often == 0:
            switch(averaged=True)
            expected.evaluated[step] = self.evaluate(self.model)
            switch(averaged=False)

    @torch.no_grad()
    def _average(self, average: dict[str, torch.Tensor]) -> None:
        decay = self.train.get("ema_decay")
        if decay is None:
            return
        for name, weight in self.trained.items():
            if name in average:
                average[name] = decay * average[name] + (1 - decay) * weight
            elif weight.grad is not None:
                average[name] = weight.detach().clone()

    @torch.no_grad()
    def _switch(self, average: dict[str, torch.Tensor]) -> None:
        """Exchange the weights and their averages."""
        for name in average:
            former = self.trained[name].detach().clone()
            self.trained[name].copy_(average[name])
            average[name] = former

    def groups(self) -> Iterator[dict[str, Any]]:
        """Each trained parameter with its peak learning rate and its weight decay."""
        layers = self.model.config.num_hidden_layers
        norms = {
            f"{name}.{key}"
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.LayerNorm)
            for key, _ in module.named_parameters(recurse=False)
        }
        embeddings = {
            plain(f"{name}.weight")
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Embedding)
        }
        for name, parameter in self.trained.items():
            bare = plain(name)
            exempt = name in norms or re.search(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)", name.lower())
            decay = 0.0 if exempt else self.train.get("weight_decay", 0.0)
            rate = self.rate(bare, parameter.ndim, layers, is_embedding=bare in embeddings)
            yield {"params": [parameter], "lr": rate, "weight_decay": decay}

    def rate(self, name: str, num_dims: int, layers: int, *, is_embedding: bool) -> float:
        """Peak learning rate of a parameter."""
        for pattern, own in self.train.get("learning_rates", {}).items():
            if re.search(pattern, name):
                return float(own)
        rate = float(self.train["learning_rate"])
        ratio = self.given.recipe["adapter"].get("loraplus_lr_ratio")
        if ratio and ("lora_B" in name or num_dims == 1):
            rate *= ratio
        decay = self.train.get("layerwise_lr_decay")
        if decay:
            layer = re.search(r"\.(\d+)\.", name)
            above = layers - 1 - int(layer[1]) if layer else layers if is_embedding else 0
            rate *= decay**above
        return rate

    @property
    def warmup(self) -> int:
        """Steps of warm-up."""
        given = self.train.get("warmup_steps", 0.03)
        return int(given) if given >= 1 else math.ceil(given * self.num_steps)

    def factor(self, step: int) -> float:
        """Factor of the schedule on the learning rate of a step, counted from 0."""
        kind, total = self.train.get("lr_scheduler_type", "cosine"), self.num_steps
        warmup = self.warmup
        if kind == "constant":
            return 1.0
        if step < warmup:
            return step / warmup
        way = (step - warmup) / max(1, total - warmup)
        least = 1e-7 / self.train["learning_rate"]
        return {
            "linear": lambda: 1 - way,
            "cosine": lambda: 0.5 * (1 + math.cos(math.pi * way)),
            "cosine_with_restarts": lambda: 0.5 * (1 + math.cos(math.pi * (way % 1.0))),
            "constant_with_warmup": lambda: 1.0,
            "polynomial": lambda: (1 - least) * (1 - way) + least,
            "inverse_sqrt": lambda: 1 / math.sqrt((step + (_time(warmup) - warmup)) / _time(warmup)),
        }[kind]()


def _time(warmup: int) -> int:
    return warmup or 10_000


def pairwise(kind: str, beta: float, chosen: torch.Tensor, rejected: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Loss of DPO of a pair, by its name.

    Args:
        kind: The name.
        beta: KL coefficient.
        chosen: Log ratio of the better answer to the reference.
        rejected: That of the other one.
        mean: Difference of the two, each divided by its tokens.
    """
    match kind:
        case "hinge":
            return torch.relu(1 - beta * (chosen - rejected))
        case "ipo":
            return (mean - 1 / (2 * beta)) ** 2
        case "sigmoid_norm":
            return -logsigmoid(beta * mean)
        case "apo_zero":
            return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        case "apo_down":
            return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * (chosen - rejected))
    return -logsigmoid(beta * (chosen - rejected))


def _nats(model: Any, row: Learned) -> torch.Tensor:
    """Negative log-likelihood of the learned tokens of a sequence."""
    ids, labels = torch.tensor([row.ids]), torch.tensor(row.labels)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, :-1].float()
    return cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")


def optimizer_of(name: str, groups: list[dict[str, Any]], warmup: int) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe, of torch's own, or of its author's package."""
    if name == "schedule_free_adamw":
        from schedulefree import AdamWScheduleFree

        averaging: torch.optim.Optimizer = AdamWScheduleFree(groups, warmup_steps=warmup)
        averaging.train()  # type: ignore[attr-defined]
        return averaging
    if name == "adafactor":
        from transformers.optimization import Adafactor

        made: torch.optim.Optimizer = Adafactor(groups, scale_parameter=False, relative_step=False)
        return made
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    if name in kinds:
        rated: torch.optim.Optimizer = kinds[name](groups, lr=1.0)
        return rated
    return torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)


def loaded(folder: Path, kind: str, rope_scaling: Mapping[str, Any] | None = None) -> Any:
    """A model in float32, with a score for a head where that is what is trained, and with scaled positions."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if rope_scaling is not None:
        config = AutoConfig.from_pretrained(folder)
        original = config.max_position_embeddings
        config.rope_parameters = {**config.rope_parameters, **rope_scaling}
        if rope_scaling["rope_type"] == "yarn":
            config.rope_parameters["original_max_position_embeddings"] = original
        config.max_position_embeddings = int(original * rope_scaling["factor"])
        options["config"] = config
    if kind == "reward":
        if "config" in options:
            options["config"].num_labels = 1
        else:
            options["num_labels"] = 1
        return AutoModelForSequenceClassification.from_pretrained(folder, **options)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def base_of(given: Given) -> Any:
    """The frozen model below an adapter: rounded as its type has it."""
    model = loaded(given.model, given.recipe["method"]["type"], given.recipe["model"].get("rope_scaling"))
    if given.recipe["adapter"]["type"] == "qlora":
        round_to_nf4(model)
    if given.recipe["model"]["dtype"] == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    return model


def adapted(given: Given) -> Any:
    """The model with what is trained of it, at the start."""
    adapter = given.recipe["adapter"]
    if adapter["type"] == "full":
        model = loaded(given.model, given.recipe["method"]["type"], given.recipe["model"].get("rope_scaling"))
        layers = model.config.num_hidden_layers
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(_is_trained(adapter, name, layers))
        _take(model, {name: value for name, value in given.start.items() if name == "score.weight"})
        return model.train()
    from peft import get_peft_model

    base = base_of(given)
    if given.adapter is not None:
        from peft import PeftModel

        return PeftModel.from_pretrained(base, given.adapter, is_trainable=True).train()
    model = get_peft_model(base, peft_config(adapter, given.recipe["method"]["type"], base))
    missing = {plain(name) for name, p in model.named_parameters() if p.requires_grad} ^ set(given.start)
    assert not missing, f"trained in one of them only: {sorted(missing)}"
    # What is trained whole begins with its stored values, and is not random.
    _take(model, {name: value for name, value in given.start.items() if DRAWN.search(name)})
    if adapter.get("init_lora_weights") in ("pissa", "olora"):
        # The adapter begins with a part of the base, which the base is without.
        for module in model.modules():
            if "lora_A" in dict(module.named_children()):
                module.get_base_layer().weight.data -= module.get_delta_weight("default")
    return model.train()


def _is_trained(adapter: Mapping[str, Any], name: str, layers: int) -> bool:
    if "last_layers" in adapter:
        layer = re.search(r"\.(\d+)\.", name)
        return layer is not None and int(layer[1]) >= layers - adapter["last_layers"]
    patterns = adapter.get("unfrozen_parameters")
    return patterns is None or any(re.search(pattern, name) for pattern in patterns)


@torch.no_grad()
def _take(model: Any, start: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if plain(name) in start and "original_module" not in name:
            parameter.copy_(start[plain(name)])


PATTERNS = ("rank_pattern", "alpha_pattern")


def peft_config(adapter: Mapping[str, Any], kind: str, base: Any) -> Any:
    """Return PEFT's configuration of an adapter."""
    import peft

    task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    shared: dict[str, Any] = {"task_type": task, "target_modules": adapter.get("target_modules", "all-linear")}
    if "modules_to_save" in adapter:
        shared["modules_to_save"] = adapter["modules_to_save"]
    if "layers_to_transform" in adapter:
        # PEFT has no such layers of `all-linear`.
        shared["target_modules"] = [
            name
            for name, module in base.named_modules()
            if type(module).__name__ in ("Linear", "Conv1D")
            and any(f".{layer}." in name for layer in adapter["layers_to_transform"])
        ]
    match adapter["type"]:
        case "ia3":
            return peft.IA3Config(**shared, feedforward_modules=[])
        case "oft":
            return peft.OFTConfig(**shared, oft_block_size=adapter["oft_block_size"], r=0, use_cayley_neumann=True)
        case "vera":
            return peft.VeraConfig(**shared, r=adapter["rank"], d_initial=0.1, projection_prng_key=0)
    options = {name: adapter[name] for name in ("use_rslora", "use_dora", "lora_bias", *PATTERNS) if name in adapter}
    return peft.LoraConfig(**shared, r=adapter["rank"], lora_alpha=adapter["alpha"], **options)


def round_to_nf4(model: Any) -> None:
    """Give the linear layers of a model but for the head the values that they have in 4 bits."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for module in model.modules():
        if type(module).__name__ not in ("Linear", "Conv1D") or module is model.get_output_embeddings():
            continue
        # bitsandbytes has the outputs of a layer first; that of GPT-2 has its inputs first.
        weight = module.weight.data.T if type(module).__name__ == "Conv1D" else module.weight.data
        # As rows of a block each: on some CPUs bitsandbytes misreads rows that end within one.
        packed, state = quantize_4bit(
            weight.reshape(-1, 64).contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        rounded = dequantize_4bit(packed, state).view(weight.shape)
        module.weight.data = (rounded.T if type(module).__name__ == "Conv1D" else rounded).contiguous()
