// A step of ZeRO, moment by moment, as chapters/06_zero/zero/ runs it in 16 bits (2 + 2 + 12 bytes a parameter). The functions
// inside zero_moments have the names of those there; tests/docs/test_figures.py compares the table with what real ranks hold.
"use strict";

const courseZero = (() => {
  // [{phase, unit, parameters, gradients: the state of each unit, on every rank}]. Unit 0 has the parameters outside the blocks.
  function zero_moments(stage, blocks) {
    const units = [...Array(blocks + 1).keys()], back = [...units].reverse(), under_way = [], moments = [];
    let parameters = units.map(() => (stage === 3 ? "shard" : "whole")), gradients = units.map(() => "none");
    const note = (phase, unit = null) => moments.push({ phase, unit, parameters: [...parameters], gradients: [...gradients] });
    function gather(unit, after) {
      if (stage < 3) return;
      parameters[unit] = "whole";
      if (after > 0 && parameters[after] === "shard") parameters[after] = "coming";
    }
    function free(unit) { if (stage === 3) parameters[unit] = "shard"; }
    function finish(left) { while (under_way.length > left) gradients[under_way.shift()] = "mean"; }
    function reduce(unit) {
      gradients[unit] = "under way";
      under_way.push(unit);
      finish(1);
    }
    note("start");
    gather(0); note("forward", 0);
    for (const unit of units.slice(1)) { gather(unit, unit + 1); note("forward", unit); free(unit); }
    for (const unit of back.slice(0, -1)) {
      gather(unit, unit - 1);
      gradients[unit] = "whole"; note("backward", unit);
      if (stage !== 1) reduce(unit);
      free(unit);
    }
    gradients[0] = "whole"; note("backward", 0);
    for (const unit of stage === 1 ? back : [0]) { reduce(unit); note("reduce", unit); }
    finish(0); free(0); note("mean");
    gradients = units.map(() => "fp32"); note("update");
    gradients = units.map(() => "none");
    if (stage === 1 || stage === 2) { parameters = units.map(() => "coming"); note("gather"); }
    parameters = units.map(() => (stage === 3 ? "shard" : "whole")); note("end");
    return moments;
  }

  // [first, number] of a rank's elements of a unit that p divides.
  const zero_owned = (stage, p, rank, size) => (stage ? [(rank * size) / p, size / p] : [0, size]);

  // Bytes that a rank holds at a moment, with the gradients under way, when every unit has `size` parameters.
  function zero_bytes(stage, p, moment, size) {
    const own = zero_owned(stage, p, 0, size)[1], sum = (states, bytes) => states.reduce((all, state) => all + bytes[state], 0);
    const whole = 2 * size + (stage === 3 ? 2 * own : 0);
    return { parameters: sum(moment.parameters, { whole, coming: whole, shard: 2 * own }),
      gradients: sum(moment.gradients, { none: 0, whole: 2 * size, "under way": 2 * size, mean: 2 * own, fp32: 4 * own }),
      optimizer: 12 * own * moment.parameters.length };
  }

  return { zero_moments, zero_owned, zero_bytes };
})();

if (typeof courseFigures !== "undefined") courseFigures.define("zero", (root) => {
  const { say, element, dot, three } = courseTools, { svg, picture, choice, player } = courseFigures;
  const LEFT = 62, WIDTH = 360, STRIP = 12, HIGH = 62, BLOCKS = 4, MOST = 18, KINDS = ["parameters", "gradients", "optimizer"];
  let p = 2, stage = 3;
  const name = (unit) => (unit ? say(`层 ${unit - 1}`, `block ${unit - 1}`) : say("词嵌入", "embedding"));
  const moments = () => courseZero.zero_moments(stage, BLOCKS);
  const held = (moment) => courseZero.zero_bytes(stage, p, moment, 1 / (BLOCKS + 1)); // bytes a parameter
  const total = (moment) => Object.values(held(moment)).reduce((all, bytes) => all + bytes);
  const peak = (now) => Math.max(...moments().slice(0, now + 1).map(total));
  const state_of = (moment, kind, unit) => (kind === "optimizer" ? "own" : moment[kind][unit]);

  function cell(kind, rank, unit, state, came, x, y, width) {
    const [first, own] = courseZero.zero_owned(stage, p, rank, width), all = ["whole", "coming", "under way"].includes(state);
    const found = svg("g", { class: came ? "figure-came" : "", "data-state": `${kind} ${unit} ${state}` },
      svg("rect", { x, y, width, height: STRIP, class: "figure-empty" }));
    const fill = (from, wide, pale) => found.append(svg("rect", { x: x + from, y, width: wide, height: STRIP,
      class: `figure-${kind}${pale ? " figure-pale" : ""}` }));
    if (all) fill(0, width, state !== "whole");
    if (state !== "none" && state !== "whole" && !(kind === "gradients" && all)) fill(first, own, false);
    found.append(svg("rect", { x, y, width, height: STRIP, class: "figure-edge" }));
    return found;
  }

  function draw(now) {
    const moment = moments()[now], before = moments()[now - 1] ?? moment, wide = (WIDTH - LEFT) / (BLOCKS + 1), scale = (WIDTH - LEFT - 2) / MOST;
    const found = picture(WIDTH, 18 + p * HIGH, say("ZeRO：每个进程持有什么", "ZeRO: what each rank holds"));
    for (let unit = 0; unit <= BLOCKS; unit++) found.append(svg("text", { x: LEFT + (unit + .5) * wide, y: 12, class: "figure-axis" }, name(unit)));
    for (let rank = 0; rank < p; rank++) {
      const top = 18 + rank * HIGH, bar = top + 3 * STRIP + 8;
      let x = LEFT + 1;
      found.append(svg("text", { x: 0, y: top + 24 }, say(`进程 ${rank}`, `rank ${rank}`)));
      for (const [row, kind] of KINDS.entries()) {
        for (let unit = 0; unit <= BLOCKS; unit++) {
          const state = state_of(moment, kind, unit);
          found.append(cell(kind, rank, unit, state, state !== state_of(before, kind, unit), LEFT + unit * wide + 2, top + row * (STRIP + 1), wide - 4));
        }
        found.append(svg("rect", { x, y: bar, width: held(moment)[kind] * scale, height: 8, class: `figure-${kind}` }));
        x += held(moment)[kind] * scale;
      }
      const edge = LEFT + 1 + peak(now) * scale;
      found.append(svg("path", { class: "figure-arrow", d: `M${edge} ${bar - 3}v14` }));
    }
    return found;
  }

  function said(now) {
    const moment = moments()[now], { phase, unit } = moment, which = (kind, state) => moment[kind].flatMap((one, at) => (one === state ? [name(at)] : []));
    const coming = which("parameters", "coming").join(say("、", ", ")), going = which("gradients", "under way").join(say("、", ", "));
    const what = { start: say("一步开始。", "A step begins."), forward: say(`前向：${name(unit)}。`, `Forward of ${name(unit)}.`),
      backward: say(`反向：${name(unit)}，它的梯度已完整。`, `Backward of ${name(unit)}: its gradient is complete.`),
      reduce: say("反向传播结束。", "Backward is over."), mean: say("每个进程都得到了自己那部分的平均梯度。", "Every rank has the mean gradient of its own part."),
      update: say("每个进程用 fp32 梯度更新自己的那部分。", "Every rank updates its own part, with fp32 gradients."),
      gather: say("更新完成。", "The update is done."), end: say("一步结束，释放梯度。", "The step ends; gradients are freed.") }[phase];
    return [what, coming && say(`正在全收集：${phase === "gather" ? "新的参数" : coming}。`, `All-gather of ${phase === "gather" ? "the new parameters" : coming}.`),
      going && (stage ? say(`正在归约散播：${going}。`, `Reduce-scatter of ${going}.`) : say(`正在全归约：${going}。`, `All-reduce of ${going}.`)),
      say(`每个进程每个参数占 ${three(total(moment))} 字节，峰值 ${three(peak(now))}。`,
        `A rank holds ${three(total(moment))} bytes a parameter, ${three(peak(now))} at its peak.`)].filter(Boolean).join(say("", " "));
  }

  const shown = player(root, { last: () => moments().length - 1, draw, said,
    choices: [choice(say("进程数 p", "ranks p"), [2, 3, 4], p, (number) => { p = number; shown.go(shown.now()); }),
      choice(say("阶段", "stage"), [0, 1, 2, 3], stage, (number) => { stage = number; shown.go(0); })],
    extra: [element("p", { class: "tool-legend" }, dot("parameters", say("参数", "parameters")), dot("gradients", say("梯度", "gradients")),
      dot("optimizer", say("优化器状态", "optimizer states")), element("span", {}, say("浅色：传输中；竖线：峰值", "pale: under way; line: the peak")))] });
});
