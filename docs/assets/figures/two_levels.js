// An all-gather of pstar in two levels (pstar/comm/two_levels.py): the way of each chunk over the nodes, as a tree. Ranks are
// numbered node by node. tests/docs/test_figures.py compares all three functions with that code.
"use strict";

const courseTwoLevels = (() => {
  const numbers = (count) => Array.from({ length: count }, (_, number) => number);
  const node_of = (rank, m) => Math.floor(rank / m), place_of = (rank, m) => rank % m;

  // [copies between nodes, copies inside nodes], each {chunk, source, target}, for n nodes of m ranks; rank r begins with chunk r.
  function gather_tree(n, m) {
    const ranks = numbers(n * m), between = [], inside = [];
    for (const chunk of ranks) {
      for (const source of ranks.filter((rank) => place_of(rank, m) === place_of(chunk, m))) {
        if (source !== chunk) between.push({ chunk, source: chunk, target: source });
        for (const target of ranks) if (target !== source && node_of(target, m) === node_of(source, m)) inside.push({ chunk, source, target });
      }
    }
    return [between, inside];
  }

  // held[rank] = the chunks that a rank has after a number of steps, in ascending order.
  function gather_held(n, m, count) {
    const held = numbers(n * m).map((rank) => [rank]);
    for (const { chunk, target } of gather_tree(n, m).slice(0, count).flat()) held[target].push(chunk);
    return held.map((chunks) => chunks.sort((a, b) => a - b));
  }

  // Chunks that each node sends to other nodes: in two levels, and in a flat ring of all ranks.
  const gather_sent = (n, m) => ({ levels: gather_tree(n, m)[0].filter((copy) => node_of(copy.source, m) === 0).length, ring: n * m - 1 });

  return { gather_tree, gather_held, gather_sent };
})();

if (typeof courseFigures !== "undefined") courseFigures.define("two-levels", (root) => {
  const { say, element, dot } = courseTools, { svg, picture, choice, player } = courseFigures, { gather_tree, gather_held, gather_sent } = courseTwoLevels;
  const WIDTH = 360, LEFT = 60, STRIP = 72, GAP = (WIDTH - LEFT - 6 - 3 * STRIP) / 2, ROW = 24, HIGH = 14, TOP = 20, HEAD = 20, SPACE = 6;
  let n = 2, m = 2, chosen = 0;
  const rank_name = (rank) => say(`进程 ${rank}`, `rank ${rank}`), chunk_name = (chunk) => say(`块 ${chunk}`, `chunk ${chunk}`);
  const left = (step) => LEFT + step * (STRIP + GAP), node_top = (node) => TOP + node * (HEAD + m * ROW + SPACE + 6);
  const top = (rank) => node_top(Math.floor(rank / m)) + HEAD + (rank % m) * ROW;

  // From the strip of a rank to that of a rank in the next column, with a head.
  function way(step, source, target, own) {
    const x1 = left(step) + STRIP + 2, y1 = top(source) + HIGH / 2, x2 = left(step + 1) - 3, y2 = top(target) + HIGH / 2;
    const angle = Math.atan2(y2 - y1, x2 - x1), side = (turn) => `L${x2 - 7 * Math.cos(angle + turn)} ${y2 - 7 * Math.sin(angle + turn)}`;
    return svg("path", own ? { class: "figure-keeps", d: `M${x1} ${y1}L${x2} ${y2}` }
      : { class: "figure-arrow", "data-way": `${chosen} ${source} ${target}`, d: `M${x1} ${y1}L${x2} ${y2}${side(.45)}M${x2} ${y2}${side(-.45)}` });
  }

  function draw(now) {
    const p = n * m, wide = STRIP / p, found = picture(WIDTH, node_top(n), say("两级全收集中的一块", "a chunk in a two-level all-gather"));
    [say("开始", "start"), say("1 网络", "1 network"), say("2 内存", "2 memory")].forEach((name, step) => found.append(
      svg("text", { x: left(step) + STRIP / 2, y: 13, class: "figure-axis" }, name)));
    for (let node = 0; node < n; node++) {
      found.append(svg("rect", { x: .5, y: node_top(node), width: WIDTH - 1, height: HEAD + m * ROW + SPACE - 6, rx: 5, class: "figure-edge" }),
        svg("text", { x: 6, y: node_top(node) + 14, class: "figure-left" }, say(`节点 ${node}`, `node ${node}`)));
    }
    for (let step = 0; step <= 2; step++) {
      const held = gather_held(n, m, step);
      for (let rank = 0; rank < p; rank++) {
        if (!step) found.append(svg("text", { x: 6, y: top(rank) + 12 }, rank_name(rank)));
        for (let chunk = 0; chunk < p; chunk++) {
          const x = left(step) + chunk * wide, has = step <= now && held[rank].includes(chunk), one = chunk === chosen;
          found.append(svg("g", { class: has && one ? "figure-came" : "", "data-has": `${step} ${rank} ${chunk} ${has}` },
            svg("title", {}, `${rank_name(rank)}, ${chunk_name(chunk)}`),
            svg("rect", { x, y: top(rank), width: wide, height: HIGH, class: has ? `figure-parameters${one ? "" : " figure-pale"}` : "figure-empty" }),
            svg("rect", { x, y: top(rank), width: wide, height: HIGH, class: "figure-edge" })));
        }
      }
    }
    gather_tree(n, m).slice(0, now).forEach((copies, step) => {
      for (let rank = 0; rank < p; rank++) if (gather_held(n, m, step)[rank].includes(chosen)) found.append(way(step, rank, rank, true));
      for (const { chunk, source, target } of copies) if (chunk === chosen) found.append(way(step, source, target, false));
    });
    return found;
  }

  function said(now) {
    const { levels, ring } = gather_sent(n, m);
    if (!now) return say(`开始：每个进程持有自己的一块，即整体的 1/${n * m}。`, `Start: each rank holds its own chunk, 1/${n * m} of the whole.`);
    if (now === 1) return say(`网络：每个进程把自己的块发给其他节点上位置相同的进程。每个节点发出 ${levels} 块；所有进程排成一个环时要发 ${ring} 块。`,
      `Network: each rank sends its chunk to the rank at the same place in every other node. A node sends ${levels} chunks; in a flat ring of all ranks it sends ${ring}.`);
    return say("内存：同一节点的进程在共享内存中交换收到的块，之后每个进程都有全部的块。没有字节经过网络。",
      "Memory: the ranks of a node exchange these chunks in shared memory. Then every rank has all of them. No byte crosses the network.");
  }

  const chunks = choice(say("块", "chunk"), [], 0, (number) => { chosen = number; shown.go(shown.now()); });
  function resize() {
    chosen = Math.min(chosen, n * m - 1);
    chunks.querySelector("select").replaceChildren(...Array.from({ length: n * m }, (_, chunk) => element("option", { value: chunk, selected: chunk === chosen }, chunk)));
    if (shown) shown.go(shown.now());
  }
  let shown = null;
  resize();
  shown = player(root, { last: () => 2, draw, said, ended: true,
    choices: [choice(say("节点数 n", "nodes n"), [2, 3, 4], n, (number) => { n = number; resize(); }),
      choice(say("每个节点的进程数", "ranks a node"), [1, 2, 3], m, (number) => { m = number; resize(); }), chunks],
    extra: [element("p", { class: "tool-legend" }, dot("parameters", say("所选的块", "the chosen chunk")),
      element("span", {}, element("span", { class: "kind kind-parameters figure-key-pale" }), say("其他块", "other chunks")),
      dot("idle", say("还没有", "not yet")), element("span", {}, say("箭头：所选块的路径", "arrows: the way of the chosen chunk")))] });
});
