"""Exit codes of a training run, the same for one process and for many; ``bash train.sh`` hands them on."""

from flame.errors import EXIT_USER_ERROR

OK = 0
"""The run is complete."""
CRASH = 1
"""An unexpected error; its traceback was printed."""
USER_ERROR = EXIT_USER_ERROR
"""The job or its environment has to be changed; what to change was printed."""
PREEMPTED = 75
"""Asked to stop (SIGTERM, SIGUSR1, Ctrl-C): the run saved what it had and can be resumed. EX_TEMPFAIL of sysexits.h."""
KILLED = 128
"""Plus the signal's number: a process was killed by that signal, without saving."""
