"""Each document of a row has the logits that it has alone, whatever a layer or an attention sees."""

import pytest
import torch

from benchmarks.tiny_models import tiny_model
from tests.estimates.shapes import H100, LLAMA_1B
from tests.planner.golden import ROWS, recipe
from tunekit.models.attention import register_packed_attention
from tunekit.models.documents import layers_with_state, run_by_document, run_decoder_by_document
from tunekit.models.load import attach_adapter, keep_positions
from tunekit.planner.decisions.backends import families
from tunekit.planner.plan import VARLEN
from tunekit.planner.resolve import resolve
from tunekit.recipe.sections.adapters import LoraAdapter

LENGTHS = (9, 14, 7)
CHANGES = {"lfm2": {"layer_types": ["conv", "full_attention"]}}
WITH_VARLEN = families()["isolates_with_flash_only"] & families()["varlen"]


def documents():
    return [torch.randint(3, 200, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def in_one_row():
    """A batch of two rows of documents, in another order each, as the collator packs them."""
    parts = documents()
    rows = [torch.cat(order, dim=1) for order in (parts, parts[::-1])]
    positions = [torch.cat([torch.arange(part.shape[1]) for part in order])[None] for order in (parts, parts[::-1])]
    return torch.cat(rows), torch.cat(positions)


def boundaries():
    ends = torch.tensor([0, 9, 23, 30], dtype=torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 14, "max_length_k": 14}


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", sorted(families()["by_document"]))
def test_each_document_has_the_logits_that_it_has_alone(family):
    model = tiny_model(family, **CHANGES.get(family, {})).eval()
    alone = [model(input_ids=part, use_cache=False).logits for part in documents()]
    assert run_by_document(model) == len(list(layers_with_state(model.get_decoder()))) > 0
    ids, positions = in_one_row()
    if family in WITH_VARLEN:
        register_packed_attention()
        model.set_attn_implementation(VARLEN)
        together = model(input_ids=ids[:1], position_ids=positions[:1], use_cache=False, **boundaries()).logits
        expected = torch.cat(alone, dim=1)
    else:
        together = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        expected = torch.cat([torch.cat(alone, dim=1), torch.cat(alone[::-1], dim=1)])
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "family", ["bert", "bloom", "deepseek_v32", "deepseek_v4", "glm4v", "prophetnet", "roberta", "rwkv", "xlm", "xlnet"]
)
def test_a_decoder_gives_each_document_the_logits_that_it_has_alone(family):
    model = tiny_model(family).eval()
    alone = [model(input_ids=part, use_cache=False).logits for part in documents()]
    run_decoder_by_document(model)
    ids, positions = in_one_row()
    together = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(together, torch.cat([torch.cat(alone, dim=1), torch.cat(alone[::-1], dim=1)]))
    first = torch.arange(9)[None]
    assert torch.equal(model(input_ids=documents()[0], position_ids=first, use_cache=False).logits, alone[0])


def test_a_row_of_one_document_has_the_positions_in_roberta_that_it_has_alone():
    model = tiny_model("roberta").eval()
    ids = documents()[0]
    alone = model(input_ids=ids, use_cache=False).logits
    run_decoder_by_document(model)
    assert torch.equal(model(input_ids=ids, position_ids=torch.arange(9)[None], use_cache=False).logits, alone)


def test_a_decoder_by_document_gives_the_scores_of_all_routers():
    model = tiny_model("mixtral").eval()
    alone = [model(input_ids=part, use_cache=False, output_router_logits=True) for part in documents()]
    run_decoder_by_document(model)
    ids, positions = in_one_row()
    row = {"input_ids": ids[:1], "position_ids": positions[:1], **boundaries()}
    together = model(**row, use_cache=False, output_router_logits=True)
    assert together.past_key_values is None
    for layer, scores in enumerate(together.router_logits):
        assert torch.equal(scores, torch.cat([output.router_logits[layer] for output in alone]))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradients_are_those_of_the_documents_alone(checkpointing):
    def gradients(model, *batches):
        model = attach_adapter(model, LoraAdapter(rank=4), seed=0).train()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
        if checkpointing:
            model.enable_input_require_grads()
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        for batch in batches:
            model(**batch, use_cache=False).logits.square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]

    ids, positions = in_one_row()
    packed = tiny_model("qwen3_next")
    run_by_document(packed)
    together = gradients(packed, {"input_ids": ids[:1], "position_ids": positions[:1]})
    apart = gradients(tiny_model("qwen3_next"), *({"input_ids": part} for part in documents()))
    for one, other in zip(together, apart, strict=True):
        # Of the largest gradient: sums of squares are thousands here, and rounding goes by them.
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_rows_of_one_document_are_computed_at_once():
    model = tiny_model("qwen3_next").eval()
    ids = documents()[0]
    expected = model(input_ids=ids, use_cache=False).logits
    run_by_document(model)
    packed, positions = in_one_row()
    model(input_ids=packed, position_ids=positions, use_cache=False)
    (layer,) = layers_with_state(model.get_decoder())
    calls = []
    layer.conv1d.register_forward_pre_hook(lambda _, args: calls.append(args))
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    assert layer.documents.spans is None


def test_a_plan_says_that_layers_run_once_for_each_document():
    model = LLAMA_1B.model_copy(update={"model_type": "qwen3_next", "layer_types": ("linear_attention",) * 16})
    asked = {"model": {"path": "m"}, "train": {"max_steps": 5}}
    packed = resolve(recipe(data={"packing": True}, **asked), H100, model, ROWS)
    (reason,) = [reason for reason in packed.reasons if reason.topic == "documents"]
    assert packed.by_document and reason.choice == "recurrent layers run once per document"
    assert not resolve(recipe(**asked), H100, model, ROWS).by_document
    attends = model.model_copy(update={"layer_types": ("full_attention",) * 16})
    assert not resolve(recipe(data={"packing": True}, **asked), H100, attends, ROWS).by_document


@pytest.mark.parametrize("family", ["roberta", "xglm"])
def test_positions_are_counted_from_the_padding_token_that_they_were_made_with(family):
    model = tiny_model(family)
    own, model.config.pad_token_id = model.config.pad_token_id, 99
    keep_positions(model, model.config)
    assert model.config.pad_token_id == own == 1


def test_a_llama_has_the_padding_token_of_its_tokenizer():
    model = tiny_model("llama", pad_token_id=7)
    model.config.pad_token_id = 99
    keep_positions(model, model.config)
    assert model.config.pad_token_id == 99
