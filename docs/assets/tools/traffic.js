// The traffic calculator: bytes that a rank sends and receives in a step, and their time next to the computation's.
"use strict";

courseTools.start("traffic-tool", (root) => {
  const { say, element, table, dot, bytes_text, seconds_text, KIND_NAMES } = courseTools, F = courseFormulas;
  const KINDS = ["gradients", "parameters", "activations"];
  const speed = { min: 1e-6, max: 1e6, step: "any" };
  const fields = [...courseTools.FIELDS.filter((field) => !field.small),
    { name: "link", label: say("链路，GB/s（每方向）", "link, GB/s each way"), ...speed },
    { name: "flops", label: say("每进程算力，TFLOP/s（实际达到）", "TFLOP/s that a rank reaches"), ...speed },
    ...courseTools.FIELDS.filter((field) => field.small)];

  function time_row(name, seconds, longest, kind) {
    return element("div", { class: "tool-row" }, element("span", {}, name), element("div", { class: "tool-bar" },
      element("span", { class: `tool-part kind-${kind}`, style: `width:${longest ? 100 * seconds / longest : 0}%` })),
    element("b", {}, seconds_text(seconds)));
  }

  function show(state, output) {
    const refused = courseTools.refused(state);
    if (refused) return output.replaceChildren(refused);
    const rows = courseTools.ranks_of(state).map(({ rank, name }) => ({ name, found: F.traffic(state, rank) }));
    const slowest = (found) => F.link_seconds(found, state.link * 1e9);
    const link = Math.max(...rows.map((row) => slowest(row.found)));
    const busiest = rows.find((row) => slowest(row.found) === link);
    const compute = F.compute_seconds(state, state.flops * 1e12), longest = Math.max(link, compute);
    const kinds = KINDS.filter((kind) => rows.some(({ found }) => found["sent_" + kind] || found["received_" + kind]));
    const has_host = rows.some(({ found }) => found.host_in || found.host_out);

    const head = [say("每个进程每步", "of a rank and step"), ...kinds.map((kind) => dot(kind, KIND_NAMES[kind])),
      say("合计", "in all"), say("链路时间", "on the link")];
    const lines = rows.flatMap(({ name, found }) => {
      const line = (way, label, total) => [`${name}${say("，", ", ")}${label}`,
        ...kinds.map((kind) => bytes_text(found[`${way}_${kind}`])), element("b", {}, bytes_text(total)),
        seconds_text(total / (state.link * 1e9))];
      return [line("sent", say("发送", "sent"), F.sent_bytes(found)),
        line("received", say("接收", "received"), F.received_bytes(found))];
    });
    const host = rows.map(({ found }) => say(
      `设备与主机之间：移出 ${bytes_text(found.host_out)}，移入 ${bytes_text(found.host_in)}。`,
      `Between device and host: ${bytes_text(found.host_out)} out, ${bytes_text(found.host_in)} in.`));
    const sent = Math.max(F.sent_bytes(busiest.found), F.received_bytes(busiest.found));
    const share = link / compute;
    const verdict = link === 0 ? say("没有通信。", "Nothing is sent.") : say(
      `通信时间是计算时间的 ${courseTools.three(100 * share)} %：${share <= 1 ? "完全重叠时可以被计算掩盖。" : "即使完全重叠，也无法被计算掩盖。"}`,
      `The link takes ${courseTools.three(100 * share)} % of the computation's time: ${share <= 1
        ? "overlapped perfectly it costs nothing." : "even perfectly overlapped, ranks wait for it."}`);
    output.replaceChildren(
      element("p", { class: "tool-said" }, say("最忙的进程每步单向传输 ", "The busiest rank moves one way in a step "),
        element("b", { id: "tool-answer", "data-bytes": sent }, bytes_text(sent))),
      element("div", { class: "tool-bars" }, time_row(say("计算", "computation"), compute, longest, "activations"),
        time_row(say("链路", "link"), link, longest, "buffers")),
      element("p", {}, verdict), table(head, lines), ...(has_host ? [element("p", {}, host[0])] : []));
  }

  courseTools.form(root, fields, { ...courseTools.JOB, link: 10, flops: 50 }, show);
});
