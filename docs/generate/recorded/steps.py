"""One training step of the profile as JSON; docs/assets/tools/chunks.js shows frame by frame which block is in which tier.

A frame is one event of one block: it is copied in, copied far, created or dropped. The bytes near are those of the chunks,
plus the peak of everything else until the next frame.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from docs.generate.recorded import measured

if TYPE_CHECKING:
    from pstar.profile.recording import BlockEvent, Recording

STEP = 2
"""Of the profiled run: the first that follows the trace with all room that activations leave."""
KINDS = {"param": "parameter", "grad": "gradient", "exp_avg": "first moment", "exp_avg_sq": "second moment"}
WORDS = {
    "near": "near", "far": "far", "disk": "disk", "activations": "activations", "group": "group",
    "place": "place in the step", "play": "play", "pause": "pause",
    "back": "one back", "next": "one on", "first": "to the begin",
    "forward": "forward", "backward": "backward", "adam": "update", "idle": "between steps", "start": "the step begins",
    "in": "is copied near", "out": "goes from near to far", "made": "is made near", "other": "moves",
    "drop": "leaves near without a copy: far has it", "gone": "is used up",
    "stale": "is updated far; the old copy near goes", "script": "this view needs JavaScript",
}  # fmt: skip


def view(words: Callable[[str], str]) -> str:
    """The view's HTML element. It contains its data, so the page fetches nothing."""
    from pstar.profile.recording import load_profile

    content = step(load_profile(measured.profile()), STEP)
    content["words"] = {key: words(text) for key, text in WORDS.items()}
    content["kinds"] = {kind: words(KINDS.get(kind, kind)) for kind in content["kinds"]}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return (f'<div class="chunk-steps"><p>{words(WORDS["script"])}</p>'
            f'<script type="application/json">{text}</script></div>\n')  # fmt: skip


def step(recording: Recording, number: int) -> dict[str, Any]:
    """{budget, tiers, kinds, blocks: [[kind, group, bytes]], held: [[block, tier]], ms, stages: [[name, ms, ms]], frames}.

    frames: [{ms, said, block, moves: [[block, tier, 1 or 0]], near, other}]. The first is the begin and has no block.
    """
    from pstar.profile.timeline import cut, in_order, stages, tier_order

    part = cut(recording, number, number)
    keys = in_order({(event.kind, event.number) for event in part.blocks})
    index = {key: place for place, key in enumerate(keys)}
    sizes = {(event.kind, event.number): event.num_bytes for event in part.blocks if event.num_bytes}
    copies: dict[tuple[int, str], int] = {}
    held, frames = [], []
    for event in part.blocks:
        if event.at == part.begin:
            held.append([index[event.kind, event.number], event.tier])
            copies[index[event.kind, event.number], event.tier] = event.num_bytes
    found = stages(part)
    for events in _together([event for event in part.blocks if event.at > part.begin]):
        at, block = events[-1].at, index[events[0].kind, events[0].number]
        stage = next((name for name, begin, end in found if begin <= at < end), "")
        before = {tier for each, tier in copies if each == block}
        for event in events:
            if event.num_bytes is None:
                copies.pop((block, event.tier), None)
            else:
                copies[block, event.tier] = event.num_bytes
        after = {tier for each, tier in copies if each == block}
        frames.append({"at": at, "said": _what(before, after, stage), "block": block,
                       "moves": [[block, event.tier, int(event.num_bytes is not None)] for event in events],
                       "near": sum(size for (_, tier), size in copies.items() if tier == "near")})  # fmt: skip
    near = sum(sizes[keys[block]] for block, tier in held if tier == "near")
    frames = [{"at": part.begin, "said": "start", "block": -1, "moves": [], "near": near}, *frames]
    for frame, after in pairwise([*frames, {"at": part.end}]):
        frame["other"] = _other(part, frame["at"], after["at"])
    tiers = sorted({event.tier for event in part.blocks}, key=tier_order)
    for frame in frames:
        frame["ms"] = round((frame.pop("at") - part.begin) * 1e3, 2)
    return {"budget": part.budget("near"), "tiers": tiers, "kinds": list(dict.fromkeys(kind for kind, _ in keys)),
            "blocks": [[kind, group, sizes[kind, group]] for kind, group in keys], "held": held,
            "ms": round((part.end - part.begin) * 1e3, 2), "frames": frames,
            "stages": [[name, *(round((at - part.begin) * 1e3, 2) for at in times)] for name, *times in found]}  # fmt: skip


def _together(events: list[BlockEvent]) -> list[list[BlockEvent]]:
    """Groups events into frames, in the order of time. Two consecutive events of a block that are one move share a frame.

    A block moves when it enters one tier and then leaves another. All other events have a frame of their own.
    """
    frames: list[list[BlockEvent]] = []
    for event in events:
        last = frames[-1] if frames else []
        same = len(last) == 1 and (last[0].kind, last[0].number) == (event.kind, event.number)
        if same and last[0].num_bytes is not None and event.num_bytes is None and last[0].tier != event.tier:
            last.append(event)
        else:
            frames.append([event])
    return frames


def _what(before: set[str], after: set[str], stage: str) -> str:
    """The key in WORDS for a block that was in the tiers `before` and is in the tiers `after`."""
    if not after:
        return "gone"
    if "near" in after - before:
        return "in" if before else "made"
    if "near" in before - after:
        return "out" if after - before else "stale" if stage == "adam" else "drop"
    return "other"


def _other(recording: Recording, begin: float, end: float) -> int:
    """The peak of near bytes that do not belong to chunks, between two moments."""
    inside = [sample.num_bytes for sample in recording.non_model if begin < sample.at < end]
    before = [sample.num_bytes for sample in recording.non_model if sample.at <= begin]
    return max([*inside, *before[-1:]], default=0)
