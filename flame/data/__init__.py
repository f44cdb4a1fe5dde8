"""From rows to batches: sources -> order -> tokenize -> pack -> load.

============= ==================================================================================
sources       what the rows are: local files, saved folders, hub datasets, the standard library
loading       getting them through ``datasets``, with faults that say what to change
order         which row stands at a virtual position, by the keyed permutation of ``permutation``
tokenize      text to token ids, with the BOS/EOS policy
rows          rows to ``documents``, and what is wrong with a row that cannot become one
streams       the logical streams: they walk the order, read ahead and tokenise in batches
pack          documents to sequences: inputs, targets, document boundaries
workers       the processes that make sequences
loader        one rank's share of the global order, as instances of ``batch``
state         what is saved, and merged over ranks
fingerprint   what tells one job's data from another's
============= ==================================================================================
"""
