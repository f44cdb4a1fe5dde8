"""Starting a run: the launcher, the layout of its processes, their exit codes, the versions they need."""
