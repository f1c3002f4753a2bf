/* One training step of a real profile, frame by frame: which block of model data is in which tier.
   docs/generate/recorded/steps.py writes the data into the page, as JSON inside .chunk-steps; nothing is fetched. */
"use strict";

(function () {
  // tools.css has the colours, for light and dark pages
  const STATES = "var(--kind-optimizer)", ACTIVATIONS = "var(--kind-activations)", CHUNKS = "var(--kind-buffers)";
  const COLOURS = { param: "var(--kind-parameters)", grad: "var(--kind-gradients)", activations: ACTIVATIONS };
  const STAGES = { forward: "var(--stage-forward)", backward: "var(--stage-backward)", adam: "var(--stage-update)" };
  const FRAME_MS = 450, still = matchMedia("(prefers-reduced-motion: reduce)");
  const SVG = "http://www.w3.org/2000/svg";

  const colourOf = (kind) => COLOURS[kind] || STATES;
  const mib = (bytes) => (bytes / 2 ** 20).toFixed(1) + " MiB";

  function make(parent, name, attributes, text) {
    const svg = parent.namespaceURI === SVG || name === "svg";
    const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  /* held[i] = set of tiers of block i, after frame `last`. */
  function heldAfter(data, last) {
    const held = data.blocks.map(() => new Set());
    for (const [block, tier] of data.held) held[block].add(tier);
    for (const frame of data.frames.slice(0, last + 1)) {
      for (const [block, tier, enters] of frame.moves) {
        if (enters) held[block].add(tier); else held[block].delete(tier);
      }
    }
    return held;
  }

  function stageAt(data, ms) {
    const found = data.stages.find(([, begin, end]) => begin <= ms && ms < end);
    return found ? found[0] : "idle";
  }

  /* A board per tier: a row per kind, a column per group. Returns {tier: [cell of each block]}. */
  function drawBoards(place, data) {
    const groups = [...new Set(data.blocks.map(([, group]) => group))].sort((a, b) => a - b);
    const boards = {};
    for (const tier of data.tiers) {
      const board = make(place, "div", { class: "cs-board" });
      make(board, "div", { class: "cs-tier" }, data.words[tier]);
      const grid = make(board, "div", { class: "cs-grid", style: `--cs-columns:${groups.length}` });
      make(grid, "span", { class: "cs-name" }, data.words.group);
      for (const group of groups) make(grid, "span", { class: "cs-number" }, group);
      const cells = [];
      for (const kind of Object.keys(data.kinds)) {
        make(grid, "span", { class: "cs-name" }, data.kinds[kind]);
        for (const group of groups) {
          const cell = make(grid, "span", { class: "cs-cell", style: `--cs-colour:${colourOf(kind)}` });
          const block = data.blocks.findIndex(([k, g]) => k === kind && g === group);
          if (block < 0) continue;
          cell.title = `${data.kinds[kind]} ${group}: ${mib(data.blocks[block][2])}`;
          cells[block] = cell;
        }
      }
      boards[tier] = cells;
    }
    return boards;
  }

  /* Near bytes over time: chunks, all other bytes on top of them, the budget, and a line at the current frame. */
  function drawTime(place, data, pick) {
    const height = 90, width = 1000, top = data.budget * 1.08;
    const x = (ms) => (ms / data.ms) * width, y = (bytes) => height - (bytes / top) * height;
    const box = { class: "cs-time", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" };
    const svg = make(place, "svg", box);
    for (const [name, begin, end] of data.stages) {
      make(svg, "rect", { x: x(begin), y: 0, width: x(end) - x(begin), height, style: `fill:${STAGES[name] || "var(--kind-idle)"}` });
    }
    data.frames.forEach((frame, i) => {
      const end = i + 1 < data.frames.length ? data.frames[i + 1].ms : data.ms;
      const across = { x: x(frame.ms), width: Math.max(x(end) - x(frame.ms), 0.1) };
      const above = y(frame.near + frame.other);
      make(svg, "rect", { ...across, y: y(frame.near), height: height - y(frame.near), style: `fill:${CHUNKS}` });
      make(svg, "rect", { ...across, y: above, height: y(frame.near) - above, style: `fill:${ACTIVATIONS}` });
    });
    const line = { "vector-effect": "non-scaling-stroke", style: "stroke:currentcolor", "stroke-width": 1.5 };
    make(svg, "line", { x1: 0, x2: width, y1: y(data.budget), y2: y(data.budget), "stroke-dasharray": "6 3", ...line });
    const cursor = make(svg, "line", { y1: 0, y2: height, ...line, "stroke-width": 2.5 });
    svg.addEventListener("click", (event) => {
      const place = svg.getBoundingClientRect(), ms = ((event.clientX - place.left) / place.width) * data.ms;
      const after = data.frames.findIndex((frame) => frame.ms > ms);
      pick((after < 0 ? data.frames.length : after) - 1);
    });
    return (ms) => { for (const key of ["x1", "x2"]) cursor.setAttribute(key, x(ms)); };
  }

  /* A bar of near bytes against the budget, one part per kind, and its legend. */
  function drawBar(place, data) {
    const names = { ...data.kinds, activations: data.words.activations };
    const bar = make(place, "div", { class: "cs-bar" });
    const legend = make(place, "div", { class: "cs-legend" });
    const sumText = make(legend, "strong");
    const parts = {};
    for (const kind of Object.keys(names)) {
      const entry = make(legend, "span");
      make(entry, "i", { style: `background:${colourOf(kind)}` });
      const width = make(bar, "span", { style: `background:${colourOf(kind)}` });
      parts[kind] = { entry, width, text: make(entry, "span") };
    }
    return (held, frame) => {
      const bytes = Object.fromEntries(Object.keys(names).map((kind) => [kind, 0]));
      data.blocks.forEach(([kind, , size], block) => { if (held[block].has("near")) bytes[kind] += size; });
      bytes.activations = frame.other;
      let sum = 0;
      for (const [kind, amount] of Object.entries(bytes)) {
        sum += amount;
        parts[kind].width.style.width = `${(100 * amount) / data.budget}%`;
        parts[kind].text.textContent = `${names[kind]} ${mib(amount)}`;
        parts[kind].entry.hidden = amount === 0;
      }
      sumText.textContent = `${data.words.near}: ${mib(sum)} / ${mib(data.budget)}`;
    };
  }

  function show(root) {
    const data = JSON.parse(root.querySelector("script").textContent);
    const words = data.words, last = data.frames.length - 1;
    let now = 0, timer = null;
    root.textContent = "";
    root.tabIndex = 0;

    const controls = make(root, "div", { class: "cs-controls" });
    const button = (text, label, act) => {
      const node = make(controls, "button", { type: "button", "aria-label": label, title: label }, text);
      node.addEventListener("click", act);
      return node;
    };
    button("|◀", words.first, () => pick(0));
    button("◀", words.back, () => pick(now - 1));
    const play = button("", words.play, toggle);
    play.classList.add("cs-play");
    play.hidden = still.matches;
    button("▶", words.next, () => pick(now + 1));
    const slider = make(controls, "input", { type: "range", min: 0, max: last, value: 0, "aria-label": words.place });
    slider.addEventListener("input", () => pick(Number(slider.value)));

    const said = make(root, "p", { class: "cs-said" });
    const moveTime = drawTime(root, data, pick);
    const moveBar = drawBar(root, data);
    const boards = drawBoards(root, data);

    function go(frame) {
      now = Math.min(Math.max(frame, 0), last);
      const held = heldAfter(data, now), entry = data.frames[now];
      const moved = new Set(entry.moves.map(([block, tier]) => `${block} ${tier}`));
      for (const [tier, cells] of Object.entries(boards)) {
        cells.forEach((cell, block) => {
          cell.classList.toggle("cs-here", held[block].has(tier));
          cell.classList.toggle("cs-moved", moved.has(`${block} ${tier}`));
        });
      }
      moveBar(held, entry);
      moveTime(entry.ms);
      slider.value = now;
      const [kind, group, size] = data.blocks[entry.block] || [];
      said.textContent = "";
      make(said, "b", {}, `${now} / ${last} · ${entry.ms.toFixed(1)} ms · ${words[stageAt(data, entry.ms)]}`);
      make(said, "span", {}, (kind ? `${data.kinds[kind]} ${group} (${mib(size)}): ` : "") + words[entry.said]);
      root.dataset.frame = now;
    }

    function pick(frame) {
      stop();
      go(frame);
    }

    function label(text) {
      play.textContent = text;
      play.title = text;
      play.setAttribute("aria-label", text);
    }

    function stop() {
      clearInterval(timer);
      timer = null;
      label(words.play);
    }

    function toggle() {
      if (timer !== null || still.matches) return stop();
      if (now === last) go(0);
      label(words.pause);
      timer = setInterval(() => { if (now < last) go(now + 1); else stop(); }, FRAME_MS);
    }

    root.addEventListener("keydown", (event) => {
      const keys = { ArrowLeft: () => pick(now - 1), ArrowRight: () => pick(now + 1), Home: () => pick(0),
                     End: () => pick(last), " ": toggle };
      const ownSpace = event.key === " " && event.target.tagName === "BUTTON";
      if (event.ctrlKey || event.altKey || event.metaKey || ownSpace || !(event.key in keys)) return;
      event.preventDefault();
      keys[event.key]();
    });
    stop();
    go(Number(new URLSearchParams(location.search).get("frame")) || 0);
  }

  const start = () => document.querySelectorAll(".chunk-steps").forEach(show);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
})();
