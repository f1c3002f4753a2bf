// Code that the calculators share: texts in the page's language, the form of a job, its state in the address, number texts.
"use strict";

const courseTools = (() => {
  const CHINESE = document.documentElement.lang.startsWith("zh");
  const say = (zh, en) => (CHINESE ? zh : en);

  // gpt2_chinese/model/config.py, PRESETS and RUN_DEFAULTS; tiny with the shipped vocabulary, the others with GPT-2's.
  const PRESETS = {
    tiny: { n_layer: 4, n_embd: 128, n_head: 4, n_positions: 128, vocab_size: 3980, batch: 24, seq_len: 128 },
    small: { n_layer: 12, n_embd: 768, n_head: 12, n_positions: 1024, vocab_size: 50257, batch: 16, seq_len: 512 },
    medium: { n_layer: 24, n_embd: 1024, n_head: 16, n_positions: 1024, vocab_size: 50257, batch: 16, seq_len: 512 },
    large: { n_layer: 36, n_embd: 1280, n_head: 20, n_positions: 1024, vocab_size: 50257, batch: 16, seq_len: 512 },
    xl: { n_layer: 48, n_embd: 1600, n_head: 25, n_positions: 1024, vocab_size: 50257, batch: 16, seq_len: 512 },
  };
  const OF_THE_MODEL = ["n_layer", "n_embd", "n_head", "n_positions", "vocab_size"];

  const STRATEGY_NAMES = {
    single: say("单进程（00）", "one process (00)"),
    server: say("参数服务器（01）", "parameter server (01)"),
    ddp: say("数据并行 DDP（02）", "data parallel, DDP (02)"),
    horovod: say("Horovod（03）", "Horovod (03)"),
    layer_split: say("朴素按层切分（05）", "naive layer split (05)"),
    gpipe: say("流水线 GPipe（05）", "pipeline, GPipe (05)"),
    "1f1b": say("流水线 1F1B（05）", "pipeline, 1F1B (05)"),
    interleaved: say("流水线，交错（05）", "pipeline, interleaved (05)"),
    tensor: say("张量并行（05）", "tensor parallel (05)"),
    zero1: say("ZeRO 阶段 1（06）", "ZeRO stage 1 (06)"),
    zero2: say("ZeRO 阶段 2（06）", "ZeRO stage 2 (06)"),
    zero3: say("ZeRO 阶段 3（06）", "ZeRO stage 3 (06)"),
    zero1_offload: say("ZeRO 1，状态卸载（06）", "ZeRO 1, states offloaded (06)"),
    zero2_offload: say("ZeRO 2，状态卸载（06）", "ZeRO 2, states offloaded (06)"),
    zero3_offload: say("ZeRO 3，全部卸载（06）", "ZeRO 3, all offloaded (06)"),
    pstar: say("PatrickStar（07）", "PatrickStar (07)"),
  };
  const PRECISION_NAMES = {
    fp32: "fp32", O1: say("O1（autocast）", "O1 (autocast)"), O2: say("O2（16 位 + 主权重）", "O2 (16 bit + masters)"),
    O3: say("O3（全部 16 位）", "O3 (all 16 bit)"), bf16: "bf16", fp16: "fp16",
  };
  const KIND_NAMES = {
    parameters: say("参数", "parameters"), gradients: say("梯度", "gradients"), optimizer: say("优化器状态", "optimizer states"),
    activations: say("激活", "activations"), buffers: say("缓冲区", "buffers"), host: say("主机内存", "host memory"),
  };
  const REFUSALS = {
    ranks: say("单进程只有 1 个进程。", "One process is 1 rank."),
    precision: say("课程里这种策略没有这种精度。", "The course has no such precision with this strategy."),
    length: say("序列比模型的位置数（n_positions）长。", "The sequence is longer than the model has positions."),
    batch: say("全局批次不能被“进程数 × 微批次数”整除（流水线和张量并行：不能被微批次数整除）。",
      "The global batch does not divide by ranks × micro-batches (by micro-batches, where the model is split)."),
    layers: say("层数不能被流水线的段数整除。", "The layers do not divide by the stages of the pipeline."),
    heads: say("注意力头数不能被进程数整除。", "The heads do not divide by the ranks."),
    micros: say("交错调度要求至少 2 个进程，且微批次数能被进程数整除。",
      "Interleaved wants at least 2 ranks, and micro-batches that divide by them."),
  };

  // ---- elements

  function element(tag, attributes = {}, ...children) {
    const found = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
      else if (value !== false && value !== null) found.setAttribute(name, value === true ? "" : value);
    }
    found.append(...children);
    return found;
  }

  function table(head, rows) {
    const line = (cells, tag) => element("tr", {}, ...cells.map((cell, n) => element(
      n ? tag : "th", n ? {} : { scope: tag === "th" ? "col" : "row" }, cell)));
    return element("div", { class: "tool-scroll", tabindex: "0" }, element("table", { class: "tool-table" },
      element("thead", {}, line(head, "th")), element("tbody", {}, ...rows.map((row) => line(row, "td")))));
  }

  const dot = (kind, text) => element("span", {}, element("span", { class: `kind kind-${kind}` }), text);

  // ---- numbers as text, as docs/generate/arithmetic/arithmetic.py writes them

  const with_commas = (number, digits = 0) => number.toLocaleString("en-US",
    { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const three = (value) => with_commas(value, value < 10 ? 2 : value < 100 ? 1 : 0);

  function bytes_text(bytes) {
    if (bytes === 0) return "0";
    if (bytes < 2 ** 20) return `${three(bytes / 1024)} KiB`;
    return bytes < 2 ** 30 ? `${three(bytes / 2 ** 20)} MiB` : `${three(bytes / 2 ** 30)} GiB`;
  }

  function seconds_text(seconds) {
    if (seconds === 0) return "0";
    if (seconds < 1e-3) return `${three(seconds * 1e6)} µs`;
    return seconds < 1 ? `${three(seconds * 1e3)} ms` : `${three(seconds)} s`;
  }

  // ---- the form

  // Fields of a job. A number is whole unless its field has a `step`. It is at least `min` and at most `max`.
  const FIELDS = [
    { name: "model", label: say("模型", "model"), options: { ...Object.fromEntries(Object.keys(PRESETS).map((name) => [
      name, name === "small" ? say("small（124M）", "small (124M)") : name])), custom: say("自定义", "of your own") } },
    { name: "strategy", label: say("策略（章）", "strategy (chapter)"), options: STRATEGY_NAMES },
    { name: "precision", label: say("精度", "precision"), options: PRECISION_NAMES },
    { name: "ranks", label: say("进程数 p", "ranks p"), min: 1, max: 4096 },
    { name: "batch", label: say("全局批次（序列）", "global batch, sequences"), min: 1, max: 1e6 },
    { name: "seq_len", label: say("序列长度", "sequence length"), min: 1, max: 1e6 },
    { name: "micro_batches", label: say("微批次数 m", "micro-batches m"), min: 1, max: 4096 },
    { name: "virtual_stages", label: say("每个进程的段数 v", "stages a rank v"), min: 1, max: 16,
      of: (job) => job.strategy === "interleaved" },
    { name: "near_percent", label: say("近端预算（全部模型数据的 %）", "near budget, % of all model data"), min: 0, max: 100,
      of: (job) => job.strategy === "pstar" },
    { name: "checkpointing", label: say("激活检查点", "checkpointing"), check: true },
    ...[["n_layer", "n_layer", 1024], ["n_embd", "n_embd", 65536], ["n_head", "n_head", 1024],
      ["vocab_size", say("词表大小", "vocabulary"), 1e7], ["n_positions", "n_positions", 1e6]].map(
      ([name, label, max]) => ({ name, label, min: 1, max, small: true })),
  ];
  const JOB = { model: "small", strategy: "ddp", precision: "O2", ranks: 4, micro_batches: 1, checkpointing: false,
    virtual_stages: 2, near_percent: 25, ...PRESETS.small };

  // Reads the address after #; an invalid value is replaced by its default.
  function from_address(fields, defaults) {
    const state = { ...defaults }, given = new URLSearchParams(location.hash.slice(1));
    const preset = PRESETS[given.get("model")];
    if (preset && "model" in defaults) Object.assign(state, preset);
    for (const field of fields) {
      const value = given.get(field.name);
      if (value === null) continue;
      if (field.options && value in field.options) state[field.name] = value;
      else if (field.check) state[field.name] = value === "1";
      else if (!field.options && value.trim() !== "" && valid(field, Number(value))) state[field.name] = Number(value);
    }
    return state;
  }

  const valid = (field, value) => Number.isFinite(value) && value >= field.min && value <= field.max
    && (field.step !== undefined || Number.isInteger(value));

  function to_address(fields, state) {
    const preset = state.model in PRESETS;
    const said = fields.filter((field) => !(preset && OF_THE_MODEL.includes(field.name)) && (!field.of || field.of(state)));
    const words = said.map((field) => [field.name, field.check ? Number(state[field.name]) : state[field.name]]);
    history.replaceState(null, "", "#" + new URLSearchParams(words));
  }

  // Adds a form to `root` and calls show(state) immediately and after every change.
  function form(root, fields, defaults, show) {
    let state = from_address(fields, defaults);
    const inputs = {}, boxes = {};
    const main = element("div", { class: "tool-form" }), more = element("div", { class: "tool-form" });
    for (const field of fields) {
      const change = (event) => changed(field, event.target);
      const input = field.options
        ? element("select", { onchange: change }, ...Object.entries(field.options).map(
          ([value, text]) => element("option", { value }, text)))
        : element("input", field.check ? { type: "checkbox", onchange: change } : { type: "number", inputmode: "decimal",
          min: field.min, max: field.max, step: field.step || 1, required: true, oninput: change });
      input.name = field.name;
      inputs[field.name] = input;
      boxes[field.name] = element("label", { class: field.check ? "tool-check" : "" },
        element("span", {}, field.label), input);
      (field.small ? more : main).append(boxes[field.name]);
    }
    root.replaceChildren(main);
    if (more.childElementCount) {
      root.append(element("details", { class: "tool-more", open: state.model === "custom" },
        element("summary", {}, say("模型的尺寸", "sizes of the model")), more));
    }
    const output = element("div", { class: "tool-output", "aria-live": "polite" });
    root.append(output);

    function changed(field, input) {
      const value = field.check ? input.checked : field.options ? input.value : Number(input.value);
      const wrong = !field.check && !field.options && (input.value === "" || !valid(field, value));
      input.setAttribute("aria-invalid", wrong);
      if (wrong) return;
      state[field.name] = value;
      if (field.name === "model" && value in PRESETS) Object.assign(state, PRESETS[value]);
      if (OF_THE_MODEL.includes(field.name)) state.model = "custom";
      if (field.name === "strategy" && value === "single") state.ranks = 1;
      refresh(input);
    }

    function refresh(source = null) {
      if ("strategy" in state && "precision" in state) {
        const choices = courseFormulas.precisions_of(state.strategy);
        if (!choices.includes(state.precision)) state.precision = state.precision === "fp32" ? "fp32" : choices[1];
        for (const option of inputs.precision.options) option.hidden = option.disabled = !choices.includes(option.value);
      }
      for (const field of fields) {
        const input = inputs[field.name];
        if (field.check) input.checked = state[field.name];
        else if (input !== source) { input.value = state[field.name]; input.removeAttribute("aria-invalid"); }
        boxes[field.name].hidden = Boolean(field.of && !field.of(state));
      }
      if (source) to_address(fields, state);
      show({ ...state }, output);
    }

    addEventListener("hashchange", () => {
      if (location.hash.includes("=")) { state = from_address(fields, defaults); refresh(); }
    });
    refresh();
  }

  // The ranks whose numbers differ: [{rank, name}].
  function ranks_of(job) {
    const p = job.ranks, last = p - 1, named = (rank) => ({ rank, name: say(`${rank} 号进程`, `rank ${rank}`) });
    if (job.strategy === "server" && p > 1) {
      return [{ rank: 0, name: say("0 号，服务器", "rank 0, server") }, { rank: last, name: say("工作进程", "a worker") }];
    }
    if (courseFormulas.PIPELINES.includes(job.strategy) && p > 1) {
      return (p <= 8 ? [...Array(p).keys()] : [0, 1, Math.floor(p / 2), last]).map(named);
    }
    return [{ rank: 0, name: p > 1 ? say("每个进程", "every rank") : say("进程", "the rank") }];
  }

  // The reason why no program of the course runs the job, as a sentence; null if one does.
  function refused(job) {
    const reason = courseFormulas.refusal(job);
    return reason ? element("p", { class: "tool-refused", role: "alert" },
      say("课程的程序不会运行这个设置：", "No program of the course runs this: "), REFUSALS[reason]) : null;
  }

  function start(id, run) {
    const go = () => { const root = document.getElementById(id); if (root) run(root); };
    if (document.readyState === "loading") addEventListener("DOMContentLoaded", go);
    else go();
  }

  return { CHINESE, say, PRESETS, FIELDS, JOB, KIND_NAMES, element, table, dot, with_commas, three, bytes_text, seconds_text,
    form, ranks_of, refused, start };
})();
