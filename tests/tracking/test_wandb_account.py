"""Whether a login of Weights & Biases stands in one of the files in which it may."""

import pytest

from tunekit.tracking.wandb_account import is_in_netrc

LOGIN = "machine api.wandb.ai\n  login user\n  password 0123456789\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({".netrc": LOGIN}, True),
        ({".netrc": "machine example.org login me password x\n", "_netrc": LOGIN}, True),
        ({".netrc": "machine\n", "_netrc": LOGIN}, True),
        ({"_netrc": "machine example.org login me password x\n"}, False),
    ],
)
def test_each_file_is_read_until_one_names_the_server(files, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o600)
    assert is_in_netrc("https://api.wandb.ai") is expected
