"""What ships: job files that are right, and a wheel that works away from the checkout."""

import os
import subprocess
import sys
import zipfile

import pytest

from flame.cli.parse import parse_args
from flame.paths import PACKAGE_ROOT

ROOT = PACKAGE_ROOT.parent
SHIPPED_JOBS = ["flame/models/fla.toml", *sorted(f"configs/{path.name}" for path in (ROOT / "configs").glob("*.toml"))]


@pytest.mark.parametrize("job_file", SHIPPED_JOBS)
def test_shipped_job_files_are_right_from_any_folder(job_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_args(["--job.config_file", job_file]).training.steps > 0


def test_wheel_works_away_from_the_checkout(tmp_path):
    pytest.importorskip("hatchling")
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", build, str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    installed = tmp_path / "site-packages"
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as wheel:
        wheel.extractall(installed)
    for job_file in SHIPPED_JOBS:
        done = subprocess.run(
            [sys.executable, "-m", "flame.cli", "--check", "--job.config_file", job_file],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert (installed / "flame" / "shipped" / "configs" / "tokenizer" / "tokenizer.json").exists()
    code = "from flame.custom_sources import find_custom; print(find_custom('sba').path)"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(installed / "custom_models" / "sba")
    assert list(installed.glob("*.dist-info/licenses/LICENSE"))
