"""Pickles that leave a sentinel when they are opened, as every file that could be one."""

import io
import pickle
import zipfile
from pathlib import Path


class Opened:
    """What writes the sentinel when a pickle of it is opened."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self):
        return exec, (f"open({str(self.sentinel)!r}, 'w').close()",)


def bare(sentinel: Path) -> bytes:
    """A bare pickle, as those of torch before 1.6, and of everything else."""
    return pickle.dumps(Opened(sentinel))


def zipped(sentinel: Path) -> bytes:
    """A file as `torch.save` writes it."""
    import torch

    stream = io.BytesIO()
    torch.save({"state": Opened(sentinel)}, stream)
    return stream.getvalue()


def checked(sentinel: Path) -> None:
    """See that both kinds do what they are for."""
    import torch

    pickle.loads(bare(sentinel))
    assert sentinel.exists()
    sentinel.unlink()
    assert zipfile.is_zipfile(io.BytesIO(zipped(sentinel)))
    torch.load(io.BytesIO(zipped(sentinel)), weights_only=False)
    assert sentinel.exists()
    sentinel.unlink()
