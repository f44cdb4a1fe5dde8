"""From rows to batches: sources -> order -> tokenize -> pack -> load.

========== ====================================================================================
sources    what the rows are: local files, saved folders, hub datasets, the standard library
documents  tokenised documents, many in one array
rows       rows to documents, and what is wrong with a row
order      which row stands at a virtual position, by the keyed permutation of ``permutation``
tokenize   text to token ids, with the BOS/EOS policy
streams    S logical streams that walk the order, read ahead and tokenise in batches
pack       documents to sequences: inputs, targets, document boundaries
loader     worker processes, batches for one rank, state
state      what is saved, merged over ranks, and checked at resume
========== ====================================================================================
"""
