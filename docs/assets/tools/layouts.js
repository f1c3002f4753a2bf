// The calculator "Which technique?": the fastest layout that fits, the best of each technique, why not the others, the command.
"use strict";

courseTools.start("layouts-tool", (root) => {
  const { say, element, table, bytes_text, seconds_text, with_commas, three } = courseTools, L = courseLayouts;
  const GPU_NAMES = { rtx4090: "RTX 4090, 24 GB", "v100-32": "V100, 32 GB", "a100-40": "A100, 40 GB", "a100-80": "A100, 80 GB",
    l40s: "L40S, 48 GB", h100: "H100, 80 GB", h200: "H200, 141 GB", b200: "B200, 180 GB" };
  const TECHNIQUES = {
    ddp: say("数据并行（DDP）", "data parallel (DDP)"), zero1: say("ZeRO 阶段 1", "ZeRO stage 1"),
    zero2: say("ZeRO 阶段 2", "ZeRO stage 2"), zero3: say("ZeRO 阶段 3", "ZeRO stage 3"),
    offload: say("ZeRO-Offload", "ZeRO-Offload"), tensor: say("张量并行", "tensor parallel"),
    pipeline: say("流水线并行", "pipeline"), "3d": say("张量 × 流水线并行", "tensor x pipeline"),
    context: say("上下文并行", "context parallel"), pstar: "PatrickStar",
  };
  const REASONS = {
    one_gpu: say("只有一块 GPU，没有可以分担的进程", "there is one GPU, so nothing to share"),
    batch: say("全局批次不能平均分给这么多副本", "the global batch cannot be divided among so many replicas"),
    heads: say("没有大于 1 的数能同时整除注意力头数和一个节点的 GPU 数", "no number above 1 divides both the heads and the GPUs of a node"),
    layers: say("没有大于 1 的数能同时整除层数和 GPU 数", "no number above 1 divides both the layers and the GPUs"),
    heads_layers: say("头数与节点 GPU 数，或层数与 GPU 总数，没有公约数",
      "the heads and a node's GPUs, or the layers and all GPUs, have no common divisor"),
    length: say("序列长度不是进程数两倍的倍数", "the sequence is not a multiple of twice as many ranks"),
  };
  const TERMS = { parameters: say("参数", "parameters"), gradients: say("梯度", "gradients"),
    optimizer: say("优化器状态", "optimizer states"), activations: say("激活", "activations"), buffers: say("缓冲区", "buffers") };
  const WAITS = { bubble: say("气泡", "bubble"), tensor: say("张量并行通信", "tensor"), context: say("上下文并行通信", "context"),
    pipeline: say("流水线通信", "pipeline"), data: say("数据并行通信", "data"), host: say("主机", "host") };
  const LIBRARIES = {
    plain: say("普通的 PyTorch", "plain PyTorch"),
    ddp: say("torch DistributedDataParallel，可由 Accelerate 启动", "torch DistributedDataParallel; Accelerate starts it"),
    zero1: say("torch ZeroRedundancyOptimizer、DeepSpeed 阶段 1、Megatron-Core 的分布式优化器",
      "torch ZeroRedundancyOptimizer, DeepSpeed stage 1, Megatron-Core's distributed optimizer"),
    zero2: say("DeepSpeed 阶段 2，或 FSDP2（reshard_after_forward=False）", "DeepSpeed stage 2, FSDP2 with reshard_after_forward=False"),
    zero3: say("FSDP2（fully_shard）、DeepSpeed 阶段 3", "FSDP2 (fully_shard), DeepSpeed stage 3"),
    offload: say("DeepSpeed 的 offload_optimizer", "DeepSpeed with offload_optimizer"),
    split: "Megatron-LM, torchtitan",
    split_zero: say("Megatron-LM 加 --use-distributed-optimizer（阶段 1），或 torchtitan（FSDP2 与张量、流水线、上下文并行）",
      "Megatron-LM with --use-distributed-optimizer (stage 1), torchtitan (FSDP2 with tensor, pipeline and context parallelism)"),
    split_offload: say("Megatron-LM 加 --optimizer-cpu-offload", "Megatron-LM with --optimizer-cpu-offload"),
    pstar: say("pstar；ColossalAI 的 Gemini 出自同一思路", "pstar; ColossalAI's Gemini descends from the same idea"),
  };
  const NOTES = {
    cut_vocabulary: say("运行时用的是课程自己的词表（--vocab），其大小必须能被 --tp 整除",
      "the run has the course's own vocabulary (--vocab), whose size --tp must divide"),
    order: say("第 05 章把数据并行的进程排在最外层；这里的时间按 Megatron 的顺序计算，流水线排在最外层",
      "chapter 05 numbers data parallel ranks last; the times here are for Megatron's order, pipeline ranks last"),
    nodes: say("在每个节点上各执行一次这条命令，--node-rank 各不相同；node1 是第一个节点的地址",
      "start the line on each node with its own --node-rank; node1 is the first node's address"),
  };
  const sizes = (n_layer, n_embd, n_head) => ({ n_layer, n_embd, n_head, n_positions: 1024, vocab_size: 50257 });
  const MODELS = { gpt2: sizes(12, 768, 12), medium: sizes(24, 1024, 16), large: sizes(36, 1280, 20), xl: sizes(48, 1600, 25),
    "4B": sizes(64, 2304, 16), "6B": sizes(53, 3072, 16), "10B": sizes(50, 4096, 16), "20B": sizes(25, 8192, 16),
    "40B": sizes(50, 8192, 16), "68B": sizes(66, 9216, 16), "175B": sizes(96, 12288, 96) };
  const MODEL_NAMES = { gpt2: "gpt2 (124M)", medium: "medium (355M)", large: "large (774M)", xl: "xl (1.5B)" };
  const table_value = say("GB/s（0：按表）", "GB/s (0: from the table)"), speed = { min: 0, max: 1e6, step: "any" };
  const fields = [
    { name: "gpu", label: "GPU", options: GPU_NAMES },
    { name: "gpus", label: say("GPU 总数", "GPUs in all"), min: 1, max: 4096 },
    { name: "nodes", label: say("节点数", "nodes"), min: 1, max: 4096 },
    { name: "model", label: say("模型", "model"), options: { ...Object.fromEntries(Object.keys(MODELS).map((name) => [
      name, MODEL_NAMES[name] || name])), custom: say("自定义", "of your own") } },
    { name: "batch", label: say("全局批次（序列）", "global batch, sequences"), min: 1, max: 65536 },
    { name: "seq_len", label: say("序列长度", "sequence length"), min: 1, max: 1e6 },
    { name: "precision", label: say("精度", "precision"), options: { half: say("16 位（V100 用 fp16，其余 bf16）", "16 bit (fp16 on V100, else bf16)"), fp32: "fp32" } },
    { name: "host_gib", label: say("每个节点的主机内存，GiB", "host memory of a node, GiB"), min: 1, max: 65536 },
    { name: "link", label: say("节点内链路，", "links in a node, ") + table_value, ...speed },
    { name: "node_link", label: say("节点间链路，", "links between nodes, ") + table_value, ...speed },
    { name: "fraction", label: say("达到峰值算力的比例", "share of the peak that is reached"), min: 0.01, max: 1, step: "any" },
    ...courseTools.FIELDS.filter((field) => field.small),
  ];
  const DEFAULTS = { gpu: "a100-80", gpus: 8, nodes: 1, model: "10B", batch: 64, precision: "half", host_gib: 512, link: 0,
    node_link: 0, fraction: L.REACHED_FLOPS, ...MODELS["10B"], seq_len: 1024 };

  function words(it) {
    const ranks = [["data", say("数据", "data")], ["tensor", say("张量", "tensor")], ["pipeline", say("流水线", "pipeline")],
      ["context", say("上下文", "context")]].filter(([name]) => it[name] > 1).map(([name, text]) => `${text} ${it[name]}`);
    const micro = it.micro_batches === undefined ? "" : say(`，每步 ${it.micro_batches} 个`, `, ${it.micro_batches} a step`);
    return [ranks.join(" × ") || say("1 块 GPU", "1 GPU"), ...(it.zero ? [`ZeRO ${it.zero}`] : []),
      ...(it.offload ? [say("状态在主机内存", "states on the host")] : []), ...(it.pstar ? ["pstar"] : []),
      ...(it.replicas > 1 ? [say("每个节点都有全部的块", "all chunks on each node")] : []),
      ...(it.recompute ? [say("激活检查点", "recomputation")] : []),
      say(`微批次 ${it.micro_batch} 条序列`, `micro-batches of ${it.micro_batch}`) + micro].join(say("，", ", "));
  }

  function why_not(refusal) {
    if (!refusal.layout) return `${TECHNIQUES[refusal.technique]}${say("：", ": ")}${REASONS[refusal.reason]}`;
    const term = TERMS[refusal.term.replace("host_", "")], missing = bytes_text(refusal.missing_bytes);
    const where = refusal.reason === "device" ? say("显存", "GPU memory") : say("主机内存", "host memory");
    return say(
      `${TECHNIQUES[refusal.technique]}：最接近的布局（${words(refusal.layout)}）每个进程还缺 ${missing} ${where}；仅${term}就占 ${bytes_text(refusal.term_bytes)}`,
      `${TECHNIQUES[refusal.technique]}: ${missing} more ${where} a rank, where it comes nearest (${words(refusal.layout)}); `
      + `${term} alone take ${bytes_text(refusal.term_bytes)}`);
  }

  function waits(row) {
    const [part, seconds] = Object.keys(WAITS).map((name) => [name, row.seconds[name]]).reduce((a, b) => (b[1] > a[1] ? b : a));
    return seconds ? `${WAITS[part]} ${three(100 * seconds / row.step_s)} %` : "—";
  }

  function refused(state) {
    if (state.gpus % state.nodes) {
      return courseTools.refusal("nodes", say(`${state.gpus} 块 GPU 不能平均分到 ${state.nodes} 个节点。`,
        `${state.gpus} GPUs cannot be divided among ${state.nodes} nodes equally.`));
    }
    if (state.seq_len > state.n_positions) {
      return courseTools.refusal("seq_len", say(`序列最长 ${with_commas(state.n_positions)}，即模型的位置数 n_positions。`,
        `The sequence can have at most ${with_commas(state.n_positions)} tokens, the model's n_positions.`));
    }
    if (state.n_embd % state.n_head) {
      return courseTools.refusal("n_head", say(`宽度 ${state.n_embd} 不能被 ${state.n_head} 个头整除。`,
        `The width ${state.n_embd} is not a multiple of ${state.n_head} heads.`));
    }
    return null;
  }

  function command(found) {
    const { lines, runs, library, notes, instead } = found.command, parts = [];
    if (!runs) {
      const rest = instead ? say(
        `。各章能运行的最快布局是${TECHNIQUES[instead.technique]}（${words(instead.layout)}），每步 ${seconds_text(instead.step_s)}：`,
        `. The fastest that a chapter runs: ${TECHNIQUES[instead.technique]} (${words(instead.layout)}), ${seconds_text(instead.step_s)} a step:`)
        : lines.length ? say("；按这里的计算，最接近的也放不下：", "; the nearest does not fit by this count:")
          : say("，也没有接近的。", ", and none comes near.");
      parts.push(element("p", {}, say("课程里没有程序运行这种布局", "No program of the course runs this layout"), rest));
    }
    if (lines.length) parts.push(element("pre", { class: "tool-command", tabindex: "0" }, element("code", {}, lines.join("\n"))));
    parts.push(element("p", {}, say("生产中使用：", "In production: "), LIBRARIES[library], say("。", ".")));
    for (const note of notes) parts.push(element("p", {}, say("注意：", "Note: "), NOTES[note], say("。", ".")));
    return parts;
  }

  function show(state, output) {
    const no = refused(state);
    if (no) return output.replaceChildren(no);
    const GIB = 2 ** 30, precision = state.precision === "fp32" ? "fp32" : L.GPUS[state.gpu].has_bf16 ? "bf16" : "fp16";
    const cluster = L.cluster_of(state.gpu, state.gpus, state.nodes, state.host_gib * GIB, 200, state.fraction, null,
      state.link || null, state.node_link || null);
    const found = L.plan_layouts(cluster, { ...state, precision }), [best] = found.rows;
    const counted = element("p", {}, say(
      `${with_commas(found.parameters)} 个参数；试了 ${with_commas(found.tried)} 种布局，放得下 ${with_commas(found.fitting)} 种。`,
      `${with_commas(found.parameters)} parameters; ${with_commas(found.tried)} layouts tried, ${with_commas(found.fitting)} fit.`));
    const list = element("ul", { class: "tool-why-not" }, ...found.refusals.map((refusal) => element("li", {}, why_not(refusal))));
    const others = found.refusals.length ? [element("p", {}, element("b", {}, say("为什么不用：", "Why not:"))), list] : [];
    if (!best) {
      return output.replaceChildren(element("p", { class: "tool-said" }, element("b", { id: "tool-answer", "data-step": "none" },
        say("没有放得下的布局。", "Nothing fits."))), counted, ...others);
    }
    const head = [say("技术", "technique"), say("布局", "layout"), say("每步", "a step"), say("token/秒", "tokens/s"), "MFU",
      say("显存", "GPU"), say("主机", "host"), say("等待最多", "waits most for")];
    const rows = found.rows.map((row) => [TECHNIQUES[row.technique], words(row.layout), seconds_text(row.step_s),
      with_commas(row.tokens_per_s), `${three(100 * row.mfu)} %`, bytes_text(row.device_bytes), bytes_text(row.host_bytes), waits(row)]);
    output.replaceChildren(
      element("p", { class: "tool-said" }, say("用 ", "Take "),
        element("b", { id: "tool-answer", "data-step": best.step_s }, TECHNIQUES[best.technique]),
        say(`（${words(best.layout)}）：每步 ${seconds_text(best.step_s)}，${with_commas(best.tokens_per_s)} token/秒，MFU ${three(100 * best.mfu)} %，每块 GPU 占 ${bytes_text(best.device_bytes)}，可用 ${bytes_text(best.device_room)}。`,
          ` (${words(best.layout)}): ${seconds_text(best.step_s)} a step, ${with_commas(best.tokens_per_s)} tokens/s, MFU ${three(100 * best.mfu)} %, ${bytes_text(best.device_bytes)} of ${bytes_text(best.device_room)} a GPU.`)),
      counted, table(head, rows), ...command(found), ...others);
  }

  courseTools.form(root, fields, DEFAULTS, show, MODELS);
});
