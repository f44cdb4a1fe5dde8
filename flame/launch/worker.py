"""One process of a run with several: the trainer, with notes for the launcher."""

from __future__ import annotations

import sys
from importlib import import_module

from flame.launch import exit_codes, notes
from flame.launch.stop_signals import exit_when_asked


def main(trainer: str, *argv: str) -> int:
    """Run ``trainer.main(argv)``; its exit code is returned and noted."""
    exit_when_asked()
    notes.leave_id()
    code = exit_codes.CRASH
    try:
        code = import_module(trainer).main(list(argv))
    except SystemExit as stop:
        code = stop.code
    finally:
        notes.leave_code(code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
