"""Conversions that most tools share: the batch, the schedule, the sources, and arguments of transformers' Trainer.

TRL, LLaMA-Factory and ms-swift pass these arguments on under their own names.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from tunekit.migration.draft import Draft, UnfitError, carried, is_off, names, number, reason, text, truth, whole
from tunekit.migration.original import Entry
from tunekit.migration.report import Assumed, Fate
from tunekit.migration.table import tool_table
from tunekit.recipe.sections.adapters import InitLoraWeights
from tunekit.recipe.sections.section import Tracker


def set_batch(
    draft: Draft, micro: str, *, devices: str = "", default_micro: int = 1, default_accumulation: int = 1
) -> None:
    """Let the recipe say the batch of a step: what a device takes at once, times accumulation, times devices.

    Args:
        draft: What is made.
        micro: The key of the first factor.
        devices: The key of the third; empty where the tool has none.
        default_micro: The first where the file says nothing.
        default_accumulation: The second where the file says nothing.
    """
    accumulation = "gradient_accumulation_steps"
    num_devices = draft.get(devices)
    if draft.num_devices is None and isinstance(num_devices, int):
        draft.num_devices = num_devices
    try:
        of_device = whole(draft.get(micro, default_micro))
        times = whole(draft.get(accumulation, default_accumulation))
    except UnfitError:
        return
    draft.put("train.global_batch_size", of_device * times * (draft.num_devices or 1), micro, accumulation)
    words = f"was {micro} {of_device} x {accumulation} {times}"
    words += f" x {draft.num_devices} devices" if draft.num_devices else ", for one device"
    draft.comments["train.global_batch_size"] = words
    if draft.num_devices is None:
        what = f"the number of devices is not in the file: train.global_batch_size {of_device * times} assumes one"
        draft.suspect(micro, f"{what}; --num-devices 8 multiplies it")


def batch(draft: Draft, entry: Entry) -> Fate:
    """A key that is a factor of the batch of a step."""
    whole(entry.value)
    words = draft.comments.get("train.global_batch_size", "")
    total = draft.values.get("train.global_batch_size")
    return Fate("carried", f"train.global_batch_size: {total}  ({words})")


def accumulation(draft: Draft, entry: Entry) -> Fate:
    """The accumulation: a factor of the batch, whose split is the plan's."""
    if not isinstance(entry.value, str):
        whole(entry.value)
    total = draft.values.get("train.global_batch_size")
    return Fate("decided", f"the plan splits train.global_batch_size {total} into micro-batches that fit")


def warmup_steps(draft: Draft, entry: Entry) -> Fate:
    """Steps of warm-up, which go before a share."""
    steps = number(entry.value)
    ratio = draft.get("warmup_ratio")
    if ratio:
        if not steps:
            return Fate("silent", "0; warmup_ratio is used")
        draft.suspect(entry.key, f"warmup_steps {steps} and warmup_ratio {ratio} are both set; the steps are used")
    return draft.carry(entry, "train.warmup_steps", steps)


def warmup_ratio(draft: Draft, entry: Entry) -> Fate:
    """A share of all steps for warm-up."""
    ratio = number(entry.value)
    if draft.get("warmup_steps"):
        return Fate("silent", "warmup_steps takes precedence")
    if ratio >= 1:
        raise UnfitError(f"{ratio} is not below 1; use warmup_steps for a number of steps")
    return draft.carry(entry, "train.warmup_steps", ratio)


def max_steps(draft: Draft, entry: Entry) -> Fate:
    """Steps instead of epochs; below 1 they are not counted."""
    steps = whole(entry.value)
    return Fate("silent", "num_epochs is used") if steps < 1 else draft.carry(entry, "train.max_steps", steps)


def epochs(draft: Draft, entry: Entry) -> Fate:
    """Epochs, unless steps are given."""
    num_epochs = number(entry.value)
    max_steps = draft.get("max_steps")
    if isinstance(max_steps, int | float) and max_steps > 0:
        return Fate("silent", "max_steps takes precedence")
    return draft.carry(entry, "train.num_epochs", num_epochs)


def eval_steps(draft: Draft, entry: Entry) -> Fate:
    """Steps between two evaluations."""
    strategy = draft.get("eval_strategy", draft.get("evaluation_strategy"))
    return _interval(draft, entry, "eval_strategy", strategy, "evaluations")


def save_steps(draft: Draft, entry: Entry) -> Fate:
    """Steps between two checkpoints."""
    return _interval(draft, entry, "save_strategy", draft.get("save_strategy"), "checkpoints")


def _interval(draft: Draft, entry: Entry, key: str, strategy: Any, why: str) -> Fate:
    """Steps between two evaluations or checkpoints; a share of all is left to the plan."""
    steps = number(entry.value)
    if 0 < steps < 1:
        return Fate("decided", f"{steps:g} of all steps: {reason(why)}")
    if steps <= 0:
        return Fate("silent", "is off")
    if strategy is not None and str(strategy) not in ("steps", "best"):
        return Fate("silent", f"{key} {strategy} takes precedence")
    return draft.carry(entry, f"train.{key.replace('strategy', 'steps')}", whole(steps))


def save_total_limit(draft: Draft, entry: Entry) -> Fate:
    """Checkpoints that are kept; two at least."""
    limit = whole(entry.value)
    if limit < 1:
        return Fate("silent", "is off")
    fate = draft.carry(entry, "train.save_total_limit", max(2, limit))
    return Fate("carried", f"{fate.words}  (at least two: one may be damaged)") if limit == 1 else fate


def metric(draft: Draft, entry: Entry) -> Fate:
    """The measure of the best checkpoint, by its full name."""
    return draft.carry(entry, "train.metric_for_best_model", f"eval_{text(entry.value).removeprefix('eval_')}")


def early_stopping(draft: Draft, entry: Entry) -> Fate:
    """Evaluations without improvement after which the training stops."""
    return _patience(draft, entry, "the result is the last step; the best checkpoint is kept too")


def early_stop_interval(draft: Draft, entry: Entry) -> Fate:
    """The same by checkpoints, all of which ms-swift counts that are no better."""
    return _patience(draft, entry, "consecutive evaluations, but ms-swift counts all checkpoints without improvement")


def _patience(draft: Draft, entry: Entry, note: str) -> Fate:
    patience = whole(entry.value)
    if patience < 1:
        return Fate("silent", "is off")
    return Fate("carried", f"{draft.carry(entry, 'train.early_stopping_patience', patience).words}  ({note})")


def run_name(draft: Draft, entry: Entry) -> Fate:
    """The name of a run, in letters that a folder may have."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text(entry.value)).strip("-._")[:100]
    if not name:
        raise UnfitError("has no characters allowed in a run name")
    return draft.carry(entry, "output.name", name)


def half(draft: Draft, entry: Entry) -> Fate:
    """16-bit floats of the older kind, where they are asked for."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    other = draft.get("bf16", draft.get("bfloat16"))
    if other is not None and not is_off(other) and other != "auto":
        draft.suspect(entry.key, "bf16 and fp16 are both on; bfloat16 is used")
        return Fate("decided", reason("precision"))
    return draft.carry(entry, "model.dtype", "float16")


def pure_bf16(draft: Draft, entry: Entry) -> Fate:
    """Weights that are trained in bfloat16 themselves; below an adapter nothing is that is not so anyway."""
    if entry.value != "full" and not truth(entry.value):
        return Fate("silent", "is off")
    if draft.values.get("adapter.type") != "full":
        return Fate("silent", reason("small_adapters"))
    return draft.carry(entry, "train.pure_bf16", True)


def precision_bf16(draft: Draft, entry: Entry) -> Fate:
    """The usual 16-bit floats."""
    if entry.value == "full" and draft.tool == "Axolotl":
        return pure_bf16(draft, entry)
    if entry.value != "auto" and not truth(entry.value) and is_off(draft.get("fp16", draft.get("float16", False))):
        draft.suspect(entry.key, f"{entry.key} and fp16 are off: the original trained in float32")
        return draft.carry(entry, "model.dtype", "float32")
    return Fate("decided", reason("precision"))


def dtype(draft: Draft, entry: Entry) -> Fate:
    """The type of the weights; bfloat16 is what tunekit takes anyway."""
    name = text(entry.value).removeprefix("torch.")
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)
    if name in ("auto", "bfloat16"):
        return Fate("decided", reason("precision"))
    return draft.carry(entry, "model.dtype", name)


def weights_dtype(draft: Draft, entry: Entry) -> Fate:
    """The type of the weights where those that are trained have it too."""
    if text(entry.value) in ("bf16", "bfloat16") and draft.values.get("adapter.type") == "full":
        return draft.carry(entry, "train.pure_bf16", True)
    return dtype(draft, entry)


def attention(draft: Draft, entry: Entry) -> Fate:
    """The attention; only the plain one is asked for on purpose."""
    if entry.value == "eager":
        return draft.carry(entry, "model.attn_implementation", "eager")
    return Fate("decided", reason("attention"))


def holdout(draft: Draft, entry: Entry) -> Fate:
    """A share of the rows to evaluate on."""
    size = number(entry.value)
    if size == 0:
        return Fate("silent", "is off")
    if draft.values.get("data.eval") is not None:
        return Fate("silent", "evaluation rows are set")
    if size >= 1:
        return Fate("unsupported", f"{size} rows: tunekit holds out a fraction; set data.eval_size")
    return draft.carry(entry, "data.eval_size", size)


def packing(draft: Draft, entry: Entry) -> Fate:
    """Packing, which supervised fine-tuning has alone."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.method != "sft":
        raise UnfitError("packing is unsupported for this method")
    return draft.carry(entry, "data.packing", True)


def clipping(draft: Draft, entry: Entry) -> Fate:
    """The norm that gradients are clipped to."""
    norm = number(entry.value)
    if norm <= 0:
        return Fate("unsupported", "0 disables clipping; tunekit clips at 1.0: set a large train.max_grad_norm instead")
    return draft.carry(entry, "train.max_grad_norm", norm)


def logging(draft: Draft, entry: Entry) -> Fate:
    """Steps between two logged losses; a share of all steps is left out."""
    steps = number(entry.value)
    if steps < 1:
        return Fate("decided", "every step is logged; train.logging_steps sets it")
    return draft.carry(entry, "train.logging_steps", whole(steps))


def tuner(draft: Draft, entry: Entry) -> Fate:
    """The kind of training: all weights, or an adapter."""
    if entry.value not in ("full", "lora", "freeze", draft.values["adapter.type"]):
        kind = draft.values["adapter.type"]
        raise UnfitError(f"{entry.value} is unsupported: adapter accepts full, lora, qlora; the recipe uses {kind}")
    return carried("adapter.type", draft.values["adapter.type"])


def put_quantized(draft: Draft, bits: object, *keys: str) -> None:
    """Lay in an adapter on a base that bitsandbytes has in so many bits: 4, 8, or another number for none."""
    num = {"4": 4, "8": 8}.get(str(bits))
    draft.put("adapter.type", "lora" if num is None else "qlora", *keys)
    if num == 8:
        draft.put("adapter.quant_type", "int8", *keys)


def few_bits(draft: Draft, entry: Entry) -> Fate:
    """Weights of 4 or 8 bits, by the name of their switch, beside which an adapter is trained."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.values["adapter.type"] != "qlora":
        raise UnfitError(f"{8 if '8bit' in entry.key else 4}-bit weights need an adapter to train: adapter: qlora")
    return bits(draft, entry)


def bits(draft: Draft, entry: Entry) -> Fate:
    """The bits of a quantized base."""
    if draft.values["adapter.type"] == "oft":
        raise UnfitError("oft is unsupported on a quantized base: adapter: qlora trains LoRA on it")
    if draft.values["adapter.type"] != "qlora":
        raise UnfitError("unsupported quantization: adapter: qlora uses a base of 4 or 8 bits")
    if draft.values.get("adapter.quant_type") != "int8":
        return carried("adapter.type", "qlora")
    words = "adapter.quant_type: int8 has the same weights, but LLM.int8() quantizes activations too"
    return Fate("different", words)


def rewards(draft: Draft, entry: Entry, reward_of: Callable[[str], dict[str, Any] | None] | None = None) -> Fate:
    """The rewards by their names: those that tunekit has as well, and functions of the user's own.

    Args:
        draft: What is made.
        entry: The names.
        reward_of: A reward by its name; None where it is unknown. Default: `named_reward`.
    """
    weights = draft.get(entry.key.replace("reward_funcs", "reward_weights")) or []
    weights = weights if isinstance(weights, list) else [weights]
    converted, lost, problems = [], [], []
    for place, name in enumerate(names(entry.value)):
        try:
            reward = (reward_of or named_reward)(name)
        except UnfitError as error:
            problems.append(str(error))
            continue
        if reward is None:
            lost.append(name)
            continue
        weight = number(weights[place]) if place < len(weights) else 1
        converted.append({**reward, **({"weight": weight} if weight != 1 else {})})
    if converted:
        draft.put("method.rewards", converted, entry.key)
    if lost:
        hint = "use module:function of a file in the working directory"
        problems.append(f"unknown reward: {', '.join(lost)}; {hint}, or `tunekit explain method.rewards`")
    if problems:
        raise UnfitError("; ".join(problems))
    return carried("method.rewards", converted)


def named_reward(name: str) -> dict[str, Any] | None:
    """A reward by its name elsewhere; None where there is none, here or in a file of the user's."""
    known = tool_table("trainer").words["rewards"]
    if name in known:
        return dict(known[name])
    module, _, function = name.replace(":", ".").rpartition(".")
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module) and Path(f"{module.replace('.', '/')}.py").is_file():
        return {"type": "function", "path": f"{module}:{function}"}
    return None


def suspect_packing(draft: Draft, key: str, without: str) -> None:
    """Suspect packed documents that attention did not keep apart."""
    draft.suspect(key, f"{key} without {without}: packed documents attended to each other; in tunekit they do not")


def too_long(draft: Draft, entry: Entry) -> Fate:
    """Rows longer than the longest sequence, which are cut at their end here."""
    at_end = {"Axolotl": "truncate", "TRL": "keep_start", "ms-swift": "right"}
    if entry.value == at_end[draft.tool]:
        return Fate("silent", "rows longer than data.max_length are truncated at the end in tunekit too")
    ours = {"drop": "drop", "delete": "drop", "raise": "refuse"}.get(str(entry.value))
    if ours is not None and (draft.has_own_rows or (ours == "drop" and draft.drops_too_long)):
        return draft.carry(entry, "data.too_long", ours)
    verb = {"drop": "dropped", "refuse": "an error"}.get(str(ours), f"'{entry.value}'")
    return Fate("different", f"rows longer than data.max_length are {verb} in {draft.tool}; {reason('cut')}")


def drops_too_long(draft: Draft, key: str, value: str) -> None:
    """Let the recipe drop rows that are too long where the original does not say so, or note that it does not."""
    if draft.get(key) is None and draft.drops_too_long:
        draft.assume({"data.too_long": "drop"})
    elif draft.get(key) is None and draft.method not in ("grpo", "ebft"):
        media = "images" if draft.has_images else "audio" if draft.has_audio else None
        rest = f"; rows with {media} are dropped, not truncated" if media is not None else ""
        what = f"{draft.tool} drops rows longer than data.max_length by default"
        draft.differ(key, value, f"{what}; {reason('cut')}{rest}")


def dft(draft: Draft, entry: Entry) -> Fate:
    """The loss of Dynamic Fine-Tuning (arXiv 2508.05629), which TRL has as well."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.method != "sft":
        return Fate("silent", "only used with sft")
    return draft.carry(entry, "method.loss_type", "dft")


_EAFT_SWITCHES = ("use_eaft", "use_eaft_loss", "enable_eaft_loss")


def eaft(draft: Draft, entry: Entry) -> Fate:
    """The loss of entropy-adaptive fine-tuning (arXiv 2601.02151), or a setting of it."""
    if draft.method != "sft":
        return Fate("silent", "only used with sft")
    if all(is_off(draft.get(key, False)) for key in _EAFT_SWITCHES):
        return Fate("silent", "is off" if entry.key in _EAFT_SWITCHES else "no effect without the loss of EAFT")
    if entry.key not in _EAFT_SWITCHES:
        target = "eaft_alpha" if entry.key == "eaft_alpha" else "eaft_top_k"
        return draft.carry(entry, f"method.{target}", number(entry.value))
    fate = draft.carry(entry, "method.loss_type", "eaft")
    scale = "does not divide entropies" if draft.tool == "Axolotl" else "divides entropies by 3"
    words = f"{draft.tool} {scale}, tunekit by their maximum; evaluations report the unweighted loss"
    return Fate("different", f"{fate.words}; {words}")


def report_to(draft: Draft, entry: Entry) -> Fate:
    """The trackers, of which those that tunekit does not know are named."""
    values = entry.value if isinstance(entry.value, list) else str(entry.value).split(",")
    listed = [str(value).strip().lower() for value in values if not is_off(value) and str(value).strip() != "[]"]
    if not listed:
        return Fate("silent", "is off")
    if "all" in listed:
        return Fate("decided", f"all: list trackers by name; {reason('no_tracker')}")
    known: tuple[Tracker, ...] = get_args(Tracker)
    fates = [draft.track(entry, tracker) for tracker in known if tracker in listed]
    unsupported = [name for name in listed if name not in known]
    if unsupported:
        return Fate("decided", f"no {', '.join(unsupported)}: {reason('no_tracker')}")
    return fates[-1]


def server(draft: Draft, entry: Entry) -> Fate:
    """The address of vLLM's server, by its host and its port."""
    above = entry.key[: entry.key.rindex("vllm_server_")]
    if draft.get(f"{above}vllm_mode") != "server":
        return Fate("silent", "only used with vllm_mode server")
    host = draft.get(f"{above}vllm_server_host", "127.0.0.1" if draft.tool == "ms-swift" else "0.0.0.0")
    host, port = (
        value[0] if draft.tool == "ms-swift" and isinstance(value, list) else value
        for value in (host, draft.get(f"{above}vllm_server_port", 8000))
    )
    return draft.carry(entry, "method.generation.vllm_server_base_url", f"http://{host}:{port}")


def utilization(draft: Draft, entry: Entry) -> Fate:
    """The share of a device's memory that vLLM takes, where it runs on those that train."""
    if draft.get("vllm_mode") == "server" or not draft.get("use_vllm"):
        return Fate("silent", "only used with colocated vLLM")
    return draft.carry(entry, "method.generation.vllm_gpu_memory_utilization", number(entry.value))


def suspect_beta(draft: Draft) -> None:
    """Suspect a beta of 0, which only GRPO has by itself, and that in gkd is a divergence."""
    if draft.get("beta") is not None and draft.values.get("method.beta") == 0 and draft.method not in ("grpo", "gkd"):
        draft.suspect("beta", "beta 0: no KL penalty to the reference")


def beta(draft: Draft, entry: Entry) -> Fate:
    """The weight of what holds a model to its reference."""
    value = number(entry.value)
    if value == 0:
        draft.suspect(entry.key, f"{entry.key.rpartition('.')[2]} 0: no KL penalty to the reference")
    return draft.carry(entry, "method.beta", value)


def trainer_defaults(draft: Draft, learning_rate: float) -> None:
    """Record the defaults of transformers' Trainer that differ from tunekit's."""
    if "train.max_steps" not in draft.values:
        draft.assume({"train.num_epochs": 3})
    draft.assume({"train.learning_rate": learning_rate, "train.lr_scheduler_type": "linear", "train.warmup_steps": 0})


def source(path: str, **fields: Any) -> dict[str, Any]:
    """A source of rows without what it leaves out."""
    return {"path": path, **{name: value for name, value in fields.items() if value not in (None, {}, [])}}


def put_sources(draft: Draft, target: str, sources: list[dict[str, Any]], *keys: str) -> None:
    """Let the recipe name its rows; what a single source says of its rows stands in the data section."""
    if not sources:
        return
    if len(sources) > 1:
        draft.put(target, sources, *keys)
        return
    (only,) = sources
    if target == "data.train":
        for name in ("format", "columns", "loss_on", "image_folder", "prompt_style", "system", "replace"):
            if name in only:
                draft.put(f"data.{name}", only.pop(name), *keys)
        only.pop("weight", None)
    draft.put(target, only["path"] if set(only) == {"path"} else only, *keys)


def source_formats(draft: Draft) -> list[Any]:
    """The formats of the rows to train on: of each source where there are several."""
    sources = draft.values.get("data.train")
    if not isinstance(sources, list):
        return [draft.values.get("data.format")]
    return [source_values.get("format") if isinstance(source_values, dict) else None for source_values in sources]


def room_for_answers(draft: Draft, *, prompt: int) -> None:
    """Let the longest sequence have room for a prompt and its answer, which tunekit counts together.

    Args:
        draft: What is made.
        prompt: Longest prompt, in tokens, where the tool counts it by itself; 0 where its length is that of both.
    """
    answer = draft.values.get("method.max_completion_length", 512)
    length = draft.values.get("data.max_length", 0)
    if not isinstance(answer, int) or not isinstance(length, int):
        return
    if prompt or length <= answer:
        together = (prompt or 512) + answer
        draft.values["data.max_length"] = together
        words = f"prompt of {prompt or 512} tokens plus answer of {answer}: data.max_length includes both"
        draft.assumed.append(Assumed("data.max_length", together, words))


def leave_out_dropout(draft: Draft, fate: Fate) -> None:
    """Leave out an adapter's dropout, which both tools switch off.

    Args:
        draft: What is made.
        fate: The fate of its key.
    """
    draft.values.pop("adapter.dropout", None)
    draft.assumed = [assumed for assumed in draft.assumed if assumed.key != "adapter.dropout"]
    for key in draft.origins.pop("adapter.dropout", []):
        draft.fates[key] = fate


def first_weights(draft: Draft, entry: Entry) -> Fate:
    """The initial weights of an adapter, by PEFT's names."""
    value = {"true": True, "false": False}.get(str(entry.value).lower(), entry.value)
    if value is True:
        return Fate("silent", "is the default")
    kind = draft.values["adapter.type"]
    if kind not in ("lora", "qlora"):
        raise UnfitError(f"{value}: adapter.type={kind} starts as by PEFT's default")
    if value not in get_args(InitLoraWeights):
        raise UnfitError(f"{value}: adapter.init_lora_weights accepts {', '.join(get_args(InitLoraWeights)[1:])}")
    if value == "loftq" and kind != "qlora":
        raise UnfitError("loftq: adapter.init_lora_weights supports it only for a 4-bit base, adapter.type=qlora")
    return draft.carry(entry, "adapter.init_lora_weights", value)
