"""A job on paper: what it needs of how many devices, found out in one process without a device and without training.

================= ==============================================================================
command           the plan of a job: built by the code that training uses, printed
plan              everything that is known of a job before it runs
world             a process group that moves nothing, of as many ranks as the job has
trial             one micro-batch on tensors without memory, counted by ``allocations``
allocations       how many bytes tensors without memory would take
memory            bytes of one rank: weights, gradients, optimizer, activations
schedule          what the ranks of a pipeline do one after the other, and how long they wait
traffic           bytes that a rank sends in a step
capacity          how much memory a device has
kernels           the Triton kernels of a job, compiled before it runs
fit               what auto comes to: the fastest recomputation and the largest batch that fit
report            the plan in words
================= ==============================================================================
"""
