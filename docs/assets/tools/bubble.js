// The pipeline player: which rank computes which work, one unit of time after another, with bubble and live micro-batches.
"use strict";

courseTools.start("bubble-tool", (root) => {
  const { say, element, dot, three } = courseTools, S = courseSchedules;
  const SVG = "http://www.w3.org/2000/svg", CELL = 30, ROW = 32, LEFT = 62, TOP = 22;
  const NAMES = { naive: say("朴素：一次一个微批次", "naive: one micro-batch at a time"), gpipe: "GPipe", "1f1b": "1F1B",
    interleaved: say("交错", "interleaved") };
  const fields = [
    { name: "schedule", label: say("调度", "schedule"), options: NAMES },
    { name: "stages", label: say("进程数 p", "ranks p"), min: 1, max: 16 },
    { name: "micros", label: say("微批次数 m", "micro-batches m"), min: 1, max: 64 },
    { name: "virtual", label: say("每个进程的段数 v", "stages a rank v"), min: 1, max: 4,
      of: (state) => state.schedule === "interleaved" },
    { name: "backward", label: say("反向的时长", "a backward takes"),
      options: { 1: say("与前向相同", "as long as a forward"), 2: say("前向的两倍", "two forwards") } },
  ];
  let time = Infinity, timer = null, last = "";

  function svg(tag, attributes, text) {
    const found = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
    if (text !== undefined) found.textContent = text;
    return found;
  }

  // The grid up to the time `now`; later cells are empty.
  function grid(events, p, span, now) {
    const width = LEFT + span * CELL + 4, height = TOP + p * ROW + 4;
    const picture = svg("svg", { class: "tool-grid", role: "img", style: `width:${width}px;height:${height}px`,
      "aria-label": say("流水线时间表", "timetable of the pipeline") });
    for (let at = 0; at < span; at += span > 40 ? 5 : 1) {
      picture.append(svg("text", { x: LEFT + at * CELL + CELL / 2, y: 14, class: "tool-axis" }, at));
    }
    for (let rank = 0; rank < p; rank++) {
      const y = TOP + rank * ROW;
      picture.append(svg("text", { x: 0, y: y + 20, class: "tool-name" }, say(`进程 ${rank}`, `rank ${rank}`)));
      picture.append(svg("rect", { x: LEFT, y: y + 2, width: span * CELL, height: ROW - 4, class: "tool-idle" }));
    }
    for (const { rank, work, begin, end } of events.filter((event) => event.begin < now)) {
      const x = LEFT + begin * CELL, y = TOP + rank * ROW, chunk = Math.floor(work.stage / p);
      const box = svg("g", { class: [`tool-work tool-${work.kind} tool-chunk-${Math.min(chunk, 3)}`,
        end >= now ? "tool-now" : ""].join(" ") });
      box.append(svg("rect", { x: x + 1, y: y + 2, width: (end - begin) * CELL - 2, height: ROW - 4, rx: 3 }));
      box.append(svg("text", { x: x + (end - begin) * CELL / 2, y: y + 20 }, work.kind + work.micro + "'".repeat(chunk)));
      box.append(svg("title", {}, say(`微批次 ${work.micro}，第 ${work.stage} 段，${work.kind === "F" ? "前向" : "反向"}`,
        `micro-batch ${work.micro}, stage ${work.stage}, ${work.kind === "F" ? "forward" : "backward"}`)));
      picture.append(box);
    }
    return picture;
  }

  function stop() {
    clearInterval(timer);
    timer = null;
  }

  function show(state, output) {
    const p = state.stages, m = state.micros, v = state.schedule === "interleaved" ? state.virtual : 1;
    const order = S.orders(state.schedule, p, m, v);
    if (!order) {
      stop();
      return output.replaceChildren(courseTools.refusal("micros", courseTools.multiple_of_ranks(p, m)));
    }
    const events = S.simulate(order, 1, Number(state.backward)), span = Math.max(...events.map((event) => event.end));
    const plan = JSON.stringify([state.schedule, p, m, v, state.backward]);
    if (plan !== last) { stop(); time = span; last = plan; }
    const strategy = state.schedule === "naive" ? "layer_split" : state.schedule;
    const bubble = S.bubble(events, p), formula = courseFormulas.bubble_fraction(strategy, p, m, v);
    const rule = state.schedule === "naive" ? "(p − 1) / p" : v > 1 ? "(p − 1) / (v m + p − 1)" : "(p − 1) / (m + p − 1)";

    const frame = element("div", { class: "tool-scroll", tabindex: "0" }), clock = element("output", {});
    const slider = element("input", { type: "range", min: 0, max: span, step: 1, "aria-label": say("时刻", "time"),
      oninput: () => { stop(); go(Number(slider.value)); } });
    const play = element("button", { type: "button", onclick: toggle });
    const live = element("p", { class: "tool-live" });
    const button = (text, title, where) => element("button", { type: "button", title, "aria-label": title,
      onclick: () => { stop(); go(where()); } }, text);
    const player = element("div", { class: "tool-player" },
      button("|◀", say("到开头", "to the beginning"), () => 0),
      button("◀", say("后退一步", "a step back"), () => time - 1), play,
      button("▶", say("前进一步", "a step on"), () => time + 1),
      button("▶|", say("到结尾", "to the end"), () => span), slider, clock);

    function toggle() {
      if (timer) { stop(); return go(time); }
      if (time >= span) time = 0;
      timer = setInterval(() => { if (!frame.isConnected) stop(); else if (time >= span) { stop(); go(span); } else go(time + 1); }, 450);
      go(time);
    }

    function go(when) {
      time = Math.max(0, Math.min(span, when));
      const scrolled = frame.scrollLeft;
      frame.replaceChildren(grid(events, p, span, time));
      const now = LEFT + time * CELL, hidden = now > scrolled + frame.clientWidth || now < scrolled;
      frame.scrollLeft = timer || hidden ? Math.max(now + CELL - frame.clientWidth, 0) : scrolled;
      slider.value = time;
      clock.textContent = `${time} / ${span}`;
      play.textContent = timer ? say("暂停", "pause") : say("播放", "play");
      const peaks = order.map(S.peak_live);
      live.replaceChildren(say("保留着激活的微批次（现在 / 最多）：", "live micro-batches (now / at most): "),
        ...S.live_at(events, p, time).map((now, rank) => element("span", { class: "tool-chip" },
          `${say("进程", "rank")} ${rank}: ${now} / ${peaks[rank]}`)));
    }

    const percent = `${three(100 * formula)} %`;
    output.replaceChildren(
      element("p", { class: "tool-said" }, say("气泡 ", "bubble "),
        element("b", { id: "tool-answer", "data-share": bubble }, `${three(100 * bubble)} %`),
        say(`；公式：${rule} = ${percent}；共 ${span} 个单位时间`, `; the formula: ${rule} = ${percent}; ${span} units of time`)),
      player, frame, element("p", { class: "tool-legend" },
        dot("activations", say("F 前向", "F forward")), dot("gradients", say("B 反向", "B backward")),
        dot("idle", say("等待", "waiting")),
        ...(v > 1 ? [element("span", {}, say("' 进程的第二段，更浅", "' the rank's second stage, lighter"))] : [])), live);
    go(time);
  }

  courseTools.form(root, fields, { schedule: "1f1b", stages: 4, micros: 8, virtual: 2, backward: "1" }, show);
});
