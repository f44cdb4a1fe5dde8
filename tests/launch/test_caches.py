"""Where compiled kernels and tuning results go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flame.errors import UserError
from flame.launch.caches import KEEP_RESULTS, inductor_cache, set_up_caches, triton_cache


def test_a_folder_holds_what_each_library_keeps(tmp_path):
    environ = {}
    assert set_up_caches(str(tmp_path / "cache"), environ) == []
    assert environ == KEEP_RESULTS | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache" / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache" / "inductor"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path / "cache" / "flash_attention_4"),
    }
    assert set_up_caches(str(tmp_path / "cache"), environ) == []  # the ranks do again what the launcher did


def test_a_relative_folder_is_one_of_the_folder_that_the_run_starts_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ = {}
    set_up_caches("cache", environ)
    assert environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")


def test_without_a_folder_results_are_kept_where_the_libraries_keep_theirs():
    environ = {}
    assert set_up_caches("", environ) == []
    assert environ == KEEP_RESULTS


def test_variables_of_the_user_stay_and_are_named(tmp_path):
    environ = {"TRITON_CACHE_DIR": "/mine", "FLA_CACHE_RESULTS": "0"}
    notes = set_up_caches(str(tmp_path), environ)
    assert notes == [f"TRITON_CACHE_DIR = /mine from the environment goes before job.cache_dir = {tmp_path}"]
    assert (environ["TRITON_CACHE_DIR"], environ["FLA_CACHE_RESULTS"]) == ("/mine", "0")
    assert environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "triton").write_text("a file where a folder should be")
    with pytest.raises(UserError) as caught:
        set_up_caches(str(tmp_path), {})
    assert str(caught.value) == (
        f"job.cache_dir = {tmp_path}: cannot be written to: File exists ({tmp_path / 'triton'}); give another folder, "
        "or leave it out for the libraries' own"
    )


@pytest.mark.parametrize("variables", [{}, {"TRITON_HOME": "/there"}, {"TRITON_CACHE_DIR": "/kernels"}])
def test_triton_keeps_its_kernels_where_flame_looks_for_them(variables):
    pytest.importorskip("triton")
    code = "from triton import knobs; print(knobs.cache.dir)"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")} | variables
    done = subprocess.run([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    assert Path(done.stdout.strip()) == triton_cache(environ)


@pytest.mark.parametrize("variables", [{}, {"TORCHINDUCTOR_CACHE_DIR": "/graphs"}, {"USER": r"do:main\me"}])
def test_torch_keeps_its_graphs_where_flame_looks_for_them(variables, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(inductor_cache(os.environ)) == variables.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    if "TORCHINDUCTOR_CACHE_DIR" in variables:
        monkeypatch.setattr(os, "makedirs", lambda *_, **__: None)
        assert cache_dir() == "/graphs"


def test_the_libraries_read_it(tmp_path):
    pytest.importorskip("triton")
    code = (
        "import json, os, sys; from flame.launch.caches import set_up_caches; set_up_caches(sys.argv[1], os.environ);"
        "from triton import knobs; from torch._inductor.runtime.cache_dir_utils import cache_dir;"
        "from fla.utils import FLA_CACHE_RESULTS;"
        "print(json.dumps([knobs.cache.dir, knobs.autotuning.cache, cache_dir(), FLA_CACHE_RESULTS]))"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "TORCHIND", "FLA"))}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], env=environ, stdout=subprocess.PIPE, text=True, check=True
    )
    triton, keeps, inductor, fla_keeps = json.loads(done.stdout.splitlines()[-1])
    assert (Path(triton), Path(inductor)) == (tmp_path / "triton", tmp_path / "inductor")
    assert keeps and fla_keeps
