"""Plain-PyTorch versions of the flash-linear-attention operators that flame's CPU families use.

Written from the published recurrences, differentiable by autograd, aware of packed documents (cu_seqlens), with FLA's
signatures. `flame.models.backend` puts them in FLA's place on a CPU or with `--model.backend reference`.
"""
