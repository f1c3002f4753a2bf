// The field below the question of a lesson: the reader types a number, and the answer unfolds beside it. Without this script the
// answer unfolds all the same (docs/generate/lessons/texts.py writes both).
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const chinese = document.documentElement.lang.startsWith("zh");
  const say = (zh, en) => (chinese ? zh : en);

  // What to tell a reader who typed `given` where `right` is the answer.
  const verdict = (given, right) => {
    if (given === right) return say("正确。", "Right.");
    const factor = given > 0 && right > 0 ? Math.max(given / right, right / given) : Infinity;
    if (factor <= 1.05) return say("很接近。", "Very close.");
    if (factor > 100) return say("差得很远。", "Far off.");
    const times = factor.toFixed(factor < 2 ? 2 : 1);
    return given > right ? say(`你的数是答案的 ${times} 倍。`, `Too large, by a factor of ${times}.`)
      : say(`答案是你的数的 ${times} 倍。`, `Too small, by a factor of ${times}.`);
  };

  document.querySelectorAll(".prediction").forEach((box, number) => {
    const answer = box.querySelector("details"), unit = box.dataset.unit, id = `prediction-${number}`;
    if (!answer) return;
    const form = document.createElement("form");
    form.noValidate = true;
    form.innerHTML = `<label for="${id}">${say("你的预测", "Your prediction")}</label>
      <input id="${id}" type="text" inputmode="decimal" autocomplete="off" aria-describedby="${id}-said">
      <span>${unit}</span> <button type="submit">${say("对照", "Compare")}</button>
      <output id="${id}-said" for="${id}" aria-live="polite"></output>`;
    const field = form.querySelector("input"), said = form.querySelector("output");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = field.value.trim().replace(/[,\s]|%$/g, "");
      const given = Number(text), wrong = text === "" || !Number.isFinite(given);
      field.setAttribute("aria-invalid", String(wrong));
      said.textContent = wrong ? say("请输入一个数，例如 12.5。", "Type a number, such as 12.5.")
        : verdict(given, Number(box.dataset.answer));
      if (wrong) field.focus();
      else answer.open = true;
    });
    answer.before(form);
  });
});
