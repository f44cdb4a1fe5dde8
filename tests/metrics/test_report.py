import json
import subprocess
import sys

import pytest

from flame.errors import UserError
from flame.metrics.report import final_loss, load_metrics, main, write_report


def write_run(folder, losses, **extra):
    folder.mkdir()
    with open(folder / "metrics.jsonl", "w") as file:
        for step, loss in enumerate(losses, start=1):
            row = {"step": step, "loss": loss, "tokens": step * 1024, "tps": 4000.0, "step_time_s": 0.5, "mfu": None}
            file.write(json.dumps(row | extra) + "\n")
    return folder


def test_report_writes_the_picture_and_says_the_numbers(tmp_path):
    run = write_run(tmp_path / "demo", [8.0] * 100 + [4.5] * 20, memory_gib=1.5)
    text = write_report([run])
    assert "demo: 120 steps, 122.9K tokens, final loss 4.500, 1m 00s of training" in text
    assert "8.0000 -> 4.5000 (mean of the last 20 steps)" in text
    assert "4,000 tokens/s" in text and "1.50 GiB" in text and "mfu" not in text
    assert "4.500" in (run / "loss.svg").read_text()


def test_several_runs_share_a_picture(tmp_path):
    runs = [write_run(tmp_path / name, [5.0, 4.0]) for name in ("gla", "transformer")]
    output = tmp_path / "pictures" / "both.svg"
    assert main([*map(str, runs), "--output", str(output), "--x", "tokens"]) == 0
    assert {"gla", "transformer", "tokens"} <= set(output.read_text().replace(">", "<").split("<"))
    assert not (runs[0] / "loss.svg").exists()
    write_report(runs)
    assert (runs[0] / "comparison.svg").exists() and not (runs[0] / "loss.svg").exists()


def test_validation_losses_are_a_line_of_their_own(tmp_path):
    run = write_run(tmp_path / "run", [5.0, 4.0])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "val_loss": 4.25, "val_ppl": 70.1}\n')
    assert "4.2500 -> 4.2500" in write_report([run])
    assert ">validation<" in (run / "loss.svg").read_text()


def test_steps_without_a_finite_loss_are_left_out(tmp_path):
    metrics = load_metrics(write_run(tmp_path / "run", [5.0, None, 3.0]))
    assert metrics.values("loss") == [5.0, 3.0]
    assert final_loss(metrics) == 4.0


def test_time_counts_every_step_of_an_interval(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"step": 10, "loss": 1.0, "step_time_s": 2.0}, {"step": 20, "loss": 1.0, "step_time_s": 1.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_metrics(run).total("step_time_s") == 30.0


def test_run_without_metrics_is_a_user_error(tmp_path, capsys):
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        write_report([tmp_path])
    assert main([str(tmp_path)]) == 2
    assert "dump_folder" in capsys.readouterr().err
    with pytest.raises(UserError, match="no step"):
        write_report([write_run(tmp_path / "run", [None])])


def test_what_cannot_be_read_or_written_is_named(tmp_path, capsys):
    run = write_run(tmp_path / "run", [5.0, 4.0])
    assert main([str(run), "--output", str(tmp_path)]) == 2
    assert f"{tmp_path}: the loss curve cannot be written there" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("{\n" + (run / "metrics.jsonl").read_text())
    assert main([str(run)]) == 2
    assert "metrics.jsonl: line 1 is not a JSON object" in capsys.readouterr().err


def test_report_needs_no_torch():
    code = "import sys, flame.metrics.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
