"""Starting a run: the launcher, the layout of its processes, their exit codes, the versions and caches they
need, and the kernels that are compiled while they start."""
