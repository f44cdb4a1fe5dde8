"""``python -m flame.launch``: what train.sh runs."""

from flame.launch.launcher import entry

entry()
