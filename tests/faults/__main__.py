"""A few faults of each kind that forked runs can have, in one process that imports once: ``python -m tests.faults``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.faults import damage, full_disk, kill, seed


def main() -> int:
    """Run them; 0 when nothing was lost."""
    codes = [
        kill.main(["--kills", "3", "--steps", "16"]),
        damage.main(["--flips", "2"]),
        seed.main(),
    ]
    if can_mount():
        codes.append(full_disk.main(["--mode", "async"]))
    else:
        print("full disk: skipped, this process may not mount a file system")
    return max(codes)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with full_disk.small_disk(Path(folder)):
                return True
        except OSError:
            return False


if __name__ == "__main__":
    sys.exit(main())
