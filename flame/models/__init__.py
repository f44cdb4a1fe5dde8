"""Models: config -> build -> initialise -> train -> count.

================= ==============================================================================
model_config      a model's config from a file, a folder or the hub, fitted to the tokenizer
custom            a user's own architectures, imported when a job names them
build             the model without memory, and the recipe of its weights
recorder          what a constructor does to its tensors, to be done again elsewhere
init              initial weights, the same at any layout
blocks            the repeated layers: what is sharded on its own
loss              the training forward: token ids and labels to the sum of the losses, by ``linear_cross_entropy``
proofs            that a model looks at no later token and at no other document
backend           which code runs FLA's operators, and all that is replaced in FLA
reference         FLA's operators in plain PyTorch
attention         softmax attention of packed documents; ``native_attention`` for transformers
native_recurrence packed documents in transformers' convolutions and recurrences
state_space       Mamba's and Mamba-2's mixers, on ``selective_scan`` and ``ssd``
selective_scan    Mamba's scan in Triton, with ``selective_scan_kernels``
ssd               Mamba-2's scan as linear attention
columns           splits of a matrix whose gradients lie side by side
chunk_ssd         Mamba-2's scan in Triton for Hopper GPUs, with ``chunk_ssd_kernels``
chunk_backward    one backward step that FLA refuses on some GPUs, with ``chunk_backward_kernels``
convolutions      short convolutions by kernels that FLA keeps for one process
chunk_bounds      chunks of packed documents, counted on the host
chunks            what the operators for Hopper GPUs work on, with ``chunks_kernels``
chunk_gla         gated linear attention in Triton for Hopper GPUs, with ``chunk_gla_kernels``
delta_rule        the gated delta rule in Triton for Hopper GPUs, with ``delta_rule_kernels``
swiglu_kernels    SwiGLU in Triton at the memory's bandwidth
rotary_kernels    rotary embeddings of whole heads likewise
gated_norm        gated norms at the memory's bandwidth
tuning            how the candidates of a Triton kernel are compiled and timed
tuned             the results of it that ship with flame
without_kernels   FLA's layers on tensors without memory, for plans
generation        FLA's caches with the newest transformers
mixers            one FLOP formula a token mixer; ``pairs`` counts what attention computes
flops             training FLOPs of a model
summary           a model on paper: parameters, FLOPs, memory
================= ==============================================================================
"""

from flame.models.blocks import find_blocks
from flame.models.build import BuiltModel, build_model, check_positions, no_decay_names
from flame.models.init import init_weights
from flame.models.model_config import load_model_config

__all__ = [
    "BuiltModel",
    "build_model",
    "check_positions",
    "find_blocks",
    "init_weights",
    "load_model_config",
    "no_decay_names",
]
