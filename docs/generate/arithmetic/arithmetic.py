"""The arithmetic of a chapter's page: memory and traffic, worked for tiny and for 124M with formulas.py.

A chapter is a list of rows. The numbers are the course's defaults: tiny in fp32 as on a CPU, small in bf16 as on a GPU.
Each preset has its default global batch and sequence length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from docs.generate.arithmetic import formulas
from docs.generate.recorded.measured import REPO
from docs.generate.tables.tables import table

Words = Callable[[str], str]

RANKS = (1, 2, 4, 8)
MICROS = 8  # of chapter 05: enough for pipelines of eight ranks
GPT2_VOCABULARY = 50257  # makes small the 124M of the papers; the shipped vocabulary is smaller
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Row:
    """A strategy as a chapter runs it.

    Attributes:
        label: in English; zh.json has the Chinese.
        strategy: one of formulas.STRATEGIES.
        precision: None means fp32 for tiny and 16 bit for small.
        half: which 16-bit precision, for a strategy that has no bf16.
        rank: 0, -1 for the last, or None for the rank that holds or sends the most.
        changes: keys that the row changes in the job.
    """

    label: str
    strategy: str
    precision: str | None = None
    rank: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    half: str = "O1"


def _split(label: str, strategy: str) -> Row:
    return Row(label, strategy, changes={"micro_batches": MICROS})


CHAPTERS: dict[str, list[Row]] = {
    "00_single": [Row("one process", "single"), Row("with checkpointing", "single", changes={"checkpointing": True})],
    "01_parameter_server": [Row("rank 0, the server", "server", rank=0), Row("a worker", "server", rank=-1)],
    "02_ddp": [Row("every rank", "ddp"), Row("rank 0 of chapter 01", "server", rank=0)],
    "03_horovod": [Row("every rank", "horovod"), Row("every rank of chapter 02", "ddp")],
    "04_apex": [Row("O0", "ddp", "fp32"), *(Row(level, "ddp", level) for level in ("O1", "O2", "O3"))],
    "05_model_parallel": [
        _split("naive", "layer_split"), _split("GPipe", "gpipe"), _split("1F1B", "1f1b"),
        _split("interleaved, v = 2", "interleaved"), _split("tensor parallel", "tensor"),
    ],
    "06_zero": [
        Row("stage 0", "ddp", half="O2"), Row("stage 1", "zero1"), Row("stage 2", "zero2"), Row("stage 3", "zero3"),
        Row("stage 2, states offloaded", "zero2_offload"), Row("stage 3, all offloaded", "zero3_offload"),
    ],
    "07_patrickstar": [
        *(Row(f"near budget {share} %", "pstar", changes={"near_percent": share}) for share in (100, 50, 25)),
        Row("ZeRO stage 3, chapter 06", "zero3"),
    ],
}  # fmt: skip


def job_of(row: Row, size: str, ranks: int) -> formulas.Job:
    """A row at a size and a number of ranks."""
    from gpt2_chinese.model.config import PRESETS, RUN_DEFAULTS
    from gpt2_chinese.vocabulary.profiles import vocabulary_size

    config, run = PRESETS[size], RUN_DEFAULTS[size]
    vocabulary = vocabulary_size(REPO / "cache/vocab.txt") if size == "tiny" else GPT2_VOCABULARY
    choices = formulas.precisions_of(row.strategy)
    precision = row.precision or ("fp32" if size == "tiny" else "bf16" if "bf16" in choices else row.half)
    return {
        "n_layer": config.n_layer, "n_embd": config.n_embd, "n_head": config.n_head, "n_positions": config.n_positions,
        "vocab_size": vocabulary, "strategy": row.strategy, "precision": precision, "ranks": ranks,
        "batch": run.batch_size, "seq_len": run.seq_len, "micro_batches": 1, "checkpointing": False, "virtual_stages": 2,
        "near_percent": 100, **row.changes,
    }  # fmt: skip


def _of_rank(row: Row, job: formulas.Job, what: Callable[..., formulas.Bytes], size: Callable[..., int]) -> formulas.Bytes:
    """`what` of the row's rank. If the row names no rank, the largest one by `size`."""
    ranks = range(job["ranks"]) if row.rank is None else [row.rank % job["ranks"]]
    return max((what(job, rank) for rank in ranks), key=size)


def bytes_text(num_bytes: int) -> str:
    """Three digits, in MiB below 1 GiB, else in GiB; "0" for 0."""
    if num_bytes == 0:
        return "0"
    value, unit = (num_bytes / MIB, "MiB") if num_bytes < GIB else (num_bytes / GIB, "GiB")
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def chapter(words: Words, name: str) -> str:
    """The fragment for a chapter's page.

    Raises:
        SystemExit: the chapter has no rows.
    """
    if name not in CHAPTERS:
        raise SystemExit(f"error: docs/generate/arithmetic/arithmetic.py has no rows for {name}")
    rows = CHAPTERS[name]
    parts = [costs(words, rows)]
    for size in ("tiny", "small"):
        parts += [heading(words, rows[0], size, name), by_kind(words, rows, size, name), by_ranks(words, rows, size, name)]
        if name != "00_single":
            parts.append(sent(words, rows, size))
    return "\n".join(part for part in parts if part)


def costs(words: Words, rows: list[Row]) -> str:
    """Bytes per parameter by kind, before any division by the number of ranks."""
    found: dict[str, list[object]] = {}
    for size in ("tiny", "small"):
        for row in rows:
            job = job_of(row, size, 1)
            each = formulas.parameter_costs(row.strategy, job["precision"])
            label = "ZeRO, " if row.strategy in formulas.ZERO else "pstar, " if row.strategy == "pstar" else ""
            names = {"O1": "autocast (O1)", "fp32": "fp32"}
            label = ("" if job["precision"] == "fp32" else label) + names.get(job["precision"], job["precision"])
            found[label] = [f"`{label}`", *each.values(), f"**{sum(each.values())}**"]
    head = [words("bytes a parameter"), *(_dot(words, kind, colour) for kind, colour in (
        ("parameters", "parameters"), ("gradients", "gradients"), ("masters", "optimizer"), ("moments", "optimizer"))),
        words("in all")]  # fmt: skip
    return table(head, found.values(), right=5)


def heading(words: Words, row: Row, size: str, name: str) -> str:
    """One line: the model and the run."""
    job = job_of(row, size, 1)
    precision = words("fp32") if job["precision"] == "fp32" else words("16 bit")
    if name == "04_apex":
        precision = words("precision as the row says")
    said = words("**{size}**: {params} parameters, {precision}, global batch {batch} sequences of {length} tokens")
    said = said.format(size=size if size == "tiny" else "small, 124M", params=f"{formulas.num_parameters(job):,}",
                       precision=precision, batch=job["batch"], length=job["seq_len"])  # fmt: skip
    if any(row.changes.get("micro_batches") for row in CHAPTERS[name]):
        said += words(", {micros} micro-batches; of the fullest rank").format(micros=MICROS)
    return said + words(".") + "\n"


def by_kind(words: Words, rows: list[Row], size: str, name: str) -> str:
    """Bytes that a rank holds by kind, at two ranks, the chapters' default."""
    ranks = 1 if name == "00_single" else 2
    found, on_host = [], False
    for row in rows:
        job = job_of(row, size, ranks)
        one = _of_rank(row, job, formulas.memory, formulas.device_bytes)
        host = formulas.host_bytes(one)
        on_host = on_host or host > 0
        found.append([words(row.label), *(bytes_text(one[kind]) for kind in formulas.KINDS),
                      f"**{bytes_text(formulas.device_bytes(one))}**", bytes_text(host)])  # fmt: skip
    names = {"optimizer": "optimizer states"}
    first = words("by kind, p = {ranks}").format(ranks=ranks)
    kinds = [_dot(words, names.get(kind, kind), kind) for kind in formulas.KINDS]
    head = [first, *kinds, words("in all"), words("on the host")]
    if not on_host:
        head, found = head[:-1], [cells[:-1] for cells in found]
    return table(head, found, right=len(head) - 1)


def by_ranks(words: Words, rows: list[Row], size: str, name: str) -> str:
    """Bytes on a rank's device in total, at 1 to 8 ranks; a dash where the course's program refuses the job."""
    if name == "00_single":
        return ""
    found = []
    for row in rows:
        cells = [words(row.label)]
        for ranks in RANKS:
            job = job_of(row, size, ranks)
            refused = formulas.refusal(job)
            one = None if refused else _of_rank(row, job, formulas.memory, formulas.device_bytes)
            cells.append("—" if one is None else bytes_text(formulas.device_bytes(one)))
        found.append(cells)
    return table([words("in all, a rank"), *(f"p = {ranks}" for ranks in RANKS)], found, right=len(RANKS))


def sent(words: Words, rows: list[Row], size: str) -> str:
    """Bytes that a rank sends and receives in a step, by number of ranks."""
    found = []
    for row in rows:
        cells = [words(row.label)]
        for ranks in RANKS[1:]:
            job = job_of(row, size, ranks)
            if formulas.refusal(job):
                cells.append("—")
                continue
            one = _of_rank(row, job, formulas.traffic, lambda it: formulas.sent_bytes(it) + formulas.received_bytes(it))
            out, back = bytes_text(formulas.sent_bytes(one)), bytes_text(formulas.received_bytes(one))
            cells.append(out if out == back else f"{out} ↑ {back} ↓")
        found.append(cells)
    return table([words("sent, and as much received, a rank and step"), *(f"p = {ranks}" for ranks in RANKS[1:])], found,
                 right=len(RANKS) - 1)  # fmt: skip


def _dot(words: Words, name: str, colour: str) -> str:
    """A heading with a dot in the kind's colour before it (assets/tools/tools.css)."""
    return f'<span class="kind kind-{colour}"></span>{words(name)}'
