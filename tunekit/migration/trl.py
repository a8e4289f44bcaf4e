"""A YAML file or command line of TRL's commands (`trl sft --config FILE`) -> a recipe.

What the trainers take is read off the installed TRL, so every argument of theirs is known; what tunekit does not set
itself is passed on under its name.
"""

from typing import Any

from tunekit.migration import training as hf
from tunekit.migration.draft import (
    Draft,
    Rule,
    Rules,
    UnfitError,
    both,
    carried,
    decided,
    different,
    each,
    flag,
    is_off,
    names,
    no_method,
    number,
    refused,
    silent,
    text,
    to,
    truth,
    whole,
    with_adapter,
)
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.migration.rewards import rewards
from tunekit.recipe.trainer_args import CONFIGS, config_fields, owner_hint

MARKS = frozenset(
    {
        *(
            "model_name_or_path",
            "dataset_name",
            "dataset_config",
            "dataset_train_split",
            "dataset_test_split",
            "use_peft",
        ),
        *("lora_r", "lora_target_modules", "max_seq_length", "assistant_only_loss", "completion_only_loss", "datasets"),
        *("dataset_text_field", "lora_task_type", "use_bnb_nested_quant", "max_completion_length", "num_generations"),
        *("precompute_ref_log_probs", "max_prompt_length"),
    }
)
"""Keys by which a configuration of TRL is told from others."""

_RATES = {"sft": 2e-5, "reward": 1e-4}
_TELLING = {
    "grpo": ("reward_funcs", "num_generations", "num_iterations", "max_completion_length"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "dpo": (
        "precompute_ref_log_probs",
        "f_divergence_type",
        "rpo_alpha",
        "reference_free",
        "max_prompt_length",
        "beta",
    ),
    "sft": ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "neftune_noise_alpha"),
}
"""Arguments that only one of the commands has, or mostly."""


def prepare(draft: Draft) -> None:
    """Lay in what several keys say together."""
    devices = draft.get("num_processes")
    if draft.num_devices is None and isinstance(devices, int):
        draft.num_devices = devices
    hf.set_batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps", default_micro=8)
    draft.put("method.type", _method(draft), "task")
    if not draft.get("use_peft"):
        draft.put("adapter.type", "full", "use_peft")
    else:
        draft.put("adapter.type", "qlora" if draft.get("load_in_4bit") is True else "lora", "use_peft")
    _sources(draft)


def _method(draft: Draft) -> str:
    """Return the command's method: named in the script or beside the file, or inferred from keys that only one of them
    takes.
    """
    task = draft.original.task
    if task in CONFIGS:
        return task
    if task is not None:
        raise no_method(draft, task, task)
    keys = set(draft.original.values)
    for method, telling in _TELLING.items():
        if keys & set(telling):
            return method
    draft.suspect("", "the file does not say which command it is for: taken for `trl sft`; `-- trl dpo` says another")
    return "sft"


def _sources(draft: Draft) -> None:
    name = draft.get("dataset_name")
    if name is not None:
        train, test = draft.get("dataset_train_split", "train"), draft.get("dataset_test_split")
        field = draft.get("dataset_text_field", "text")
        columns = {"text": field} if field != "text" and draft.values["method.type"] == "sft" else None
        config = draft.get("dataset_config")
        source_values = hf.source(text(name), name=config, split=None if train == "train" else train, columns=columns)
        hf.put_sources(
            draft,
            "data.train",
            [source_values],
            "dataset_name",
            "dataset_config",
            "dataset_train_split",
            "dataset_text_field",
        )
        strategy = draft.get("eval_strategy", "no")
        if test is not None and not is_off(strategy):
            hf.put_sources(draft, "data.eval", [hf.source(text(name), name=config, split=test)], "dataset_test_split")
        return
    mixture = draft.get("datasets")
    made_of = []
    for entry in mixture if isinstance(mixture, list) else []:
        if isinstance(entry, dict) and entry.get("path"):
            split = entry.get("split")
            file = entry.get("data_files")
            path = file if entry["path"] in ("json", "csv", "parquet") and isinstance(file, str) else entry["path"]
            made_of.append(hf.source(text(path), name=entry.get("name"), split=None if split == "train" else split))
    hf.put_sources(draft, "data.train", made_of, "datasets")


def finish(draft: Draft) -> None:
    """Say what TRL does where the file says nothing, and what looks wrong."""
    method, own = draft.values["method.type"], "TRL's default, where the file says nothing"
    if method in ("grpo", "rloo"):
        prompt = draft.get("max_prompt_length", 512)
        hf.room_for_answers(draft, prompt=prompt if isinstance(prompt, int) else 512)
    hf.hf_defaults(draft, learning_rate=_RATES.get(method, 1e-6))
    if draft.values["adapter.type"] != "full":
        draft.assume("adapter.rank", 16, own)
        draft.assume("adapter.alpha", 32, own)
        draft.assume("adapter.dropout", 0.05, own)
        if "adapter.target_modules" not in draft.values:
            draft.suspect(
                "use_peft",
                "lora_target_modules is missing, by which PEFT takes few modules: all linear layers are taken here",
            )
    elif any(key.startswith("lora_") for key in draft.original.values):
        draft.suspect("lora_r", "lora settings without use_peft: all weights are trained")
    attention = str(draft.get("attn_implementation", ""))
    if draft.get("packing") is True and "flash" not in attention and "varlen" not in attention:
        draft.suspect(
            "packing", "packing without flash attention: documents of one sequence saw each other; here they do not"
        )
    if method == "sft" and draft.get("assistant_only_loss") is None and draft.get("completion_only_loss") is None:
        what = "TRL counts every token of a chat where assistant_only_loss is not on; the recipe counts the assistant's"
        draft.differ("assistant_only_loss", False, f"{what} (data.loss_on: all repeats it)")
    if draft.get("load_in_4bit") and not draft.get("use_peft"):
        draft.suspect("load_in_4bit", "load_in_4bit without use_peft: weights of 4 bits cannot be trained")


# Rules


def _data(draft: Draft, entry: Entry) -> Fate:
    return carried("data.train", draft.values.get("data.train"))


def _split(draft: Draft, entry: Entry) -> Fate:
    if entry.value == "train":
        return Fate("silent", "train is the default")
    return carried("data.train", draft.values.get("data.train"))


def _test_split(draft: Draft, entry: Entry) -> Fate:
    if "data.eval" not in draft.values:
        return Fate("silent", "eval_strategy is off")
    return carried("data.eval", draft.values["data.eval"])


def _text_field(draft: Draft, entry: Entry) -> Fate:
    if "data.columns" in draft.values:
        return carried("data.columns", draft.values["data.columns"])
    return Fate("silent", "text is the default")


def _four_bits(draft: Draft, entry: Entry) -> Fate:
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.values["adapter.type"] != "qlora":
        raise UnfitError("weights of 4 bits are trained with an adapter only: adapter: qlora")
    return carried("adapter.type", "qlora")


def _peft(draft: Draft, entry: Entry) -> Fate:
    truth(entry.value)
    return carried("adapter.type", draft.values["adapter.type"])


def _modules(draft: Draft, entry: Entry) -> Fate:
    modules = names(entry.value)
    value: Any = "all-linear" if modules in (["all-linear"], ["all"]) else modules
    draft.put("adapter.target_modules", value, entry.key)
    return carried("adapter.target_modules", value)


def _packing(draft: Draft, entry: Entry) -> Fate:
    if not truth(entry.value):
        return Fate("silent", "is off")
    draft.put("data.packing", True, entry.key)
    return carried("data.packing", True)


def _max_length(draft: Draft, entry: Entry) -> Fate:
    value = whole(entry.value)
    draft.put("data.max_length", value, entry.key)
    return carried("data.max_length", value)


def _assistant_only(draft: Draft, entry: Entry) -> Fate:
    if truth(entry.value):
        return Fate("silent", "data.loss_on assistant is the default")
    draft.put("data.loss_on", "all", entry.key)
    return carried("data.loss_on", "all")


def _field(name: str) -> Rule:
    """An argument that is a field of the method, by the same name."""

    def rule(draft: Draft, entry: Entry) -> Fate:
        value = number(entry.value) if isinstance(entry.value, str) and _is_number(entry.value) else entry.value
        if name == "beta" and value == 0 and draft.values["method.type"] != "grpo":
            draft.suspect(entry.key, "beta 0: nothing holds the model to what it was")
        if name == "scale_rewards" and isinstance(value, bool):
            value = "group" if value else "none"
        draft.put(f"method.{name}", value, entry.key)
        return carried(f"method.{name}", value)

    return rule


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _pass_on(draft: Draft, entry: Entry) -> Fate:
    """An argument of TRL's trainer that tunekit does not set itself."""
    hint = owner_hint(draft.values["method.type"], entry.key.partition(".")[0])
    return Fate("decided", hint) if hint is not None else hf.trainer_arg()(draft, entry)


def _server(draft: Draft, entry: Entry) -> Fate:
    if draft.get("vllm_mode") != "server":
        return Fate("silent", "goes with vllm_mode server")
    address = f"http://{draft.get('vllm_server_host', '0.0.0.0')}:{draft.get('vllm_server_port', 8000)}"
    draft.put("method.generation.vllm_server_base_url", address, entry.key)
    return carried("method.generation.vllm_server_base_url", address)


def _only_with(methods: str, rule: Rule, why: str) -> Rule:
    return lambda draft, entry: (
        rule(draft, entry) if draft.values["method.type"] in methods.split() else Fate("silent", why)
    )


_LORA: dict[str, Rule] = {
    "lora_r": to("adapter.rank", whole),
    "lora_alpha": to("adapter.alpha", number),
    "lora_dropout": to("adapter.dropout", number),
    "lora_target_modules": _modules,
    "lora_target_parameters": refused("adapters lie on modules: adapter.target_modules"),
    "lora_modules_to_save": to("adapter.modules_to_save", names),
    "lora_task_type": silent("found from the method"),
    "use_rslora": to("adapter.use_rslora", truth),
    "use_dora": to("adapter.use_dora", truth),
    "bnb_4bit_quant_type": to("adapter.quant_type", text),
    "use_bnb_nested_quant": to("adapter.double_quant", truth),
    "bnb_4bit_quant_storage": decided(hf.DEVICES),
}

_OWN: dict[str, Rule] = {
    "model_name_or_path": to("model.path", text),
    "model_revision": lambda draft, entry: _revision(draft, entry),
    "dtype": hf.dtype,
    "torch_dtype": hf.dtype,
    "trust_remote_code": flag(both(decided(hf.REMOTE_CODE), "code that comes with a model is run")),
    "attn_implementation": hf.attention,
    "use_peft": _peft,
    "load_in_4bit": _four_bits,
    "load_in_8bit": refused("a base in 8 bits is not there: adapter: qlora keeps it in 4, lora in 16"),
    "dataset_name": _data,
    "dataset_config": _data,
    "dataset_train_split": _split,
    "dataset_test_split": _test_split,
    "dataset_streaming": flag(to("data.streaming", truth)),
    "streaming": flag(to("data.streaming", truth)),
    "datasets[].fraction": refused("split takes a slice of a data set, such as train[:10%]"),
    "datasets[].columns": decided("the columns that a format has are read"),
    "datasets[].data_dir": refused("path names the folder, or hf://datasets/NAME/FOLDER"),
    **{f"datasets[].{name}": _data for name in ("path", "name", "data_files", "split")},
    "test_split_size": hf.holdout,
    "ignore_bias_buffers": decided(hf.DEVICES),
    "env": refused("variables of the environment are set outside"),
    "config": silent("this file"),
    "accelerate_config": decided(hf.DEVICES),
    "num_processes": lambda draft, entry: hf.batch(draft, entry),
    **each(decided(hf.KERNELS), "use_liger"),
    **each(decided("the plan says how vLLM is used: method.generation"), "vllm_device vllm_dtype vllm_max_model_len"),
    "dataset_text_field": _only_with("sft", _text_field, "goes with sft"),
    "packing": _packing,
    "packing_strategy": decided("tunekit fills packed sequences as full as they get"),
    "eval_packing": decided("evaluation rows are laid out like training rows"),
    "padding_free": _only_with(
        "sft", flag(decided("data.padding_free auto lays rows one behind the other where it can")), "goes with sft"
    ),
    "max_length": _max_length,
    "max_seq_length": both(_max_length, "is called max_length in TRL now"),
    "max_prompt_length": decided("prompts have what answers leave of data.max_length"),
    "assistant_only_loss": _assistant_only,
    "completion_only_loss": _assistant_only,
    "shuffle_dataset": silent("data.shuffle is on by default"),
    "chat_template_path": to("model.chat_template", text),
    "dataset_num_proc": decided(hf.LOADING),
    "dataset_kwargs": decided(hf.LOADING),
    "dataset_batch_size": decided(hf.LOADING),
    "eos_token": different("the tokenizer of the model keeps its own, which ends a text without chat template"),
    "pad_token": decided("padding is never learned, whichever token it is"),
    "pad_to_multiple_of": decided("rows are padded to their longest or not at all"),
    "truncation_mode": hf.too_long("keep_start"),
    "use_liger_loss": decided(hf.KERNELS),
    "reference_free": refused("method: orpo and cpo have no reference"),
    "rpo_alpha": refused("method.loss_type [sigmoid, sft] with method.loss_weights comes to the same"),
    "is_encoder_decoder": silent("found from the model"),
    "generate_during_eval": decided("output.sample_prompts are answered before and after training"),
    "reward_funcs": rewards("reward_weights"),
    "reward_weights": silent("each of method.rewards has its weight"),
    "reward_model_name_or_path": lambda draft, entry: _reward_model(draft, entry),
    "log_completions": decided("answers and their rewards are in the run's folder"),
    **each(
        decided("answers and their rewards are in the run's folder"),
        "num_completions_to_print log_unique_prompts log_multimodal",
    ),
    "vllm_gpu_memory_utilization": lambda draft, entry: _utilization(draft, entry),
    "vllm_server_base_url": to("method.generation.vllm_server_base_url", text),
    "vllm_server_host": _server,
    "vllm_server_port": _server,
    "optimize_cuda_cache": decided("the plan keeps to the memory that is there"),
    "per_gpu_train_batch_size": refused("per_device_train_batch_size says it"),
}

_FIELDS = {
    "dpo": "beta loss_type loss_weights label_smoothing precompute_ref_log_probs",
    "kto": "beta loss_type desirable_weight undesirable_weight precompute_ref_log_probs",
    "orpo": "beta",
    "cpo": "beta loss_type cpo_alpha simpo_gamma label_smoothing",
    "reward": "center_rewards_coefficient",
    "grpo": "beta num_generations max_completion_length num_iterations loss_type importance_sampling_level "
    "scale_rewards epsilon epsilon_high mask_truncated_completions",
    "rloo": "beta num_generations max_completion_length num_iterations normalize_advantages epsilon epsilon_high "
    "mask_truncated_completions",
}
"""Arguments that are fields of a method, by the same name."""

_GENERATION = "temperature top_p top_k min_p repetition_penalty use_vllm vllm_mode"


def _utilization(draft: Draft, entry: Entry) -> Fate:
    if draft.get("vllm_mode") == "server" or not draft.get("use_vllm"):
        return Fate("silent", "goes with vLLM on the devices that train")
    return to("method.generation.vllm_gpu_memory_utilization", number)(draft, entry)


def _reward_model(draft: Draft, entry: Entry) -> Fate:
    draft.put("method.rewards", [{"type": "reward_model", "model": text(entry.value)}], entry.key)
    return carried("method.rewards", [{"type": "reward_model", "model": text(entry.value)}])


def _revision(draft: Draft, entry: Entry) -> Fate:
    if entry.value == "main":
        return Fate("silent", "main is the default")
    return to("model.revision", text)(draft, entry)


def rules(draft: Draft) -> Rules:
    """TRL's arguments, for the command that it is."""
    method = draft.values["method.type"]
    of_method = {name: _field(name) for name in _FIELDS.get(method, "").split()}
    if method in ("grpo", "rloo", "distillation"):
        of_method |= {name: _generation(name) for name in _GENERATION.split()}
    passed = each(_pass_on, " ".join(config_fields(method)))
    return {**passed, **hf.HF_RULES, **_OWN, **with_adapter(_LORA), **of_method}


def _generation(name: str) -> Rule:
    return to(f"method.generation.{name}")
