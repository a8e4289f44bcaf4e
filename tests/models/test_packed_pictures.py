"""Documents with pictures in one row have the logits and gradients that plain Transformers gives each alone."""

import inspect

import pytest
import torch
from PIL import Image

from benchmarks.tiny_models import tiny_model
from tests.vision import FAMILIES, tiny_vision_model
from tunekit.data.media.collate import in_one_row
from tunekit.models.documents import run_by_document, tell_documents_apart

PACKED = sorted(set(FAMILIES) - {"mllama"})
QUICK = {"llava", "gemma3"}
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PACKED]

# The number of pictures of each document, and its text, in which each picture is one token.
DOCUMENTS = [(1, "is this {} red?"), (0, "say hi"), (2, "{}{} and which is larger, this or that one?"), (1, "{} green")]


@pytest.fixture(params=CASES)
def family(request):
    return request.param


def texts(processor):
    mark = (
        processor.tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}], tokenize=False)
        .removeprefix("<|im_start|>user\n")
        .removesuffix("<|im_end|>\n")
    )
    return [text.format(*[mark] * num) for num, text in DOCUMENTS]


def pictures():
    torch.manual_seed(0)
    sizes = iter([(20, 30), (34, 41), (60, 30), (50, 44)])
    return [[noise(next(sizes)) for _ in range(num)] for num, _ in DOCUMENTS]


def noise(size):
    values = torch.randint(0, 255, (size[1], size[0], 3), dtype=torch.uint8)
    return Image.fromarray(values.numpy())


def read(processor, of_texts, of_pictures):
    """A batch by the processor, with all tokens but the first ones as labels, in double precision."""
    given = {"padding": True, "padding_side": "right", "return_tensors": "pt", "add_special_tokens": False}
    batch = dict(processor(text=of_texts, images=of_pictures if any(of_pictures) else None, **given))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    batch["labels"][:, 0] = -100
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def packed(processor):
    return in_one_row(read(processor, texts(processor), pictures()))


def split(row, values):
    """Values of the tokens of a row, by document."""
    starts = (row["position_ids"][0] == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], row["position_ids"].shape[1]]
    return [values[start:end] for start, end in zip(starts, ends, strict=True)]


def loaded(family):
    """A model as a run has it: told of documents."""
    model, processor = tiny_vision_model(family)
    model = model.double().eval()
    tell_documents_apart(model)
    if family == "qwen3_5":
        assert run_by_document(model) > 0
    return model, processor


def forward(model, batch):
    return model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False).logits


def loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")


def gradients(model):
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_logits_and_all_gradients_are_the_sums_of_those_alone(family):
    model, processor = loaded(family)
    row = packed(processor)
    assert "attention_mask" not in row and len(row["input_ids"]) == 1
    logits = forward(model, row)[0]
    loss(logits, row["labels"][0]).backward()
    plain, _ = tiny_vision_model(family)
    plain = plain.double().eval()
    for text, images, of_row in zip(texts(processor), pictures(), split(row, logits), strict=True):
        alone = read(processor, [text], [images])
        expected = forward(plain, alone)[0]
        torch.testing.assert_close(of_row, expected, rtol=0, atol=1e-5 * float(expected.detach().abs().max()))
        loss(expected, alone["labels"][0]).backward()
    own, others = gradients(model), gradients(plain)
    assert own.keys() == others.keys() and any("lm_head" in name or "embed" in name for name in own)
    largest = max(float(grad.abs().max()) for grad in others.values())
    for name, grad in others.items():
        assert float((own[name] - grad).abs().max()) <= 1e-5 * largest, name


def test_no_document_depends_on_another_one(family):
    """The Jacobian of a document's logits with respect to the tokens and pixels of others is 0."""
    model, processor = loaded(family)
    row = packed(processor)
    row["pixel_values"].requires_grad_()
    inputs = []

    def note(module, args, output):
        inputs.append(output.detach().requires_grad_())
        return inputs[-1]

    model.get_input_embeddings().register_forward_hook(note)
    logits = split(row, forward(model, row)[0])
    (embedded,), seen = inputs, []
    for number, of_document in enumerate(logits):
        change = torch.randn(of_document.shape, dtype=torch.double, generator=torch.Generator().manual_seed(number))
        of_tokens, of_pixels = torch.autograd.grad(
            (of_document * change).sum(), [embedded, row["pixel_values"]], retain_graph=True, allow_unused=True
        )
        for other, part in enumerate(split(row, of_tokens[0])):
            assert bool(part.abs().max() > 0) == (other == number)
        seen.append(torch.zeros_like(row["pixel_values"]) if of_pixels is None else of_pixels)
    assert [bool(grads.abs().max() > 0) for grads in seen] == [num > 0 for num, _ in DOCUMENTS]
    # No value of a pixel is read by two documents.
    assert not (torch.stack([grads != 0 for grads in seen]).sum(0) > 1).any()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_masks_of_pictures_are_those_of_each_document_alone(kind, attention):
    """The tokens of a picture see each other, as the model's own code has it, and none of another document."""
    model = tiny_model(kind)
    base, config = model.model, model.config.get_text_config()
    # For the decoder alone: the audio tower of Gemma 4 has no sdpa.
    config._attn_implementation = attention
    name = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids"
    if kind == "gemma4":
        config.use_bidirectional_attention = "vision"
    documents = [torch.tensor([kinds]) for kinds in ([0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 0, 1, 1], [0, 0], [1, 1, 0])]
    code = inspect.getmodule(type(base))

    def masks_of(kinds):
        masks = code.create_masks_for_vision_model(
            config=config,
            inputs_embeds=torch.empty(*kinds.shape, 1),
            attention_mask=None,
            cache=None,
            position_ids=None,
            block_sequence_ids=code.get_block_sequence_ids_for_mask(kinds, device="cpu"),
        )
        causal = torch.ones(kinds.shape[1], kinds.shape[1], dtype=torch.bool).tril()
        return {name: causal if mask is None else seen(mask[0, 0]) for name, mask in masks.items()}

    def seen(mask):
        return mask if mask.dtype == torch.bool else mask == 0

    tell_documents_apart(model)
    given = {}

    def note(module, args, kwargs):
        given.update(kwargs)
        raise StopIteration

    base.register_forward_pre_hook(note, with_kwargs=True)
    positions = torch.cat([torch.arange(kinds.shape[1]) for kinds in documents])[None]
    with pytest.raises(StopIteration):
        base(input_ids=positions, position_ids=positions, **{name: torch.cat(documents, dim=1)})
    for layers, mask in given["attention_mask"].items():
        alone = [masks_of(kinds)[layers] for kinds in documents]
        assert torch.equal(seen(mask[0, 0]), torch.block_diag(*alone).bool())
    assert {*given["attention_mask"]} == {"full_attention", "sliding_attention"}
