"""Fixtures of the commands' tests."""

import datasets
import pytest


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    """Keep converted files out of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
