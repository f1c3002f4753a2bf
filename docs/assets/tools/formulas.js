// The formulas of pstar/planner/shares.py and docs/generate/arithmetic/formulas.py, function by function, under the same
// names; tests/docs/test_tools.py compares them. The Python explains each formula and names its paper.
// All bytes are whole numbers below 2^53, so doubles are exact.
"use strict";

const courseFormulas = (() => {
  const PIPELINES = ["layer_split", "gpipe", "1f1b", "interleaved"];
  const ZERO = ["zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload"];
  const REPLICAS = ["single", "ddp", "horovod"];
  const STRATEGIES = ["single", "server", "ddp", "horovod", ...PIPELINES, "tensor", ...ZERO, "pstar"];
  const KINDS = ["parameters", "gradients", "optimizer", "activations", "buffers"];
  const HOST_KINDS = ["host_parameters", "host_gradients", "host_optimizer", "host_buffers"];
  const HOROVOD_FUSION_BYTES = 64 * 2 ** 20;
  const GIB = 2 ** 30;

  // a / b alone may round up to the next whole number
  const floor_div = (number, divisor) => (number - (number % divisor)) / divisor;
  const ceil_div = (number, divisor) => floor_div(number + divisor - 1, divisor);

  // ---- the model

  const block_parameters = (n_embd, tensor = 1) => 6 * n_embd + ceil_div(12 * n_embd ** 2 + 7 * n_embd, tensor);

  function stage_outside(n_embd, n_positions, vocab_size, tensor, stages, rank) {
    const first = rank === 0, last = rank === stages - 1, tables = first || last ? ceil_div(vocab_size, tensor) : 0;
    return (tables + (first ? n_positions : 0) + (last ? 2 : 0)) * n_embd;
  }

  const outside_parameters = (job) => (job.vocab_size + job.n_positions + 2) * job.n_embd;

  const num_parameters = (job) => outside_parameters(job) + job.n_layer * block_parameters(job.n_embd);

  const num_tensors = (job) => 12 * job.n_layer + 4;

  // ---- what a parameter costs

  function precisions_of(strategy) {
    if (REPLICAS.includes(strategy)) return ["fp32", "O1", "O2", "O3"];
    if (ZERO.includes(strategy) || strategy === "pstar") return ["fp32", "bf16", "fp16"];
    return ["fp32", "O1"];
  }

  function parameter_costs(strategy, precision) {
    if (precision === "fp32") return { parameters: 4, gradients: 4, masters: 0, moments: 8 };
    if (precision === "O1") return { parameters: 6, gradients: 4, masters: 0, moments: 8 };
    if (precision === "O3") return { parameters: 2, gradients: 2, masters: 0, moments: 4 };
    const half = strategy === "pstar" && precision === "bf16";
    return { parameters: 2, gradients: 2, masters: half ? 2 : 4, moments: 8 };
  }

  const value_bytes = (precision) => (precision === "fp32" ? 4 : 2);

  // ---- who holds what

  function refusal(job) {
    const p = job.ranks, m = job.micro_batches, strategy = job.strategy;
    const split = PIPELINES.includes(strategy) || strategy === "tensor";
    if (strategy === "single" && p !== 1) return "ranks";
    if (!precisions_of(strategy).includes(job.precision)) return "precision";
    if (job.seq_len > job.n_positions) return "length";
    if (job.batch % ((split ? 1 : p) * m)) return "batch";
    if (PIPELINES.includes(strategy) && job.n_layer % (p * stages_of(job))) return "layers";
    if (strategy === "tensor" && job.n_head % p) return "heads";
    if (strategy === "interleaved" && (p === 1 || m % p)) return "micros";
    return "";
  }

  const stages_of = (job) => (job.strategy === "interleaved" ? job.virtual_stages : 1);

  // ranks that cut each block, and ranks that share the blocks
  const split_of = (job) => [job.strategy === "tensor" ? job.ranks : 1, PIPELINES.includes(job.strategy) ? job.ranks : 1];

  function held_parameters(job, rank) {
    const [tensor, stages] = split_of(job);
    return stage_outside(job.n_embd, job.n_positions, job.vocab_size, tensor, stages, stages > 1 ? rank : 0)
      + floor_div(job.n_layer, stages) * block_parameters(job.n_embd, tensor);
  }

  function sharded_parameters(job) {
    const p = job.ranks;
    return ceil_div(outside_parameters(job), p) + job.n_layer * ceil_div(block_parameters(job.n_embd), p);
  }

  const zero_stage = (strategy) => Number(strategy[4]);

  function near_budget(job) {
    const costs = parameter_costs("pstar", job.precision);
    const each = costs.parameters + costs.gradients + costs.masters + costs.moments;
    return floor_div(job.near_percent * each * num_parameters(job), 100);
  }

  function pstar_shares(costs, total, ranks, room) {
    const own = ceil_div(total, ranks);
    const wanted = {
      parameters: costs.parameters * own, buffers: costs.parameters * (total - own),
      gradients: costs.gradients * own, optimizer: (costs.masters + costs.moments) * own,
    };
    const found = no_bytes();
    for (const [kind, amount] of Object.entries(wanted)) {
      const near = Math.min(room, amount);
      found[kind] = near;
      room -= near;
      if (kind !== "buffers") found["host_" + kind] = amount - near;
    }
    return found;
  }

  const pstar_states = (job) => pstar_shares(parameter_costs("pstar", job.precision), num_parameters(job), job.ranks,
    near_budget(job));

  const no_bytes = () => Object.fromEntries([...KINDS, ...HOST_KINDS].map((kind) => [kind, 0]));

  function zero_shares(costs, outside, block, layers, shards, stage, offload) {
    const found = no_bytes(), total = outside + layers * block;
    const own = stage === 0 ? total : ceil_div(outside, shards) + layers * ceil_div(block, shards);
    const masters = offload === "optimizer" ? 4 : costs.masters;
    const parameters = stage === 3 ? own : stage === 0 ? total : shards * own;
    found[offload === "optimizer,params" ? "host_parameters" : "parameters"] = costs.parameters * parameters;
    const gradients = costs.gradients * (stage <= 1 ? total : own);
    found[offload !== "none" && stage > 1 ? "host_gradients" : "gradients"] = gradients;
    found[offload !== "none" ? "host_optimizer" : "optimizer"] = (masters + costs.moments) * own;
    found.buffers = stage === 0 ? (shards > 1 ? gradients : 0) : costs.gradients * (outside + block);
    if (stage === 3) found.buffers += costs.parameters * (outside + Math.min(2, layers) * block);
    return found;
  }

  function zero_states(job) {
    const stage = zero_stage(job.strategy), offload = job.strategy.endsWith("_offload");
    return zero_shares(parameter_costs(job.strategy, job.precision), outside_parameters(job), block_parameters(job.n_embd),
      job.n_layer, job.ranks, stage, !offload ? "none" : stage === 3 ? "optimizer,params" : "optimizer");
  }

  function states(job, rank = 0) {
    const strategy = job.strategy, p = job.ranks;
    if (strategy === "pstar") return pstar_states(job);
    if (ZERO.includes(strategy)) return zero_states(job);
    const costs = parameter_costs(strategy, job.precision), own = held_parameters(job, rank), found = no_bytes();
    found.parameters = costs.parameters * own;
    found.gradients = costs.gradients * own;
    if (strategy !== "server" || rank === 0) found.optimizer = (costs.masters + costs.moments) * own;
    if (p > 1 && strategy === "server") found.host_buffers = 4 * own * (rank === 0 ? p - 1 : 1);
    if (p > 1 && strategy === "ddp") found.buffers = found.gradients;
    if (p > 1 && strategy === "horovod") found.buffers = Math.min(found.gradients, HOROVOD_FUSION_BYTES);
    return found;
  }

  // ---- activations

  function activation_costs(precision) {
    if (precision === "fp32") return { whole: 20, cut: 48, input: 4, first: 4, last: 8 };
    if (precision === "O1") return { whole: 14, cut: 24, input: 4, first: 4, last: 6 };
    if (precision === "O2") return { whole: 14, cut: 24, input: 2, first: 2, last: 6 };
    return { whole: 10, cut: 24, input: 2, first: 2, last: 4 };
  }

  function micro_tokens(job) {
    const split = PIPELINES.includes(job.strategy) || job.strategy === "tensor";
    return ceil_div(job.batch, (split ? 1 : job.ranks) * job.micro_batches) * job.seq_len;
  }

  function live_micro_batches(job, rank) {
    const p = job.ranks, m = job.micro_batches, v = stages_of(job), strategy = job.strategy;
    if (strategy === "gpipe") return m;
    if (strategy === "1f1b") return Math.min(m, p - rank);
    if (strategy === "interleaved") return Math.min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1);
    return 1;
  }

  function activation_bytes(costs, logit, width, logits, layers, tensor, live, micros, is_first, is_last, recompute) {
    const block = floor_div((costs.whole * tensor + costs.cut) * width, tensor);
    const kept = live * layers * (recompute ? costs.input * width : block);
    const around = micros * width * ((is_first ? costs.first : 0) + (is_last ? costs.last : 0));
    return kept + around + Math.max(is_last ? logits * logit : 0, recompute ? block : 0);
  }

  function activations(job, rank = 0) {
    const tokens = micro_tokens(job), [cuts, stages] = split_of(job), live = live_micro_batches(job, rank);
    const ends = job.strategy === "interleaved" ? 1 : live;
    return activation_bytes(activation_costs(job.precision), 4 * ends + 4 + 2 * value_bytes(job.precision),
      tokens * job.n_embd, tokens * ceil_div(job.vocab_size, cuts), floor_div(job.n_layer, stages * stages_of(job)), cuts,
      live, Math.min(live, job.micro_batches), rank === 0 || stages === 1, rank === stages - 1 || stages === 1,
      job.checkpointing);
  }

  function memory(job, rank = 0) {
    const found = states(job, rank);
    found.activations = activations(job, rank);
    return found;
  }

  const device_bytes = (found) => KINDS.reduce((sum, kind) => sum + found[kind], 0);

  const host_bytes = (found) => HOST_KINDS.reduce((sum, kind) => sum + found[kind], 0);

  const usable_bytes = (gpu_gib) => floor_div(gpu_gib * GIB * 95, 100) - GIB;

  // ---- traffic

  const ring_bytes = (num_bytes, p) => floor_div(2 * num_bytes * (p - 1), p);

  function tensor_traffic(value, tokens, n_embd, layers, tensor, recompute, ends = 2) {
    const calls = (recompute ? 5 : 4) * layers;
    const own = calls * ring_bytes(value * tokens * n_embd, tensor) + ends * ring_bytes(4 * tokens * n_embd, tensor);
    return own + ring_bytes(4 * tokens, tensor) + ring_bytes(8 * tokens, tensor);
  }

  const tensor_bytes = (job) => job.micro_batches * tensor_traffic(value_bytes(job.precision), micro_tokens(job), job.n_embd,
    job.n_layer, job.ranks, job.checkpointing);

  function boundaries(job, rank) {
    const p = job.ranks, v = stages_of(job);
    if (p === 1) return { sent: 0, received: 0 };
    return { sent: v - (rank === p - 1 ? 1 : 0), received: v - (rank === 0 ? 1 : 0) };
  }

  function pstar_away(job) {
    const room = floor_div(near_budget(job), parameter_costs("pstar", job.precision).parameters);
    return Math.max(0, num_parameters(job) - room);
  }

  function pstar_traffic(costs, total, ranks, micros, room) {
    const away = Math.max(0, total - floor_div(room, costs.parameters)), back = ceil_div(away, ranks);
    const far = floor_div(pstar_shares(costs, total, ranks, room).host_optimizer, costs.masters + costs.moments);
    return {
      gather: floor_div(costs.parameters * (total + away * (2 * micros - 1)) * (ranks - 1), ranks),
      reduce: floor_div(costs.gradients * total * (ranks - 1), ranks),
      host_out: costs.gradients * far,
      host_in: costs.parameters * (Math.max(far, back) + back * (2 * micros - 1)),
    };
  }

  function traffic(job, rank = 0) {
    const strategy = job.strategy, p = job.ranks, m = job.micro_batches;
    const costs = parameter_costs(strategy, job.precision), total = num_parameters(job);
    const found = {
      sent_gradients: 0, sent_parameters: 0, sent_activations: 0,
      received_gradients: 0, received_parameters: 0, received_activations: 0, host_out: 0, host_in: 0,
    };
    if (strategy === "server") {
      const others = rank === 0 ? p - 1 : 1;
      const [up, down] = rank === 0 ? ["received", "sent"] : ["sent", "received"];
      found[up + "_gradients"] = found[down + "_parameters"] = others * 4 * total;
      return found;
    }
    if (PIPELINES.includes(strategy)) {
      const between = boundaries(job, rank), each = m * 4 * micro_tokens(job) * job.n_embd;
      found.sent_activations = found.received_activations = each * (between.sent + between.received);
      if (p > 1 && (rank === 0 || rank === p - 1)) {
        found.sent_gradients = found.received_gradients = 4 * job.vocab_size * job.n_embd;
      }
      return found;
    }
    let gradients = 0, parameters = 0, moved = 0;
    if (strategy === "tensor") {
      moved = tensor_bytes(job);
    } else if (ZERO.includes(strategy)) {
      const stage = zero_stage(strategy), own = sharded_parameters(job);
      const outside = ceil_div(outside_parameters(job), p), gathered = stage === 3 ? m * (2 * own - outside) : own;
      gradients = costs.gradients * own * (p - 1) * (stage > 1 ? m : 1);
      parameters = costs.parameters * (p - 1) * gathered;
      if (strategy.endsWith("_offload")) {
        found.host_out = costs.gradients * own * (stage > 1 ? m : 1);
        found.host_in = costs.parameters * gathered;
      }
    } else if (strategy === "pstar") {
      const own = pstar_traffic(costs, total, p, m, near_budget(job));
      gradients = own.reduce;
      parameters = own.gather;
      found.host_out = own.host_out;
      found.host_in = own.host_in;
    } else {
      gradients = ring_bytes(costs.gradients * total, p);
    }
    found.sent_gradients = found.received_gradients = gradients;
    found.sent_parameters = found.received_parameters = parameters;
    found.sent_activations = found.received_activations = moved;
    return found;
  }

  const sent_bytes = (found) => found.sent_gradients + found.sent_parameters + found.sent_activations;

  const received_bytes = (found) => found.received_gradients + found.received_parameters + found.received_activations;

  // ---- time

  function step_flops(job) {
    const tokens = job.batch * job.seq_len, c = job.n_embd;
    const blocks = job.n_layer * (24 * tokens * c ** 2 + 4 * tokens * job.seq_len * c);
    return (job.checkpointing ? 4 : 3) * blocks + 3 * 2 * tokens * c * job.vocab_size;
  }

  function bubble_fraction(strategy, p, m, v = 1) {
    const rounds = strategy === "layer_split" ? 1 : m * (strategy === "interleaved" ? v : 1);
    return (p - 1) / (rounds + p - 1);
  }

  function compute_seconds(job, flops_per_s) {
    let seconds = step_flops(job) / (job.ranks * flops_per_s);
    if (PIPELINES.includes(job.strategy)) {
      seconds /= 1 - bubble_fraction(job.strategy, job.ranks, job.micro_batches, stages_of(job));
    }
    return seconds;
  }

  const link_seconds = (found, bytes_per_s) => Math.max(sent_bytes(found), received_bytes(found)) / bytes_per_s;

  return {
    PIPELINES, ZERO, REPLICAS, STRATEGIES, KINDS, HOST_KINDS, ceil_div, block_parameters, outside_parameters, num_parameters,
    num_tensors, precisions_of, parameter_costs, value_bytes, refusal, stages_of, held_parameters, sharded_parameters,
    zero_stage, near_budget, pstar_states, no_bytes, zero_states, states, activation_costs, micro_tokens,
    live_micro_batches, activations, memory, device_bytes,
    floor_div, stage_outside, split_of, zero_shares, pstar_shares, activation_bytes, tensor_traffic, pstar_traffic,
    host_bytes, usable_bytes, ring_bytes, tensor_bytes, boundaries,
    pstar_away, traffic, sent_bytes, received_bytes, step_flops, bubble_fraction, compute_seconds, link_seconds,
  };
})();
