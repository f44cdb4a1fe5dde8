"""Faults on purpose: kills, signals, damage and full disks, as commands with as many of them as wanted.

``python -m tests.faults.kill``, ``.signals``, ``.damage`` and ``.full_disk`` print what docs/reliability.md shows;
``tests/faults/test_*.py`` run each with a few.
"""
