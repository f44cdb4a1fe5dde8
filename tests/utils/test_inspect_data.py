"""What ``inspect_data`` prints; that it is what training sees is tests/runs/test_data_hash.py's business."""

import json
import subprocess
import sys

import pytest

from flame.utils.inspect_data import main

JOB = [
    "--job.config_file=configs/debug.toml",
    "--training.seq_len=32",
    "--training.context_len=12",
    "--training.num_workers=0",
    "--training.num_streams=60",
]


@pytest.fixture
def corpus(tmp_path) -> str:
    """Rows of 1 to 29 words."""
    lines = [json.dumps({"text": " ".join(f"w{row}x{word}" for word in range(row % 30))}) for row in range(130)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return f"--training.dataset={tmp_path / 'rows.jsonl'}"


def with_job(arguments: tuple[str, ...]) -> list[str]:
    """``arguments`` and what ``JOB`` says besides: an option may not be given twice."""
    given = {argument.partition("=")[0] for argument in arguments}
    return [*arguments, *(option for option in JOB if option.partition("=")[0] not in given)]


def inspect(capsys, *arguments: str) -> list[str]:
    assert main(with_job(arguments)) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "options",
    [
        ["--training.varlen"],
        ["--training.no-varlen"],
        ["--training.streaming"],
        ["--training.dataset=builtin:stdlib", "--training.data_probs=0.5,0.5"],
    ],
    ids=["varlen", "plain", "streaming", "mixture"],
)
def test_hashes_do_not_depend_on_the_layout(corpus, capsys, options):
    common = (corpus, *options, "--steps=5", "--hash")
    hashes = inspect(capsys, *common, "--training.batch_size=24")
    assert len(set(hashes)) == 5 and all(len(value) == 64 for value in hashes)
    for dp_degree, batch_size, accumulation, workers in [(1, 2, 12, 3), (2, 12, 1, 1), (3, 4, 2, 0), (4, 2, 3, 0)]:
        layout = [
            f"--dp_degree={dp_degree}",
            f"--training.batch_size={batch_size}",
            f"--training.gradient_accumulation_steps={accumulation}",
            f"--training.num_workers={workers}",
        ]
        assert inspect(capsys, *common, *layout) == hashes, layout


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_agree_where_max_epochs_ends_the_data(corpus, capsys, workers):
    common = (corpus, "--steps=1000", "--hash", "--training.max_epochs=2")
    hashes = inspect(capsys, *common, "--training.batch_size=12")
    assert 10 < len(hashes) < 1000
    several = ["--dp_degree=3", "--training.batch_size=4", f"--training.num_workers={workers}"]
    assert inspect(capsys, *common, *several) == hashes


@pytest.mark.parametrize("varlen", ["--training.varlen", "--training.no-varlen"])
def test_documents_boundaries_and_masked_targets_show(tmp_path, capsys, varlen):
    (tmp_path / "rows.txt").write_text("aa\n" * 300)
    lines = inspect(capsys, f"--training.dataset={tmp_path / 'rows.txt'}", varlen, "--training.batch_size=2")
    assert lines[0].startswith("[masked]")
    assert lines[1].startswith("step 1: sequences 0 to 1; epochs after it: ")
    heads = [line for line in lines if line.startswith("  sequence")]
    assert len(heads) == 2 and "(rank 0): tokens 32, documents " in heads[0]
    pieces = lines[3 : lines.index(heads[1])]
    assert pieces[0].split()[:2] == ["0-", "2"] and pieces[0].endswith(
        'ends                    "aa<|endoftext|>"[masked]'
    )
    assert heads[0].endswith(f"documents {len(pieces)}, masked targets {len(pieces)}")


def test_long_documents_are_shortened_and_their_pieces_go_on(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "word " * 1000}))
    lines = inspect(capsys, f"--training.dataset={tmp_path / 'rows.jsonl'}", "--training.varlen", "--max_chars=20")
    assert lines[2].endswith("tokens 32, documents 1, masked targets 0")
    assert [line.split('"')[0].split()[-2:] for line in lines[3:]] == [
        ["goes", "on"],
        ["goes", "on"],
        ["goes", "on"],
    ]
    assert ["continues," in line for line in lines[3:]] == [False, True, True]
    assert all(" ... " in line and len(line) < 80 for line in lines[3:])


def test_padding_is_no_document(tmp_path, capsys):
    (tmp_path / "rows.txt").write_text("aa\n" * 3)
    for varlen in ("--training.varlen", "--training.no-varlen"):
        options = ("--training.max_epochs=1", "--training.num_streams=1", "--training.batch_size=2", varlen)
        lines = inspect(capsys, f"--training.dataset={tmp_path / 'rows.txt'}", *options)
        assert [line.partition("documents ")[2] for line in lines if "sequence " in line] == [
            "3, masked targets 29",
            "0, masked targets 32",
        ]
        assert sum("padding" in line for line in lines) >= 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--steps=0"], "--steps 0: must be at least 1"),
        (["--dp_degree=7"], "7 data-parallel ranks do not divide"),
        (["--training.dataset=./nowhere"], "--training.dataset ./nowhere: there is no such file or folder"),
        (["--training.sqe_len=3"], "training.seq_len"),
        (["--load_step=3", "--job.dump_folder=nowhere"], "no such step"),
        (["--load_step=-1", "--job.dump_folder=nowhere"], "there is no checkpoint"),
        (["--training.batch_size=auto"], "training.batch_size = auto: a run decides it"),
    ],
)
def test_faults_are_readable(corpus, capsys, arguments, part):
    dataset = [] if any("dataset" in word for word in arguments) else [corpus]
    assert main(with_job((*dataset, *arguments))) == 2
    assert part in capsys.readouterr().err.splitlines()[-1]


def test_a_bad_row_on_one_of_several_ranks_ends_them_all(tmp_path, capsys):
    rows = [{"text": "a b c"}] * 200 + [{"text": None}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ("--dp_degree=2", "--training.max_epochs=1", "--steps=1000", "--hash")
    assert main(with_job((f"--training.dataset={tmp_path / 'rows.jsonl'}", *options))) == 2
    assert "row 200" in capsys.readouterr().err


@pytest.mark.parametrize(("stops_it", "code"), [("BrokenPipeError", 0), ("KeyboardInterrupt", 130)])
def test_who_has_seen_enough_is_shown_no_traceback(corpus, stops_it, code):
    script = (
        "import sys\nfrom unittest import mock\nfrom flame.utils import inspect_data\n"
        f"with mock.patch.object(inspect_data, 'describe_step', side_effect={stops_it}):\n"
        "    sys.exit(inspect_data.main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", script, *with_job((corpus,))], capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_help_is_fast_and_needs_no_torch():
    for command in ("inspect_data", "preprocess"):
        code = f"import sys; from flame.utils.{command} import main\ntry: main(['-h'])\nexcept SystemExit: pass\n"
        code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
