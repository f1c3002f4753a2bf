// The server of chapters/01_parameter_server/server.py on a clock: which version of the weights each gradient was computed
// with, and which one it meets. tests/docs/test_figures.py compares server_run with that server and its workers.
"use strict";

const courseServer = (() => {
  const must_wait = (step, works_on, bound) => bound === null || step - 1 - works_on >= bound;

  // durations[rank] = ticks of forward and backward; messages take no time; rank 0 is server and worker. bound null: synchronous.
  // [{step, at: the tick when the server takes it, gradients: those it uses, works_on: version that each rank then computes with}]
  function server_run(durations, bound, num_steps) {
    const works_on = durations.map(() => 0), began = durations.map(() => 0), found = [];
    const arrives = (rank) => began[rank] + durations[rank], workers = [...durations.keys()].slice(1);
    for (let step = 1; step <= num_steps; step++) {
      const waits_for = workers.filter((rank) => must_wait(step, works_on[rank], bound));
      const at = Math.max(arrives(0), ...waits_for.map(arrives));
      const used = [0, ...workers.filter((rank) => arrives(rank) <= at)];
      const gradients = used.map((rank) => ({ rank, version: works_on[rank], staleness: step - 1 - works_on[rank],
        began: began[rank], arrived: arrives(rank) }));
      for (const rank of used) { works_on[rank] = step; began[rank] = at; }
      found.push({ step, at, gradients, works_on: [...works_on] });
    }
    return found;
  }

  return { must_wait, server_run };
})();

if (typeof courseFigures !== "undefined") courseFigures.define("staleness", (root) => {
  const { say, element, dot } = courseTools, { svg, picture, choice, player } = courseFigures;
  const LEFT = 62, WIDTH = 360, ROW = 24, GAP = 6, TOP = 30, TICKS = 20, TICK = (WIDTH - LEFT - 14) / TICKS;
  let p = 3, slow = 5, bound = 4;
  const durations = () => [2, 2 * slow, 3, 4].slice(0, p);
  const steps = () => courseServer.server_run(durations(), bound, TICKS).filter((one) => one.at <= TICKS);
  const x = (tick) => LEFT + tick * TICK, y = (rank) => TOP + rank * (ROW + GAP);

  // A computation, with the versions that it read and met, then the wait until the server's step.
  function gradient(one, at) {
    const stale = one.staleness > 0, width = (one.arrived - one.began) * TICK - 2;
    const label = stale ? `${one.version}→${one.version + one.staleness}` : String(one.version);
    const found = svg("g", { "data-gradient": `${one.rank} ${one.version} ${one.staleness}` },
      svg("rect", { x: x(one.began) + 1, y: y(one.rank), width, height: ROW, rx: 2, class: stale ? "figure-gradients" : "figure-optimizer" }),
      svg("text", { x: x(one.began) + 1 + width / 2, y: y(one.rank) + 17, class: "figure-on", style: label.length * 9 > width ? "font-size: 10px" : "" }, label));
    if (at > one.arrived) found.append(svg("rect", { x: x(one.arrived), y: y(one.rank), width: (at - one.arrived) * TICK - 1, height: ROW, class: "figure-empty" }));
    return found;
  }

  function draw(now) {
    const taken = steps().slice(0, now), clock = taken.at(-1)?.at ?? 0, found = picture(WIDTH, y(p), say("服务器与各进程的时间线", "time line of the server and the ranks"));
    for (let rank = 0; rank < p; rank++) {
      found.append(svg("text", { x: 0, y: y(rank) + 17 }, say(`进程 ${rank}`, `rank ${rank}`)),
        svg("line", { x1: LEFT, x2: WIDTH, y1: y(rank) + ROW, y2: y(rank) + ROW, class: "figure-line" }));
      const last = taken.findLast((one) => one.gradients.some((used) => used.rank === rank))?.at ?? 0;
      if (clock > last) {
        found.append(svg("rect", { x: x(last) + 1, y: y(rank), width: (clock - last) * TICK - 2, height: ROW, rx: 2, class: "figure-gradients figure-pale" }));
      }
    }
    for (const { step, at, gradients } of taken) {
      for (const one of gradients) found.append(gradient(one, at));
      found.append(svg("path", { class: "figure-arrow", d: `M${x(at)} ${TOP - 8}V${y(p) - GAP}` }), svg("text", { x: x(at), y: 14, class: "figure-axis" }, step));
    }
    return found;
  }

  function said(now) {
    const one = steps()[now - 1];
    if (!one) return say("开始：每个进程都持有版本 0 的权重，开始计算。上方的数是服务器得到的版本。",
      "Start: every rank has version 0 of the weights and computes. The numbers on top are the versions that the server makes.");
    const stale = one.gradients.filter((used) => used.staleness), waited = one.at - one.gradients[0].arrived;
    return [say(`服务器的第 ${one.step} 步，用了 ${one.gradients.length} / ${p} 份梯度。`, `Server step ${one.step}, with ${one.gradients.length} of ${p} gradients.`),
      waited && say(`服务器等了 ${waited} 格。`, `The server waited ${waited} ticks.`),
      ...stale.map(({ rank, version, staleness }) => say(`进程 ${rank} 读的是版本 ${version}，遇到版本 ${one.step - 1}：陈旧度 ${staleness}。`,
        `Rank ${rank} read version ${version} and meets version ${one.step - 1}: staleness ${staleness}.`)),
      !stale.length && say("没有陈旧的梯度。", "None is stale.")].filter(Boolean).join(say("", " "));
  }

  const shown = player(root, { last: () => steps().length, draw, said,
    choices: [choice(say("进程数 p", "ranks p"), [2, 3, 4], p, (number) => { p = number; shown.go(0); }),
      choice(say("进程 1 放慢倍数", "slowdown of rank 1"), [1, 3, 5], slow, (number) => { slow = number; shown.go(0); }),
      choice(say("陈旧度上限（0：同步）", "staleness at most (0: synchronous)"), [0, 1, 2, 4], bound, (number) => { bound = number; shown.go(0); })],
    extra: [element("p", { class: "tool-legend" }, dot("optimizer", say("读到的就是遇到的版本", "meets the version that it read")),
      dot("gradients", say("陈旧：读到→遇到", "stale: read→met")), dot("idle", say("等待", "waits")))] });
});
