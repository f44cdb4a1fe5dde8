"""How fast the data pipeline is: against the tokenizer alone on the same text, and from start to first batch.

    python utils/benchmark_data.py [--modes ...] [--seq_lens 2048,65536] [--workers 0,1,2] [--json FILE]

The baseline is the tokenizer alone: ``encode_batch_fast``, one thread, batches of 1,000 rows, its result dropped, no
ids fetched from it. Each case warms the pipeline up until the streams hold as much read ahead as they ever will, then
alternates: a stretch of the pipeline, and the baseline on the documents that the pipeline used in that stretch, in the
same order. With workers both run in as many forked processes. A case is told by the median over its pairs, and by all
pairs taken together. Beside the clock stands processor time a token, of the workers or, without any, of this process:
the one to look at on a machine that is busy with other things. A worker tokenises on one thread and packs on another,
so by the clock it may keep up with the baseline although it does more; on one core it cannot. Stretches of less than a
million tokens say nothing: a worker reads some batches of 65,536 tokens ahead.

Modes: ``single`` (one source, shuffled as a whole), ``block`` (shuffled by blocks), ``tokenized`` (rows of token ids,
made from the same text), ``streaming`` (iterable shards; the baseline has as many documents, drawn at random), and
``mixture`` (all the corpora, with equal probabilities).
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, flame need not be installed
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread, as in a worker

import numpy as np

from flame.config import JobConfig
from flame.data.loader import DataLoader, build_dataloader
from flame.data.order import RowOrder
from flame.data.state import StreamState, merge_state_dicts
from flame.data.stdlib import read_stdlib_texts
from flame.data.streams import BATCHES_AHEAD, TOKENS_PER_BATCH
from flame.data.tokenize import load_tokenizer

MODES = ("single", "block", "tokenized", "streaming", "mixture")
ROWS_PER_BATCH = 1_000
NUM_STREAMS = 60  # fewer than in training, so that all of them have come to long documents soon
NUM_SHARDS = 20  # of the streamed corpus
SETTLE_SECONDS = 0.3  # until what is read ahead has been read, and leaves the processor to the baseline
FIRST_STEP, LATE_STEP = 10, 1_000_000


@dataclass(frozen=True)
class Case:
    """One row of the table; ``corpora`` are the names of its sources."""

    mode: str
    corpora: tuple[str, ...]
    seq_len: int
    varlen: bool
    num_workers: int


@dataclass
class Stretch:
    """What one stretch of work took.

    Attributes:
        num_tokens: tokens delivered.
        seconds: on the clock, from the first to the last token.
        cpu_seconds: processor time, added up over the processes that tokenise.
    """

    num_tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def cpu_cost(self) -> float:
        """Nanoseconds of processor time per token."""
        return max(self.cpu_seconds, 0.01) / self.num_tokens * 1e9  # the kernel counts in hundredths


def main(argv: list[str] | None = None) -> int:
    """Measure, and print a table and the same figures as JSON."""
    arguments = build_parser().parse_args(argv)
    tokenizer = load_tokenizer(arguments.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        results = [measure_case(case, Path(folder), tokenizer, arguments) for case in list_cases(arguments)]
        start = measure_starts(Path(folder), tokenizer, arguments) if arguments.start_rows else {}
    if results:
        print(format_table(results))
    if start:
        print(format_starts(start))
    figures = json.dumps({"load_average": os.getloadavg(), "speed": results, "start": start})
    print(figures)
    if arguments.json:
        arguments.json.write_text(figures, encoding="utf-8")
    return 0


def build_parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="configs/tokenizer", help="tokenizer folder or hub name")
    parser.add_argument("--corpora", default="files,paragraphs", help="of Python's library: files, paragraphs or both")
    parser.add_argument(
        "--modes",
        default=",".join(MODES),
        help="all but single run at one seq_len and workers",
    )
    parser.add_argument("--seq_lens", type=numbers, default=[2048, 65536], help="default: 2048,65536")
    parser.add_argument("--workers", type=numbers, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--pairs", type=int, default=5, help="stretches of each kind (default: 5)")
    parser.add_argument("--tokens", type=int, default=1_500_000, help="tokens of a stretch (default: 1.5 million)")
    parser.add_argument(
        "--start_rows", type=int, default=10_000_000, help="rows for the time to start; 0: not measured"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


def list_cases(arguments: argparse.Namespace) -> list[Case]:
    """Single sources in every shape; the other modes differ in how rows are read, so one shape serves them."""
    corpora = [corpus for corpus in arguments.corpora.split(",") if corpus]
    modes = [mode for mode in arguments.modes.split(",") if mode]
    cases = [
        Case("single", (corpus,), seq_len, varlen, num_workers)
        for corpus in corpora
        for seq_len in arguments.seq_lens
        for varlen in (True, False)
        for num_workers in arguments.workers
        if "single" in modes
    ]
    for mode in modes:
        if mode != "single":
            for names in [tuple(corpora)] if mode == "mixture" else [(corpus,) for corpus in corpora]:
                cases.append(Case(mode, names, arguments.seq_lens[0], True, arguments.workers[-1]))
    return cases


@functools.cache
def read_corpus(name: str) -> list[str]:
    """Python's library, a file a row or a paragraph a row."""
    texts = read_stdlib_texts()
    return [part for text in texts for part in text.split("\n\n") if part] if name == "paragraphs" else texts


def save_corpus(name: str, mode: str, folder: Path, tokenizer) -> Path:
    """A corpus as a folder that training reads in the given mode."""
    import datasets

    path = folder / (f"{name}-{mode}" if mode in ("tokenized", "streaming") else name)
    if not path.exists():
        texts = read_corpus(name)
        rows = {"text": texts}
        if mode == "tokenized":
            encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            rows = {"input_ids": [[*encoding.ids, tokenizer.eos_token_id] for encoding in encodings]}
        datasets.disable_progress_bars()
        dataset = datasets.Dataset.from_dict(rows)
        if mode == "streaming":
            path.mkdir()
            for shard in range(NUM_SHARDS):
                dataset.shard(NUM_SHARDS, shard).to_parquet(path / f"{shard}.parquet")
        else:
            dataset.save_to_disk(path)
    return path


def open_loader(datasets: list[Path], tokenizer, **training) -> DataLoader:
    """The loader of a job on one rank, a sequence a step."""
    config = JobConfig()
    values = {"dataset": list(map(str, datasets)), "batch_size": 1, "num_streams": NUM_STREAMS, "context_len": 4096}
    for name, value in {**values, **training}.items():
        setattr(config.training, name, value)
    return build_dataloader(config, tokenizer)


def measure_case(case: Case, folder: Path, tokenizer, arguments: argparse.Namespace) -> dict:
    """Alternate the pipeline and the tokenizer alone; returns the case with the medians."""
    options = {"seq_len": case.seq_len, "varlen": case.varlen, "num_workers": case.num_workers}
    options |= {"shuffle": "block"} if case.mode == "block" else {}
    options |= {"streaming": True} if case.mode == "streaming" else {}
    paths = [save_corpus(name, case.mode, folder, tokenizer) for name in case.corpora]
    loader = open_loader(paths, tokenizer, **options)
    num_steps = max(1, arguments.tokens // case.seq_len)
    pairs = []
    try:
        run_steps(loader, max(NUM_STREAMS, num_steps))
        for _ in range(arguments.pairs):
            run_steps(loader, num_prefetched(loader))  # made while the tokenizer was measured
            before = loader.state_dict()["streams"]
            pipeline = measure_pipeline(loader, num_steps)
            texts = used_texts(case, loader, before, loader.state_dict()["streams"])
            time.sleep(SETTLE_SECONDS)
            pairs.append((pipeline, measure_tokenizer(texts, tokenizer, case.num_workers)))
    finally:
        loader.close()
    return asdict(case) | summarise(pairs)


def summarise(pairs: list[tuple[Stretch, Stretch]]) -> dict[str, float]:
    """Medians over the pairs by the clock, and all stretches taken together.

    A long document counts where it is tokenised, its tokens where they are delivered: single stretches scatter by it.
    """
    pipeline, tokenizer = (add_up(stretches) for stretches in zip(*pairs, strict=True))
    return {
        "pipeline": statistics.median(one.speed for one, _ in pairs),
        "tokenizer": statistics.median(other.speed for _, other in pairs),
        "share": statistics.median(one.speed / other.speed for one, other in pairs),
        "total_share": pipeline.speed / tokenizer.speed,
        "pipeline_cpu": pipeline.cpu_cost,
        "tokenizer_cpu": tokenizer.cpu_cost,
        "cpu_share": tokenizer.cpu_cost / pipeline.cpu_cost,
    }


def add_up(stretches: Iterable[Stretch]) -> Stretch:
    """One stretch of all, behind one another."""
    return Stretch(*map(sum, zip(*(astuple(stretch) for stretch in stretches), strict=True)))


def num_prefetched(loader: DataLoader) -> int:
    """Sequences at most that are ready, or their documents tokenised, once the loader was left alone."""
    training = loader.training
    num_makers, num_tokens = max(1, training.num_workers), (BATCHES_AHEAD + 1) * TOKENS_PER_BATCH
    in_queues = training.num_workers * (training.prefetch_factor * loader.batch_size + 1)
    return in_queues + num_makers * -(-num_tokens // training.seq_len)


def run_steps(loader: DataLoader, num_steps: int) -> int:
    """Take steps; returns the number of their tokens."""
    return sum(batch.input_ids.numel() for _ in range(num_steps) for batch in loader.next_step())


def measure_pipeline(loader: DataLoader, num_steps: int) -> Stretch:
    workers = [worker.pid for worker in loader.pool.workers] or [os.getpid()]
    cpu_start, start = cpu_seconds(workers), time.perf_counter()
    num_tokens = run_steps(loader, num_steps)
    return Stretch(num_tokens, time.perf_counter() - start, cpu_seconds(workers) - cpu_start)


def cpu_seconds(processes: list[int]) -> float:
    """Processor time that running processes have used, user and system, all threads; Linux only."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime and stime, fields 14 and 15 counted from 1
    return ticks / os.sysconf("SC_CLK_TCK")


def used_texts(
    case: Case, loader: DataLoader, before: dict[str, list[int]], after: dict[str, list[int]]
) -> list[list[str]]:
    """For each maker, the texts of the documents that its streams finished between two states, in the order of use.

    Streams take turns, so document k of every stream comes before document k + 1 of any. A streamed source's cursors do
    not tell its rows: as many are drawn at random instead.
    """
    num_makers = max(1, loader.training.num_workers)
    turns: list[list[tuple[int, int, int, int]]] = [[] for _ in range(num_makers)]
    for place, stream in enumerate(loader.own_streams):
        start, stop = (StreamState.from_list(state[str(stream)]) for state in (before, after))
        for source, order in enumerate(loader.plan.orders):
            first, count = start.cursors[source], stop.cursors[source] - start.cursors[source]
            if case.mode == "streaming":
                order = RowOrder(len(read_corpus(case.corpora[source])), 0, source, "global", NUM_STREAMS)
                first, count = start.draws, stop.draws - start.draws
            rows = order.rows(np.array(order.positions(stream, first, count), dtype=np.int64)).tolist()
            turns[place % num_makers] += [(turn, stream, source, row) for turn, row in enumerate(rows)]
    return [[read_corpus(case.corpora[source])[row] for *_, source, row in sorted(maker)] for maker in turns]


def measure_tokenizer(texts: list[list[str]], tokenizer, num_workers: int) -> Stretch:
    """The tokenizer alone, in this process or in one for each list of ``texts``, all at once."""
    if not num_workers:
        return tokenize_all(texts[0], tokenizer)
    context = multiprocessing.get_context("fork")
    queue, gate = context.SimpleQueue(), context.Barrier(len(texts))

    def work(own_texts: list[str]) -> None:
        gate.wait()
        queue.put(tokenize_all(own_texts, tokenizer))

    processes = [context.Process(target=work, args=(own_texts,)) for own_texts in texts]
    for process in processes:
        process.start()
    stretches = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return Stretch(
        sum(stretch.num_tokens for stretch in stretches),
        # Speeds add up, as the pipeline's workers' do: all of them are busy for the whole of its stretch.
        sum(stretch.num_tokens for stretch in stretches) / sum(stretch.speed for stretch in stretches),
        sum(stretch.cpu_seconds for stretch in stretches),
    )


def tokenize_all(texts: list[str], tokenizer) -> Stretch:
    """Tokens are counted with one EOS a text, which the pipeline delivers too; it costs the tokenizer nothing."""
    backend = tokenizer.backend_tokenizer
    num_tokens, cpu_start, start = 0, time.process_time(), time.perf_counter()
    for first in range(0, len(texts), ROWS_PER_BATCH):
        encodings = backend.encode_batch_fast(texts[first : first + ROWS_PER_BATCH], add_special_tokens=False)
        num_tokens += sum(map(len, encodings)) + len(encodings)
    return Stretch(num_tokens, time.perf_counter() - start, time.process_time() - cpu_start)


def measure_starts(folder: Path, tokenizer, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds from nothing to the first batch, at an early and at a late step of a large source; medians of three."""
    dataset = save_rows(arguments.start_rows, folder / "rows")
    options = {"seq_len": 2048, "varlen": True, "num_workers": 1, "num_streams": 960}
    loader = open_loader([dataset], tokenizer, **options)
    run_steps(loader, FIRST_STEP)
    states = {FIRST_STEP: merge_state_dicts([loader.state_dict()])}
    loader.close()
    states[LATE_STEP] = move_on(states[FIRST_STEP], LATE_STEP // FIRST_STEP)
    seconds: dict[int, list[float]] = {step: [] for step in states}
    for step in list(states) * 3:
        start = time.perf_counter()
        loader = open_loader([dataset], tokenizer, **options)
        loader.load_state_dict(states[step])
        run_steps(loader, 1)
        seconds[step].append(time.perf_counter() - start)
        loader.close()
    return {str(step): statistics.median(times) for step, times in seconds.items()}


def move_on(state: dict, factor: int) -> dict:
    """The state as it is, about, after ``factor`` times as many steps: every stream has had its share of the rows."""
    num_documents = sum(StreamState.from_list(stream).cursors[0] for stream in state["streams"]) or 1
    cursor = num_documents * factor // len(state["streams"])
    streams = [StreamState([cursor], draws=cursor).to_list() for _ in state["streams"]]
    num_sequences = state["num_sequences"] * factor
    return state | {
        "streams": streams,
        "num_sequences": num_sequences,
        "turn": num_sequences % state["num_streams"],
    }


def save_rows(num_rows: int, path: Path) -> Path:
    """Short texts, one a row, in Arrow record batches as ``datasets`` writes them."""
    import datasets
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = pa.schema({"text": pa.string()})
    file = path.with_suffix(".arrow")
    with pa.ipc.new_stream(str(file), schema) as writer:
        for start in range(0, num_rows, ROWS_PER_BATCH):
            numbers = pa.array(range(start, min(start + ROWS_PER_BATCH, num_rows))).cast(pa.string())
            texts = pc.binary_join_element_wise("row", numbers, "of many short ones", " ")
            writer.write_batch(pa.record_batch([texts], schema))
    datasets.disable_progress_bars()
    datasets.Dataset.from_file(str(file)).save_to_disk(path)
    file.unlink()
    return path


def format_table(results: list[dict]) -> str:
    """The figures of ``measure_case`` as a Markdown table; shares are the pipeline's of the tokenizer alone."""
    columns: dict[str, Callable[[dict], str]] = {
        "mode": lambda row: row["mode"],
        "rows": lambda row: " + ".join(row["corpora"]),
        "seq_len": lambda row: f"{row['seq_len']:,}",
        "varlen": lambda row: "on" if row["varlen"] else "off",
        "workers": lambda row: str(row["num_workers"]),
        "pipeline, tok/s": lambda row: f"{row['pipeline']:,.0f}",
        "tokenizer alone, tok/s": lambda row: f"{row['tokenizer']:,.0f}",
        "share, median": lambda row: f"{row['share']:.1%}",
        "share, all pairs": lambda row: f"{row['total_share']:.1%}",
        "pipeline, CPU ns/tok": lambda row: f"{row['pipeline_cpu']:,.0f}",
        "tokenizer alone, CPU ns/tok": lambda row: f"{row['tokenizer_cpu']:,.0f}",
        "share by CPU": lambda row: f"{row['cpu_share']:.1%}",
    }
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[show(row) for show in columns.values()] for row in results]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_starts(start: dict[str, float]) -> str:
    """The figures of ``measure_starts`` as a Markdown table."""
    lines = ["", "| resume at step | seconds to the first batch |", "|---|---|"]
    return "\n".join([*lines, *(f"| {int(step):,} | {seconds:.2f} |" for step, seconds in start.items())])


if __name__ == "__main__":
    sys.exit(main())
