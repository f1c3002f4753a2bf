// The schedules of chapter 05, one unit of time after the other: what each rank computes, and how many micro-batches it keeps.
// Orders, times and bubble are those of tools/schedules.js; tests/docs/test_embedded.py compares the picture with the chapter.
"use strict";

if (typeof courseFigures !== "undefined") courseFigures.define("pipeline", (root) => {
  const { say, element, dot, three } = courseTools, { svg, picture, choice, player } = courseFigures, S = courseSchedules;
  const LEFT = 56, RIGHT = 34, WIDTH = 360, TOP = 22, ROW = 26, GAP = 4;
  const NAMES = { naive: say("朴素", "naive"), gpipe: "GPipe", "1f1b": "1F1B", interleaved: say("交错", "interleaved") };
  let name = "1f1b", p = 4, m = 8;

  // The whole step; null if the schedule does not take this number of micro-batches.
  function step() {
    const v = name === "interleaved" ? 2 : 1, order = S.orders(name, p, m, v);
    if (!order) return null;
    const events = S.simulate(order);
    return { v, order, events, span: Math.max(...events.map((event) => event.end)), bubble: S.bubble(events, p) };
  }
  const text_of = (work) => `${work.kind} ${work.micro}${work.stage >= p ? "'" : ""}`;
  const last = () => step()?.span ?? 0;

  function draw(now) {
    const whole = step(), height = TOP + p * (ROW + GAP), found = picture(WIDTH, height, say("流水线时间表", "timetable of the pipeline"));
    if (!whole) return found;
    const unit = (WIDTH - LEFT - RIGHT) / whole.span, live = S.live_at(whole.events, p, now), y = (rank) => TOP + rank * (ROW + GAP);
    for (let at = 0; at < whole.span; at += whole.span > 24 ? 10 : whole.span > 12 ? 5 : 1) {
      found.append(svg("text", { x: LEFT + (at + .5) * unit, y: 13, class: "figure-axis" }, at + 1));
    }
    found.append(svg("text", { x: WIDTH, y: 13, class: "figure-axis figure-end" }, say("保留", "kept")));
    for (let rank = 0; rank < p; rank++) {
      found.append(svg("text", { x: 0, y: y(rank) + 18 }, say(`进程 ${rank}`, `rank ${rank}`)),
        svg("rect", { x: LEFT, y: y(rank), width: whole.span * unit, height: ROW, class: "figure-empty" }),
        svg("text", { x: WIDTH, y: y(rank) + 18, class: "figure-axis figure-end", "data-live": live[rank] },
          `${live[rank]}/${S.peak_live(whole.order[rank])}`));
    }
    for (const { rank, work, begin, end } of whole.events.filter((event) => event.begin < now)) {
      const x = LEFT + begin * unit, wide = (end - begin) * unit, second = work.stage >= p, narrow = unit < 7;
      const cell = svg("g", { class: end === now ? "figure-came" : "", "data-work": [work.kind, work.stage, work.micro, rank, begin, end].join(" ") },
        svg("title", {}, say(`微批次 ${work.micro}，第 ${work.stage} 段，${work.kind === "F" ? "前向" : "反向"}`,
          `micro-batch ${work.micro}, stage ${work.stage}, ${work.kind === "F" ? "forward" : "backward"}`)),
        svg("rect", { x: x + (narrow ? 0 : .5), y: y(rank), width: wide - (narrow ? 0 : 1), height: ROW,
          class: `figure-${work.kind === "F" ? "activations" : "gradients"}${second ? " figure-pale" : ""}` }),
        svg("rect", { x, y: y(rank), width: wide, height: ROW, class: "figure-edge" }));
      if (!narrow) cell.append(svg("text", { x: x + wide / 2, y: y(rank) + 17, class: second ? "figure-number" : "figure-number figure-on" }, work.micro));
      found.append(cell);
    }
    return found;
  }

  function said(now) {
    const whole = step();
    if (!whole) return courseTools.multiple_of_ranks(p, m);
    const rule = name === "naive" ? "(p − 1) / p" : whole.v > 1 ? "(p − 1) / (v m + p − 1)" : "(p − 1) / (m + p − 1)";
    const share = say(`整步的气泡：${three(100 * whole.bubble)} %，即 ${rule}。`, `Bubble of the whole step: ${three(100 * whole.bubble)} %, ${rule}.`);
    if (!now) return say(`开始：${m} 个微批次在进程 0 排队。方格里的数是微批次的编号。`,
      `Start: ${m} micro-batches queue at rank 0. The number in a cell is the micro-batch's. `) + share;
    const doing = Array.from({ length: p }, (_, rank) => {
      const event = whole.events.find((one) => one.rank === rank && one.begin < now && now <= one.end);
      return event ? say(`进程 ${rank} 做 ${text_of(event.work)}`, `rank ${rank} does ${text_of(event.work)}`)
        : say(`进程 ${rank} 等待`, `rank ${rank} waits`);
    });
    return say(`第 ${now} / ${whole.span} 个单位时间：${doing.join("，")}。`, `Unit ${now} of ${whole.span}: ${doing.join(", ")}. `) + share;
  }

  const shown = player(root, { last, draw, said, ended: true,
    choices: [choice(say("调度", "schedule"), NAMES, name, (value) => { name = value; shown.go(last()); }),
      choice(say("进程数 p", "ranks p"), [2, 3, 4], p, (number) => { p = number; shown.go(last()); }),
      choice(say("微批次数 m", "micro-batches m"), [1, 2, 4, 8], m, (number) => { m = number; shown.go(last()); })],
    extra: [element("p", { class: "tool-legend" }, dot("activations", say("F 前向", "F forward")), dot("gradients", say("B 反向", "B backward")),
      dot("idle", say("等待", "waiting")), element("span", {}, say("浅色：交错调度的第二段，每段只有一半的层；保留：现在 / 最多",
        "pale: the second stage of interleaved, half the layers each; kept: now / at most")))] });
});
