// The schedules of chapters/05_model_parallel/schedules.py, under the same names; tests/docs/test_tools.py compares them.
// A work is {kind: "F" or "B", stage, micro}; an event is {rank, work, begin, end}.
"use strict";

const courseSchedules = (() => {
  const NAMES = ["naive", "gpipe", "1f1b", "interleaved"];
  const key = (work) => `${work.kind} ${work.stage} ${work.micro}`;

  // Each rank's works in order; null for interleaved if p does not divide m.
  function orders(name, p, m, v = 1) {
    if (name === "interleaved" && m % p) return null;
    const found = [];
    for (let rank = 0; rank < p; rank++) {
      const numbers = [...Array(m * v).keys()];
      const forward = numbers.map((n) => nth("F", n, rank, p, v));
      const backward = numbers.map((n) => nth("B", n, rank, p, v));
      const ahead = { naive: 1, gpipe: m, "1f1b": p - rank, interleaved: 2 * (p - rank - 1) + (v - 1) * p + 1 }[name];
      found.push(one_by_one(forward, backward, Math.min(ahead, forward.length)));
    }
    return found;
  }

  function nth(kind, n, rank, p, v) {
    if (v === 1) return { kind, stage: rank, micro: n };
    const round = Math.floor(n / (p * v)), inside = n % (p * v);
    const forth = Math.floor(inside / p), chunk = kind === "F" ? forth : v - 1 - forth;
    return { kind, stage: chunk * p + rank, micro: round * p + (inside % p) };
  }

  function one_by_one(forward, backward, ahead) {
    const order = forward.slice(0, ahead);
    backward.forEach((work, n) => order.push(work, ...forward.slice(ahead + n, ahead + n + 1)));
    return order;
  }

  function needed_by(work, last) {
    if (work.kind === "F") return work.stage ? [{ kind: "F", stage: work.stage - 1, micro: work.micro }] : [];
    const own = { kind: "F", stage: work.stage, micro: work.micro };
    return work.stage === last ? [own] : [own, { kind: "B", stage: work.stage + 1, micro: work.micro }];
  }

  // When each work runs if transfers take no time.
  function simulate(order, forward = 1, backward = 1) {
    const last = Math.max(...order.flat().map((work) => work.stage));
    const done = new Map(), at = order.map(() => 0), clock = order.map(() => 0), events = [];
    const unfinished = () => order.some((works, rank) => at[rank] < works.length);
    while (unfinished()) {
      const before = events.length;
      order.forEach((works, rank) => {
        while (at[rank] < works.length) {
          const work = works[at[rank]], needs = needed_by(work, last).map(key);
          if (needs.some((need) => !done.has(need))) break;
          const begin = Math.max(clock[rank], ...needs.map((need) => done.get(need)));
          const end = begin + (work.kind === "F" ? forward : backward);
          done.set(key(work), end);
          clock[rank] = end;
          events.push({ rank, work, begin, end });
          at[rank]++;
        }
      });
      if (events.length === before) throw new Error("deadlock");
    }
    return events.sort((a, b) => a.begin - b.begin || a.rank - b.rank);
  }

  // The most forwards at any time whose backward has not run yet.
  function peak_live(works) {
    let live = 0, peak = 0;
    for (const work of works) {
      live += work.kind === "F" ? 1 : -1;
      peak = Math.max(peak, live);
    }
    return peak;
  }

  // Works whose activations each rank keeps after a number of units of time; Python has only the peak.
  function live_at(events, p, now) {
    const live = Array(p).fill(0);
    for (const { rank, work, begin, end } of events) {
      if (work.kind === "F" && begin < now) live[rank]++;
      if (work.kind === "B" && end <= now) live[rank]--;
    }
    return live;
  }

  function bubble(events, p) {
    const span = Math.max(...events.map((event) => event.end)) - Math.min(...events.map((event) => event.begin));
    return 1 - events.reduce((sum, event) => sum + event.end - event.begin, 0) / (p * span);
  }

  return { NAMES, orders, simulate, needed_by, peak_live, live_at, bubble };
})();
