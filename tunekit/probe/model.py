"""Facts of a model, from its files.

A model is known from its config.json and from the headers of its safetensors files: a few kilobytes that name every
tensor with its shape, so that counts are exact before any weight is read. A plan does with less: config.json alone,
or tunekit's own table of well-known models.
"""

import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tunekit.errors import ModelError, loading_errors
from tunekit.estimates.facts import SCORE, ModelFacts, Origin, TemplateFacts
from tunekit.estimates.memory.experts import fused_experts
from tunekit.estimates.models.architectures import tensors_of
from tunekit.estimates.models.model_config import (
    complete,
    head_dim_of,
    is_known,
    known_models,
    layer_types_of,
    mlp_width_of,
    model_types,
    num_experts_of,
    num_experts_per_token_of,
    router_aux_loss_coef_of,
    sliding_window_of,
    text_config,
)
from tunekit.estimates.models.published import method_of, packed_weights, why_unread
from tunekit.estimates.models.rope import has_rope, rope_of, rules_out_rope
from tunekit.estimates.models.towers import Tower, describes, num_read_layers, tower_of
from tunekit.files import SHIPPED_MODELS
from tunekit.probe.chat_template import end_answers, template_text
from tunekit.probe.model_files import (
    PICKLED,
    Tensors,
    broken,
    check_config,
    check_links,
    dtype_name,
    read_settings,
    read_tensors,
    read_text,
)
from tunekit.probe.new_tokens import add_new_tokens
from tunekit.probe.origin import origin_of, refuse_others_code
from tunekit.probe.tokenizers import TEKKEN_TOKENS, stored_tokenizer
from tunekit.recipe.chat_templates import NamedTemplate, missing_tokens, named_template, template_of_type
from tunekit.recipe.sections.model import ModelSection

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

PICO = SHIPPED_MODELS["pico"]
"""Folder of the chat model that ships with tunekit."""

HUB_SECONDS = 10
"""Seconds that a request to the hub may take before it counts as out of reach."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
"""Files that hold a tokenizer; one of them is enough."""


def model_folder(model: ModelSection) -> str:
    """Return the argument for transformers' loaders: a folder, or a hub name."""
    return str(SHIPPED_MODELS.get(model.path, model.path))


def probe_model(model: ModelSection) -> ModelFacts:
    """Facts of a model from its files.

    Raises:
        ModelError: It is not there, not complete, not a causal language model, or not stored as safetensors.
    """
    origin = origin_of(model)
    facts = _probe(model) if origin is None else _of_origin(origin, probe_model)
    return _with_tokenizer(facts, model)


def _with_tokenizer(facts: ModelFacts, section: ModelSection) -> ModelFacts:
    """Facts of a model with the tokens that its section adds, and with the chat template that is known by name.

    Where the tokenizer is not at hand, all tokens have new rows.

    Raises:
        ModelError: The tokenizer lacks the token that ends answers by the template.
    """
    of_type = default_template(section)
    template = named_template(section.chat_template) or of_type
    if not section.all_tokens and template is None:
        return facts
    tokenizer = _tokenizer_at_hand(section)
    if tokenizer is None:
        num = len(section.all_tokens)
        return facts.with_new_tokens(tuple(range(facts.vocab_size, facts.vocab_size + num)), ())
    before = tokenizer.eos_token
    facts = facts.with_new_tokens(*add_new_tokens(tokenizer, section))
    if template is None:
        return facts
    end_answers(tokenizer, section)
    end = str(tokenizer.eos_token)
    replaces = before if isinstance(before, str) and before != end else None
    as_text = tuple(missing_tokens(template, tokenizer.get_vocab()))
    name = None if of_type is None else of_type.name
    described = TemplateFacts(of_type=name, end=end, replaces=replaces, as_text=as_text)
    return facts.model_copy(update={"template": described})


def default_template(section: ModelSection) -> NamedTemplate | None:
    """Return the chat template of models of a type that come without one; None for other models."""
    if section.chat_template is not None:
        return None
    where = with_tokenizer(section)
    template, folder = template_of_type((stored_config(where) or {}).get("model_type")), _files_at_hand(where)
    return None if folder is not None and _has_chat_template(folder) else template


def _files_at_hand(section: ModelSection) -> Path | None:
    """Return the folder with the small files of a model; None where they were not fetched yet."""
    local = Path(model_folder(section))
    return local if local.is_dir() else fetched_folder(section)


def _tokenizer_at_hand(section: ModelSection) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer of a model as it is stored; None where it cannot be loaded."""
    where = with_tokenizer(section)
    try:
        return stored_tokenizer(model_folder(where), revision=where.revision, trust_remote_code=where.trust_remote_code)
    except loading_errors():
        return None


def vocabulary_of(section: ModelSection) -> frozenset[str]:
    """Return the tokens of a model with those that its section adds; of its stored tokens none if it has none."""
    tokenizer = _tokenizer_at_hand(section)
    return frozenset((*(() if tokenizer is None else tokenizer.get_vocab()), *section.all_tokens))


def _of_origin(origin: Origin, look: Callable[[ModelSection], ModelFacts]) -> ModelFacts:
    """Facts of the model that an adapter or a run is on, and of it itself."""
    folder = Path(origin.folder)
    facts = _read_folder(folder, origin.base.path) if origin.adapter is None else look(origin.base)
    has_template = facts.has_chat_template or _has_chat_template(folder)
    return facts.model_copy(update={"origin": origin, "has_chat_template": has_template})


def with_tokenizer(model: ModelSection) -> ModelSection:
    """Return the section of the model with the tokenizer: its base for an adapter that has none of its own."""
    origin = origin_of(model)
    if origin is None or any((Path(origin.folder) / name).is_file() for name in TOKENIZER_FILES):
        return model
    return origin.base


class Template(NamedTuple):
    """The chat template of a tokenizer, and the special tokens that it writes."""

    text: str | None
    tokens: Mapping[str, str]


def chat_template_of(model: ModelSection) -> Template | None:
    """Return the chat template of a model as its tokenizer has it; None where none is at hand, or it is unclear.

    Nothing is fetched and nothing heavy is loaded: these are small files beside the weights.
    """
    section = with_tokenizer(model)
    folder, of_type = _files_at_hand(section), default_template(model)
    if of_type is not None:
        return Template(of_type.text(), TEKKEN_TOKENS | (model.special_tokens.by_role if model.special_tokens else {}))
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return None
    config = read_settings(folder, "tokenizer_config.json", model.path)
    tokens = {name: _token(value) for name, value in config.items() if name.endswith("_token")}
    tokens |= {} if model.special_tokens is None else model.special_tokens.by_role
    template = named_template(model.chat_template)
    if template is not None and template.end is not None:
        tokens["eos_token"] = template.end
    special_tokens = {name: token for name, token in tokens.items() if token is not None}
    if model.chat_template is not None:
        return Template(template_text(model.chat_template), special_tokens)
    if (folder / "chat_template.jinja").is_file():
        return Template(read_text(folder / "chat_template.jinja", model.path), special_tokens)
    stored = config.get("chat_template")
    if stored is None and not _has_chat_template(folder) and not (folder / "additional_chat_templates").is_dir():
        return Template(None, special_tokens)
    return Template(stored, special_tokens) if isinstance(stored, str) else None


def _token(value: Any) -> str | None:
    """A special token as a tokenizer_config.json has it: its text, or a section with it."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _probe(model: ModelSection) -> ModelFacts:
    folder = Path(model_folder(model))
    if folder.is_dir():
        return _read_folder(folder, model.path)
    if folder.exists():
        raise ModelError(f"model.path: {model.path!r} is a file", hint="set it to the folder with config.json")
    if model.path.startswith((".", "/", "~")) or model.path.count("/") > 1 or (os.sep != "/" and os.sep in model.path):
        raise ModelError(f"model.path: no folder {model.path!r}", hint=_near(folder))
    cached = _cached(model)
    headers = cached or _fetch_headers(model)
    if model.trust_remote_code:
        refuse_others_code(headers, model.path)
    return _read_folder(headers, model.path, stored=None if cached else _hub_tensors(model))


def sketch_model(model: ModelSection) -> ModelFacts:
    """Facts of a model to plan with, also where it cannot be trained yet.

    A folder may lack weights and tokenizer: its config.json says the tensors. A hub model that cannot be looked at,
    for want of a network or of access, is known from its config.json if that was fetched before, or by its name.

    Raises:
        ModelError: It is not there, or its tensors cannot be told from what there is.
    """
    return _with_tokenizer(_sketch(model), model)


def _sketch(model: ModelSection) -> ModelFacts:
    origin = origin_of(model)
    if origin is not None:
        return _of_origin(origin, sketch_model)
    folder = Path(model_folder(model))
    if _has_config_only(folder):
        return _from_config(_read_config(folder, model.path), model.path, _has_chat_template(folder))
    try:
        return _probe(model)
    except _HubError:
        fetched = fetched_folder(model)
        if fetched is not None and _has_config_only(fetched):
            return _from_config(_read_config(fetched, model.path), model.path, _has_chat_template(fetched))
        if model.path not in known_models():
            raise
        return known_model(model.path)


def stored_config(section: ModelSection) -> Mapping[str, Any] | None:
    """Return the config.json of a model: of its folder, of what was fetched of it, or of tunekit's own table."""
    folder = _files_at_hand(section)
    if folder is not None and (folder / "config.json").is_file():
        return _read_config(folder, section.path)
    entry = known_models().get(section.path)
    return None if entry is None else entry.config


def known_model(name: str) -> ModelFacts:
    """Facts of a well-known model from tunekit's own table."""
    entry = known_models()[name]
    facts = _from_config(entry.config, name, entry.has_chat_template)
    return facts.model_copy(update={"known_from": "table"})


def _has_config_only(folder: Path) -> bool:
    """Return whether there is a config.json, and no weights at all."""
    weights = (file for pattern in ("*.safetensors*", "*.bin") for file in folder.glob(pattern))
    return (folder / "config.json").is_file() and not any(weights)


def _from_config(config: Mapping[str, Any], path: str, has_chat_template: bool) -> ModelFacts:
    _check_causal(config, path)
    facts = _facts(config, path, _config_tensors(config, path), has_chat_template)
    return facts.model_copy(update={"known_from": "config"})


def _config_tensors(config: Mapping[str, Any], path: str) -> Tensors:
    """Shape and type of every tensor by config.json: of float32 where it names no type, as transformers has it."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    try:
        shapes = (None if is_known(config) else _built_tensors(config)) or tensors_of(config)
    except ModelError as error:
        raise ModelError(f"model.path: {path!r}: {error.problem}", hint=error.hint) from error
    return {name: (shape, dtype) for name, shape in shapes.items()}


def _built_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Shape of every parameter of the model that transformers builds of a config.json, without memory for any of them.

    Returns:
        None where transformers does not know the type.

    Raises:
        ModelError: It cannot build the model.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        settings = config_class(config)
        if settings is None:
            return None
        with _without_warnings():
            import torch

            with torch.device("meta"):
                model = auto_class(settings).from_config(settings)
    except ImportError as error:
        command = re.search(r"pip install [\w.-]+", str(error))
        raise ModelError(
            f"transformers needs a package for {config.get('model_type')!r} models that is not installed: "
            + str(error).partition(". ")[0].strip(),
            hint=command[0] if command else "install the package",
        ) from error
    except (
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        StrictDataclassError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"transformers cannot build what its config.json describes: {reason}", hint="fix config.json"
        ) from error
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Within it, libraries log no warnings: quantizers warn on import of kernels for other devices (torchao 0.18)."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _is_of_transformers(config: Mapping[str, Any]) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return config.get("model_type") in CONFIG_MAPPING


def config_class(config: Mapping[str, Any]) -> "PretrainedConfig | None":
    """Return a config.json as transformers' class of its type; None where transformers does not know the type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not _is_of_transformers(config):
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(config, file)
        file.flush()
        settings: PretrainedConfig = CONFIG_MAPPING[config["model_type"]].from_json_file(file.name)
    return settings


def auto_class(config: "PretrainedConfig") -> Any:
    """Return the auto class that loads the architecture of a model, vision and audio towers included.

    For some multimodal configurations `AutoModelForCausalLM` builds the text decoder alone, and for others nothing.
    Transformers lists Audio Flamingo 3 with encoder-decoders (5.24).
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto import modeling_auto

    architectures = config.architectures or []
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    multimodal = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)
    if multimodal in architectures and causal != multimodal:
        return AutoModelForMultimodalLM
    seq2seq = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    is_listed_there = seq2seq in architectures and causal is None and not config.is_encoder_decoder
    return AutoModelForSeq2SeqLM if is_listed_there else AutoModelForCausalLM


def _near(folder: Path) -> str:
    """Return a suggestion for a folder that does not exist."""
    from difflib import get_close_matches

    if not folder.parent.is_dir():
        return f"the folder {str(folder.parent)!r} does not exist either"
    names = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    close = get_close_matches(folder.name, names, n=1)
    return f"did you mean {str(folder.parent / close[0])!r}?" if close else "check the path"


def _cached(model: ModelSection) -> Path | None:
    """Folder of a hub model whose weights were downloaded before; it needs no network."""
    folder = fetched_folder(model)
    return folder if folder is not None and any(folder.glob("*.safetensors")) else None


def fetched_folder(model: ModelSection) -> Path | None:
    """Folder of what was fetched of a hub model before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.path, revision=model.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ModelError(
            f"model.path: {model.path!r} is neither a folder here nor a valid name on the Hub",
            hint="check the path",
        ) from error


def _fetch_headers(model: ModelSection) -> Path:
    """Fetch a hub model's small files, and return their folder."""
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "tokenizer_config.json", "chat_template*", "generation_config.json"]
    with _hub_errors(model):
        return Path(
            snapshot_download(model.path, revision=model.revision, allow_patterns=patterns, etag_timeout=HUB_SECONDS)
        )


def _hub_tensors(model: ModelSection) -> Tensors:
    """Shape and type of a hub model's tensors, from the headers of its files alone."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError

    with _hub_errors(model):
        try:
            metadata = get_safetensors_metadata(model.path, revision=model.revision)
        except NotASafetensorsRepoError as error:
            raise ModelError(
                f"model.path: {model.path!r} has no safetensors weights",
                hint=PICKLED,
            ) from error
    return {
        name: (tuple(tensor.shape), dtype_name(tensor.dtype))
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }


class _HubError(ModelError):
    """The hub cannot be reached, or has the model and does not show it."""


@contextmanager
def _hub_errors(model: ModelSection) -> Iterator[None]:
    """Turn the hub's many errors into one line."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    name = model.path
    try:
        yield
    except GatedRepoError as error:
        raise _HubError(
            f"model.path: {name!r} requires accepting its license on the Hub",
            hint="accept it there, then log in with `hf auth login`",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"model.path: {name!r} is neither a folder here nor on the Hub",
            hint="check the spelling; a private model needs `hf auth login`",
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise _HubError(
            f"model.path: {name!r} is not a folder here, and the Hub cannot be reached",
            hint="set it to a folder of the working directory or the recipe's folder, or connect to the network",
        ) from error


def _read_folder(folder: Path, path: str, stored: Tensors | None = None) -> ModelFacts:
    config = _read_config(folder, path)
    is_judge = scores(config)
    if not is_judge:
        _check_causal(config, path)
    if stored is None and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model.path: {path!r} has no tokenizer",
            hint="the folder is incomplete: save the tokenizer with the model",
        )
    tensors = _thinker_tensors(stored if stored is not None else read_tensors(folder, path))
    if is_judge and SCORE not in tensors:
        _check_causal(config, path)
    packed = None
    if method_of(config) is not None and (is_known(config) or _is_of_transformers(config)):
        # What is stored then are packed blocks and their scales, not the weights that are trained.
        packed, tensors = tensors, _config_tensors(config, path)
    return _facts(config, path, tensors, _has_chat_template(folder), packed)


def _read_config(folder: Path, path: str) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path: {path!r} has no config.json", hint="set it to a folder saved by save_pretrained")
    check_links(folder, path)
    config = read_settings(folder, "config.json", path)
    check_config(config, path)
    config = _thinker(config)
    return _nested(config) if "vision_config" in config and "text_config" not in config else config


THINKER = "thinker"
"""Name of the part of a model that reads and writes, in models that speak too: Qwen-Omni's. A talker speaks, from what
the thinker computes."""


def thinker_of(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return the configuration of the part of a model that reads and writes, which is loaded and trained alone.

    Args:
        config: Configuration of a model; itself where it does not speak.
    """
    own: PretrainedConfig | None = vars(config).get(f"{THINKER}_config")
    architecture = None if own is None else _multimodal_class(own.model_type)
    if own is None or architecture is None:
        return config
    own.architectures = [architecture]
    own.dtype = own.dtype or config.dtype
    if "quantization_config" in vars(config):
        own.quantization_config = config.quantization_config
    return own


def _thinker(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that `thinker_of` has."""
    own = config.get(f"{THINKER}_config")
    if not isinstance(own, dict) or (architecture := _multimodal_class(own.get("model_type"))) is None:
        return config
    shared = {name: config[name] for name in ("dtype", "torch_dtype", "quantization_config") if name in config}
    return {**shared, **own, "architectures": [architecture]}


def _multimodal_class(model_type: object) -> str | None:
    """Return the name of transformers' class of a multimodal type; None without one.

    Published configurations of thinkers have names that transformers does not know.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    name: str | None = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(model_type)
    return name


def _thinker_tensors(tensors: Tensors) -> Tensors:
    """Return those of the tensors of a checkpoint that are of its thinker, by their names there; all without one."""
    prefix = f"{THINKER}."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return own or tensors


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json whose text decoder has a part of its own, as transformers reads it.

    Qwen2-VL's and Qwen2.5-VL's on the hub have its settings beside the others.
    """
    settings = config_class(config)
    text = None if settings is None else settings.to_dict().get("text_config")
    return config if text is None else {**config, "text_config": text}


def scores(config: Mapping[str, Any]) -> bool:
    """Return whether a model scores texts or tokens: a decoder, which reads them from left to right, if its head is
    called a score.
    """
    architectures = config.get("architectures") or []
    return any(name.endswith(("ForSequenceClassification", "ForTokenClassification")) for name in architectures)


def _check_causal(config: Mapping[str, Any], path: str) -> None:
    """Refuse what is no causal language model, nor has one as its text decoder among vision or audio towers."""
    architectures = config.get("architectures") or []
    is_causal = any("CausalLM" in name or "LMHead" in name for name in architectures)
    is_multimodal = "text_config" in config and not config.get("is_encoder_decoder")
    has_text_decoder = is_multimodal and any("ForConditionalGeneration" in name for name in architectures)
    if not is_causal and not has_text_decoder and not _in_causal_table(architectures):
        names = ", ".join(architectures) or "none"
        raise ModelError(
            f"model.path: {path!r} is not a causal language model (architectures: {names})",
            hint="use a model with a ...ForCausalLM architecture, or a ...ForConditionalGeneration with a text_config",
        )


def _in_causal_table(architectures: Sequence[str]) -> bool:
    """Return whether transformers itself lists one of these as a causal language model, whatever it is called."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return not set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()).isdisjoint(architectures)


def _facts(
    config: Mapping[str, Any], path: str, tensors: Tensors, has_chat_template: bool, packed: Tensors | None = None
) -> ModelFacts:
    """Facts of a model.

    Args:
        config: Its config.json.
        path: Its name.
        tensors: Shape and type of its parameters.
        has_chat_template: True if its tokenizer has a template.
        packed: Tensors in its files, where they are quantized and at hand.
    """
    types = [dtype for _, dtype in tensors.values()]
    is_supported = is_known(config)
    text = text_config(complete(config) if is_supported else config)
    if text.get("use_bidirectional_attention") in (True, "all"):
        raise ModelError(
            f"model.path: {path!r} is not a causal language model: its attention is bidirectional",
            hint="use a model whose use_bidirectional_attention is not set",
        )
    hidden = _number(text, path, "hidden_size", "n_embd", "d_model")
    if text.get("model_type") in model_types().without_heads:
        heads = 1  # of the full width
    else:
        heads = _number(text, path, "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
    num_layers = _number(text, path, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    shapes = {name: shape for name, (shape, _) in tensors.items() if _is_loaded(name, num_layers)}
    num_experts = num_experts_of(text)
    facts = ModelFacts(
        path=path,
        architecture=config["architectures"][0],
        model_type=text.get("model_type") or "",
        layer_types=layer_types_of(text),
        tensors=fused_experts(shapes) if num_experts else shapes,
        dtype=Counter(types).most_common(1)[0][0],
        hidden_size=hidden,
        intermediate_size=mlp_width_of(text) if is_supported else _mlp_width(text, hidden),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=head_dim_of(text) if is_supported else text.get("head_dim") or hidden // heads,
        vocab_size=_number(text, path, "vocab_size"),
        max_position_embeddings=text.get("max_position_embeddings") or text.get("n_positions"),
        rope=_rope(text),
        sliding_window=sliding_window_of(text),
        attention_dropout=text.get("attention_dropout") or 0.0,
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token_of(text),
        router_aux_loss_coef=router_aux_loss_coef_of(text) if num_experts else None,
        has_chat_template=has_chat_template,
        published_as=method_of(config),
        why_unread=why_unread(config),
        judges=scores(config),
        is_multimodal="text_config" in config,
        tower=_tower(config),
        num_read_tower_layers=_num_read_layers(config),
    )
    return facts.model_copy(update={"packed": packed_weights(config, facts.linears, packed)})


def _tower(config: Mapping[str, Any]) -> Tower | None:
    """Return the vision tower of a model, of what its config.json says and what transformers takes for the rest."""
    if not describes(config.get("model_type")):
        return None
    if is_known(config):
        return tower_of(complete(config))
    settings = config_class(config)
    return None if settings is None else tower_of(settings.to_dict())


def _num_read_layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers of a vision tower whose outputs are read; None where all are."""
    if "vision_config" not in config or ("vision_feature_layer" not in config and is_known(config)):
        return None
    settings = config_class(config)
    return None if settings is None else num_read_layers(settings.to_dict())


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the rotary parameters of a decoder; None where it has none, as transformers' class of its type says."""
    if has_rope(config):
        return rope_of(config)
    if rules_out_rope(config):
        return None
    own = {"rope_parameters": _by_config_class(config, "rope_parameters")}
    return rope_of(own) if has_rope(own) else None


_DECODER_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")


_BUFFERS = (".input_min", ".input_max", ".output_min", ".output_max", ".layer_scalar")
"""Last names of tensors of Gemma 4 that are buffers: to what its towers clip, and a scale of each layer."""


def _is_loaded(name: str, num_layers: int) -> bool:
    """Return whether a stored tensor is a parameter of the model as transformers builds it.

    Layers behind the last one predict further tokens (DeepSeek-V3, GLM-4.5) and are left out. What corrects the scores
    of experts is a buffer, which nothing trains, but for Ernie's. So are some of Gemma 4's scalars.
    """
    layer = _DECODER_LAYER.match(name)
    if layer and int(layer[1]) >= num_layers:
        return False
    if name.endswith(_BUFFERS):
        return False
    return not name.endswith(".e_score_correction_bias") or ".moe_statics." in name


def _mlp_width(config: Mapping[str, Any], hidden: int) -> int:
    width = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    # Gemma 3n has one for each layer.
    return max(map(int, width)) if isinstance(width, list) else int(width)


def _number(config: Mapping[str, Any], path: str, *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            if config[name] < 1:
                raise broken(path, "config.json", f"{name} must be positive, got {config[name]}")
            return int(config[name])
    kind = config.get("model_type")
    has_encoder = config.get("is_encoder_decoder") or any(
        name in config for name in ("encoder_layers", "num_encoder_layers")
    )
    if kind and not is_known(config) and not has_encoder:
        value = _by_config_class(config, names[0])
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    if is_known(config):
        raise ModelError(
            f"model.path: the config.json of {path!r} has no {names[0]}", hint="the folder may be incomplete"
        )
    if has_encoder:
        raise ModelError(
            f"model.path: {path!r} is of an encoder-decoder type ({kind}), which tunekit does not train",
            hint="use a decoder-only model",
        )
    raise ModelError(
        f"model.path: the config.json of {path!r} ({kind}) has no {' or '.join(names)}",
        hint="use a decoder-only transformer: tunekit plans by these values",
    )


def _by_config_class(config: Mapping[str, Any], name: str) -> Any:
    """Return a value that transformers' class of this type derives, or has under another name or as its default."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        return getattr(config_class(config), name, None)
    except (RuntimeError, TypeError, ValueError, StrictDataclassError):
        return None


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    name = "tokenizer_config.json"
    return (folder / name).is_file() and "chat_template" in read_settings(folder, name, str(folder))
