"""Which causal language models train, and whether on their own loss: every type of the installed transformers, tiny.

    python -m benchmarks.models [MODEL_TYPE ...] [--only NAME ...] [--jobs N] [--seconds N] [--save]
    python -m benchmarks.models --page

A model of random weights is saved for each type (`benchmarks/tiny_models.py`), and each of these is a run of tunekit on
it, of one step of plain gradient descent in float32:

- `lora`: SFT of adapters of all linear layers, whose first loss and gradients are compared with those of transformers'
  and PEFT's own model on the same rows;
- `full`: all weights, compared with transformers' model;
- `packed`: the same with rows packed behind one another, compared with transformers' model on each row alone;
- `qlora`: adapters on weights in 4 bits, compared with transformers' model that has the values which bitsandbytes makes
  of each linear layer and each stack of experts;
- `dpo`: preferences, compared with the formula on log-probabilities of transformers' model;
- `grpo`: answers to prompts, rewarded for a vowel; it `runs`, and is compared with nothing;
- `ddp`, `fsdp2`: the run of `lora` in two processes, compared with the one of a single process;
- `export`: the adapter of `lora` merged, compared with PEFT's model on the same rows;
- `kernels`: it `lists` what tunekit's kernels computed in the run of `lora`.

With `--save`, results are written as they come, beside those of other types and runs from before; `--page` writes
`docs/models.md` of them.

The routers' auxiliary loss is off, which is a mean over each micro-batch, and so is the noise of routers that draw
experts at random in training (PhiMoE). Gradients are taken from outside: what a step
of gradient descent added to the saved weights, divided by the rate. What comes out is one word (`same`, `other loss`,
`other gradients`, `refused`, `crash`, `timeout`) and the figures or the message behind it. A type that transformers
cannot compute a loss of at these sizes is `not built`.
"""

import argparse
import json
import multiprocessing
import os
import queue
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.circumstances import ROOT, circumstances, in_words
from benchmarks.tiny_models import MULTIMODAL, auto_class, tiny_model
from tests.processes import PRELOADED, in_processes
from tests.tiny import make_tokenizer
from tunekit.estimates.models.model_config import read_past_of
from tunekit.models.load import complete_outputs

RESULTS = Path(__file__).parent / "results" / "models.json"
PAGE = ROOT / "docs" / "models.md"
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")
RATE = 8.0
"""Learning rate of the one step: a large one leaves digits of gradients that are small beside their weights."""

LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
"""Largest difference of a tensor's gradient, as a share of the largest gradient of that tensor or, where that is more,
of a thousandth of the largest of all: a weight minus a weight has no more digits."""

CHATS = [
    ("What is two and two?", "Four."),
    ("Name a colour of the sky.", "It is blue at noon and red at night."),
    ("Say hello", "Hello there!"),
    ("Who wrote Faust?", "Goethe did"),
]
WORSE = ["Five, I believe.", "Green", "No", "It was somebody else, long ago"]

Runs = dict[str, dict[str, Any]]
"""Results of a type by the names of runs: `verdict`, `detail` and `commit`."""

Row = tuple[list[int], list[int]]
"""Token ids of a row, and its labels."""


IN_TWO = "in two processes"
"""Word of a type's process that asks for two others."""


class Other(Exception):
    """A run that came to its end and computed something else."""


def main() -> None:
    """Check, print a line for each type and run, and with `--save` keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_type", nargs="*", help="types to check (all)")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="runs to make (all)")
    parser.add_argument("--jobs", type=int, default=2, help="types at a time")
    parser.add_argument("--seconds", type=float, default=300, help="limit of one run")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} of saved results, and check nothing")
    args = parser.parse_args()
    if args.page:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
        return
    names = args.model_type or sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL})
    table: dict[str, dict[str, dict[str, Any]]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, results in zip(
            names, pool.map(lambda name: checked(name, args.only, args.seconds), names), strict=True
        ):
            table[name] = results
            if args.save:
                _keep(name, results)
            for run, result in results.items():
                print(f"{name:26} {run:6} {result['verdict']:16} {result['detail']}", flush=True)
    for run in args.only:
        print(f"{run:6}", dict(Counter(results[run]["verdict"] for results in table.values() if run in results)))
    print(in_words(PACKAGES))


def _keep(name: str, results: Runs) -> None:
    """Write the results of a type beside those of other types and runs, unless these are of other versions.

    A type that cannot be built with the table's torch may be added with another one, which its results name.
    """
    now = circumstances(PACKAGES)
    saved = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else now | {"types": {}}
    before: Runs = saved["types"].get(name, {})
    is_built = all(result["verdict"] != "not built" for result in results.values())
    of_other_torch = any("torch" in result for result in before.values())
    extra = {}
    if now["versions"] != saved["versions"]:
        torch = {"torch": saved["versions"]["torch"]}
        if now["versions"] | torch == saved["versions"] and (of_other_torch or "not built" in _verdicts(before)):
            extra = {"torch": now["versions"]["torch"]}
        else:
            saved, before = now | {"types": {}}, {}
    elif of_other_torch and not is_built:
        return
    if not is_built or "not built" in _verdicts(before):
        before = {}
    saved["types"][name] = before | {
        run: {**result, "commit": now["commit"], **extra} for run, result in results.items()
    }
    of_all = {key: (saved if extra else now)[key] for key in ("date", "machine", "python", "versions")}
    text = json.dumps({**of_all, "types": dict(sorted(saved["types"].items()))}, indent=1, ensure_ascii=False)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def _verdicts(results: Runs) -> set[str]:
    return {result["verdict"] for result in results.values()}


def page(saved: Mapping[str, Any]) -> str:
    """Return the table of types in Markdown.

    Args:
        saved: What `--save` wrote.
    """
    types: dict[str, Runs] = saved["types"]
    built = {name: runs for name, runs in types.items() if all(r["verdict"] != "not built" for r in runs.values())}
    versions = ", ".join(f"{name} {number}" for name, number in saved["versions"].items())
    causal = {name: runs for name, runs in built.items() if name not in MULTIMODAL}
    missing = sorted(set(types) - set(built))
    lines = [
        "# Models",
        "",
        "Every causal language model of the installed Transformers, tiny and of random weights, trained for a step and",
        "compared with plain Transformers and PEFT in float32: first loss to 1e-4, gradients to 1e-3 of the largest.",
        "What each column is: `benchmarks/models.py`.",
        "",
        f"{saved['date']}, {saved['machine']['device']}, {versions}. `python -m benchmarks.models --save`.",
        "",
        f"Of {len(causal)} causal types, {_same(causal, 'lora')} train LoRA as plain Transformers and PEFT do. These",
        f"pass the other runs, where they were run: {_shares(causal)}",
        "",
        "`yes`: the same (GRPO: it ran). `refused`: with the reason below. An empty cell was not run.",
        *_other_torch(built),
        "",
        *_rows(causal),
        "",
        "## Models of pictures and sound, trained on text",
        "",
        *_rows({name: runs for name, runs in built.items() if name in MULTIMODAL}),
        "",
        "## Refused",
        "",
        *_refusals(built),
        "",
        "## Kernels",
        "",
        "tunekit's kernels that computed in the run of LoRA.",
        "",
        *_kernels_of(built),
        "",
        "## Not built",
        "",
        f"Transformers computes no loss of these {len(missing)} types at the sizes tried: {', '.join(missing)}.",
    ]
    left = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL} - set(types))
    if left:
        lines += ["", "## Not run", "", f"{', '.join(left)}."]
    return "\n".join(lines) + "\n"


def _same(types: Mapping[str, Runs], run: str) -> int:
    return sum(runs[run]["verdict"] == "same" for runs in types.values() if run in runs)


def _shares(types: Mapping[str, Runs]) -> str:
    """Return how many of the types that train LoRA pass each of the other runs, of those that were run."""
    train = {name: runs for name, runs in types.items() if runs.get("lora", {}).get("verdict") == "same"}
    ran = {run: sum(run in runs for runs in train.values()) for run in SHOWN if run not in ("lora", "grpo")}
    return f"{', '.join(f'{run} {_same(train, run)} of {num}' for run, num in ran.items())}."


def _rows(types: Mapping[str, Runs]) -> list[str]:
    words = {"same": "yes", "runs": "yes", "not compared": ""}
    lines = [f"| type | {' | '.join(SHOWN)} |", f"|---|{'---|' * len(SHOWN)}"]
    for name, runs in types.items():
        cells = [runs[run]["verdict"] if run in runs else "" for run in SHOWN]
        lines.append(f"| {name} | {' | '.join(words.get(cell, cell) for cell in cells)} |")
    return lines


def _other_torch(types: Mapping[str, Runs]) -> list[str]:
    """Return a line for the types that were run with another torch than the table's; none where there are none."""
    torch = {name: result["torch"] for name, runs in types.items() for result in runs.values() if "torch" in result}
    return [f"Run with another torch: {', '.join(f'{name} ({version})' for name, version in torch.items())}."] * bool(
        torch
    )


def _refusals(types: Mapping[str, Runs]) -> list[str]:
    """Return a line for each reason, with its types and their runs."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for name, runs in types.items():
        for run, result in runs.items():
            if result["verdict"] == "refused":
                reason = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "TYPE", _reason(result["detail"]))
                reasons.setdefault(reason, {}).setdefault(name, []).append(run)
    lines = []
    for reason, refused in reasons.items():
        groups: dict[str, list[str]] = {}
        for name, runs in refused.items():
            groups.setdefault(", ".join(runs), []).append(name)
        whose = "; ".join(f"{', '.join(names)} ({columns})" for columns, names in groups.items())
        lines.append(f"- {reason}: {whose}")
    return lines


def _kernels_of(types: Mapping[str, Runs]) -> list[str]:
    """Return a line for each set of kernels, with its types."""
    groups: dict[str, list[str]] = {}
    for name, runs in types.items():
        if "kernels" in runs:
            groups.setdefault(runs["kernels"]["detail"] or "none", []).append(name)
    return [f"- {kernels}: {', '.join(names)}" for kernels, names in sorted(groups.items())]


def _reason(detail: str) -> str:
    """The message of an error without its class and its place."""
    return detail.partition(": ")[2].rpartition(" (")[0]


def checked(model_type: str, only: list[str], seconds: float) -> dict[str, dict[str, Any]]:
    """Check a type in a process of its own, so that a crash or a hang costs that type alone.

    Args:
        model_type: The type.
        only: Names of `RUNS`.
        seconds: What each may take.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.models", "tunekit.api.verbs", *PRELOADED])
    answers, trained = context.Queue(), context.Queue()
    process = context.Process(target=_check, args=(model_type, only, answers, trained))
    process.start()
    results: dict[str, dict[str, Any]] = {}
    for run in only:
        try:
            verdict, detail = answers.get(timeout=seconds)
            if verdict == IN_TWO:
                trained.put(_trained_in_two(detail))
                verdict, detail = answers.get(timeout=seconds)
        except queue.Empty:
            verdict, detail = ("timeout", "") if process.is_alive() else ("crash", f"exit {process.exitcode}")
        results[run] = {"verdict": verdict, "detail": detail}
        if verdict in ("timeout", "not built"):
            break
    process.kill()
    process.join()
    return results


def _trained_in_two(run: str) -> str | None:
    """Train a run in two processes, which have the libraries of this one, and return how they failed."""
    try:
        in_processes(2, _worked, Path(run))
    except AssertionError as error:
        return str(error)
    return None


def _check(model_type: str, only: list[str], answers: Any, trained: Any) -> None:
    """Check a type and put a verdict for each run, and before that what is to be trained in two processes.

    Args:
        model_type: The type.
        only: Names of `RUNS`.
        answers: Queue of what is put.
        trained: Queue of how the two processes failed, or None.
    """
    global _train_in_two

    def asked(run: Path) -> None:
        answers.put((IN_TWO, str(run)))
        failure = trained.get()
        assert failure is None, failure

    _train_in_two = asked
    sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    _leave_out_noise()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            _save(model_type)
        except Exception as error:  # noqa: BLE001
            answers.put(("not built", _words(error)))
            return
        for run in only:
            answers.put(_verdict(RUNS[run]))


def _leave_out_noise() -> None:
    """Have draws of exponential values be ones in this process: only routers of PhiMoE draw them in a forward pass."""
    torch.Tensor.exponential_ = lambda tensor, *_, **__: tensor.fill_(1.0)  # type: ignore[method-assign]


def _verdict(run: Callable[[], str]) -> tuple[str, str]:
    from tunekit.errors import TunekitError

    try:
        return "same", run()
    except Other as error:
        return str(error.args[0]), str(error.args[1])
    except TunekitError as error:
        return "refused", _words(error)
    except Exception as error:  # noqa: BLE001
        return "crash", _words(error)


def _words(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).replace(f"{Path.cwd()}/", "").split())
    return f"{type(error).__name__}: {words[-400:]} ({Path(place.filename).name}:{place.lineno})"


def _save(model_type: str) -> None:
    """Save the model, its tokenizer and rows into the working directory, once the model itself has given a loss."""
    model = tiny_model(model_type)
    ids = torch.arange(3, 20)[None]
    if not torch.isfinite(model(input_ids=ids, labels=ids).loss):
        raise ValueError("its loss is not a number")
    model.save_pretrained("model")
    make_tokenizer().save_pretrained("model")
    chats = [{"messages": _messages(question, answer)} for question, answer in CHATS]
    pairs = [
        {
            "prompt": [{"role": "user", "content": question}],
            "chosen": [{"role": "assistant", "content": answer}],
            "rejected": [{"role": "assistant", "content": worse}],
        }
        for (question, answer), worse in zip(CHATS, WORSE, strict=True)
    ]
    prompts = [{"prompt": pair["prompt"]} for pair in pairs]
    for name, rows in (("chats", chats), ("pairs", pairs), ("prompts", prompts)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def recipe(name: str, rows: str = "chats.jsonl", **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe of a run of one step of gradient descent, into the folder of its name."""
    train = {
        "max_steps": 1, "global_batch_size": 4, "micro_batch_size": 2, "optim": "sgd", "learning_rate": RATE,
        "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 1e9, "gradient_checkpointing": False,
    }  # fmt: skip
    data = {"train": rows, "max_length": 128, **sections.pop("data", {})}
    output = {"dir": name, "sample_prompts": []}
    method = {"type": "sft", "trainer_args": {"router_aux_loss_coef": 0.0}, **sections.pop("method", {})}
    return {"model": "model", "data": data, "train": train, "output": output, "method": method, **sections}


LORA = {"type": "lora", "rank": 4, "alpha": 4, "dropout": 0.0}


def _lora() -> str:
    import tunekit

    run = tunekit.train(recipe("lora", adapter=LORA))
    return _adapter_compared(run, Path("lora") / "model", _mean_loss)


def _adapter_compared(
    run: Any, adapter: Path, loss_of: Callable[[torch.nn.Module], torch.Tensor], base: PreTrainedModel | None = None
) -> str:
    """Compare an adapter's B matrices, zero before the step, with the gradients of a loss by PEFT and transformers."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(base or _model(), adapter, is_trainable=True)
    matrices = {name.replace(".default", ""): weight for name, weight in model.named_parameters() if _is_b(name)}
    for matrix in matrices.values():
        matrix.data.zero_()
    loss = loss_of(model)
    loss.backward()
    gradients = {name: matrix.grad for name, matrix in matrices.items() if matrix.grad is not None}
    after = _tensors(adapter)
    return _compared(_first_loss(run), loss.item(), {name: -after[name] / RATE for name in gradients}, gradients)


def _is_b(name: str) -> bool:
    return "lora_B" in name or "lora_embedding_B" in name


def _qlora() -> str:
    import tunekit

    run = tunekit.train(recipe("qlora", adapter={**LORA, "type": "qlora"}))
    return _adapter_compared(run, Path("qlora") / "model", _mean_loss, _in_4_bits(_model()))


def _in_4_bits(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model the values that QLoRA has: of linear layers, and of all experts of a layer.

    The head stays, and so do layers that transformers never quantizes or whose weights its code reads past them.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    head, past = model.get_output_embeddings(), read_past_of(model.config.model_type)
    kept = list(model._keep_in_fp32_modules)
    for name, module in model.named_modules():
        is_linear = type(module) in (torch.nn.Linear, Conv1D) and module is not head
        is_linear = is_linear and name.rpartition(".")[2] not in past and should_convert_module(name, kept)
        stacks = [
            weight for weight in module.parameters(recurse=False) if weight.dim() == 3 and "has_gate" in vars(module)
        ]
        for weight in [module.weight] if is_linear else stacks:
            value = (weight.data.T if isinstance(module, Conv1D) else weight.data).contiguous()
            # With AVX-512, bitsandbytes misreads rows that end within a block of 64.
            blocks = F.pad(value.view(-1), (0, -value.numel() % 64)).view(-1, 64)
            packed, state = quantize_4bit(blocks, quant_type="nf4", compress_statistics=True)
            dense = dequantize_4bit(packed, state).view(-1)[: value.numel()].view(value.shape)
            weight.data = dense.T if isinstance(module, Conv1D) else dense
    return model


def _grpo() -> str:
    import tunekit

    method = {
        "type": "grpo",
        "rewards": [{"type": "regex", "pattern": "[aeiou]"}],
        "num_generations": 2,
        "max_completion_length": 4,
    }
    run = tunekit.train(recipe("grpo", "prompts.jsonl", adapter=LORA, method=method))
    raise Other("runs", f"loss {_first_loss(run):.4f}")


def _export() -> str:
    from peft import PeftModel

    import tunekit

    if not (Path("lora") / "model").exists():
        raise Other("not compared", "the run with adapters did not train")
    tunekit.export("lora", "merged", kind="merged")
    with torch.no_grad():
        loss = _mean_loss(_model(Path("merged"))).item()
        wanted = _mean_loss(PeftModel.from_pretrained(_model(), Path("lora") / "model")).item()
    return _compared(loss, wanted, {}, {})


def _kernels() -> str:
    from tunekit.runs.run import Run

    forms = Counter[str]()
    for event in Run("lora").events() if Path("lora").exists() else []:
        if event["event"] == "fused":
            forms.update(line["form"] for line in event["lines"] if line["form"] and line["reason"] is None)
    raise Other("lists", ", ".join(sorted(forms)))


def _full(name: str, **data: Any) -> Callable[[], str]:
    def run() -> str:
        import tunekit

        trained_run = tunekit.train(recipe(name, adapter={"type": "full"}, data=data))
        model = _model()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        loss = _mean_loss(model)
        loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        trained = dict(_model(Path(name) / "model").named_parameters())
        moved = {name: (before[name] - trained[name]) / RATE for name in gradients}
        return _compared(_first_loss(trained_run), loss.item(), moved, gradients)

    return run


def _dpo() -> str:
    import tunekit

    run = tunekit.train(recipe("dpo", "pairs.jsonl", adapter=LORA, method={"type": "dpo"}))
    return _adapter_compared(run, Path("dpo") / "model", _dpo_loss)


def _dpo_loss(model: torch.nn.Module) -> torch.Tensor:
    """Loss of DPO (arXiv 2305.18290, equation 7) with the model as its own reference."""
    losses = []
    for (question, answer), worse in zip(CHATS, WORSE, strict=True):
        chosen, rejected = (-_token_losses(model, _pair_row(question, text)).sum() for text in (answer, worse))
        losses.append(-F.logsigmoid(0.1 * ((chosen - chosen.detach()) - (rejected - rejected.detach()))))
    return torch.stack(losses).mean()


def _train_in_two(run: Path) -> None:
    """Train a run in two processes."""
    in_processes(2, _worked, run)


def _in_two(strategy: str) -> Callable[[], str]:
    def run() -> str:
        from tunekit.api import verbs
        from tunekit.runs.run import Run

        if not (Path("lora") / "model").exists():
            raise Other("not compared", "the run in one process did not train")
        prepared = verbs.make_run(recipe(strategy, adapter=LORA, parallel={"num_processes": 2, "strategy": strategy}))
        _train_in_two(prepared.path.resolve())
        one, two = (_tensors(Path(name) / "model") for name in ("lora", strategy))
        gradients = {name: -value / RATE for name, value in one.items() if _is_b(name)}
        moved = {name: -two[name] / RATE for name in gradients}
        return _compared(_first_loss(prepared), _first_loss(Run("lora")), moved, gradients)

    return run


def _worked(run: Path) -> None:
    from tests.training.engines import worked

    _leave_out_noise()
    worked(run, None)


RUNS: dict[str, Callable[[], str]] = {
    "lora": _lora,
    "full": _full("full"),
    "packed": _full("packed", packing=True),
    "qlora": _qlora,
    "dpo": _dpo,
    "grpo": _grpo,
    "ddp": _in_two("ddp"),
    "fsdp2": _in_two("fsdp2"),
    "export": _export,
    "kernels": _kernels,
}

SHOWN = [run for run in RUNS if run != "kernels"]
"""Columns of the page."""


def _model(folder: Path = Path("model")) -> PreTrainedModel:
    loader: Any = auto_class(AutoConfig.from_pretrained(folder).model_type)
    model: PreTrainedModel = loader.from_pretrained(folder, dtype=torch.float32).train()
    complete_outputs(model)
    return model


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def _first_loss(run: Any) -> float:
    return float(next(event["loss"] for event in run.events() if event["event"] == "log" and "loss" in event))


def _row(question: str, answer: str) -> Row:
    """Token ids of an exchange and labels of its answer, by the tokenizer's own template."""
    encoded = make_tokenizer().apply_chat_template(
        _messages(question, answer), return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    return ids, [token if learned else -100 for token, learned in zip(ids, mask, strict=True)]


def _pair_row(question: str, answer: str) -> Row:
    """Token ids of an exchange and labels of all that stands behind its prompt, as preferences count it."""
    tokenizer = make_tokenizer()
    ids = tokenizer.apply_chat_template(_messages(question, answer), return_dict=False)
    messages = _messages(question, answer)[:1]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids, [-100] * len(prompt) + ids[len(prompt) :]


def _token_losses(model: torch.nn.Module, row: Row) -> torch.Tensor:
    """Cross-entropy of the learned tokens of a row by the logits of the model: `(learned tokens,)`."""
    ids, labels = (torch.tensor([values]) for values in row)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, :-1].float()
    losses = F.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="none")
    return losses[labels[0, 1:] != -100]


def _mean_loss(model: torch.nn.Module) -> torch.Tensor:
    """Mean over the learned tokens of all rows, each row alone."""
    return torch.cat([_token_losses(model, _row(question, answer)) for question, answer in CHATS]).mean()


def _compared(
    loss: float, wanted: float, gradients: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> str:
    """Words on how near a run came.

    Raises:
        Other: It is not near enough.
    """
    if not abs(loss - wanted) <= LOSS_TOLERANCE * max(1.0, abs(wanted)):
        raise Other("other loss", f"{loss:.6f} instead of {wanted:.6f}")
    largest = max((float(value.abs().max()) for value in expected.values()), default=0.0)
    worst, where = 0.0, ""
    for name, value in expected.items():
        scale = max(float(value.abs().max()), 1e-3 * largest)
        share = float((gradients[name] - value).abs().max()) / scale if scale else 0.0
        if not share <= worst:
            worst, where = share, name
    if not worst <= GRADIENT_TOLERANCE:
        raise Other("other gradients", f"{worst:.1e} of {where}")
    return f"loss {loss:.4f}, {abs(loss - wanted):.0e}; {len(expected)} gradients, {worst:.0e}"


if __name__ == "__main__":
    main()
