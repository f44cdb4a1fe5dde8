"""From rows to batches: sources -> order -> tokenize -> pack -> load.

============= ==================================================================================
sources       what the rows are: local files, saved folders, hub datasets, ``stdlib``
columns       which of their columns is trained on
shards        sources that stream in, front to back
loading       getting them through ``datasets``, with faults that say what to change; ``hub`` knows whether it is there
order         which row stands at a virtual position, by the keyed permutation of ``permutation``
shard_order   which rows of which shards a stream gets, when they stream in
mixture       which source each document of a stream comes from
walks         how streams walk the rows of one source; ``shard_walk`` the same for shards, with the queues of ``spill``
tokenize      text to token ids, with the BOS/EOS policy
read_ahead    reading and tokenising on a thread that is ahead of packing
rows          rows to ``documents``, and what is wrong with a row that cannot become one
streams       the logical streams: they draw documents, read ahead and tokenise in batches
pack          documents to sequences: inputs, targets, document boundaries
workers       the processes that make sequences
loader        one rank's share of the global order, as instances of ``batch``
held_out      the same, read once for validation
prefetch      the next step's batches on the device ahead of use
state         what is saved, and merged over ranks
fingerprint   what tells one job's data from another's
mismatch      which of it sets a run apart from its checkpoint, in the words of its options
============= ==================================================================================
"""
