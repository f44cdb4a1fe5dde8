import logging

import pytest

from flame.errors import UserError
from flame.metrics.wandb import ID_FILE, WandbWriter, run_id

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name in ("WANDB_RUN_ID", "WANDB_API_KEY", "WANDB_NAME", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_wandb_resume_keeps_the_run_id(tmp_path):
    ids = []
    for steps in (range(1, 4), range(4, 6)):
        writer = WandbWriter(tmp_path, {"job": {"description": "x"}})
        ids.append(writer.id)
        for step in steps:
            writer.write(step, {"train/loss": 1 / step})
        writer.close()
    assert ids[0] == ids[1] == (tmp_path / ID_FILE).read_text().strip()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))) == 2


def test_run_id_of_the_environment_goes_first(tmp_path, monkeypatch):
    known = run_id(tmp_path)
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert run_id(tmp_path) == "mine"
    assert run_id(tmp_path, rank=2) == "mine-rank2"
    monkeypatch.delenv("WANDB_RUN_ID")
    assert run_id(tmp_path) == known


def test_ranks_have_runs_of_their_own(tmp_path):
    ids = [run_id(tmp_path, rank) for rank in range(3)]
    assert len(set(ids)) == 3
    assert ids == [run_id(tmp_path, rank) for rank in range(3)]


def test_start_that_fails_says_what_to_do(tmp_path, monkeypatch):
    def fail(**options):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError, match=r"No API key configured.*WANDB_MODE=offline"):
        WandbWriter(tmp_path, {})


def test_steps_that_wandb_holds_are_not_sent_again(tmp_path, monkeypatch, caplog):
    sent = []

    class OnlineRun:
        id, starting_step = "abc", 8

        def log(self, scalars, step):
            sent.append(step)

    monkeypatch.setattr(wandb, "init", lambda **options: OnlineRun())
    with caplog.at_level(logging.INFO, logger="flame"):
        writer = WandbWriter(tmp_path, {}, last_step=5)
        for step in range(6, 11):
            writer.write(step, {"train/loss": 1.0})
    assert sent == [8, 9, 10]
    assert "holds steps up to 7" in caplog.text


def test_failure_in_the_run_is_reported_once_and_training_goes_on(tmp_path, monkeypatch, caplog):
    writer = WandbWriter(tmp_path, {})

    def fail(*args, **options):
        raise BrokenPipeError("service is gone")

    monkeypatch.setattr(writer._run, "log", fail)
    with caplog.at_level(logging.WARNING, logger="flame"):
        writer.write(7, {"train/loss": 1.0})
        writer.write(8, {"train/loss": 1.0})
    writer.close()
    assert caplog.text.count("service is gone") == 1
    assert "step 7" in caplog.text
