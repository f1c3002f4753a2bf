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
  // Why no program of the course runs a job, with what is possible: reason -> [the field to change, the sentence].
  const upwards = (unit, above) => [0, 1, 2].map((n) => with_commas(unit * (Math.max(Math.ceil(above / unit), 1) + n))).join(", ");
  const divisors = (number) => [...Array(number).keys()].map((n) => n + 1).filter((n) => number % n === 0).join(", ");
  const REFUSALS = {
    ranks: () => ["ranks", say("单进程只有 1 个进程：把进程数改成 1，或换一种策略。",
      "A single process is one rank: set ranks to 1, or choose another strategy.")],
    precision: (job) => {
      const possible = courseFormulas.precisions_of(job.strategy).map((name) => PRECISION_NAMES[name]).join(", ");
      return ["precision", say(`课程里这种策略可选的精度：${possible}。`, `With this strategy the course has ${possible}.`)];
    },
    length: (job) => ["seq_len", say(`序列最长 ${with_commas(job.n_positions)}，即模型的位置数 n_positions。`,
      `The sequence can have at most ${with_commas(job.n_positions)} tokens, the model's n_positions.`)],
    batch: (job) => {
      const split = courseFormulas.PIPELINES.includes(job.strategy) || job.strategy === "tensor";
      const unit = (split ? 1 : job.ranks) * job.micro_batches, possible = upwards(unit, job.batch);
      return ["batch", say(
        `全局批次必须是 ${with_commas(unit)}（${split ? "微批次数" : "进程数 × 微批次数"}）的倍数，例如 ${possible}。`,
        `The global batch must be a multiple of ${with_commas(unit)} (${split ? "the micro-batches" : "ranks × micro-batches"}), `
        + `for example ${possible}.`)];
    },
    layers: (job) => {
      const v = job.strategy === "interleaved" ? job.virtual_stages : 1;
      const possible = job.n_layer % v ? "" : divisors(job.n_layer / v);
      return ["ranks", possible ? say(`层数 ${job.n_layer} 必须能被流水线的段数整除，可选的进程数：${possible}。`,
        `The ${job.n_layer} layers must be a multiple of the pipeline's stages. Possible ranks: ${possible}.`)
        : say(`层数 ${job.n_layer} 必须能被每个进程的段数 ${v} 整除。`,
          `The ${job.n_layer} layers must be a multiple of the ${v} stages of a rank.`)];
    },
    heads: (job) => ["ranks", say(`注意力头数 ${job.n_head} 必须能被进程数整除，可选的进程数：${divisors(job.n_head)}。`,
      `The ${job.n_head} heads must be a multiple of the ranks. Possible ranks: ${divisors(job.n_head)}.`)],
    micros: (job) => (job.ranks === 1 ? ["ranks", say("交错调度至少需要 2 个进程。", "The interleaved schedule needs at least 2 ranks.")]
      : ["micro_batches", multiple_of_ranks(job.ranks, job.micro_batches)]),
  };
  const multiple_of_ranks = (p, m) => say(`交错调度的微批次数必须是进程数 ${p} 的倍数，例如 ${upwards(p, m)}。`,
    `The interleaved schedule needs a multiple of ${p} micro-batches, the number of ranks: for example ${upwards(p, m)}.`);

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
  function from_address(fields, defaults, presets) {
    const state = { ...defaults }, given = new URLSearchParams(location.hash.slice(1));
    const preset = presets[given.get("model")];
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

  function to_address(fields, state, presets) {
    const preset = state.model in presets;
    const said = fields.filter((field) => !(preset && OF_THE_MODEL.includes(field.name)) && (!field.of || field.of(state)));
    const words = said.map((field) => [field.name, field.check ? Number(state[field.name]) : state[field.name]]);
    history.replaceState(null, "", "#" + new URLSearchParams(words));
  }

  // What a field can hold, as words.
  function possible(field) {
    const ends = [field.min, field.max].map((number) => number.toLocaleString("en-US", { maximumFractionDigits: 6 }));
    return field.step === undefined ? say(`请填 ${ends.join(" 到 ")} 的整数`, `a whole number from ${ends.join(" to ")}`)
      : say(`请填 ${ends.join(" 到 ")} 的数`, `a number from ${ends.join(" to ")}`);
  }

  // Adds a form to `root` and calls show(state) immediately and after every change. A field with an invalid value is marked
  // and says what it can hold; meanwhile there is no result. `presets` are the sizes of the models that the form offers.
  function form(root, fields, defaults, show, presets = PRESETS) {
    let state = from_address(fields, defaults, presets);
    const inputs = {}, boxes = {}, hints = {}, wrong = new Set();
    const main = element("div", { class: "tool-form" }), more = element("div", { class: "tool-form" });
    for (const field of fields) {
      const change = (event) => changed(field, event.target), hint = `${root.id}-${field.name}`;
      const input = field.options
        ? element("select", { onchange: change }, ...Object.entries(field.options).map(
          ([value, text]) => element("option", { value }, text)))
        : element("input", field.check ? { type: "checkbox", onchange: change } : { type: "number", inputmode: "decimal",
          min: field.min, max: field.max, step: field.step || 1, required: true, oninput: change, "aria-describedby": hint });
      input.name = field.name;
      inputs[field.name] = input;
      hints[field.name] = element("small", { id: hint, class: "tool-hint", role: "status" });
      boxes[field.name] = element("label", { class: field.check ? "tool-check" : "" },
        element("span", {}, field.label), input, ...(field.check || field.options ? [] : [hints[field.name]]));
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
      if (!field.check && !field.options && (input.value.trim() === "" || !valid(field, value))) {
        wrong.add(field.name);
        return result();
      }
      wrong.delete(field.name);
      state[field.name] = value;
      if (field.name === "model" && value in presets) {
        Object.assign(state, presets[value]);
        for (const name of Object.keys(presets[value])) wrong.delete(name);
      }
      if (OF_THE_MODEL.includes(field.name)) state.model = "custom";
      if (field.name === "strategy" && value === "single") { state.ranks = 1; wrong.delete("ranks"); }
      refresh(input);
    }

    function refresh(source = null) {
      if ("strategy" in state && "precision" in state) {
        const choices = courseFormulas.precisions_of(state.strategy);
        if (!choices.includes(state.precision)) state.precision = state.precision === "fp32" ? "fp32" : choices[1];
        for (const option of inputs.precision.options) option.hidden = option.disabled = !choices.includes(option.value);
      }
      for (const field of fields) {
        const input = inputs[field.name], hidden = Boolean(field.of && !field.of(state));
        if (hidden) wrong.delete(field.name);
        if (field.check) input.checked = state[field.name];
        else if (input !== source && !wrong.has(field.name)) input.value = state[field.name];
        boxes[field.name].hidden = hidden;
      }
      if (source) to_address(fields, state, presets);
      result();
    }

    // The result of the state, or what is wrong. A refusal names the field to change.
    function result() {
      if (wrong.size) {
        output.replaceChildren(element("p", { class: "tool-refused", role: "alert" },
          say("没有结果：请改正标出的输入。", "No result: correct the marked input.")));
      } else show({ ...state }, output);
      const refused = output.querySelector("[data-field]");
      for (const field of fields) {
        const input = inputs[field.name];
        if (field.check) continue;
        const marked = wrong.has(field.name) || (refused !== null && refused.dataset.field === field.name);
        input.setAttribute("aria-invalid", marked);
        hints[field.name].textContent = wrong.has(field.name) ? possible(field) : "";
      }
    }

    // Links of the page that set the form: <a data-set="strategy=ddp&ranks=64">
    for (const link of document.querySelectorAll("a[data-set]")) link.href = `#${link.dataset.set}`;
    addEventListener("hashchange", () => {
      if (location.hash.includes("=")) { state = from_address(fields, defaults, presets); wrong.clear(); refresh(); }
    });
    refresh();
  }

  // The ranks whose numbers differ: [{rank, name}].
  function ranks_of(job) {
    const p = job.ranks, last = p - 1, named = (rank) => ({ rank, name: say(`进程 ${rank}`, `rank ${rank}`) });
    if (job.strategy === "server" && p > 1) {
      return [{ rank: 0, name: say("进程 0，服务器", "rank 0, server") }, { rank: last, name: say("工作进程", "a worker") }];
    }
    if (courseFormulas.PIPELINES.includes(job.strategy) && p > 1) {
      return (p <= 8 ? [...Array(p).keys()] : [0, 1, Math.floor(p / 2), last]).map(named);
    }
    return [{ rank: 0, name: p > 1 ? say("每个进程", "every rank") : say("进程", "the rank") }];
  }

  // A sentence in place of a result, which marks a field.
  const refusal = (field, ...sentence) => element("p", { class: "tool-refused", role: "alert", "data-field": field }, ...sentence);

  // The reason why no program of the course runs the job, as a sentence; null if one does.
  function refused(job) {
    const reason = courseFormulas.refusal(job);
    if (!reason) return null;
    const [field, sentence] = REFUSALS[reason](job);
    return refusal(field, say("课程的程序不会运行这个设置：", "No program of the course runs this: "), sentence);
  }

  function start(id, run) {
    const go = () => { const root = document.getElementById(id); if (root) run(root); };
    if (document.readyState === "loading") addEventListener("DOMContentLoaded", go);
    else go();
  }

  return { CHINESE, say, PRESETS, FIELDS, JOB, KIND_NAMES, STRATEGY_NAMES, element, table, dot, with_commas, three, bytes_text, seconds_text,
    form, ranks_of, refusal, refused, multiple_of_ranks, start };
})();
