"""Distillation from a teacher with another tokenizer: its loss by TRL's, and the rows that both models read."""

import itertools
import json

import pytest
import torch

import tunekit
from tests.tiny import make_tokenizer, save_jsonl, save_tiny_model
from tests.training.watching import assert_resumed_alike, logged
from tests.two_tokenizers import make_other_tokenizer, save_other_model
from tunekit.api import verbs
from tunekit.errors import DataError, ModelError, RecipeError

RECIPE = """
model: model
data: {train: rows.jsonl, eval: rows.jsonl, max_length: 128}
method: {type: gold, teacher: teacher, max_completion_length: 12}
adapter: full
train: {max_steps: 10, global_batch_size: 8, learning_rate: 1e-2, save_steps: 4, eval_steps: 10}
output: {sample_prompts: []}
"""
TURNS = [
    [
        ("user", f"double {n}"),
        ("assistant", f"it is twice as much: {2 * n} 答案是"),
        ("user", "sure? 🤔"),
        ("assistant", "yes 🙂 " * (n % 3 + 1) + "é."),
    ]
    for n in range(22)
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gold")
    save_tiny_model(folder / "model")
    save_other_model(folder / "teacher")
    save_jsonl(folder / "rows.jsonl", [chat(*row) for row in TURNS])
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapter", ["lora", "full", "qlora"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_the_distance_from_a_teacher_falls(recipe, adapter, hybrid):
    run = tunekit.train(recipe, [f"adapter={adapter}", f"method.uld_use_hybrid_loss={hybrid}", "train.max_steps=16"])
    first, last = (event["eval_loss"] for event in logged(run, "eval")[::2])
    assert last < 0.97 * first
    assert {step["on_policy"] for step in logged(run)} == {0.0, 1.0}, "some steps on rows and some on completions"


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_with_the_same_completions(recipe):
    assert_resumed_alike(recipe, ("loss", "grad_norm", "on_policy"), after=9)


def plain(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def answers_of(batch, index):
    """The tokens of each answer of a row and the place of the first, for both models; end tokens left out."""
    for prefix, tokenizer in (("", make_tokenizer()), ("teacher_", make_other_tokenizer())):
        ids, labels = batch[f"{prefix}input_ids"][index].tolist(), batch[f"{prefix}labels"][index].tolist()
        answers, place = [], 0
        while place < len(ids):
            start = place
            while place < len(ids) and labels[place] != -100:
                place += 1
            tokens = ids[start:place]
            ends = [at for at, token in enumerate(tokens) if token in tokenizer.all_special_ids]
            if tokens:
                answers.append((start, tokens[: ends[0]] if ends else tokens))
            place += 1
        yield answers


def spelled(tokenizer, tokens):
    """The bytes of tokens, by the alphabet of transformers."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return [bytes(byte_of[letter] for letter in token) for token in tokenizer.convert_ids_to_tokens(tokens)]


def offsets(tokenizer, tokens):
    ends = [0]
    for token in spelled(tokenizer, tokens):
        ends.append(ends[-1] + len(token))
    return list(itertools.pairwise(ends))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("lmbda", "temperature", "hybrid"),
    [
        (0, 1.0, {}),
        (1, 0.7, {}),
        (0, 1.0, {"uld_use_hybrid_loss": True}),
        (1, 1.3, {"uld_use_hybrid_loss": True, "beta": 0.3}),
        (0, 1.0, {"uld_use_hybrid_loss": True, "uld_hybrid_matched_weight": 0.25, "uld_hybrid_unmatched_weight": 2.0}),
    ],
)
def test_loss_and_gradients_are_those_of_trls_loss_on_plain_logits_in_float64(batches_of, lmbda, temperature, hybrid):
    from trl.experimental.gold.gold_trainer import ULDLoss

    method = {"type": "gold", "teacher": "teacher", "lmbda": lmbda, "temperature": temperature, **hybrid}
    batches = batches_of(f"method={json.dumps(method)}")
    tokenizers = make_tokenizer(), make_other_tokenizer()
    measure = ULDLoss(uld_config(temperature, hybrid), *tokenizers)
    model, teacher = plain("model"), plain("teacher")
    assert len(batches) == 2
    for weights, inputs, loss, grads in batches:
        model.load_state_dict(weights, strict=False)
        model.zero_grad()
        own = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        with torch.no_grad():
            mask = inputs["teacher_attention_mask"]
            its = teacher(input_ids=inputs["teacher_input_ids"], attention_mask=mask).logits
        summed, num_pieces = 0, 0
        for index in range(len(own)):
            # TRL takes the trained tokens of a row for one run, so each answer is a row to it.
            for (start, tokens), (its_start, its_tokens) in zip(*answers_of(inputs, index), strict=True):
                own_ends, its_ends = (
                    offsets(tokenizer, ids) for tokenizer, ids in zip(tokenizers, (tokens, its_tokens), strict=True)
                )
                cuts = {end for _, end in own_ends} & {end for _, end in its_ends}
                if not cuts:
                    continue
                # What is behind the last common end TRL merges into a pair of unequal texts.
                tokens, its_tokens = (
                    ids[: [end for _, end in ends].index(max(cuts)) + 1]
                    for ids, ends in ((tokens, own_ends), (its_tokens, its_ends))
                )
                each = measure(
                    own[index][None],
                    its[index][None],
                    *(
                        labelled(inputs[name][index], at, ids)
                        for name, at, ids in (
                            ("input_ids", start, tokens),
                            ("teacher_input_ids", its_start, its_tokens),
                        )
                    ),
                    inputs["input_ids"][index][None],
                    inputs["teacher_input_ids"][index][None],
                    *(
                        placed(inputs[name][index], at, ends[: len(ids)])
                        for name, at, ends, ids in (
                            ("input_ids", start, own_ends, tokens),
                            ("teacher_input_ids", its_start, its_ends, its_tokens),
                        )
                    ),
                )
                summed = summed + each * len(cuts)
                num_pieces += len(cuts)
        expected = summed / num_pieces
        expected.backward()
        assert num_pieces > 8
        assert loss == pytest.approx(expected.item(), rel=1e-5, abs=2e-6)
        for name, parameter in model.named_parameters():
            assert (grads[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-6, name


def uld_config(temperature, hybrid):
    from trl.experimental.gold import GOLDConfig

    return GOLDConfig(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        use_uld_loss=True,
        uld_token_merge_strategy="bayesian",
        uld_student_temperature=temperature,
        uld_teacher_temperature=temperature,
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        **hybrid,
    )


def labelled(ids, start, tokens):
    labels = torch.full_like(ids, -100)
    labels[start : start + len(tokens)] = torch.tensor(tokens)
    return labels[None]


def placed(ids, start, ends):
    placed_offsets = torch.zeros(len(ids), 2, dtype=torch.long)
    placed_offsets[start : start + len(ends)] = torch.tensor(ends)
    return placed_offsets[None]


def test_a_divergence_of_measures_is_least_where_they_are_equal():
    """A Kullback-Leibler divergence of parts of two distributions, without the difference of the parts, is not."""
    from tunekit.methods.logit_distance import Hybrid

    its = torch.tensor([[0.2, 0.1, 0.7]], dtype=torch.float64)
    ids = torch.arange(2)
    for beta in (0.0, 0.4, 1.0):
        hybrid = Hybrid(ids, ids, beta, 1.0, 0.0)
        own = its.clone().requires_grad_()
        at_its = hybrid.distance(own, its).sum()
        (slope,) = torch.autograd.grad(at_its, own)
        assert at_its.item() == pytest.approx(0, abs=1e-12)
        assert torch.allclose(slope[:, :2], torch.zeros(1, 2, dtype=torch.float64), atol=1e-12)
        for more in (0.5, 1.5, 2.0):
            assert hybrid.distance(its * more, its).item() > 0.001


def test_negative_log_likelihoods_of_rows_are_a_sum_over_tokens_by_piece(batches_of):
    batches = batches_of("method={type: gold, teacher: teacher, lmbda: 0, kd_ratio: 1e-9}")
    model = plain("model")
    for weights, inputs, loss, _ in batches:
        model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            own = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        nats = torch.nn.functional.cross_entropy(own.flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction="sum")
        assert loss == pytest.approx(nats.item() / len(inputs["own_last"]), rel=1e-5)


def test_both_models_read_the_same_messages_by_their_own_templates(batches_of):
    tokenizers = {"": make_tokenizer(), "teacher_": make_other_tokenizer()}
    for _, inputs, _, _ in batches_of("method={type: gold, teacher: teacher, lmbda: 0}"):
        for index in range(len(inputs["input_ids"])):
            texts = {}
            for prefix, tokenizer in tokenizers.items():
                mask = inputs[f"{prefix}attention_mask"][index].bool()
                texts[prefix] = tokenizer.decode(inputs[f"{prefix}input_ids"][index][mask])
            rendered = {
                tuple(t.apply_chat_template(chat(*row)["messages"], tokenize=False) for t in tokenizers.values())
                for row in TURNS
            }
            assert tuple(texts.values()) in rendered


def test_a_completion_follows_both_prompts_as_the_same_bytes(batches_of):
    tokenizers = make_tokenizer(), make_other_tokenizer()
    prompts = {
        tuple(
            tuple(t.apply_chat_template(chat(*row[:-1])["messages"], add_generation_prompt=True)["input_ids"])
            for t in tokenizers
        )
        for row in TURNS
    }
    num_invalid = 0
    for _, inputs, _, _ in batches_of("method.lmbda=1"):
        for index in range(len(inputs["input_ids"])):
            ((start, own),), its_answers = answers_of(inputs, index)
            its_ids = inputs["teacher_input_ids"][index]
            its_start, its = its_answers[0] if its_answers else (int(inputs["teacher_attention_mask"][index].sum()), [])
            assert (tuple(inputs["input_ids"][index][:start].tolist()), tuple(its_ids[:its_start].tolist())) in prompts
            written = b"".join(spelled(tokenizers[0], own))
            assert written == b"".join(spelled(tokenizers[1], its))
            num_invalid += written != written.decode(errors="ignore").encode()
    assert num_invalid > 3, "a model that knows nothing writes bytes that are no text"


def test_rows_too_long_for_either_model_are_compared_as_far_as_both_read(recipe, batches_of):
    long = [chat(("user", "q"), ("assistant", "yes 🙂 " * 40))] * 8
    save_jsonl(recipe.with_name("long.jsonl"), long)
    method = "method={type: gold, teacher: teacher, lmbda: 0}"
    for _, inputs, _, _ in batches_of("data.train=long.jsonl", "data.max_length=60", method):
        assert inputs["input_ids"].size(1) == 60
        ((start, own),), ((_, its),) = answers_of(inputs, 0)
        written, read = (b"".join(spelled(t, x)) for t, x in ((make_tokenizer(), own), (make_other_tokenizer(), its)))
        assert written.startswith(read) and len(written) - len(read) < 5
        assert int(inputs["own_last"].max()) < inputs["input_ids"].numel() and start > 1


def test_losses_do_not_depend_on_how_a_step_is_divided(recipe):
    changes = ["method.lmbda=0", "method.max_completion_length=128", "train.max_steps=2", "train.warmup_steps=0"]
    whole, divided = (
        tunekit.train(recipe, [*changes, f"train.micro_batch_size={size}", "train.eval_steps=1"]) for size in (8, 2)
    )
    for kind, name in (("log", "loss"), ("log", "grad_norm"), ("eval", "eval_loss")):
        losses = [[event[name] for event in logged(run, kind)] for run in (whole, divided)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), name


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["data.packing=true"], r"data\.packing: unsupported with method gold: the teacher reads each conversation"),
        (["data.padding_free=true"], r"data\.padding_free: unsupported with method gold"),
        (["data.loss_on=all"], r"data\.loss_on: unsupported with method gold"),
        (["data.streaming=true", "data.eval=null"], r"data\.streaming: unsupported with method gold"),
        (["data.too_long=truncate_turns"], r"data\.too_long: cannot be truncate_turns with method gold"),
        (["method.kd_ratio=0.5"], r"method\.kd_ratio: unsupported unless method\.lmbda is 0"),
        (["method.beta=0.1"], r"method\.beta: has no effect unless method\.uld_use_hybrid_loss is set"),
        (["method.uld_hybrid_matched_weight=1"], r"uld_hybrid_matched_weight: has no effect unless"),
        (
            ["method.uld_use_hybrid_loss=true", "method.uld_hybrid_matched_weight=1"],
            r"uld_hybrid_unmatched_weight: missing, but the other weight",
        ),
        (["method.use_uld_loss=true"], r"use_uld_loss: unknown key"),
        (["adapter=prompt_tuning"], r"adapter\.type: prompt_tuning is unsupported with method gold"),
    ],
)
def test_settings_that_it_cannot_honour_are_refused(recipe, changes, problem):
    with pytest.raises(RecipeError, match=problem):
        verbs.plan(recipe, changes)


def test_a_teacher_with_the_same_tokenizer_is_one_for_gkd(recipe):
    with pytest.raises(ModelError, match=r"method\.teacher: 'model' has the tokenizer of the model") as refused:
        tunekit.data_report(recipe, ["method.teacher=model"])
    assert "use method gkd" in refused.value.hint
    with pytest.raises(ModelError, match=r"has the tokenizer of the model"):
        verbs.check(recipe, ["method.teacher=model"])


def test_a_teacher_whose_tokens_have_no_certain_bytes_is_refused(recipe):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = save_other_model(recipe.with_name("words"))
    words = Tokenizer(models.WordLevel({"yes": 0, "</s>": 1}, unk_token="yes"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(folder)
    with pytest.raises(ModelError, match=r"method\.teacher: the tokenizer of 'words' is no byte-level BPE"):
        tunekit.data_report(recipe, ["method.teacher=words"])


def test_a_row_with_another_answer_to_the_teacher_is_named(recipe):
    save_jsonl(recipe.with_name("spaces.jsonl"), [chat(*TURNS[0]), chat(("user", "q"), ("assistant", " yes "))])
    template = make_other_tokenizer().chat_template.replace(
        "message['content'] + '</s>'", "message['content'] | trim + '</s>'"
    )
    recipe.with_name("trim.jinja").write_text(template)
    changes = ["data.train=spaces.jsonl", "method.teacher={path: teacher, chat_template: trim.jinja}"]
    with pytest.raises(DataError, match=r"spaces\.jsonl:2: an answer is another text to the teacher") as refused:
        tunekit.data_report(recipe, changes)
    assert "the model reads ' yes ', the teacher 'yes'" in refused.value.problem


def test_the_report_counts_the_tokens_of_both_models(recipe):
    report = tunekit.data_report(recipe, ["data.eval=null"])
    assert any("tokens to the model" in note and "to the teacher" in note for note in report.notes)
