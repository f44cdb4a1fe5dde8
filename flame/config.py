"""The typed job config: one dataclass per section, one docstring under each field, which is also its help text.

A config is plain data. ``flame.cli`` fills it from the command line and a TOML file, ``flame.cli.validate`` checks it,
and the rest of flame only reads it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from flame.options import option

SINGLE_STAGE_SCHEDULES = ("1F1B", "GPipe")
LOOPED_SCHEDULES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
ATTENTION_BACKENDS = ("auto", "varlen", "sdpa", "flex", "flash", "fa3", "fa4")
LEAVE_OFF = "leave it out"
FOR_REPLICAS = "it counts with fault_tolerance.enable, which is refused"


@dataclass
class Job:
    """The run: its folder and its name"""

    config_file: str = option("", compare=False)
    """TOML file to read options from; the command line goes before it. Files that ship with flame
    (configs/debug.toml, flame/models/fla.toml) are found from any folder."""
    dump_folder: str = option("exp")
    """Run folder: everything that the run writes goes here."""
    cache_dir: str = option("")
    """Folder for compiled kernels and tuning results, which make later first steps short; runs and nodes may share it.
    Empty: where Triton and torch keep theirs, and ~/.cache/flame. Variables of the environment (TRITON_CACHE_DIR) go
    before it."""
    compile_ahead: bool = option(False)
    """On GPUs, compile the kernels of the first step in all cores of the machine while train.sh starts the run; not
    under a torchrun of your own, nor with training.batch_size or activation_checkpoint.mode auto. FlashAttention-4
    is compiled so in any case unless this is set to false."""
    shipped_tuning: bool = option(True)
    """Let Triton kernels use the tuning results that ship with flame where this machine has none of its
    own, instead of trying all candidates in the first step."""
    description: str = option("")
    """Free text about the run, kept in its config.toml and shown at start."""
    print_args: bool = option(False)
    """Print the resolved options at start."""
    use_for_integration_test: bool = option(False)
    """Mark the job file as one that the project's own tests run."""
    dry_run: bool = option(False)
    """Plan the job instead of running it, in one process and without a GPU: print the mesh, each rank's parameters,
    its memory on a GPU, FLOPs, waiting times and traffic, and stop. A layout that could not run is refused."""
    world_size: int = option(0, minimum=0, maximum=100_000)
    """Number of processes to plan for, with job.dry_run or memory_estimation.enabled. 0: as many as a run would have
    (NNODE * NGPU)."""
    device_memory_gib: float = option(0.0, minimum=0, below=float("inf"))
    """Memory of a device in GiB that auto (activation_checkpoint.mode, training.batch_size) makes the job fit, and that
    a plan is held against. 0: what is free on the GPUs of the run, or of this machine."""
    sample_prompt: str = option("")
    """After the run, reload the exported model and print its continuation of this text. Empty: no sample."""
    sample_tokens: int = option(48, minimum=1)
    """Tokens to generate for job.sample_prompt."""


@dataclass
class Model:
    """The architecture, the tokenizer and what computes it"""

    name: str = option("fla", choices=("fla",))
    """Kind of model; fla stands for every Hugging Face causal LM, FLA's families among them."""
    config: str = option("")
    """Model config: a *.json file, a folder with a config.json, or a hub id."""
    tokenizer_path: str = option("")
    """Tokenizer folder or hub id. Empty: the one beside model.config, when that is a folder or a hub id."""
    norm_type: str = option("", choices=("", "layernorm", "np_layernorm", "rmsnorm", "fused_rmsnorm"))
    """Kind of normalisation layer. Empty: as the model config says. A family that has no such choice refuses it."""
    converters: list[str] = option([], choices=("float8",))
    """Changes made to the built model before training, in order."""
    print_after_conversion: bool = option(False)
    """Print the model once it is built and converted."""
    backend: str = option("auto", choices=("auto", "triton", "reference"))
    """Operators of the FLA layers: Triton kernels, or flame's plain PyTorch ones. auto: triton on a GPU, else
    reference."""
    attention_backend: str = option("auto", choices=ATTENTION_BACKENDS)
    """What computes softmax attention: torch's variable-length FlashAttention, SDPA, FlexAttention, the flash_attn
    package, or FlashAttention-3 or -4 where installed. auto: on a GPU the fastest on the job's shapes, measured at
    start and remembered, with training.deterministic varlen or flash; on a CPU sdpa."""
    trust_remote_code: bool = option(False)
    """Allow Python code that comes with a model or tokenizer to run on this machine."""
    custom_models: list[str] = option([])
    """A user's own architectures, imported before the model config is read: names of packages in custom_models,
    folders of packages, Python files, or modules that Python finds."""


@dataclass
class Profiling:
    """Traces and memory snapshots"""

    enable_profiling: bool = option(False)
    """Write profiler traces."""
    save_traces_folder: str = option("profile_traces")
    """Folder for the traces, inside the run folder."""
    profile_freq: int = option(10, minimum=1)
    """Steps from one trace to the next."""
    enable_memory_snapshot: bool = option(False)
    """Write snapshots of the GPU's allocated memory."""
    save_memory_snapshot_folder: str = option("memory_snapshot")
    """Folder for the snapshots, inside the run folder."""


@dataclass
class Optimizer:
    """The optimizer"""

    name: str = option("AdamW", choices=("AdamW", "Adam", "SGD"))
    """Optimizer."""
    lr: float = option(8e-4, minimum=0, below=float("inf"))
    """Highest learning rate, reached at the end of warm-up."""
    beta1: float = option(0.9, minimum=0, below=1)
    """Decay of the gradient's running mean (Adam, AdamW), or momentum (SGD)."""
    beta2: float = option(0.95, minimum=0, below=1)
    """Decay of the squared gradient's running mean (Adam, AdamW)."""
    eps: float = option(1e-8, above=0, below=float("inf"))
    """Added to the root of the second moment (Adam, AdamW)."""
    weight_decay: float = option(0.1, minimum=0, below=float("inf"))
    """Weight decay of matrices; norms, biases and parameters marked `_no_weight_decay` have none."""
    implementation: str = option("fused", choices=("for-loop", "foreach", "fused"))
    """How the update is computed: parameter by parameter, in multi-tensor operations, or in one kernel. Only fused
    lets skip_nan_inf decide without the host waiting. Unset: fused, and foreach for SGD, which has no fused form."""
    early_step_in_backward: bool = option(
        False,
        refused={
            True: "every step reports the norm of all gradients, clips by it and can be skipped by it, so that no "
            "parameter can be updated before all gradients are there; leave it out"
        },
    )
    """Update each parameter as soon as its gradient is there, in the backward pass: refused."""


@dataclass
class LRScheduler:
    """The learning rate over the run"""

    warmup_steps: int = option(200, minimum=0)
    """Steps over which the learning rate rises to optimizer.lr; cut to training.steps where that is less."""
    decay_ratio: float | None = option(None, minimum=0, maximum=1)
    """Share of training.steps over which it decays, at the run's end; between warm-up and decay it is constant.
    Unset: it decays over all steps after warm-up. 0: it stays constant after warm-up."""
    decay_type: str = option("linear", choices=("linear", "sqrt", "cosine", "wsd"))
    """Shape of the decay. wsd is linear with a decay_ratio, 0.1 when none is given."""
    lr_min: float = option(0.0, minimum=0, maximum=1)
    """Learning rate at the last step, as a ratio of optimizer.lr."""


@dataclass
class Training:
    """Data, batch, length of the run, precision and parallel layout"""

    batch_size: int = option(0, minimum=0, maximum=2**20, word="auto")
    """Packed sequences per device and micro-batch. 0: 8, or 1 with training.varlen (more joins the sequences into one
    row of batch_size * seq_len tokens). auto: the largest power of two that fits the GPU; a resumed run keeps the
    tokens of a step."""
    seq_len: int = option(2048, minimum=1)
    """Tokens of a packed sequence."""
    context_len: int = option(2048, minimum=1)
    """Longest piece of a document, in tokens; the rest of a longer one goes on in the next piece. At most seq_len.
    Unset: 2048, or training.seq_len when that is less."""
    varlen: bool = option(False)
    """Keep the documents of a packed sequence apart: none sees another one's tokens or state."""
    gradient_accumulation_steps: int = option(1, minimum=1)
    """Micro-batches per step and device."""
    steps: int = option(10000, minimum=1)
    """Training steps of the whole run, those before a resume included."""
    max_norm: float = option(1.0, above=0)
    """The gradient is scaled down to this norm when it is larger; inf leaves it as it is."""
    skip_nan_inf: bool = option(False)
    """Leave out the update of a step whose gradient is not finite."""
    skip_loss_spike: float = option(0.0, minimum=0, below=float("inf"))
    """Leave out the update of a step whose loss is this many standard deviations above the mean of the last
    loss_spike_window steps, 6 for instance. 0: never."""
    loss_spike_window: int = option(128, minimum=8)
    """Steps whose losses skip_loss_spike looks at; it begins when there are as many."""
    max_consecutive_skips: int = option(100, minimum=1)
    """Steps left out in a row, by skip_nan_inf or skip_loss_spike, after which the run stops."""
    dataset: list[str] = option([])
    """Training data: a hub name, a folder or file (parquet, jsonl, json, csv, txt, arrow), a save_to_disk folder, or
    builtin:stdlib, the text of Python's own library. Comma-separated for several."""
    dataset_name: list[str] = option([])
    """Name of the dataset's config, one for each dataset, or one for all."""
    dataset_split: list[str] = option(["train"])
    """Split to train on, one for each dataset, or one for all."""
    data_dir: list[str] = option([])
    """Folder inside the dataset to read, one for each dataset, or one for all."""
    data_files: list[str] = option([])
    """Files or globs inside the dataset to read; with several datasets, one for each, or one for all."""
    data_probs: list[float] = option([], minimum=0, maximum=1)
    """Share of the documents that comes from each dataset; the shares sum to 1. Not given: equal shares."""
    streaming: bool = option(False)
    """Read the datasets while they download instead of preparing them on disk first."""
    text_column: str = option("")
    """Column that holds the text. Empty: text, else content."""
    add_bos: str = option("auto", choices=("auto", "true", "false"))
    """Begin each document with the BOS token. auto: when the tokenizer itself does."""
    add_eos: str = option("auto", choices=("auto", "true", "false"))
    """End each document with the EOS token. auto: when the tokenizer itself does, or adds neither BOS nor EOS."""
    shuffle: str = option("global", choices=("global", "block", "none"))
    """Order of the documents in an epoch: a new random one (global), blocks of 1,000 consecutive documents in random
    order and shuffled inside (block, for disks that are slow at random reads), or as they are stored (none). With
    training.streaming, global and block both shuffle the shards, and 1,000 consecutive documents at a time."""
    max_epochs: int = option(0, minimum=0)
    """End the run after so many passes over the data. 0: repeat it until training.steps. Of several datasets, one that
    has had its passes drops out and the others go on in the same ratio, until all have had theirs."""
    on_bad_row: str = option("error", choices=("error", "skip"))
    """What to do with a row without text: stop and name it, or leave it out and count it."""
    num_streams: int = option(960, minimum=1, maximum=2**20)
    """Streams that the documents are dealt to. The number of data-parallel ranks must divide it; it is part of the
    data order, so it may not change between a run and its resume."""
    ignore_data_fingerprint: bool = option(False)
    """Resume although the data is not what the checkpoint was trained on."""
    log_data_hash: bool = option(False)
    """Log a hash of each step's tokens, to compare the data of two runs."""
    num_workers: int = option(2, minimum=0, maximum=1024)
    """Processes per rank that tokenise and pack. 0: the training process does it."""
    prefetch_factor: int = option(2, minimum=1)
    """Batches that each worker prepares ahead."""
    pin_memory: bool = option(False)
    """Put batches into page-locked memory, from which the copy to a GPU is faster."""
    persistent_workers: bool = option(False)
    """Keep the workers alive from one pass over the data to the next. They always stay, since
    passes follow each other without a break."""
    data_parallel_replicate_degree: int = option(1, minimum=1)
    """Copies of the model, each sharded over data_parallel_shard_degree devices."""
    data_parallel_shard_degree: int = option(-1, minimum=-1, refused={0: "set it to -1 or at least 1"})
    """Devices that the parameters are sharded over (FSDP). -1: all that the other degrees leave."""
    enable_cpu_offload: bool = option(False)
    """Keep parameters, gradients and optimizer state in the host's memory, where the optimizer then works: slower. On a
    CPU they are there already."""
    tensor_parallel_degree: int = option(1, minimum=1)
    """Devices that each matrix is split over."""
    disable_loss_parallel: bool = option(False)
    """With tensor parallelism, compute the loss on whole logits instead of split ones."""
    fsdp_reshard_after_forward: str = option("default", choices=("default", "always", "never"))
    """Free a block's gathered parameters after its forward pass: always (less memory), never (less communication).
    default: always on several devices; on one, where nothing is gathered, never."""
    mixed_precision_param: str = option("auto", choices=("auto", "bfloat16", "float32"))
    """Data type of the computation; master weights are float32. auto: bfloat16, and float32 on a CPU without
    bfloat16 matrix instructions, where bfloat16 is several times slower."""
    mixed_precision_reduce: str = option("float32", choices=("float32",))
    """Data type in which gradients are summed over devices."""
    compile: bool = option(False)
    """Compile the model's blocks with torch.compile. Kernels over packed documents run between the compiled parts."""
    gc_freq: int = option(50, minimum=1)
    """Steps from one run of Python's garbage collector to the next."""
    seed: int = option(42, minimum=0, maximum=2**63 - 1)
    """Seed of the initial weights and the data order."""
    deterministic: bool = option(False)
    """Use deterministic operations: slower. One that has no deterministic form is named in a warning."""


@dataclass
class Validation:
    """The loss on held-out data while the model trains"""

    dataset: list[str] = option([])
    """Held-out data, in the forms that training.dataset takes. Empty: no validation."""
    dataset_name: list[str] = option([])
    """Name of the dataset's config, one for each dataset, or one for all."""
    dataset_split: list[str] = option([])
    """Split to validate on, one for each dataset, or one for all. Unset: validation, and train for what has no other,
    which are files, validation.data_files among them, and a dataset that was saved by itself."""
    data_dir: list[str] = option([])
    """Folder inside the dataset to read, one for each dataset, or one for all."""
    data_files: list[str] = option([])
    """Files or globs inside the dataset to read; with several datasets, one for each, or one for all."""
    text_column: str = option("")
    """Column that holds the text. Empty: text, else content."""
    streaming: bool = option(False)
    """Read no more of the datasets than validation.num_tokens needs, instead of preparing them on disk first."""
    interval: int = option(500, minimum=1)
    """Steps from one validation to the next; the last step is always followed by one."""
    num_tokens: int = option(2**20, minimum=0)
    """Validate on so many tokens, in whole sequences of training.seq_len: the same documents every time, whatever
    training.seed is. They stay in memory. 0: all."""


@dataclass
class Metrics:
    """What is logged, and where"""

    log_freq: int = option(10, minimum=1)
    """Steps from one logged step to the next."""
    enable_tensorboard: bool = option(False)
    """Log to TensorBoard."""
    save_tb_folder: str = option("tb")
    """Folder for TensorBoard, inside the run folder."""
    save_for_all_ranks: bool = option(False)
    """Log to TensorBoard and W&B from every rank instead of rank 0 alone."""
    disable_color_printing: bool = option(False)
    """Print the console lines without colour."""
    enable_wandb: bool = option(False)
    """Log to Weights & Biases; the WANDB_* environment variables choose project, name and mode."""


@dataclass
class Experimental:
    """Pipeline, context and asynchronous tensor parallelism, custom models"""

    enable_async_tensor_parallel: bool = option(
        False,
        refused={
            True: "torch overlaps collectives that are part of a compiled graph, and those of tensor parallelism run "
            "between graphs here; leave it out"
        },
    )
    """Overlap tensor-parallel communication with computation: refused."""
    pipeline_parallel_degree: int = option(1, minimum=1)
    """Devices that the blocks are spread over, one after the other."""
    pipeline_parallel_split_points: list[str] = option([])
    """Modules at which a new pipeline stage begins, such as layers.4,layers.8."""
    pipeline_parallel_schedule: str = option("1F1B", choices=SINGLE_STAGE_SCHEDULES + LOOPED_SCHEDULES + V_SCHEDULES)
    """Pipeline schedule, by its name in torch.distributed.pipelining."""
    pipeline_parallel_schedule_csv: str = option("")
    """CSV file with a pipeline schedule of one's own."""
    pipeline_parallel_microbatches: int | None = option(None, minimum=1)
    """Micro-batches of a rank in a step. Unset: one for each sequence (batch_size * gradient_accumulation_steps)."""
    enable_compiled_autograd: bool = option(
        False,
        refused={
            True: "FSDP gathers and reduces in hooks of the backward pass, which torch cannot trace; leave it out: "
            "training.compile compiles the backward of each block too"
        },
    )
    """Compile the whole backward pass with compiled autograd: refused."""
    context_parallel_degree: int = option(1, minimum=1)
    """Devices that each sequence is split over."""
    context_parallel_rotate_method: str = option("allgather", choices=("allgather", "alltoall"))
    """How softmax layers exchange keys and values under context parallelism."""
    custom_model_path: str = option("")
    """One more entry for model.custom_models."""


@dataclass
class Checkpoint:
    """Saving, resuming, starting from other weights, exporting"""

    enable_checkpoint: bool = option(True)
    """Save checkpoints, and resume from those in the run folder. On by default: a run without them can neither go on
    after a stop nor be exported."""
    folder: str = option("checkpoint")
    """Folder for the checkpoints, inside the run folder."""
    interval_type: str = option("steps", choices=("steps", "step", "seconds"))
    """Unit of checkpoint.interval."""
    interval: int = option(500, minimum=1)
    """Steps or seconds from one checkpoint to the next; the last step is always saved."""
    last_save_model_weights_only: bool = option(False)
    """Save only the weights, in export_dtype, at the last step. A run that goes on from there has a fresh optimizer."""
    export_dtype: str = option("float32", choices=("float32", "float16", "bfloat16"))
    """Data type of the exported model and of a checkpoint with weights only."""
    export_hf: bool = option(True)
    """Write the model in Hugging Face format to the run folder when the run ends."""
    create_seed_checkpoint: bool = option(False)
    """Save the initial weights as step 0, and stop. They are the same for any number of processes."""
    async_mode: str = option("disabled", choices=("disabled", "async", "async_with_pinned_mem"))
    """Write checkpoints while training goes on, from a copy in the host's memory, which holds weights and optimizer
    state of the rank; with async_with_pinned_mem in page-locked memory, to which a GPU copies several times faster. The
    last checkpoint, and the one at a signal, are on the disk before the run ends."""
    keep_latest_k: int = option(0, minimum=0)
    """Checkpoints to keep; older ones are removed. 0: all."""
    load_step: int = option(-1, minimum=-1)
    """Step to resume from. -1: the newest complete checkpoint, or the start when there is none."""
    initial_load_path: str = option("")
    """Start a new run from these weights: a Hugging Face folder, or a checkpoint (step-N) of another run."""
    initial_load_model_weights_only: bool = option(True)
    """From initial_load_path take the weights alone; off: the optimizer's state too, where there is one. Steps and data
    start anew either way."""
    exclude_from_loading: list[str] = option([])
    """Parts of a checkpoint to leave as they are when loading: optimizer, dataloader, train_state, a parameter's name
    or the beginning of one, a pattern with *. lr_scheduler is taken too and changes nothing: the rate follows from
    the step."""
    preempt_timeout_seconds: int = option(30, minimum=1)
    """Time from SIGTERM, SIGUSR1 or Ctrl-C to the end of the run. When no step could be saved within nine tenths of it,
    the last checkpoint stands."""
    verify: str = option("auto", choices=("auto", "size", "full"))
    """Check of a checkpoint before loading: the size of each file, or its whole content. auto: full below 10 GB."""


@dataclass
class Float8:
    """Matrix products in 8 bits"""

    enable_fsdp_float8_all_gather: bool = option(False)
    """Gather sharded parameters in float8 (tensorwise scales only)."""
    precompute_float8_dynamic_scale_for_fsdp: bool = option(False)
    """With float8 gathering, compute the scales of all parameters in one go after each step."""
    force_recompute_fp8_weight_in_bwd: bool = option(
        False, refused={True: "torchao always casts the weights again in the backward pass now; leave it out"}
    )
    """Cast the weights to float8 again in the backward pass instead of keeping them: always done."""
    recipe_name: str = option("", choices=("", "tensorwise", "rowwise", "rowwise_with_gw_hp"))
    """What shares a scale: a whole tensor, or a row; with _gw_hp gradients of weights are computed in high precision.
    Empty: tensorwise."""
    emulate: bool = option(False)
    """Compute float8's rounding in float32, on any device and slowly, to see what it does to a loss."""
    scaling_type_input: str = option(
        "dynamic", choices=("dynamic",), refused={"delayed": "torchao dropped delayed scaling: use dynamic"}
    )
    """Scaling of the inputs."""
    scaling_type_weight: str = option(
        "dynamic", choices=("dynamic",), refused={"delayed": "torchao dropped delayed scaling: use dynamic"}
    )
    """Scaling of the weights."""
    scaling_type_grad_output: str = option(
        "dynamic", choices=("dynamic",), refused={"delayed": "torchao dropped delayed scaling: use dynamic"}
    )
    """Scaling of the output's gradients."""


@dataclass
class ActivationCheckpoint:
    """Recomputing activations in the backward pass"""

    mode: str = option("none", choices=("none", "selective", "full", "auto"))
    """Which activations are recomputed instead of kept. auto: the fastest that fits the device of none, selective with
    option op, and full; decided at each start, since it changes no number."""
    selective_ac_option: str = option("2")
    """With mode selective: op (the cheap operators of every block), norm (outputs of norms that its linear layers
    read), or n for every n-th block."""


@dataclass
class ActivationOffload:
    """Activations in the host's memory"""

    mode: str = option("none", choices=("none", "full"))
    """Which activations are moved to the host's memory until the backward pass. full: all large ones of the blocks;
    what activation_checkpoint computes again is not kept at all. The copies cost time; GPUs only."""


@dataclass
class Comm:
    """Communication between the ranks"""

    init_timeout_seconds: int = option(300, minimum=1)
    """Longest wait for another rank during set-up, the first step and the first validation."""
    train_timeout_seconds: int = option(100, minimum=1)
    """Longest wait for another rank in later steps and validations."""
    trace_buf_size: int = option(20000, minimum=0)
    """Events that the flight recorder keeps for a hang's report. 0: none."""


@dataclass
class MemoryEstimation:
    """Estimating memory without training"""

    enabled: bool = option(False)
    """Estimate the memory that the job needs on each GPU, and stop; job.dry_run says more."""
    disable_fake_mode: bool = option(
        False,
        refused={
            True: "the estimate is made on tensors without memory; leave it off, or read memory_gib of a few real steps"
        },
    )
    """Estimate with real tensors instead of fake ones: refused."""


@dataclass
class FaultTolerance:
    """Replica groups that survive each other's loss"""

    enable: bool = option(
        False,
        refused={
            True: "torchft's replica groups join and leave while a run goes on, and then its losses would not be those "
            "of one device; leave it out: after a loss the same command goes on from the last checkpoint"
        },
    )
    """Go on training when a replica group is lost (torchft): refused."""
    replica_id: int = option(0, minimum=0, not_yet=FOR_REPLICAS)
    """This replica group's number."""
    group_size: int = option(0, minimum=0, not_yet=FOR_REPLICAS)
    """Number of replica groups."""
    min_replica_size: int = option(0, minimum=0, not_yet=FOR_REPLICAS)
    """Fewest replica groups to go on with."""


@dataclass
class JobConfig:
    """A whole job: one attribute per section, named as on the command line and in TOML."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    profiling: Profiling = field(default_factory=Profiling)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    experimental: Experimental = field(default_factory=Experimental)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    float8: Float8 = field(default_factory=Float8)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    activation_offload: ActivationOffload = field(default_factory=ActivationOffload)
    comm: Comm = field(default_factory=Comm)
    memory_estimation: MemoryEstimation = field(default_factory=MemoryEstimation)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    given: dict[str, str] = field(default_factory=dict, compare=False)
    """What the user set: ``section.name`` to the way it was written, a flag or a place in a TOML file."""


AUTO = "auto"  # what stands in training.batch_size and activation_checkpoint.mode until the job's memory is planned


def auto_options(config: JobConfig) -> list[str]:
    """The options, as ``section.name``, that the job's memory is yet to decide."""
    values = {
        "activation_checkpoint.mode": config.activation_checkpoint.mode,
        "training.batch_size": config.training.batch_size,
    }
    return [name for name, value in values.items() if value == AUTO]


def resolve_defaults(config: JobConfig) -> None:
    """Replace, in place, the values that stand for "as the other options say" by what they come to.

    What depends on the hardware stays ``auto``.
    """
    training, scheduler = config.training, config.lr_scheduler
    # A shell leaves the ~ of --job.dump_folder=~/run as it is.
    config.job.dump_folder = os.path.expanduser(config.job.dump_folder)
    config.job.cache_dir = os.path.expanduser(config.job.cache_dir)
    if training.batch_size == 0:
        training.batch_size = 1 if training.varlen else 8
    if "training.context_len" not in config.given:
        training.context_len = min(training.context_len, training.seq_len)
    if "lr_scheduler.warmup_steps" not in config.given:
        scheduler.warmup_steps = min(scheduler.warmup_steps, training.steps)
    if config.optimizer.name == "SGD" and "optimizer.implementation" not in config.given:
        config.optimizer.implementation = "foreach"
    if scheduler.decay_type == "wsd":
        scheduler.decay_type = "linear"
        scheduler.decay_ratio = 0.1 if scheduler.decay_ratio is None else scheduler.decay_ratio
    if config.checkpoint.interval_type == "step":
        config.checkpoint.interval_type = "steps"
    if not config.model.tokenizer_path and not config.model.config.endswith(".json"):
        config.model.tokenizer_path = config.model.config
