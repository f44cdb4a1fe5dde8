"""Save, load, retention and conversion of checkpoints.

``manager`` saves and resumes a run, ``initial`` starts one from other weights, ``convert`` goes to and from Hugging
Face folders. The rest answers one question each: ``names`` (what a tensor is called), ``dcp`` (how tensors are stored),
``manifest`` (is a folder complete), ``folders`` (which steps are there), ``ranks`` (do all ranks agree).
"""
