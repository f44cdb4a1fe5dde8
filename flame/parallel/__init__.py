"""How a job is laid over devices: process group, FSDP2 and gradient clipping."""
