"""400 broken configurations of pstar: a PstarError of one line, or success; no traceback, no hang."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from pstar.cli import main
from pstar.config import load_config, reference
from pstar.errors import ConfigError, PstarError
from tests.mutations import break_bytes, break_json, in_time, judge


def good() -> dict:
    """Every key with its default, as a configuration file holds it."""
    whole: dict = {}
    for name, default, _ in reference():
        *sections, key = name.split(".")
        place = whole
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = default
    return json.loads(json.dumps({key: value for key, value in whole.items() if value is not None}))


def test_configurations(tmp_path: Path) -> None:
    config = {key: value for key, value in good().items() if value is not None}
    plain = json.dumps(config, indent=1).encode()

    def one(rng: random.Random) -> None:
        file = tmp_path / "config.json"
        file.write_bytes(break_bytes(rng, plain) if rng.random() < 0.5 else break_json(rng, config))
        try:
            found = load_config(str(file))
        except PstarError as error:
            assert "\n" not in str(error) and str(file) in str(error), error
            raise
        for value in (found.optimizer.params.lr, found.gradient_clipping, found.fp16.min_loss_scale, found.simulated_link):
            assert math.isfinite(value)

    ended = judge(400, one, (PstarError,))
    assert min(ended.values()) >= 20, ended


@pytest.mark.parametrize("name", ["fifo", "/dev/zero", "folder", "none", "nul\0", "x" * 300, "loop"])
def test_a_configuration_that_is_no_file_is_refused(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    import os

    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with in_time(), pytest.raises(ConfigError, match="cannot be read"):
        load_config(str(tmp_path / name))
    with in_time():
        assert main(["config", str(tmp_path / name)]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
