// The calculator of chapter 08: bytes of each method, LoRA's share, and activations under --recompute.
// Its formulas are `calculated` in docs/generate/arithmetic/adaptation.py; tests/docs/test_tools.py compares the two.
"use strict";

const courseAdaptation = (() => {
  const METHODS = ["full", "lora", "dora", "adapter", "prefix", "prompt", "ia3", "bitfit"];
  const MODULES = { attention: ["c_attn", "attn.c_proj"], all: ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"] };
  const BITS_OF_NF4 = 4 + 8 / 64 + 32 / (64 * 256);
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

  // [inputs, outputs] of the layers of a block
  const layer_sizes = (C) => ({ c_attn: [C, 3 * C], "attn.c_proj": [C, C], c_fc: [C, 4 * C], "mlp.c_proj": [4 * C, C] });

  function targets(method, modules) {
    return MODULES[modules] || (method === "ia3" ? ["c_attn", "mlp.c_proj"] : ["c_attn"]);
  }

  // How many numbers a method trains.
  function trained(job, method) {
    const { n_layer: L, n_embd: C, rank: r, bottleneck: m, virtual_tokens: v } = job, I = 4 * C;
    const sizes = targets(method, job.modules).map((name) => [name, ...layer_sizes(C)[name]]);
    const S = sum(sizes.map(([, inputs, outputs]) => inputs + outputs)), O = sum(sizes.map(([, , outputs]) => outputs));
    const A = sum(sizes.map(([name, inputs, outputs]) => (name === "mlp.c_proj" ? inputs : outputs)));
    return { full: courseFormulas.num_parameters(job), lora: L * r * S, dora: L * (r * S + O),
      adapter: L * (2 * (2 * C * m + m + C) + 4 * C) + 2 * C, prefix: 2 * L * C * v, prompt: C * v, ia3: L * A,
      bitfit: L * (7 * C + I) + C }[method];
  }

  // Bytes of the base and of what a method adds; with bits, the blocks' linear weights have so many bits each.
  function weight_bytes(job, method, count, bits) {
    const norms = (4 * job.n_layer + 2) * job.n_embd, inner = 12 * job.n_layer * job.n_embd ** 2;
    const added = method === "adapter" ? count - norms : ["full", "bitfit"].includes(method) ? 0 : count;
    const whole = 4 * (courseFormulas.num_parameters(job) + added);
    return bits ? whole - 4 * inner + Math.ceil(inner * bits / 8) : whole;
  }

  // Bytes of activations under --recompute: kept by a forward, and the most during backward.
  function activation_bytes(job) {
    const { n_layer: L, n_embd: C, n_head: H, recompute } = job, I = 4 * C, n = job.batch * job.seq_len;
    const length = { none: 0, block: 1, selective: 1, "every:2": 2, sqrt: Math.max(1, Math.round(Math.sqrt(L))) }[recompute];
    const selective = recompute === "selective", block = n * (8 * C + 2 * I + 4 + H);
    let inside = L * block, again = 0;
    if (length) {
      inside = selective ? L * n * (5 * C + H + C + I) : Math.ceil(L / length) * n * C;
      const of_one = block - n * C - (selective ? n * (4 * C + H + I) : 0);
      again = 4 * (length * of_one + (length - 1) * n * C);
    }
    const kept = 4 * (inside + n * (2 * C + 2) + n * job.vocab_size + 1) + 8 * (2 * n + job.seq_len);
    return { kept, most: kept + again };
  }

  // Why the chapter refuses a job; "" if it does not.
  function refusal(job) {
    if (job.n_embd % job.n_head) return "heads";
    if (job.seq_len > job.n_positions) return "length";
    if (job.rank > job.n_embd) return "rank"; // the smaller side of every layer of a block
    if (job.bottleneck > job.n_embd) return "bottleneck";
    if (job.virtual_tokens >= job.n_positions) return "virtual_tokens";
    return job.recompute === "every:2" && job.n_layer < 2 ? "segments" : "";
  }

  function calculated(job) {
    const parameters = courseFormulas.num_parameters(job);
    const row = (name, method, bits) => {
      const count = trained(job, method), weights = weight_bytes(job, method, count, bits), rest = 12 * count;
      return { name, count, share: count / parameters, weights, rest, together: weights + rest };
    };
    return { refusal: refusal(job), parameters, methods: [...METHODS.map((method) => row(method, method, 0)),
      row("qlora --bits 4", "lora", BITS_OF_NF4)], activations: activation_bytes(job) };
  }

  return { calculated };
})();

courseTools.start("adaptation-tool", (root) => {
  const { say, element, table, dot, bytes_text, with_commas } = courseTools;
  const at_most = (name, label, most, of) => [name, say(`${label[0]}最大 ${with_commas(most)}（${of[0]}）。`,
    `${label[1]} can be at most ${with_commas(most)}, ${of[1]}.`)];
  const WIDTH = ["模型宽度 n_embd", "the model's width n_embd"], PLACES = ["模型的位置数 n_positions", "the model's n_positions"];
  const REFUSALS = {
    heads: (job) => ["n_head", say(`n_embd（${job.n_embd}）必须是 n_head 的倍数。`,
      `n_embd (${job.n_embd}) must be a multiple of n_head.`)],
    length: (job) => at_most("seq_len", ["序列长度", "The sequence length"], job.n_positions, PLACES),
    rank: (job) => at_most("rank", ["秩", "The rank"], job.n_embd, WIDTH),
    bottleneck: (job) => at_most("bottleneck", ["瓶颈", "The bottleneck"], job.n_embd, WIDTH),
    virtual_tokens: (job) => at_most("virtual_tokens", ["虚拟 token 数", "Virtual tokens"], job.n_positions - 1,
      ["比模型的位置数少 1", "one less than the model's positions"]),
    segments: () => ["recompute", say("只有一层，不能每 2 层一段：请选 none、block、sqrt 或 selective。",
      "One layer makes no segment of two: choose none, block, sqrt or selective.")],
  };
  const whole = (name, label, max) => ({ name, label, min: 1, max });
  const sizes = courseTools.FIELDS.filter((field) => field.small);
  const fields = [courseTools.FIELDS.find((field) => field.name === "model"),
    whole("rank", say("秩 r", "rank r"), 65536),
    { name: "modules", label: say("lora、dora、ia3 作用的层", "layers of lora, dora, ia3"), options: {
      usual: say("默认", "as by default"), attention: "c_attn, attn.c_proj", all: say("全部四个", "all four") } },
    whole("bottleneck", say("adapter 的瓶颈", "adapter's bottleneck"), 65536),
    whole("virtual_tokens", say("虚拟 token 数", "virtual tokens"), 1e6),
    whole("batch", say("微批次（序列）", "micro-batch, sequences"), 1e6), whole("seq_len", say("序列长度", "sequence length"), 1e6),
    { name: "recompute", label: "--recompute", options: Object.fromEntries(
      ["none", "block", "every:2", "sqrt", "selective"].map((name) => [name, name])) }, ...sizes];

  function show(job, output) {
    const found = courseAdaptation.calculated(job);
    if (found.refusal) {
      const [field, sentence] = REFUSALS[found.refusal](job);
      return output.replaceChildren(courseTools.refusal(field,
        say("这一章的程序不会运行这个设置：", "The chapter does not run this: "), sentence));
    }
    const percent = (share) => `${with_commas(100 * share, 2)}%`, lora = found.methods.find((row) => row.name === "lora");
    const head = [say("方法", "method"), say("训练的参数", "trained"), say("占比", "share"),
      dot("parameters", say("权重", "weights")), dot("optimizer", say("梯度和状态", "gradients, states")),
      say("合计", "together"), say("加激活", "with activations")];
    const lines = found.methods.map((row) => [row.name, with_commas(row.count), percent(row.share), bytes_text(row.weights),
      bytes_text(row.rest), bytes_text(row.together), element("b", {}, bytes_text(row.together + found.activations.most))]);
    output.replaceChildren(
      element("p", { class: "tool-said" }, say("模型有 ", "Of "), element("b", {}, with_commas(found.parameters)),
        say(" 个参数，LoRA 只训练其中的 ", " parameters, LoRA trains "),
        element("b", { id: "tool-answer", "data-share": lora.share }, percent(lora.share)),
        say(`；激活最多 ${bytes_text(found.activations.most)}，前向之后保留 ${bytes_text(found.activations.kept)}`,
          `; activations: ${bytes_text(found.activations.most)} at most, ${bytes_text(found.activations.kept)} kept after forward`)),
      table(head, lines));
  }

  courseTools.form(root, fields, { model: "small", rank: 8, modules: "usual", bottleneck: 16, virtual_tokens: 16,
    recompute: "none", ...courseTools.PRESETS.small }, show);
});
