import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
import torch

from flame.data import workers
from flame.data.streams import StreamReader
from tests.processes import left_of

from .corpus import make_loader, numbered_texts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def corpus(tmp_path) -> str:
    datasets.Dataset.from_dict({"text": numbered_texts([5, 40, 1, 17] * 10)}).save_to_disk(tmp_path / "corpus")
    return str(tmp_path / "corpus")


def test_workers_leave_the_random_numbers_of_the_model_alone(corpus):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    loader = make_loader(corpus, num_workers=1)
    loader.next_step()
    loader.close()
    assert torch.equal(torch.rand(3), expected)


def test_workers_ignore_termination_signals(corpus):
    loader = make_loader(corpus, num_workers=2)
    loader.next_step()
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker.pid, number)
    time.sleep(0.2)
    for _ in range(20):
        loader.next_step()
    assert all(worker.is_alive() for worker in workers)
    loader.close()
    assert not multiprocessing.active_children()


def test_a_killed_worker_is_an_error_not_a_hang(corpus):
    loader = make_loader(corpus, num_workers=2)
    loader.next_step()
    worker, _ = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"a data worker died .*exit code -9.*memory"):
        for _ in range(100):
            loader.next_step()
    loader.close()


def test_more_workers_than_streams(corpus):
    loader = make_loader(corpus, num_workers=5, num_streams=2)
    loader.next_step()
    assert len(multiprocessing.active_children()) == 2
    loader.close()


def test_short_sequences_share_messages_that_grow(corpus, monkeypatch):
    monkeypatch.setattr(workers, "TOKENS_PER_MESSAGE", 64)
    loader = make_loader(corpus, num_streams=2, seq_len=16)
    messages = iter(workers._WorkerDataset(StreamReader(loader.plan, [0, 1], list(loader.states.values()))))
    assert [len(next(messages)) for _ in range(5)] == [1, 2, 4, 4, 4]


def test_an_open_pool_does_not_keep_the_process(corpus):
    script = (
        "from tests.data.corpus import make_loader\n"
        f"loader = make_loader({corpus!r}, num_workers=2)\nloader.next_step()\nprint('made')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "made\n", done.stderr


def test_workers_end_at_once(corpus):
    loader = make_loader(corpus, num_workers=2)
    loader.next_step()
    started = time.perf_counter()
    loader.close()
    assert time.perf_counter() - started < 5 and not multiprocessing.active_children()


def test_workers_do_not_outlive_a_killed_trainer(corpus):
    """With a message in the pipe that nobody reads any more, and is longer than the pipe takes."""
    script = (
        "import multiprocessing, os, signal, time\n"
        "from tests.data.corpus import make_loader\n"
        f"loader = make_loader({corpus!r}, num_workers=2, seq_len=65536)\nloader.next_step()\n"
        "print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)\n"
        "time.sleep(1)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    workers = [int(number) for number in done.stdout.split()]
    assert len(workers) == 2, done.stderr
    assert not left_of(*workers)
