"""The production pages: their commands were run, or there is a reason why not; the glossary is consistent."""

from __future__ import annotations

import json
import re

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT

PAGES = sorted(ROOT.glob("docs/en/production/*.md"))
# Commands on a page that docs/generate/recorded/seen.py does not have word for word.
NOT_RUN = {
    "pstar plan": "the name of the program; docs/generate/tables/tables.py runs it for the engine's page",
    "bash chapters/02_ddp/train.sh --train-data mine/text/train --valid-data mine/text/valid --vocab mine/vocab.txt "
    "--output-dir runs/mine": "seen as `train`, with flags that make it short",
    "bash chapters/00_single/train.sh --init-from mine/exported --train-data mine/text/train --valid-data mine/text/valid "
    "--output-dir runs/begun": "seen as `init_from`, with flags that make it short",
    "bash scripts/python.sh -m gpt2_chinese.evaluate --model runs/mine --choices clue/chid/dev.json clue/c3/c3-d-dev.json "
    "clue/cmnli/dev.json":
        "CLUE's files are not here; tests/gpt2_chinese/evaluate reads files of their forms",
    "sbatch scripts/train.sbatch 02_ddp": "tests/cluster/test_slurm.py runs it, shortened, on a Slurm of two nodes",
    'sbatch scripts/pipeline.sbatch 02_ddp runs/mine wiki_zh.zip novels/ --max-steps 2000 --comment "wiki and novels"':
        "tests/cluster/test_requeue.py runs it, shortened, on a Slurm of two nodes",
    "bash scripts/slurm_on_one_machine.sh up": "tests/cluster/test_slurm.py runs it",
    "SLURM_CONF=/run/slurm_on_one_machine/slurm.conf sbatch scripts/train.sbatch 02_ddp":
        "tests/cluster/test_slurm.py runs it, shortened, with a folder of its own",
    "bash scripts/slurm_on_one_machine.sh down": "tests/cluster/test_slurm.py runs it",
    "bash scripts/slurm_on_one_machine.sh up accounting": "tests/cluster/test_requeue.py runs it",
    "export SLURM_CONF=/run/slurm_on_one_machine/slurm.conf": "for the commands after it",
    "sacctmgr --immediate add account class GrpTRES=cpu=16": "tests/cluster/test_requeue.py runs it without a limit",
    "sacctmgr --immediate add user bea account=class MaxJobs=1 MaxSubmitJobs=3 GrpTRESMins=cpu=600":
        "tests/cluster/test_requeue.py runs it for root, with other limits",
    "sacct --allusers --allocations --duplicates": "tests/cluster/test_requeue.py runs sacct with other columns",
    "sshare --all": "it shows the shares of a Slurm with accounts",
    'sbatch --output="$HOME/%x-%j.log" scripts/train.sbatch 02_ddp --output-dir "$HOME/runs/02_ddp"': "it needs Slurm",
    "sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 scripts/train.sbatch 07_patrickstar --model-config small":
        "it needs 32 GPUs",
    "GLOO_SOCKET_IFNAME=eth0 bash scripts/torchrun.sh --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d "
    "--rdzv-endpoint=node1:29500 --rdzv-id=gpt2 chapters/02_ddp/train.py":
        "tests/cluster/test_torchrun.py takes it from the page and runs it, shortened, on two nodes",
    "GLOO_SOCKET_IFNAME=eth0 bash scripts/torchrun.sh --nnodes=1:2 --nproc-per-node=4 --max-restarts=10 --rdzv-backend=c10d "
    "--rdzv-endpoint=node1:29500 --rdzv-id=gpt2 --rdzv-conf=last_call_timeout=5 chapters/02_ddp/train.py":
        "tests/cluster/test_elastic.py takes it from the page and runs it, shortened, on two nodes",
    "bash benchmarks/two_levels.sh": "minutes; tests/cluster/test_benchmark.py runs it with --quick",
    'pip install -e ".[parquet]"': "it changes the environment; tests/scripts/test_environment.py holds the extra",
}  # fmt: skip


@pytest.fixture(scope="module")
def docs():
    """The modules seen.py, terms.py and overview.py of docs/generate/."""
    from docs.generate.pictures import overview
    from docs.generate.recorded import seen
    from docs.generate.tables import terms

    return {"seen": seen, "terms": terms, "overview": overview}


def test_every_command_of_the_pages_was_run_or_has_a_reason(docs) -> None:
    ran = {one.command for one in docs["seen"].SEEN.values()}
    found = {command.split("#")[0].strip() for page in PAGES for command in pages.commands(page.read_text())}
    assert found and found <= ran | set(NOT_RUN), found - ran - set(NOT_RUN)
    assert set(NOT_RUN) <= found, "a reason for a command that no page has"


def test_the_stored_outputs_are_of_the_listed_commands(docs) -> None:
    stored = json.loads(docs["seen"].STORE.read_text(encoding="utf-8"))["commands"]
    assert {name: (one.command, one.status) for name, one in docs["seen"].SEEN.items()} == {
        name: (one["command"], one["status"]) for name, one in stored.items()}  # fmt: skip
    assert all(one["said"] for one in stored.values())
    assert not pages.beyond_the_repository(docs["seen"].STORE.read_text())
    with pytest.raises(SystemExit, match="was never run"):
        docs["seen"].seen("none")


def test_the_commands_that_were_seen_still_exist(docs) -> None:
    for one in docs["seen"].SEEN.values():
        words = re.sub(r"--model-config \S+", "", one.command)
        assert not pages.wrong_with_command(words), one.command


def test_each_term_has_one_translation(docs) -> None:
    terms = docs["terms"].terms()
    assert len(terms) >= 60
    for key in ("en", "zh"):
        assert len({term[key] for term in terms}) == len(terms)
    assert len({docs["terms"].anchor(term) for term in terms}) == len(terms)
    for term in terms:
        assert set(term) == {"en", "zh", "says_en", "says_zh", "avoid"} and all(term[key] for key in term if key != "avoid")
        assert term["says_en"].endswith(".") and term["says_zh"].endswith("。"), term["en"]


def test_no_term_is_made_of_a_discouraged_word(docs) -> None:
    for term in docs["terms"].terms():
        assert not docs["terms"].discouraged(term["zh"] + term["says_zh"]), term["en"]


def test_another_word_is_found(docs) -> None:
    discouraged = docs["terms"].discouraged
    assert discouraged("这里做全规约。")[0].startswith("规约: the glossary says 归约 for reduce")
    assert not discouraged("这里做全归约。") and not discouraged("```text\n全规约\n```\n")


def test_the_picture_has_every_chapter_and_fits(docs) -> None:
    overview = docs["overview"]
    chapters = [path.parent.name[:2] for path in sorted(ROOT.glob("chapters/*/train.py"))]
    assert [plan[0] for plan in overview.PLANS] == chapters
    for _, _, _, ranks in overview.PLANS:
        assert all(len(rank.rows) == 4 and all(len(row) == 4 for row in rank.rows) for rank in ranks)
    assert overview.picture(str).count("<text") > 30
