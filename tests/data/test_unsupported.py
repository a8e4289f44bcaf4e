"""What the schema has and reading rows does not do yet is refused, not passed over."""

import pytest

from tunekit.data.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.schema import DataSection


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"train": "a.jsonl", "streaming": True}, "data.streaming: is not supported yet"),
        (
            {"train": ["a.jsonl", "b.jsonl"]},
            "data.train[0]: several sources (interleave, first_exhausted) are not supported yet",
        ),
        (
            {"train": [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "weight": 1}], "weight_by": "tokens"},
            "data.train[0]: several sources (interleave, first_exhausted, weight 3 by tokens) are not supported yet",
        ),
        (
            {"train": {"path": "a.jsonl", "loss_on": "last"}},
            "data.train: format, columns and loss_on of its own are not supported yet",
        ),
    ],
)
def test_what_is_not_supported_yet_is_refused(section, message):
    with pytest.raises(DataError) as error:
        load_data(DataSection(**section))
    assert str(error.value) == message
