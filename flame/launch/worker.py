"""One process of a run with several: the trainer, and a note of its exit code, which torchrun itself does not keep."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

from flame.launch import exit_codes


def main(exit_folder: str, trainer: str, *argv: str) -> int:
    """Run ``trainer.main(argv)``; its exit code is returned and written to ``{exit_folder}/{LOCAL_RANK}``."""
    code = exit_codes.CRASH
    try:
        code = import_module(trainer).main(list(argv))
    finally:
        (Path(exit_folder) / os.environ["LOCAL_RANK"]).write_text(str(code))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
