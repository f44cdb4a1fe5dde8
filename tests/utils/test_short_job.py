"""Jobs that scripts start do not outlive them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.processes import left_of
from utils.short_job import ROOT

SCRIPT = """
import signal, subprocess, sys, time
from utils.short_job import ending_with_us
child = subprocess.Popen(["sleep", "60"], start_new_session=True, preexec_fn=ending_with_us(signal.SIGKILL))
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_ends_with_the_script(number):
    script = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    job = int(script.stdout.readline())
    script.send_signal(number)
    script.communicate()
    if left_of(job, seconds=10):
        os.kill(job, signal.SIGKILL)
        pytest.fail("the job goes on")
