"""One training run: build it, restore it, hold it between steps, finish it; ``flame.train`` is the loop.

================== =============================================================================================
build              everything that a run needs, in the order of its start-up
model_source       what the job's model is, read and checked before it is built
attention_backend  which attention it computes with
attention_ahead    FlashAttention-4's kernels for it, compiled while the run starts
auto               what the job leaves to the memory of its devices: recomputation, batch size
meta_model         its modules made into those that are trained, without memory: as far as a plan goes
placement          the same sharded, with memory and first weights
restore            where the run begins: a checkpoint, other weights, or the start
announce           what it says of itself before it trains
run                what the loop works with
lengths            tokens of a step and of a document
optimizer          parameter groups and the update, ``lr_scheduler`` its learning rate
bad_steps          updates that are left out
validation         the loss on held-out text
saving             when a checkpoint is written
finish             the model in Hugging Face format, the report, the sample
preemption         being asked to stop
endings            what is said of a run that does not come to its end, and the exit code
hang               the stacks of a step that takes too long
lock               one run at a time in a folder
profiling          traces and memory snapshots
runtime            seeds, determinism, garbage collection
================== =============================================================================================
"""
