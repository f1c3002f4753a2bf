"""Profiles: what is recorded, the file, the trace by the rules of its format, charts that show something, bad input.

The recordings come from a real BlockStore that is walked through training steps under a near budget, not from the engine.
"""

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from pstar.cli import main
from pstar.errors import ArgumentError, ProfileError, PstarError
from pstar.memory.block_store import BlockStore
from pstar.memory.tier import FAR, NEAR, Ledger, Tier
from pstar.profile import trace_export
from pstar.profile.charts import near_chart, places_chart
from pstar.profile.recording import FORMAT, VERSION, Profile, Recording, load_profile
from pstar.profile.timeline import Interval, Life, cut, lives, non_model_levels, stages, used_levels
from pstar.profile.trace_command import parse_steps
from pstar.schedule.schedule import Schedule
from tests.harness.handed_over import handing_over
from tests.harness.program import run_forked

CPU = torch.device("cpu")
NUMEL = 1000
CHUNK_BYTES = 4 * NUMEL
KINDS = ("param", "exp_avg", "exp_avg_sq")


def watched(profile: Profile, near_budget: int) -> BlockStore:
    """A store that reports its operations to a profile."""
    near, far = Tier(NEAR, CPU, near_budget), Tier(FAR, CPU)
    return BlockStore(near, far, Ledger(), Schedule(), profile=profile)


def train(num_groups: int = 4, room: int = 7, num_steps: int = 3, rank: int = 0,
          first: int = 0) -> tuple[Profile, BlockStore]:
    """Steps of forward, backward and Adam over the groups, with room for `room` chunks near; activations grow and shrink."""
    about = {"budgets": {"near": room * CHUNK_BYTES, "far": None}, "device": "cpu", "num_ranks": 2, "policy": "next_use",
             "model_data_bytes": 4 * num_groups * CHUNK_BYTES}
    profile = Profile(rank, about)
    store = watched(profile, room * CHUNK_BYTES)
    for group in range(num_groups):
        for kind in KINDS:
            store.create((kind, group), NUMEL, torch.float32, FAR)

    def use(*keys: tuple[str, int]) -> None:
        for key in keys:
            store.schedule.touch(key)
            store.ensure(key, NEAR)
            store.pin(key)
        begin = profile.now()
        torch.ones(64, 64) @ torch.ones(64, 64)
        inner = profile.now()
        profile.span("compute", "inner", inner, profile.now())
        profile.span("compute", f"group {keys[0][1]}", begin, profile.now())
        for key in keys:
            store.unpin(key)

    for step in range(first, first + num_steps):
        profile.step(step)
        store.schedule.begin_step()
        profile.stage("forward")
        for group in range(num_groups):
            use(("param", group))
            profile.non_model((group + 1) * 512)
        profile.stage("backward")
        for group in reversed(range(num_groups)):
            use(("param", group))
            store.create(("grad", group), NUMEL, torch.float32, NEAR)
            store.schedule.touch(("grad", group))
            profile.non_model(group * 512)
        profile.stage("adam")
        for group in range(num_groups):
            use(*((kind, group) for kind in ("grad", *KINDS)))
            for kind in KINDS:
                store.mark_written((kind, group), NEAR)
            store.drop(("grad", group))
        store.schedule.end_step()
        profile.stage("idle")
    return profile, store


class Hand(Profile):
    """A profile whose clock is set by hand."""

    at = 0.0

    def now(self) -> float:
        return self.at


@pytest.fixture(scope="module")
def real() -> Recording:
    return train()[0].recording()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "rank0.json"
    train()[0].save(path)
    return path


# ---- recording


def test_levels_and_copies_end_as_the_block_store_counts_them():
    profile, store = train()
    recording = profile.recording()
    for tier in (NEAR, FAR):
        levels = used_levels(recording, tier)
        assert levels[-1][1] == store.tiers[tier].used_bytes
        assert max(num_bytes for _, num_bytes in levels) == store.tiers[tier].peak_bytes
    last = {key: found[-1] for key, found in lives(recording).items()}
    for key, block in store.blocks.items():
        assert last[key].end == recording.end and set(last[key].tiers) == set(block.copies)
    assert {key for key, life in last.items() if life.end == recording.end} == set(store.blocks), "dropped blocks ended"
    moved = sum(span.args["bytes"] for span in recording.spans if span.lane == "far to near")
    assert moved == store.ledger.moved_bytes["far to near"] > 0
    assert [stage.name for stage in stages(recording)][:4] == ["forward", "backward", "adam", "idle"]
    assert non_model_levels(recording)[3][1] == 4 * 512


def test_the_bytes_of_all_lives_near_are_the_bytes_used_near(real):
    """Blocks and levels are reported separately, a block first. From a level to the next event they must agree."""
    times = sorted({event.at for event in real.blocks} | {sample.at for sample in real.used} | {real.end})
    levels, checked = {sample.at for sample in real.used if sample.tier == NEAR}, 0
    for begin, end in zip(times, times[1:], strict=False):
        if begin not in levels:               # inside an allocation: one is reported, the other not yet
            continue
        middle = (begin + end) / 2
        used = [num_bytes for at, num_bytes in used_levels(real, NEAR) if at <= middle]
        held = sum(life.num_bytes for found in lives(real).values() for life in found
                   if NEAR in life.tiers and life.begin <= middle < life.end)
        assert held == (used[-1] if used else 0)
        checked += 1
    assert checked > 10


def test_only_the_first_steps_are_kept_and_the_end_is_where_the_next_began():
    profile = Hand(num_steps=2)
    for number in range(5, 9):
        profile.at += 1
        profile.step(number)
        profile.used(NEAR, number)
        profile.span("compute", "layer", profile.at, profile.at)
    recording = profile.recording()
    assert [step.number for step in recording.steps] == [5, 6]
    assert recording.end == 3 and recording.closed == "the first 2 steps were kept"
    assert [sample.num_bytes for sample in recording.used] == [5, 6] and len(recording.spans) == 2


def test_a_profile_without_steps_is_bounded_too():
    profile = Hand(max_events=10)
    for number in range(1000):
        profile.at = number
        profile.span("compute", "layer", number, number)
    recording = profile.recording()
    assert len(recording.spans) == 10 and recording.end == 10 and "10 events" in recording.closed


def test_threads_report_at_the_same_time():
    profile = Profile()

    def work(thread: int) -> None:
        for number in range(500):
            begin = profile.now()
            profile.enter(("param", thread), NEAR, number)
            profile.span("far to near", f"{thread}", begin, profile.now())
            profile.leave(("param", thread), NEAR)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording = profile.recording()
    assert len(recording.spans) == 2000 and len(recording.blocks) == 4000
    assert list(recording.blocks) == sorted(recording.blocks, key=lambda event: event.at)
    check_trace(trace_export.make_trace([recording]))


def test_a_span_that_ends_before_it_begins_is_refused():
    with pytest.raises(ArgumentError, match="layer in lane compute lasts from 2 to 1"):
        Profile().span("compute", "layer", 2, 1)


def test_the_same_level_or_stage_again_is_not_kept():
    profile = Hand()
    for at in range(3):
        profile.at = at
        profile.used(NEAR, 7)
        profile.stage("forward")
    assert len(profile.recording().used) == len(profile.recording().stages) == 1


def test_values_that_json_has_no_word_for_are_kept_as_text(tmp_path):
    profile = Profile(about={"dtype": torch.float32, "budgets": {NEAR: None}})
    profile.span("compute", "loss", 0, 0, loss=float("nan"), shape=torch.Size([2, 3]))
    profile.save(tmp_path / "p.json")
    recording = load_profile(tmp_path / "p.json")
    assert recording.about["dtype"] == "torch.float32" and recording.spans[0].args == {"loss": "nan", "shape": [2, 3]}


# ---- lives and cuts


def test_lives_by_hand():
    profile = Hand()
    profile.enter(("param", 0), FAR, 8)
    for at, tell in ((1, lambda: profile.enter(("param", 0), NEAR, 8)), (2, lambda: profile.leave(("param", 0), FAR)),
                     (3, lambda: profile.leave(("param", 0), NEAR)), (5, lambda: profile.enter(("param", 0), "disk", 8)),
                     (6, lambda: profile.leave(("exp_avg", 1), FAR))):
        profile.at = at
        tell()
    profile.at = 7
    assert lives(profile.recording()) == {
        ("param", 0): [Life((FAR,), 0, 1, 8), Life((NEAR, FAR), 1, 2, 8), Life((NEAR,), 2, 3, 8), Life(("disk",), 5, 7, 8)],
        ("exp_avg", 1): [Life((FAR,), 0, 6, 0)],            # it never entered: it was there from the beginning
    }


def test_a_cut_carries_over_levels_and_clips_intervals():
    profile = Hand()
    profile.enter(("param", 0), FAR, 8)
    profile.used(NEAR, 1)
    profile.stage("forward")
    for at in (1, 2, 3):
        profile.at = at
        profile.step(at)
    profile.used(NEAR, 2)
    profile.at = 4
    profile.span("compute", "long", 0.5, 2.5)
    profile.span("compute", "outside", 0, 1)
    part = cut(profile.recording(), 1, 2)
    assert (part.begin, part.end) == (1, 3)
    assert [(span.name, span.begin, span.end) for span in part.spans] == [("long", 1, 2.5)]
    assert used_levels(part, NEAR) == [(1, 1)]
    assert stages(part) == [Interval("forward", 1, 3)]
    assert lives(part) == {("param", 0): [Life((FAR,), 1, 3, 8)]}
    assert cut(profile.recording(), 3, 3).end == 4, "the last step ends with the profile"
    assert used_levels(cut(profile.recording(), 3, 3), NEAR) == [(3, 2)]


def test_a_cut_of_a_real_run_holds_the_same_lives(real):
    part = cut(real, 1, 1)
    for key, found in lives(real).items():
        clipped = [Life(life.tiers, max(life.begin, part.begin), min(life.end, part.end), life.num_bytes) for life in found
                   if life.end > part.begin and life.begin < part.end]
        assert lives(part).get(key, []) == clipped, key
    with pytest.raises(ProfileError, match="rank 0 has the steps 0 to 2; step 7 is not among them"):
        cut(real, 2, 7)


# ---- the file


def test_the_file_holds_the_recording(tmp_path):
    profile = train(first=3)[0]
    profile.step(6)
    path = tmp_path / "new" / "p.json"
    profile.save(path)
    loaded = load_profile(path)
    assert [path] == list(path.parent.iterdir()), "no other file is left"
    assert [step.number for step in loaded.steps] == [3, 4, 5, 6]
    recorded = profile.recording()
    assert loaded.about == recorded.about and loaded.closed is None and len(loaded.spans) == len(recorded.spans)
    assert [sample[1:] for sample in loaded.used] == [sample[1:] for sample in recorded.used]
    assert [event[1:] for event in loaded.blocks] == [event[1:] for event in recorded.blocks]
    assert all(abs(a.at - b.at) < 1e-8 for a, b in zip(loaded.blocks, recorded.blocks, strict=True))


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be written"):
        Profile().save(tmp_path / "file" / "p.json")
    with pytest.raises(ProfileError, match="cannot be written"):
        Profile().save(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def change(**changes) -> str:
    """An empty profile as a file's text, with changes."""
    content = {"format": FORMAT, "version": VERSION, "rank": 0, "about": {}, "started": 1.0, "begin": 0.0, "end": 9.0,
               "closed": None, "spans": [], "used": [], "non_model": [], "blocks": [], "stages": [], "steps": []}
    return json.dumps(content | changes)


def test_the_unchanged_text_is_a_profile(tmp_path):
    (tmp_path / "p.json").write_text(change())
    assert load_profile(tmp_path / "p.json").end == 9


BAD = {
    "no JSON": ("{", "is no JSON file"),
    "no text": (b"\xff\xfe\x00", "is no JSON file"),
    "deep": ("[" * 100_000, "is no JSON file"),
    "a list": ("[]", "is JSON, but no profile"),
    "another format": (change(format="trace"), "is JSON, but no profile"),
    "another version": (change(version=2), "is a profile of version 2, this program reads 1"),
    "no rank": (change(rank=None), "is damaged: rank is null"),
    "rank is text": (change(rank="0"), "is damaged: rank is"),
    "infinite end": (change(end=float("inf")), "is damaged: end is"),
    "huge end": (change().replace("9.0", "9" * 400), "is damaged: end is"),
    "closed": (change(closed=3), "is damaged: closed is 3"),
    "budgets": (change(about={"budgets": {"near": "64MiB"}}), "is damaged: budgets are"),
    "no list": (change(spans=None), "is damaged: spans is null, not a list"),
    "short row": (change(used=[[1.0, "near"]]), r"is damaged: used\[0\] is"),
    "bytes below zero": (change(used=[[1.0, "near", -1]]), r"is damaged: used\[0\] is"),
    "true is no number": (change(steps=[[1.0, True]]), r"is damaged: steps\[0\] is"),
    "not a number": (change(steps=[[float("nan"), 1]]), r"is damaged: steps\[0\] is"),
    "backwards": (change(stages=[[2.0, "a"], [1.0, "b"]]), r"is damaged: stages\[1\] is .* out of the order of time"),
    "a span backwards": (change(spans=[["compute", "a", 2.0, 1.0, {}]]), r"is damaged: spans\[0\] is"),
    "after the end": (change(steps=[[10.0, 1]]), r"is damaged: steps\[0\] is"),
}


@pytest.mark.parametrize("text, said", BAD.values(), ids=BAD)
def test_a_bad_file_is_named_in_one_line(tmp_path, text, said, capsys):
    path = tmp_path / "p.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ProfileError, match=said) as caught:
        load_profile(path)
    assert isinstance(caught.value, PstarError) and str(caught.value).startswith(f"{path}: ")
    assert main(["trace", str(path), "--out", str(tmp_path / "out"), "--no-charts"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == f"error: {caught.value}\n" and not (tmp_path / "out").exists()


# ---- the trace


def check_trace(trace: dict) -> dict[str, list[dict]]:
    """Checks a trace against the rules of the format; returns its slices by the name of their lane."""
    events = trace["traceEvents"]
    names, lanes, budgets, counters = {}, defaultdict(list), {}, defaultdict(list)
    for event in events:
        assert event["ph"] in "MXCi"
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        if event["ph"] == "M" and event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in names, "two lanes in one place"
            names[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "C":
            (num_bytes,) = event["args"].values()
            assert isinstance(num_bytes, int) and num_bytes >= 0
            if event["name"].endswith(" budget"):
                budgets[event["pid"], event["name"].removesuffix(" budget")] = num_bytes
            else:
                counters[event["pid"], event["name"]].append((event["ts"], num_bytes))
        elif event["ph"] == "i":
            assert event["s"] in "gpt"
    for (pid, name), samples in counters.items():
        assert samples == sorted(samples, key=lambda sample: sample[0])
        assert max(num_bytes for _, num_bytes in samples) <= budgets.get((pid, name), float("inf")), name
    for place, slices in lanes.items():
        assert place in names, "a lane without a name"
        open_ends: list[int] = []
        nanoseconds = [(round(s["ts"] * 1000), round(s["ts"] * 1000) + round(s["dur"] * 1000)) for s in slices]
        for begin, end in sorted(nanoseconds, key=lambda pair: (pair[0], -pair[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], f"slices cross in lane {names[place]}"
            open_ends.append(end)
    found = defaultdict(list)
    for place, slices in lanes.items():
        found[names[place]] += slices
    return found


def test_the_trace_of_a_real_run_keeps_the_rules_and_loses_nothing(real):
    trace = json.loads(json.dumps(trace_export.make_trace([real]), allow_nan=False))
    lanes = check_trace(trace)
    events = trace["traceEvents"]
    assert [slice_["name"] for slice_ in lanes["stages"]][:3] == ["forward", "backward", "adam"]
    for lane in ("compute", "far to near", "near to far"):
        spans = [span for span in real.spans if span.lane == lane]
        assert len(lanes[lane]) == len(spans) > 0
        assert sum(s["dur"] for s in lanes[lane]) == pytest.approx(1e6 * sum(s.end - s.begin for s in spans), abs=1)
    assert [event["name"] for event in events if event["ph"] == "i"] == ["step 0", "step 1", "step 2"]
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"near", "near budget", "far", "near non-model"}, "far has no budget to show"
    assert {s["name"] for s in lanes["param 0"]} <= {"near", "far", "near + far"}
    assert len(lanes["exp_avg_sq 3"]) == len(lives(real)["exp_avg_sq", 3])
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes.values()) == ["rank 0 (cpu)", "rank 0: blocks"]


def test_the_checks_of_a_trace_can_fail(real):
    def slices(trace: dict) -> list[dict]:
        return [event for event in trace["traceEvents"] if event["ph"] == "X"]

    trace = trace_export.make_trace([real])
    slices(trace)[0]["dur"] += (slices(trace)[1]["dur"]) / 2
    with pytest.raises(AssertionError, match="slices cross in lane stages"):
        check_trace(trace)
    trace = trace_export.make_trace([real])
    next(event for event in trace["traceEvents"] if event["name"] == "near")["args"]["bytes"] = 10**9
    with pytest.raises(AssertionError, match="near"):
        check_trace(trace)


def test_spans_that_cross_get_lanes_of_their_own():
    profile = Hand()
    profile.at = 10
    for begin, end in ((0, 4), (1, 2), (2, 4), (3, 6), (5, 7), (6, 8)):
        profile.span("far to near", f"{begin} to {end}", begin, end)
    profile.span("my lane", "other", 0, 1)
    lanes = check_trace(trace_export.make_trace([profile.recording()]))
    assert [s["name"] for s in lanes["far to near"]] == ["0 to 4", "1 to 2", "2 to 4", "5 to 7"]
    assert [s["name"] for s in lanes["far to near 2"]] == ["3 to 6", "6 to 8"]
    assert [s["name"] for s in lanes["my lane"]] == ["other"]


def test_ranks_are_merged_and_laid_beside_each_other_by_their_clocks():
    from dataclasses import replace

    first, second = (train(rank=rank)[0].recording() for rank in (1, 0))
    first, second = replace(first, started=1000.5), replace(second, started=1000.0)
    trace = trace_export.make_trace([first, second])
    check_trace(trace)
    names = {event["args"]["name"]: event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert list(names) == ["rank 0 (cpu)", "rank 0: blocks", "rank 1 (cpu)", "rank 1: blocks"]
    assert len(set(names.values())) == 4
    step = {event["pid"]: event["ts"] for event in trace["traceEvents"] if event["name"] == "step 1"}
    lag = step[names["rank 1 (cpu)"]] - step[names["rank 0 (cpu)"]]
    assert lag == pytest.approx(1e6 * (0.5 + first.steps[1].at - second.steps[1].at), abs=1)
    with pytest.raises(ProfileError, match="two profiles are of rank 1"):
        trace_export.make_trace([first, first])


# ---- the charts


def colours(path: Path) -> dict[tuple[int, int, int], int]:
    """Pixels by colour, of a PNG."""
    image = pytest.importorskip("PIL.Image").open(path).convert("RGB")
    assert image.width > 1000 and image.height > 300
    return {colour: count for count, colour in image.getcolors(image.width * image.height)}


def rgb(text: str) -> tuple[int, int, int]:
    return tuple(int(text[start : start + 2], 16) for start in (1, 3, 5))


def test_the_near_chart_shows_model_data_non_model_and_budget(real, tmp_path):
    pytest.importorskip("matplotlib")
    from pstar.profile import charts

    near_chart(real, tmp_path / "near.png")
    seen = colours(tmp_path / "near.png")
    assert len(seen) > 20
    for colour in (charts.MODEL_COLOUR, charts.NON_MODEL_COLOUR, charts.BUDGET_COLOUR, charts.STAGE_COLOURS["backward"]):
        assert seen.get(rgb(colour), 0) > 100, colour


@pytest.mark.parametrize("num_groups", [1, 5, 60])
def test_the_places_chart_shows_every_place(tmp_path, num_groups):
    pytest.importorskip("matplotlib")
    from pstar.profile import charts

    recording = train(num_groups, room=max(4, num_groups), num_steps=2)[0].recording()
    places_chart(recording, tmp_path / "blocks.png")
    seen = colours(tmp_path / "blocks.png")
    for place in ((NEAR,), (FAR,), (NEAR, FAR)):
        assert seen.get(rgb(charts.PLACE_COLOURS[place]), 0) > 100, place
    assert rgb(charts.PLACE_COLOURS["disk",]) not in seen


def test_a_stay_shorter_than_a_pixel_is_seen(tmp_path):
    pytest.importorskip("matplotlib")
    from pstar.profile import charts

    profile = Hand()
    profile.enter(("param", 0), FAR, 1)
    profile.at = 50.0
    profile.enter(("gathered", 0), NEAR, 1)
    profile.at += 1e-4
    profile.leave(("gathered", 0), NEAR)
    profile.at = 100.0
    places_chart(profile.recording(), tmp_path / "blocks.png")
    image = pytest.importorskip("PIL.Image").open(tmp_path / "blocks.png").convert("RGB")
    middle = image.crop((image.width // 3, 0, 2 * image.width // 3, image.height - 60))      # without the legend
    assert any(colour == rgb(charts.PLACE_COLOURS[NEAR,]) for _, colour in middle.getcolors(10**7))


def test_charts_of_nothing_are_refused(tmp_path):
    pytest.importorskip("matplotlib")
    for draw, what in ((near_chart, "no near bytes"), (places_chart, "no blocks")):
        with pytest.raises(ProfileError, match=f"rank 0: the profile has {what} to draw"):
            draw(Profile().recording(), tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


# ---- the command


def test_the_command_writes_all_files_and_prints_their_names(saved, tmp_path):
    pytest.importorskip("matplotlib")
    other = tmp_path / "rank1.json"
    train(rank=1)[0].save(other)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "pstar.cli", "trace", str(saved), str(other), "--out", str(out), "--steps", "1-2"]
    status, said = run_forked(command, dict(os.environ))
    assert status == 0, said
    names = ["trace.json", "near_rank0.png", "blocks_rank0.png", "near_rank1.png", "blocks_rank1.png"]
    assert [line.split(": ")[0] for line in said.splitlines()] == [str(out / name) for name in names]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    trace = json.loads((out / "trace.json").read_text())
    check_trace(trace)
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "i"} == {"step 1", "step 2"}
    first = {kind: min(event["ts"] for event in trace["traceEvents"] if event["ph"] == kind) for kind in "iX"}
    # In microseconds. Ranks are laid side by side by the time since 1970, which a float64 holds to a quarter of one.
    assert abs(first["i"]) < 1 and first["X"] > -1, "the trace begins with step 1, and has nothing of before"


@pytest.mark.parametrize("extra, said", [
    (["--steps", "4-3"], "--steps '4-3' is no range of steps"),
    (["--steps", "x"], "--steps 'x' is no range of steps"),
    (["--steps", "1-9"], "rank0.json: rank 0 has the steps 0 to 2; step 9 is not among them"),
    (["SAME"], "two profiles are of rank 0"),
    (["missing.json"], "missing.json: cannot be read (No such file or directory)"),
])
def test_bad_input_is_one_line_and_status_2(saved, tmp_path, extra, said, capsys):
    given = [str(saved) if word == "SAME" else word for word in extra]
    assert main(["trace", str(saved), *given, "--out", str(tmp_path / "out"), "--no-charts"]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_a_file_is_one_line(saved, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert main(["trace", str(saved), "--out", str(tmp_path / "out"), "--no-charts"]) == 2
    printed = capsys.readouterr().err
    assert "out/trace.json: cannot be written" in printed and printed.count("\n") == 1


def test_without_matplotlib_the_command_names_the_package_to_install(saved, tmp_path):
    """In a real process in which matplotlib cannot be found."""
    program = tmp_path / "program.py"
    program.write_text("import sys; sys.modules['matplotlib'] = None; from pstar.cli import main; "
                       "first = main(['trace', sys.argv[1], '--out', sys.argv[2]]); "
                       "sys.exit(10 * first + main(['trace', sys.argv[1], '--out', sys.argv[3], '--no-charts']))")
    without, alone = tmp_path / "without", tmp_path / "alone"
    environment = handing_over({**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    done = subprocess.run([sys.executable, program, saved, without, alone], env=environment, capture_output=True, text=True)
    assert done.returncode == 20 and done.stderr.count("\n") == 1, done.stderr
    assert 'pip install "matplotlib>=3.9"' in done.stderr and not without.exists()
    assert [path.name for path in alone.iterdir()] == ["trace.json"]


def test_steps_are_a_range_or_one():
    assert parse_steps("3-4") == (3, 4) and parse_steps("12") == (12, 12)
