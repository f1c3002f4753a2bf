// The memory calculator: bytes of a rank by kind as a bar and a table, and on which GPUs they fit.
"use strict";

courseTools.start("memory-tool", (root) => {
  const { say, element, table, dot, bytes_text, KIND_NAMES } = courseTools, F = courseFormulas;
  const GPUS = [8, 16, 24, 40, 80];

  // A stacked bar; widths are per cent of `largest`.
  function bar(found, largest) {
    const part = (kind, bytes, host) => element("span", {
      class: `tool-part kind-${kind}${host ? " tool-host" : ""}`, style: `width:${100 * bytes / largest}%`,
      title: `${host ? KIND_NAMES.host + say("：", ": ") : ""}${KIND_NAMES[kind]} ${bytes_text(bytes)}` });
    const near = F.KINDS.filter((kind) => found[kind]).map((kind) => part(kind, found[kind], false));
    const far = F.HOST_KINDS.filter((kind) => found[kind]).map((kind) => part(kind.slice(5), found[kind], true));
    const gap = far.length ? [element("span", { class: "tool-gap" })] : [];
    return element("div", { class: "tool-bar" }, ...near, ...gap, ...far);
  }

  function show(job, output) {
    const refused = courseTools.refused(job);
    if (refused) return output.replaceChildren(refused);
    const rows = courseTools.ranks_of(job).map(({ rank, name }) => ({ name, found: F.memory(job, rank) }));
    const all = (found) => F.device_bytes(found) + F.host_bytes(found);
    const largest = Math.max(...rows.map((row) => all(row.found)));
    const most = Math.max(...rows.map((row) => F.device_bytes(row.found)));
    const kinds = F.KINDS.filter((kind) => rows.some((row) => row.found[kind] || row.found["host_" + kind]));
    const has_host = rows.some((row) => F.host_bytes(row.found));

    const bars = rows.map(({ name, found }) => element("div", { class: "tool-row" }, element("span", {}, name),
      bar(found, largest), element("b", {}, bytes_text(F.device_bytes(found)))));
    const legend = element("p", { class: "tool-legend" }, ...kinds.map((kind) => dot(kind, KIND_NAMES[kind])),
      ...(has_host ? [element("span", {}, element("span", { class: "kind tool-host" }), KIND_NAMES.host)] : []));

    const head = [say("字节", "bytes"), ...kinds.map((kind) => dot(kind, KIND_NAMES[kind])),
      say("设备合计", "device, in all"), ...(has_host ? [KIND_NAMES.host] : [])];
    const lines = rows.map(({ name, found }) => [name, ...kinds.map((kind) => bytes_text(found[kind])),
      element("b", {}, bytes_text(F.device_bytes(found))), ...(has_host ? [bytes_text(F.host_bytes(found))] : [])]);

    const fits = GPUS.map((gib) => {
      const enough = most <= F.usable_bytes(gib);
      return element("span", { class: enough ? "tool-fits" : "tool-too-small" }, `${enough ? "✓" : "✗"} ${gib} GB`);
    });
    const params = courseTools.with_commas(F.num_parameters(job));
    output.replaceChildren(
      element("p", { class: "tool-said" }, say("参数个数 ", "parameters "), element("b", { id: "tool-parameters" }, params),
        say("；占用最多的进程 ", "; the fullest rank holds "),
        element("b", { id: "tool-answer", "data-bytes": most }, bytes_text(most))),
      element("div", { class: "tool-bars" }, ...bars), legend, table(head, lines),
      element("p", { class: "tool-chips" }, element("span", {}, say("放得下的显存：", "Fits on a GPU with")), ...fits));
  }

  courseTools.form(root, courseTools.FIELDS, courseTools.JOB, show);
});
