"""The steps of Dockerfile, taken in a new Debian by its ordinary user. `python -m tests.fresh` also runs the tests there.

The root has no compiler and no /etc/hosts: in it `localhost` is unknown.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fresh.root import CommandFailed, give, new_root, reason_why_not
from tests.fresh.steps import recipe
from tests.tally import STRICT_VARIABLE


@pytest.mark.deep
@pytest.mark.parametrize("suite", ["bookworm", "trixie"])  # Python 3.11, as in CI, and 3.13
def test_a_new_debian_trains_after_the_steps_of_dockerfile(suite: str, tmp_path: Path) -> None:
    if why := reason_why_not():
        if os.environ.get(STRICT_VARIABLE) and "the kernel" not in why:
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    with new_root(suite, tmp_path / "log") as root:
        for step in recipe().packages:
            root.run(step, user="root")
        root.run("rm -f /etc/hosts", user="root")  # a package of trixie makes one
        give(root)
        with pytest.raises(CommandFailed):
            root.run("getent hosts localhost")
        for step in [step for step in recipe().steps if step not in recipe().packages]:
            root.run(step, folder="course")
        said = root.run(f"{recipe().program} --max-steps 2 --valid-data data/valid/comments.json", folder="course")[1]
        two_ranks = "bash scripts/torchrun.sh --standalone --nproc-per-node 2 docs/programs/hello.py"
        by_hand = root.run(two_ranks, folder="course")[1]
    assert "setup: making" not in said and "= 2 ranks x" in said and "Done." in said, said
    assert "rank 0" in by_hand and "rank 1" in by_hand, by_hand
