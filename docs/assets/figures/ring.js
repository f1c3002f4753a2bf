// The ring all-reduce of chapters/02_ddp/ring.py, turn by turn. ring_turns has the same name there; ring_held and ring_sent
// follow from it. tests/docs/test_figures.py compares all three.
"use strict";

const courseRing = (() => {
  const remainder = (number, divisor) => ((number % divisor) + divisor) % divisor;

  // [{phase, sends: the chunk that each rank sends to the next one}]
  function ring_turns(p) {
    const turns = (phase, first) => Array.from({ length: p - 1 }, (_, turn) => (
      { phase, sends: Array.from({ length: p }, (_, rank) => remainder(rank + first - turn, p)) }));
    return [...turns("reduce-scatter", 0), ...turns("all-gather", 1)];
  }

  // After a number of turns: held[rank][chunk] = the ranks whose numbers are in that sum, in ascending order.
  function ring_held(p, count) {
    let held = Array.from({ length: p }, (_, rank) => Array.from({ length: p }, () => [rank]));
    for (const { phase, sends } of ring_turns(p).slice(0, count)) {
      const before = held.map((chunks) => chunks.map((sum) => [...sum]));
      sends.forEach((chunk, rank) => {
        const to = (rank + 1) % p, arrived = before[rank][chunk];
        held[to][chunk] = phase === "all-gather" ? arrived : [...before[to][chunk], ...arrived].sort((a, b) => a - b);
      });
    }
    return held;
  }

  // Bytes that each rank has sent after a number of turns, for a tensor that p divides.
  const ring_sent = (p, count, bytes) => count * (bytes / p);

  return { ring_turns, ring_held, ring_sent };
})();

if (typeof courseFigures !== "undefined") courseFigures.define("ring", (root) => {
  const { say, element, dot, three } = courseTools, { svg, picture, choice, player } = courseFigures;
  const LEFT = 62, WIDTH = 360, ROW = 34, GAP = 24, MB = 60;
  let p = 4;

  function arrow(x, from, to) {
    return svg("path", { class: "figure-arrow", d: `M${x} ${from}V${to}m-4 -6l4 6l4 -6` });
  }

  function draw(now) {
    const held = courseRing.ring_held(p, now), turn = courseRing.ring_turns(p)[now - 1], wide = (WIDTH - LEFT) / p;
    const top = (rank) => 18 + GAP + rank * (ROW + GAP), height = top(p) + 2;
    const found = picture(WIDTH, height, say("环形全归约", "ring all-reduce"));
    for (let chunk = 0; chunk < p; chunk++) {
      found.append(svg("text", { x: LEFT + (chunk + .5) * wide, y: 12, class: "figure-axis" }, say(`块 ${chunk}`, `chunk ${chunk}`)));
    }
    for (let rank = 0; rank < p; rank++) {
      found.append(svg("text", { x: 0, y: top(rank) + 22 }, say(`进程 ${rank}`, `rank ${rank}`)));
      for (let chunk = 0; chunk < p; chunk++) {
        const sum = held[rank][chunk], x = LEFT + chunk * wide + 3, inner = wide - 6, complete = sum.length === p;
        const came = turn && turn.sends[(rank + p - 1) % p] === chunk;
        const cell = svg("g", { class: `figure-cell${came ? " figure-came" : ""}`, "data-sum": sum.join("+") },
          svg("title", {}, sum.map((one) => say(`进程 ${one}`, `rank ${one}`)).join(" + ")),
          svg("rect", { x, y: top(rank), width: inner, height: ROW, rx: 3, class: "figure-empty" }));
        for (const one of sum) {
          cell.append(svg("rect", { x: x + (one * inner) / p, y: top(rank), width: inner / p, height: ROW, class: "figure-gradients" }));
        }
        cell.append(svg("rect", { x, y: top(rank), width: inner, height: ROW, rx: 3, class: "figure-edge" }));
        if (complete) cell.append(svg("text", { x: x + inner / 2, y: top(rank) + 23, class: "figure-on" }, "Σ"));
        found.append(cell);
      }
    }
    // from each rank down to the next one; the last rank's chunk leaves at the bottom and comes back at the top
    for (const [rank, chunk] of turn ? turn.sends.entries() : []) {
      const x = LEFT + (chunk + .5) * wide;
      found.append(arrow(x, top(rank) + ROW + 2, top(rank + 1) - 3));
      if (rank === p - 1) found.append(arrow(x, 18, top(0) - 3));
    }
    return found;
  }

  function said(now) {
    const whole = courseRing.ring_turns(p), turn = whole[now - 1];
    const sent = three(courseRing.ring_sent(p, now, MB)), all = three(courseRing.ring_sent(p, whole.length, MB));
    const bytes = say(`每个进程已发送 ${sent} MB，共需 ${all} MB。`, `Each rank has sent ${sent} of ${all} MB.`);
    if (!turn) return say(`开始：每个进程持有自己的 ${MB} MB 梯度，切成 ${p} 块。`, `Start: each rank has its own ${MB} MB of gradients, cut into ${p} chunks. `) + bytes;
    const what = turn.phase === "all-gather"
      ? say("全收集：进程 0 把总和", "All-gather: rank 0 passes the sum of ") : say("归约散播：进程 0 把", "Reduce-scatter: rank 0 sends ");
    const add = turn.phase === "all-gather" ? say("，后者复制。", " on to rank 1, which copies it. ") : say("，后者累加。", " to rank 1, which adds it. ");
    return what + say(`块 ${turn.sends[0]} 发给进程 1`, `chunk ${turn.sends[0]}`) + add + bytes;
  }

  const shown = player(root, { last: () => 2 * (p - 1), draw, said,
    choices: [choice(say("进程数 p", "ranks p"), [2, 3, 4, 5, 6], p, (number) => { p = number; shown.go(0); })],
    extra: [element("p", { class: "tool-legend" }, dot("gradients", say("已加进来的进程", "ranks whose gradients are in")),
      dot("idle", say("还没有", "not yet")), element("span", {}, say("Σ 完整的总和", "Σ the complete sum")))] });
});
