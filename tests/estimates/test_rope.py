"""Positions and parameters of scaled rotary embeddings, and what is refused of them."""

import pytest

from tests.estimates.shapes import H100, LAPTOP
from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.estimates.models.rope import Rope, faults, rope_of, scaled, section_of
from tunekit.planner.resolve import resolve
from tunekit.probe.model import known_model
from tunekit.recipe.sections.model import RopeScaling

PLAIN = Rope({"rope_type": "default", "rope_theta": 1e4}, 4096)
LLAMA_31 = Rope(
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    131072,
)
GEMMA_3 = Rope({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, 131072)
PHI_3 = Rope(
    {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 4096}, 131072
)


@pytest.mark.parametrize(
    ("own", "section", "positions", "parameters"),
    [
        (
            PLAIN,
            {"factor": 2},
            8192,
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 4096},
        ),
        (PLAIN, {"rope_type": "linear", "factor": 3}, 12288, {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
        (LLAMA_31, {"factor": 16}, 262144, {**LLAMA_31.parameters, "factor": 16.0}),
        (GEMMA_3, {"factor": 16}, 262144, {"rope_type": "linear", "rope_theta": 1e6, "factor": 16.0}),
        (
            LLAMA_31,
            {"rope_type": "yarn", "factor": 32, "beta_fast": 16},
            262144,
            {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 32.0,
                "beta_fast": 16.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (
            PLAIN,
            {"factor": 4, "original_max_position_embeddings": 2048},
            8192,
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048},
        ),
    ],
)
def test_a_factor_multiplies_the_positions_before_any_scaling(own, section, positions, parameters):
    new = scaled(own, RopeScaling(**section))
    assert new.positions == positions
    assert dict(new.parameters) == parameters


@pytest.mark.parametrize(
    ("own", "section", "kind", "field", "words"),
    [
        (
            PLAIN,
            {"rope_type": "linear", "factor": 2, "beta_fast": 32},
            "llama",
            "beta_fast",
            "not a parameter of linear",
        ),
        (
            PLAIN,
            {"rope_type": "llama3", "factor": 2},
            "llama",
            "rope_type",
            "needs low_freq_factor and high_freq_factor",
        ),
        (PLAIN, {"factor": 2}, "phi3", "rope_type", "yarn is unsupported by the code of phi3"),
        (PHI_3, {"factor": 64}, "phi3", "rope_type", "needs short_factor and long_factor: the model's factors are for"),
        (LLAMA_31, {"factor": 2}, "llama", "factor", "2 would shorten the context: the model's factor is 8"),
        (Rope({"rope_type": "proportional"}, 8), {"rope_type": "yarn", "factor": 2}, "gemma4", "rope_type", "does not"),
    ],
)
def test_what_a_model_cannot_have_is_named(own, section, kind, field, words):
    ((name, what, _), *_) = faults(own, RopeScaling(**section), kind)
    assert (name, words in what) == (field, True), what


def test_a_config_of_an_older_transformers_is_understood():
    old = {"rope_theta": 1e4, "rope_scaling": {"type": "longrope", "long_factor": [2.0], "short_factor": [1.0]}}
    rope = Rope(rope_of({**old, "original_max_position_embeddings": 4096}), 131072)
    assert (rope.kind, rope.original, rope.own_factor) == ("longrope", 4096, 32)


@pytest.mark.parametrize("own", [LLAMA_31, GEMMA_3, scaled(PLAIN, RopeScaling(factor=3))])
def test_a_config_says_the_scaling_that_it_has(own):
    section = section_of({"rope_parameters": own.parameters, "max_position_embeddings": own.positions})
    assert scaled(own, section).parameters == own.parameters


def test_a_plan_with_scaling_says_how_many_positions_there_are():
    wanted = recipe(model={"path": "m", "rope_scaling": {"factor": 64.0}}, data={"max_length": 200_000})
    plan = resolve(wanted, H100, known_model("meta-llama/Llama-3.2-1B"), ROWS)
    (reason,) = (reason for reason in plan.reasons if reason.topic == "context")
    assert reason.choice == "262,144 positions instead of 131,072"
    assert "llama3, factor 64, instead of the model's llama3, factor 32" in reason.why


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("meta-llama/Llama-3.2-1B", "set it to 131072 or less, or set model.rope_scaling.factor=49"),
        ("google/gemma-3-4b-it", "set it to 131072 or less, or set model.rope_scaling.factor=13"),
        ("Qwen/Qwen3-8B", "set it to 40960 or less, or set model.rope_scaling.factor=5"),
    ],
)
def test_too_long_rows_are_refused_with_the_factor_that_takes_them(name, hint):
    with pytest.raises(PlanError) as error:
        resolve(recipe(data={"max_length": 200_000}), LAPTOP, known_model(name), ROWS)
    assert error.value.hint == hint


def test_a_model_without_rotary_embeddings_cannot_have_them_scaled():
    learned = known_model("meta-llama/Llama-3.2-1B").model_copy(update={"rope": None, "path": "gpt2"})
    words = "gpt2 has no rotary embeddings in its full-attention layers; unset it"
    with pytest.raises(PlanError, match=rf"model\.rope_scaling: {words}"):
        resolve(recipe(model={"path": "m", "rope_scaling": {"factor": 2.0}}), LAPTOP, learned, ROWS)


def test_a_teacher_is_not_changed():
    method = {"type": "distillation", "teacher": {"path": "t", "rope_scaling": {"factor": 2.0}}}
    with pytest.raises(PlanError, match=r"method\.teacher\.rope_scaling: only the trained model"):
        resolve(recipe(method=method), LAPTOP, known_model("Qwen/Qwen3-8B"), ROWS)


def test_longrope_has_a_factor_for_each_frequency():
    scaling = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 64, "long_factor": [2.0]}
    with pytest.raises(PlanError, match=r"model\.rope_scaling\.long_factor: 1 numbers, but .* has 64 frequencies"):
        resolve(recipe(model={"path": "m", "rope_scaling": scaling}), LAPTOP, known_model("Qwen/Qwen3-8B"), ROWS)


def test_longrope_is_not_divided_over_devices_by_its_rows():
    lists = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    scaling = {"rope_type": "longrope", "factor": 2.0, **lists}
    wanted = recipe(model={"path": "m", "rope_scaling": scaling}, parallel={"cp_size": 2}, data={"padding_free": False})
    two = H100.model_copy(update={"accelerators": H100.accelerators * 2})
    with pytest.raises(PlanError, match="longrope rotary embeddings depend on the row length"):
        resolve(wanted, two, known_model("Qwen/Qwen3-8B"), ROWS)
