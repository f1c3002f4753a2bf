// What a rank holds under DDP, ZeRO 1 to 3 and offload, one bar after the other, with the memory of GPUs. The bytes are those
// of tools/formulas.js; tests/docs/test_embedded.py compares the picture with docs/generate/arithmetic/formulas.py.
"use strict";

if (typeof courseFigures !== "undefined") courseFigures.define("states", (root) => {
  const { say, element, dot, bytes_text, PRESETS, STRATEGY_NAMES, KIND_NAMES } = courseTools, F = courseFormulas;
  const { svg, picture, choice, player } = courseFigures;
  const WIDTH = 360, TOP = 4, ROW = 42, BAR = 18, STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "zero3_offload"], GPUS = [8, 24, 80];
  let model = "xl", p = 8;

  // One sequence of the model's full length a rank, in 16 bits with fp32 masters.
  const job_of = (strategy) => ({ model, strategy, precision: strategy === "ddp" ? "O2" : "bf16", ...PRESETS[model], ranks: p, batch: p,
    seq_len: PRESETS[model].n_positions, micro_batches: 1, checkpointing: false, virtual_stages: 1, near_percent: 100 });
  const held = () => STRATEGIES.map((strategy) => F.memory(job_of(strategy), 0));
  const fits = (found) => GPUS.find((gib) => F.device_bytes(found) <= F.usable_bytes(gib));

  function draw(now) {
    const all = held(), most = Math.max(...all.map(F.device_bytes)) * 1.02, scale = WIDTH / most, bottom = TOP + STRATEGIES.length * ROW;
    const found = picture(WIDTH, bottom + 18, say("每种策略下一个进程持有的字节", "bytes of a rank under each strategy"));
    all.forEach((one, at) => {
      const y = TOP + at * ROW, row = svg("g", { class: at === now ? "figure-came" : "", "data-strategy": STRATEGIES[at] },
        svg("text", { x: 0, y: y + 13 }, STRATEGY_NAMES[STRATEGIES[at]]));
      let x = 0;
      if (at <= now) {
        row.append(svg("text", { x: WIDTH, y: y + 13, class: "figure-end" }, bytes_text(F.device_bytes(one))));
        for (const kind of F.KINDS) {
          const wide = one[kind] * scale;
          row.append(svg("rect", { x, y: y + BAR, width: wide, height: BAR, class: `figure-${kind}`, "data-bytes": `${kind} ${one[kind]}` },
            svg("title", {}, `${KIND_NAMES[kind]} ${bytes_text(one[kind])}`)));
          x += wide;
        }
      }
      row.append(svg("rect", { x: .5, y: y + BAR, width: WIDTH - 1, height: BAR, class: "figure-edge" }));
      found.append(row);
    });
    for (const gib of GPUS.filter((one) => F.usable_bytes(one) < most)) {
      const x = F.usable_bytes(gib) * scale;
      const marks = STRATEGIES.map((_, at) => `M${x} ${TOP + at * ROW + BAR - 2}v${BAR + 4}`).join("");
      found.append(svg("path", { d: marks, class: "figure-limit" }), svg("text", { x, y: bottom + 14, class: x > WIDTH - 40 ? "figure-axis figure-end" : "figure-axis" }, `${gib} GB`));
    }
    return found;
  }

  function said(now) {
    const found = held()[now], strategy = STRATEGIES[now], gib = fits(found);
    const divided = { ddp: say("每个进程都持有一切。", "Every rank holds everything."),
      zero1: say("优化器状态分给各个进程。", "The optimizer's states are divided among the ranks."),
      zero2: say("梯度也分开：归约之后只留自己的一份。", "Gradients are divided, too: after the reduction a rank keeps its part."),
      zero3: say("参数也分开：计算一层时才收集它。", "Parameters are divided, too: a block is gathered while it computes."),
      zero3_offload: say(`各自的一份在主机内存：${bytes_text(F.host_bytes(found))}。`, `A rank's part is in host memory: ${bytes_text(F.host_bytes(found))}.`) }[strategy];
    const where = gib ? say(`${gib} GB 的 GPU 放得下。`, `That fits on a GPU of ${gib} GB.`) : say("80 GB 的 GPU 放不下。", "That does not fit on a GPU of 80 GB.");
    return [`${STRATEGY_NAMES[strategy]}${say("：", ": ")}${bytes_text(F.device_bytes(found))}${say("。", ".")}`, divided, where].join(say("", " "));
  }

  const shown = player(root, { last: () => STRATEGIES.length - 1, draw, said, ended: true,
    choices: [choice(say("模型", "model"), Object.fromEntries(["small", "medium", "large", "xl"].map((one) => [one, one])), model,
      (value) => { model = value; shown.go(shown.now()); }),
    choice(say("进程数 p", "ranks p"), [2, 4, 8, 16, 64], p, (number) => { p = number; shown.go(shown.now()); })],
    extra: [element("p", { class: "tool-legend" }, ...F.KINDS.map((kind) => dot(kind, KIND_NAMES[kind])),
      element("span", {}, say("竖线：GPU 显存", "lines: memory of a GPU")))] });
});
