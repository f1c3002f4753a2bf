// The dynamic loss scale of chapters/04_apex/loss_scaler.py over a sequence of overflows that the reader chooses;
// tests/docs/test_figures.py compares loss_scales with that LossScaler.
"use strict";

const courseScale = (() => {
  const FIRST = 2 ** 16, LARGEST = 2 ** 24, BACKOFF = 0.5, GROWTH = 2, PATIENCE = 20;

  // For each step {scale: used in it, skipped, next: the scale after it, good: good steps in a row since the last change}.
  // Ends before the step that would be the PATIENCE-th skipped one in a row, where the program gives up.
  function loss_scales(overflows, window) {
    let value = FIRST, good = 0, skipped = 0;
    const found = [];
    for (const overflow of overflows) {
      const scale = value;
      skipped = overflow ? skipped + 1 : 0;
      good = overflow ? 0 : good + 1;
      if (skipped === PATIENCE) break;
      if (overflow) value *= BACKOFF;
      else if (good === window) { value = Math.min(value * GROWTH, LARGEST); good = 0; }
      found.push({ scale, skipped: overflow, next: value, good });
    }
    return found;
  }

  return { FIRST, LARGEST, BACKOFF, GROWTH, PATIENCE, loss_scales };
})();

if (typeof courseFigures !== "undefined") courseFigures.define("loss-scale", (root) => {
  const { say, element, dot, with_commas } = courseTools, { svg, picture, choice, player } = courseFigures;
  const STEPS = 16, WIDTH = 360, HEIGHT = 170, LEFT = 40, BOTTOM = 18;
  const overflows = Array.from({ length: STEPS }, (_, step) => [0, 1, 10].includes(step));
  let window = 4;

  function draw(now) {
    const trace = courseScale.loss_scales(overflows, window), wide = (WIDTH - LEFT) / STEPS;
    const powers = trace.map((one) => Math.log2(one.scale)), most = Math.max(...powers, 16) + 1, least = Math.min(...powers, 16) - 1;
    const y = (power) => 6 + ((most - power) / (most - least)) * (HEIGHT - BOTTOM - 6);
    const found = picture(WIDTH, HEIGHT, say("每一步的损失缩放", "loss scale at each step"));
    for (let power = least; power <= most; power += most - least > 8 ? 2 : 1) {
      found.append(svg("line", { x1: LEFT, x2: WIDTH, y1: y(power), y2: y(power), class: "figure-line" }),
        svg("text", { x: LEFT - 6, y: y(power) + 4, class: "figure-axis figure-end" }, `2^${power}`));
    }
    trace.slice(0, now).forEach((one, step) => {
      const top = y(Math.log2(one.scale));
      found.append(svg("rect", { x: LEFT + step * wide + 1, y: top, width: wide - 2, height: HEIGHT - BOTTOM - top,
        class: one.skipped ? "figure-skipped" : "figure-stepped", "data-scale": one.scale },
      svg("title", {}, `${step}: ${with_commas(one.scale)}`)));
    });
    for (let step = 0; step < STEPS; step += 5) {
      found.append(svg("text", { x: LEFT + (step + .5) * wide, y: HEIGHT - 4, class: "figure-axis" }, step));
    }
    return found;
  }

  function said(now) {
    const one = courseScale.loss_scales(overflows, window)[now - 1];
    if (!one) return say(`开始：缩放是 ${with_commas(courseScale.FIRST)}。下面选出梯度溢出的步。`,
      `Start: the scale is ${with_commas(courseScale.FIRST)}. Choose below the steps whose gradients overflow.`);
    const scale = with_commas(one.scale), next = with_commas(one.next);
    if (one.skipped) return say(`步 ${now - 1}：缩放 ${scale}，梯度溢出。所有进程跳过这一步，缩放减半为 ${next}。`,
      `Step ${now - 1}: at scale ${scale} a gradient overflows. All ranks skip the step and halve the scale to ${next}.`);
    if (one.next > one.scale) return say(`步 ${now - 1}：缩放 ${scale}，连续第 ${window} 个正常的步。缩放加倍为 ${next}。`,
      `Step ${now - 1}: good step ${window} in a row at scale ${scale}. The scale is doubled to ${next}.`);
    return say(`步 ${now - 1}：缩放 ${scale}，正常更新；窗口中 ${one.good} / ${window}。`,
      `Step ${now - 1}: a good step at scale ${scale}; ${one.good} of ${window} in the window.`);
  }

  const toggles = overflows.map((on, step) => {
    const toggle = element("button", { type: "button", "aria-pressed": String(on), "aria-label": say(`步 ${step} 溢出`, `step ${step} overflows`),
      onclick: () => {
        overflows[step] = !overflows[step];
        toggle.setAttribute("aria-pressed", overflows[step]);
        shown.go(step + 1);
      } }, step);
    return toggle;
  });
  const shown = player(root, { last: () => STEPS, draw, said,
    choices: [choice(say("窗口", "window"), [1, 2, 4, 8], window, (number) => { window = number; shown.go(shown.now()); })],
    extra: [element("p", { class: "figure-label" }, say("溢出的步：", "Steps that overflow:")),
      element("div", { class: "figure-toggles" }, ...toggles), element("p", { class: "tool-legend" },
        dot("optimizer", say("更新", "update")), element("span", {}, element("span", { class: "kind figure-key-skipped" }), say("跳过", "skipped")))] });
});
