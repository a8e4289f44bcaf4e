"""Models as a plan has them: loaded, adapted, compiled.

Load a tokenizer and a language model as the plan says, from a local folder or the hub.

The model has its head, or a score of a text in its place.

Only safetensors weights are read, since opening pickled ones can run code.

liger-kernel's kernels in a model, as its own authors put them there.

Modules of the model that is held are given Liger's forward methods. Its rotary embedding cannot be given to a module:
Liger puts it into transformers' module of that type, for all models of it in the process. The loss stays as it is.

Decoder layers that are compiled, and products in float8, as the plan says.

Modules stay what they are where weights are named, saved and divided: a layer is compiled in place, and a linear layer
in float8 has the weights of the one that it stands for.

Trained parameters: every weight, or low-rank updates through PEFT.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tunekit.errors import ModelError, loading_errors
from tunekit.estimates.memory.states import Dtype
from tunekit.estimates.models.model_config import model_types, read_past_of
from tunekit.estimates.models.rope import Rope, are_told_apart, full_of, scaled
from tunekit.models.towers import (
    compute_without_gradients,
    excluded_in_towers,
    give_all_gradients,
    towers,
    train_towers,
)
from tunekit.models.virtual_tokens import hide_virtual_tokens
from tunekit.planner.decisions.backends import FLOAT8_MULTIPLE
from tunekit.planner.plan import VARLEN
from tunekit.probe.chat_template import end_answers, take_texts, template_text
from tunekit.probe.model import auto_class, model_folder, scores, thinker_of, with_tokenizer
from tunekit.probe.model_files import check_normalizer, check_settings
from tunekit.probe.new_tokens import NewTokens, add_new_tokens
from tunekit.probe.origin import ADAPTER_CONFIG, ADAPTER_WEIGHTS, origin_of
from tunekit.probe.processors import kinds_of
from tunekit.probe.tokenizers import TEKKEN, stored_tokenizer
from tunekit.recipe.chat_templates import named_templates
from tunekit.recipe.methods.spec import Judged, ScoreHead
from tunekit.recipe.sections.adapters import (
    ALL_LINEAR,
    AdaloraAdapter,
    Adapter,
    FullAdapter,
    Ia3Adapter,
    LoraAdapter,
    MissAdapter,
    OftAdapter,
    PeftAdapter,
    PromptTuningAdapter,
    QloraAdapter,
    VeraAdapter,
    is_any_of,
    pattern_of,
)
from tunekit.recipe.sections.data import MediaKind
from tunekit.recipe.sections.model import ModelSection

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig, PeftModel, PromptTuningConfig
    from torch.nn import Module
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
    from transformers.distributed import DistributedConfig

    from tunekit.models.initial import Sources


def load_tokenizer(section: ModelSection) -> "PreTrainedTokenizerBase":
    """The model's tokenizer, with the recipe's chat template where it names one.

    Raises:
        ModelError: The tokenizer or the template cannot be read, or the tokenizer has neither padding nor end token.
    """
    return tokenizer_and_new(section)[0]


def tokenizer_and_new(section: ModelSection) -> "tuple[PreTrainedTokenizerBase, NewTokens]":
    """The model's tokenizer, and the tokens that the section adds to it.

    Raises:
        ModelError: As `load_tokenizer` says.
    """
    template, recipe_section, section = section.chat_template, section, with_tokenizer(section)
    check_settings(Path(model_folder(section)), section.path)
    try:
        tokenizer = stored_tokenizer(
            model_folder(section), revision=section.revision, trust_remote_code=section.trust_remote_code
        )
    except loading_errors() as error:
        raise ModelError(
            f"model.path: the tokenizer of {section.path!r} cannot be loaded: {_first_line(error)}",
            hint=_about_code(error) or "the folder may be incomplete",
        ) from error
    check_normalizer(tokenizer, section.path)
    if template is not None:
        tokenizer.chat_template = template_text(template)
    take_texts(tokenizer)
    new = add_new_tokens(tokenizer, section)
    end_answers(tokenizer, recipe_section)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                f"model.path: the tokenizer of {section.path!r} has neither a padding nor an end-of-sequence token",
                hint="set model.special_tokens.pad_token",
            )
        # Padding is masked by position, never by token, so the end token can serve.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, new


PROCESSOR_KINDS: dict[MediaKind, str] = {"image": "image_processor", "video": "video_processor"}
PROCESSORS = tuple(PROCESSOR_KINDS.values())
"""Fields of a model section with settings of parts of its processor, by the kind of media."""

_TAKING: dict[MediaKind, tuple[str, str]] = {
    "image": ("images", "a vision-language model"),
    "audio": ("audio", "a model that takes audio"),
    "video": ("videos", "a model that takes videos"),
}
"""Words for media of a kind, and for models that take them."""


def load_processor(
    section: ModelSection, tokenizer: "PreTrainedTokenizerBase", kinds: Collection[MediaKind] = ()
) -> "ProcessorMixin":
    """Return the processor of a model of media, with a tokenizer of the model.

    Args:
        section: The model, of the recipe.
        tokenizer: Its tokenizer.
        kinds: Kinds of media that it has to take; any by default.

    Raises:
        ModelError: The model has none, it takes other media, or it lacks a package.
    """
    from transformers import AutoProcessor, ProcessorMixin, VoxtralProcessor

    where = with_tokenizer(section)
    try:
        processor = AutoProcessor.from_pretrained(
            model_folder(where), revision=where.revision, trust_remote_code=where.trust_remote_code
        )
    except ImportError as error:
        raise ModelError(
            f"model.path: the processor of {section.path!r} needs a package that is not installed: "
            f"{' '.join(str(error).split())[:160]}",
            hint="pip install 'tunekit[vision]'" if "torchvision" in str(error) else "install it",
        ) from error
    except loading_errors() as error:
        raise ModelError(
            f"model.path: the processor of {section.path!r} cannot be loaded: {_first_line(error)}",
            hint=_about_code(error) or "the folder may be incomplete",
        ) from error
    if isinstance(processor, VoxtralProcessor):
        from tunekit.models.voxtral import with_clips_in_texts

        processor = with_clips_in_texts(processor, tokenizer, _config_below(where), section.path)
    own = kinds_of(processor) if isinstance(processor, ProcessorMixin) else ()
    missing = [kind for kind in kinds if kind not in own]
    if missing or not own:
        kind = missing[0] if missing else "image"
        nouns, models = _TAKING[kind]
        why = f"is a text-only model: it has no {kind} processor"
        if isinstance(processor, ProcessorMixin):
            why = f"reads none: {type(processor).__name__} takes no {nouns} with a text"
        raise ModelError(
            f"model.path: rows have {nouns}, but {section.path!r} {why}",
            hint=f"choose {models}, or remove the {nouns}",
        )
    for kind, name in PROCESSOR_KINDS.items():
        settings = dict(section)[name]
        if settings is not None and kind in own:
            _set_processor(processor, name, settings)
    if tokenizer.chat_template is None:
        # Older checkpoints keep the template of the processor alone.
        tokenizer.chat_template = processor.chat_template
        take_texts(tokenizer)
    for name, value in vars(processor.tokenizer).items():
        # Names of special tokens for media, which the processor looks up on its tokenizer.
        if name not in vars(tokenizer):
            setattr(tokenizer, name, value)
    processor.tokenizer = tokenizer
    return processor


def _config_below(section: ModelSection) -> "PretrainedConfig":
    """Return the configuration of a model, or of the one below an adapter.

    Raises:
        ModelError: It cannot be read.
    """
    origin = origin_of(section)
    base = section if origin is None or origin.adapter is None else origin.base
    try:
        return read_config(base.model_copy(update={"rope_scaling": None}))
    except loading_errors() as error:
        problem = f"model.path: the config.json of {base.path!r} cannot be read: {_first_line(error)}"
        raise ModelError(problem, hint="the folder may be incomplete") from error


_NOT_SETTINGS = frozenset(
    {
        "video_metadata",
        "return_metadata",
        "data_format",
        "device",
        "disable_grouping",
        "input_data_format",
        "return_tensors",
    }
)
"""Arguments of image and video processors that say how they return pixels, or of what."""


def _set_processor(processor: "ProcessorMixin", name: str, settings: Mapping[str, Any]) -> None:
    """Change settings of a processor's images or videos.

    Args:
        processor: The processor.
        name: Its part, which is the field of the recipe.
        settings: The settings.

    Raises:
        ModelError: It has no such setting, or takes no such value.
    """
    own = getattr(processor, name)
    names = sorted(set(own.valid_kwargs.__annotations__) - _NOT_SETTINGS)
    unknown = next((setting for setting in settings if setting not in names), None)
    if unknown is not None:
        problem = f"model.{name}.{unknown}: {type(own).__name__} has no such setting"
        raise ModelError(problem, hint=f"settings: {', '.join(names)}")
    try:
        changed = type(own).from_dict({**own.to_dict(), **settings})
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        problem = f"model.{name}: {type(own).__name__} refuses the settings: {_first_line(error)}"
        raise ModelError(problem, hint="see its documentation in transformers") from error
    # Arguments that a processor's class passes to its parts go before the settings of these.
    fixed: Mapping[str, Any] = getattr(type(processor), f"{name.removesuffix('_processor')}s_kwargs", {})
    lost = next((setting for setting, value in settings.items() if fixed.get(setting, value) != value), None)
    if lost is not None:
        problem = f"model.{name}.{lost}: {type(processor).__name__} always sets {fixed[lost]}"
        raise ModelError(problem, hint="remove it")
    before, after = own.to_dict(), changed.to_dict()
    lost = next((key for key in fixed if key not in settings and before.get(key) != after.get(key)), None)
    if lost is not None:
        # Some settings are a part of another one, such as `max_pixels` of `size`.
        problem = f"model.{name}: {type(processor).__name__} always sets {lost} to {fixed[lost]}, so that "
        problem += f"{' and '.join(settings)} would not count"
        raise ModelError(problem, hint="remove it")
    setattr(processor, name, changed)


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a processor besides those of its tokenizer."""


def save_processor(section: ModelSection, tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Save a model's tokenizer, and its processor where it has one: its files, unless the recipe changes settings.

    Args:
        section: The model, of the recipe.
        tokenizer: Its tokenizer.
        folder: Folder of the weights.
    """
    where = model_folder(with_tokenizer(section))
    if all(dict(section)[name] is None for name in PROCESSORS):
        copy_processor(where, section.revision, folder)
    else:
        load_processor(section, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not section.all_tokens:
        copy_tekken(where, section.revision, folder, tokenizer)


def copy_tekken(path: str, revision: str | None, folder: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Copy the tokenizer in Mistral's own format, by which Voxtral's processor reads chats; with that format alone.

    Args:
        path: Folder of the model, or its hub name.
        revision: Its revision there.
        folder: Where it goes.
        tokenizer: Tokenizer of the model, with no tokens but those of the file.
    """
    if any(template.types and template.text() == tokenizer.chat_template for template in named_templates().values()):
        copy_processor(path, revision, folder, files=(TEKKEN,))


def copy_processor(path: str, revision: str | None, folder: Path, *, files: Sequence[str] = PROCESSOR_FILES) -> None:
    """Copy the files of a processor, where there is one.

    Args:
        path: Folder of the model, or its hub name.
        revision: Its revision there.
        folder: Where they go.
        files: Their names.
    """
    from huggingface_hub import try_to_load_from_cache

    for file in files:
        stored: Any = Path(path) / file
        if not Path(path).is_dir():
            stored = try_to_load_from_cache(path, file, revision=revision)
        if isinstance(stored, str | Path) and Path(stored).is_file():
            shutil.copyfile(stored, folder / file)


def load_model(
    section: ModelSection,
    *,
    dtype: Dtype,
    attn_implementation: str | None = None,
    device: str | None,
    quantization: QloraAdapter | None = None,
    distributed: "DistributedConfig | None" = None,
    score_head: ScoreHead | None = None,
    head_seed: int = 0,
) -> "PreTrainedModel":
    """The model on its device.

    With `meta` for a device nothing is read: its weights are on the CPU and have shapes and types, but nobody wrote
    them, and its memory is not touched. That is for processes that are given their parts of weights by another one.

    Args:
        section: Which model.
        dtype: Type of the weights; of those that stay unquantised, where `quantization` is given.
        attn_implementation: Attention implementation by its transformers name; None for the model's default.
        device: Where the weights go: `cpu`, `cuda` or `meta`; None where DeepSpeed divides them as they are read.
        quantization: How to quantize linear layers and experts to 4 bits, or None.
        distributed: How to divide it over the processes, each of which loads its part to its own device then.
        score_head: Head of a model that scores and does not write.
        head_seed: Seed of that head. A model that has one already keeps it.

    Raises:
        ModelError: The model cannot be loaded.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import set_seed

    from tunekit.models.attention import register_packed_attention
    from tunekit.models.documents import tell_documents_apart

    if attn_implementation == VARLEN:
        register_packed_attention()
    torch_dtype = getattr(torch, dtype)
    if score_head is not None:
        set_seed(head_seed)
    is_given = device == "meta" and distributed is None
    try:
        files = read_config(section)
        config = None
        if quantization is not None or is_quantized(files):
            from tunekit.models.published import how_to_read

            config = how_to_read(files, quantization, torch_dtype)
        kind = auto_class(files) if score_head is None else _with_score(files, score_head, section)
        if score_head is not None and not (_has_score(files) and files.get_text_config().pad_token_id is not None):
            # A text is scored at its last token but this one, in training as where the result is read.
            files.get_text_config().pad_token_id = load_tokenizer(section).pad_token_id
        with _keeping_buffers() if is_given else contextlib.nullcontext():
            model, info = kind.from_pretrained(
                model_folder(section),
                revision=section.revision,
                dtype=torch_dtype,
                attn_implementation=_of_text(attn_implementation, files),
                config=files,
                quantization_config=config,
                trust_remote_code=section.trust_remote_code,
                use_safetensors=True,
                device_map=None if device is None or distributed is not None else {"": device},
                distributed_config=distributed,
                output_loading_info=True,
            )
    except loading_errors() as error:
        folder = Path(section.path)
        missing = [name for name in ("config.json", "*.safetensors") if folder.is_dir() and not any(folder.glob(name))]
        if missing:
            words = f"model.path: {section.path!r} is not a complete model: no {missing[0]}"
            raise ModelError(words, hint="restore it, or save the model again") from error
        raise ModelError(
            f"model.path: {section.path!r} cannot be loaded: {_first_line(error)}",
            hint=_about_code(error) or "see the log for the full message",
        ) from error
    except SafetensorError as error:
        raise ModelError(
            f"model.path: the weights of {section.path!r} are damaged: {_first_line(error)}",
            hint="download or save them again",
        ) from error
    heads = SCORES if score_head is not None else ()
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(heads))
    if missing:
        raise ModelError(
            f"model.path: {section.path!r} has no weights of {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}, which would be random",
            hint="download or save it again",
        )
    if section.rope_scaling is not None:
        _check_scaled(model, section)
    if section.all_tokens:
        _add_rows(model, tokenizer_and_new(section)[1], draws=not is_given)
    complete_outputs(model)
    tell_documents_apart(model)
    if is_given:
        _give_unwritten_memory(model)
    if quantization is not None:
        from tunekit.models.quantization import finish_quantization

        finish_quantization(model)
    return model


SCORES = ("score.", "classifier.")
"""Names of heads that judge, in transformers' models for sequence and token classification."""


def _with_score(config: "PretrainedConfig", head: ScoreHead, section: ModelSection) -> Any:
    """Return the auto class of models with a score for a head, and set its size in a model's configuration.

    Raises:
        ModelError: The family has no such head, or the model has one for other labels.
    """
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    _check_has_head(config, head, section)
    if head.scores == "classes":
        _check_same_labels(config, head, section)
        config.problem_type = head.problem_type
    config.num_labels = head.num_labels
    if head.labels:
        config.id2label = dict(enumerate(head.labels))
        config.label2id = {label: index for index, label in enumerate(head.labels)}
    if head.scores != "steps":
        return AutoModelForSequenceClassification
    # By default some families drop a tenth of what the score reads.
    config.classifier_dropout = 0.0
    return AutoModelForTokenClassification


def _has_score(config: "PretrainedConfig") -> bool:
    """Return whether a model has been saved with a head that scores."""
    return scores(config.to_dict())


def _check_same_labels(config: "PretrainedConfig", head: ScoreHead, section: ModelSection) -> None:
    """Refuse a classifier of other labels, or of the same ones in another order.

    Raises:
        ModelError: It is one.
    """
    if not _has_score(config):
        return
    own = tuple(config.id2label[index] for index in range(config.num_labels))
    is_named = own != tuple(f"LABEL_{index}" for index in range(config.num_labels))
    if head.num_labels == config.num_labels and (not head.labels or not is_named or head.labels == own):
        return
    names = f": {', '.join(own[:12])}" if is_named else ""
    problem = f"method.labels: {section.path!r} is a classifier of {config.num_labels} labels{names}"
    raise ModelError(problem, hint="set the same labels in the same order, or start from its base model")


def check_has_head(section: ModelSection, head: ScoreHead) -> None:
    """Check by its configuration that transformers can build a model with a head.

    Raises:
        ModelError: It cannot, the model has one for other labels, or the configuration cannot be read.
    """
    origin = origin_of(section)
    base = section if origin is None or origin.adapter is None else origin.base
    try:
        _with_score(read_config(base), head, base)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {section.path!r} cannot be loaded: {_first_line(error)}") from error


def _check_has_head(config: "PretrainedConfig", head: ScoreHead, section: ModelSection) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    )

    of_tokens = head.scores == "steps"
    supported = (
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES if of_tokens else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    )
    own = section.trust_remote_code and config.to_dict().get("auto_map")
    if config.model_type in supported or own:
        return
    task = "token" if of_tokens else "sequence"
    problem = f"model.path: transformers has no model for {task} classification of type {config.model_type}"
    use = "score steps" if of_tokens else "score texts"
    raise ModelError(problem, hint=f"use another model, such as a Qwen3 or a Llama, to {use}")


def complete_outputs(model: "PreTrainedModel") -> None:
    """Give the output of Llama 4's text decoder the field that the model around it reads.

    In transformers 5.24 its forward method reads `image_outputs`, which is not there, and fails without pictures.
    """
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model.get_submodule("language_model").register_forward_hook(_without_pictures)


def keep_positions(model: "Module", config: "PretrainedConfig") -> None:
    """Give a configuration back the padding token that positions of its model are counted from, as RoBERTa's are.

    Transformers replaces it by the tokenizer's when training begins, and the saved model would count otherwise.
    """
    for name, module in model.named_modules():
        counted_from = vars(module).get("padding_idx") if "position" in name.rpartition(".")[2] else None
        if counted_from is not None:
            config.get_text_config().pad_token_id = counted_from


def _without_pictures(_module: "Module", _inputs: Any, output: Any) -> Any:
    output.image_outputs = None
    return output


def read_config(section: ModelSection) -> "PretrainedConfig":
    """Return the configuration of a model, with the recipe's scaling of its rotary embeddings.

    Of a model that speaks it is that of the part that reads and writes, which is loaded without the others.

    Raises:
        OSError: It cannot be read.
        ValueError: Its type is unknown.
        ModelError: It has no rotary embeddings to scale.
    """
    from transformers import AutoConfig

    whole: PretrainedConfig = AutoConfig.from_pretrained(
        model_folder(section), revision=section.revision, trust_remote_code=section.trust_remote_code
    )
    config = thinker_of(whole)
    if section.rope_scaling is not None:
        _scale_rope(config, section)
    return config


def _add_rows(model: "PreTrainedModel", new: NewTokens, *, draws: bool) -> None:
    """Give embedding and head rows for new tokens, near the mean of the others; the same ones in every process."""
    import torch

    num_rows = max((token + 1 for token in new.ids), default=0)
    if num_rows <= model.get_input_embeddings().weight.shape[0]:
        return
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.resize_token_embeddings(num_rows, mean_resizing=draws)


def _scale_rope(config: "PretrainedConfig", section: ModelSection) -> None:
    """Scale the rotary embeddings of a decoder: those of layers that see all tokens, where kinds are told apart."""
    assert section.rope_scaling is not None
    text = config.get_text_config(decoder=True)
    fields = vars(text)
    parameters = fields.get("rope_parameters")
    full = full_of(parameters or {})
    if not full or are_told_apart(full):
        raise _unscaled(section)
    rope = scaled(Rope(full, text.max_position_embeddings), section.rope_scaling)
    new = dict(rope.parameters)
    text.rope_parameters = new if full is parameters else {**parameters, "full_attention": new}
    text.max_position_embeddings = rope.positions
    if fields.get("original_max_position_embeddings") and "original_max_position_embeddings" in new:
        # transformers prefers this field of Phi 3 to the parameter.
        text.original_max_position_embeddings = new["original_max_position_embeddings"]
    text.validate_rope()


def _check_scaled(model: "PreTrainedModel", section: ModelSection) -> None:
    """Check that a module of a model computes rotary embeddings of the kind that its configuration has now."""
    kind = full_of(model.config.get_text_config(decoder=True).rope_parameters)["rope_type"]
    kinds = (vars(module).get("rope_type") for module in model.modules())
    if not any(kind in (stated.values() if isinstance(stated, dict) else (stated,)) for stated in kinds):
        raise _unscaled(section)


def _unscaled(section: ModelSection) -> ModelError:
    problem = f"model.rope_scaling: the code of {section.path!r} does not scale its rotary embeddings"
    return ModelError(problem, hint="unset it, or use another model")


def is_quantized(config: "PretrainedConfig") -> bool:
    """Return whether the weights of a model are published quantized."""
    return "quantization_config" in vars(config) or "quantization_config" in vars(config.get_text_config(decoder=True))


def _of_text(attn_implementation: str | None, config: "PretrainedConfig") -> str | dict[str, str] | None:
    """An attention implementation for the text decoder alone: those of towers are others, and may not have it."""
    text = config.get_text_config(decoder=True)
    names = [name for name in config.sub_configs if vars(config).get(name) is text]
    return {names[0]: attn_implementation} if attn_implementation is not None and names else attn_implementation


def without_gradient(model: "Module") -> list[str]:
    """Names of the outermost modules that are known by their names to get no gradient.

    DDP waits for the gradients of all that requires them.
    """
    known = model_types().without_gradient
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in known]
    return [name for name in names if known.isdisjoint(name.split(".")[:-1])]


@contextlib.contextmanager
def _keeping_buffers() -> Iterator[None]:
    """Within it, transformers computes the buffers of a model on `meta` that no checkpoint holds, on the CPU.

    It does so in the processes of FSDP that are to be given their weights (transformers 5.23, `is_fsdp_enabled`),
    and reads the weights in all of them nevertheless, unless they are on `meta`. Of models in 4 bits it does not, for
    Accelerate leaves those whole; here they are sharded too.
    """
    from transformers import PreTrainedModel

    names, model_type = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"), cast(Any, PreTrainedModel)
    move = model_type._move_missing_keys_from_meta_to_device
    os.environ.update(dict.fromkeys(names, "true"))
    # Its last argument is the quantizer.
    model_type._move_missing_keys_from_meta_to_device = lambda *args: move(*args[:-1], None)
    try:
        yield
    finally:
        model_type._move_missing_keys_from_meta_to_device = move
        for name in names:
            del os.environ[name]


def _give_unwritten_memory(model: "PreTrainedModel") -> None:
    """Move the weights of a model from `meta` to the CPU, so that each has an address to be told by.

    Accelerate finds the weights of an optimizer by their addresses, and on `meta` they have none.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                module.register_parameter(name, _unwritten(module, parameter))
    model.tie_weights()
    # Where it is known to be goes by this: the trainer takes a model on another device than its own for a divided one.
    model.hf_device_map = {"": "cpu"}


def _unwritten(module: "Module", parameter: "torch.nn.Parameter") -> "torch.nn.Parameter":
    """A parameter like one on `meta`, in memory that nobody has written."""
    import torch

    if type(parameter).__name__ == "Params4bit":
        from tunekit.models.sharded_4bit import unwritten_4bit

        packed: torch.nn.Parameter = unwritten_4bit(module)
        return packed
    return torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)


def _about_code(error: Exception) -> str | None:
    """Return advice where transformers would have to run code that comes with a model."""
    return "read that code, then set trust_remote_code=true" if "trust_remote_code" in str(error) else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def use_liger(model: "PreTrainedModel") -> None:
    """Give a model Liger's norms, gated MLPs and rotary embedding, before an adapter is attached to it.

    Raises:
        ModelError: liger-kernel does not know its type.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ModelError(
            f"model.kernels: liger-kernel does not support {model.config.model_type}", hint="unset model.kernels"
        )
    # TRL has its own head, and refuses one that is fused already.
    _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False, cross_entropy=False)


def compile_layers(model: "Module", *, backend: str = "inductor") -> int:
    """Have each decoder layer compiled when it is first called, and return how many there are.

    Layers of the same code share what is compiled. It is to be done before the model is divided or wrapped, whose
    hooks then run around what is compiled.

    Raises:
        ModelError: No layer was found.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no decoder layers to compile", hint="set train.torch_compile=false"
        )
    for layer in layers:
        layer.compile(backend=backend)
    return len(layers)


def to_float8(model: "Module") -> int:
    """Have linear layers compute in float8, but for the head, and return how many do.

    It is to be done before the model is divided. Those whose sizes float8 products do not take stay as they are.
    """
    from torch import nn
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear
    from transformers import PreTrainedModel

    assert isinstance(model, PreTrainedModel), "float8 requires full fine-tuning"
    head = model.get_output_embeddings()

    def fits(module: nn.Module, _: str) -> bool:
        assert isinstance(module, nn.Linear)
        sizes = module.in_features, module.out_features
        return module is not head and all(size % FLOAT8_MULTIPLE == 0 for size in sizes)

    convert_to_float8_training(model, module_filter_fn=fits)
    return sum(isinstance(module, Float8Linear) for module in model.modules())


Task = Literal["CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS"]
"""PEFT's task type. With the last two the score that replaces the head is trained and saved whole."""


def task_of(head: ScoreHead | None) -> Task:
    """Return PEFT's task type of a model, by its head; None: it generates."""
    tasks: dict[Judged | None, Task] = {
        None: "CAUSAL_LM",
        "text": "SEQ_CLS",
        "classes": "SEQ_CLS",
        "steps": "TOKEN_CLS",
    }
    return tasks[None if head is None else head.scores]


def attach_adapter(
    model: "PreTrainedModel",
    adapter: Adapter,
    *,
    seed: int,
    trained: Path | None = None,
    task: Task = "CAUSAL_LM",
    new_tokens: Sequence[int] = (),
    sources: "Sources | None" = None,
) -> "PreTrainedModel | torch.nn.Module":
    """The model with what is to be trained requiring gradients; adapters are seeded and kept in float32.

    Args:
        model: The model, whose own weights stay as they are beside an adapter.
        adapter: What is trained.
        seed: For the matrices of a new adapter.
        trained: Folder of the adapter that is trained further; None for a new one, and in processes that are given
            their weights by another one.
        task: What PEFT takes the model for.
        new_tokens: Ids of tokens whose rows of embedding and head are trained beside a new adapter.
        sources: Sources of initial matrices that take more than the base weights; None where a checkpoint has them.
    """
    from transformers import set_seed

    set_seed(seed)
    if isinstance(adapter, FullAdapter):
        num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(adapter.trains(name, num_layers) or name.startswith(SCORES))
        train_towers(model, adapter)
        for name in without_gradient(model):
            model.get_submodule(name).requires_grad_(False)
        compute_without_gradients(model)
        give_all_gradients(model)
        return model
    from peft import get_peft_model
    from peft.utils import TrainableTokensWrapper

    from tunekit.models.base_parts import keep_initial
    from tunekit.models.initial import begin, prepare

    config: Any = peft_config(adapter, model, task=task, trained=trained, new_tokens=new_tokens)
    if sources is not None and trained is None and isinstance(adapter, LoraAdapter):
        prepare(model, adapter, config, _names_of(adapter, model), sources)
    adapted = get_peft_model(model, config)
    # By this PEFT gathers the weights of a divided model, all of them, whenever it is asked for the adapter's (0.21).
    vars(adapted)["_tp_size"] = None
    if new_tokens or (isinstance(adapter, LoraAdapter) and adapter.trainable_token_indices):
        # PEFT would save both tables whole where they have grown.
        adapted.save_pretrained = partial(adapted.save_pretrained, save_embedding_layers=False)
        for module in adapted.modules():
            if isinstance(module, TrainableTokensWrapper):
                # Fused heads ask for it, and PEFT shows the weight alone. A head with a bias is refused.
                module.bias = None
    freeze_ranks(adapted)
    compute_without_gradients(model)
    give_all_gradients(model)
    if isinstance(adapter, PromptTuningAdapter):
        hide_virtual_tokens(adapted)
    else:
        _check_names(adapted, adapter)
    _check_readable(adapted)
    if trained is not None:
        read_adapter(adapted, trained)
    elif sources is not None and isinstance(adapter, LoraAdapter):
        begin(adapted, adapter, sources)
    elif adapter.splits_base and config.init_lora_weights is not True:
        keep_initial(adapted)
    return adapted


def freeze_ranks(model: "torch.nn.Module") -> None:
    """Freeze the number by which AdaLoRA divides: PEFT trains it where it casts an adapter to float32 (0.21.2)."""
    from peft.tuners.adalora import AdaLoraLayer

    for module in model.modules():
        if isinstance(module, AdaLoraLayer):
            cast(Any, module).ranknum.requires_grad_(False)


def _check_names(model: "PeftModel", adapter: PeftAdapter) -> None:
    """Check that each name by which a section chooses modules is one of the model, which PEFT only warns of.

    A plan goes by the names in weight files, whose first parts may be others.

    Raises:
        ModelError: One is not.
    """
    tuner = cast(Any, model).base_model
    adapted = [*tuner.targeted_module_names, *tuner.targeted_parameter_names]
    names = [name for name, _ in model.get_base_model().named_modules()]
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in dict(adapter).get(field) or {}:
            if not any(pattern_of([pattern], name) for name in adapted):
                raise ModelError(f"adapter.{field}: no adapted module matches {pattern}", hint=_example(adapted))
    for ending in adapter.exclude_modules or []:
        if not any(is_any_of(name, [ending]) for name in names):
            raise ModelError(f"adapter.exclude_modules: no module is named {ending}", hint=_example(adapted))


def _example(names: list[str]) -> str:
    return f"names are such as {names[0]}"


def _check_readable(model: "PeftModel") -> None:
    """Check that PEFT gives an adapter that it saved to the modules that it was of.

    It renames the tensors that it reads as transformers renames those of checkpoints from before version 5, and for
    some types that changes names of today.

    Raises:
        ModelError: It would not.
    """
    from peft import get_peft_model_state_dict
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    saved = {name: tensor.to("meta") for name, tensor in tensors.items()}
    read = convert_peft_adapter_state_dict_for_transformers(model, model.peft_config["default"], saved)
    lost = sorted(set(saved) - set(read))
    if lost:
        kind = model.config.model_type
        raise ModelError(
            f"adapter: PEFT cannot load saved adapters of {kind} models: it renames {lost[0]}",
            hint="set adapter.type=full",
        )


def peft_config(
    adapter: PeftAdapter,
    model: "PreTrainedModel",
    *,
    task: Task = "CAUSAL_LM",
    trained: Path | None = None,
    new_tokens: Sequence[int] = (),
) -> "PeftConfig":
    """Return an adapter section as PEFT has it.

    Args:
        adapter: The section.
        model: The model to adapt.
        task: What PEFT takes the model for.
        trained: Folder of a trained adapter with these settings, which adapts the modules that it was trained on.
        new_tokens: Ids of tokens whose rows are trained beside a new adapter.
    """
    if isinstance(adapter, PromptTuningAdapter):
        return _prompt_config(adapter, model, task, is_new=trained is None)
    if not isinstance(adapter, LoraAdapter):
        return _config_by_names(adapter, model, task, trained)
    from peft import LoraConfig

    if trained is not None and (trained / ADAPTER_CONFIG).is_file():
        stated = _stated(trained)
        excluded, rows = stated.get("exclude_modules"), stated.get("trainable_token_indices")
    else:
        tokens = dict.fromkeys((*new_tokens, *(adapter.trainable_token_indices or ())))
        excluded = None if _is_by_full_names(adapter) else _excluded(adapter, model)
        rows = _rows_of(list(tokens), adapter, model)
    targets: str | list[str] = adapter.target_modules
    by_name = _is_by_full_names(adapter)
    return LoraConfig(
        task_type=task,
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        rank_pattern=dict(adapter.rank_pattern or {}),
        alpha_pattern=dict(adapter.alpha_pattern or {}),
        target_modules=_names_of(adapter, model) if by_name else targets,
        layers_to_transform=None if by_name else adapter.layers_to_transform,
        # Initial matrices that take more than the base weights come when the adapter is attached.
        init_lora_weights=adapter.init_lora_weights if trained is None and not adapter.needs_sources else True,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        lora_bias=adapter.lora_bias,
        modules_to_save=adapter.modules_to_save,
        exclude_modules=excluded,
        trainable_token_indices=rows,
        target_parameters=adapter.target_parameters,
    )


def _is_by_full_names(adapter: LoraAdapter) -> bool:
    """Return whether PEFT is given the full names of the linear layers that get an adapter.

    It goes by a regular expression through all modules, also those that it cannot adapt, takes no numbers of layers
    beside a word or an expression, and takes the ends of names in towers too.
    """
    if "lora" in (adapter.vision_tower, adapter.projector) or adapter.target_regex is not None:
        return True
    return adapter.target_modules == ALL_LINEAR and adapter.layers_to_transform is not None


def _stated(folder: Path) -> dict[str, Any]:
    """Return the configuration of an adapter in a folder."""
    config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return config


def _prompt_config(
    adapter: PromptTuningAdapter, model: "PreTrainedModel", task: Task, *, is_new: bool
) -> "PromptTuningConfig":
    """Return the section of virtual tokens as PEFT has it, which reads the model's tokenizer for an initial text."""
    from peft import PromptTuningConfig

    text: dict[str, Any] = {}
    embedding, vocabulary = model.get_input_embeddings(), model.config.get_text_config().vocab_size
    # PEFT goes by the first tensor with as many rows (0.21.2, `_setup_prompt_encoder`).
    if next((one for one in model.parameters() if one.shape[:1] == (vocabulary,)), None) is not embedding.weight:
        problem = f"adapter: PEFT cannot find the embedding of {type(model).__name__} by its {vocabulary:,} rows"
        raise ModelError(problem, hint="set adapter.type=lora")
    if is_new and adapter.prompt_tuning_init == "TEXT":
        commit = vars(model.config).get("_commit_hash")
        text = {
            "prompt_tuning_init_text": adapter.prompt_tuning_init_text,
            "tokenizer_name_or_path": model.name_or_path,
            "tokenizer_kwargs": {} if commit is None else {"revision": commit},
        }
    return PromptTuningConfig(
        task_type=task,
        num_virtual_tokens=adapter.num_virtual_tokens,
        prompt_tuning_init=adapter.prompt_tuning_init if is_new else "RANDOM",
        token_dim=embedding.embedding_dim,
        # Nothing here depends on it, and PEFT does not find it in all configurations.
        num_attention_heads=1,
        **text,
    )


def _config_by_names(adapter: PeftAdapter, model: "PreTrainedModel", task: Task, trained: Path | None) -> "PeftConfig":
    """Return the section of an adapter other than LoRA as PEFT has it, with its modules by their full names.

    Not all kinds have PEFT's fields that narrow modules down.
    """
    from peft import AdaLoraConfig, IA3Config, MissConfig, OFTConfig, VeraConfig

    names = _names_of(adapter, model)
    common: dict[str, Any] = {
        "task_type": task,
        "target_modules": names,
        "modules_to_save": adapter.modules_to_save,
    }
    match adapter:
        case Ia3Adapter():
            inputs = [name for name in names if adapter.scales_input(name)]
            return IA3Config(**common, feedforward_modules=inputs)
        case VeraAdapter():
            return VeraConfig(
                **common,
                r=adapter.rank,
                d_initial=adapter.d_initial,
                projection_prng_key=adapter.projection_prng_key,
            )
        case OftAdapter():
            return OFTConfig(**common, oft_block_size=adapter.oft_block_size, block_share=adapter.block_share)
        case MissAdapter():
            return MissConfig(**common, r=adapter.rank)
        case AdaloraAdapter():
            stated = _stated(trained) if trained is not None else {}
            # The schedule of a run comes with its trainer.
            sizes = {"init_r": adapter.init_r, "target_r": adapter.target_r, "lora_alpha": adapter.alpha}
            pattern = stated.get("rank_pattern")
            return AdaLoraConfig(**common, **sizes, lora_dropout=adapter.dropout, total_step=1, rank_pattern=pattern)
        case _:
            raise TypeError(f"no configuration of PEFT for {adapter.type}")


def _names_of(adapter: PeftAdapter, model: "PreTrainedModel") -> list[str]:
    """Return the full names of the linear layers that get an adapter."""
    names = _targeted_linears(adapter, model)
    never = {*_own_linears(model), *excluded_in_towers(model, adapter, names)}
    return [name for name in names if name not in never]


def _rows_of(tokens: list[int], adapter: LoraAdapter, model: "PreTrainedModel") -> dict[str, list[int]] | None:
    """Return the rows of tokens by table, as PEFT trains them: a tied head follows its embedding."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    if tables[1] is not None and tables[1].weight is tables[0].weight:
        del tables[1]
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if module in tables]
    whole = tuple(adapter.modules_to_save or ())
    return {name: tokens for name in names if not name.endswith(whole or ("\0",))} if tokens else None


def _targeted_linears(adapter: PeftAdapter, model: "PreTrainedModel") -> list[str]:
    """Return the full names of the linear layers that a section means, but for the head.

    Raises:
        ModelError: There is none.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    names = [name for name, module in linears if module is not head and adapter.targets(name)]
    if not names:
        raise ModelError(
            f"adapter.target_modules: no linear layer matches {adapter.target_modules!r}",
            hint=_example([name for name, _ in linears]),
        )
    return names


def _excluded(adapter: LoraAdapter, model: "PreTrainedModel") -> list[str] | str | None:
    """Return what gets no adapter, by the section or of necessity, as PEFT's `exclude_modules`."""
    never, endings = _never_adapted(model), adapter.exclude_modules or []
    if isinstance(never, str):
        return "|".join([never, *(rf"(.*\.)?{re.escape(ending)}" for ending in endings)])
    return [*(never or []), *endings] or None


def _never_adapted(model: "PreTrainedModel") -> list[str] | str | None:
    """Return the linear layers that get no adapter whatever the target modules are, as PEFT's `exclude_modules`.

    Besides those of the model's own code they are those of towers, which see no text.
    """
    own, names = _own_linears(model), towers(model)
    if not names:
        return own or None
    patterns = [*(rf"{re.escape(name)}(\..*)?" for name in names), *map(re.escape, own)]
    if any(name.rpartition(".")[2].isdigit() for name in _linears(model)):
        # PEFT takes the last names of all linear layers of some types, where "0" of a tower means layer 0 too.
        patterns.append(r".*\.\d+")
    return "|".join(patterns)


def _own_linears(model: "PreTrainedModel") -> list[str]:
    """Return the linear layers that get no adapter because of the model's code.

    PEFT adapts every linear layer by class. Some subclasses of a model's own code compute something else (the routers
    of PhiMoE and Llama 4 return more than a product), and Mamba layers read some weights past their modules.
    """
    refused, useless = read_past_of(model.config.model_type), tuple(f"{name}." for name in without_gradient(model))
    if type(model).__name__.endswith("ForTokenClassification"):
        # PEFT leaves it out of sequence classifiers alone (0.21.2), and trains it whole in both.
        useless += SCORES
    return [
        name
        for name, module in _linears(model).items()
        if not _is_product(module) or name.rpartition(".")[2] in refused or f"{name}.".startswith(useless)
    ]


def _linears(model: "PreTrainedModel") -> "dict[str, torch.nn.Linear]":
    from torch import nn

    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _is_product(module: "torch.nn.Linear") -> bool:
    """Return whether a linear layer computes a product and adds its bias, as torch's own does, or a rounded product."""
    import torch
    from torch.nn.functional import linear

    kind: Any = type(module)
    if kind.forward is torch.nn.Linear.forward or kind.__module__.startswith(("bitsandbytes.", "torchao.")):
        return True
    small = kind.__new__(kind)
    torch.nn.Module.__init__(small)
    vars(small).update({name: value for name, value in vars(module).items() if name not in vars(small)})
    small.weight = torch.nn.Parameter(torch.arange(12.0, device="cpu").view(4, 3) - 5)
    small.bias = None if module.bias is None else torch.nn.Parameter(torch.arange(4.0, device="cpu"))
    rows = torch.arange(30.0, device="cpu").view(2, 5, 3) - 15
    try:
        result = small(rows)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return isinstance(result, torch.Tensor) and torch.equal(result, linear(rows, small.weight, small.bias))


def read_adapter(model: "PeftModel", folder: Path, *, name: str = "default") -> None:
    """Give an adapter of a model the weights that a folder has, all of them.

    Args:
        model: The model, to which an adapter of this name is attached.
        folder: Where PEFT saved one.
        name: Name of the adapter.

    Raises:
        ModelError: The folder has no adapter any more, a damaged one, or other tensors than this one.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        raise ModelError(f"{file}, which this run starts from, is missing", hint="restore it, or use another model")
    try:
        weights = load_file(file)
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged: {error}", hint="pass a checkpoint, or restore it") from error
    needed = set(get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False))
    different = sorted(needed.symmetric_difference(weights))
    if not different:
        try:
            set_peft_model_state_dict(model, weights, adapter_name=name)
        except RuntimeError as error:
            raise ModelError(f"the adapter in {folder} does not fit its base model: {error}") from error
        return
    where = "the folder" if different[0] in weights else "the model"
    raise ModelError(
        f"the adapter in {folder} does not match this model: {different[0]} is only in {where}"
        f"{f', and {len(different) - 1} more' if len(different) > 1 else ''}",
        hint="set the adapter's base model and training settings in the recipe",
    )


def merge_adapter(model: "PreTrainedModel", adapter: PeftAdapter, folder: Path) -> "PreTrainedModel":
    """The model with a trained adapter made part of its weights, in their type.

    Args:
        model: The base model. It is changed.
        adapter: How the adapter was trained.
        folder: Where it was saved.
    """
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.integrations import gather_params_ctx

    adapted = get_peft_model(model, peft_config(adapter, model, trained=folder))
    read_adapter(adapted, folder)
    with_trained_values(cast("PeftModel", adapted), adapter)
    check_mergeable(cast("PeftModel", adapted), adapter)
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            # ZeRO-3 has divided them already; elsewhere they are whole.
            with gather_params_ctx(list(cast("torch.nn.Module", module).parameters())):
                cast(Any, module).merge()
    return cast("PreTrainedModel", cast(Any, adapted).merge_and_unload())


def with_trained_values(model: "PeftModel", adapter: PeftAdapter) -> None:
    """Give a base that was loaded whole the values that it was trained with, where its adapter applies to no others."""
    if isinstance(adapter, QloraAdapter) and adapter.is_of_4bit_base:
        from tunekit.models.initial import round_base

        round_base(model, adapter)


def check_mergeable(model: "PeftModel", adapter: PeftAdapter) -> None:
    """Check that each adapted layer has a bias, where the adapter has biases to merge.

    Raises:
        ModelError: One has none.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(adapter, LoraAdapter) or not adapter.lora_bias:
        return
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and cast(Any, module).get_base_layer().bias is None:
            raise ModelError(
                f"an adapter with lora_bias cannot be merged: {name.removeprefix('base_model.model.')} has no bias",
                hint="use the adapter itself: export it with --adapter",
            )


@contextmanager
def unrounded(model: "torch.nn.Module") -> Iterator[None]:
    """Give trained parameters their values back that a trainer, which is built within it, rounds to 16 bits.

    TRL casts what is trained on a quantized base to bfloat16, a copy of the embedding that is trained whole too.
    """
    values = [(parameter, parameter.data) for parameter in model.parameters() if parameter.requires_grad]
    yield
    for parameter, exact in values:
        if parameter.dtype != exact.dtype:
            parameter.data = exact.to(parameter.device)


def keep_trained(model: "torch.nn.Module", dtype: Dtype = "float32") -> None:
    """Undo a trainer's cast of trained parameters to 16 bits: small updates would vanish in rounding.

    Args:
        model: The model.
        dtype: Type of trained parameters: `bfloat16` for an optimizer that rounds them stochastically.
    """
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, dtype))


def num_trained(model: "torch.nn.Module") -> int:
    """Number of parameters that require gradients, those that DeepSpeed divided counted whole."""
    from transformers.trainer_pt_utils import get_model_param_count

    number: int = get_model_param_count(model, trainable_only=True)
    return number
