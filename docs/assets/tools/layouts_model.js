// The layouts of pstar/planner (gpus.py, layout_memory.py, layout_time.py, layouts.py, course_commands.py), function by
// function, under the same names; tests/docs/test_layouts_page.py compares them. The Python explains each rule and names its
// paper. A job is {n_layer, n_embd, n_head, n_positions, vocab_size, seq_len, batch, precision}.
"use strict";

const courseLayouts = (() => {
  const F = courseFormulas, { floor_div, ceil_div, GIB = 2 ** 30 } = F;
  const REACHED_FLOPS = 0.5, REACHED_BANDWIDTH = 0.8, CLOSE = 1.02;
  const NVLINK_LATENCY_S = 3.4e-6, PCIE_LATENCY_S = 5.7e-6, NODE_LATENCY_S = 14e-6;
  const TECHNIQUES = ["ddp", "zero1", "zero2", "zero3", "offload", "tensor", "pipeline", "3d", "context", "pstar"];
  const PARTS = ["compute", "bubble", "tensor", "context", "pipeline", "data", "host", "update"];

  // memory in GiB, TFLOP/s, GB/s of memory, links to GPUs of the node, PCIe and links to other nodes; bf16; NVLink
  const gpu = (memory_gib, tflops, memory_gb_s, link_gb_s, pcie_gb_s, node_link_gb_s, has_bf16, nvlink) => (
    { memory_gib, tflops, memory_gb_s, link_gb_s, pcie_gb_s, node_link_gb_s, has_bf16, nvlink });
  const GPUS = {
    rtx4090: gpu(23.6, 165.2, 1008, 16, 32, 12.5, true, false),
    "v100-32": gpu(31.7, 125, 900, 150, 16, 50, false, true),
    "a100-40": gpu(39.4, 312, 1555, 300, 32, 200, true, true),
    "a100-80": gpu(79.1, 312, 2039, 300, 32, 200, true, true),
    l40s: gpu(44.4, 362.05, 864, 32, 32, 12.5, true, false),
    h100: gpu(79.1, 989, 3350, 450, 64, 400, true, true),
    h200: gpu(139, 989, 4800, 450, 64, 400, true, true),
    b200: gpu(178, 2250, 8000, 900, 64, 400, true, true),
  };

  // ---- the cluster

  function cluster_of(name, gpus, nodes, host_bytes, host_gb_s, fraction, gpu_gib, link_gb_s, node_link_gb_s) {
    const kind = GPUS[name], per_node = floor_div(gpus, nodes);
    const gpu_bytes = Math.floor((gpu_gib ?? kind.memory_gib) * GIB);
    return {
      gpus, nodes, per_node, flops: kind.tflops * 1e12, fraction,
      memory_speed: kind.memory_gb_s * REACHED_BANDWIDTH * 1e9,
      link_speed: link_gb_s === null ? kind.link_gb_s * REACHED_BANDWIDTH * 1e9 : link_gb_s * 1e9,
      node_link_speed: node_link_gb_s === null ? kind.node_link_gb_s * REACHED_BANDWIDTH * 1e9 : node_link_gb_s * 1e9,
      pcie_speed: kind.pcie_gb_s * REACHED_BANDWIDTH * 1e9, host_speed: host_gb_s * 1e9,
      link_latency_s: kind.nvlink ? NVLINK_LATENCY_S : PCIE_LATENCY_S, node_latency_s: NODE_LATENCY_S,
      usable_gpu_bytes: Math.max(0, floor_div(gpu_bytes * 95, 100) - GIB),
      usable_host_bytes: floor_div(Math.max(0, host_bytes - 8 * GIB - 2 * GIB * per_node), per_node),
    };
  }

  function gcd(a, b) {
    while (b) [a, b] = [b, a % b];
    return a;
  }

  const known = new Map();
  function divisors(number) {
    if (!known.has(number)) known.set(number, [...Array(number).keys()].map((n) => n + 1).filter((n) => number % n === 0));
    return known.get(number);
  }

  // ---- bytes (layout_memory.py)

  const shards_of = (it) => it.data * it.context;
  const owners_of = (it) => floor_div(it.data, it.replicas);
  const splits_the_model = (it) => it.tensor * it.pipeline * it.context > 1;
  const micro_batches = (job, it) => floor_div(job.batch, it.data * it.micro_batch);

  function costs_of(job, it) {
    const precision = job.precision, value = F.value_bytes(precision);
    if (precision === "fp32") return [F.parameter_costs("ddp", "fp32"), F.activation_costs("fp32"), value];
    if (it.pstar || it.zero) {
      const summed = it.pstar ? micro_batches(job, it) > 1 : splits_the_model(it);
      const costs = F.parameter_costs(it.pstar ? "pstar" : "zero", precision);
      return [summed ? { ...costs, gradients: 4 } : costs, F.activation_costs(precision), value];
    }
    const level = splits_the_model(it) ? "O1" : "O2";
    return [F.parameter_costs("ddp", level), F.activation_costs(level), value];
  }

  const stage_parameters = (job, it, rank) => [
    F.stage_outside(job.n_embd, job.n_positions, job.vocab_size, it.tensor, it.pipeline, rank),
    F.block_parameters(job.n_embd, it.tensor), floor_div(job.n_layer, it.pipeline)];

  function activations(job, it, rank) {
    const [, costs, value] = costs_of(job, it), tokens = floor_div(it.micro_batch * job.seq_len, it.context);
    const live = Math.min(micro_batches(job, it), it.pipeline - rank);
    return F.activation_bytes(costs, 4 * live + 4 + 2 * value, tokens * job.n_embd, tokens * ceil_div(job.vocab_size, it.tensor),
      floor_div(job.n_layer, it.pipeline), it.tensor, live, live, rank === 0, rank === it.pipeline - 1, it.recompute);
  }

  function rank_bytes(job, it, rank) {
    const [outside, block, layers] = stage_parameters(job, it, rank);
    const found = F.zero_shares(costs_of(job, it)[0], outside, block, layers, shards_of(it), it.zero,
      it.offload ? "optimizer" : "none");
    found.activations = activations(job, it, rank);
    return found;
  }

  function pstar_bytes(cluster, job, it) {
    const costs = costs_of(job, it)[0], kept = activations(job, it, 0), [outside, block, layers] = stage_parameters(job, it, 0);
    const total = outside + layers * block, room = Math.max(0, cluster.usable_gpu_bytes - kept);
    let filled = 0, found = F.pstar_shares(costs, total, owners_of(it), room);
    found.host_buffers = found.parameters;
    if (F.host_bytes(found) > cluster.usable_host_bytes) {
      const states = (costs.masters + costs.moments) * ceil_div(total, owners_of(it));
      filled = Math.min(states, Math.max(0, room - least_near(job, it)));
      found = F.pstar_shares(costs, total, owners_of(it), room - filled);
      found.optimizer = Math.min(states, filled + found.optimizer);
      found.host_optimizer = states - found.optimizer;
      found.host_buffers = found.parameters + found.gradients;
    }
    found.activations = kept;
    return [found, filled];
  }

  function least_near(job, it) {
    const costs = costs_of(job, it)[0];
    return (costs.parameters + costs.gradients) * (job.vocab_size * job.n_embd + F.block_parameters(job.n_embd));
  }

  function need_of(cluster, job, it) {
    const room = { device_room: cluster.usable_gpu_bytes, host_room: cluster.usable_host_bytes };
    let kinds, device, host;
    if (it.pstar) {
      kinds = pstar_bytes(cluster, job, it)[0];
      device = Math.max(F.device_bytes(kinds), kinds.activations + least_near(job, it));
      host = F.host_bytes(kinds);
    } else {
      for (const rank of it.pipeline > 1 ? [0, it.pipeline - 1] : [0]) {
        const own = rank_bytes(job, it, rank), size = F.device_bytes(own);
        if (!kinds || size > device) [kinds, device] = [own, size];
        host = Math.max(host || 0, F.host_bytes(own));
      }
    }
    return { kinds, device, host, ...room, device_missing: Math.max(0, device - room.device_room),
      host_missing: Math.max(0, host - room.host_room), fits: device <= room.device_room && host <= room.host_room };
  }

  // ---- seconds (layout_time.py)

  function link_of(cluster, inner, size) {
    const inside = cluster.per_node % inner === 0 ? gcd(size, floor_div(cluster.per_node, inner)) : 1;
    if (inside === size) return [cluster.link_speed, cluster.link_latency_s];
    return [Math.min(cluster.link_speed, cluster.node_link_speed * inside / cluster.per_node), cluster.node_latency_s];
  }

  function micro_batch_seconds(cluster, job, it) {
    const c = job.n_embd, [, activation, value] = costs_of(job, it), t = it.tensor, p = it.pipeline, splits = it.context;
    const layers = floor_div(job.n_layer, p), tokens = floor_div(it.micro_batch * job.seq_len, splits);
    const speed = cluster.flops * cluster.fraction / (job.precision === "fp32" ? 2 : 1);
    const attention = 4 * tokens * job.seq_len * c / t / speed;
    const block = 24 * tokens * c * c / t / speed + attention;
    const forward = layers * block + 2 * tokens * c * job.vocab_size / t / speed;
    const found = { forward, backward: 2 * forward + (it.recompute ? layers * block : 0), tensor: 0, context: 0, pipeline: 0 };
    if (t > 1) {
      const [rate, latency] = link_of(cluster, 1, t), ends = p === 1 ? 2 : 1, calls = (it.recompute ? 5 : 4) * layers + ends;
      const moved = F.tensor_traffic(value, tokens, c, layers, t, it.recompute, ends);
      found.tensor = moved / rate + calls * 2 * (t - 1) * latency;
    }
    if (splits > 1) {
      const [rate, latency] = link_of(cluster, t, splits), passes = layers * (it.recompute ? 4 : 3) * (splits - 1);
      const moving = passes * (2 * value * tokens * c / t / rate + latency), hidden = layers * (it.recompute ? 4 : 3) * attention;
      found.context = Math.max(0, moving - hidden);
    }
    if (p > 1) {
      const [rate, latency] = link_of(cluster, t * splits * it.data, p);
      found.pipeline = 2 * (activation.input * tokens * c / rate + latency);
    }
    return found;
  }

  function data_seconds(cluster, job, it, micro) {
    const shards = shards_of(it);
    if (shards === 1) return 0;
    const costs = costs_of(job, it)[0], [outside, block, layers] = stage_parameters(job, it, 0);
    const [rate, latency] = link_of(cluster, it.tensor, shards), total = outside + layers * block;
    const ring = (bytes) => bytes * (shards - 1) / shards / rate + (layers + 1) * (shards - 1) * latency;
    const gradients = ring(costs.gradients * total), parameters = ring(costs.parameters * total);
    const moving = it.zero === 3 ? 2 * parameters + gradients : (it.zero === 0 ? 2 : 1) * gradients;
    const window = it.zero === 3 ? micro.forward + micro.backward : micro.backward;
    const times = it.zero >= 2 ? micro_batches(job, it) : 1;
    return times * Math.max(moving - window, moving / (layers + 1)) + (it.zero === 1 || it.zero === 2 ? parameters : 0);
  }

  function host_seconds(cluster, job, it, micro) {
    if (!it.offload) return 0;
    const costs = costs_of(job, it)[0], own = own_parameters(job, it);
    let out = costs.gradients * own / cluster.pcie_speed;
    if (it.zero > 1) out = micro_batches(job, it) * Math.max(0, out - micro.backward);
    const adam = own * adam_bytes(costs) / (cluster.host_speed / cluster.per_node);
    return out + adam + costs.parameters * own / cluster.pcie_speed;
  }

  function own_parameters(job, it) {
    const [outside, block, layers] = stage_parameters(job, it, 0), shards = shards_of(it);
    if (it.zero === 0 && !it.pstar) return outside + layers * block;
    return ceil_div(outside, shards) + layers * ceil_div(block, shards);
  }

  const adam_bytes = (costs) => costs.gradients + 2 * (costs.parameters + costs.masters + costs.moments);

  function pstar_seconds(cluster, job, it, micro) {
    const costs = costs_of(job, it)[0], micros = micro_batches(job, it), [kinds, filled] = pstar_bytes(cluster, job, it);
    const [outside, block, layers] = stage_parameters(job, it, 0), total = outside + layers * block;
    const room = Math.max(0, cluster.usable_gpu_bytes - kinds.activations) - filled;
    const moved = F.pstar_traffic(costs, total, owners_of(it), micros, room);
    const each = adam_bytes(costs), states = costs.masters + costs.moments;
    if (filled) {
      const near = floor_div(kinds.optimizer, states);
      moved.host_in += (costs.gradients + costs.parameters) * near;
      moved.host_out += (costs.gradients + costs.parameters) * near;
    }
    const compute = micros * (micro.forward + micro.backward);
    const host = Math.max(moved.host_in, moved.host_out) / cluster.pcie_speed;
    let waiting = 0;
    if (it.data > 1) {
      const owners = owners_of(it), nodes = it.replicas, own = costs.gradients * ceil_div(total, owners);
      const [rate, latency] = link_of(cluster, 1, owners), steps = (layers + 1) * (owners - 1) * latency;
      const [node_rate, node_latency] = link_of(cluster, owners, nodes);
      const between = 2 * own * (nodes - 1) / nodes / node_rate + 2 * (layers + 1) * (nodes - 1) * node_latency;
      const window = room < costs.parameters * total ? compute - micro.backward : micro.forward;
      waiting = Math.max(0, moved.gather / rate + steps - window)
        + Math.max(0, moved.reduce / rate + steps + between - micro.backward);
    }
    const far = kinds.host_optimizer / states * each / (cluster.host_speed / cluster.per_node);
    const near = kinds.optimizer / states * each / cluster.memory_speed;
    return { compute, data: waiting, host: Math.max(0, host - compute - waiting), update: Math.max(near, far) };
  }

  function seconds_of(cluster, job, it) {
    const micro = micro_batch_seconds(cluster, job, it), found = Object.fromEntries(PARTS.map((part) => [part, 0]));
    if (it.pstar) return { ...found, ...pstar_seconds(cluster, job, it, micro) };
    const micros = micro_batches(job, it), rounds = micros + it.pipeline - 1;
    found.compute = micros * (micro.forward + micro.backward);
    found.bubble = (it.pipeline - 1) * (micro.forward + micro.backward);
    for (const part of ["tensor", "context", "pipeline"]) found[part] = rounds * micro[part];
    found.data = data_seconds(cluster, job, it, micro);
    found.host = host_seconds(cluster, job, it, micro);
    if (!it.offload) found.update = own_parameters(job, it) * adam_bytes(costs_of(job, it)[0]) / cluster.memory_speed;
    return found;
  }

  // ---- the answer (layouts.py)

  function technique_of(it) {
    if (it.pstar) return "pstar";
    if (it.context > 1) return "context";
    if (it.tensor > 1 || it.pipeline > 1) return it.tensor > 1 && it.pipeline > 1 ? "3d" : it.tensor > 1 ? "tensor" : "pipeline";
    if (it.offload) return "offload";
    return it.zero ? `zero${it.zero}` : "ddp";
  }

  const states_of = (shards) => (shards === 1 ? [[0, false], [2, true]]
    : [[0, false], [1, false], [2, false], [3, false], [1, true], [2, true], [3, true]]);

  function* layouts_of(cluster, job) {
    const gpus = cluster.gpus;
    for (const tensor of divisors(gcd(job.n_head, cluster.per_node))) {
      for (const pipeline of divisors(gcd(job.n_layer, floor_div(gpus, tensor)))) {
        for (const context of divisors(floor_div(gpus, tensor * pipeline))) {
          const data = floor_div(gpus, tensor * pipeline * context);
          if (job.batch % data || (context > 1 && job.seq_len % (2 * context))) continue;
          const split = { data, tensor, pipeline, context };
          for (const micro_batch of divisors(floor_div(job.batch, data))) {
            for (const recompute of [false, true]) {
              for (const [zero, offload] of states_of(data * context)) {
                yield { ...split, zero, recompute, offload, pstar: false, micro_batch, replicas: 1 };
              }
              const copies = cluster.nodes > 1 && cluster.per_node > 1 ? [1, cluster.nodes] : [1];
              for (const replicas of data === gpus ? copies : []) {
                yield { ...split, zero: 0, recompute, offload: false, pstar: true, micro_batch, replicas };
              }
            }
          }
        }
      }
    }
  }

  function candidate_of(layout, need, seconds) {
    const it = layout, weight = it.zero + 2 * (it.tensor > 1) + 3 * (it.pipeline > 1) + 3 * (it.context > 1) + 2 * it.offload
      + 4 * it.pstar + (it.replicas > 1) + it.recompute;
    const step = seconds ? PARTS.reduce((sum, part) => sum + seconds[part], 0) : 0;
    const order = [weight, it.tensor, it.pipeline, it.context, it.zero, Number(it.recompute), Number(it.offload), -it.micro_batch];
    return { layout, need, seconds, step, order };
  }

  function compare(a, b) {
    for (let n = 0; n < a.length; n++) if (a[n] !== b[n]) return a[n] - b[n];
    return 0;
  }

  const least = (found, key) => found.reduce((best, other) => (compare(key(other), key(best)) < 0 ? other : best));

  function choose(candidates) {
    const limit = CLOSE * candidates.reduce((fastest, it) => Math.min(fastest, it.step), Infinity);
    return least(candidates.filter((it) => it.step <= limit), (it) => it.order);
  }

  const misses = (it) => [it.need.device_missing + it.need.host_missing, ...it.order];

  function refusal_of(cluster, job, technique, nearest) {
    if (!nearest) return { technique, reason: no_split(cluster, job, technique) };
    const { need } = nearest, reason = need.device_missing >= need.host_missing ? "device" : "host";
    const kinds = reason === "host" ? F.HOST_KINDS : F.KINDS;
    const term = kinds.reduce((best, kind) => (need.kinds[kind] > need.kinds[best] ? kind : best));
    return { technique, reason, layout: nearest.layout, missing_bytes: Math.max(need.device_missing, need.host_missing), term,
      term_bytes: need.kinds[term] };
  }

  function no_split(cluster, job, name) {
    if (cluster.gpus === 1) return "one_gpu";
    const heads = gcd(job.n_head, cluster.per_node) > 1, layers = gcd(job.n_layer, cluster.gpus) > 1;
    if (name === "tensor" && !heads) return "heads";
    if (name === "pipeline" && !layers) return "layers";
    if (name === "3d" && !(heads && layers)) return "heads_layers";
    if (name === "context" && divisors(cluster.gpus).slice(1).every((n) => job.seq_len % (2 * n))) return "length";
    return "batch";
  }

  function mfu(cluster, job, step) {
    const tokens = job.batch * job.seq_len, c = job.n_embd;
    const layer = 24 * tokens * c * c + 4 * tokens * job.seq_len * c;
    const flops = 3 * (job.n_layer * layer + 2 * tokens * c * job.vocab_size);
    return flops / step / cluster.gpus / (cluster.flops / (job.precision === "fp32" ? 2 : 1));
  }

  // The same object as `pstar plan --layouts --json` prints.
  function plan_layouts(cluster, job) {
    const fitting = {}, nearest = {};
    let tried = 0;
    for (const layout of layouts_of(cluster, job)) {
      tried++;
      const name = technique_of(layout), need = need_of(cluster, job, layout);
      if (need.fits) (fitting[name] ||= []).push(candidate_of(layout, need, seconds_of(cluster, job, layout)));
      else if (!(name in fitting)) {
        const other = candidate_of(layout, need, null);
        nearest[name] = nearest[name] ? least([nearest[name], other], misses) : other;
      }
    }
    const everything = Object.values(fitting).flat();
    let rows = [];
    if (everything.length) {
      const best = choose(everything);
      const others = Object.keys(fitting).filter((name) => name !== technique_of(best.layout)).map((name) => choose(fitting[name]));
      rows = [best, ...others.sort((a, b) => a.step - b.step || compare(a.order, b.order))];
    }
    const row_of = ({ layout, need, seconds, step }) => ({
      technique: technique_of(layout), layout: { ...layout, micro_batches: micro_batches(job, layout) }, step_s: step, seconds,
      tokens_per_s: job.batch * job.seq_len / step, mfu: mfu(cluster, job, step), device_bytes: need.device,
      device_room: need.device_room, host_bytes: need.host, host_room: need.host_room, kinds: need.kinds });
    const found = {
      parameters: F.num_parameters(job), tried, fitting: everything.length,
      rows: rows.map(row_of),
      refusals: TECHNIQUES.filter((name) => !(name in fitting)).map((name) => refusal_of(cluster, job, name, nearest[name])),
    };
    if (!rows.length) return found;
    const here = everything.filter((it) => runs_here(it.layout)), best = rows[0].layout;
    const instead = runs_here(best) || !here.length ? null : choose(here);
    found.command = { ...command_of(cluster, job, instead ? instead.layout : best), runs: runs_here(best),
      library: library_of(best), instead: instead && row_of(instead) };
    return found;
  }

  // ---- the command (course_commands.py)

  const CONFIGS = { "4 128 4 128": "tiny", "12 768 12 1024": "small", "24 1024 16 1024": "medium", "36 1280 20 1024": "large",
    "48 1600 25 1024": "xl" };
  const RECOMPUTE = { "00_single": "--recompute block", "02_ddp": "--recompute block", "04_apex": "--recompute block" };

  function library_of(it) {
    if (it.pstar) return "pstar";
    if (splits_the_model(it)) return it.offload ? "split_offload" : it.zero ? "split_zero" : "split";
    if (it.offload) return "offload";
    return it.zero ? `zero${it.zero}` : it.data > 1 ? "ddp" : "plain";
  }

  const runs_here = (it) => !(it.context > 1 || (splits_the_model(it) && (it.zero > 0 || it.offload)));

  function command_of(cluster, job, it) {
    let micros = micro_batches(job, it), own = [], chapter;
    const shards = shards_of(it), library = library_of(it), notes = [];
    const runs = runs_here(it);
    if (job.batch % shards) return { chapter: "", lines: [], runs: false, library, notes };
    if (it.context > 1) micros = gcd(micros, floor_div(job.batch, shards));
    if (it.pstar) {
      chapter = "07_patrickstar";
      own = [`--near-memory ${floor_div(cluster.usable_gpu_bytes, 2 ** 20)}MiB`];
      if (it.replicas > 1) own.push("--ownership node");
      if (pstar_bytes(cluster, job, it)[1]) own.push("--near-states fill");
    } else if (it.tensor * it.pipeline > 1) {
      chapter = "05_model_parallel";
      own = [`--tp ${it.tensor} --pp ${it.pipeline}`];
      if (it.tensor > 1) notes.push("cut_vocabulary");
      if (it.pipeline > 1 && shards > 1) notes.push("order");
    } else if (it.zero || it.context > 1) {
      chapter = "06_zero";
      own = [`--zero-stage ${it.zero}` + (it.offload ? " --offload optimizer" : "")];
    } else if (job.precision === "fp32") chapter = cluster.gpus === 1 ? "00_single" : "02_ddp";
    else [chapter, own] = ["04_apex", ["--opt-level O2"]];
    if (it.recompute) own.push(RECOMPUTE[chapter] || "--activation-checkpointing");
    const sizes = [job.n_layer, job.n_embd, job.n_head, job.n_positions], preset = CONFIGS[sizes.join(" ")];
    const names = ["n_layer", "n_embd", "n_head", "n_positions"];
    const file = `echo '{${names.map((name, n) => `"${name}": ${sizes[n]}`).join(", ")}}' > model.json`;
    const flags = [`--model-config ${preset || "model.json"} --seq-len ${job.seq_len} --batch-size ${job.batch} --grad-accum ${micros}`,
      `--precision ${job.precision}`, ...own].join(" ");
    let start = `bash chapters/${chapter}/train.sh ${chapter === "00_single" ? "" : `--nproc ${cluster.gpus} `}${flags}`;
    if (cluster.nodes > 1) {
      notes.push("nodes");
      start = `bash scripts/torchrun.sh --nnodes=${cluster.nodes} --node-rank=0 --nproc-per-node=${cluster.per_node} `
        + `--master-addr=node1 --master-port=29500 chapters/${chapter}/train.py ${flags}`;
    }
    return { chapter, lines: [...(preset ? [] : [file]), start], runs, library, notes };
  }

  return { GPUS, TECHNIQUES, PARTS, REACHED_FLOPS, cluster_of, plan_layouts, technique_of };
})();
