"""The generated parts of the engine's pages: configuration, API, results, and the stepped view of a real profile."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import pstar
from pstar import config
from pstar.profile.recording import Profile, Recording, load_profile
from pstar.profile.timeline import cut
from tests.docs.browser import Browser, missing
from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def build():
    """docs/generate/build.py, with the modules that it imports."""
    from docs.generate import build

    return build


# ---- configuration


def test_every_field_of_the_configuration_is_in_the_table(build) -> None:
    """The table has all keys, also of nested objects, with type, default and sentence."""
    rows = {row[0]: row[1:] for row in build.tables.configuration.rows(pstar.Config)}
    assert {key for key, _, _ in config.reference()} < set(rows)
    assert {field.name for field in dataclasses.fields(pstar.Config)} <= set(rows)
    for key, default, meaning in config.reference():
        assert rows[key] == (rows[key][0], json.dumps(default), meaning)
    assert rows["near_budget"][:2] == ("int, str", '"auto"') and rows["disk_path"][:2] == ("str, null", "null")
    assert rows["optimizer.params.betas"][:2] == ("[float, float]", "[0.9, 0.999]") and rows["bf16"][0] == "object"
    for language in ("en", "zh"):
        text = build.fragment(f"{language}/configuration.md")
        assert all(text.count(f"| `{key}` |") == 1 for key in rows if "." in key or rows[key][0] != "object")
        assert re.findall(r"\{ #(\S+) \}", text) == ["top-level", "optimizer", "bf16", "fp16", "scheduler", "client"]


def test_a_new_field_without_chinese_or_without_a_sentence_is_an_error(build, monkeypatch: pytest.MonkeyPatch) -> None:
    said = config.sentences

    def with_new(cls: type) -> dict[str, str]:
        return said(cls) | ({"prefetch": "A sentence that nobody has translated."} if cls is pstar.Config else {})

    monkeypatch.setattr(config, "sentences", with_new)
    assert "nobody has translated" in build.fragment("en/configuration.md")
    with pytest.raises(SystemExit, match="no Chinese for 'A sentence that nobody"):
        build.fragment("zh/configuration.md")
    monkeypatch.setattr(config, "sentences", lambda cls: {})
    with pytest.raises(SystemExit, match=r"Config.optimizer of pstar/config.py has no sentence"):
        build.fragment("en/configuration.md")


# ---- API


def test_every_exported_name_is_in_the_reference(build) -> None:
    text = build.fragment("en/api.md")
    assert sorted(re.findall(r"^### `(\w+)`", text, re.MULTILINE)) == sorted(pstar.__all__)
    for method in ("backward", "save_checkpoint", "load_checkpoint", "export_weights", "step_scalars"):
        assert f"#### `Engine.{method}` {{ #Engine-{method} }}" in text
    assert "Builds the model, moves it into chunks" in text and "- `local_rank`: number of this process" in text
    assert "initialize_engine(\n    model_func: Callable[[], torch.nn.Module],\n    local_rank: int | None=None,\n" in text
    assert not [one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "self" in one or "'dict" in one]
    chinese = build.fragment("zh/api.md")
    assert re.findall(r"\{ #(\S+) \}", chinese) == re.findall(r"\{ #(\S+) \}", text) and chinese != text


def test_a_name_that_is_exported_and_not_placed_is_an_error(build) -> None:
    module = SimpleNamespace(__all__=[*pstar.__all__, "surprise"])
    with pytest.raises(SystemExit, match=r"differ in \['surprise'\]"):
        build.api.reference(str, module)


def test_docstrings_become_markdown(build) -> None:
    doc = "One line.\n\nArgs:\n    a, b: what\n        goes on.\n    c: more.\n\nRaises E.\n\nRaises:\n    E: when."
    assert build.api.markdown(doc).splitlines() == [
        "One line.", "", "**Args**", "", "- `a`, `b`: what", "    goes on.", "- `c`: more.", "", "Raises E.", "",
        "**Raises**", "", "- `E`: when."]  # fmt: skip


# ---- results


def test_all_tables_of_a_result_appear_with_headings_and_circumstances(build) -> None:
    results = ROOT / "benchmarks/results"
    for name in ("memory_fits", "memory_link", "disk_model", "plan_memory", "adam", "ranks", "rank_memory", "zero",
                 "zero_pays", "tiled_loss", "compile", "async_save", "parity"):
        source = (results / f"{name}.md").read_text(encoding="utf-8")
        rows = [line.replace(" ", "") for line in source.splitlines() if line.startswith("|")]
        text = build.fragment(f"en/results_all/{name}.md")
        assert [line.replace(" ", "") for line in text.splitlines() if line.startswith("|")] == rows
        assert "- date: " in text and "- command: `" in text and "- versions: " in text
        chinese = build.fragment(f"zh/results_all/{name}.md")
        assert chinese.count("\n|") == len(rows) and "- 日期：" in chinese
    both = build.tables.results(build.Words("en"), "x", "## A link, slow\n\n| a |\n|---|\n\n## Fast\n\n| b |\n|---|\n")
    assert "### A link, slow { #x-a-link-slow }\n\n| a |" in both and "### Fast { #x-fast }\n\n| b |" in both


def test_chinese_pages_have_the_circumstances_of_a_measurement_in_chinese(build) -> None:
    """Every phrase but names, and every heading: a benchmark that words its work anew needs an entry in zh.json."""
    names, found = {"tiny", "near_budget min", "pstar"}, 0
    for name in (name for name in build.wanted() if name.startswith(("zh/results_all/", "zh/results/"))):
        for line in build.fragment(name).splitlines():
            assert not line.startswith("###") or re.search("[\u4e00-\u9fff]", line), f"{name}: {line}"
            fact = re.fullmatch("- (.*?)：(.*)", line)
            if fact and fact[1] not in ("版本", "日期", "命令", "处理器", "机器"):
                found += 1
                for phrase in set(re.split("[，：；]", fact[2])) - names:
                    english = not phrase.startswith("`") and re.search("[a-z]{4}", re.sub(r"\(.*\)", "", phrase))
                    assert not english or re.search("[\u4e00-\u9fff]", phrase), f"{name}: {phrase}"
    assert found > 10


# ---- the stepped view


def content_of(text: str) -> dict:
    """The JSON inside the view's fragment."""
    return json.loads(re.search(r'<script type="application/json">(.*)</script>', text).group(1))


@pytest.fixture(scope="module")
def recording(build, site) -> Recording:
    """The profile from which the site was built."""
    return load_profile(build.measured.PROFILE)


def test_the_view_agrees_with_the_profile(build, recording: Recording) -> None:
    data = content_of(build.fragment("en/steps.md"))
    part = cut(recording, build.tables.steps.STEP, build.tables.steps.STEP)
    levels = [sample for sample in part.used if sample.tier == "near"]
    assert max(frame["near"] for frame in data["frames"]) == max(sample.num_bytes for sample in levels)
    assert max(frame["other"] for frame in data["frames"]) == max(sample.num_bytes for sample in part.non_model)
    assert all(frame["near"] + frame["other"] <= data["budget"] for frame in data["frames"])
    assert data["budget"] == recording.budget("near") and data["frames"][0]["said"] == "start"
    moves = [tuple(move) for frame in data["frames"] for move in frame["moves"]]
    assert len(moves) == sum(event.at > part.begin for event in part.blocks)
    # A copy may end in the step after its request. A copy for a step that never begins may not end at all.
    asked = []
    for number in range(len(recording.steps)):
        shown = build.tables.steps.step(recording, number)
        came = [shown["blocks"][frame["block"]] for frame in shown["frames"] if frame["said"] == "in"]
        asked.append(Counter(f"{kind} {group}" for kind, group, _ in came))
    copied = Counter(span.name for span in recording.spans if span.lane == "far to near")
    assert not copied - sum(asked, Counter()) and not sum(asked[:-1], Counter()) - copied
    assert [name for name, _, _ in data["stages"] if name != "idle"] == ["forward", "backward", "adam"]


def test_both_languages_show_the_same_step(build, recording: Recording) -> None:
    english, chinese = (content_of(build.fragment(f"{language}/steps.md")) for language in ("en", "zh"))
    assert english["frames"] == chinese["frames"] and english["blocks"] == chinese["blocks"]
    assert english["words"].keys() == chinese["words"].keys() and chinese["kinds"]["grad"] == "梯度"
    assert {frame["said"] for frame in english["frames"]} <= set(english["words"])


def test_a_frame_names_the_copy_of_its_block(build) -> None:
    profile = Profile(about={"budgets": {"near": 100}})
    profile.enter(("param", 0), "far", 40)
    profile.step(0)
    profile.stage("forward")
    for report in (lambda: profile.enter(("param", 0), "near", 40), lambda: profile.leave(("param", 0), "near"),
                   lambda: profile.enter(("grad", 0), "near", 40), lambda: profile.enter(("grad", 0), "far", 40),
                   lambda: profile.leave(("grad", 0), "near"), lambda: profile.leave(("grad", 0), "far")):  # fmt: skip
        report()
    data = build.tables.steps.step(profile.recording(), 0)
    assert [frame["said"] for frame in data["frames"]] == ["start", "in", "drop", "made", "out", "gone"]
    assert [frame["near"] for frame in data["frames"]] == [0, 40, 0, 40, 0, 0]
    assert data["blocks"] == [["param", 0, 40], ["grad", 0, 40]] and data["held"] == [[0, "far"]]


PROBE = """<script>
const said = [], root = () => document.querySelector(".chunk-steps");
window.addEventListener("error", (event) => said.push("error: " + event.message));
window.addEventListener("load", () => {
  const press = (key) => root().dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const at = () => root().dataset.frame;
  said.push(at()); press("ArrowRight"); press("ArrowRight"); said.push(at()); press("ArrowLeft"); said.push(at());
  press("End"); said.push(at()); press("Home"); said.push(at());
  root().querySelectorAll("button")[3].click(); said.push(at());
  said.push(root().querySelectorAll(".cs-here").length, root().querySelectorAll(".cs-moved").length);
  said.push(document.documentElement.scrollWidth <= window.innerWidth);
  document.title = "probe " + JSON.stringify(said);
});
</script>"""


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("address", ["chapters/07_patrickstar", "en/chapters/07_patrickstar"])
def test_the_view_opens_and_answers_in_a_browser(build, browser: Browser, site: Path, address: str) -> None:
    data = content_of(build.fragment("en/steps.md"))
    page = site / address / "index.html"
    probe = page.with_name("probe.html")
    probe.write_text(page.read_text(encoding="utf-8").replace("<head>", f"<head>{PROBE}", 1), encoding="utf-8")
    try:
        browser.resize(390, 2000)
        browser.open(probe.as_uri())
        said = browser.wait_for('document.title.startsWith("probe ") && document.title.slice(6)')
    finally:
        probe.unlink()
    last = str(len(data["frames"]) - 1)
    moves = data["frames"][1]["moves"]
    here = len(data["held"]) + sum(1 if came else -1 for _, _, came in moves)
    assert json.loads(said) == ["0", "2", "1", last, "0", "1", here, 1, True]
