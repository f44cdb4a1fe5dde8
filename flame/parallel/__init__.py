"""How a job is laid over devices; no module here knows of the training loop.

=================== ============================================================================================
degrees             how many ways a job is split, and along what
distributed         the process group, a process's place in it, the collectives of the loop
collectives         those that autograd differentiates
precision           the dtype that a model computes in
fsdp                parameters sharded, on one device as on many
offload             what the host's memory keeps
clip                gradient clipping over all of that
shared_inputs       linear layers that add up the gradient of an input they share; ``residual_norms`` norms that do
recompute           activation checkpointing; ``recompute_norms`` of what norms give
compile             torch.compile, block by block
float8              matrix products in 8 bits
tensor              tensor parallelism: modules that ranks share; ``tensor_plans`` says what of each family's,
                    ``tensor_operators`` which operators must know, ``vocabulary`` embedding, output and loss
context             context parallelism: rows cut into pieces, set up by ``context_setup``;
                    ``context_operators`` says which operators exchange what pieces lack: ``context_attention`` keys
                    and values, ``context_states`` recurrent states, ``context_border`` the last inputs
pipeline            pipeline parallelism: the schedule that runs the stages; ``pipeline_cut`` is how a job's model
                    and step are cut, by the ``pipeline_plan`` of blocks and ranks
stages              what a stage holds and computes; ``stage_outline`` is what has to be known of a model,
                    ``stage_trial`` finds it out by trial, ``stage_modules`` stands in for what other stages hold
=================== ============================================================================================
"""
