"""How a run is closed, whatever happens meanwhile."""

from __future__ import annotations

from dataclasses import fields
from unittest.mock import MagicMock

import pytest

from flame.metrics.sending import Sent
from flame.training.run import Run, UnwrittenRow


def make_run(**attributes) -> Run:
    run = object.__new__(Run)
    vars(run).update({each.name: MagicMock() for each in fields(Run)} | {"_unwritten": None} | attributes)
    run.data.dead_workers.return_value = ""
    return run


def test_a_run_whose_last_row_cannot_be_made_is_closed_all_the_same():
    unwritten = UnwrittenRow(3, MagicMock(sent=Sent(MagicMock())), {})
    run = make_run(_unwritten=unwritten)
    run.meter.row.side_effect = RuntimeError("CUDA error: an illegal memory access was encountered")
    error = ValueError("what ended the run")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run.__exit__(ValueError, error, None)
    for part in (run.saves.close, run.data.close, run.metrics.close, run.lock.release):
        part.assert_called_once()


def test_a_row_that_the_device_never_comes_to_is_named(caplog):
    sent = Sent(MagicMock(), MagicMock(query=MagicMock(side_effect=RuntimeError("CUDA error"))))
    run = make_run(_unwritten=UnwrittenRow(3, MagicMock(sent=sent), {}))
    run.__exit__(ValueError, ValueError("what ended the run"), None)
    assert "step 3 is not in the metrics" in caplog.text
    run.metrics.log.assert_not_called()
    run.metrics.close.assert_called_once()
