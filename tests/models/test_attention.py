"""Packed rows are computed as each document alone, without a mask over all of them."""

from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from benchmarks.isolation import small_model
from tests.training.test_one_row import trainer_of
from tunekit.errors import RunError
from tunekit.models import attention
from tunekit.models.attention import packed_attention, register_packed_attention, sdpa_by_document
from tunekit.planner.plan import VARLEN
from tunekit.training.check_reference import prove_attention

LENGTHS = (17, 1, 30, 5)
MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen3": {"num_key_value_heads": 1},
    "gemma3_text": {},
    "deepseek_v3": {},
    "mixtral": {},
    "gpt_oss": {},
    "granite_swa": {},
}
"""Sliding windows are 8 tokens wide, and heads of queries share those of keys, unless it is said otherwise."""

PLAIN = {"gpt_oss": "eager"}
"""Attention of transformers for types that have no sdpa."""


@pytest.fixture(scope="module", autouse=True)
def registered():
    register_packed_attention()


def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (length,), generator=generator).tolist() for length in LENGTHS]


def batch_of(*rows):
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([{"input_ids": row} for row in rows])


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.sample(4)
@pytest.mark.parametrize("model_type", MODELS)
def test_a_packed_row_has_the_logits_and_gradients_of_its_documents_one_by_one(model_type):
    packed = small_model(model_type, VARLEN, **MODELS[model_type])
    alone = small_model(model_type, "eager", **MODELS[model_type])
    rows, batch = documents(), batch_of(*documents())
    del batch["labels"]
    weights = torch.randn(sum(LENGTHS), 256, generator=torch.Generator().manual_seed(1))
    found = packed(**batch, use_cache=False).logits[0]
    wanted = torch.cat([alone(torch.tensor([row]), use_cache=False).logits[0] for row in rows])
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    ours, theirs = gradients(packed, (found * weights).sum()), gradients(alone, (wanted * weights).sum())
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_windows_that_are_cut_into_pieces_are_those_of_a_whole_mask(num_heads, num_kv_heads, window, monkeypatch):
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", 7)
    torch.manual_seed(0)
    bounds = [0, 60, 61, 95]
    q = torch.randn(95, num_heads, 8, dtype=torch.float64)
    k, v = (torch.randn(95, num_kv_heads, 8, dtype=torch.float64) for _ in range(2))
    found = sdpa_by_document(q, k, v, torch.tensor(bounds), scale=0.3, window=window)
    k, v = (tensor.repeat_interleave(num_heads // num_kv_heads, 1) for tensor in (k, v))
    for start, end in pairwise(bounds):
        at = torch.arange(end - start)
        seen = at[:, None] >= at
        if window is not None:
            seen &= at[:, None] - at < window
        scores = 0.3 * torch.einsum("qhd,khd->hqk", q[start:end], k[start:end])
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        wanted = torch.einsum("hqk,khd->qhd", weights, v[start:end])
        assert torch.allclose(found[start:end], wanted, rtol=0, atol=1e-12)


class Sizes(TorchDispatchMode):
    """The most elements of a tensor that is made within it."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else (result,)
        sizes = [tensor.untyped_storage().nbytes() for tensor in made if isinstance(tensor, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_no_tensor_grows_with_the_pairs_of_tokens(model_type):
    """Also within a document: of a window there is a strip, without one SDPA keeps no scores."""

    def largest(implementation, length):
        model = small_model(model_type, implementation, max_position_embeddings=4096)
        batch = batch_of(*[list(range(64)) * (length // 64)] * 2)
        del batch["labels"]
        with Sizes() as sizes:
            model(**batch, use_cache=False, logits_to_keep=1).logits.sum().backward()
        return sizes.largest

    assert largest(VARLEN, 1024) <= 2.1 * largest(VARLEN, 512)
    assert largest("sdpa", 1024) > 3.5 * largest("sdpa", 512)


class Varlen(TorchDispatchMode):
    """The arguments with which torch's varlen attention is called within it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.torch_attn._varlen_attn.default:
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append(dict(zip(names, args, strict=False)) | (kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sinks", [None, 6])
def test_on_cuda_heads_are_padded_to_a_width_that_flash_attention_takes(sinks):
    import torch.nn.attention.varlen

    with Varlen() as varlen:
        q, k, v = (
            torch.empty(1, heads, 9, width, dtype=torch.bfloat16, device="meta")
            for heads, width in ((4, 12), (2, 12), (2, 10))
        )
        bounds = torch.empty(2, dtype=torch.int32, device="meta")
        s_aux = sinks and torch.empty(4, device="meta")
        how = {"is_causal": True, "s_aux": s_aux, "cu_seq_lens_q": bounds, "max_length_q": 9}
        out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, **how)
    (call,) = varlen.calls
    assert [call[name].shape[-1] for name in ("query", "key", "value")] == [16, 16, 16]
    assert call["scale"] == 12**-0.5 and out.shape == (1, 9, 4, 10)


@pytest.mark.parametrize(("window", "expected"), [(None, [-1, 0]), (4, [3, 0]), (9, [-1, 0])])
@pytest.mark.parametrize("sinks", [None, 6])
def test_on_cuda_it_is_torchs_varlen_attention(sinks, window, expected):
    """Shapes and arguments alone, of tensors without data: what it computes is proved where a run begins."""
    import torch.nn.attention.varlen

    with Varlen() as varlen:
        q = torch.empty(1, 6, 12, 24, dtype=torch.bfloat16, device="meta", requires_grad=True)
        k = torch.empty(1, 2, 12, 24, dtype=torch.bfloat16, device="meta", requires_grad=True)
        v = torch.empty(1, 2, 12, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        bounds = torch.empty(3, dtype=torch.int32, device="meta")
        s_aux = sinks and torch.empty(sinks, device="meta", requires_grad=True)
        how = {
            "is_causal": True,
            "s_aux": s_aux,
            "cu_seq_lens_q": bounds,
            "max_length_q": 9,
            "sliding_window": window,
            "scaling": 0.2,
        }
        out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, **how)
        out.sum().backward()
        assert out.shape == (1, 12, 6, 16)
        assert (q.grad.shape, k.grad.shape, v.grad.shape) == (q.shape, k.shape, v.shape)
    (call,) = varlen.calls
    assert call["query"].shape == (12, 6, 24)
    assert call["key"].shape == call["value"].shape == (12, 2, 24)
    assert call["cu_seq_q"] is call["cu_seq_k"] is bounds
    assert (call["max_q"], call["max_k"], call["scale"]) == (9, 9, 0.2)
    assert call["window_size"] == expected
    assert call["is_causal"] == (expected == [-1, 0])


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss"])
def test_rows_with_a_mask_have_what_sdpa_gives(model_type):
    """Such rows come where a model answers prompts in the middle of a run."""
    packed, plain = small_model(model_type, VARLEN), small_model(model_type, PLAIN.get(model_type, "sdpa"))
    ids = torch.arange(40).view(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    found = packed(ids, attention_mask=mask, use_cache=False).logits
    wanted = plain(ids, attention_mask=mask, use_cache=False).logits
    assert torch.allclose(found[mask.bool()], wanted[mask.bool()], atol=1e-5)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(packed.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.parametrize("mask", [None, "ones"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_a_prompt_is_answered_as_by_sdpa(model_type, mask):
    """transformers drops a mask of ones. The prompt and what follows are longer than a window."""
    packed, plain = small_model(model_type, VARLEN), small_model(model_type, PLAIN.get(model_type, "sdpa"))
    ids = torch.arange(20)[None]
    given = {"attention_mask": torch.ones_like(ids)} if mask else {}
    options = {**given, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "output_logits": True}
    found, wanted = (model.generate(ids, return_dict_in_generate=True, **options) for model in (packed, plain))
    assert torch.equal(found.sequences, wanted.sequences)
    assert torch.allclose(torch.stack(found.logits), torch.stack(wanted.logits), atol=1e-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"softcap": 50.0}, "does not support softcap, which Identity uses"),
        ({"softcap": 50.0, "dropout": 0.1}, "does not support softcap or dropout"),
        ({"is_causal": False}, "does not support non-causal attention"),
        ({"cu_seq_lens_q": None, "sliding_window": 2}, "supports one row with document boundaries"),
    ],
)
def test_what_it_is_not_it_says(given, said):
    q = torch.zeros(1, 2, 4, 8)
    bounds = {"cu_seq_lens_q": torch.tensor([0, 4]), "max_length_q": 4, "is_causal": True}
    with pytest.raises(ValueError, match=said):
        packed_attention(torch.nn.Identity(), q, q, q, None, **(bounds | given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3", "qwen2_moe", "flint"])
def test_a_run_proves_it_before_the_first_step(model_type, dtype):
    # Flint makes a mask for windows, and its first two layers have none.
    changes = {"sliding_window": 8} if model_type == "flint" else {}
    trainer = trainer_of(small_model(model_type, VARLEN, **changes).to(dtype))
    before = torch.get_rng_state()
    said = prove_attention(trainer, vocabulary=256, flash="FA2")
    assert said.startswith("tunekit_varlen by sdpa per document: outputs and gradients correct to ")
    assert torch.equal(before, torch.get_rng_state())


def test_an_attention_that_is_wrong_is_not_trained_with(monkeypatch):
    right = attention.sdpa_by_document
    monkeypatch.setattr(
        attention,
        "sdpa_by_document",
        lambda q, k, v, bounds, *rest, **how: right(q, k, v, bounds[[0, -1]], *rest, **how),
    )
    with pytest.raises(RunError, match=r"is off by .* set model\.attn_implementation=sdpa"):
        prove_attention(trainer_of(small_model("llama", VARLEN)), vocabulary=256, flash="FA2")


def test_layers_that_forget_their_window_are_not_trained(monkeypatch):
    from transformers.models.mistral.modeling_mistral import MistralAttention

    original = MistralAttention.forward

    def forgetful(self, *args, **given):
        config, self.config = self.config, type(self.config)(**{**self.config.to_dict(), "sliding_window": None})
        self.config._attn_implementation = VARLEN
        try:
            return original(self, *args, **given)
        finally:
            self.config = config

    model = small_model("mistral", VARLEN, sliding_window=8)
    monkeypatch.setattr(MistralAttention, "forward", forgetful)
    with pytest.raises(RunError, match=r"layers use attention windows \{None\}, but masks \{8\}"):
        prove_attention(trainer_of(model), vocabulary=256, flash="FA2")
