"""The documented commands that go with training: ``python -m flame.utils.NAME``."""
