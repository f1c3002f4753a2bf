"""`pstar plan --layouts`: against an exhaustive search written from the definitions, pstar.planner.predict, and by hand."""

import json
import random
import sys
from dataclasses import replace
from math import isclose
from pathlib import Path
from types import ModuleType

import pytest

from pstar import cli
from pstar.errors import ConfigError
from pstar.planner import shares
from pstar.planner.course_commands import LIBRARIES, command_of
from pstar.planner.gpt_shape import MODELS, GptShape, find_model
from pstar.planner.gpus import GIB, GPUS, Cluster, cluster_of
from pstar.planner.layout_memory import Layout, LayoutJob, need_of
from pstar.planner.layout_time import link_of, seconds_of
from pstar.planner.layouts import TECHNIQUES, choose, layouts_of, plan_layouts, technique_of
from pstar.planner.layouts_command import NOTE_WORDS, REASON_WORDS, TECHNIQUE_WORDS, as_json
from pstar.planner.machines import Machine, MachineSpeeds
from pstar.planner.predict import Job, predict
from pstar.planner.shares import bubble_fraction
from tests.cover import quick_only

# ---------------------------------------------------------------- exhaustive search, written from the definitions


class Search:
    """All layouts of a job by trying every number, each evaluated from lists of tensors. Shares no code with the planner."""

    def __init__(self, cluster: Cluster, job: LayoutJob):
        self.cluster, self.job = cluster, job
        self.layers, self.width, self.heads = job.shape.layers, job.shape.hidden, job.shape.heads
        self.vocab, self.length, self.positions = job.shape.vocab, job.seq_len, job.shape.positions
        self.half = job.precision != "fp32"
        self.gpu_room = max(0, cluster.gpu_bytes * 95 // 100 - GIB)
        self.in_node = cluster.gpus // cluster.nodes
        self.host_room = max(0, cluster.host_bytes - 8 * GIB - self.in_node * 2 * GIB) // self.in_node

    def block(self, t):
        """Elements of a block's tensors on one of t tensor parallel ranks."""
        c = self.width
        whole = [c, c, c, c, c, c]    # weight and bias of two norms, the biases after the two sums
        cut = [3 * c * c, 3 * c, c * c, 4 * c * c, 4 * c, 4 * c * c]
        return sum(whole) + sum(cut) // t

    def ends(self, t, stage, stages):
        """Elements of embeddings, last norm and tied head in a stage."""
        table, c = -(-self.vocab // t) * self.width, self.width
        if stages == 1:
            return table + self.positions * c + 2 * c
        return table + self.positions * c if stage == 0 else table + 2 * c if stage == stages - 1 else 0

    def bytes_of(self, it, micros):
        """(weights, gradients, masters and moments) of a parameter, and of activations (whole, cut, input, first, last)."""
        split = it["t"] * it["p"] * it["c"] > 1
        if not self.half:
            return (4, 4, 8), (20, 48, 4, 4, 8)
        if it["star"]:
            return (2, 4 if micros > 1 else 2, 10 if self.job.precision == "bf16" else 12), (10, 24, 2, 2, 4)
        if it["zero"]:
            return (2, 4 if split else 2, 12), (10, 24, 2, 2, 4)
        return ((6, 4, 8), (14, 24, 4, 4, 6)) if split else ((2, 2, 12), (14, 24, 2, 2, 6))

    def activations(self, it, micros, stage, values):
        whole, cut, own, first, last = values
        t, stages, value = it["t"], it["p"], 2 if self.half else 4
        live, tokens = min(micros, stages - stage), it["b"] * self.length // it["c"]
        block = tokens * self.width * (whole * t + cut) // t
        total = live * (self.layers // stages) * (tokens * self.width * own if it["again"] else block)
        logits = 0
        if stage == 0:
            total += live * first * tokens * self.width
        if stage == stages - 1:
            total += live * last * tokens * self.width
            # log-probabilities of live micro-batches; of one the logits, and the gradients of both
            logits = tokens * -(-self.vocab // t) * (4 * live + 4 + 2 * value)
        return total + max(logits, block if it["again"] else 0)

    def memory(self, it, micros):
        """[(device bytes, host bytes)] of every stage, and what pstar's time needs."""
        (weight, grad, state), values = self.bytes_of(it, micros)
        n = it["d"] * it["c"]
        if it["star"]:
            return self.memory_star(it, micros, weight, grad, state, values)
        found = []
        for stage in range(it["p"]):
            units = [self.ends(it["t"], stage, it["p"])] + [self.block(it["t"])] * (self.layers // it["p"])
            share = [-(-unit // n) for unit in units]
            kept = self.activations(it, micros, stage, values)
            if not it["zero"]:
                copy = grad * sum(units) if n > 1 else 0
                found.append(((weight + grad + state) * sum(units) + copy + kept, 0))
                continue
            moments = (12 if it["off"] and not self.half else state) * sum(share)
            weights = weight * (sum(share) if it["zero"] == 3 else n * sum(share))
            grads = grad * (sum(share) if it["zero"] > 1 else sum(units))
            buffers = grad * (units[0] + units[1])
            if it["zero"] == 3:
                buffers += weight * (units[0] + sum(units[1:3]))
            away = 0
            if it["off"]:
                away, moments = moments + (grads if it["zero"] > 1 else 0), 0
                grads = 0 if it["zero"] > 1 else grads
            found.append((weights + grads + moments + buffers + kept, away))
        return found, None

    def memory_star(self, it, micros, weight, grad, state, values):
        total, kept = self.ends(1, 0, 1) + self.layers * self.block(1), self.activations(it, micros, 0, values)
        own = -(-total // (it["d"] // it["copies"]))
        least = (weight + grad) * (self.vocab * self.width + self.block(1))
        room, fill = max(0, self.gpu_room - kept), 0

        def split(space):
            """Bytes near of own weights, gathered weights, gradients, states."""
            near = []
            for need in (weight * own, weight * (total - own), grad * own, state * own):
                near.append(min(space, need))
                space -= near[-1]
            return near

        near = split(room)
        host = (weight + grad + state) * own - near[0] - near[2] - near[3] + near[0]
        if host > self.host_room:
            fill = min(state * own, max(0, room - least))
            near = split(room - fill)
            near[3] = min(state * own, fill + near[3])
            host = weight * own + grad * own + state * own - near[3]
        device = max(sum(near), least) + kept
        return [(device, host)], (total, own, near, fill, room - fill)

    def ring(self, it, inner, size):
        """(bytes per second, seconds of a step) between neighbours of a group."""
        members, cluster = 1, self.cluster
        if self.in_node % inner == 0:
            members = max(n for n in range(1, size + 1) if size % n == 0 and (self.in_node // inner) % n == 0)
        if members == size:
            return cluster.link_speed, cluster.link_latency_s
        groups = self.in_node / members    # of one node, which leave it at the same time
        return min(cluster.link_speed, cluster.node_link_speed / groups), cluster.node_latency_s

    def seconds(self, it, micros, star):
        (weight, grad, state), values = self.bytes_of(it, micros)
        cluster, t, p, c = self.cluster, it["t"], it["p"], it["c"]
        speed = cluster.flops * cluster.fraction * (1.0 if self.half else 0.5)
        value, tokens, layers = 2 if self.half else 4, it["b"] * self.length // c, self.layers // p
        scores = 4 * tokens * self.length * self.width / t / speed
        block = 2 * tokens * 12 * self.width**2 / t / speed + scores
        forward = layers * block + 2 * tokens * self.width * self.vocab / t / speed
        backward = 2 * forward + (layers * block if it["again"] else 0)
        hops = 0.0
        if t > 1:
            rate, late = self.ring(it, 1, t)
            calls = layers * (5 if it["again"] else 4)
            table = 2 if p == 1 else 1
            width = tokens * self.width
            messages = [(value * width, calls), (4 * width, table), (4 * tokens, 1), (8 * tokens, 1)]
            sent = sum(count * (2 * size * (t - 1) // t) for size, count in messages)    # whole bytes each
            hops += sent / rate + (calls + table) * 2 * (t - 1) * late
        if c > 1:
            rate, late = self.ring(it, t, c)
            passes = 4 if it["again"] else 3
            both = layers * passes * (c - 1) * (2 * value * tokens * self.width / t / rate + late)
            hops += max(0, both - layers * passes * scores)
        if p > 1:
            rate, late = self.ring(it, t * c * it["d"], p)
            hops += 2 * (values[2] * tokens * self.width / rate + late)
        each = grad + 2 * (weight + state)
        if it["star"]:
            return self.seconds_star(it, micros, star, (weight, grad, state), forward, backward, each)
        total = (micros + p - 1) * (forward + backward + hops)
        units = [self.ends(t, 0, p)] + [self.block(t)] * layers
        n = it["d"] * c
        if n > 1:
            rate, late = self.ring(it, t, n)
            late *= len(units) * (n - 1)
            grads, weights = ((n - 1) / n * size * sum(units) / rate + late for size in (grad, weight))
            if it["zero"] == 0:
                total += max(2 * grads - backward, 2 * grads / len(units))
            elif it["zero"] < 3:
                times = 1 if it["zero"] == 1 else micros
                total += times * max(grads - backward, grads / len(units)) + weights
            else:
                moved = grads + 2 * weights
                total += micros * max(moved - forward - backward, moved / len(units))
        own = sum(-(-unit // n) for unit in units) if it["zero"] else sum(units)
        if not it["off"]:
            return total + own * each / cluster.memory_speed
        out = grad * own / cluster.pcie_speed
        total += out if it["zero"] == 1 else micros * max(0, out - backward)
        return total + own * each * self.in_node / cluster.host_speed + weight * own / cluster.pcie_speed

    def seconds_star(self, it, micros, star, costs, forward, backward, each):
        (weight, grad, state), cluster, n = costs, self.cluster, it["d"] // it["copies"]
        total, own, near, fill, room = star
        away = max(0, total - room // weight)
        far = (state * own - split_near(near, fill, room, weight, grad, own, total)) // state
        back = -(-away // n)
        into = weight * (max(far, back) + back * (2 * micros - 1))
        out = grad * far
        if fill:
            into, out = into + (grad + weight) * (near[3] // state), out + (grad + weight) * (near[3] // state)
        compute, waiting = micros * (forward + backward), 0.0
        if it["d"] > 1:
            rate, late = self.ring(it, 1, n)
            late *= (self.layers + 1) * (n - 1)
            gather = weight * (total + away * (2 * micros - 1)) * (n - 1) // n / rate + late
            reduce = grad * total * (n - 1) // n / rate + late
            for _ in range(1, it["copies"]):    # steps of a ring: all ranks of a node send at once, twice through all pieces
                each_rank = cluster.node_link_speed / self.in_node
                message = 2 * grad * own / it["copies"]
                reduce += message / min(cluster.link_speed, each_rank) + 2 * (self.layers + 1) * cluster.node_latency_s
            behind = compute - backward if room < weight * total else forward
            waiting = max(0, gather - behind) + max(0, reduce - backward)
        copies = max(into, out) / cluster.pcie_speed
        update = max(near[3] / state * each / cluster.memory_speed,
                     (state * own - near[3]) / state * each * self.in_node / cluster.host_speed)
        return max(compute + waiting, copies) + update

    def everything(self):
        """[(layout, whether it fits, seconds, bytes of the fullest device)] of every layout."""
        gpus, batch, found = self.cluster.gpus, self.job.batch, []
        for t in range(1, self.in_node + 1):
            for p in range(1, gpus + 1):
                for c in range(1, gpus + 1):
                    for d in range(1, gpus + 1):
                        if (t * p * c * d != gpus or self.in_node % t or self.heads % t or self.layers % p or batch % d
                                or (c > 1 and self.length % (2 * c))):
                            continue
                        for b in range(1, batch // d + 1):
                            if batch // d % b == 0:
                                found += self.variants({"d": d, "t": t, "p": p, "c": c, "b": b}, batch // d // b)
        return found

    def variants(self, split, micros):
        found, n = [], split["d"] * split["c"]
        for again in (False, True):
            stars = [1, self.cluster.nodes] if self.cluster.nodes > 1 < self.in_node else [1]
            for zero, off, star, copies in [(z, o, False, 1) for z in range(4) for o in (False, True)] + [
                    (0, False, True, copies) for copies in stars]:
                if star and n != self.cluster.gpus or star and split["c"] > 1:
                    continue
                if not star and (off and not zero or n == 1 and (zero, off) not in ((0, False), (2, True))):
                    continue
                it = split | {"again": again, "zero": zero, "off": off, "star": star, "copies": copies}
                stages, more = self.memory(it, micros)
                fits = all(device <= self.gpu_room and host <= self.host_room for device, host in stages)
                seconds = self.seconds(it, micros, more) if fits else None
                found.append((it, fits, seconds, max(device for device, _ in stages)))
        return found


def split_near(near, fill, room, weight, grad, own, total):
    """Bytes of states that pstar's traffic counts near: those that `room` leaves, without what fills it."""
    return near[3] if not fill else max(0, min(near[3], room - weight * total - grad * own))


def weight_of(it):
    return (it["zero"] + 2 * (it["t"] > 1) + 3 * (it["p"] > 1) + 3 * (it["c"] > 1) + 2 * it["off"] + 4 * it["star"]
            + (it["copies"] > 1) + it["again"])


def best_of(found):
    """The layout with the fewest techniques of those within 2 % of the fastest."""
    fitting = [(it, seconds) for it, fits, seconds, _ in found if fits]
    if not fitting:
        return None
    fastest = min(seconds for _, seconds in fitting)
    return min((item for item in fitting if item[1] <= 1.02 * fastest), key=lambda item: (
        weight_of(item[0]), item[0]["t"], item[0]["p"], item[0]["c"], item[0]["zero"], item[0]["again"], item[0]["off"],
        -item[0]["b"]))


def layout_of(it):
    return Layout(it["d"], it["t"], it["p"], it["c"], it["zero"], it["again"], it["off"], it["star"], it["b"], it["copies"])


def random_job(chance):
    """A machine of at most 16 GPUs and a model that fits some layouts, all or none."""
    nodes = chance.choice([1, 1, 2, 4])
    cluster = cluster_of(chance.choice(list(GPUS)), nodes * chance.choice([1, 2, 3, 4]), nodes,
                         chance.choice([16, 64, 256]) * GIB, fraction=chance.choice([0.4, 0.5]),
                         gpu_gib=chance.choice([None, 12.0, 40.0]), link_gb_s=chance.choice([None, 8.0, 100.0]),
                         node_link_gb_s=chance.choice([None, 1.25, 30.0]))  # fmt: skip
    heads = chance.choice([3, 8, 12, 16])
    shape = GptShape(chance.choice([2, 6, 12, 24, 31, 48]), heads * chance.choice([64, 128, 192]), heads,
                     chance.choice([4000, 21128, 50257]), 2048)
    return cluster, LayoutJob(shape, chance.choice([512, 1000, 2048]), chance.choice([1, 6, 8, 12, 16]),
                              chance.choice(["fp32", "bf16", "fp16"]))


def exhausts(number, seed=3):
    """Compares planner and search; returns the techniques that were best, and the number of jobs that fit nowhere."""
    chance, best, nowhere = random.Random(seed), set(), 0
    for _ in range(number):
        cluster, job = random_job(chance)
        answer, found = plan_layouts(cluster, job), Search(cluster, job).everything()
        assert {layout_of(it) for it, *_ in found} == set(layouts_of(cluster, job)), "every layout once"
        assert answer.tried == len(found) and answer.fitting == sum(fits for _, fits, *_ in found), (cluster, job)
        expected = best_of(found)
        assert (answer.best is None) == (expected is None)
        if expected:
            assert answer.best.layout == layout_of(expected[0]), (cluster, job)
            assert isclose(answer.best.step, expected[1], rel_tol=1e-9)
            known = {layout_of(it): (seconds, device) for it, fits, seconds, device in found if fits}
            for row in answer.rows:
                seconds, device = known[row.layout]
                assert isclose(row.step, seconds, rel_tol=1e-9) and row.need.device == device, (cluster, job, row.layout)
            best.add(technique_of(answer.best.layout))
        nowhere += expected is None
    return best, nowhere


def test_the_answer_is_that_of_exhaustive_search_on_200_machines_and_models():
    best, nowhere = exhausts(200)
    assert len(best) >= 7 and 0 < nowhere < 60, (best, nowhere)


WRONG = {
    "a bubble that is too small": ("layout_time", "layout.pipeline - 1", "layout.pipeline - 2"),
    "own gradients sent once between nodes": ("layout_time", "between = 2 * own", "between = own"),
    "a copy that is shared by all": ("layout_memory", "total, layout.owners, room)", "total, layout.data, room)"),
    "no gathering at stage 3": ("layout_time", "2 * parameters + gradients", "parameters + gradients"),
    "the other end of the pipeline": ("layout_memory", "{0, layout.pipeline - 1}", "{0}"),
    "no padding": ("shares", "ceil_div(outside, shards)", "outside // shards"),
    "whole gradients at stage 2": ("shares", "(total if stage <= 1 else own)", "(total if stage <= 2 else own)"),
    "a limit of 3 %": ("layouts", "CLOSE = 1.02", "CLOSE = 1.03"),
    "a divisor too few": ("layouts", "range(1, int(number**0.5) + 1)", "range(1, int(number**0.5))"),
}


@pytest.mark.parametrize("case", quick_only(WRONG, "no gathering at stage 3"))
def test_the_search_finds_a_wrong_formula(monkeypatch, case):
    """The planner's modules with one changed line; the search is compared with them."""
    name, right, wrong = WRONG[case]
    modules = planner_with(name, right, wrong)
    for attribute in ("plan_layouts", "layouts_of", "technique_of"):
        monkeypatch.setattr(f"{__name__}.{attribute}", getattr(modules["layouts"], attribute))
    with pytest.raises(AssertionError):
        exhausts(200)


def planner_with(changed, right, wrong):
    """{name: module} of the planner's modules, executed from their sources with one replacement in the module `changed`."""
    folder, modules = Path(shares.__file__).parent, {}
    for name in ("shares", "layout_memory", "layout_time", "layouts"):
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        if name == changed:
            assert right in text
            text = text.replace(right, wrong)
        for other in modules:
            text = text.replace(f"from pstar.planner.{other} import", f"from changed_{other} import")
        modules[name] = module = ModuleType(f"changed_{name}")
        sys.modules[module.__name__] = module
        exec(compile(text, f"changed {name}", "exec"), vars(module))
    same = dict.fromkeys(("Layout", "LayoutJob"))    # layouts of both kinds must be equal
    for kind in same:
        for module in modules.values():
            if hasattr(module, kind):
                setattr(module, kind, globals()[kind])
    return modules


# ---------------------------------------------------------------- by hand


def test_a_group_shares_the_links_that_it_crosses():
    cluster = cluster_of("a100-80", 32, 4, link_gb_s=200, node_link_gb_s=80)    # 8 GPUs a node
    inside, between = (200e9, 3.4e-6), 14e-6
    assert link_of(cluster, 1, 8) == inside and link_of(cluster, 2, 4) == inside
    assert link_of(cluster, 1, 32) == (80e9, between), "one ring, which has all adapters of a node"
    assert link_of(cluster, 8, 4) == (10e9, between), "eight rings share them"
    assert link_of(cluster, 2, 16) == (40e9, between), "two rings of four ranks a node"
    assert link_of(cluster, 16, 2) == (10e9, between)
    assert link_of(cluster, 3, 2) == (10e9, between), "ranks 0 and 3, or 6 and 9: the worst counts"


def job_of(shape, batch=64, precision="bf16"):
    return LayoutJob(shape, shape.positions, batch, precision)


def test_ddp_by_hand():
    shape = GptShape(2, 64, 2, vocab=100, positions=16)
    cluster = replace(cluster_of("a100-80", 4), link_speed=1e9, link_latency_s=1e-6)
    layout, params = Layout(data=4, micro_batch=2), shape.num_params
    need, seconds = need_of(cluster, job_of(shape, 8), layout), seconds_of(cluster, job_of(shape, 8), layout)
    width = 2 * 16 * 64
    assert need.kinds["activations"] == (2 * 38 + 2 + 6) * width + 2 * 16 * 100 * 12
    assert need.device == (16 + 2) * params + need.kinds["activations"] and need.host == 0
    forward = (2 * (24 * 32 * 64**2 + 4 * 32 * 16 * 64) + 2 * 32 * 64 * 100) / 156e12
    assert seconds["compute"] == pytest.approx(3 * forward)
    moving = 2 * (2 * params * 3 / 4 / 1e9 + 3 * 3 * 1e-6)
    assert seconds["data"] == pytest.approx(moving - 2 * forward)
    assert seconds["update"] == pytest.approx((2 + 2 * 14) * params / (0.8 * 2.039e12))


@pytest.mark.parametrize("p, micros", [(2, 8), (4, 4), (4, 32)])
def test_the_bubble_is_that_of_chapter_05(p, micros):
    seconds = seconds_of(cluster_of("h100", p), job_of(MODELS["gpt2"], micros), Layout(pipeline=p))
    share = seconds["bubble"] / (seconds["bubble"] + seconds["compute"])
    assert share == pytest.approx(bubble_fraction("1f1b", p, micros))


@pytest.mark.parametrize("kind, gpus, name, host, precision", [
    ("rtx4090", 1, "xl", 64, "bf16"), ("h200", 1, "18B", 128, "bf16"), ("v100-32", 8, "10B", 224, "fp16"),
    ("v100-32", 8, "15B", 224, "fp16"), ("a100-40", 8, "60B", 931, "bf16"), ("h200", 1, "gpt2", 128, "fp32"),
    ("a100-40", 8, "175B", 931, "bf16"),
])  # fmt: skip
def test_pstar_is_predicted_as_pstar_plan_does(kind, gpus, name, host, precision):
    """Modes near, hybrid, far and full; the engine's own functions choose chunks there, here nothing is padded."""
    shape, cluster = MODELS[name], cluster_of(kind, gpus, host_bytes=host * GIB)
    speeds = MachineSpeeds(cluster.pcie_speed, cluster.flops / 2, cluster.memory_speed, cluster.host_speed,
                           gpu_link_bytes_per_s=cluster.link_speed)  # fmt: skip
    expected = predict(shape, Machine("x", gpus, cluster.gpu_bytes, cluster.host_bytes, speeds), Job(1, 1024, precision))
    job, layout = LayoutJob(shape, 1024, gpus, precision), Layout(data=gpus, recompute=True, pstar=True)
    need = need_of(cluster, job, layout)
    assert need.fits == expected.fits == (name != "175B")
    if need.fits:
        assert need.host == pytest.approx(expected.far_bytes, rel=0.2 if expected.mode == "hybrid" else 0.08)
        assert sum(seconds_of(cluster, job, layout).values()) == pytest.approx(expected.seconds["step"], rel=0.06)


def test_chunks_on_each_node_by_hand():
    """Two nodes of two ranks: gathering stays inside; between nodes each rank's gradients are sent twice by halves."""
    cluster = replace(cluster_of("h100", 4, 2), link_speed=4e9, node_link_speed=1e8, link_latency_s=1e-12,
                      node_latency_s=1e-12)  # fmt: skip
    job = job_of(MODELS["gpt2"], 4)
    params, once = job.shape.num_params, Layout(data=4, pstar=True)
    each_node = replace(once, replicas=2)
    flat, seconds = (seconds_of(cluster, job, layout) for layout in (once, each_node))
    forward, backward = seconds["compute"] / 3, seconds["compute"] * 2 / 3
    gather, reduce, between = 2 * params / 2 / 4e9, 2 * params / 2 / 4e9, 2 * params / 2 / (1e8 / 2)
    assert seconds["data"] == pytest.approx(max(0, gather - forward) + reduce + between - backward)
    gather, reduce = (2 * params * 3 / 4 / 1e8 for _ in range(2))
    assert flat["data"] == pytest.approx(gather + reduce - forward - backward)
    assert "--ownership node" in command_of(cluster, job, each_node).lines[-1]
    assert "ownership" not in command_of(cluster, job, once).lines[-1]
    assert need_of(cluster, job, each_node).kinds["optimizer"] == 2 * need_of(cluster, job, once).kinds["optimizer"]


def test_of_layouts_as_fast_the_simplest_is_taken():
    answer = plan_layouts(cluster_of("h100", 1), job_of(MODELS["gpt2"]))
    assert answer.best.layout == Layout(micro_batch=64), "pstar is faster by less than 2 %"
    assert min(answer.rows, key=lambda row: row.step).layout.pstar and choose(answer.rows) is answer.best


def test_more_memory_and_faster_links_never_make_the_answer_slower():
    job = job_of(MODELS["4B"])
    fastest = None
    for change in ({}, {"gpu_gib": 48.0}, {"gpu_gib": 48.0, "link_gb_s": 100.0}):
        answer = plan_layouts(cluster_of("rtx4090", 8, **change), job)
        step = min(row.step for row in answer.rows)
        assert fastest is None or step <= fastest
        fastest = step


# ---------------------------------------------------------------- the command


def run(capsys, *flags):
    status = cli.main(["plan", "--layouts", *map(str, flags)])
    return status, capsys.readouterr()


def test_the_command_prints_the_best_layout_a_table_and_why_not(capsys):
    status, printed = run(capsys, "--gpu", "rtx4090", "--gpus", 8, "--model", "4B")
    lines = printed.out.splitlines()
    assert status == 0 and lines[2].startswith("Take ") and "tokens/s, MFU" in lines[2]
    rows = lines[5:lines.index("", 5)]
    assert 3 <= len(rows) <= 10 and rows[0].startswith(lines[2].split("(")[0][5:].strip())
    (ddp,) = [line for line in lines if line.startswith("not data parallel")]
    assert "GiB more GPU memory a rank" in ddp and "optimizer states alone take" in ddp
    assert any(line.startswith("bash chapters/") for line in lines) and lines[-1].startswith(("In production: ", "Note: "))


def test_the_command_as_json_and_its_status_says_whether_something_fits(capsys):
    status, printed = run(capsys, "--json", "--model", "xl")
    answer = json.loads(printed.out)
    assert status == 0 and answer["rows"][0]["layout"]["data"] == 8 and answer["command"]["runs"]
    status, printed = run(capsys, "--json", "--model", "175B", "--gpus", 1)
    answer = json.loads(printed.out)
    assert status == 1 and answer["rows"] == [] and "command" not in answer
    assert {refusal["technique"] for refusal in answer["refusals"]} == set(TECHNIQUES)
    status, printed = run(capsys, "--model", "175B", "--gpus", 1)
    assert status == 1 and "Nothing fits." in printed.out and "bash" not in printed.out


@pytest.mark.parametrize("flags, complaint", [
    (["--gpu", "h10"], "--gpu h10: no such kind; give one of rtx4090"), (["--gpus", "0"], "--gpus 0"),
    (["--gpus", "9", "--nodes", "2"], "--gpus 9 is not a multiple of --nodes 2"), (["--nodes", "-1"], "--nodes -1"),
    (["--gpus", "5000"], "--gpus 5000: give a whole number from 1 to 4096"), (["--link", "nan"], "--link nan"),
    (["--node-link", "0"], "--node-link 0"), (["--fraction", "2"], "--fraction 2"), (["--fraction", "-1"], "--fraction -1"),
    (["--global-batch", "0"], "--global-batch 0"), (["--global-batch", "100000"], "--global-batch 100000"),
    (["--seq-len", "4096"], "--seq-len 4096: the model has 1024 positions"), (["--vocab-size", "0"], "--vocab-size 0"),
    (["--model", "nope"], "--model nope"), (["--precision", "bf8"], "--precision"), (["--gpu-memory", "x"], "'x'"),
    (["--machine", "yard"], "--machine is not for --layouts"), (["--batch", "2"], "--batch is not for --layouts"),
])  # fmt: skip
def test_bad_input_is_one_line_and_status_2(capsys, flags, complaint):
    try:
        status, printed = run(capsys, *flags)
    except SystemExit as end:    # argparse
        status, printed = end.code, capsys.readouterr()
    assert status == 2 and printed.err.count("\n") == 1 and complaint in printed.err and not printed.out, printed


def test_a_flag_of_layouts_alone_is_refused(capsys):
    assert cli.main(["plan", "--gpu", "h100"]) == 2
    assert "--gpu is for --layouts only" in capsys.readouterr().err


def test_a_model_whose_mlp_is_narrow_is_refused(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"n_layer": 2, "n_embd": 64, "n_head": 2, "n_inner": 128}))
    status, printed = run(capsys, "--model", file)
    assert status == 2 and "4 times as wide" in printed.err
    with pytest.raises(ConfigError, match="4 times"):
        plan_layouts(cluster_of("h100", 1), job_of(replace(find_model("gpt2"), lora_rank=8)))


def test_every_word_has_a_sentence():
    assert set(TECHNIQUE_WORDS) == set(TECHNIQUES)
    chance, libraries, notes, reasons = random.Random(1), set(), set(), set()
    for _ in range(120):
        cluster, job = random_job(chance)
        for layout in layouts_of(cluster, job):
            command = command_of(cluster, job, layout)
            libraries.add(command.library)
            notes |= set(command.notes)
        reasons |= {refusal["reason"] for refusal in as_json(plan_layouts(cluster, job))["refusals"]}
    assert libraries == set(LIBRARIES) and notes == set(NOTE_WORDS)
    assert reasons - {"device", "host"} == set(REASON_WORDS) and {"device", "host"} <= reasons
