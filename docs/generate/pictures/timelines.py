"""Timelines, one function per chapter: what each rank computes in a step, and which messages travel at the same time.

Where the repository has an order as data, the picture uses it. Durations are schematic.
"""

from __future__ import annotations

from docs.generate.pictures.data import buckets, schedules, slots_of, tiny
from docs.generate.pictures.pictures import Drawing, Timeline, Words


def _lanes(words: Words, *lanes: tuple[int, str]) -> list[str]:
    return [f"{words('rank {n}').format(n=rank)}/{words(name)}" for rank, name in lanes]


def _step(timeline: Timeline, words: Words, lane: str, begin: float = 0, slower: float = 1.0) -> float:
    """Forward and backward; returns the end."""
    forward, backward = begin + 10 * slower, begin + 30 * slower
    timeline.block(lane, begin, forward, "forward", words("forward"))
    timeline.block(lane, forward, backward, "backward", words("backward"))
    return backward


def single_time(words: Words) -> str:
    """Chapter 00."""
    drawing = Drawing(words, words("One step, and the next"))
    lane, = _lanes(words, (0, "compute"))  # fmt: skip
    timeline = Timeline(drawing, [lane], 50)
    end = _step(timeline, words, lane)
    timeline.block(lane, end, end + 9, "update", words("update"))
    timeline.block(lane, end + 9, 50, "forward", words("forward"))
    drawing.note(words("Backward takes about twice as long as forward. Nothing is ever waited for."))
    drawing.legend()
    return drawing.svg()


def parameter_server_time(words: Words) -> str:
    """Chapter 01."""
    drawing = Drawing(words, words("One step through the server"))
    zero, up, down, one = lanes = _lanes(words, (0, "compute"), (0, "messages"), (1, "messages"), (1, "compute"))
    timeline = Timeline(drawing, lanes, 60)
    for lane in (zero, one):
        end = _step(timeline, words, lane)
    for lane in (up, down):
        timeline.message(lane, end, end + 8, "gradients", words("push"))
        timeline.message(lane, end + 17, end + 25, "parameters", words("pull"))
    timeline.arrow(end + 4, down, up)
    timeline.arrow(end + 21, up, down)
    timeline.block(zero, end + 8, end + 17, "update", words("update"))
    for lane in (zero, one):
        timeline.block(lane, end + 25, 60, "forward")
    drawing.note(words("The worker waits from its push to its pull. With more workers all of that passes through rank 0."))
    drawing.legend()
    return drawing.svg()


def ddp_time(words: Words) -> str:
    """Chapter 02: buckets become ready during backward, and are sent one after another."""
    drawing = Drawing(words, words("One step, without and with overlap"))
    sizes = buckets()
    total, seconds, until = sum(map(sum, sizes)), 10.0, 61
    drawing.heading(words("naive: after backward, one message a parameter"))
    timeline = Timeline(drawing, lanes := _lanes(words, (0, "compute"), (0, "messages")), until)
    at = _step(timeline, words, lanes[0])
    for size in (size for bucket in sizes for size in bucket):
        length = 0.18 + seconds * size / total
        timeline.message(lanes[1], at, at + length, "gradients")
        at += length
    timeline.block(lanes[0], at, at + 9, "update", words("update"))
    drawing.heading(words("buckets: each travels as soon as it is full"))
    names = _lanes(words, (0, "compute"), (0, "messages"), (1, "messages"), (1, "compute"))
    timeline, ready, free = Timeline(drawing, names, until), 10.0, 0.0
    for lane in (names[0], names[3]):
        _step(timeline, words, lane)
    for number, bucket in enumerate(sizes):
        ready += 20 * sum(bucket) / total
        begin = max(ready, free)
        free = begin + seconds * sum(bucket) / total
        for lane in names[1:3]:
            timeline.message(lane, begin, free, "gradients", str(number))
        timeline.arrow((begin + free) / 2, names[1], names[2], both=True)
    for lane in (names[0], names[3]):
        timeline.block(lane, free, free + 9, "update", words("update"))
    drawing.note(words("Numbers are buckets. The last one holds the embedding, whose gradient is ready last."))
    drawing.legend()
    return drawing.svg()


def horovod_time(words: Words) -> str:
    """Chapter 03: in each cycle, Horovod's thread puts the gradients that both ranks have ready into one message."""
    drawing = Drawing(words, words("Horovod's thread beside backward"))
    names = _lanes(words, (0, "compute"), (0, "thread"), (1, "thread"), (1, "compute"))
    slow, num, cycle, until = 1.15, 8, 5.0, 62
    timeline = Timeline(drawing, names, until)
    _step(timeline, words, names[0])
    end = _step(timeline, words, names[3], slower=slow)
    ready = [max(10 + 20 * (n + 1) / num, slow * (10 + 20 * (n + 1) / num)) for n in range(num)]
    sent, now = 0, cycle * 3
    while sent < num:
        there = sum(time <= now for time in ready)
        if there > sent:
            length = 1.0 + 1.6 * (there - sent)
            for lane in names[1:3]:
                timeline.message(lane, now + 0.6, now + length, "gradients", str(there - sent))
            timeline.arrow(now, names[2], names[1])
            sent, now = there, max(now + cycle, now + length)
        else:
            now += cycle
        end = now
    for lane in (names[0], names[3]):
        timeline.block(lane, end, end + 9, "update", words("update"))
    drawing.note(words(
        "At every cycle rank 1 tells rank 0 what is ready. Rank 1 is slower here: a gradient travels when both "
        "have it, and all that are ready travel as one; the number says how many."))  # fmt: skip
    drawing.legend()
    return drawing.svg()


def apex_time(words: Words) -> str:
    """Chapter 04."""
    drawing = Drawing(words, words("A step in mixed precision"))
    until = 59
    for good in (True, False):
        drawing.heading(words("a good step") if good else words("a gradient is infinite: the scale was too large"))
        lanes = _lanes(words, (0, "16 bit"), (0, "fp32"), (0, "messages"))
        timeline = Timeline(drawing, lanes, until)
        end = _step(timeline, words, lanes[0])
        for n in range(4):
            timeline.message(lanes[2], 15 + 5 * n, 19 + 5 * n, "gradients")
        end += 3
        timeline.block(lanes[1], end, end + 10, "backward", words("unscale"), light=True)
        if good:
            timeline.block(lanes[1], end + 10, end + 19, "update", words("update"))
            timeline.block(lanes[0], end + 19, until, "parameters", words("copy"))
        else:
            timeline.block(lanes[0], end + 15, until, "forward")
            drawing.text(timeline.at(end + 10.2), timeline.top[lanes[1]] + 12, words("no update"))
    drawing.note(words(
        "Unscale divides the gradients by the loss scale and asks whether all are finite, on all ranks. Where one is "
        "not, no rank updates, and the scale is halved."))  # fmt: skip
    drawing.legend()
    return drawing.svg()


def model_parallel_time(words: Words) -> str:
    """Chapter 05: the chapter's schedules, at four ranks and eight micro-batches."""
    table, ranks, micros = schedules(), 4, 8
    drawing = Drawing(words, words("Schedules of a pipeline"))
    plans = {name: (table.orders(name, ranks, micros, stages), stages)
             for name, stages in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))}  # fmt: skip
    runs = {name: table.simulate(order, 1 / stages, 1 / stages) for name, (order, stages) in plans.items()}
    until = max(event.end for events in runs.values() for event in events)
    for name, events in runs.items():
        order, stages = plans[name]
        live = max(table.peak_live(works) / stages for works in order)
        drawing.heading(words("{name}: waits {bubble}, keeps {live}").format(
            name=name, bubble=f"{table.bubble(events, ranks):.0%}", live=f"{live:g}"))  # fmt: skip
        lanes = [words("rank {n}").format(n=n) for n in range(ranks)]
        timeline = Timeline(drawing, lanes, until)
        for event in events:
            kind = "forward" if event.work.kind == "F" else "backward"
            timeline.block(lanes[event.rank], event.begin, event.end, kind, str(event.work.micro),
                           light=event.work.stage >= ranks)  # fmt: skip
    drawing.note(words(
        "Numbers are micro-batches. Waits: the share of empty boxes. Keeps: for how many micro-batches a rank "
        "holds activations, at most. Pale: the rank's second stage."))  # fmt: skip
    drawing.legend()
    return drawing.svg()


def zero_time(words: Words) -> str:
    """Chapter 06, stage 3: the next block is gathered while this one computes (see the docstring of zero/stage3.py)."""
    drawing = Drawing(words, words("ZeRO stage 3: messages beside the computation"))
    blocks, gather, forward, backward = tiny().n_layer, 2.6, 3.2, 6.4
    names = _lanes(words, (0, "compute"), (0, "messages"), (1, "messages"), (1, "compute"))
    events: list[tuple[str, float, float, str, str]] = []
    free = 0.0

    def send(kind: str, text: str, earliest: float) -> float:
        nonlocal free
        begin = max(free, earliest)
        free = begin + gather
        events.append(("message", begin, free, kind, text))
        return free

    def walk(order: list[int], kind: str, length: float, now: float) -> float:
        coming = {order[0]: send("parameters", str(order[0]), now)}
        for place, block in enumerate(order):
            begin = max(now, coming[block])
            if place + 1 < len(order):
                coming[order[place + 1]] = send("parameters", str(order[place + 1]), begin)
            now = begin + length
            events.append(("block", begin, now, kind, str(block)))
            if kind == "backward":
                send("gradients", str(block), now)
        return now

    now = send("parameters", "e", 0.0)
    now = walk(list(range(blocks)), "forward", forward, now)
    now = walk(list(reversed(range(blocks))), "backward", backward, now)
    send("gradients", "e", now)
    until = free + 8.2
    timeline = Timeline(drawing, names, until)
    for shape, begin, end, kind, text in events:
        for lane in names[1:3] if shape == "message" else (names[0], names[3]):
            (timeline.message if shape == "message" else timeline.block)(lane, begin, end, kind, text)
        if shape == "message":
            timeline.arrow((begin + end) / 2, names[1], names[2], both=True)
    for lane in (names[0], names[3]):
        timeline.block(lane, free, until, "update", words("update"))
    drawing.note(words(
        "e: parameters outside of all blocks (embeddings, last norm); numbers are blocks. A block is gathered while the one "
        "before it computes, and its gradients leave while the next one computes."))  # fmt: skip
    drawing.legend()
    return drawing.svg()


def patrickstar_time(words: Words) -> str:
    """Chapter 07: which chunk is near at which moment, by pstar's rule for the victim (the farthest next use)."""
    drawing = Drawing(words, words("Chunks come and go in one step"))
    num, room = 6, 3
    order = [*range(num), *reversed(range(num))]
    history, loads = slots_of(order, room)
    lengths = [3.0] * num + [5.0] * num
    begins = [sum(lengths[:n]) for n in range(len(order))]
    until = sum(lengths) + 9
    lanes = _lanes(words, (0, "compute"), *((0, f"near {slot}") for slot in range(room)), (0, "copies"), (0, "messages"))
    copies, messages, short = lanes[-2], lanes[-1], 1.3
    timeline = Timeline(drawing, lanes, until)
    for n, chunk in enumerate(order):
        end = begins[n] + lengths[n]
        timeline.block(lanes[0], begins[n], end, "forward" if n < num else "backward", str(chunk))
        if n in loads:
            timeline.message(copies, begins[n] - 2 * short, begins[n] - short, "parameters")
            timeline.message(messages, begins[n] - short, begins[n], "parameters")
        if n >= num:
            timeline.message(messages, end, end + short, "gradients")
            timeline.message(copies, end + short, end + 2 * short, "gradients")
    for slot in range(room):
        start = 0
        for n in range(1, len(order) + 1):
            if n == len(order) or history[n][slot] != history[start][slot]:
                chunk = history[start][slot]
                if chunk is not None:
                    end = begins[n] if n < len(order) else until
                    timeline.block(lanes[1 + slot], begins[start], end, "parameters", str(chunk))
                start = n
    timeline.block(lanes[0], until - 9, until, "update", words("update"))
    drawing.note(words(
        "Near has room for {room} of {num} chunks; numbers are chunks. When one is missing, the one with the "
        "farthest next use leaves. Parameters: copied in, then gathered, {loads} times a step. "
        "Gradients: reduced, then copied out to where Adam computes.").format(
        room=room, num=num, loads=len(loads)))  # fmt: skip
    drawing.legend()
    return drawing.svg()


def param_efficient_time(words: Words) -> str:
    """Chapter 08: a step without recomputation, block by block, and in segments of two blocks."""
    drawing = Drawing(words, words("One step, with and without recomputation"))
    blocks, forward, backward = tiny().n_layer, 3.0, 6.0
    variants = {"none": 0, "block": 1, "every:2": 2}
    lanes = [f"--recompute {name}/{words('compute')}" for name in variants]
    update = 8.0
    until = blocks * (2 * forward + backward) + update
    timeline = Timeline(drawing, lanes, until)
    for lane, length in zip(lanes, variants.values(), strict=True):
        now = 0.0

        def take(kind: str, block: int, lasts: float, again: bool = False, lane: str = lane) -> None:
            nonlocal now
            timeline.block(lane, now, now + lasts, kind, str(block), light=again)
            now += lasts

        for block in range(blocks):
            take("forward", block, forward)
        for block in reversed(range(blocks)):
            if length and (block + 1) % length == 0:
                for other in range(block + 1 - length, block + 1):
                    take("forward", other, forward, again=True)
            take("backward", block, backward)
        timeline.block(lane, now, now + update, "update", words("update"))
        if now + update < until:
            timeline.block(lane, now + update, until, "forward")
    drawing.note(words(
        "Numbers are blocks. Pale: computed a second time, because only the input of a segment was kept. Backward then "
        "holds the activations of one segment, not of all."))  # fmt: skip
    drawing.legend()
    return drawing.svg()
