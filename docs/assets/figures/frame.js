// What all figures that move share: a player of steps, SVG elements, and the start at <div data-figure="name">. The element's
// own content is the text for readers without JavaScript. Keys: arrows, Home, End, space. Colours come from tools.css.
"use strict";

const courseFigures = (() => {
  const { say, element } = courseTools, SVG = "http://www.w3.org/2000/svg", FRAME_MS = 900;
  const still = matchMedia("(prefers-reduced-motion: reduce)"), makers = {};

  function svg(tag, attributes = {}, ...children) {
    const found = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
    found.append(...children);
    return found;
  }

  const picture = (width, height, label) => svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });

  // A select with its label; `change` gets the chosen value. `values` are numbers, or an object: value -> its name.
  function choice(label, values, chosen, change) {
    const named = !Array.isArray(values), options = named ? Object.entries(values) : values.map((number) => [number, number]);
    const select = element("select", { onchange: () => change(named ? select.value : Number(select.value)) },
      ...options.map(([value, text]) => element("option", { value, selected: value === chosen }, text)));
    return element("label", {}, `${label} `, select);
  }

  // A player below `choices`. last() is the number of the last step, draw(now) the picture, said(now) its sentence; `extra`
  // nodes follow. `ended`: it opens at the last step, whose picture is the whole. Returns go(step), which also draws anew after a choice.
  function player(root, { choices = [], last, draw, said, extra = [], ended = false }) {
    let now = 0, timer = null;
    const place = element("div", { class: "figure-picture" }), text = element("p", { class: "figure-said", "aria-live": "polite" });
    const clock = element("output", {}), play = element("button", { type: "button", onclick: toggle });
    const slider = element("input", { type: "range", min: 0, step: 1, "aria-label": say("步", "step"),
      oninput: () => pick(Number(slider.value)) });
    const button = (sign, title, where) => element("button", { type: "button", title, "aria-label": title,
      onclick: () => pick(where()) }, sign);

    function go(step) {
      now = Math.max(0, Math.min(last(), step));
      place.replaceChildren(draw(now));
      text.textContent = said(now);
      slider.max = last();
      slider.value = now;
      clock.textContent = `${now} / ${last()}`;
      play.textContent = timer ? say("暂停", "pause") : say("播放", "play");
      play.hidden = still.matches;
      root.dataset.step = now;
    }

    function stop() { clearInterval(timer); timer = null; }
    function pick(step) { stop(); go(step); }
    function toggle() {
      if (timer || still.matches) return pick(now);
      timer = setInterval(() => { if (now < last() && root.isConnected) go(now + 1); if (now >= last()) pick(now); }, FRAME_MS);
      go(now >= last() ? 0 : now);
    }

    root.addEventListener("keydown", (event) => {
      const keys = { ArrowLeft: () => pick(now - 1), ArrowRight: () => pick(now + 1), Home: () => pick(0),
        End: () => pick(last()), " ": toggle };
      const own = event.target.tagName === "SELECT" || (event.key === " " && event.target.tagName === "BUTTON");
      if (event.ctrlKey || event.altKey || event.metaKey || own || !(event.key in keys)) return;
      event.preventDefault();
      keys[event.key]();
    });
    root.tabIndex = 0;
    root.classList.add("figure");
    root.replaceChildren(element("div", { class: "figure-choices" }, ...choices),
      element("div", { class: "tool-player" }, button("|◀", say("到开头", "to the beginning"), () => 0),
        button("◀", say("后退一步", "a step back"), () => now - 1), play,
        button("▶", say("前进一步", "a step on"), () => now + 1),
        button("▶|", say("到结尾", "to the end"), () => last()), slider, clock),
      text, place, ...extra);
    go(ended ? last() : 0);
    return { go: pick, now: () => now };
  }

  function start() {
    for (const root of document.querySelectorAll("[data-figure]")) if (root.dataset.figure in makers) makers[root.dataset.figure](root);
  }
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", start);
  else setTimeout(start);

  return { svg, picture, choice, player, define: (name, maker) => { makers[name] = maker; } };
})();
