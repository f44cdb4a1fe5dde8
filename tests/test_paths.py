"""Where flame remembers things."""

from __future__ import annotations

import tempfile
from pathlib import Path

from flame.paths import user_cache_folder


def test_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "flame"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / ".cache" / "flame"


def test_a_user_without_a_home_folder(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert user_cache_folder() == Path(tempfile.gettempdir()) / "flame"
