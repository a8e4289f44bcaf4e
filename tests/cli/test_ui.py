"""The password of the web UI, as it is read from a file."""

import pytest

from tunekit.cli.options import secret_in
from tunekit.errors import TunekitError


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is empty"), (b" \n", "is empty"), (b"\xff", "cannot be read"), (None, "cannot be read")],
)
def test_a_file_without_a_password_is_none_that_opens_the_pages(tmp_path, content, words):
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TunekitError, match=words):
        secret_in(file, "--password-file", "password")


def test_a_password_is_what_a_file_says_without_the_end_of_its_line(tmp_path):
    file = tmp_path / "password"
    file.write_text("öpen sesame\n", encoding="utf-8")
    assert secret_in(file, "--password-file", "password") == "öpen sesame"
