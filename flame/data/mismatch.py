"""What sets a run's data apart from its checkpoint's, in the words of the options that the user gave."""

from __future__ import annotations

from collections.abc import Iterator

from flame.data.shard_order import ShardOrder, count_lanes
from flame.data.streams import DataPlan
from flame.errors import UserError

START_ANEW = "start the data anew with --checkpoint.exclude_from_loading dataloader"

OPTIONS = {
    "tokenizer": {"opening": "add_bos (ids that open a document)", "closing": "add_eos (ids that close a document)"},
    "order": {"seed": "seed", "shuffle": "shuffle", "probabilities": "data_probs"},
    "packing": {"seq_len": "seq_len", "context_len": "context_len", "varlen": "varlen"},
}
HEADERS = {
    "sources": "the data is not that of the checkpoint",
    "tokenizer": "documents become other tokens",
    "order": "the same documents come in another order",
    "packing": "the same documents are cut into other sequences",
}


def check_positions(merged: dict, plan: DataPlan, names: list[str]) -> None:
    """Refuse positions that mean nothing in ``plan``, whatever the fingerprint is allowed to differ in.

    Args:
        merged: the checkpoint's data state.
        names: what the user called the plan's sources.

    Raises:
        UserError: another number of streams or datasets, or a dataset that was read in another way.
    """
    if merged["num_streams"] != plan.num_streams:
        raise UserError(
            f"--training.num_streams {plan.num_streams}: the checkpoint's data order has {merged['num_streams']} "
            "streams; give that number"
        )
    sources = merged["fingerprint"]["sources"]
    if len(sources) != len(names):
        raise UserError(
            f"--training.dataset names {len(names)} datasets, the checkpoint's data state is of {len(sources)}; "
            f"give as many, or {START_ANEW}"
        )
    for name, order, saved in zip(names, plan.orders, sources, strict=True):
        is_streamed, was_streamed = isinstance(order, ShardOrder), "shards" in saved
        if is_streamed != was_streamed:
            raise UserError(
                f"--training.streaming: {name} {'is' if is_streamed else 'is not'} streamed now, but was"
                f"{'' if was_streamed else ' not'} up to the checkpoint; a place in a shard and a row number cannot be "
                f"told from each other, so set it as before, or {START_ANEW}"
            )
        if is_streamed and count_lanes(saved["shards"], plan.num_streams) != order.num_lanes:
            raise UserError(
                f"--training.dataset {name}: {saved['shards']} shards in the checkpoint, {order.num_shards} now, which "
                "are dealt to the streams in another way: rows would be doubled and others lost in every epoch; "
                f"restore the shards, or {START_ANEW}"
            )


def check_fingerprint(saved: dict, current: dict, saved_names: list[str], names: list[str]) -> None:
    """Refuse to go on with data, or options that shape it, other than the checkpoint's.

    Args:
        saved, current: what ``plan_fingerprint`` made, of as many sources.
        saved_names, names: what the user called the sources.

    Raises:
        UserError: says what changed, the old and the new.
    """
    differences = {
        "sources": [
            line
            for number in range(len(names))
            for line in _source_differences(
                saved["sources"][number], current["sources"][number], saved_names[number], names[number]
            )
        ],
        "tokenizer": list(_tokenizer_differences(saved["tokenizer"], current["tokenizer"])),
        "order": list(_option_differences("order", saved["order"], current["order"])),
        "packing": list(_option_differences("packing", _given(saved["packing"]), _given(current["packing"]))),
    }
    if not any(differences.values()):
        return
    text = [f"{HEADERS[group]}:\n" + "\n".join(f"  {line}" for line in differences[group]) for group in HEADERS]
    text = [part for group, part in zip(HEADERS, text, strict=True) if differences[group]]
    only_packing = not any(differences[group] for group in HEADERS if group != "packing")
    outcome = "no document is lost or repeated" if only_packing else "documents may then be repeated or left out"
    raise UserError(
        "\n".join(text) + "\nrestore what the checkpoint had, or go on from its position all the same with "
        f"--training.ignore_data_fingerprint ({outcome})"
    )


def _given(packing: dict) -> dict:
    """Without a ``context_len`` that only follows ``seq_len``."""
    follows = packing["context_len"] == packing["seq_len"]
    return {name: value for name, value in packing.items() if name != "context_len" or not follows}


def _option_differences(group: str, saved: dict, current: dict) -> Iterator[str]:
    for name, option in OPTIONS[group].items():
        if name in saved and name in current and saved[name] != current[name]:
            yield f"--training.{option}: {_show(saved[name])} in the checkpoint, {_show(current[name])} now"
        elif name == "context_len" and (name in saved) != (name in current):
            before, now = saved.get(name, saved["seq_len"]), current.get(name, current["seq_len"])
            yield f"--training.{option}: {before} in the checkpoint, {now} now"


def _tokenizer_differences(saved: dict, current: dict) -> Iterator[str]:
    if saved["vocabulary"] != current["vocabulary"]:
        yield "--model.tokenizer_path: another vocabulary, or another way of cutting text, than in the checkpoint"
    yield from _option_differences("tokenizer", saved, current)


def _source_differences(saved: dict, current: dict, saved_name: str, name: str) -> Iterator[str]:
    """One line for each thing that differs; digests only where nothing else says what they tell."""
    if saved == current:
        return
    if saved_name != name:
        yield f"--training.dataset: {saved_name} in the checkpoint, {name} now"
    label = f"--training.dataset {name}"
    if saved["column"] != current["column"]:
        yield f"{label}: column {saved['column']} in the checkpoint, {current['column']} now (--training.text_column)"
    counts = [unit for unit in ("rows", "shards", "bytes") if unit in saved and saved[unit] != current[unit]]
    for unit in counts:
        yield f"{label}: {_show(saved[unit])} {unit} in the checkpoint, {_show(current[unit])} now"
    if counts or saved["column"] != current["column"]:
        return
    if saved.get("names") != current.get("names"):
        yield f"{label}: as many files as in the checkpoint, with other names or in another order"
    elif saved.get("sizes") != current.get("sizes"):
        yield f"{label}: some of its files have another size than in the checkpoint"
    else:
        yield f"{label}: the size is that in the checkpoint, but rows that were compared hold something else"


def _show(value) -> str:
    if value is None:
        return "an unknown number of"
    if isinstance(value, list):
        return ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
