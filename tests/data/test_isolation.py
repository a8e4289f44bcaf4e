"""Documents packed into one sequence do not see each other, as the trainer's own batches go through a real model."""

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import save_tiny_model
from tunekit.data.packing.sequences import Batch, Mixing, Sequences, SequenceWriter
from tunekit.data.prepare import SourceTokens, prepare_rows
from tunekit.data.tokenization.tokenize import TokenReport


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


def documents_of(lengths):
    """One document per length; every token of the whole is different where the vocabulary allows it."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [[(start + k) % 250 for k in range(length)] for start, length in zip(starts, lengths, strict=True)]


def packed(lengths, max_length):
    """The documents as a trainer reads them, packed."""
    documents = documents_of(lengths)
    ids = np.array([token for document in documents for token in document], dtype=np.int32)
    counted = np.array([k > 0 for document in documents for k in range(len(document))])
    with tempfile.TemporaryDirectory() as folder:
        with SequenceWriter(Path(folder)) as writer:
            sizes = np.array(lengths, dtype=np.int32)
            writer.add(Batch(ids, counted, sizes), sizes, np.arange(len(sizes), dtype=np.int32))
        report = TokenReport(*[0] * 8, notes=())
        tokens = SourceTokens("documents", Sequences(Path(folder)), report, key=str(lengths))
    return prepare_rows([tokens], Mixing(), max_length=max_length, packing=True).dataset()


def packed_batch(lengths, max_length):
    """What the trainer's collator makes of packed documents."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return collator(list(packed(lengths, max_length)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_document_of_a_pack_depends_on_another(attention, folder):
    """The Jacobian of one document's logits in the embeddings of every other one is zero, exactly."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    batch = packed_batch([7, 5, 9], 21)
    assert batch["input_ids"].shape == (1, 21)
    assert "attention_mask" not in batch
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), 21]
    assert len(starts) == 4
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    inputs = {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
    logits = model(inputs_embeds=embedded, use_cache=False, **inputs).logits
    for start, end in pairwise(starts):
        (gradient,) = torch.autograd.grad(logits[0, start:end].square().sum(), embedded, retain_graph=True)
        inside = torch.zeros(21, dtype=torch.bool)
        inside[start:end] = True
        assert gradient[0, ~inside].abs().max() == 0
        assert gradient[0, inside].abs().min() >= 0
        assert gradient[0, inside].abs().max() > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_document_has_the_logits_that_it_has_alone(attention, folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    batch = packed_batch([11, 3, 8, 6], 28)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        together = model(**inputs, use_cache=False).logits[0]
        starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), 28]
        for start, end in pairwise(starts):
            alone = model(batch["input_ids"][:, start:end], use_cache=False).logits[0]
            assert torch.allclose(together[start:end], alone, atol=1e-5)


def test_packed_documents_would_see_each_other_without_their_positions(folder):
    """The check above can fail: this is the mistake that it is there for."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    ids = packed_batch([7, 5, 9], 21)["input_ids"]
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    (gradient,) = torch.autograd.grad(logits[0, 9:12].square().sum(), embedded)
    assert gradient[0, :5].abs().max() > 0


@given(
    lengths=st.lists(st.integers(min_value=2, max_value=40), min_size=1, max_size=60),
    max_length=st.integers(min_value=40, max_value=100),
)
@settings(max_examples=60)
def test_packing_loses_and_doubles_nothing(lengths, max_length):
    packs = packed(lengths, max_length)
    found = []
    for pack in packs:
        assert len(pack["input_ids"]) == len(pack["labels"]) == sum(pack["seq_lengths"]) <= max_length
        start = 0
        for length in pack["seq_lengths"]:
            part = slice(start, start + length)
            found.append((pack["input_ids"][part], pack["labels"][part]))
            start += length
    assert sorted(found) == sorted((document, [-100, *document[1:]]) for document in documents_of(lengths))
    # Best fit opens a pack only for what fits nowhere else, so no two of them could be one.
    fullness = sorted(len(pack["input_ids"]) for pack in packs)
    assert len(fullness) == 1 or fullness[0] + fullness[1] > max_length
