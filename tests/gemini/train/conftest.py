"""A model and rows that a run is given, and where it may write."""

import pytest

import nvme
from tests.support.model_folder import make_folder, rows, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and rows of every kind."""
    made = tmp_path_factory.mktemp("given")
    for kind in ("text", "prompt", "chat"):
        write_rows(made / f"{kind}.jsonl", rows(kind))
    make_folder(made / "model")
    return made


@pytest.fixture
def cached_here(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def on_disk(tmp_path):
    """Skips where the temporary folder is in RAM."""
    try:
        nvme.check_folder(tmp_path)
    except nvme.FolderError as error:
        pytest.skip(str(error))
